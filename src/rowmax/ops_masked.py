"""The operators of calls that treat pairs of queries and keys one by one: an added bias, a boolean mask, dropout, a function of
scores (`score_mod`, by its key); and of those that see more or less than a window. What `ops_scored` takes may come as well.
`api` takes them where a call has any.

Apart, as `ops_scored` is, so that other calls pay nothing for them. The bias and the sink are differentiable. The seed of
dropout is a tensor, so that a graph may be replayed with another.
"""

from functools import partial

import torch
from torch.utils.flop_counter import register_flop_formula

from rowmax import ops
from rowmax.mask import Pattern, pattern
from rowmax.problem import Operands, Problem

_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? slopes, Tensor? sink, Tensor? bias, "
    "Tensor? mask, Tensor? seed, Tensor? numbers, SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? scale, SymInt? left, "
    'SymInt? right, bool deterministic, str plan, float softcap, float dropout_p, str score_mod="", '
    "SymInt? sink_tokens=None, SymInt? prefix=None, SymInt? chunk=None"
)
_TENSORS = 11  # of them come first
_SINK, _BIAS = 6, 7  # which have gradients, beside the first three
ops._LIBRARY.define(f"forward_masked(bool need_lse, {_SCHEMA}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
ops._LIBRARY.define(
    f"backward_masked(bool[5] needs, Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
FORWARD_MASKED = torch.ops.rowmax.forward_masked.default
BACKWARD_MASKED = torch.ops.rowmax.backward_masked.default


def describe(*call):
    """`(problem, operands)` of a call."""
    # Kernels read them without strides.
    tensors = [None if t is None else t.contiguous() for t in call[3:_BIAS]]
    max_seqlen_q, max_seqlen_k, scale, left, right, deterministic, _, softcap, dropout_p, *more = call[_TENSORS:]
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
        **_named(more),
    )
    return problem, operands


def _named(last, names=("score_mod", *Pattern._fields[2:])) -> dict:
    """The last arguments: torch leaves out those behind which all have the value that they have by default."""
    return dict(zip(names, last, strict=False))


planned = partial(ops.plan_scored, describe, _TENSORS)  # of a forward, for `rowmax.prepare`

for _key in ("CPU", "CUDA"):
    ops._LIBRARY.impl("forward_masked", partial(ops.run_forward, describe, _TENSORS), _key)
    ops._LIBRARY.impl("backward_masked", partial(ops.run_backward, describe, _TENSORS), _key)


@torch.library.register_fake("rowmax::forward_masked", lib=ops._LIBRARY)
def _forward_fake(*arguments):
    return ops.fake_forward(describe, *arguments)


@torch.library.register_fake("rowmax::backward_masked", lib=ops._LIBRARY)
def _backward_fake(needs, grad_out, grad_lse, out, lse, *call):
    _, operands = describe(*call)
    like = (*operands[:3], *(lse if t is None else t for t in (operands.sink, operands.bias)))
    kinds = (
        *(t.dtype for t in like[:3]),
        lse.dtype,
        lse.dtype if operands.bias is None or not needs[4] else operands.bias.dtype,
    )
    return tuple(t.new_empty(t.shape if need else (0,), dtype=dtype) for t, need, dtype in zip(like, needs, kinds, strict=True))


# ---- autograd ------------------------------------------------------------------------------------------------------


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, need_lse, *call):
        if not need_lse:
            raise RuntimeError(
                "rowmax::forward_masked: the backward needs the LSE; pass need_lse=True when inputs require grad."
            )
        out, lse = ops.below_autograd(FORWARD_MASKED, need_lse, *call)
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


def _forward_autograd(*arguments):
    leaves = (*arguments[1:4], *arguments[1 + _SINK : 2 + _BIAS])
    if arguments[_SINK] is not None and ops._requires_grad(arguments[_SINK]):
        raise NotImplementedError("a gradient of ALiBi slopes is not implemented: pass alibi_slopes.detach().")
    if ops._transformed():
        return ops.second().forward(ops.second().MASKED, *arguments)
    return _Masked.apply(*arguments) if ops._requires_grad(*leaves) else ops.below_autograd(FORWARD_MASKED, *arguments)


def _backward_autograd(*arguments):
    given, call = arguments[1:5], arguments[5:]
    if ops._requires_grad(*given, *call[:3], *call[_SINK : _BIAS + 1]) or ops._transformed():
        return ops.second().backward(ops.second().MASKED, *arguments)
    return ops.below_autograd(BACKWARD_MASKED, *arguments)


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
    band = pattern(*call[_TENSORS + 3 : _TENSORS + 5], **_named(call[_TENSORS + 10 :], Pattern._fields[2:]))
    return ops._matmul_flops(q, k, v, *band[:2], cu_seqlens, times_qk, times_v, *band[2:])
