"""The CPU path: what `ops` calls when the plan says "aten" or "tiled".

    forward:  o_i = sum_j p_ij v_j,  p_ij = exp(s_ij - lse_i),  s_ij = scale q_i.k_j  over the keys j that row i sees
    backward: dv_j = sum_i p_ij do_i,  ds_ij = p_ij (do_i.v_j - delta_i),  delta_i = do_i.o_i - dlse_i,
              dq_i = scale sum_j ds_ij k_j,  dk_j = scale sum_i ds_ij q_i

Both algorithms multiply whole tiles, where a hidden pair has weight exactly 0; 0 * NaN would carry a non-finite value to
rows that do not see it. So: compute, look whether the result is finite (one sum), and only if it is not, repair it by
`nonfinite`.
"""

from rowmax.cpu import backward as _backward
from rowmax.cpu import forward as _forward
from rowmax.cpu import nonfinite
from rowmax.cpu.scores import sink_gradient


def forward(problem, operands, plan, need_lse):
    """`(out, lse)`; lse is empty unless `need_lse`."""
    if problem.heads_q == 0:
        out_shape, lse_shape = problem.outputs()
        return operands.q.new_empty(out_shape), operands.q.new_empty(lse_shape if need_lse else (0,), dtype=problem.lse_dtype)
    if plan.algorithm == "aten":
        out, lse = _forward.aten(problem, operands, need_lse)
    else:
        out, lse = _forward.tiled(problem, operands, plan.tiles[0], need_lse)
    if nonfinite.all_finite(out):
        return out, lse

    def again(clean):
        if plan.algorithm == "aten":
            return _forward.aten(problem, clean, need_lse)
        return _forward.tiled(problem, clean, plan.tiles[0], need_lse, exact=True)

    return nonfinite.forward(problem, operands, again)


def backward(problem, operands, out, lse, grad_out, grad_lse, needs, plan):
    """`(dq, dk, dv)`, and with a fourth and a fifth of `needs` the sink's and the bias's; one that is not needed is empty and
    its work is skipped."""
    if len(needs) > 3:
        wanted = needs[3] and operands.sink is not None
        sink = sink_gradient(problem, operands, out, lse, grad_out, grad_lse) if wanted else lse.new_empty(0)
        given = (out, lse, grad_out, grad_lse)
        dq, dk, dv, *bias = _of_tiles(problem, operands, *given, (*needs[:3], *needs[4:]), plan)
        return dq, dk, dv, sink, *bias
    return _of_tiles(problem, operands, out, lse, grad_out, grad_lse, needs, plan)


def _of_tiles(problem, operands, out, lse, grad_out, grad_lse, needs, plan):
    """`(dq, dk, dv)`, and with a fourth of `needs` the bias's."""
    like = (*operands[:3], lse if operands.bias is None else operands.bias)
    if not any(needs):
        return tuple(t.new_empty(0) for t in (*operands[:3], *(lse for _ in needs[3:])))
    if problem.heads_q == 0:
        return tuple(t.new_zeros(t.shape if need else 0) for t, need in zip(like, needs, strict=False))
    # torch's operator takes no gradient of the LSE.
    aten = plan.algorithm == "aten" and grad_lse is None and grad_out is not None

    def run(operands, *given):
        if aten:
            return _backward.aten(problem, operands, *given[:3], needs)
        return _backward.tiled(problem, operands, *given, needs, plan.tiles[0])

    given = (out, lse, grad_out, grad_lse)
    grads = run(operands, *given)
    if all(nonfinite.all_finite(grad) for grad in grads):
        return grads
    return nonfinite.backward(problem, operands, *given, grads, run)
