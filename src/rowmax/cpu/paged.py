"""Attention over a paged cache on the CPU: the pages of one sequence at a time are gathered, then `tiled` does the rest.

Memory is that of the longest sequence. Pages behind a sequence's length are not looked at, nor the table's entries for them.
"""

import torch

from rowmax import cpu
from rowmax.paged import PagedOperands, PagedProblem, check_values
from rowmax.plan import Plan
from rowmax.problem import Operands


def forward(problem: PagedProblem, operands: PagedOperands, plan: Plan, need_lse: bool, out: torch.Tensor, lse):
    """Writes out, shaped as q, and lse (None unless `need_lse`)."""
    check_values(problem, operands)
    q, k, v, table, lengths, cu = operands
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
        one_k, one_v = (t[ids].flatten(0, 1)[None, :keys] for t in (k, v))
        one = problem.with_(batch=1, len_q=one_q.shape[1], len_k=keys, packed=False, max_len_q=None)
        result, result_lse = cpu.forward(one, Operands(one_q, one_k, one_v), plan, need_lse)
        one_out.copy_(result)
        if need_lse and bounds is None:
            lse[b].copy_(result_lse[0].view(lse[b].shape))
        elif need_lse:
            lse[:, rows].copy_(result_lse[0])
