"""The backward on the CPU: `tiled` recomputes the weights block by block from the LSE, `aten` is torch's own operator.

    p_ij = exp(s_ij - lse_i),   ds_ij = p_ij (do_i.v_j - delta_i),   delta_i = do_i.o_i - dlse_i

Five matmuls and two passes over a tile: both subtractions happen inside a matmul. P and dS are rounded to the type of the
large matmuls; the sums of dk and dv over row blocks are fp32 (fp64 for fp64).
"""

import math
from typing import NamedTuple, Optional

import torch

from rowmax.cpu import blocks, half_scores
from rowmax.cpu.blocks import (
    COMPUTE,
    MATMUL,
    Chunks,
    Geometry,
    RowBlock,
    Scratch,
    by_kv_head,
    fold,
    fold_contiguous,
    numbered_sequences,
    settled,
    take_columns,
    take_heads,
    take_rows,
    times,
    widen,
)
from rowmax.cpu.pieces import add_overlapping, is_cut, pieces
from rowmax.cpu.scores import Scores
from rowmax.numerics import LOG2E

# Above this, rounding alone may lift s - lse over the range of exp2; a weight is never above 1, so it is cut there.
_HUGE_LSE = 2.0**16
# Weights are multiplied by this: bf16 matmuls take subnormal numbers for 0, and a key may have no larger weight.
_UNIT_LOG2 = 24


class _Targets(NamedTuple):
    """Where gradients go; None is not needed. dq `[B, Hk, G, Tq, D]`, dk, dv `[B, Hk, Tk, D]`."""

    dq: Optional[torch.Tensor]
    dk: Optional[torch.Tensor]
    dv: Optional[torch.Tensor]


def tiled(problem, operands, out, lse, grad_out, grad_lse, needs, tile):
    """Row blocks outside, column tiles inside; dk and dv are summed over the row blocks. A fourth of `needs` is the bias's."""
    compute = COMPUTE.get(problem.dtype, problem.dtype)
    wants_bias = len(needs) > 3 and needs[3]
    bias_sums = torch.zeros(operands.bias.shape, dtype=compute, device="cpu") if wants_bias else None
    fresh = torch.empty if blocks.all_seen(problem, operands) else torch.zeros
    shapes = [t.shape if need else (0,) for t, need in zip(operands[:3], needs[:3], strict=True)]
    grads = tuple(fresh(shape, dtype=problem.dtype, device="cpu") for shape in shapes)
    grad_out = out.new_zeros(()).expand(out.shape) if grad_out is None else grad_out
    q, k, v, grad_out = settled(*operands[:3], grad_out)
    operands = operands._replace(q=q, k=k, v=v)
    scratch = Scratch()
    named = (("dk", grad_out), ("dv", out))
    do, o = (t if t.dtype == compute else scratch(name, t.shape, compute).copy_(t) for name, t in named)
    delta = torch.mul(do, o, out=scratch("dv", out.shape, compute)).sum(-1)  # [B, T, H]
    if grad_lse is not None:
        delta -= grad_lse.movedim(-1, -2)
    # A gradient that is not needed is empty, and has no sequences to cut.
    for_q = (grad_out, lse.movedim(-1, -2), delta, *grads[:1][: needs[0]])
    for_k = tuple(grad for grad, need in zip(grads[1:], needs[1:3], strict=True) if need)
    for number, rows, cols in numbered_sequences(problem, operands, for_q, for_k):
        whole = Geometry(rows[0].shape[1], cols[0].shape[1], problem.band)
        cut = is_cut(problem, tile, whole, "backward")
        # Pieces meet where their keys overlap, and are added up there; head after head, so that long stretches are.
        sums = [_by_head(scratch, f"sum{i}", t, compute).zero_() for i, t in enumerate(cols[2:])] if cut else cols[2:]
        try_half = problem.dtype == torch.bfloat16 and torch.bfloat16 not in MATMUL and problem.plain and problem.windowed
        try_half = try_half and half_scores.worth_it(whole, rows[0].shape[0] * problem.heads_q, "backward")
        try_half = try_half and half_scores.bounded(rows[0], cols[0], problem.scale)
        for piece in pieces(cut, problem.band, number, rows, [*cols[:2], *sums]):
            q, do, row_lse, row_delta, *dq = (by_kv_head(t, problem.heads_k) for t in piece.rows)
            k, v, *dkv = (t.transpose(1, 2) for t in piece.cols)
            targets = _Targets(dq[0] if needs[0] else None, dkv[0] if needs[1] else None, dkv[-1] if needs[2] else None)
            scores = None
            if not problem.plain:
                scores = Scores.of(problem, operands, piece.number, piece.rows[0], piece.cols[0], compute, bias_sums)
            chunks, own = piece.chunks(tile, problem.group, try_half), (q, k, v, do, row_lse, row_delta)
            for part in chunks.parts:
                chunk = _Chunk(problem.scale, piece.geometry, scratch, *(take_heads(t, part) for t in own))
                if scores is not None:
                    chunk.bend_by(scores.part(part))
                if try_half:
                    chunk.try_half_scores(take_heads(k, part), chunks)
                _backward(chunk, chunks, _Targets(*(None if t is None else take_heads(t, part) for t in targets)), cut, scratch)
        if cut:
            for grad, total in zip(cols[2:], sums, strict=True):
                grad.copy_(total)
    if bias_sums is None:
        return (*grads, *(lse.new_empty(0) for _ in needs[3:]))
    return (*grads, bias_sums.to(operands.bias.dtype))


def _by_head(scratch: Scratch, name: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the shape of `like` `[B, T, H, D]`, with undefined contents, that lies as `[B, H, T, D]`."""
    batch, length, heads, dim = like.shape
    return scratch(name, (batch, heads, length, dim), dtype).transpose(1, 2)


class _Exact(NamedTuple):
    """Of some heads, in the type that scores are computed in: q times the scale, k, and the LSE less log2 of the unit."""

    q_log2: torch.Tensor
    k: torch.Tensor
    lse_log2: torch.Tensor


class _Chunk:
    """The operands of some heads, folded, and the weights of their tiles."""

    def __init__(self, scale, geometry, scratch, q, k, v, do, lse, delta):
        self.compute, matmul = COMPUTE.get(q.dtype, q.dtype), MATMUL.get(q.dtype, q.dtype)
        self.scale, self.geometry, self._scratch = scale, geometry, scratch
        self.q, self.do = fold(q, matmul), fold(do, matmul)  # [n, G, Tq, D]
        self.k = fold_contiguous(k, matmul, "k", scratch)  # [n, Tk, D]
        self.lse_log2, self.delta = (t.flatten(0, 1).unsqueeze(-1) for t in (lse * LOG2E, delta))  # [n, G, Tq, 1]
        # In bf16 delta is two more columns of do, of 8 bits each, and -1 of v: their product is do.v - delta.
        self._do_delta: Optional[torch.Tensor] = None
        if matmul != self.compute:
            dim = do.shape[-1]
            self._do_delta = scratch("do_delta", (*self.do.shape[:-1], dim + 2), matmul)
            self._do_delta[..., :dim].copy_(self.do)
            high = self._do_delta[..., dim : dim + 1].copy_(self.delta)
            torch.sub(self.delta, high, out=self._do_delta[..., dim + 1 :])
        more = 0 if self._do_delta is None else 2
        self._v = fold_contiguous(v, matmul, "v", scratch, *(-1.0 for _ in range(more)))
        self.unit = 2.0**_UNIT_LOG2
        self._exact: Optional[_Exact] = None
        self._huge = bool((self.lse_log2.abs() > _HUGE_LSE).any())
        self.scores: Optional[Scores] = None
        self._half: Optional[half_scores.BackwardWeights] = None
        self._attempts = 0.0

    def bend_by(self, scores: Scores) -> None:
        self.scores = scores
        if scores.hides:  # a row that sees nothing has no weights
            self.lse_log2 = self.lse_log2.masked_fill(self.lse_log2 == -math.inf, math.inf)

    def dp_minus_delta(self, block: RowBlock, cols: slice, out: torch.Tensor) -> torch.Tensor:
        """`do_i.v_j - delta_i` of one tile, into `out` `[n, G * rows, cols]`; dropped is dP, before delta is subtracted."""
        if self.scores is not None and self.scores.dropout is not None:
            v = self._v[:, cols, : self.do.shape[-1]].contiguous()
            dp = torch.bmm(take_rows(block, self.do), v.mT).to(self.compute)
            return out.copy_(self.scores.drop(dp, block, cols).sub_(take_rows(block, self.delta)))
        v = take_columns(self._v, cols, self._scratch).mT
        if self._do_delta is not None:
            return torch.bmm(take_rows(block, self._do_delta), v, out=out)
        return torch.baddbmm(take_rows(block, self.delta), take_rows(block, self.do), v, beta=-1, out=out)

    def try_half_scores(self, k, chunks: Chunks) -> None:
        """Use rounded scores if they fit. k `[b, Hk, Tk, D]`."""
        blocks = half_scores.eligible_blocks(self.geometry, chunks, self.q.shape[1])
        if blocks and self.geometry.len_q >= half_scores.FEWEST_ROWS:
            k_ones = fold_contiguous(k, k.dtype, "k_ones", self._scratch, 1.0, 1.0)
            columns = max(block.end - block.start for block in blocks)
            half = half_scores.BackwardWeights(self.q, k_ones, self.lse_log2, self.scale, columns)
            if half_scores.even(self.do) and half.invisible(self.do, blocks, self._scratch):
                self._half, self._attempts, self.unit = half, half_scores.ATTEMPTS, half.unit

    def weights(self, block: RowBlock, cols: slice, width: int, scratch: Scratch):
        """`(P, P')` times `unit` of one tile, `[n, G * rows, cols]`: P' is P times the derivative of the soft-cap."""
        if self._half and self._attempts >= 1 and half_scores.eligible(block, width):
            p = self._half.block(block, scratch)
            self._attempts += -1 if p is None else half_scores.EARNED
            if p is not None:
                return p, p
        if self._exact is None:  # blocks come from the last to the first: no later one has more rows, or sees more columns
            most_q = self.q.narrow(2, 0, block.row + block.rows)
            q_log2 = times(most_q, self.scale * LOG2E, "q", self.compute, scratch)
            wide = widen(self.k[:, : block.end], self.compute, scratch)
            self._exact = _Exact(q_log2, wide, self.lse_log2 - math.log2(self.unit))
        q_log2, lse_log2 = take_rows(block, self._exact.q_log2), take_rows(block, self._exact.lse_log2)
        shape = (*q_log2.shape[:2], cols.stop - cols.start)
        x = scratch("s", shape, self.compute)
        unit_log2, gain = math.log2(self.unit), None
        exact = self.scores is not None and self.scores.any_number
        if self.scores is None:
            torch.baddbmm(lse_log2, q_log2, self._exact.k[:, cols].mT, beta=-1, out=x)
        else:
            torch.bmm(q_log2, self._exact.k[:, cols].mT, out=x)
            gain = self.scores.bend(x, block, cols, want_gain=True)
            self.scores.hide(x, block, cols, exact)
            x.sub_(lse_log2)
        block.hide(x, cols, scratch, exact)
        p = (x.clamp_(max=unit_log2) if self._huge else x).exp2_()
        if exact and gain is not None:
            gain.masked_fill_(p == 0, 0.0)
        narrow = p if p.dtype == self.q.dtype else scratch("p", shape, self.q.dtype).copy_(p)
        # Multiplied before it is rounded: the product of rounded ones would be off by one rounding more.
        return narrow, narrow if gain is None else gain.mul_(p).to(self.q.dtype)


def _backward(chunk: _Chunk, chunks: Chunks, targets: _Targets, add: bool, scratch: Scratch) -> None:
    """All row blocks of one chunk. `add`: to what dk and dv hold."""
    dq, dk, dv = targets
    heads, len_k, dim = chunk.k.shape
    dk_sum = _Sum(scratch("dk", (heads, len_k, dim), chunk.compute), scratch)
    dv_sum = _Sum(scratch("dv", (heads, len_k, chunk.do.shape[-1]), chunk.compute), scratch)
    for block in chunks.blocks:
        q, do = take_rows(block, chunk.q), take_rows(block, chunk.do)
        row_dq = None
        for cols in block.tiles(chunks.width):
            p, steep = chunk.weights(block, cols, chunks.width, scratch)
            drops = chunk.scores if chunk.scores is not None and chunk.scores.dropout is not None else None
            if dv is not None:
                z = p if drops is None else drops.drop(p.to(chunk.compute, copy=True), block, cols).to(p.dtype)
                dv_sum.add(cols, z, do)
            pairs = chunk.scores if chunk.scores is not None and chunk.scores.bias_gradient is not None else None
            if dq is None and dk is None and pairs is None:
                continue
            ds = chunk.dp_minus_delta(block, cols, scratch("ds", p.shape, p.dtype))
            if pairs is not None:
                pairs.add_bias_gradient(p, ds, chunk.unit, block, cols)
            ds.mul_(steep)
            if dk is not None:
                dk_sum.add(cols, ds, q)
            if dq is not None:
                if chunk.scale:
                    tile_dq = torch.baddbmm(q, ds, take_columns(chunk.k, cols, scratch), beta=0, alpha=chunk.scale / chunk.unit)
                else:  # with both factors 0 the bf16 operator leaves its result unwritten
                    tile_dq = torch.zeros_like(q)
                row_dq = tile_dq if row_dq is None else row_dq.to(chunk.compute).add_(tile_dq)
        if dq is not None and row_dq is not None:
            target = dq.narrow(3, block.row, block.rows)
            target.copy_(row_dq.view(target.shape))
    for grad, total, factor in ((dk, dk_sum, chunk.scale), (dv, dv_sum, 1.0)):
        if grad is None:
            continue
        value, factor = total.value().view(grad.shape), factor / chunk.unit
        if add:
            add_overlapping(grad, value, factor)
        else:
            grad.copy_(value.mul_(factor))


class _Sum:
    """`sum weights^T rows` over the row blocks of a chunk, `[n, Tk, D]`; the first one, if it has all columns, is not added."""

    def __init__(self, acc: torch.Tensor, scratch: Scratch):
        self._acc, self._scratch, self._started = acc, scratch, False

    def add(self, cols: slice, weights: torch.Tensor, rows: torch.Tensor) -> None:
        acc = self._acc[:, cols]
        first = not self._started and acc.shape == self._acc.shape
        if first and weights.dtype == acc.dtype:
            torch.bmm(weights.mT, rows, out=acc)
        else:
            part = torch.bmm(weights.mT, rows, out=self._scratch("part", acc.shape, weights.dtype))
            if first:
                acc.copy_(part)
            else:  # converted before: half the time of adding two types
                part = part if part.dtype == acc.dtype else self._scratch("part", acc.shape, acc.dtype).copy_(part)
                self.value()[:, cols].add_(part)
        self._started = True

    def value(self) -> torch.Tensor:
        if not self._started:
            self._acc.zero_()
            self._started = True
        return self._acc


def aten(problem, operands, out, lse, grad_out, needs):
    """torch's own flash operator, `[B, H, T, D]`, in fp32 for half types; it computes all three gradients, needed or not."""
    q, k, v, do, o = (t.transpose(1, 2).to(COMPUTE.get(t.dtype, t.dtype)) for t in (*operands[:3], grad_out, out))
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = run(do, q, k, v, o, lse, 0.0, problem.band.right == 0, scale=problem.scale)
    return tuple(
        like.new_empty(like.shape).copy_(grad.transpose(1, 2)) if need else like.new_empty(0)
        for grad, need, like in zip(grads, needs, operands[:3], strict=True)
    )
