"""Four identities of the gradients, for problems too large to compare every element.

    sum_j dK_j = scale sum_i dLSE_i q_i      sum_j dV_j = sum_i dO_i      <Q, dQ> = <K, dK>      <V, dV> = <O, dO>

per sequence and KV head, over rows that see a key; each within the sum of its elements' bounds. They are blind to mistakes that
keep the sums, and complete the sampled rows of `rule`.
"""

import math

import torch

from rowmax.problem import Operands, Problem
from rowmax.testing.pieces import expand_heads, spans
from rowmax.testing.report import Report, Tally, error_factor, roundoff, tiny


def check_sums(problem: Problem, operands: Operands, grads, grad_out, grad_lse, out, report: Report) -> Report:
    """The report with the sums' verdicts added.

    W_ij of `rule` sums over keys to at most 3 |dO_i| max_j |v_j| + |dLSE_i|, and S_i is at most |scale| |q_i| max_j |k_j|, so
    that no matrix of scores is needed.
    """
    # The first holds where scores are linear in k up to what is added, the second where all weight is on values; both where
    # the band alone leaves rows without keys.
    linear = not problem.softcap and not problem.sink and not problem.pairs and not problem.score_mod
    holds = (linear, not problem.sink and not problem.pairs and not problem.dropout, True, True)
    names = ("sum dk", "sum dv", "<q,dq> = <k,dk>", "<v,dv> = <o,do>")
    tallies = [Tally(name, problem) for name in names]
    u, least, scale = roundoff(problem), tiny(problem), abs(problem.scale)
    for number, (lead, span_q, span_k) in enumerate(spans(problem, operands)):
        if not len(span_q) or not len(span_k):
            continue
        rows, keys = ((*lead, slice(span.start, span.stop)) for span in (span_q, span_k))
        q, k, v = operands.q[rows].double(), operands.k[keys].double(), operands.v[keys].double()
        dq, dk, dv = (None if g is None else g[i].double() for g, i in zip(grads, (rows, keys, keys), strict=True))
        d_out = torch.zeros_like(q[..., :1]).expand(-1, -1, problem.dim_v) if grad_out is None else grad_out[rows].double()
        d_lse = torch.zeros_like(q[..., 0]) if grad_lse is None else _lse_span(problem, grad_lse, lead, span_q)
        live = _live(problem, len(span_q), len(span_k), q.device)[:, None]
        d_out, d_lse = torch.where(live[..., None], d_out, 0.0), torch.where(live, d_lse, 0.0)

        terms = (d_out.abs() * expand_heads(problem, v.abs().amax(0, keepdim=True))).sum(-1)  # [rows, H]
        logits = scale * (q.abs() * expand_heads(problem, k.abs().amax(0, keepdim=True))).sum(-1)
        factor = error_factor(problem, 4 * logits + math.log(len(k)))  # |lse| is at most S + log(len_k)
        weights = factor * (3 * terms + d_lse.abs())

        def heads(x):  # [rows, H, ...] summed over rows and the group: [Hk, ...]
            return x.sum(0).view(problem.heads_k, problem.group, *x.shape[2:]).sum(1)

        def dot(x, y):
            return (x * y).sum(-1)

        where = f"sequence {number}"
        if dk is not None and holds[0]:
            floor = least * len(k) * (1 + scale * heads(q.abs()))
            bound = scale * heads(weights[..., None] * q.abs()) + u * dk.abs().sum(0) + floor
            tallies[0].add(where, dk.sum(0), problem.scale * heads(d_lse[..., None] * q), bound)
        if dv is not None and holds[1]:
            bound = heads(factor[..., None] * d_out.abs()) + u * dv.abs().sum(0) + least * len(k) * (1 + heads(d_out.abs()))
            tallies[1].add(where, dv.sum(0), heads(d_out), bound)
        if dq is not None and dk is not None:
            rounding = u * (heads(dot(q, dq).abs()) + dot(k, dk).abs().sum(0))
            floor = least * (1 + len(k) * heads(q.abs().sum(-1)) + len(q) * k.abs().sum((0, 2))) * (1 + scale)
            tallies[2].add(where, heads(dot(q, dq)), dot(k, dk).sum(0), 2 * heads(weights * logits) + rounding + floor)
        if dv is not None and out is not None:
            o = out[rows].double()
            rounding = u * (heads(dot(d_out.abs(), o.abs())) + dot(v.abs(), dv.abs()).sum(0))
            floor = least * (1 + dot(v.abs(), v.abs()).sum(0)) * (1 + heads(d_out.abs().sum(-1)))
            tallies[3].add(where, dot(v, dv).sum(0), heads(dot(d_out, o)), 2 * heads(factor * terms) + rounding + floor)
    for tally in tallies:
        report = tally.into(report) if tally.seen else report
    return report


def _lse_span(problem: Problem, lse: torch.Tensor, lead: tuple, span: range) -> torch.Tensor:
    """`[rows, H]` in fp64."""
    return (lse if problem.packed else lse[lead[0]])[:, span.start : span.stop].T.double()


def _live(problem: Problem, len_q: int, len_k: int, device) -> torch.Tensor:
    """`[len_q]`: does a row see any key?"""
    left, right = problem.band[:2]
    diagonal = torch.arange(len_q, device=device) + len_k - len_q
    low = torch.zeros_like(diagonal) if left is None else (diagonal - left).clamp(min=0)
    high = torch.full_like(diagonal, len_k - 1) if right is None else (diagonal + right).clamp(max=len_k - 1)
    live = low <= high
    if not problem.windowed:
        more = problem.band._asdict()
        live = live & (diagonal >= 0) if more["chunk"] is not None else live
        live = live | (len_k > 0) if more["prefix"] is not None else live
    return live
