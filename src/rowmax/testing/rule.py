"""The acceptance rule: is a result as close to the definition as the rounding of its own terms allows?

    |o - o64| <= (c u + g S_i) A_id + u |o64| + tiny + (tiny + least) sum_j |v_jd|

    o64      the definition in fp64, from the same rounded inputs (`reference`)
    A_id     sum_j p_ij |v_jd|: what the element is made of
    S_i      max_j |scale| sum_d |q_id k_jd|: how big the terms of the scores are; of a score_mod f that times |f'|, where it is
             above 1, and besides |f(s) - s|
    u, tiny  unit roundoff and smallest subnormal of the storage type
    least    a weight below may be 0 (`numerics.LEAST_WEIGHT`), which shows where a key is seen by one query alone
    c, g     2 and 4 * 2^-24 in 16 bits, 16 and 16 * 2^-24 in fp32; g at least 1.5 sqrt(dim_qk) * 2^-24 (`report`)

besides: NaN and infinities where the definition has them and nowhere else; in 16 bits, a root mean square error at most 1.1
times that of the textbook computation in the input type, plus 0.02 u RMS(A) and, for huge logits, g RMS(S A), since an LSE in
fp32 is off by as much even where the textbook is exact because all scores are equal; |lse - lse64| <= 2e-4 + g (|lse64| + S);
gradients by the same rule with the A of `_Gradients`, 2 S + |lse| for S, RMS 1.25 and 0.25. No tolerance is set by hand or
depends on a shape.
"""

import math
from collections.abc import Sequence as Many
from typing import NamedTuple, Optional

import torch

from rowmax import reference
from rowmax.problem import Operands, Problem
from rowmax.testing.pieces import Piece, Sequence, expand_heads, finite, lse_rows, split, sum_group
from rowmax.testing.report import (
    RMS_GRAD,
    RMS_GRAD_WARN,
    RMS_OUT,
    RMS_OUT_WARN,
    Report,
    Sums,
    Tally,
    error_factor,
    least_weight,
    roundoff,
    score_roundoff,
    tiny,
)
from rowmax.testing.sums import check_sums


def check_forward(problem: Problem, operands: Operands, out: torch.Tensor, lse: Optional[torch.Tensor] = None) -> Report:
    """Compare `out`, and `lse` in natural logarithm, of `attention(*operands)` with the definition."""
    sequences, sampled = split(problem, operands)
    tally = Tally("out", problem, RMS_OUT, RMS_OUT_WARN)
    lse_tally = Tally("lse", problem)
    for sequence in sequences:
        for piece in sequence.pieces:
            truth = _Truth.of(problem, piece, sequence)
            values = _over_seen(problem, piece.seen, finite(sequence.v.double()).abs())
            factor = error_factor(problem, truth.logits).T.unsqueeze(-1)  # [rows, H, 1]
            floor = (tiny(problem) + least_weight(problem)) * values
            expected = Sums(truth.out, truth.naive, truth.terms, factor * truth.terms, floor)
            tally.add_sums(piece.name, out[piece.where], expected)
            if lse is not None:
                size = truth.lse.abs() + truth.logits
                least = 32 * roundoff(problem) if problem.dtype == torch.float64 else 2e-4
                limit = least + score_roundoff(problem) * size
                lse_tally.add(piece.name, lse_rows(problem, lse, piece), truth.lse, limit)
    report = tally.into(Report(problem, sampled=sampled))
    report = report if lse is None else lse_tally.into(report)
    return _all_finite(operands, {"out": out}, report) if sampled else report


def check_backward(
    problem: Problem,
    operands: Operands,
    grads: Many[Optional[torch.Tensor]],
    grad_out: Optional[torch.Tensor] = None,
    grad_lse: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
) -> Report:
    """Compare `grads` of q, k and v (`None`: not asked for) with those of the definition for the given cotangents; behind them
    those of the sink and of the bias where there are, which a sample of rows says nothing about.

    Operands must be finite. `out`, of the same call, adds one more sum to the check of a sampled problem.
    """
    sequences, sampled = split(problem, operands)
    dq_tally, dk_tally, dv_tally = (Tally(name, problem, RMS_GRAD, RMS_GRAD_WARN) for name in ("dq", "dk", "dv"))
    dq, dk, dv, *rest = grads
    dsink = rest.pop(0) if rest and operands.sink is not None else None
    dbias = rest.pop(0) if rest and operands.bias is not None else None
    dbias_sums = torch.zeros(3, *(() if dbias is None else dbias.shape), dtype=torch.float64, device=operands.q.device)
    dsink_sums = torch.zeros(2, problem.heads_q, dtype=torch.float64, device=operands.q.device)
    for sequence in sequences:
        total: Optional[_Gradients] = None
        for piece in sequence.pieces:
            part = _Gradients.of(problem, piece, sequence, grad_out, grad_lse)
            if dq is not None:
                dq_tally.add_sums(piece.name, dq[piece.where], part.dq)
            if part.dsink is not None:
                dsink_sums += part.dsink
            if dbias is not None and part.dbias is not None:
                for target, terms in zip(dbias_sums, part.dbias, strict=True):
                    _add_pairs(target, piece, terms)
            total = part if total is None else total.plus(part)
        if sampled:
            continue
        for tally, grad, name in ((dk_tally, dk, "dk"), (dv_tally, dv, "dv")):
            if grad is not None and sequence.k.shape[0]:
                nothing = Sums(*[torch.zeros_like(grad[sequence.keys], dtype=torch.float64)] * 5)
                sums = nothing if total is None else getattr(total, name)
                tally.add_sums(sequence.name, grad[sequence.keys], sums)
    report = Report(problem, sampled=sampled)
    for tally, grad in ((dq_tally, dq), (dk_tally, dk), (dv_tally, dv)):
        report = report if grad is None else tally.into(report)
    if dsink is not None and not sampled:
        tally = Tally("dsink", problem)
        tally.add("all rows", dsink, dsink_sums[0], dsink_sums[1] + roundoff(problem) * dsink_sums[0].abs() + tiny(problem))
        report = tally.into(report)
    if dbias is not None and not sampled:
        tally = Tally("dbias", problem)
        want, bound, count = dbias_sums
        tally.add("all rows", dbias, want, bound + roundoff(problem) * want.abs() + tiny(problem) * (1 + count))
        report = tally.into(report)
    if not sampled:
        return report
    report = _all_finite(operands, {"dq": dq, "dk": dk, "dv": dv, "dsink": dsink, "dbias": dbias}, report)
    return check_sums(problem, operands, grads[:3], grad_out, grad_lse, out, report)


def _over_seen(problem: Problem, seen: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`[rows, H, Dv]`: the sum of values `[len_k, Hk, Dv]` over the keys that each row sees."""
    if seen.dim() == 3:
        return torch.einsum("hij,jhd->ihd", seen.double(), expand_heads(problem, values))
    summed = seen.double() @ values.flatten(1)
    return expand_heads(problem, summed.view(seen.shape[0], *values.shape[1:]))


def _add_pairs(target: torch.Tensor, piece: Piece, terms: torch.Tensor) -> None:
    """Add terms `[H, rows, len_k]` of a piece to what has the bias's shape."""
    own = target[piece.where[0] if target.shape[0] > 1 else 0]
    over = [dim for dim in (0, 2) if own.shape[dim] == 1]
    terms = terms.sum(over, keepdim=True) if over else terms
    if own.shape[1] == 1:
        own += terms.sum(1, keepdim=True)
    else:
        own.index_add_(1, piece.rows.to(own.device), terms)


def _all_finite(operands: Operands, results: dict, report: Report) -> Report:
    """What a sample may miss: rows that nobody wrote, in poisoned memory. Says nothing where operands are non-finite."""
    if not all(bool(torch.isfinite(t).all()) for t in operands[:3]):
        return report
    for name, result in results.items():
        wrong = 0 if result is None else result.numel() - int(torch.isfinite(result).sum())
        if wrong:
            text = f"{name}: {wrong} elements are NaN or infinite, though no operand is"
            report = report.merged(Report(report.problem, {name: math.inf}, (text,)))
    return report


# ---- the definition and the sizes of its terms ---------------------------------------------------------------------


class _Truth(NamedTuple):
    """fp64 results of one piece: out, naive, terms `[rows, H, Dv]`; lse, logits `[H, rows]`."""

    out: torch.Tensor
    lse: torch.Tensor
    naive: torch.Tensor  # the textbook computation in the input type
    terms: torch.Tensor  # A
    logits: torch.Tensor  # S

    @classmethod
    def of(cls, problem: Problem, piece: Piece, sequence: Sequence) -> "_Truth":
        q, k, v = (t.double() for t in (piece.q, sequence.k, sequence.v))
        out, lse = _define(problem, piece, q, k, v)
        terms, _ = _define(problem, piece, q, k, v.abs())
        naive = out
        if problem.dtype != torch.float64:
            naive, _ = _define(problem, piece, piece.q, sequence.k, sequence.v)
        sizes = torch.einsum("ihd,jhd->hij", q.abs(), expand_heads(problem, k.abs())) * abs(problem.scale)
        if piece.mod is not None:
            score = torch.einsum("ihd,jhd->hij", q, expand_heads(problem, k)) * problem.scale
            score = problem.softcap * torch.tanh(score / problem.softcap) if problem.softcap else score
            change = finite(piece.mod.bend(score) - score).abs()
            sizes = sizes * finite(piece.mod.slope(score)).abs().clamp(min=1.0) + change
        if piece.bias is not None:
            sizes = sizes + piece.bias.abs()
        sizes = torch.where(piece.seen, finite(sizes), 0.0)
        logits = sizes.amax(-1) if sizes.shape[-1] else sizes.sum(-1)
        return cls(out, lse, naive.double(), terms, logits)


def _define(problem: Problem, piece: Piece, q, k, v, sink=None) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out [rows, H, Dv], lse [H, rows])` of the oracle for one sequence, in the dtype of q. `sink`: for the piece's."""
    out, lse = reference.attention(
        *(q[None], k[None], v[None]),
        scale=problem.scale,
        seen=piece.seen,
        softcap=problem.softcap,
        bias=piece.bias,
        sink=piece.sink if sink is None else sink,
        kept=piece.kept,
        dropout_p=problem.dropout,
        score_mod=None if piece.mod is None else piece.mod.bend,
    )
    return out[0], lse[0]


class _Gradients(NamedTuple):
    """Gradients of one piece. With W_ij = p_ij (|dP_ij| + |delta_i| + |dLSE_i| + sum_d |dO_id| A_id) |soft-cap'|, their A are

    dq: |scale| sum_j W_ij |k_j|        dk: |scale| sum_i W_ij |q_i|        dv: sum_i p_ij |dO_i|

    summed over the query heads of a group for dk and dv. Where `least` stands for p_ij, the same sums are what weights of 0 may
    leave out. The bias's is dS_ij without the soft-cap's factor, and its A W_ij without it, both summed over what it is
    broadcast in. The sink's is -sum_i p_sink delta_i, and its A sum_i p_sink times what is in parentheses above but dP.
    """

    dq: Sums
    dk: Sums
    dv: Sums
    dsink: Optional[torch.Tensor]  # [2, H]: the gradient, and what bounds its error but for its own rounding
    dbias: Optional[torch.Tensor] = None  # [3, H, rows, len_k]: the gradient, its bound, and 1 where the key is seen

    def plus(self, other: "_Gradients") -> "_Gradients":
        dk, dv = (Sums(*(a + b for a, b in zip(x, y, strict=True))) for x, y in zip(self[1:3], other[1:3], strict=True))
        return _Gradients(self.dq, dk, dv, None)

    @classmethod
    def of(cls, problem: Problem, piece: Piece, sequence: Sequence, grad_out, grad_lse) -> "_Gradients":
        inputs = (piece.q, sequence.k, sequence.v)
        zero = torch.zeros(*piece.q.shape[:2], problem.dim_v, dtype=torch.float64, device=piece.q.device)
        d_out = zero if grad_out is None else grad_out[piece.where].double()
        d_lse = zero[..., 0].T if grad_lse is None else lse_rows(problem, grad_lse, piece).double()
        wide = _autograd(problem, piece, [t.double() for t in inputs], d_out, d_lse)
        naive = wide if problem.dtype == torch.float64 else _autograd(problem, piece, inputs, d_out, d_lse)

        truth = _Truth.of(problem, piece, sequence)
        q, k, v = (t.double() for t in inputs)
        k, v, seen = expand_heads(problem, k), expand_heads(problem, v), piece.seen
        scale = abs(problem.scale)
        scores = torch.einsum("ihd,jhd->hij", q, k) * problem.scale
        steep = torch.ones_like(scores)
        if problem.softcap:
            scores = scores / problem.softcap
            scores, steep = problem.softcap * torch.tanh(scores), 1 / torch.cosh(scores) ** 2
        if piece.mod is not None:
            scores, steep = piece.mod.bend(scores), steep * piece.mod.slope(scores).abs()
        if piece.bias is not None:
            scores = scores + piece.bias
        p = torch.where(seen, torch.exp(scores - truth.lse.unsqueeze(-1)), 0.0)
        row = (d_out * truth.out).sum(-1).abs() + (d_out.abs() * truth.terms).sum(-1) + d_lse.T.abs()
        z = 1.0 if piece.kept is None else piece.kept.double() * reference.dropout_factor(problem.dropout)
        ones = seen.double().expand_as(p)
        sizes = ones * (torch.einsum("ihd,jhd->hij", d_out, v).abs() * z + row.T.unsqueeze(-1))
        flat = p * sizes
        w = flat * steep
        # P is recomputed from an LSE that may itself be off by its bound, g (|lse| + S).
        logits = 2 * truth.logits + finite(truth.lse).abs()
        factor = error_factor(problem, logits).unsqueeze(-1)
        # The oracle's derivative of the soft-cap, 1 - tanh^2, is itself off by 2^-53, however small it is.
        weighted = w * factor + flat * (2.0**-52 if problem.softcap or problem.score_mod else 0.0)

        def over_keys(weights):
            return scale * torch.einsum("hij,jhd->ihd", weights, k.abs())

        def over_rows(weights, what, scale):
            return sum_group(problem, scale * torch.einsum("hij,ihd->jhd", weights, what.abs()))

        least, smallest = least_weight(problem), tiny(problem)
        floor = smallest * ones + least * sizes * steep
        dq = Sums(wide[0], naive[0], over_keys(w), over_keys(weighted), over_keys(floor))
        dk = Sums(wide[1], naive[1], *(over_rows(x, q, scale) for x in (w, weighted, floor)))
        floor = (smallest + least * z) * ones
        dv = Sums(wide[2], naive[2], *(over_rows(x, d_out, 1.0) for x in (p * z, p * factor * z, floor)))
        dbias = None if piece.bias is None else torch.stack([wide[-1], flat * factor + least * sizes, ones])
        if piece.sink is None:
            return cls(dq, dk, dv, None, dbias)
        of_sink = torch.exp(piece.sink.unsqueeze(-1) - truth.lse) * row.T * factor.squeeze(-1)  # [H, rows]
        return cls(dq, dk, dv, torch.stack([wide[3], of_sink.masked_fill(torch.isneginf(truth.lse), 0.0).sum(-1)]), dbias)


def _autograd(problem: Problem, piece: Piece, inputs, d_out, d_lse) -> list[torch.Tensor]:
    """Gradients of the oracle in the dtype of `inputs`, then as fp64; then those of the sink and of the bias, if there are."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    if piece.sink is not None:
        leaves.append(piece.sink.detach().clone().requires_grad_())
    if piece.bias is not None:
        leaves.append(piece.bias.detach().clone().requires_grad_())
        piece = piece._replace(bias=leaves[-1])
    with torch.enable_grad():
        out, lse = _define(problem, piece, *leaves[: 3 if piece.sink is None else 4])
        outputs = [(x, g.to(x.dtype)) for x, g in ((out, d_out), (lse, d_lse)) if x.requires_grad]
    results, cotangents = zip(*outputs, strict=True)
    grads = torch.autograd.grad(results, leaves, cotangents, allow_unused=True, materialize_grads=True)
    return [grad.double() for grad in grads]
