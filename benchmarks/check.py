"""Is a timed result right? No row is written unless this says so, on the very tensors and shape that are timed.

The rule is that of `rowmax.testing`: an element may differ from the fp64 result by what the rounding of its own terms
explains, and the root mean square error may not exceed that of the textbook computation in the same type by more than a
little. Here it is applied to a sample, which costs a fraction of a second where the whole would cost a minute, and is
computed once for all candidates: 64 query rows for the output; for the gradients, rows of dQ and keys of dK and dV of a few
KV heads. Every element, sampled or not, must be finite: outputs are poisoned with NaN before the call.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

import torch

from rowmax.numerics import TINY, UNIT_ROUNDOFF
from rowmax.problem import Operands, Problem
from scores import Rows
from shapes import BACKWARD, FORWARD

# The constants of verification's rule. Storage type -> (c, what multiplies S A).
_ELEMENT = {
    "bf16": (2.0, 4 * 2.0**-24),
    "fp16": (2.0, 4 * 2.0**-24),
    "fp32": (16.0, 16 * 2.0**-24),
    "fp64": (32.0, 32 * 2.0**-53),
}
_PEER_DV = 1.5  # c = 3 for the dV of others: torch's CPU kernel adds it up in low precision and is not ours to mend
_RMS = {"out": (1.1, 0.02), "dq": (1.25, 0.25), "dk": (1.25, 0.25), "dv": (1.25, 0.25)}
_HEADS_FORWARD, _ROWS_FORWARD = 8, 8
_KV_HEADS_BACKWARD, _ROWS_BACKWARD, _KEYS_BACKWARD = 2, 32, 32
_PAIRS_BACKWARD = 2**33  # one head of 65536 tokens counts 2^32; more than this and only one KV head is checked
_CHUNK = {"cpu": 2**21, "cuda": 2**26}  # scores of one piece of the oracle


def names(problem: Problem, which: str) -> tuple[str, ...]:
    """Of the results of a pass, in the order in which they are returned."""
    return ("out",) if which == FORWARD else ("dq", "dk", "dv", *["dsink"] * problem.sink, *["dbias"] * bool(problem.bias))


class Expected(NamedTuple):
    """Sampled elements of one tensor: where they are, and in fp64 the definition, the textbook result, A and the bound."""

    name: str
    index: tuple
    wide: torch.Tensor
    naive: torch.Tensor
    terms: torch.Tensor
    bound: torch.Tensor


class Check:
    """What the results of one problem must look like. `broken(results)` lists what is wrong with a candidate's."""

    def __init__(self, problem: Problem, operands: Operands, grad_out: Optional[torch.Tensor] = None, *, seed: int = 0):
        """With `grad_out`, for the gradients; otherwise for the output."""
        self.problem = problem
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            parts = _forward(problem, operands, draw) if grad_out is None else _backward(problem, operands, grad_out, draw)
            self.expected = list(parts)
        self.names = names(problem, FORWARD if grad_out is None else BACKWARD)

    def broken(self, results: Sequence[Optional[torch.Tensor]], *, peer: bool = False) -> list[str]:
        """`results`: those of `names`, where `None` was not asked for. An empty list: right."""
        found = []
        for name, tensor in zip(self.names, results, strict=True):
            if tensor is None:
                continue
            tensor = tensor.detach()
            if not bool(torch.isfinite(tensor).all()):
                found.append(f"{name}: {int((~torch.isfinite(tensor)).sum())} elements are NaN or infinite")
                continue
            found += self._rule(name, tensor, _PEER_DV if peer and name == "dv" else 1.0)
        return found

    def _rule(self, name: str, tensor: torch.Tensor, loosened: float) -> Iterator[str]:
        mine = [part for part in self.expected if part.name == name]
        if not mine:
            return
        errors = [(tensor[part.index].double() - part.wide).abs() for part in mine]
        ratio = max(float((e / (part.bound * loosened)).max()) for e, part in zip(errors, mine, strict=True))
        if not ratio <= 1:
            yield f"{name}: an element is {ratio:.2f} times its bound off"
        if name not in _RMS or self.problem.dtype not in (torch.float16, torch.bfloat16):
            return
        times, slack = _RMS[name]
        error, naive, terms = (
            _rms(x) for x in (errors, [part.naive - part.wide for part in mine], [part.terms for part in mine])
        )
        limit = times * naive + slack * UNIT_ROUNDOFF[self.problem.dtype_name] * terms + TINY[self.problem.dtype_name]
        if not error <= limit:
            yield f"{name}: RMS error {error:.3g} exceeds {limit:.3g} (textbook {naive:.3g})"


@contextlib.contextmanager
def poisoned(problem: Problem, device: torch.device) -> Iterator[None]:
    """Inside, memory that a candidate allocates for its results holds NaN, as far as the device lets us arrange it.

    On a GPU: blocks of the results' sizes, filled and given back to the caching allocator, which hands them out next. On a CPU:
    torch fills new tensors itself.
    """
    if device.type == "cpu":
        from rowmax.testing import poisoned as fill_new_tensors

        with fill_new_tensors():
            yield
        return
    lead_q = problem.outputs()[0][:-1]
    lead_k = (*lead_q[:-2], problem.len_k, problem.heads_k)
    shapes = [(*lead, dim) for lead in (lead_q, lead_k) for dim in (problem.dim_qk, problem.dim_v)]
    shapes = [shape for shape in shapes for _ in range(2)]
    if problem.bias:
        sizes = zip("bhqk", (problem.batch, problem.heads_q, problem.len_q, problem.len_k), strict=True)
        shapes.append(tuple(size if letter in problem.bias.partition(",")[0] else 1 for letter, size in sizes))
    blocks = [torch.full(shape, torch.nan, dtype=problem.dtype, device=device) for shape in shapes]
    del blocks
    yield


# ---- the oracle on a sample ------------------------------------------------------------------------------------------


class _Span(NamedTuple):
    """One sequence: `lead` and the ranges index a whole tensor's rows."""

    number: int
    lead: tuple
    rows: range
    keys: range


def _spans(problem: Problem, operands: Operands) -> list[_Span]:
    """Sequences that have queries and keys."""
    if not problem.packed:
        spans = [_Span(b, (b,), range(problem.len_q), range(problem.len_k)) for b in range(problem.batch)]
    else:
        cu_q, cu_k = operands.cu_seqlens_q.tolist(), operands.cu_seqlens_k.tolist()
        spans = [_Span(b, (), range(*cu_q[b : b + 2]), range(*cu_k[b : b + 2])) for b in range(problem.batch)]
    return [span for span in spans if span.rows and span.keys]


def _draw(draw: torch.Generator, size: int, count: int) -> torch.Tensor:
    """`count` of `range(size)`, sorted, the first and the last among them."""
    if size <= count:
        return torch.arange(size)
    inner = torch.randperm(size - 2, generator=draw)[: count - 2] + 1
    return torch.cat([torch.tensor([0, size - 1]), inner]).sort().values


def _factor(problem: Problem, sizes: torch.Tensor) -> torch.Tensor:
    """`[rows, 1]`: c u + (what multiplies S A) S, with S the largest size of a score's terms."""
    c, per_logit = _ELEMENT[problem.dtype_name]
    return c * UNIT_ROUNDOFF[problem.dtype_name] + per_logit * sizes


def _head(problem: Problem, tensors, span: _Span, head: int) -> list[torch.Tensor]:
    """k and v of one sequence and KV head, `[keys, D]`, in their own dtype."""
    keys = slice(span.keys.start, span.keys.stop)
    return [t[(*span.lead, keys, head)] for t in tensors]


def _forward(problem: Problem, operands: Operands, draw: torch.Generator) -> Iterator[Expected]:
    spans, device = _spans(problem, operands), operands.q.device
    u, tiny = UNIT_ROUNDOFF[problem.dtype_name], TINY[problem.dtype_name]
    for pick in range(_HEADS_FORWARD if spans else 0):
        span = spans[int(torch.randint(len(spans), (), generator=draw))]
        head = (pick * problem.heads_q // _HEADS_FORWARD + pick) % problem.heads_q
        rows = _draw(draw, len(span.rows), _ROWS_FORWARD).to(device)
        index = (*span.lead, rows + span.rows.start, head)
        q = operands.q[index]
        k, v = _head(problem, (operands.k, operands.v), span, head // problem.group)
        own = Rows.of(problem, operands, span.number, (len(span.rows), len(span.keys)), head, rows)
        weights, rounded = own.weights(q.double() @ k.double().T * problem.scale), own.weights((q @ k.T) * problem.scale)
        p = weights.p * weights.z
        wide, terms = p @ v.double(), p @ v.double().abs()
        naive = ((rounded.p * rounded.z) @ v).double()
        factor = _factor(problem, own.sizes(q.double(), k.double()))
        floor = tiny * (1 + own.seen.double() @ v.double().abs())
        yield Expected("out", index, wide, naive, terms, factor * terms + u * wide.abs() + floor)


def _backward(problem: Problem, operands: Operands, grad_out: torch.Tensor, draw: torch.Generator) -> Iterator[Expected]:
    spans = _spans(problem, operands)
    if not spans:
        return
    heaviest = max(len(span.rows) * len(span.keys) for span in spans) * problem.group
    for pick in range(_KV_HEADS_BACKWARD if heaviest * _KV_HEADS_BACKWARD <= _PAIRS_BACKWARD else 1):
        # The longest sequence, then any.
        longest = max(range(len(spans)), key=lambda i: len(spans[i].rows))
        span = spans[longest if pick == 0 else int(torch.randint(len(spans), (), generator=draw))]
        head = int(torch.randint(problem.heads_k, (), generator=draw))
        yield from _backward_head(problem, operands, grad_out, span, head, draw)


class _Sums:
    """A gradient of some keys, added up over queries: fp64, textbook, A, A weighted by each row's factor, and the sum of what
    the smallest subnormal may multiply."""

    def __init__(self, keys: torch.Tensor, dim: int):
        self.wide, self.naive, self.terms, self.weighted, self.floor = (
            torch.zeros(len(keys), dim, dtype=torch.float64, device=keys.device) for _ in range(5)
        )

    def add(self, weights, naive_weights, sizes, factor, seen, rows):
        """`weights` `[rows, keys]` times `rows` `[rows, D]`; the textbook product accumulates in fp32."""
        self.wide += weights.T @ rows.double()
        self.naive += (naive_weights.float().T @ rows.float()).double()
        self.terms += sizes.T @ rows.double().abs()
        self.weighted += (sizes * factor).T @ rows.double().abs()
        self.floor += seen.double().T @ rows.double().abs()

    def expected(self, problem: Problem, name: str, index: tuple) -> Expected:
        u, tiny = UNIT_ROUNDOFF[problem.dtype_name], TINY[problem.dtype_name]
        naive = self.naive.to(problem.dtype).double()
        bound = self.weighted + u * self.wide.abs() + tiny * (1 + self.floor)
        return Expected(name, index, self.wide, naive, self.terms, bound)


def _backward_head(problem: Problem, operands: Operands, grad_out, span: _Span, head: int, draw) -> Iterator[Expected]:
    """Everything that one KV head of one sequence receives, from all queries of its group, a piece of rows at a time.

    A of the gradients, with F_ij = p_ij (|dP_ij| + |delta_i| + sum_d |dO_id| A_id) and W = F |soft-cap'|: dQ |scale| sum_j W_ij
    |k_j|, dK |scale| sum_i W_ij |q_i|, dV sum_i z_ij p_ij |dO_i|, the bias's F_ij, the sink's sum_i p_sink times what is in
    parentheses but dP.
    """
    device, scale = operands.q.device, problem.scale
    u, tiny = UNIT_ROUNDOFF[problem.dtype_name], TINY[problem.dtype_name]
    k, v = _head(problem, (operands.k, operands.v), span, head)
    k64, v64 = k.double(), v.double()
    cols = _draw(draw, len(span.keys), _KEYS_BACKWARD).to(device)
    dk, dv = _Sums(cols, problem.dim_qk), _Sums(cols, problem.dim_v)
    step = max(1, _CHUNK[device.type] // len(span.keys))
    if problem.dropout:  # its draws are made for all heads
        step = max(1, step // problem.heads_q)
    for query_head in range(head * problem.group, (head + 1) * problem.group):
        sampled = _draw(draw, len(span.rows), max(2, _ROWS_BACKWARD // problem.group)).to(device)
        sink = torch.zeros(2, dtype=torch.float64, device=device)  # its gradient, and what bounds the error
        for first in range(0, len(span.rows), step):
            rows = torch.arange(first, min(first + step, len(span.rows)), device=device)
            index = (*span.lead, slice(span.rows[first], span.rows[first] + len(rows)), query_head)
            q, do = operands.q[index], grad_out[index]
            q64, do64 = q.double(), do.double()
            own = Rows.of(problem, operands, span.number, (len(span.rows), len(span.keys)), query_head, rows)
            seen = own.seen
            p, z, of_sink, steep = own.weights(q64 @ k64.T * scale)
            dp = do64 @ v64.T * z
            kept = p * z
            delta = (p * dp).sum(-1, keepdim=True)
            of_row = delta.abs() + (do64.abs() * (kept @ v64.abs())).sum(-1, keepdim=True)
            flat = p * (dp - delta)
            flat_sizes = p * (dp.abs() + of_row)
            ds, w = flat * steep * scale, flat_sizes * steep * abs(scale)
            factor = _factor(problem, own.sizes(q64, k64))

            rounded = own.weights((q @ k.T) * scale)
            dp_naive = do @ v.T * rounded.z
            flat_naive = torch.ops.aten._softmax_backward_data(dp_naive, rounded.p, -1, problem.dtype)
            ds_naive, kept_naive = flat_naive * rounded.steep * scale, rounded.p * rounded.z

            dk.add(ds[:, cols], ds_naive[:, cols], w[:, cols], factor, seen[:, cols], q)
            dv.add(kept[:, cols], kept_naive[:, cols], kept[:, cols], factor, seen[:, cols], do)
            if of_sink is not None:
                sink += torch.stack([-(of_sink * delta).sum(), (of_sink * of_row * factor).sum()])
            mine = sampled[(sampled >= first) & (sampled < first + len(rows))] - first
            if len(mine):
                at = (*span.lead, mine + span.rows[first], query_head)
                wide, naive, terms = ds[mine] @ k64, (ds_naive[mine] @ k).double(), w[mine] @ k64.abs()
                floor = tiny * (1 + seen[mine].double() @ k64.abs())
                yield Expected("dq", at, wide, naive, terms, factor[mine] * terms + u * wide.abs() + floor)
                if problem.bias:
                    at = (span.number, query_head, mine + first)
                    wide, terms = flat[mine], flat_sizes[mine]
                    bound = factor[mine] * terms + u * wide.abs() + 2 * tiny
                    yield Expected("dbias", at, wide, flat_naive[mine].double(), terms, bound)
        if problem.sink:
            bound = sink[1] + u * sink[0].abs() + tiny
            yield Expected("dsink", (query_head,), sink[0], sink[0], sink[1], bound)
    keys = cols + span.keys.start
    yield dk.expected(problem, "dk", (*span.lead, keys, head))
    yield dv.expected(problem, "dv", (*span.lead, keys, head))


def _rms(parts: Sequence[torch.Tensor]) -> float:
    count = sum(part.numel() for part in parts)
    return (sum(float(part.square().sum()) for part in parts) / max(count, 1)) ** 0.5
