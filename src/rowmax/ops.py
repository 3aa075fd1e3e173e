"""The torch operators: schema, fake, device implementations, autograd and FLOP formulas.

`rowmax::forward` and `rowmax::backward` validate their operands (`Problem.describe`), take the plan and run it, so that
`torch.compile` traces one call, and a direct caller of the operator is checked like a caller of `rowmax.attention`.
Triton is imported when a tensor on a GPU first arrives.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from rowmax import cpu
from rowmax.device import Device
from rowmax.mask import Band, visible_pairs
from rowmax.plan import plan
from rowmax.problem import Operands, Problem

_LIBRARY = torch.library.Library("rowmax", "DEF")

# What describes a call; both operators take it last, in this order (`_CALL` arguments).
_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    "float? scale, SymInt? left, SymInt? right, bool deterministic, str plan"
)
_LIBRARY.define(f"forward(bool need_lse, {_SCHEMA}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    f"backward(bool[3] needs, Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
FORWARD = torch.ops.rowmax.forward.default
BACKWARD = torch.ops.rowmax.backward.default


def _describe(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, left, right, deterministic, _plan):
    operands = Operands(q, k, v, cu_seqlens_q, cu_seqlens_k)
    problem = Problem.describe(
        operands,
        left=left,
        right=right,
        scale=scale,
        max_len_q=max_seqlen_q,
        max_len_k=max_seqlen_k,
        deterministic=deterministic,
    )
    return problem, operands


def _forward(need_lse, *call):
    problem, operands = _describe(*call)
    chosen = plan(problem, Device.of(operands.q), prefer=call[-1])
    if chosen.algorithm == "q_outer":
        from rowmax.kernels import launch

        return launch.forward(problem, operands, chosen, need_lse)
    return cpu.forward(problem, operands, chosen, need_lse)


def _backward(needs, grad_out, grad_lse, out, lse, *call):
    problem, operands = _describe(*call)
    chosen = plan(problem, Device.of(operands.q), direction="backward", prefer=call[-1])
    if chosen.algorithm == "q_outer":
        from rowmax.kernels import launch

        return launch.backward(problem, operands, out, lse, grad_out, grad_lse, needs, chosen)
    return cpu.backward(problem, operands, out, lse, grad_out, grad_lse, needs, chosen)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("forward", _forward, _key)
    _LIBRARY.impl("backward", _backward, _key)


@torch.library.register_fake("rowmax::forward", lib=_LIBRARY)
def _forward_fake(need_lse, *call):
    problem, operands = _describe(*call)
    out_shape, lse_shape = problem.outputs()
    return operands.q.new_empty(out_shape), operands.q.new_empty(lse_shape if need_lse else (0,), dtype=problem.lse_dtype)


@torch.library.register_fake("rowmax::backward", lib=_LIBRARY)
def _backward_fake(needs, grad_out, grad_lse, out, lse, *call):
    _, operands = _describe(*call)
    return tuple(t.new_empty(t.shape if need else (0,)) for t, need in zip(operands[:3], needs, strict=True))


# ---- autograd ------------------------------------------------------------------------------------------------------


def _save(ctx, inputs, output):
    need_lse, *call = inputs
    if not need_lse:
        raise RuntimeError("rowmax::forward: the backward needs the LSE; call with need_lse=True when inputs require grad.")
    ctx.save_for_backward(*call[:5], *output)
    ctx.call = call[5:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_out, grad_lse):
    nothing = (None,) * (1 + 5 + len(ctx.call))
    if grad_out is None and grad_lse is None:
        return nothing
    *tensors, out, lse = ctx.saved_tensors
    needs = ctx.needs_input_grad[1:4]
    grads = BACKWARD(needs, grad_out, grad_lse, out, lse, *tensors, *ctx.call)
    grads = tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))
    return (None, *grads, *nothing[4:])


def _no_second_order(ctx, *grads):
    raise NotImplementedError(
        "double backward (second-order gradients) through rowmax attention is not implemented; "
        "use rowmax.reference.attention, which autograd differentiates to any order."
    )


torch.library.register_autograd("rowmax::forward", _differentiate, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd("rowmax::backward", _no_second_order, lib=_LIBRARY)


# ---- FLOPs ---------------------------------------------------------------------------------------------------------


def _matmul_flops(q_shape, k_shape, v_shape, left, right, cu_seqlens, times_qk: int, times_v: int) -> int:
    """2 x visible pairs x (times_qk * dim_qk + times_v * dim_v). Lengths inside `cu_seqlens` are data: one sequence is assumed."""
    *batch, len_q, heads, dim_qk = q_shape
    pairs = visible_pairs(len_q, k_shape[-3], Band(left, right)) * heads * (batch[0] if batch else 1)
    return 2 * pairs * (times_qk * dim_qk + times_v * v_shape[-1])


@register_flop_formula(torch.ops.rowmax.forward)
def _forward_flops(need_lse, q, k, v, cu_q, cu_k, max_q, max_k, scale, left, right, *_, out_shape=None, **__) -> int:
    """Q K^T and P V over visible pairs."""
    return _matmul_flops(q, k, v, left, right, cu_q, 1, 1)


@register_flop_formula(torch.ops.rowmax.backward)
def _backward_flops(
    needs, grad_out, grad_lse, out, lse, q, k, v, cu_q, cu_k, max_q, max_k, scale, left, right, *_, out_shape=None, **__
) -> int:
    """Q K^T again, dP = dO V^T, dV, dQ and dK: 2.5 times the forward."""
    return _matmul_flops(q, k, v, left, right, cu_q, 3, 2)
