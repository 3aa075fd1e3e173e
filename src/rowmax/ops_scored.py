"""The operators of calls whose scores are bent: soft-cap, ALiBi slopes, sink logits. `api` takes them where a call has any.

Apart from `rowmax::forward` and `rowmax::backward`, so that a call without these pays nothing for them, not even the reading of
more arguments. What both have in common is in `ops`. The sink is differentiable; the slopes are constants.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from rowmax import ops
from rowmax.device import Device
from rowmax.plan import plan
from rowmax.problem import Operands, Problem, aligned

_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? slopes, Tensor? sink, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? scale, SymInt? left, SymInt? right, bool deterministic, str plan, "
    "float softcap"
)
_TENSORS = 7  # of them come first
ops._LIBRARY.define(f"forward_scored(bool need_lse, {_SCHEMA}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
ops._LIBRARY.define(
    f"backward_scored(bool[4] needs, Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
FORWARD_SCORED = torch.ops.rowmax.forward_scored.default
BACKWARD_SCORED = torch.ops.rowmax.backward_scored.default


def _describe(*call):
    tensors = [None if t is None else t.contiguous() for t in call[3:_TENSORS]]  # kernels read them without strides
    max_seqlen_q, max_seqlen_k, scale, left, right, deterministic, _, softcap = call[_TENSORS:]
    operands = Operands(*call[:3], *tensors)
    problem = Problem.describe(
        operands,
        left=left,
        right=right,
        scale=scale,
        max_len_q=max_seqlen_q,
        max_len_k=max_seqlen_k,
        deterministic=deterministic,
        softcap=softcap,
    )
    return problem, operands


def _planned(problem, operands, direction, call, *more):
    q, k, v = operands[:3]
    rows_aligned = q.is_cpu or aligned(q, k, v, *more)
    return plan(problem, Device.of(q), direction=direction, prefer=call[_TENSORS + 6], aligned=rows_aligned)


def _forward(need_lse, *call):
    # As `ops.launch_of`; the number of tensors keeps the forms of both apart.
    kept = ops._kept_lengths(*call[3:5])
    form = (need_lse, call[_TENSORS:], *(None if t is None else ops._form(t) for t in call[:_TENSORS])) if kept else None
    launch = ops._launches.get(form) if kept else None
    problem, operands, chosen = None, Operands(*call[:_TENSORS]), None
    if launch is None:
        problem, operands = _describe(*call)
        chosen = _planned(problem, operands, "forward", call)
        if chosen.algorithm in ops.ON_CPU:
            with ops._own_precision():
                return ops.cpu.forward(problem, operands, chosen, need_lse)
        launch = ops.kernels().Forward(problem, chosen, need_lse)
        if kept and all(t is None or t.is_contiguous() for t in call[5:_TENSORS]):
            if len(ops._launches) >= ops.MOST:
                ops._launches.clear()
            ops._launches[form] = launch
    out, lse = launch(*operands)
    return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse


def _backward(needs, grad_out, grad_lse, out, lse, *call):
    problem, operands = _describe(*call)
    if grad_out is not None and grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    chosen = _planned(problem, operands, "backward", call, grad_out)
    if chosen.algorithm not in ops.ON_CPU:
        return ops.kernels().backward(problem, operands, out, lse, grad_out, grad_lse, needs, chosen)
    with ops._own_precision():
        return ops.cpu.backward(problem, operands, out, lse, grad_out, grad_lse, needs, chosen)


for _key in ("CPU", "CUDA"):
    ops._LIBRARY.impl("forward_scored", _forward, _key)
    ops._LIBRARY.impl("backward_scored", _backward, _key)


@torch.library.register_fake("rowmax::forward_scored", lib=ops._LIBRARY)
def _forward_fake(need_lse, *call):
    problem, operands = _describe(*call)
    out_shape, lse_shape = problem.outputs()
    return operands.q.new_empty(out_shape), operands.q.new_empty(lse_shape if need_lse else (0,), dtype=problem.lse_dtype)


@torch.library.register_fake("rowmax::backward_scored", lib=ops._LIBRARY)
def _backward_fake(needs, grad_out, grad_lse, out, lse, *call):
    _, operands = _describe(*call)
    like = (*operands[:3], lse if operands.sink is None else operands.sink)
    return tuple(t.new_empty(t.shape if need else (0,)) for t, need in zip(like, needs, strict=True))


# ---- autograd ------------------------------------------------------------------------------------------------------


def _below_autograd(operator, *arguments):
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx, need_lse, *call):
        if not need_lse:
            raise RuntimeError(
                "rowmax::forward_scored: the backward needs the LSE; pass need_lse=True when inputs require grad."
            )
        out, lse = _below_autograd(FORWARD_SCORED, need_lse, *call)
        ctx.save_for_backward(*call[:_TENSORS], out, lse)
        ctx.call = call[_TENSORS:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        needs = (*ctx.needs_input_grad[1:4], ctx.needs_input_grad[_TENSORS])
        grads = (None,) * 4
        if grad_out is not None or grad_lse is not None:
            *tensors, out, lse = ctx.saved_tensors
            grads = BACKWARD_SCORED(needs, grad_out, grad_lse, out, lse, *tensors, *ctx.call)
        dq, dk, dv, dsink = (grad if need else None for grad, need in zip(grads, needs, strict=True))
        return None, dq, dk, dv, None, None, None, dsink, *(None,) * len(ctx.call)


def _forward_autograd(*arguments):
    leaves = (*arguments[1:4], arguments[_TENSORS])
    if arguments[_TENSORS - 1] is not None and ops._requires_grad(arguments[_TENSORS - 1]):
        raise NotImplementedError("a gradient of ALiBi slopes is not implemented: pass alibi_slopes.detach().")
    if ops._transformed():
        return ops.second().forward(ops.second().SCORED, *arguments)
    return _Scored.apply(*arguments) if ops._requires_grad(*leaves) else _below_autograd(FORWARD_SCORED, *arguments)


def _backward_autograd(*arguments):
    if ops._requires_grad(*arguments[1:8], arguments[4 + _TENSORS]) or ops._transformed():
        return ops.second().backward(ops.second().SCORED, *arguments)
    return _below_autograd(BACKWARD_SCORED, *arguments)


ops._LIBRARY.impl("forward_scored", _forward_autograd, "Autograd")
ops._LIBRARY.impl("backward_scored", _backward_autograd, "Autograd")


@register_flop_formula(torch.ops.rowmax.forward_scored)
def _forward_flops(
    need_lse, q, k, v, cu_q, cu_k, slopes, sink, max_q, max_k, scale, left, right, *_, out_shape=None, **__
) -> int:
    """As of `rowmax::forward`: products alone."""
    return ops._matmul_flops(q, k, v, left, right, cu_q, 1, 1)


@register_flop_formula(torch.ops.rowmax.backward_scored)
def _backward_flops(
    needs, d_out, d_lse, out, lse, q, k, v, cu_q, cu_k, slopes, sink, max_q, max_k, scale, left, right, *_, out_shape=None, **__
) -> int:
    """As of `rowmax::backward`."""
    return ops._matmul_flops(q, k, v, left, right, cu_q, 3, 2)
