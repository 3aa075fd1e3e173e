"""The backward on the CPU: `tiled` recomputes the scores block by block from the LSE, `aten` is torch's own operator.

delta_i = do_i.o_i - dlse_i,   ds_ij = p_ij (do_i.v_j - delta_i)
"""

import torch

from rowmax.cpu import blocks
from rowmax.cpu.forward import COMPUTE, _fold


def tiled(problem, operands, out, lse, grad_out, grad_lse, needs, plan):
    """Row blocks outside, column tiles inside; dk and dv are summed over the row blocks in fp32."""
    grads = [
        torch.zeros_like(t, memory_format=torch.contiguous_format) if n else t.new_empty(0)
        for t, n in zip(operands[:3], needs, strict=True)
    ]
    wide = COMPUTE.get(problem.dtype, problem.dtype)
    if grad_out is None:
        grad_out = out.new_zeros(()).expand(out.shape)
    delta = torch.einsum("...d,...d->...", grad_out.to(wide), out.to(wide)) if grad_out is not None else None
    if grad_lse is not None:
        delta = delta - grad_lse.movedim(-1, -2)
    dq, dk, dv = grads
    for_q = [grad_out, lse.movedim(-1, -2), delta] + ([dq] if needs[0] else [])
    for_k = [g for g, n in ((dk, needs[1]), (dv, needs[2])) if n]
    for rows, (k, v, *dkv) in blocks.sequences(problem, operands, for_q, for_k):
        q, do, row_lse, row_delta, *row_dq = (blocks.by_kv_head(t, problem.heads_k) for t in rows)
        k, v, *dkv = (t.transpose(1, 2) for t in (k, v, *dkv))
        col_dk = dkv.pop(0) if needs[1] else None
        col_dv = dkv.pop(0) if needs[2] else None
        _sequence(problem, plan.tiles[0], q, k, v, do, row_lse, row_delta, row_dq[0] if needs[0] else None, col_dk, col_dv)
    return tuple(grads)


def _sequence(problem, tile, q, k, v, do, lse, delta, dq, dk, dv):
    batch, heads_k, group, len_q, _ = q.shape
    len_k = k.shape[2]
    shift, band = len_k - len_q, problem.band
    live = blocks.first_live_row(len_q, len_k, band)
    if live == len_q or batch == 0:
        return
    step = max(1, min(tile.block_m // group, len_q))
    width = min(len_k, tile.block_n)
    most = max(1, tile.block_m * tile.block_n // (group * step * width))
    for b, h in blocks.chunks(batch, heads_k, most):
        kf, vf = _fold(k[b, h]), _fold(v[b, h])
        dk_acc = torch.zeros_like(kf)
        dv_acc = torch.zeros_like(vf)
        for row in range(live, len_q, step):
            rows = min(step, len_q - row)
            at = (b, h, slice(None), slice(row, row + rows))
            qf = _fold(q[at]).flatten(1, 2) * problem.scale
            dof = _fold(do[at]).flatten(1, 2)
            row_lse = lse[at].flatten(0, 1).flatten(1, 2).unsqueeze(-1)
            row_delta = delta[at].flatten(0, 1).flatten(1, 2).unsqueeze(-1)
            dq_acc = torch.zeros_like(qf)
            seen = blocks.columns(row, rows, len_q, len_k, band)
            for start in range(seen.start, seen.end, width):
                cols = slice(start, min(start + width, seen.end))
                s = torch.bmm(qf, kf[:, cols].mT)
                blocks.hide(s, -torch.inf, row, rows, start, seen, shift, len_k, band)
                p = torch.exp(s - row_lse)
                if dv is not None:
                    dv_acc[:, cols] += torch.bmm(p.mT, dof)
                if dq is None and dk is None:
                    continue
                ds = p * (torch.bmm(dof, vf[:, cols].mT) - row_delta)
                if dq is not None:
                    dq_acc += torch.bmm(ds, kf[:, cols])
                if dk is not None:
                    dk_acc[:, cols] += torch.bmm(ds.mT, qf)
            if dq is not None:
                dq[at] = (dq_acc * problem.scale).view(dq[at].shape)
        if dk is not None:
            dk[b, h] = dk_acc.view(dk[b, h].shape)
        if dv is not None:
            dv[b, h] = dv_acc.view(dv[b, h].shape)


def aten(problem, operands, out, lse, grad_out, grad_lse, needs, plan):
    """torch's own flash operator, `[B, H, T, D]`. It takes no gradient of the LSE: with one, the plan's tile is used."""
    if grad_out is None or grad_lse is not None:
        return tiled(problem, operands, out, lse, grad_out, grad_lse, needs, plan)
    q, k, v, do, o = (t.transpose(1, 2) for t in (*operands[:3], grad_out, out))
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = run(do, q, k, v, o, lse, 0.0, problem.band.right == 0, scale=problem.scale)
    return tuple(
        grad.transpose(1, 2).contiguous() if need else grad.new_empty(0) for grad, need in zip(grads, needs, strict=True)
    )
