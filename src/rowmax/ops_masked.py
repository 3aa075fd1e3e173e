"""The operators of calls that treat pairs of queries and keys one by one: an added bias, a boolean mask, dropout. What
`ops_scored` takes may come as well. `api` takes them where a call has any.

Apart, as `ops_scored` is, so that other calls pay nothing for them. The bias and the sink are differentiable. The seed of
dropout is a tensor, so that a graph may be replayed with another.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from rowmax import ops
from rowmax.device import Device
from rowmax.plan import plan
from rowmax.problem import Operands, Problem, aligned

_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? slopes, Tensor? sink, Tensor? bias, "
    "Tensor? mask, Tensor? seed, SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? scale, SymInt? left, SymInt? right, "
    "bool deterministic, str plan, float softcap, float dropout_p"
)
_TENSORS = 10  # of them come first
_SINK, _BIAS = 6, 7  # which have gradients, beside the first three
ops._LIBRARY.define(f"forward_masked(bool need_lse, {_SCHEMA}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
ops._LIBRARY.define(
    f"backward_masked(bool[5] needs, Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
FORWARD_MASKED = torch.ops.rowmax.forward_masked.default
BACKWARD_MASKED = torch.ops.rowmax.backward_masked.default


def _describe(*call):
    # Kernels read them without strides.
    tensors = [None if t is None else t.contiguous() for t in call[3:_BIAS]]
    max_seqlen_q, max_seqlen_k, scale, left, right, deterministic, _, softcap, dropout_p = call[_TENSORS:]
    operands = Operands(*call[:3], *tensors, *call[_BIAS:_TENSORS])
    problem = Problem.describe(
        operands,
        left=left,
        right=right,
        scale=scale,
        max_len_q=max_seqlen_q,
        max_len_k=max_seqlen_k,
        deterministic=deterministic,
        softcap=softcap,
        dropout=dropout_p,
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
    operands = Operands(*call[:_TENSORS])
    if launch is None:
        problem, operands = _describe(*call)
        chosen = _planned(problem, operands, "forward", call)
        if chosen.algorithm in ops.ON_CPU:
            with ops._own_precision():
                return ops.cpu.forward(problem, operands, chosen, need_lse)
        launch = ops.kernels().Forward(problem, chosen, need_lse)
        if kept and all(t is None or t.is_contiguous() for t in call[5:_BIAS]):
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
        return tuple(ops.kernels().backward(problem, operands, out, lse, grad_out, grad_lse, needs, chosen))
    with ops._own_precision():
        return ops.cpu.backward(problem, operands, out, lse, grad_out, grad_lse, needs, chosen)


for _key in ("CPU", "CUDA"):
    ops._LIBRARY.impl("forward_masked", _forward, _key)
    ops._LIBRARY.impl("backward_masked", _backward, _key)


@torch.library.register_fake("rowmax::forward_masked", lib=ops._LIBRARY)
def _forward_fake(need_lse, *call):
    problem, operands = _describe(*call)
    out_shape, lse_shape = problem.outputs()
    return operands.q.new_empty(out_shape), operands.q.new_empty(lse_shape if need_lse else (0,), dtype=problem.lse_dtype)


@torch.library.register_fake("rowmax::backward_masked", lib=ops._LIBRARY)
def _backward_fake(needs, grad_out, grad_lse, out, lse, *call):
    _, operands = _describe(*call)
    like = (*operands[:3], *(lse if t is None else t for t in (operands.sink, operands.bias)))
    kinds = (
        *(t.dtype for t in like[:3]),
        lse.dtype,
        lse.dtype if operands.bias is None or not needs[4] else operands.bias.dtype,
    )
    return tuple(t.new_empty(t.shape if need else (0,), dtype=dtype) for t, need, dtype in zip(like, needs, kinds, strict=True))


# ---- autograd ------------------------------------------------------------------------------------------------------


def _below_autograd(operator, *arguments):
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, need_lse, *call):
        if not need_lse:
            raise RuntimeError(
                "rowmax::forward_masked: the backward needs the LSE; pass need_lse=True when inputs require grad."
            )
        out, lse = _below_autograd(FORWARD_MASKED, need_lse, *call)
        ctx.save_for_backward(*call[:_TENSORS], out, lse)
        ctx.call = call[_TENSORS:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        needs = (*ctx.needs_input_grad[1:4], *ctx.needs_input_grad[1 + _SINK : 2 + _BIAS])
        grads = (None,) * 5
        if grad_out is not None or grad_lse is not None:
            *tensors, out, lse = ctx.saved_tensors
            grads = BACKWARD_MASKED(needs, grad_out, grad_lse, out, lse, *tensors, *ctx.call)
        dq, dk, dv, dsink, dbias = (grad if need else None for grad, need in zip(grads, needs, strict=True))
        nothing = (None,) * (_TENSORS - _BIAS - 1 + len(ctx.call))
        return None, dq, dk, dv, None, None, None, dsink, dbias, *nothing


class _FirstOrderOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        return _below_autograd(BACKWARD_MASKED, *arguments)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "double backward (second-order gradients) through rowmax attention with a bias, a mask or dropout is not "
            "implemented; use rowmax.reference.attention, which autograd differentiates to any order."
        )


def _forward_autograd(*arguments):
    leaves = (*arguments[1:4], *arguments[1 + _SINK : 2 + _BIAS])
    if arguments[_SINK] is not None and ops._requires_grad(arguments[_SINK]):
        raise NotImplementedError("a gradient of ALiBi slopes is not implemented: pass alibi_slopes.detach().")
    if ops.in_forward_mode() and any(t is not None and _has_tangent(t) for t in leaves):
        raise NotImplementedError(
            "forward-mode differentiation (jvp) through rowmax attention with a bias, a mask or dropout is not implemented; "
            "use rowmax.reference.attention."
        )
    return _Masked.apply(*arguments) if ops._requires_grad(*leaves) else _below_autograd(FORWARD_MASKED, *arguments)


def _has_tangent(t) -> bool:
    return torch.autograd.forward_ad.unpack_dual(t).tangent is not None


def _backward_autograd(*arguments):
    given, call = arguments[1:3], arguments[5:]
    if ops._requires_grad(*given, *call[:3], *call[_SINK : _BIAS + 1]):
        return _FirstOrderOnly.apply(*arguments)
    return _below_autograd(BACKWARD_MASKED, *arguments)


ops._LIBRARY.impl("forward_masked", _forward_autograd, "Autograd")
ops._LIBRARY.impl("backward_masked", _backward_autograd, "Autograd")


@register_flop_formula(torch.ops.rowmax.forward_masked)
def _forward_flops(need_lse, *call, out_shape=None, **__) -> int:
    """As of `rowmax::forward`: products alone, of pairs in the band, whatever the mask hides."""
    return _flops(call, 1, 1)


@register_flop_formula(torch.ops.rowmax.backward_masked)
def _backward_flops(needs, grad_out, grad_lse, out, lse, *call, out_shape=None, **__) -> int:
    """As of `rowmax::backward`; with the gradient of a bias, S and dP once more."""
    return _flops(call, 3 + needs[4], 2 + needs[4])


def _flops(call, times_qk: int, times_v: int) -> int:
    q, k, v, cu_seqlens = call[:4]
    left, right = call[_TENSORS + 3 : _TENSORS + 5]
    return ops._matmul_flops(q, k, v, left, right, cu_seqlens, times_qk, times_v)
