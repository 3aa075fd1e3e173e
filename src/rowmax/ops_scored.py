"""The operators of calls whose scores are bent: soft-cap, ALiBi slopes, sink logits. `api` takes them where a call has any.

Apart from `rowmax::forward` and `rowmax::backward`, so that a call without these pays nothing for them, not even the reading of
more arguments. What both have in common is in `ops`. The sink is differentiable; the slopes are constants.
"""

from functools import partial

import torch
from torch.utils.flop_counter import register_flop_formula

from rowmax import ops
from rowmax.problem import Operands, Problem

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


planned = partial(ops.plan_scored, _describe, _TENSORS)  # of a forward, for `rowmax.prepare`

for _key in ("CPU", "CUDA"):
    ops._LIBRARY.impl("forward_scored", partial(ops.run_forward, _describe, _TENSORS), _key)
    ops._LIBRARY.impl("backward_scored", partial(ops.run_backward, _describe, _TENSORS), _key)


@torch.library.register_fake("rowmax::forward_scored", lib=ops._LIBRARY)
def _forward_fake(*arguments):
    return ops.fake_forward(_describe, *arguments)


@torch.library.register_fake("rowmax::backward_scored", lib=ops._LIBRARY)
def _backward_fake(needs, grad_out, grad_lse, out, lse, *call):
    _, operands = _describe(*call)
    like = (*operands[:3], lse if operands.sink is None else operands.sink)
    return tuple(t.new_empty(t.shape if need else (0,)) for t, need in zip(like, needs, strict=True))


# ---- autograd ------------------------------------------------------------------------------------------------------


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx, need_lse, *call):
        if not need_lse:
            raise RuntimeError(
                "rowmax::forward_scored: the backward needs the LSE; pass need_lse=True when inputs require grad."
            )
        out, lse = ops.below_autograd(FORWARD_SCORED, need_lse, *call)
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
    return _Scored.apply(*arguments) if ops._requires_grad(*leaves) else ops.below_autograd(FORWARD_SCORED, *arguments)


def _backward_autograd(*arguments):
    if ops._requires_grad(*arguments[1:8], arguments[4 + _TENSORS]) or ops._transformed():
        return ops.second().backward(ops.second().SCORED, *arguments)
    return ops.below_autograd(BACKWARD_SCORED, *arguments)


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
