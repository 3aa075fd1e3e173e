"""Scores rounded to bf16, where the rounding cannot be seen in the result; they halve the cost of a bf16 score matmul.

No matmul on a CPU takes bf16 and gives fp32: a score x comes out with an error up to u |x|, u = 2^-8, and so does the relative
error of its weight, while rounding the weight itself costs up to u in any case. Errors of many weights average out. They show
where one weight decides a result, and where values (a one-hot V, the gradient of a single row) line up with them. So, before
the work,

 - `bounded`: |scale| max|q| max|k| <= 2.5 sqrt(D): scores in all directions have a standard deviation of at most about 2.5;
 - `even`, for each chunk of heads: no value (backward: no element of dO) is above 6 times their root mean square;
 - `invisible`, for each chunk of heads: for a sample of rows (backward: of keys) the error of the result is at most u times
   the terms that it is made of, where the acceptance rule allows 2 u; computed from the operands themselves. Normal operands
   stay below 0.7, one-hot values come out above 1.8;

and after each block `rows_again`: rows with a weight above 1/4 are computed again from fp32 scores; in others a score is below
8, whose error of at most 4 u moves its row by u at most. If they are many, the whole block is computed again, and where that is
frequent, nothing more of the chunk is tried. Nor are sequences with few scores (`worth_it`), blocks with few columns a row, and
in the backward columns that few rows see get weights from fp32 scores. The LSE never comes from rounded scores.

A NaN or infinity in q or k fails a check, so that its blocks take fp32 scores: rows of theirs that do not see it may then
differ by rounding from what they would be without it, unlike everywhere else.
"""

import math
from typing import Optional

import torch

from rowmax.cpu.blocks import Chunks, Geometry, RowBlock, Scratch, take_columns, take_rows
from rowmax.mask import end_key, end_query, first_key, first_query, visible_pairs
from rowmax.numerics import LOG2E, UNIT_ROUNDOFF

ATTEMPTS = 2  # a failure takes one away
EARNED = 0.5  # by a success, which saves half of what a failure costs
_FEWEST_COLUMNS = 256  # normal scores of fewer keys have weights above 1/4 now and then
FEWEST_ROWS = 32  # of a column
_SAMPLES = 8  # rows or keys a head
_LEAST_ROWS = 40 * _SAMPLES  # for fewer the check costs more than it saves
# Of fewer visible scores, and in the backward of fewer a row, the checks take longer than is saved. h8 d64, two threads of an
# AMD EPYC, ms with and without rounded scores: forward q2048 window(256,0) 15.0 and 13.5, window(512,0) 15.9 and 17.5, q4096
# window(256,0) 23.1 and 24.9, q1024 causal 9.5 and 9.4; backward q2048 window(256,0) 34.8 and 31.6, window(512,0) 35.3 and
# 35.2, window(1000,0) 46.6 and 51.4, q1024 causal 19.4 and 19.4, q2048 causal 56.7 and 62.9.
_LEAST_SCORES = 6 * 2**20
_LEAST_AVERAGE = 640
_MOST_WEIGHT = 0.25
_MOST_AGAIN = 16  # rows of a block; of normal scores of 256 keys one in 10,000
_LARGEST_SCORE = 40.0  # exp needs no pivot below; reached at D = 256


def worth_it(geometry: Geometry, heads: int, direction: str = "forward") -> bool:
    """Are there so many scores, of so many heads of all sequences, that rounding them saves more than it takes to check?"""
    pairs = visible_pairs(*geometry)
    return pairs * heads >= _LEAST_SCORES and (direction == "forward" or pairs >= _LEAST_AVERAGE * geometry.len_q)


def eligible(block: RowBlock, width: int) -> bool:
    """Does every row of the block see many columns, all in one tile?"""
    return block.fewest_columns >= _FEWEST_COLUMNS and block.end - block.start <= width


def eligible_blocks(geometry: Geometry, chunks: Chunks, group: int) -> list[RowBlock]:
    """The eligible blocks of a chunk, if they are enough to be worth the check."""
    blocks = [block for block in geometry.row_blocks(chunks.step) if eligible(block, chunks.width)]
    return blocks if sum(block.rows for block in blocks) * group >= _LEAST_ROWS else []


def bounded(q, k, scale: float) -> bool:
    """Are all scores of q and k `[..., D]` small by the Cauchy-Schwarz inequality? Such scores need no pivot either."""
    if scale == 0 or q.numel() == 0 or k.numel() == 0:
        return False  # with a scale of 0 torch's bf16 baddbmm (beta 0, alpha 0) leaves its result unwritten
    return _largest_norm(q) * _largest_norm(k) * abs(scale) <= min(2.5 * q.shape[-1] ** 0.5, _LARGEST_SCORE)


def _largest_norm(t) -> float:
    """Over the finite values, so that a hidden NaN does not change how the rows that do not see it are computed."""
    largest = float(torch.linalg.vector_norm(t, dim=-1).amax())
    return largest if math.isfinite(largest) else float(torch.linalg.vector_norm(t.nan_to_num(0.0, 0.0, 0.0), dim=-1).amax())


def even(values) -> bool:
    """Is no element of bf16 values `[n, ..., D]` far above the others of its head? The error of a small weight shows where it
    meets a large value. Normal numbers stay below 5 times their root mean square."""
    # Bits without their sign order like the numbers, a NaN above all; torch's maximum norm takes 20 times as long. Both in two
    # steps: a reduction over several strided dimensions takes 5 times as long.
    size = max(values[0].numel(), 1) if values.shape[0] else 1
    most = (values.view(torch.int16) & 0x7FFF).amax(-1).flatten(1).amax(1).view(values.dtype).float()
    mean = torch.linalg.vector_norm(torch.linalg.vector_norm(values, dim=-1).flatten(1).float(), dim=1) / size**0.5
    return bool((most <= 6 * mean).all())


def rows_again(p, unit: float = 1.0) -> Optional[list[list[int]]]:
    """`[n, row]` of p `[n, rows, cols]` with a weight above 1/4 of `unit`, or a NaN; None if they are many. Weights are not
    negative, so that their bits order like integers; the bits of a NaN are a large or a negative one."""
    most = torch.tensor(_MOST_WEIGHT * unit, dtype=p.dtype, device="cpu").view(torch.int16)
    bits = p.view(torch.int16)
    low, high = bits.aminmax()
    if bool((low >= 0) & (high <= most)):  # a third of the time of all rows
        return []
    again = ((bits.amin(-1) < 0) | (bits.amax(-1) > most)).nonzero()
    return again.tolist() if len(again) <= _MOST_AGAIN else None


def fit_forward(q, k, v, scale: float, geometry: Geometry, chunks: Chunks, scratch: Scratch) -> bool:
    """Are rounded scores worth trying? q `[n, G, Tq, D]`, k, v `[n, Tk, .]`."""
    blocks = eligible_blocks(geometry, chunks, q.shape[1])
    return bool(blocks) and even(v) and invisible_forward(q, k, v, scale, blocks, scratch)


def invisible_forward(q, k, v, scale: float, blocks: list[RowBlock], scratch: Scratch) -> bool:
    """Do rounded scores leave the output of sampled rows where it is? k, v `[n, Tk, .]`; `blocks` are the eligible ones."""
    rows = _sample([(block.row, block.row + block.rows) for block in blocks])
    rounded, rest = _score_and_rest(q[:, :, rows].flatten(1, 2), k.mT, scale)
    shift, len_k, band = blocks[0].geometry.shift, blocks[0].geometry.len_k, blocks[0].geometry.band
    rounded = _hide(rounded, first_key(rows, shift, band), end_key(rows, shift, len_k, band))
    exact = torch.softmax(rounded + rest, -1)
    # A single row may have one large weight: that is what `rows_again` is for.
    calm = exact.amax(-1, keepdim=True) <= _MOST_WEIGHT / 2
    if calm.sum() < calm.numel() / 2:
        return False
    return _small((torch.softmax(rounded, -1) - exact).mul_(calm), exact, v, scratch)


def forward_block(q, k, v, scale: float, block: RowBlock, scratch: Scratch):
    """The output of one row block, `[n, G * rows, Dv]`; None if some weight is too large for rounded scores."""
    cols = slice(block.start, block.end)
    s = scratch("s", (*q.shape[:2], cols.stop - cols.start), q.dtype)
    torch.baddbmm(s, q, take_columns(k, cols, scratch).mT, beta=0, alpha=scale, out=s)
    block.hide(s, cols, scratch, exact=False)
    p = torch.softmax(s, -1, out=s)
    again = rows_again(p)
    if again is None:
        return None
    out = torch.bmm(p, take_columns(v, cols, scratch))
    for n, row in again:
        seen = block.columns_of(row)
        weights = torch.softmax(k[n, seen].float() @ (q[n, row].float() * scale), 0)
        out[n, row] = weights.to(v.dtype).float() @ v[n, seen].float()
    return out


class BackwardWeights:
    """P of one chunk from rounded scores, times `unit`.

    The LSE is subtracted inside the matmul, from two bf16 columns of 8 bits each, and so is log2 of `unit`, a power of two
    near the number of columns: it puts the usual scores near 0, where bf16 is finest.
    """

    def __init__(self, q, k, lse_log2, scale: float, columns: int):
        """q `[n, G, Tq, D]`; k `[n, Tk, D + 2]`, the last two columns 1; lse_log2 `[n, G, Tq, 1]`; `columns` of a block."""
        self.unit = 2.0 ** round(math.log2(columns) - 1)
        self._alpha = scale * LOG2E
        rest = (lse_log2 - math.log2(self.unit)) / -self._alpha
        high = rest.to(q.dtype)
        self._q = q, high, (rest - high).to(q.dtype)
        self._k = k

    def block(self, block: RowBlock, scratch: Scratch):
        """`[n, G * rows, cols]`; None if some weight is too large for rounded scores."""
        cols = slice(block.start, block.end)
        q = take_rows(block, *self._q)
        x = scratch("p", (*q.shape[:2], cols.stop - cols.start), q.dtype)
        torch.baddbmm(x, q, take_columns(self._k, cols, scratch).mT, beta=0, alpha=self._alpha, out=x)
        block.hide(x, cols, scratch, exact=False)
        p = x.exp2_()
        for rare in block.rare_columns(FEWEST_ROWS):
            x = torch.bmm(q.float().mul_(self._alpha), self._k[:, rare].float().mT)
            block.hide(x, rare, scratch, exact=False)
            p[:, :, rare.start - block.start : rare.stop - block.start] = x.exp2_()
        again = rows_again(p, self.unit)
        for n, row in again or ():
            seen = block.columns_of(row)
            x = self._k[n, seen].float() @ (q[n, row].float() * self._alpha)
            p[n, row, seen.start - block.start : seen.stop - block.start] = x.exp2_()
        return None if again is None else p

    def invisible(self, do, blocks: list[RowBlock], scratch: Scratch) -> bool:
        """Do rounded scores leave dv of sampled keys where it is? do `[n, G, Tq, Dv]`; `blocks` are the eligible ones.

        dq and dk are not sampled: their bounds hold |do|.|o| beside |do.v|, which is about sqrt(D) times larger.
        """
        keys = _sample([(block.start, block.end) for block in blocks])  # the ends left out: not the rare ones
        rounded, rest = _score_and_rest(torch.cat(self._q, -1).flatten(1, 2), self._k[:, keys].mT, self._alpha)
        rounded, rest = (t.unflatten(1, do.shape[1:3]).movedim(3, 2) for t in (rounded, rest))  # [n, G, keys, Tq]
        shift, len_q, band = blocks[0].geometry.shift, blocks[0].geometry.len_q, blocks[0].geometry.band
        rounded = _hide(rounded, first_query(keys, shift, band), end_query(keys, shift, len_q, band))
        p = torch.exp2(rounded + rest)
        error, weights = (t.transpose(1, 2).flatten(2) for t in (torch.exp2(rounded) - p, p))
        return _small(error, weights, do.flatten(1, 2), scratch)


def _score_and_rest(q, k_columns, alpha: float):
    """`alpha q k^T` as its bf16 rounding and what that leaves out (exact to 2^-16), both as fp32."""
    empty = q.new_empty(*q.shape[:2], k_columns.shape[2])
    rounded = torch.baddbmm(empty, q, k_columns, beta=0, alpha=alpha)
    rest = torch.baddbmm(rounded, q, k_columns, beta=-1, alpha=alpha)
    return rounded.float(), rest.float()


def _sample(intervals):
    """Some of the rows or keys from the first to the last interval, evenly spaced, the ends left out."""
    start, end = min(first for first, _ in intervals), max(end for _, end in intervals)
    return torch.linspace(start, end - 1, _SAMPLES + 2, device="cpu")[1:-1].long()


def _hide(x, first, end):
    """-inf outside the interval of each sample; x `[..., samples, T]`, or the samples of each group folded into rows."""
    j = torch.arange(x.shape[-1], device="cpu")
    hidden = (j < first.unsqueeze(-1)) | (j >= end.unsqueeze(-1))
    return x.unflatten(-2, (-1, len(hidden))).masked_fill(hidden, -torch.inf).view(x.shape)


def _small(error, weights, values, scratch: Scratch) -> bool:
    """Is |error @ values| at most u weights @ |values|, in every element?"""
    absolute = torch.abs(values, out=scratch("columns", values.shape, values.dtype))
    error, terms = (torch.bmm(w.to(values.dtype), t).float() for w, t in ((error, values), (weights, absolute)))
    return bool((error.abs() <= UNIT_ROUNDOFF["bf16"] * terms).all())
