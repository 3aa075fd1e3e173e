"""Random operands for a `Problem`: each kind makes one family of mistakes visible that normal entries hide."""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Optional

import torch

from rowmax.problem import Operands, Problem
from rowmax.score_mod import find
from rowmax.testing.memory import carve, place, place_one

# What each kind is for. The argument in parentheses may be changed: `shift(-1000)`.
KINDS = {
    "normal": "standard normal entries",
    "spiky(6)": "q times 6: a softmax that a few keys dominate",
    "constant(0.5)": "every entry the same; 133120 in bf16 makes scores whose rounding exceeds the range of the softmax",
    "shift(-120)": "every logit near the given one: shows a start value or a padding score that is not -inf",
    "probe": "each query points at one key (diagonal, edges of the window, one past them, first, last); v spells its index",
    "v_ones": "v = 1: the output is the sum of the weights",
    "v_onehot": "v = unit vectors: the output is the row of weights, folded into dim_v",
    "v_index": "v = the key's index modulo 128",
    "v_outlier(30)": "v of one key times 30: a small weight meets a large value",
    "sparse_int": "small integers, mostly 0: exact in every type, with many ties",
    "overflow": "q.k above 65504: products that must not be rounded to fp16 before the scale",
    "subnormal": "v in the subnormal range of fp16",
    "nan(q)": "one NaN in q: exactly one row of one head becomes NaN (also k, v)",
    "inf(v)": "one infinity in v: exactly the rows that see its key stop being finite",
}
_TARGET_LOGIT = 8.0  # of a probe: e^8 against a few hundred keys near e^0


def operands(
    problem: Problem,
    kind: str = "normal",
    *,
    seed: int = 0,
    device: "str | torch.device" = "cpu",
    layout: str = "contiguous",
    lengths: Optional[Sequence[tuple[int, int]]] = None,
) -> Operands:
    """The tensors of one call, reproducible from the arguments.

    Args:
        kind: a key of `KINDS`, with its argument changed at will.
        layout: a key of `LAYOUTS`.
        lengths: packed problems: `(queries, keys)` of each sequence; `None` draws uneven ones, some of them 0.
    """
    name, argument = _parse_kind(kind)
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens: tuple = (None, None)
    sequences = [(slice(0, problem.len_q), slice(0, problem.len_k))]
    if problem.packed:
        bounds = _bounds(problem, lengths, generator)
        spans = [[slice(*pair) for pair in pairwise(cuts)] for cuts in bounds]
        sequences = list(zip(*spans, strict=True))
        cu_seqlens = tuple(torch.tensor(cuts, dtype=torch.int32, device=device) for cuts in bounds)
    values = _values(problem, name, argument, sequences, generator)
    q, k, v = (t.to(problem.dtype).to(device) for t in values)
    return Operands(*place(q, k, v, layout), *cu_seqlens, *_scores(problem, generator, device))


def cotangents(
    problem: Problem, *, seed: int = 0, device: "str | torch.device" = "cpu", layout: str = "contiguous"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(grad_out, grad_lse)`, normal; the second at a tenth, so that neither hides the other."""
    generator = torch.Generator().manual_seed(seed + 1)
    out_shape, lse_shape = problem.outputs()
    grad_out = torch.randn(out_shape, generator=generator).to(problem.dtype).to(device)
    grad_lse = torch.randn(lse_shape, generator=generator).mul(0.1).to(problem.lse_dtype).to(device)
    return place_one(grad_out, layout), grad_lse


def _scores(problem: Problem, generator, device) -> list[Optional[torch.Tensor]]:
    """`(slopes, sink)`: slopes 2^(-8 h / H) as in the paper, of both signs if each sequence has its own; sinks that weigh much
    or little. Amid NaN, so that a head too far is seen."""
    heads = torch.arange(1, problem.heads_q + 1)
    slopes = sink = None
    if problem.alibi:
        slopes = 2.0 ** (-8.0 * heads / max(problem.heads_q, 1))
        if problem.alibi == "batch":
            slopes = slopes * torch.randn(problem.batch, problem.heads_q, generator=generator)
    if problem.sink:
        sink = 2.0 * torch.randn(problem.heads_q, generator=generator) + 2.0 * (heads % 3)
    per_head = [None if t is None else carve(t.to(problem.lse_dtype).to(device)) for t in (slopes, sink)]
    seed = torch.randint(-(2**62), 2**62, (1,), generator=generator).to(device) if problem.dropout else None
    numbers = None
    if problem.score_mod:  # between 1/2 and 2
        shape = (len(find(problem.score_mod).numbers), problem.heads_q)
        numbers = (0.5 + 1.5 * torch.rand(shape, generator=generator)).to(problem.lse_dtype).to(device)
    return [*per_head, *_pairs(problem, generator, device), seed, numbers]


def _pairs(problem: Problem, generator, device) -> list[Optional[torch.Tensor]]:
    """`(bias, mask)`: normal numbers, amid NaN, one key hidden by -inf; seven of ten pairs, one query without any.

    With an odd number of keys the rows of a mask begin anywhere; with an even one there are gaps in front of multiples of 16.
    """
    sizes = dict(zip("bhqk", (problem.batch, problem.heads_q, problem.len_q, problem.len_k), strict=True))

    def shape(letters: str) -> list[int]:
        return [size if letter in letters else 1 for letter, size in sizes.items()]

    bias = mask = None
    if problem.bias:
        letters, _, wide = problem.bias.partition(",")
        bias = torch.randn(shape(letters), generator=generator)
        if "k" in letters and problem.len_k > 1:
            bias[..., problem.len_k // 3] = -torch.inf
        keys = bias.shape[3]
        bias = carve(_with_gaps(bias, torch.nan).to(torch.float32 if wide else problem.dtype).to(device))[..., :keys]
    if problem.mask:
        shown = torch.rand(shape(problem.mask), generator=generator) < 0.7
        if "q" in problem.mask and problem.len_q > 1:
            shown[:, :, problem.len_q // 2] = False
        mask = _with_gaps(shown, True).to(device)[..., : shown.shape[3]]
    return [bias, mask]


def _with_gaps(pairs: torch.Tensor, filler) -> torch.Tensor:
    """Behind each row as many fillers as are missing to a multiple of 16, 16 if none are; odd rows get one."""
    if pairs.shape[3] == 1:
        return pairs
    keys = pairs.shape[3]
    more = 1 if keys % 2 else 16 - keys % 16
    return torch.cat([pairs, pairs.new_full((*pairs.shape[:3], more), filler)], 3)


def _parse_kind(kind: str) -> tuple[str, str]:
    defaults = {name.split("(")[0]: name.partition("(")[2].rstrip(")") for name in KINDS}
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", kind)
    if match is None or match[1] not in defaults:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got '{kind}'.")
    return match[1], match[2] or defaults[match[1]]


def _bounds(problem: Problem, lengths, generator) -> list[list[int]]:
    """First row of each sequence and, last, one past the end: for the queries, then for the keys."""
    totals = (problem.len_q, problem.len_k)
    if lengths is not None:
        columns = list(zip(*lengths, strict=True)) or [(), ()]
        if len(lengths) != problem.batch or any(sum(c) > total for c, total in zip(columns, totals, strict=True)):
            raise ValueError(f"lengths must be {problem.batch} pairs within the totals of '{problem}'; got {lengths}.")
        return [[sum(column[:i]) for i in range(len(column) + 1)] for column in columns]

    def draw(total: int) -> list[int]:
        inner = torch.randint(0, total + 1, (max(problem.batch - 1, 0),), generator=generator).tolist()
        return [0, *sorted(inner), total][: problem.batch + 1]

    first = draw(problem.len_q)
    return [first, first if problem.len_k == problem.len_q else draw(problem.len_k)]


def _values(problem: Problem, name: str, argument: str, sequences, generator) -> tuple[torch.Tensor, ...]:
    wide = torch.float64 if problem.dtype == torch.float64 else torch.float32
    batch = () if problem.packed else (problem.batch,)
    shapes = (
        (*batch, problem.len_q, problem.heads_q, problem.dim_qk),
        (*batch, problem.len_k, problem.heads_k, problem.dim_qk),
        (*batch, problem.len_k, problem.heads_k, problem.dim_v),
    )
    q, k, v = (torch.randn(shape, generator=generator, dtype=wide) for shape in shapes)
    index = torch.arange(problem.len_k)[:, None, None]
    if name == "spiky":
        q = q * float(argument)
    elif name == "constant":
        q, k, v = (torch.full_like(t, float(argument)) for t in (q, k, v))
    elif name == "shift":
        q, k = 0.3 * q, 0.3 * k
        first = 64.0 if problem.dtype == torch.float16 else 1.0  # keeps k inside fp16
        q[..., 0], k[..., 0] = first, float(argument) / (first * (problem.scale or 1.0))
    elif name == "probe":
        q, k, v = _probe(problem, q, k, v, sequences, generator)
    elif name == "v_ones":
        v = torch.ones_like(v)
    elif name == "v_onehot":
        v = (index % problem.dim_v == torch.arange(problem.dim_v)).to(wide).expand_as(v)
    elif name == "v_index":
        v = (index % 128).to(wide).expand_as(v)
    elif name == "v_outlier":
        if v.numel():
            v.select(-3, v.shape[-3] // 3).mul_(float(argument))
    elif name == "sparse_int":
        q, k, v = (t.mul(1.5).round().clamp(-2, 2) * (t.abs() > 0.8) for t in (q, k, v))
    elif name == "overflow":
        size = math.sqrt(1.15e5 / problem.dim_qk)
        q, k = size * (1 + 0.02 * q), size * (1 + 0.02 * k)
    elif name == "subnormal":
        v = v * 2.0**-18
    elif name in ("nan", "inf"):
        chosen = {"q": q, "k": k, "v": v}[argument]
        if chosen.numel():
            rows = chosen if problem.packed else chosen[0]
            rows[rows.shape[0] // 2, -1, 0] = math.nan if name == "nan" else math.inf
    return q, k, v


def _more_targets(problem: Problem, diagonal: torch.Tensor) -> list[torch.Tensor]:
    """Keys beside the limits of what a `mask.Pattern` has more than a window."""
    if problem.windowed:
        return []
    more = problem.band._asdict()
    targets = [diagonal * 0 + n + step for n in (more["sink_tokens"], more["prefix"]) if n is not None for step in (-1, 0)]
    if more["chunk"] is not None:
        begin = diagonal.div(more["chunk"], rounding_mode="floor") * more["chunk"]
        targets += [begin - 1, begin, begin + more["chunk"] - 1, begin + more["chunk"]]
    return targets


def _probe(problem: Problem, q, k, v, sequences, generator) -> tuple[torch.Tensor, ...]:
    """Keys are random signs, nearly orthogonal: a query scores 8 with its target and about 8 / sqrt(dim_qk) elsewhere."""
    left, right = problem.band[:2]
    k, v = torch.sign(k), v.clone()
    bits = torch.arange(problem.dim_v) % 10
    heads = torch.arange(problem.heads_q) // problem.group
    amplitude = _TARGET_LOGIT / (problem.dim_qk * (problem.scale or 1.0))
    for rows_q, rows_k in sequences:
        len_q, len_k = rows_q.stop - rows_q.start, rows_k.stop - rows_k.start
        v[..., rows_k, :, :] = ((torch.arange(len_k)[:, None] >> bits) & 1)[:, None, :] * 2.0 - 1.0
        if len_q == 0 or len_k == 0:
            continue
        i = torch.arange(len_q)
        diagonal = i + len_k - len_q
        low = diagonal - (len_k if left is None else left)
        high = diagonal + (len_k if right is None else right)
        choices = [diagonal, low, low - 1, high, high + 1, 0 * i, 0 * i + len_k - 1, *_more_targets(problem, diagonal)]
        first = int(torch.randint(0, len(choices), (), generator=generator))
        target = torch.stack(choices).clamp(0, len_k - 1)[(i + first) % len(choices), i]
        q[..., rows_q, :, :] = k[..., rows_k, :, :][..., target, :, :][..., heads, :] * amplitude
    return q, k, v
