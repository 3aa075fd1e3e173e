"""A call cut into sequences, and their query rows into pieces small enough for a dense fp64 computation."""

from collections.abc import Callable
from typing import NamedTuple, Optional

import torch

from rowmax import reference
from rowmax.problem import Operands, Problem
from rowmax.score_mod import ScoreMod, find

# Query-key-head triples above which 64 rows are compared and the rest by sums; and those of one piece of the oracle.
_EVERY_ROW_UP_TO = {"cpu": 2**25, "cuda": 2**32}
_PIECE = {"cpu": 2**22, "cuda": 2**27}
SAMPLED_ROWS = 64
SAMPLED_SEQUENCES = 256  # of a larger batch, evenly spaced


class Piece(NamedTuple):
    """Some query rows of one sequence. `where` finds them in tensors shaped like q."""

    name: str
    where: tuple
    rows: torch.Tensor
    q: torch.Tensor  # [rows, H, D]
    seen: torch.Tensor  # [rows, len_k]; with a mask or a bias [H, rows, len_k]
    bias: Optional[torch.Tensor] = None  # [H, rows, len_k], fp64, of ALiBi and what is added; finite
    sink: Optional[torch.Tensor] = None  # [H], fp64
    kept: Optional[torch.Tensor] = None  # [H, rows, len_k], by dropout
    mod: Optional["Mod"] = None  # of scores


class Mod(NamedTuple):
    """A function of scores `[.., H, rows, len_k]` of some rows of one sequence, and where they are."""

    function: ScoreMod
    where: tuple[torch.Tensor, ...]  # sequence, heads, rows, keys
    numbers: torch.Tensor  # [how many, H], fp64

    def _call(self, function: Callable, score: torch.Tensor) -> torch.Tensor:
        return function(score, *self.where, *(number.to(score.dtype).view(-1, 1, 1) for number in self.numbers))

    def bend(self, score: torch.Tensor, *_where) -> torch.Tensor:
        """New scores, as `reference.attention` calls it, whatever place it gives them."""
        return self._call(self.function.bend, score)

    def slope(self, score: torch.Tensor) -> torch.Tensor:
        return self._call(self.function.slope, score)


class Sequence(NamedTuple):
    """One sequence: its keys, and its query rows in pieces small enough for the oracle. `keys` finds k in the whole tensor."""

    name: str
    keys: tuple
    k: torch.Tensor  # [len_k, Hk, D]
    v: torch.Tensor
    pieces: list[Piece]


def split(problem: Problem, operands: Operands) -> tuple[list[Sequence], bool]:
    """The sequences, and whether only a sample of them or of their rows is in the pieces."""
    q, k, v = operands[:3]
    kind = "cuda" if q.device.type == "cuda" else "cpu"
    parts = spans(problem, operands)
    many = problem.batch > SAMPLED_SEQUENCES
    sampled = many or sum(len(rows) * len(keys) for _, rows, keys in parts) * problem.heads_q > _EVERY_ROW_UP_TO[kind]
    generator = torch.Generator().manual_seed(0)
    result = []
    for number, (lead, span_q, span_k) in enumerate(parts):
        rows = torch.arange(len(span_q))
        if sampled and len(rows) > 2:
            drawn = torch.randint(0, len(rows), (max(SAMPLED_ROWS // len(parts), 1),), generator=generator)
            rows = torch.cat([rows[:1], rows[-1:], drawn]).unique()
        keys = (*lead, slice(span_k.start, span_k.stop))
        pieces = []
        for part in rows.split(max(_PIECE[kind] // max(problem.heads_q * len(span_k), 1), 1)) if len(rows) else ():
            part = part.to(q.device)
            index = (*lead, part + span_q.start)
            seen = reference.visible(len(span_q), len(span_k), *problem.band, device=q.device, rows=part)
            bias, sink = _scores(operands, number, span_q, span_k, part)
            seen, bias = _pairs(problem, operands, lead, part, seen, bias)
            kept = _kept(problem, operands, lead[0] if lead else number, span_q, span_k, part)
            name = f"sequence {number}, rows from {int(part[0])}"
            mod = _mod(problem, operands, lead[0] if lead else number, len(span_q), len(span_k), part)
            pieces.append(Piece(name, index, part, q[index], seen, bias, sink, kept, mod))
        result.append(Sequence(f"sequence {number}", keys, k[keys], v[keys], pieces))
    return result, sampled


def _scores(operands: Operands, number: int, span_q: range, span_k: range, rows: torch.Tensor):
    """Bias and sink of some rows of sequence `number`. Packed rows of none have neither."""
    slopes, sink = (None if t is None else t.double() for t in operands[5:7])
    if slopes is not None:
        outside = slopes.dim() == 2 and number >= slopes.shape[0]
        own = slopes if slopes.dim() == 1 else slopes[0 if outside else number]
        slopes = reference.alibi(own, len(span_q), len(span_k), rows)
    cu = operands.cu_seqlens_q
    if cu is not None and number >= cu.numel() - 1 and sink is not None:
        sink = torch.full_like(sink, -torch.inf)
    return slopes, sink


def _pairs(problem: Problem, operands: Operands, lead: tuple, rows: torch.Tensor, seen: torch.Tensor, bias):
    """`seen` and `bias` with what is given for pairs: a mask, and a bias, whose -inf hides."""
    if operands.mask is None and operands.bias is None:
        return seen, bias
    seen = seen.expand(problem.heads_q, *seen.shape)
    if operands.mask is not None:
        seen = seen & pairs_of(operands.mask, lead, rows)
    if operands.bias is not None:
        own = pairs_of(operands.bias, lead, rows).double()
        seen, own = seen & (own != -torch.inf), torch.where(own == -torch.inf, 0.0, own).expand(seen.shape)
        bias = own if bias is None else bias + own
    return seen, bias


def _kept(problem: Problem, operands: Operands, number: int, span_q: range, span_k: range, rows: torch.Tensor):
    """Of packed sequences this holds for all of them only where `spans` leaves none out."""
    if operands.seed is None:
        return None
    seed, sizes = int(operands.seed), (problem.heads_q, len(span_q), len(span_k))
    return reference.dropout(seed, problem.dropout, [number], *sizes, rows=rows)[0]


def _mod(problem: Problem, operands: Operands, number: int, len_q: int, len_k: int, rows: torch.Tensor) -> Optional[Mod]:
    """As `_kept`, for packed sequences where `spans` leaves none out."""
    if operands.numbers is None:
        return None
    heads, keys = (torch.arange(n, device=rows.device) for n in (problem.heads_q, len_k))
    where = (torch.tensor(number, device=rows.device), heads.view(-1, 1, 1), (rows + len_k - len_q).unsqueeze(1), keys)
    return Mod(find(problem.score_mod), where, operands.numbers.double())


def pairs_of(t: torch.Tensor, lead: tuple, rows: torch.Tensor) -> torch.Tensor:
    """`[H|1, rows|1, len_k|1]` of one sequence."""
    own = t[lead[0] if t.shape[0] > 1 else 0]
    return own[:, rows] if own.shape[1] > 1 else own


def spans(problem: Problem, operands: Operands) -> list[tuple[tuple, range, range]]:
    """`(batch index or nothing, query rows, key rows)` of each sequence or of a sample; then packed rows of none."""
    chosen = list(range(problem.batch))
    if problem.batch > SAMPLED_SEQUENCES:
        chosen = [i * (problem.batch - 1) // (SAMPLED_SEQUENCES - 1) for i in range(SAMPLED_SEQUENCES)]
    if not problem.packed:
        return [((b,), range(problem.len_q), range(problem.len_k)) for b in chosen]
    cu_q, cu_k = (cu.tolist() for cu in operands[3:5] if cu is not None)
    result: list[tuple[tuple, range, range]] = [((), range(cu_q[i], cu_q[i + 1]), range(cu_k[i], cu_k[i + 1])) for i in chosen]
    return [*result, ((), range(cu_q[-1], problem.len_q), range(0)), ((), range(0), range(cu_k[-1], problem.len_k))]


def lse_rows(problem: Problem, lse: torch.Tensor, piece: Piece) -> torch.Tensor:
    """`[H, rows]` of a tensor shaped like the LSE."""
    return (lse if problem.packed else lse[piece.where[0]])[:, piece.where[-1]]


def expand_heads(problem: Problem, t: torch.Tensor) -> torch.Tensor:
    """`[len, Hk, D]` to `[len, H, D]`."""
    return t.repeat_interleave(problem.group, 1)


def sum_group(problem: Problem, t: torch.Tensor) -> torch.Tensor:
    """`[len, H, D]` to `[len, Hk, D]`: the sum over the query heads of each group."""
    return t.view(t.shape[0], problem.heads_k, problem.group, t.shape[-1]).sum(2)


def finite(t: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(t), t, 0.0)
