"""The forward on the CPU: `tiled` (FlashAttention-2's order of work, large tiles) and `aten` (torch's own operator).

Each (row block, column tile) gives the attention over its columns, `o` and `lse`; the tiles of a row block are merged by
their LSE. Nearly always one tile holds all columns that the block sees.
"""

import torch

from rowmax.cpu import blocks

COMPUTE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def tiled(problem, operands, plan, need_lse):
    """Row blocks outside, column tiles inside."""
    out_shape, lse_shape = problem.outputs()
    out = operands.q.new_zeros(out_shape)
    lse = operands.q.new_full(lse_shape if need_lse else (0,), -torch.inf, dtype=problem.lse_dtype)
    for_q = (out, lse.movedim(-1, -2)) if need_lse else (out,)
    for (q, o, *row_lse), (k, v) in blocks.sequences(problem, operands, for_q):
        q, o, *row_lse = (blocks.by_kv_head(t, problem.heads_k) for t in (q, o, *row_lse))
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        _sequence(problem, plan.tiles[0], q, k, v, o, *row_lse)
    return out, lse


def _sequence(problem, tile, q, k, v, out, lse=None):
    """q, out `[B, Hk, G, Tq, D]`, k, v `[B, Hk, Tk, D]`, lse `[B, Hk, G, Tq]`; writes out and lse."""
    batch, heads_k, group, len_q, _ = q.shape
    len_k = k.shape[2]
    live = blocks.first_live_row(len_q, len_k, problem.band)
    step = max(1, min(tile.block_m // group, len_q))
    widest = max((c.end - c.start for c in _all_columns(problem, live, step, len_q, len_k)), default=0)
    if widest == 0:
        return
    width = min(widest, tile.block_n)
    most = max(1, tile.block_m * tile.block_n // (group * step * width))
    for b, h in blocks.chunks(batch, heads_k, most):
        kf, vf = _fold(k[b, h]), _fold(v[b, h])
        for row in range(live, len_q, step):
            rows = min(step, len_q - row)
            qf = _fold(q[b, h, :, row : row + rows] * 1.0).flatten(1, 2).mul(problem.scale)
            o, m = _row_block(qf, kf, vf, row, rows, len_q, problem.band, width)
            out[b, h, :, row : row + rows] = o.view(out[b, h, :, row : row + rows].shape)
            if lse is not None:
                lse[b, h, :, row : row + rows] = m.view(lse[b, h, :, row : row + rows].shape)


def _all_columns(problem, live, step, len_q, len_k):
    return (blocks.columns(row, min(step, len_q - row), len_q, len_k, problem.band) for row in range(live, len_q, step))


def _fold(t):
    """`[b, h, ...]` -> `[n, ...]` in the type that is computed in."""
    return t.to(COMPUTE.get(t.dtype, t.dtype)).flatten(0, 1)


def _row_block(q, k, v, row, rows, len_q, band, width):
    """`(o, lse)` of one row block over all its columns: q `[n, G * rows, D]` scaled, k, v `[n, Tk, D]`."""
    len_k = k.shape[1]
    seen = blocks.columns(row, rows, len_q, len_k, band)
    out = lse = None
    for start in range(seen.start, seen.end, width):
        end = min(start + width, seen.end)
        s = torch.bmm(q, k[:, start:end].mT)
        blocks.hide(s, -torch.inf, row, rows, start, seen, len_k - len_q, len_k, band)
        m = s.amax(-1)
        p = torch.softmax(s, -1)
        tile_lse = torch.where(m == -torch.inf, m, m - p.amax(-1).log())
        p = torch.where((m == -torch.inf).unsqueeze(-1), 0.0, p)
        o = torch.bmm(p, v[:, start:end])
        out, lse = (o, tile_lse) if out is None else _merge(out, lse, o, tile_lse)
    return out, lse


def _merge(out, lse, o, tile_lse):
    """Attention over the union of two disjoint sets of columns."""
    both = torch.logaddexp(lse, tile_lse)
    pivot = torch.where(both == -torch.inf, 0.0, both)
    out = out * torch.exp(lse - pivot).unsqueeze(-1) + o * torch.exp(tile_lse - pivot).unsqueeze(-1)
    return out, both


def aten(problem, operands, plan, need_lse):
    """torch's own flash operator, `[B, H, T, D]`."""
    q, k, v = (t.transpose(1, 2) for t in operands[:3])
    causal = problem.band.right == 0
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=problem.scale)
    out = out.transpose(1, 2).contiguous()
    return out, lse.contiguous() if need_lse else lse.new_empty(0)
