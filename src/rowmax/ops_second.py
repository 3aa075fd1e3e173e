"""The operators of second order, and how autograd gets to them: forward mode, a backward through the backward, and mixtures.

`ops` and `ops_scored` come here where a tensor carries a tangent, or where the backward itself is to be differentiated; nothing
else does, so that the first order pays nothing. The mathematics is in `second_order`. With F the forward and B the backward,

    rowmax::forward_mode     tangents of F's results           its own backward: `derivatives` and B
    rowmax::derivatives      backward of B                     third order: refused
    rowmax::backward_mode    tangents of B's results           third order: refused

B has F's results among its inputs; the gradients that they get go back through F by autograd.
"""

import contextlib
from typing import NamedTuple, Optional

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from rowmax import ops, second_order
from rowmax.problem import Operands, Problem

# The same description of a call as `rowmax::forward_scored` takes.
_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? slopes, Tensor? sink, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? scale, SymInt? left, SymInt? right, bool deterministic, str plan, "
    "float softcap"
)
_TENSORS, _SINK = 7, 6
_ALONG = "Tensor? t_q, Tensor? t_k, Tensor? t_v, Tensor? t_sink"
_GIVEN = "Tensor? d_out, Tensor? d_lse, Tensor out, Tensor lse"
_T_GIVEN = "Tensor? t_d_out, Tensor? t_d_lse, Tensor? t_out, Tensor? t_lse"
_SCHEMAS = {
    "forward_mode": f"(Tensor out, Tensor lse, {_ALONG}, {_CALL}) -> (Tensor, Tensor)",
    "derivatives": f"(bool[3] needs, {_GIVEN}, {_ALONG}, {_CALL}) -> (" + ", ".join(["Tensor"] * 8) + ")",
    "backward_mode": f"({_GIVEN}, {_T_GIVEN}, {_ALONG}, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor)",
}
for _name, _schema in _SCHEMAS.items():
    ops._LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
FORWARD_MODE = torch.ops.rowmax.forward_mode.default
DERIVATIVES = torch.ops.rowmax.derivatives.default
BACKWARD_MODE = torch.ops.rowmax.backward_mode.default


def _describe(*call):
    operands = Operands(*call[:_TENSORS])
    names = ("max_len_q", "max_len_k", "scale", "left", "right", "deterministic")
    numbers = dict(zip(names, call[_TENSORS : _TENSORS + 6], strict=True))
    return Problem.describe(operands, softcap=call[-1], **numbers), operands


def _direction(along, operands: Operands) -> second_order.Direction:
    like = (*operands[:3], operands.sink)
    return second_order.Direction(*(_or_zeros(t, other) for t, other in zip(along, like, strict=True)))


def _or_zeros(t, like):
    return like.new_zeros(()).expand(like.shape) if t is None and like is not None else t


def _forward_mode(out, lse, t_q, t_k, t_v, t_sink, *call):
    problem, operands = _describe(*call)
    return second_order.forward_mode(problem, operands, out, lse, _direction((t_q, t_k, t_v, t_sink), operands))


def _derivatives(needs, d_out, d_lse, out, lse, t_q, t_k, t_v, t_sink, *call):
    problem, operands = _describe(*call)
    direction = _direction((t_q, t_k, t_v, t_sink), operands)
    given = (_or_zeros(d_out, out), _or_zeros(d_lse, lse), out, lse)
    return second_order.derivatives(problem, operands, *given, direction, needs)


def _backward_mode(d_out, d_lse, out, lse, t_d_out, t_d_lse, t_out, t_lse, t_q, t_k, t_v, t_sink, *call):
    problem, operands = _describe(*call)
    like = (out, lse, out, lse)
    given = tuple(_or_zeros(t, other) for t, other in zip((d_out, d_lse, out, lse), like, strict=True))
    t_given = tuple(_or_zeros(t, other) for t, other in zip((t_d_out, t_d_lse, t_out, t_lse), like, strict=True))
    return second_order.backward_mode(problem, operands, given, t_given, _direction((t_q, t_k, t_v, t_sink), operands))


for _key in ("CPU", "CUDA"):
    ops._LIBRARY.impl("forward_mode", _forward_mode, _key)
    ops._LIBRARY.impl("derivatives", _derivatives, _key)
    ops._LIBRARY.impl("backward_mode", _backward_mode, _key)


@torch.library.register_fake("rowmax::forward_mode", lib=ops._LIBRARY)
def _forward_mode_fake(out, lse, *_):
    return out.new_empty(out.shape), lse.new_empty(lse.shape)


@torch.library.register_fake("rowmax::derivatives", lib=ops._LIBRARY)
def _derivatives_fake(needs, d_out, d_lse, out, lse, t_q, t_k, t_v, t_sink, *call):
    rows = (out, lse, out, lse)
    grads = (t.new_empty(t.shape if need else (0,)) for t, need in zip(call[:3], needs, strict=True))
    sink = call[_SINK]
    return *(t.new_empty(t.shape) for t in rows), *grads, lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)


@torch.library.register_fake("rowmax::backward_mode", lib=ops._LIBRARY)
def _backward_mode_fake(d_out, d_lse, out, lse, t_d_out, t_d_lse, t_out, t_lse, t_q, t_k, t_v, t_sink, *call):
    sink = call[_SINK]
    return *(t.new_empty(t.shape) for t in call[:3]), lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)


# ---- autograd ------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A forward operator and its backward, and which of `_CALL` they take: `rowmax::forward`, or `rowmax::forward_scored`."""

    scored: bool

    def forward(self, need_lse, *call):
        operator = torch.ops.rowmax.forward_scored.default if self.scored else ops.FORWARD
        return operator(need_lse, *self._own(call))

    def backward(self, needs, *arguments):
        """dq, dk, dv and the sink's."""
        given, call = arguments[:4], self._own(arguments[4:])
        if self.scored:
            return torch.ops.rowmax.backward_scored.default(needs, *given, *call)
        return *ops.BACKWARD(needs[:3], *given, *call), None

    def _own(self, call):
        return call if self.scored else (*call[:5], *call[_TENSORS:-1])


PLAIN, SCORED = Pair(False), Pair(True)


def forward(pair: Pair, need_lse: bool, *call):
    """F by autograd, where somebody takes a derivative in forward mode or by `torch.func`. `call`: of F's operator."""
    call = call if pair.scored else _of_plain(call)
    leaves = (*call[:3], call[_SINK])
    if ops._requires_grad(*leaves) or _has_tangent(*leaves):
        return apply(Forward, pair, *call)
    with torch._C._AutoDispatchBelowAutograd():  # a level of `torch.func` below may need gradients, and for them the LSE
        return pair.forward(need_lse or torch._C._are_functorch_transforms_active(), *call)


def backward(pair: Pair, needs, *arguments):
    """B by autograd, where it may have to be differentiated. `arguments`: of B's operator."""
    call = arguments[4:] if pair.scored else _of_plain(arguments[4:])
    leaves = (*arguments[:4], *call[:3], call[_SINK])
    if ops._requires_grad(*leaves) or _has_tangent(*leaves):
        return apply(Backward, pair, needs if pair.scored else (*needs, False), *arguments[:4], *call)
    with torch._C._AutoDispatchBelowAutograd():
        found = pair.backward(needs if pair.scored else (*needs, False), *arguments[:4], *call)
        return found if pair.scored else found[:3]


def _of_plain(call):
    """The arguments of `rowmax::forward` in the form of `_CALL`."""
    return *call[:5], None, None, *call[5:], 0.0


def _has_tangent(*tensors) -> bool:
    """Does any of them change along the direction that somebody takes a forward derivative in?"""
    return any(t is not None and forward_ad.unpack_dual(t, level=0).tangent is not None for t in tensors)


def apply(function, *arguments):
    """An autograd function of the dispatcher's kind: of one level of `torch.func`, whose other levels the dispatcher visits.

    Its first argument tells whether gradients are recorded, which torch turns off for the forward of any such function, and
    the levels below need to know.
    """
    recording = torch.is_grad_enabled()
    if not torch._C._are_functorch_transforms_active():
        return function.apply(recording, *arguments)
    with enable_single_level_autograd_function():
        return function.apply(recording, *arguments)


def _below(operator, *arguments):
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


@contextlib.contextmanager
def _next_level(recording: bool):
    """Below autograd: the kernel, or the next level of `torch.func` with its own autograd."""
    with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(recording), forward_ad._set_fwd_grad_enabled(True):
        yield


def _primal(t: Optional[torch.Tensor]):
    return None if t is None else forward_ad.unpack_dual(t, level=0).primal


# Not `torch.autograd.Function`, whose `apply` goes through all levels of `torch.func` by itself.
_Function = torch.autograd.function._SingleLevelFunction


class Forward(_Function):
    """F with tangents."""

    @staticmethod
    def forward(ctx, recording, pair, *call):
        with _next_level(recording):
            out, lse = pair.forward(True, *call)
        ctx.save_for_backward(*call[:_TENSORS], out, lse)
        ctx.save_for_forward(*call[:_TENSORS], out, lse)
        ctx.pair, ctx.numbers = pair, call[_TENSORS:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        needs = _needs(ctx, 2)
        grads: tuple = (None,) * 4
        if d_out is not None or d_lse is not None:
            *tensors, out, lse = ctx.saved_tensors
            grads = ctx.pair.backward(needs, d_out, d_lse, out, lse, *tensors, *ctx.numbers)
        return None, None, *_for_call(grads, needs, ctx)

    @staticmethod
    def jvp(ctx, _, __, t_q, t_k, t_v, _cu_q, _cu_k, _slopes, t_sink, *___):
        with forward_ad._set_fwd_grad_enabled(True):  # for the levels below, which torch would hide
            *tensors, out, lse = (_primal(t) for t in ctx.saved_tensors)
            return FORWARD_MODE(out, lse, t_q, t_k, t_v, t_sink, *tensors, *ctx.numbers)


class Backward(_Function):
    """B, differentiable: by its cotangents, by F's results and by F's inputs."""

    @staticmethod
    def forward(ctx, recording, pair, needs, *arguments):
        tensors = arguments[: 4 + _TENSORS]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.pair, ctx.needs, ctx.numbers = pair, needs, arguments[4 + _TENSORS :]
        ctx.set_materialize_grads(False)
        with _next_level(recording):
            grads = pair.backward(needs, *arguments)
        return grads if pair.scored else grads[:3]

    @staticmethod
    def backward(ctx, *along):
        needs = _needs(ctx, 7)
        along = tuple(t if need else None for t, need in zip((*along, None)[:4], ctx.needs, strict=True))
        found: tuple = (None,) * 8
        if any(t is not None for t in along):
            given, call = ctx.saved_tensors[:4], (*ctx.saved_tensors[4:], *ctx.numbers)
            found = DERIVATIVES(needs[:3], *given, *along, *call)
        by_d_out, by_d_lse, by_out, by_lse, *grads = found
        d_out, d_lse = ctx.saved_tensors[:2]
        rows = (None if d_out is None else by_d_out, None if d_lse is None else by_d_lse, by_out, by_lse)
        return None, None, None, *rows, *_for_call(grads, needs, ctx)

    @staticmethod
    def jvp(ctx, _, __, ___, t_d_out, t_d_lse, t_out, t_lse, t_q, t_k, t_v, _cu_q, _cu_k, _slopes, t_sink, *____):
        t_given, along = (t_d_out, t_d_lse, t_out, t_lse), (t_q, t_k, t_v, t_sink)
        with forward_ad._set_fwd_grad_enabled(True):
            tensors = [_primal(t) for t in ctx.saved_tensors]
            found = BACKWARD_MODE(*tensors[:4], *t_given, *along, *tensors[4:], *ctx.numbers)
        results = [t if need else t.new_empty(0) for t, need in zip(found, ctx.needs, strict=True)]
        return tuple(results if ctx.pair.scored else results[:3])


class _ForwardMode(_Function):
    """`rowmax::forward_mode`, differentiable once."""

    @staticmethod
    def forward(ctx, recording, out, lse, *arguments):
        along, call = arguments[:4], arguments[4:]
        ctx.save_for_backward(out, lse, *along, *call[:_TENSORS])
        ctx.numbers = call[_TENSORS:]
        ctx.set_materialize_grads(False)
        with _next_level(recording):
            return FORWARD_MODE(out, lse, *arguments)

    @staticmethod
    def backward(ctx, d_out, d_lse):
        if d_out is None and d_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        (out, lse), along, tensors = ctx.saved_tensors[:2], ctx.saved_tensors[2:6], ctx.saved_tensors[6:]
        call, given = (*tensors, *ctx.numbers), (d_out, d_lse, out, lse)
        needs, by_along = _needs(ctx, 7), ctx.needs_input_grad[3:7]
        rows: tuple = (None, None)
        grads: tuple = (None,) * 4
        if any(ctx.needs_input_grad[1:3]) or any(needs):
            found = DERIVATIVES(needs[:3], *given, *along, *call)
            rows, grads = found[2:4], found[4:]
        turned: tuple = (None,) * 4
        if any(by_along):
            plain = tensors[5] is None and tensors[_SINK] is None and not ctx.numbers[-1]
            turned = (PLAIN if plain else SCORED).backward(by_along, *given, *call)
            turned = tuple(t if need else None for t, need in zip(turned, by_along, strict=True))
        return None, *rows, *turned, *_for_call(grads, needs, ctx)


class _ThirdOrder(_Function):
    """The results of `operator`, which are not differentiable."""

    @staticmethod
    def forward(ctx, recording, operator, *arguments):
        with _next_level(recording):
            return operator(*arguments)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(THIRD)


THIRD = (
    "third-order derivatives through rowmax attention, and forward mode within forward mode, are not implemented: one backward "
    "through the backward, or one forward mode with a backward, is. Use rowmax.reference.attention, which autograd "
    "differentiates to any order."
)


def _needs(ctx, first: int) -> tuple[bool, ...]:
    """Of q, k, v and the sink, when q is argument number `first`."""
    return *ctx.needs_input_grad[first : first + 3], ctx.needs_input_grad[first + _SINK]


def _for_call(grads, needs, ctx):
    """Gradients of `_CALL`: of q, k, v and the sink where they are needed."""
    dq, dk, dv, dsink = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return dq, dk, dv, None, None, None, dsink, *(None,) * len(ctx.numbers)


def _forward_mode_autograd(*arguments):
    tensors = (*arguments[:9], arguments[6 + _SINK])
    if _has_tangent(*tensors):
        raise NotImplementedError(THIRD)
    return apply(_ForwardMode, *arguments) if ops._requires_grad(*tensors) else _below(FORWARD_MODE, *arguments)


def _last_order(operator):
    def autograd(*arguments):
        tensors = [t for t in arguments if isinstance(t, torch.Tensor)]
        if _has_tangent(*tensors):
            raise NotImplementedError(THIRD)
        return apply(_ThirdOrder, operator, *arguments) if ops._requires_grad(*tensors) else _below(operator, *arguments)

    return autograd


ops._LIBRARY.impl("forward_mode", _forward_mode_autograd, "Autograd")
ops._LIBRARY.impl("derivatives", _last_order(DERIVATIVES), "Autograd")
ops._LIBRARY.impl("backward_mode", _last_order(BACKWARD_MODE), "Autograd")


# ---- FLOPs ---------------------------------------------------------------------------------------------------------


def _flops(call, times_qk: int, times_v: int) -> int:
    q, k, v, cu_q = call[:4]
    left, right = call[_TENSORS + 3 : _TENSORS + 5]
    return ops._matmul_flops(q, k, v, left, right, cu_q, times_qk, times_v)


@register_flop_formula(torch.ops.rowmax.forward_mode)
def _forward_mode_flops(*arguments, out_shape=None, **_) -> int:
    """S, tQ K^T, Q tK^T; U V and P tV."""
    return _flops(arguments[6:], 3, 2)


@register_flop_formula(torch.ops.rowmax.derivatives)
def _derivatives_flops(*arguments, out_shape=None, **_) -> int:
    """The three of the forward mode, two each for q and k; dO V^T, dO tV^T, two for dO, one for v."""
    return _flops(arguments[9:], 7, 5)


@register_flop_formula(torch.ops.rowmax.backward_mode)
def _backward_mode_flops(*arguments, out_shape=None, **_) -> int:
    """The three of the forward mode, two each for q and k; three with V, two for v."""
    return _flops(arguments[12:], 7, 5)
