"""The forward on the CPU: `tiled` (FlashAttention-2's order of work, in large tiles) and `aten` (torch's own operator).

Each (row block, column tile) gives the attention over its columns, `o` and `lse`; the tiles of a row block are merged by
their LSE. Nearly always one tile holds all columns that the block sees. Scores are in units of log2: exp2 is 3 times faster
than exp in torch on a CPU.
"""

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
from rowmax.cpu.pieces import Piece, is_cut, pieces
from rowmax.cpu.scores import Scores, start_lse
from rowmax.mask import Band
from rowmax.numerics import LN2, LOG2E


def tiled(problem, operands, tile, need_lse, exact=False):
    """Row blocks outside, column tiles inside. `exact`: hidden scores may be NaN."""
    out_shape, lse_shape = problem.outputs()
    full = blocks.all_seen(problem, operands)
    out = operands.q.new_empty(out_shape) if full else operands.q.new_zeros(out_shape)
    lse = operands.q.new_full(lse_shape if need_lse else (0,), -torch.inf, dtype=problem.lse_dtype)
    if need_lse and problem.sink:
        start_lse(problem, operands, lse)
    scratch = Scratch()
    q, k, v = settled(*operands[:3])
    operands = operands._replace(q=q, k=k, v=v)
    for_q = (out, lse.movedim(-1, -2)) if need_lse else (out,)
    for number, rows, cols in numbered_sequences(problem, operands, for_q):
        # A bias or a sink may be far from the scores, which then need a pivot; and nothing but them may be rounded.
        bounded = problem.plain and half_scores.bounded(rows[0], cols[0], problem.scale)
        try_half = bounded and not need_lse and problem.dtype == torch.bfloat16 and problem.windowed
        try_half = try_half and torch.bfloat16 not in MATMUL
        geometry = Geometry(rows[0].shape[1], cols[0].shape[1], problem.band)
        try_half = try_half and half_scores.worth_it(geometry, rows[0].shape[0] * problem.heads_q)
        cut = is_cut(problem, tile, geometry)
        if try_half and cut:
            try_half = _whole_fits(problem, tile, geometry, rows[0], *cols, scratch)
        for piece in pieces(cut, problem.band, number, rows, cols):
            _piece(problem, operands, tile, piece, cut, scratch, need_lse, exact, bounded, try_half)
    return out, lse


def _piece(problem, operands, tile, piece: Piece, cut: bool, scratch: Scratch, need_lse, exact, bounded, try_half) -> None:
    """Writes out and lse, the second and a third of the rows. `cut`: rounded scores, if tried, are known to fit."""
    q, out, *row_lse = (by_kv_head(t, problem.heads_k) for t in piece.rows)  # [B, Hk, G, Tq, ...]
    k, v = (t.transpose(1, 2) for t in piece.cols)  # [B, Hk, Tk, D]
    lse = row_lse[0] if row_lse else None
    chunks = piece.chunks(tile, problem.group, try_half)
    compute, matmul = COMPUTE.get(q.dtype, q.dtype), MATMUL.get(q.dtype, q.dtype)
    scores = None if problem.plain else Scores.of(problem, operands, piece.number, piece.rows[0], piece.cols[0], compute)
    for part in chunks.parts:
        k_part, v_part = (fold_contiguous(take_heads(t, part), matmul, name, scratch) for t, name in ((k, "k"), (v, "v")))
        own_q, own_out = take_heads(q, part), take_heads(out, part)
        own_lse = None if lse is None else take_heads(lse, part)
        q_part = fold(own_q, matmul) if try_half else own_q
        chunk, attempts = None, 0.0
        if try_half and (
            cut or half_scores.fit_forward(q_part, k_part, v_part, problem.scale, piece.geometry, chunks, scratch)
        ):
            attempts = half_scores.ATTEMPTS
        for block in chunks.blocks:
            o, weight = None, None
            if attempts >= 1 and half_scores.eligible(block, chunks.width):
                block_q = take_rows(block, q_part)
                o = half_scores.forward_block(block_q, k_part, v_part, problem.scale, block, scratch)
                attempts += -1 if o is None else half_scores.EARNED
            if o is None:
                if chunk is None:
                    # Blocks come from the last to the first: no later one has more rows, or sees more columns.
                    most_q = own_q.narrow(3, 0, block.row + block.rows)
                    q_log2 = times(most_q, problem.scale * LOG2E, "q", compute, scratch).flatten(0, 1)
                    wide = widen(k_part[:, : block.end], compute, scratch)
                    part_scores = None if scores is None else scores.part(part)
                    chunk = _Chunk(q_log2, wide, v_part, part_scores, exact, bounded, need_lse, scratch)
                o, weight, lse_log2 = _row_block(chunk, block, chunks.width)
                if own_lse is not None:
                    target = own_lse.narrow(3, block.row, block.rows)
                    torch.mul(lse_log2.view(target.shape), LN2, out=target)
            target = own_out.narrow(3, block.row, block.rows)
            if weight is None:
                target.copy_(o.view(target.shape))
            else:
                torch.mul(o.view(target.shape), weight.view(*target.shape[:-1], 1), out=target)


class _Chunk(NamedTuple):
    """The operands of some heads, folded: q `[n, G, Tq, D]` times the scale, k `[n, Tk, D]`, v `[n, Tk, Dv]`. Scores that are
    `bounded` need no maximum as a pivot."""

    q_log2: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scores: Optional[Scores]
    exact: bool
    bounded: bool
    need_lse: bool
    scratch: Scratch


def _whole_fits(problem, tile, geometry: Geometry, q, k, v, scratch: Scratch) -> bool:
    """Do rounded scores fit sequences `[B, T, H, D]` that are to be cut? Samples of a short piece would cost more than it."""
    q, k, v = by_kv_head(q, problem.heads_k), k.transpose(1, 2), v.transpose(1, 2)
    batch, heads_k, group = q.shape[:3]
    chunks = Chunks.of(tile, geometry, batch, heads_k, group, True)
    whole = geometry._replace(band=Band())  # a sample meets all columns
    parts = Chunks.of(tile, whole, batch, heads_k, group, True).parts

    def fits(part) -> bool:
        k_part, v_part = (fold_contiguous(t[part], t.dtype, name, scratch) for t, name in ((k, "k"), (v, "v")))
        return half_scores.fit_forward(fold(q[part], q.dtype), k_part, v_part, problem.scale, geometry, chunks, scratch)

    return all(fits(part) for part in parts)


def _row_block(chunk: _Chunk, block: RowBlock, width: int):
    """`(o [n, G * rows, Dv], weight, lse_log2 [n, G * rows, 1])` of one row block over all columns that it sees: the result is
    o times the weight, where that is not None; nor is an LSE that is not needed."""
    q, scores = take_rows(block, chunk.q_log2), chunk.scores
    sink = None if scores is None else scores.sink_rows(block)
    tiles = list(block.tiles(width))
    out, weight, lse = _tile(chunk, q, block, tiles[0], sink, chunk.need_lse or len(tiles) > 1)
    for cols in tiles[1:]:
        o, o_weight, o_lse = _tile(chunk, q, block, cols, None, True)
        out, o = (t if w is None else t.mul_(w) for t, w in ((out, weight), (o, o_weight)))
        (out, lse), weight = _merge(out, lse, o, o_lse), None
    return out, weight, lse


def _tile(chunk: _Chunk, q, block: RowBlock, cols: slice, sink, need_lse: bool):
    """Attention of the rows `q` over one tile's columns and a `sink`, as of `_row_block`."""
    _, k, v, scores, exact, bounded, _, scratch = chunk
    s = torch.bmm(q, k[:, cols].mT, out=scratch("s", (*q.shape[:2], cols.stop - cols.start), q.dtype))
    if scores is not None:
        exact = exact or scores.any_number
        scores.bend(s, block, cols)
        scores.hide(s, block, cols, exact)
    block.hide(s, cols, scratch, exact)
    blind = (scores is not None and scores.hides) or block.blind_rows(cols) is not None
    m = None if bounded else s.amax(-1, keepdim=True)
    if m is not None:
        if sink is not None:
            m = torch.maximum(m, sink)
        if blind:
            m.masked_fill_(m == -torch.inf, 0.0)
        s.sub_(m)
    p = s.exp2_()
    l = p.sum(-1, keepdim=True)
    if sink is not None:
        l += (sink - m).exp2_()
    lse = None
    if need_lse:
        lse = l.log2() if m is None else m + l.log2()
    if scores is not None:
        scores.drop(p, block, cols)
    weight = 1.0 / torch.where(l == 0, 1.0, l) if blind else 1.0 / l
    v = take_columns(v, cols, scratch)
    if v.dtype == p.dtype:
        return torch.bmm(p, v), weight, lse
    # Normalised before it is rounded: the product is then rounded once, and exact where one key has all the weight.
    p = scratch("p", p.shape, v.dtype).copy_(p.mul_(weight))
    return torch.bmm(p, v), None, lse


def _merge(out, lse, o, tile_lse):
    """Attention over the union of two disjoint sets of columns; LSEs in log2, -inf where a row saw nothing."""
    pivot = torch.maximum(lse, tile_lse)
    pivot = torch.where(pivot == -torch.inf, 0.0, pivot)
    a, b = torch.exp2(lse - pivot), torch.exp2(tile_lse - pivot)
    total = a + b
    share = torch.where(total == 0, 0.0, 1.0 / total)
    return out.to(lse.dtype) * (a * share) + o.to(lse.dtype) * (b * share), pivot + total.log2()


def aten(problem, operands, need_lse):
    """torch's own flash operator, `[B, H, T, D]`, in fp32 for half types."""
    q, k, v = (t.transpose(1, 2).to(COMPUTE.get(t.dtype, t.dtype)) for t in operands[:3])
    causal = problem.band.right == 0
    found, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=problem.scale)
    out = operands.q.new_empty(problem.outputs()[0]).copy_(found.transpose(1, 2))  # a view could not be changed in place later
    return out, lse.contiguous() if need_lse else lse.new_empty(0)
