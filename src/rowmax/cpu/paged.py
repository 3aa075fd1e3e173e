"""Attention over a paged cache on the CPU: the pages of one sequence at a time are gathered, then `tiled` does the rest.

Memory is that of the longest sequence. Pages behind a sequence's length are not looked at, nor the table's entries for them.
"""

import torch

from rowmax import cpu
from rowmax.mask import end_key, first_key
from rowmax.paged import E4M3, MOST_E4M3, AppendOperands, PagedOperands, PagedProblem, check_values, places, rotate
from rowmax.plan import Plan
from rowmax.problem import Operands


def forward(problem: PagedProblem, operands: PagedOperands, plan: Plan, need_lse: bool, out: torch.Tensor, lse):
    """Writes out, shaped as q, and lse (None unless `need_lse`)."""
    check_values(problem, operands)
    q, k, v, table, lengths, cu, k_scale, v_scale = operands
    bounds = None if cu is None else cu.tolist()
    if bounds is not None:  # rows outside every sequence
        out.zero_()
    if need_lse:
        lse.fill_(-torch.inf)
    for b, keys in enumerate(lengths.tolist()):
        rows = slice(b, b + 1) if bounds is None else slice(bounds[b], bounds[b + 1])
        one_q, one_out = q[rows], out[rows]
        if q.dim() == 3:
            one_q, one_out = (t.unsqueeze(1 if bounds is None else 0) for t in (one_q, one_out))
        ids = table[b, : -(-keys // problem.page_size)].long()
        one_k, one_v = (_gathered(t, ids, keys) for t in (k, v))
        if problem.eight_bits:  # exact in fp32
            one_q, one_k, one_v = (
                one_q.float(),
                *(_dequantised(t, factors, ids, problem.page_size) for t, factors in ((one_k, k_scale), (one_v, v_scale))),
            )
        if problem.batch_invariant:
            result, result_lse = _one_by_one(problem, one_q[0], one_k[0], one_v[0], need_lse)
            one_out.copy_(result[None])
            where = lse if not need_lse else lse[b] if bounds is None else lse[:, rows]
            if need_lse:
                where.copy_(result_lse.view(where.shape))
            continue
        one = problem.with_(dtype=one_q.dtype, batch=1, len_q=one_q.shape[1], len_k=keys, packed=False, max_len_q=None)
        result, result_lse = cpu.forward(one, Operands(one_q, one_k, one_v), plan, need_lse)
        one_out.copy_(result)
        if need_lse and bounds is None:
            lse[b].copy_(result_lse[0].view(lse[b].shape))
        elif need_lse:
            lse[:, rows].copy_(result_lse[0])


def _gathered(pages: torch.Tensor, ids: torch.Tensor, keys: int) -> torch.Tensor:
    """`[1, keys, H, D]` from pages; one page is where it lies."""
    one = pages[int(ids)] if len(ids) == 1 else pages[ids].flatten(0, 1)
    return one[None, :keys]


PART = 1024  # keys of every product of `_one_by_one`


def _one_by_one(problem: PagedProblem, q, k, v, need_lse: bool):
    """`(out [T, H, Dv], lse [H, T])` of one sequence, a query at a time and keys in padded parts of one size: all products have
    the same shapes, so that a query's bits depend on nothing but itself and its keys. Slow."""
    wide = torch.promote_types(q.dtype, torch.float32)
    tokens, keys, heads_k = q.shape[0], k.shape[0], problem.heads_k
    padding = (0, 0, 0, 0, 0, -keys % PART)
    k, v = (torch.nn.functional.pad(t.to(wide), padding).transpose(0, 1).contiguous() for t in (k, v))
    out = q.new_zeros(tokens, problem.heads_q, problem.dim_v)
    lse = q.new_full((problem.heads_q, tokens), -torch.inf, dtype=wide)
    for i in range(tokens):
        row = (q[i].to(wide) * problem.scale).view(heads_k, problem.group, -1)
        first = max(first_key(i, keys - tokens, problem.band), 0)
        end = min(end_key(i, keys - tokens, keys, problem.band), keys)
        total = torch.full((heads_k, problem.group, 1), -torch.inf, dtype=wide)
        acc = torch.zeros(heads_k, problem.group, problem.dim_v, dtype=wide)
        for begin in range(first // PART * PART, end, PART):
            j = torch.arange(begin, begin + PART)
            seen = (j >= first) & (j < end)
            s = torch.bmm(row, k[:, begin : begin + PART].mT).masked_fill(~seen, -torch.inf)
            part = torch.logsumexp(s, -1, keepdim=True)
            p = torch.exp(s - part)
            o = torch.bmm(p, v[:, begin : begin + PART].masked_fill(~seen[:, None], 0.0))
            both = torch.logaddexp(total, part)
            acc = acc * torch.exp(total - both) + o * torch.exp(part - both)
            total = both
        if first < end:
            out[i], lse[:, i] = acc.view(problem.heads_q, -1).to(q.dtype), total.flatten()
    return out, lse if need_lse else None


def append(operands: AppendOperands, interleaved: bool) -> None:
    """Writes new keys and values into their pages.

    Raises:
        ProblemError: a token has no place; names the sequence. Nothing is written then.
    """
    k_pages, v_pages, k, v, _, _, cu, cos, sin, k_scale, v_scale = operands
    size = k_pages.shape[1]
    position, page = places(operands)
    if cu is None:
        k, v = k.reshape(-1, *k.shape[-2:]), None if v is None else v.reshape(-1, *v.shape[-2:])
    else:
        k, v = k[: int(cu[-1])], None if v is None else v[: int(cu[-1])]
    if cos is not None and sin is not None:
        k = rotate(k, cos[position], sin[position], interleaved=interleaved)
    k_pages[page, position % size] = _quantised(k, k_scale, page) if k_pages.dtype == E4M3 else k
    if v is not None and v_pages is not None:
        v_pages[page, position % size] = _quantised(v, v_scale, page) if v_pages.dtype == E4M3 else v


def _quantised(x: torch.Tensor, scale, page: torch.Tensor) -> torch.Tensor:
    """`[T, H, D]` in 8 bits, of tokens in these pages; what is too large for them becomes the largest number."""
    x = x.float()
    if scale is not None:
        x = x / (scale if scale.dim() == 1 else scale[page]).unsqueeze(-1)
    return x.clamp(-MOST_E4M3, MOST_E4M3).to(E4M3)


def _dequantised(x: torch.Tensor, scale, ids: torch.Tensor, page_size: int) -> torch.Tensor:
    """`[1, keys, H, D]` of a sequence with these pages."""
    if scale is None:
        return x.float()
    if scale.dim() == 2:
        scale = scale[ids].repeat_interleave(page_size, 0)[: x.shape[1]]
    return x.float() * scale.unsqueeze(-1)
