"""The operators of second order, and how autograd gets to them: forward mode, a backward through the backward, and mixtures.

`ops`, `ops_scored` and `ops_masked` come here where a tensor carries a tangent, or where the backward itself is to be
differentiated; nothing else does, so that the first order pays nothing. The mathematics is in `second_order`. With F the
forward and B the backward,

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
from rowmax.mask import pattern
from rowmax.problem import Operands, Problem

# The same description of a call as `rowmax::forward_masked` takes.
_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? slopes, Tensor? sink, Tensor? bias, "
    "Tensor? mask, Tensor? seed, Tensor? numbers, SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? scale, SymInt? left, "
    "SymInt? right, bool deterministic, str plan, float softcap, float dropout_p, str score_mod, SymInt? sink_tokens, "
    "SymInt? prefix, SymInt? chunk"
)
_TENSORS, _SINK, _BIAS = 11, 6, 7
_SCORED = 7  # tensors that come first of `rowmax::forward_scored`, and 8 other arguments
_DEFAULTS = (0.0, 0.0, "", None, None, None)  # from softcap on
_LEAVES = 5  # q, k, v, sink and bias
_ALONG = "Tensor? t_q, Tensor? t_k, Tensor? t_v, Tensor? t_sink, Tensor? t_bias"
_GIVEN = "Tensor? d_out, Tensor? d_lse, Tensor out, Tensor lse"
_T_GIVEN = "Tensor? t_d_out, Tensor? t_d_lse, Tensor? t_out, Tensor? t_lse"
_SCHEMAS = {
    "forward_mode": f"(Tensor out, Tensor lse, {_ALONG}, {_CALL}) -> (Tensor, Tensor)",
    "derivatives": f"(bool[4] needs, {_GIVEN}, {_ALONG}, {_CALL}) -> (" + ", ".join(["Tensor"] * 9) + ")",
    "backward_mode": f"({_GIVEN}, {_T_GIVEN}, {_ALONG}, {_CALL}) -> (" + ", ".join(["Tensor"] * 5) + ")",
}
for _name, _schema in _SCHEMAS.items():
    ops._LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
FORWARD_MODE = torch.ops.rowmax.forward_mode.default
DERIVATIVES = torch.ops.rowmax.derivatives.default
BACKWARD_MODE = torch.ops.rowmax.backward_mode.default


def _describe(*call):
    operands = Operands(*call[:_TENSORS])
    names = ("max_len_q", "max_len_k", "scale", "left", "right", "deterministic", "plan", "softcap", "dropout", "score_mod")
    numbers = dict(zip((*names, "sink_tokens", "prefix", "chunk"), call[_TENSORS:], strict=True))
    del numbers["plan"]
    return Problem.describe(operands, **numbers), operands


def _direction(along, operands: Operands) -> second_order.Direction:
    like = (*operands[:3], operands.sink, operands.bias)
    return second_order.Direction(*(_or_zeros(t, other) for t, other in zip(along, like, strict=True)))


def _or_zeros(t, like):
    return like.new_zeros(()).expand(like.shape) if t is None and like is not None else t


def _forward_mode(out, lse, *arguments):
    along, call = arguments[:_LEAVES], arguments[_LEAVES:]
    problem, operands = _describe(*call)
    return second_order.forward_mode(problem, operands, out, lse, _direction(along, operands))


def _derivatives(needs, d_out, d_lse, out, lse, *arguments):
    problem, operands = _describe(*arguments[_LEAVES:])
    direction = _direction(arguments[:_LEAVES], operands)
    given = (_or_zeros(d_out, out), _or_zeros(d_lse, lse), out, lse)
    return second_order.derivatives(problem, operands, *given, direction, needs)


def _backward_mode(d_out, d_lse, out, lse, t_d_out, t_d_lse, t_out, t_lse, *arguments):
    problem, operands = _describe(*arguments[_LEAVES:])
    like = (out, lse, out, lse)
    given = tuple(_or_zeros(t, other) for t, other in zip((d_out, d_lse, out, lse), like, strict=True))
    t_given = tuple(_or_zeros(t, other) for t, other in zip((t_d_out, t_d_lse, t_out, t_lse), like, strict=True))
    return second_order.backward_mode(problem, operands, given, t_given, _direction(arguments[:_LEAVES], operands))


for _key in ("CPU", "CUDA"):
    ops._LIBRARY.impl("forward_mode", _forward_mode, _key)
    ops._LIBRARY.impl("derivatives", _derivatives, _key)
    ops._LIBRARY.impl("backward_mode", _backward_mode, _key)


@torch.library.register_fake("rowmax::forward_mode", lib=ops._LIBRARY)
def _forward_mode_fake(out, lse, *_):
    return out.new_empty(out.shape), lse.new_empty(lse.shape)


@torch.library.register_fake("rowmax::derivatives", lib=ops._LIBRARY)
def _derivatives_fake(needs, d_out, d_lse, out, lse, *arguments):
    call = arguments[_LEAVES:]
    rows = (out, lse, out, lse)
    grads = (t.new_empty(t.shape if need else (0,)) for t, need in zip(call[:3], needs[:3], strict=True))
    bias = _like(call[_BIAS] if needs[3] else None, lse)
    return *(t.new_empty(t.shape) for t in rows), *grads, _like(call[_SINK], lse), bias


@torch.library.register_fake("rowmax::backward_mode", lib=ops._LIBRARY)
def _backward_mode_fake(d_out, d_lse, out, lse, t_d_out, t_d_lse, t_out, t_lse, *arguments):
    call = arguments[_LEAVES:]
    return *(t.new_empty(t.shape) for t in call[:3]), _like(call[_SINK], lse), _like(call[_BIAS], lse)


def _like(t: Optional[torch.Tensor], lse: torch.Tensor) -> torch.Tensor:
    return lse.new_empty(0) if t is None else t.new_empty(t.shape)


# ---- autograd ------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A forward operator and its backward, and which of `_CALL` they take: "" for `rowmax::forward`, or "scored", "masked"."""

    kind: str

    def forward(self, need_lse, *call):
        operator = getattr(torch.ops.rowmax, f"forward_{self.kind}".rstrip("_")).default
        return operator(need_lse, *self._own(call))

    def backward(self, needs, *arguments):
        """dq, dk, dv, and the sink's and the bias's, or None."""
        operator = getattr(torch.ops.rowmax, f"backward_{self.kind}".rstrip("_")).default
        found = operator(needs[: self.leaves], *arguments[:4], *self._own(arguments[4:]))
        return *found, *(None,) * (_LEAVES - self.leaves)

    @property
    def leaves(self) -> int:
        """How many of q, k, v, sink and bias it differentiates by."""
        return {"": 3, "scored": 4, "masked": 5}[self.kind]

    def _own(self, call):
        """Of `_CALL`, what it takes."""
        if self.kind == "masked":
            return call
        first, last = (5, 7) if self.kind == "" else (_SCORED, 8)
        return *call[:first], *call[_TENSORS : _TENSORS + last]

    def full(self, call):
        """Its arguments in the form of `_CALL`; torch leaves the last ones out where they are the defaults."""
        first = {"": 5, "scored": _SCORED, "masked": _TENSORS}[self.kind]
        call = (*call[:first], *(None,) * (_TENSORS - first), *call[first:])
        return *call, *_DEFAULTS[len(call) - _TENSORS - 7 :]


PLAIN, SCORED, MASKED = Pair(""), Pair("scored"), Pair("masked")


def forward(pair: Pair, need_lse: bool, *call):
    """F by autograd, where somebody takes a derivative in forward mode or by `torch.func`. `call`: of F's operator."""
    call = pair.full(call)
    leaves = _leaves(call)
    if ops._requires_grad(*leaves) or _has_tangent(*leaves):
        return apply(Forward, pair, *call)
    with torch._C._AutoDispatchBelowAutograd():  # a level of `torch.func` below may need gradients, and for them the LSE
        return pair.forward(need_lse or torch._C._are_functorch_transforms_active(), *call)


def backward(pair: Pair, needs, *arguments):
    """B by autograd, where it may have to be differentiated. `arguments`: of B's operator."""
    call = pair.full(arguments[4:])
    needs = (*needs, *(False,) * (_LEAVES - len(needs)))
    leaves = (*arguments[:4], *_leaves(call))
    if ops._requires_grad(*leaves) or _has_tangent(*leaves):
        return apply(Backward, pair, needs, *arguments[:4], *call)
    with torch._C._AutoDispatchBelowAutograd():
        return pair.backward(needs, *arguments[:4], *call)[: pair.leaves]


def _leaves(call) -> tuple:
    return *call[:3], call[_SINK], call[_BIAS]


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
        grads: tuple = (None,) * _LEAVES
        if d_out is not None or d_lse is not None:
            *tensors, out, lse = ctx.saved_tensors
            grads = ctx.pair.backward(needs, d_out, d_lse, out, lse, *tensors, *ctx.numbers)
        return None, None, *_for_call(grads, needs, ctx)

    @staticmethod
    def jvp(ctx, _, __, *t_call):
        with forward_ad._set_fwd_grad_enabled(True):  # for the levels below, which torch would hide
            *tensors, out, lse = (_primal(t) for t in ctx.saved_tensors)
            return FORWARD_MODE(out, lse, *_leaves(t_call), *tensors, *ctx.numbers)


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
            return tuple(pair.backward(needs, *arguments)[: pair.leaves])

    @staticmethod
    def backward(ctx, *along):
        needs = _needs(ctx, 7)
        along = (*along, *(None,) * (_LEAVES - len(along)))
        along = tuple(t if need else None for t, need in zip(along, ctx.needs, strict=True))
        found: tuple = (None,) * 9
        if any(t is not None for t in along):
            given, call = ctx.saved_tensors[:4], (*ctx.saved_tensors[4:], *ctx.numbers)
            found = DERIVATIVES(_without_sink(needs), *given, *along, *call)
        by_d_out, by_d_lse, by_out, by_lse, *grads = found
        d_out, d_lse = ctx.saved_tensors[:2]
        rows = (None if d_out is None else by_d_out, None if d_lse is None else by_d_lse, by_out, by_lse)
        return None, None, None, *rows, *_for_call(grads, needs, ctx)

    @staticmethod
    def jvp(ctx, _, __, ___, *tangents):
        t_given, along = tangents[:4], _leaves(tangents[4:])
        with forward_ad._set_fwd_grad_enabled(True):
            tensors = [_primal(t) for t in ctx.saved_tensors]
            found = BACKWARD_MODE(*tensors[:4], *t_given, *along, *tensors[4:], *ctx.numbers)
        results = [t if need else t.new_empty(0) for t, need in zip(found, ctx.needs, strict=True)]
        return tuple(results[: ctx.pair.leaves])


class _ForwardMode(_Function):
    """`rowmax::forward_mode`, differentiable once."""

    @staticmethod
    def forward(ctx, recording, out, lse, *arguments):
        along, call = arguments[:_LEAVES], arguments[_LEAVES:]
        ctx.save_for_backward(out, lse, *along, *call[:_TENSORS])
        ctx.numbers = call[_TENSORS:]
        ctx.set_materialize_grads(False)
        with _next_level(recording):
            return FORWARD_MODE(out, lse, *arguments)

    @staticmethod
    def backward(ctx, d_out, d_lse):
        if d_out is None and d_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        first = 2 + _LEAVES
        (out, lse), along, tensors = ctx.saved_tensors[:2], ctx.saved_tensors[2:first], ctx.saved_tensors[first:]
        call, given = (*tensors, *ctx.numbers), (d_out, d_lse, out, lse)
        needs, by_along = _needs(ctx, 1 + first), ctx.needs_input_grad[3 : 1 + first]
        rows: tuple = (None, None)
        grads: tuple = (None,) * _LEAVES
        if any(ctx.needs_input_grad[1:3]) or any(needs):
            found = DERIVATIVES(_without_sink(needs), *given, *along, *call)
            rows, grads = found[2:4], found[4:]
        turned: tuple = (None,) * _LEAVES
        if any(by_along):
            turned = _simplest(call).backward(by_along, *given, *call)
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
    """Of q, k, v, the sink and the bias, when q is argument number `first`."""
    return _leaves(ctx.needs_input_grad[first:])


def _without_sink(needs) -> tuple[bool, ...]:
    return *needs[:3], needs[4]


def _simplest(call) -> Pair:
    """The operators that such a call comes to from `api`."""
    if any(t is not None for t in call[_BIAS:_TENSORS]) or call[_TENSORS + 8 :] != _DEFAULTS[1:]:
        return MASKED
    plain = call[_SINK - 1] is None and call[_SINK] is None and not call[_TENSORS + 7]
    return PLAIN if plain else SCORED


def _for_call(grads, needs, ctx):
    """Gradients of `_CALL`: of q, k, v, the sink and the bias where they are needed."""
    dq, dk, dv, dsink, dbias = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return dq, dk, dv, None, None, None, dsink, dbias, *(None,) * (_TENSORS - _BIAS - 1 + len(ctx.numbers))


def _forward_mode_autograd(*arguments):
    tensors = (*arguments[: 2 + _LEAVES], *_leaves(arguments[2 + _LEAVES :]))
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
    band = pattern(*call[_TENSORS + 3 : _TENSORS + 5], *call[_TENSORS + 10 :])
    return ops._matmul_flops(q, k, v, *band[:2], cu_q, times_qk, times_v, *band[2:])


@register_flop_formula(torch.ops.rowmax.forward_mode)
def _forward_mode_flops(*arguments, out_shape=None, **_) -> int:
    """S, tQ K^T, Q tK^T; U V and P tV."""
    return _flops(arguments[7:], 3, 2)


@register_flop_formula(torch.ops.rowmax.derivatives)
def _derivatives_flops(*arguments, out_shape=None, **_) -> int:
    """The three of the forward mode, two each for q and k; dO V^T, dO tV^T, two for dO, one for v."""
    return _flops(arguments[10:], 7, 5)


@register_flop_formula(torch.ops.rowmax.backward_mode)
def _backward_mode_flops(*arguments, out_shape=None, **_) -> int:
    """The three of the forward mode, two each for q and k; three with V, two for v."""
    return _flops(arguments[13:], 7, 5)
