"""The CPU path: what `ops` calls when the plan says "aten" or "tiled".

    forward:  o_i = sum_j p_ij v_j,  p_ij = exp(s_ij - lse_i),  s_ij = scale * q_i.k_j  over the keys j that row i sees
    backward: dv_j = sum_i p_ij do_i,  ds_ij = p_ij (do_i.v_j - delta_i),  dq_i = scale sum_j ds_ij k_j,  dk_j = scale sum_i ds_ij q_i

Both algorithms multiply whole tiles, where a hidden pair has weight exactly 0; 0 * NaN would carry a non-finite value to
rows that do not see it. So: compute, look whether the result is finite (linear in its size), and only if it is not, repair
it by `nonfinite`.
"""

from rowmax.cpu import backward as _backward
from rowmax.cpu import forward as _forward
from rowmax.cpu import nonfinite

_FORWARD = {"tiled": _forward.tiled, "aten": _forward.aten}
_BACKWARD = {"tiled": _backward.tiled, "aten": _backward.aten}


def forward(problem, operands, plan, need_lse):
    """`(out, lse)`; lse is empty unless `need_lse`."""
    run = _FORWARD[plan.algorithm]
    out, lse = run(problem, operands, plan, need_lse)
    if not nonfinite.all_finite(out):
        out, lse = nonfinite.forward(problem, operands, out, lse, lambda clean: run(problem, clean, plan, need_lse))
    return out, lse


def backward(problem, operands, out, lse, grad_out, grad_lse, needs, plan):
    """`(dq, dk, dv)`; a gradient that is not needed is empty and its work is skipped."""
    run = _BACKWARD[plan.algorithm]
    if not any(needs):
        return tuple(t.new_empty(0) for t in operands[:3])
    given = (out, lse, grad_out, grad_lse)
    grads = run(problem, operands, *given, needs, plan)
    if not all(nonfinite.all_finite(grad) for grad in grads):
        grads = nonfinite.backward(
            problem, operands, *given, grads, lambda clean, *rest: run(problem, clean, *rest, needs, plan)
        )
    return grads
