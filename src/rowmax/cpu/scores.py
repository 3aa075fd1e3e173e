"""What happens to scores between the product and the softmax, on the CPU: soft-cap, a function of the caller's, ALiBi, a bias,
a mask, the sink's logit.

    x_ij = f(c tanh(s_ij / c)) - slope |i + shift - j| + bias_ij,    l_i = sum_j exp(x_ij) + exp(sink)

Scores are in units of log2 (x times log2(e)), rows of a group folded: `[n, G * rows, cols]`. The sink is a key whose value is
0: it belongs to the first column tile of a row block, and its gradient is -sum_i exp(sink - lse_i) delta_i. The bias's is dS
without the soft-cap's factor. What is given for pairs of queries and keys is kept as `[B, Hk, G, Tq, Tk]`, 1 where it is
broadcast, from the first row and column that see or are seen.
"""

from typing import NamedTuple, Optional

import torch

from rowmax.cpu.blocks import RowBlock
from rowmax.cpu.dropout import Dropout
from rowmax.numerics import LN2, LOG2E
from rowmax.score_mod import ScoreMod, find

LARGEST = 3e38  # of a bias, in units of log2


class Mod(NamedTuple):
    """A function of scores, for some heads of some sequences.

    Attributes:
        sequences, heads, numbers: `[b, 1, 1, 1, 1]`, `[1, Hk, G, 1, 1]` and a tensor like the heads for each number.
        first_col: the number of the first key.
    """

    function: ScoreMod
    sequences: torch.Tensor
    heads: torch.Tensor
    numbers: tuple[torch.Tensor, ...]
    first_col: int

    def part(self, place) -> "Mod":
        numbers = tuple(number[:, place[1]] for number in self.numbers)
        return self._replace(sequences=self.sequences[place[0]], heads=self.heads[:, place[1]], numbers=numbers)

    def where(self, block: RowBlock, cols: slice) -> tuple[torch.Tensor, ...]:
        """What the function takes beside the scores `[b, Hk, G, rows, cols]` of a tile."""
        i = torch.arange(block.row, block.row + block.rows, device="cpu").unsqueeze(1)
        j = torch.arange(cols.start, cols.stop, device="cpu") + self.first_col
        return self.sequences, self.heads, i + block.geometry.shift + self.first_col, j, *self.numbers


class Scores(NamedTuple):
    """Of some heads, all in the type that scores are computed in; what is None, or 0, a problem has not.

    Attributes:
        softcap: c, natural units.
        slopes_log2, sink_log2: `[n, G]`, n KV heads of all sequences.
        bias, mask: `[b, Hk, G, Tq, Tk]`, natural units; True is visible.
        bias_gradient: where it is summed, as `bias`.
    """

    softcap: float
    slopes_log2: Optional[torch.Tensor]
    sink_log2: Optional[torch.Tensor]
    bias: Optional[torch.Tensor] = None
    mask: Optional[torch.Tensor] = None
    bias_gradient: Optional[torch.Tensor] = None
    dropout: Optional[Dropout] = None
    sizes: tuple[int, ...] = ()  # b, Hk, G
    mod: Optional[Mod] = None

    @classmethod
    def of(cls, problem, operands, sequence: int, rows, cols, compute: torch.dtype, bias_gradient=None) -> "Scores":
        """For sequences from `sequence` on, q `rows` and k `cols` `[B, T, H, D]` from the first row and column that count."""
        batch = rows.shape[0]
        per_head = []
        for t in (operands.slopes, operands.sink):
            if t is not None:
                t = t[sequence : sequence + batch] if t.dim() == 2 else t.expand(batch, -1)
                t = (t.to(compute) * LOG2E).reshape(batch, problem.heads_k, problem.group)
            per_head.append(t)
        first = (slice(problem.len_q - rows.shape[1], None), slice(problem.len_k - cols.shape[1], None))
        bias, mask, gradient = (
            None if t is None else cut(by_group(problem, t), *_ALL, *first)
            for t in (operands.bias, operands.mask, bias_gradient)
        )
        slopes, sink = per_head
        dropout = _dropout(problem, operands, sequence, rows, cols) if problem.dropout else None
        mod = _mod(problem, operands, sequence, rows, cols, compute) if problem.score_mod else None
        return cls(problem.softcap, slopes, sink, bias, mask, gradient, dropout, (batch, problem.heads_k, problem.group), mod)

    @property
    def hides(self) -> bool:
        """May rows see nothing, wherever they are?"""
        return self.bias is not None or self.mask is not None or self.mod is not None

    @property
    def any_number(self) -> bool:
        """May scores that nobody sees be NaN or infinite, and so may their derivatives?"""
        return self.mod is not None

    def part(self, place) -> "Scores":
        """Those of the sequences and KV heads of `place`, folded."""
        slopes, sink = (None if t is None else t[place].flatten(0, 1) for t in self[1:3])
        bias, mask, gradient = (None if t is None else cut(t, *place) for t in (self.bias, self.mask, self.bias_gradient))
        sizes = [len(range(*one.indices(size))) for one, size in zip(place, self.sizes, strict=False)]
        dropout = self.dropout
        if dropout is not None:
            dropout = dropout._replace(heads=dropout.heads[:, place[1]], sequences=dropout.sequences[place[0]])
        mod = None if self.mod is None else self.mod.part(place)
        return Scores(self.softcap, slopes, sink, bias, mask, gradient, dropout, (*sizes, self.sizes[2]), mod)

    def bend(self, s: torch.Tensor, block: RowBlock, cols: slice, want_gain: bool = False) -> Optional[torch.Tensor]:
        """Bend the scores of a tile in place; the derivative by a score, if wanted and not 1."""
        gain = None
        if self.softcap:
            cap = self.softcap * LOG2E
            t = s.div_(cap)
            if want_gain:  # 1 - tanh^2, without its cancellation
                gain = t.cosh().square_().reciprocal_()
            t.tanh_().mul_(cap)
        if self.mod is not None:
            score, where = self._pairs(s.mul_(LN2)), self.mod.where(block, cols)
            if want_gain:
                slope = self.mod.function.slope(score, *where).reshape(s.shape)
                gain = slope if gain is None else gain.mul_(slope)
            score.copy_(self.mod.function.bend(score.clone(), *where)).mul_(LOG2E)
        if self.slopes_log2 is not None:
            i = torch.arange(block.row, block.row + block.rows, device="cpu").unsqueeze(1) + block.geometry.shift
            distance = (i - torch.arange(cols.start, cols.stop, device="cpu")).abs_().to(s.dtype)
            s.unflatten(1, (-1, block.rows)).sub_(self.slopes_log2[..., None, None] * distance)
        if self.bias is not None:
            bias = of_tile(self.bias, block, cols).to(s.dtype)
            # The lowest number of a type is a number, and stays one: a row of nothing else is a row of ties.
            self._pairs(s).add_((bias * LOG2E).clamp_(-LARGEST, LARGEST).masked_fill_(bias == -torch.inf, -torch.inf))
        return gain

    def hide(self, s: torch.Tensor, block: RowBlock, cols: slice, exact: bool) -> None:
        """-inf where the mask is False, in place; `exact`: also where the bias is -inf, whatever was there."""
        if self.mask is not None:
            self._pairs(s).masked_fill_(~of_tile(self.mask, block, cols), -torch.inf)
        if self.bias is not None and exact:
            self._pairs(s).masked_fill_(of_tile(self.bias, block, cols) == -torch.inf, -torch.inf)

    def drop(self, weights: torch.Tensor, block: RowBlock, cols: slice) -> torch.Tensor:
        """Weights of a tile, in place: 0 where dropped, else times dropout's factor."""
        if self.dropout is not None:
            kept = self.dropout.kept(slice(block.row, block.row + block.rows), cols)
            self._pairs(weights).mul_(kept.to(weights.dtype).mul_(self.dropout.factor))
        return weights

    def add_bias_gradient(self, p: torch.Tensor, dp: torch.Tensor, unit: float, block: RowBlock, cols: slice) -> None:
        """Of a tile with weights p times `unit`, and dP - delta in `dp`."""
        target = of_tile(self.bias_gradient, block, cols)
        ds = self._pairs((dp.to(target.dtype) * p.to(target.dtype)).div_(unit))
        over = [dim for dim in range(5) if target.shape[dim] == 1 and ds.shape[dim] != 1]
        target.add_(ds.sum(over, keepdim=True) if over else ds)

    def _pairs(self, s: torch.Tensor) -> torch.Tensor:
        """`[n, G * rows, cols]` -> `[b, Hk, G, rows, cols]`, a view."""
        return s.view(*self.sizes, -1, s.shape[-1])

    def sink_rows(self, block: RowBlock) -> Optional[torch.Tensor]:
        """`[n, G * rows, 1]`."""
        if self.sink_log2 is None:
            return None
        return self.sink_log2[..., None].expand(-1, -1, block.rows).flatten(1).unsqueeze(-1)


_ALL = (slice(None),) * 3


def _dropout(problem, operands, sequence: int, rows, cols) -> Dropout:
    first = (_first(problem, operands, sequence, rows, 0), _first(problem, operands, sequence, cols, 1))
    return Dropout(int(operands.seed), problem.drop_below, problem.drop_factor, *_numbered(problem, sequence, rows), *first)


def _mod(problem, operands, sequence: int, rows, cols, compute: torch.dtype) -> Mod:
    heads, sequences = _numbered(problem, sequence, rows)
    numbers = tuple(t.to(compute).view(heads.shape) for t in operands.numbers)
    return Mod(find(problem.score_mod), sequences, heads, numbers, _first(problem, operands, sequence, cols, 1))


def _numbered(problem, sequence: int, rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the heads and of the sequences."""
    heads = torch.arange(problem.heads_q, device="cpu").view(1, problem.heads_k, problem.group, 1, 1)
    return heads, sequence + torch.arange(rows.shape[0], device="cpu").view(-1, 1, 1, 1, 1)


def _first(problem, operands, sequence: int, kept, side: int) -> int:
    """How many rows (side 0) or columns (1) of the sequence were cut off before those that are kept."""
    length = (problem.len_q, problem.len_k)[side]
    if problem.packed:
        cu = operands[3 + side]
        length = int(cu[sequence + 1] - cu[sequence])
    return length - kept.shape[1]


def by_group(problem, t: torch.Tensor) -> torch.Tensor:
    """`[B, H, Tq, Tk]` -> `[B, Hk, G, Tq, Tk]`, a view; 1 stays 1."""
    return t.unsqueeze(2) if t.shape[1] == 1 else t.unflatten(1, (problem.heads_k, problem.group))


def cut(t: torch.Tensor, *cuts: slice) -> torch.Tensor:
    """Slices of the first dimensions, but for those that are broadcast."""
    return t[tuple(slice(None) if size == 1 else one for size, one in zip(t.shape, cuts, strict=False))]


def of_tile(t, block: RowBlock, cols: slice) -> torch.Tensor:
    return cut(t, *_ALL, slice(block.row, block.row + block.rows), cols)


def start_lse(problem, operands, lse: torch.Tensor) -> None:
    """The LSE of rows that see nothing is the sink; of rows outside every sequence it stays -inf. `lse` is `[.., H, T]`."""
    end = lse.shape[-1] if operands.cu_seqlens_q is None else int(operands.cu_seqlens_q[-1])
    lse[..., :end] = operands.sink.unsqueeze(-1)


def sink_gradient(problem, operands, out, lse, grad_out, grad_lse) -> torch.Tensor:
    """`[H]`, in the LSE's type."""
    delta = torch.zeros_like(lse)
    if grad_out is not None:
        delta += (out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(-1).movedim(-1, -2)
    if grad_lse is not None:
        delta -= grad_lse
    terms = torch.exp(operands.sink.unsqueeze(-1) - lse) * delta
    return -terms.masked_fill_(torch.isneginf(lse), 0.0).sum(-1).view(-1, problem.heads_q).sum(0)
