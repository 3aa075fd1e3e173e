"""The torch operators: schema, fake, device implementations, autograd and FLOP formulas.

`rowmax::forward` and `rowmax::backward` validate their operands (`Problem.describe`), take the plan and run it, so that
`torch.compile` traces one call, and a direct caller of the operator is checked like a caller of `rowmax.attention`.
Triton is imported when a tensor on a GPU first arrives.
"""

import contextlib

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from rowmax import cpu
from rowmax.device import Device
from rowmax.errors import Unsupported
from rowmax.mask import pattern, visible_pairs
from rowmax.plan import plan
from rowmax.problem import Operands, Problem, aligned, aligned_pairs

_LIBRARY = torch.library.Library("rowmax", "DEF")
ON_CPU = ("aten", "tiled", "gathered")  # algorithms that `rowmax.cpu` runs; the others are kernels
PLAIN = (torch.Tensor, torch.nn.Parameter)  # types that have no say in what is called on them
MOST = 4096  # a form holds lengths, and a server may meet any number of them
_launches: dict = {}  # form of a call -> its launch; None: no kernel of ours runs it

# What describes a call; both operators take it last, in this order (`_CALL` arguments).
_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    "float? scale, SymInt? left, SymInt? right, bool deterministic, str plan"
)
_LIBRARY.define(f"forward(bool need_lse, {_SCHEMA}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    f"backward(bool[3] needs, Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
FORWARD = torch.ops.rowmax.forward.default
BACKWARD = torch.ops.rowmax.backward.default


def _describe(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, left, right, deterministic, _plan):
    if cu_seqlens_q is not None and cu_seqlens_k is not None:  # kernels read them without strides
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
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


def plan_forward(*call):
    """`(problem, operands, plan)` of a call of the operator, validated."""
    problem, operands = _describe(*call)
    q, k, v = operands[:3]
    return problem, operands, plan(problem, Device.of(q), prefer=call[-1], aligned=q.is_cpu or aligned(q, k, v))


def plan_scored(describe, tensors, *call):
    """As `plan_forward`, of a call of which so many `tensors` come first: of `ops_scored` and `ops_masked`."""
    problem, operands = describe(*call)
    return problem, operands, _planned(problem, operands, "forward", call[tensors + 6])


def launch_of(need_lse, q, k, v, cu_seqlens_q, cu_seqlens_k, *numbers):
    """The launch of every call of the same form as this one, or None: this call has to be looked at by itself.

    Checks, plan and launch depend on everything about a call but the contents and the addresses of its tensors, and of the
    addresses on what they are aligned to. They are worked out for the first call of a form, and kept.
    """
    if not _kept_lengths(cu_seqlens_q, cu_seqlens_k):
        return None
    form = (
        *(need_lse, numbers, None if cu_seqlens_q is None else (_form(cu_seqlens_q), _form(cu_seqlens_k))),
        *(q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % 16),
        *(k.shape, k.stride(), k.dtype, k.device, k.data_ptr() % 16),
        *(v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % 16),
    )
    launch = _launches.get(form, False)
    if launch is False:
        problem, _, chosen = plan_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *numbers)
        launch = kernels().Forward(problem, chosen, need_lse) if chosen.algorithm not in ON_CPU else None
        if len(_launches) >= MOST:
            _launches.clear()
        _launches[form] = launch
    return launch


def forget() -> None:
    """Work every launch out anew: plans have changed."""
    _launches.clear()


def _kept_lengths(cu_seqlens_q, cu_seqlens_k) -> bool:
    """Are they absent, or as the kernels read them? Values on the CPU are checked in every call."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return cu_seqlens_q is cu_seqlens_k
    return all(type(cu) in PLAIN and not cu.is_cpu and cu.is_contiguous() for cu in (cu_seqlens_q, cu_seqlens_k))


def _form(t: torch.Tensor):
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16


def _forward(need_lse, *call):
    launch, operands = launch_of(need_lse, *call), call[:5]
    if launch is None:
        problem, operands, chosen = plan_forward(*call)
        if chosen.algorithm in ON_CPU:
            with _own_precision():
                return cpu.forward(problem, operands, chosen, need_lse)
        launch = kernels().Forward(problem, chosen, need_lse)
    out, lse = launch(*operands)
    return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse


def _backward(*arguments):
    return run_backward(_describe, 5, *arguments)


def run_forward(describe, tensors, need_lse, *call):
    """`(out, lse)` of a call of which so many `tensors` come first: of `ops_scored` and `ops_masked`."""
    # As `launch_of`; the number of tensors keeps the forms of all apart.
    kept = _kept_lengths(*call[3:5])
    form = (need_lse, call[tensors:], *(None if t is None else _form(t) for t in call[:tensors])) if kept else None
    launch = _launches.get(form) if kept else None
    operands = Operands(*call[:tensors])
    if launch is None:
        problem, operands, chosen = plan_scored(describe, tensors, *call)
        if chosen.algorithm in ON_CPU:
            with _own_precision():
                return cpu.forward(problem, operands, chosen, need_lse)
        launch = kernels().Forward(problem, chosen, need_lse)
        if kept and all(t is None or t.is_contiguous() for t in call[5:7]):  # slopes and sink, which `describe` would copy
            if len(_launches) >= MOST:
                _launches.clear()
            _launches[form] = launch
    out, lse = launch(*operands)
    return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse


def run_backward(describe, tensors, needs, grad_out, grad_lse, out, lse, *call):
    """Gradients of a call of which so many `tensors` come first."""
    problem, operands = describe(*call)
    if grad_out is not None and grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    chosen = _planned(problem, operands, "backward", call[tensors + 6], grad_out)
    if chosen.algorithm not in ON_CPU:
        return tuple(kernels().backward(problem, operands, out, lse, grad_out, grad_lse, needs, chosen))
    with _own_precision():
        return cpu.backward(problem, operands, out, lse, grad_out, grad_lse, needs, chosen)


def fake_forward(describe, need_lse, *call):
    """Tensors like those of a forward, without values."""
    problem, operands = describe(*call)
    out_shape, lse_shape = problem.outputs()
    return operands.q.new_empty(out_shape), operands.q.new_empty(lse_shape if need_lse else (0,), dtype=problem.lse_dtype)


def _planned(problem, operands, direction, prefer, *more):
    q, k, v = operands[:3]
    rows = {"aligned": q.is_cpu or aligned(q, k, v, *more)}
    if problem.pairs:
        rows["pairs_aligned"] = q.is_cpu or aligned_pairs(operands.bias, operands.mask)
    return plan(problem, Device.of(q), direction=direction, prefer=prefer, **rows)


def _own_precision():
    """Autocast stays on inside an operator and would round the products of the CPU path to 16 bits."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else contextlib.nullcontext()


def kernels():
    """`rowmax.kernels.launch`, imported when it is needed."""
    try:
        from rowmax.kernels import launch
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise Unsupported("the kernels need Triton, which is not installed: pip install 'rowmax[triton]'") from None
    return launch


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("forward", _forward, _key)
    _LIBRARY.impl("backward", _backward, _key)


@torch.library.register_fake("rowmax::forward", lib=_LIBRARY)
def _forward_fake(*arguments):
    return fake_forward(_describe, *arguments)


@torch.library.register_fake("rowmax::backward", lib=_LIBRARY)
def _backward_fake(needs, grad_out, grad_lse, out, lse, *call):
    _, operands = _describe(*call)
    return tuple(t.new_empty(t.shape if need else (0,)) for t, need in zip(operands[:3], needs, strict=True))


# ---- autograd ------------------------------------------------------------------------------------------------------
# A kernel of our own under the Autograd key instead of `torch.library.register_autograd`, whose wrapper costs an eager call
# without gradients 20 us more (H200 host, torch 2.11).


def below_autograd(operator, *arguments):
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def forward_below_autograd(*arguments):
    """`rowmax::forward` when no input needs a gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        return FORWARD(*arguments)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, need_lse, *call):
        if not need_lse:
            raise RuntimeError("rowmax::forward: the backward needs the LSE; pass need_lse=True when inputs require grad.")
        out, lse = forward_below_autograd(need_lse, *call)
        ctx.save_for_backward(*call[:5], out, lse)
        ctx.call = call[5:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        needs = ctx.needs_input_grad[1:4]
        grads = (None, None, None)
        if grad_out is not None or grad_lse is not None:
            *tensors, out, lse = ctx.saved_tensors
            grads = BACKWARD(needs, grad_out, grad_lse, out, lse, *tensors, *ctx.call)
        return (
            None,
            *(grad if need else None for grad, need in zip(grads, needs, strict=True)),
            *(None,) * (2 + len(ctx.call)),
        )


def _requires_grad(*tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def in_forward_mode() -> bool:
    """Does anyone take a forward derivative? Then tensors may carry a tangent, which this operator would drop."""
    return forward_ad._current_level >= 0


def second():
    """`rowmax.ops_second`, imported when somebody takes a derivative in forward mode, by `torch.func`, or of a gradient."""
    from rowmax import ops_second

    return ops_second


def _transformed() -> bool:
    """May tensors carry tangents, or belong to a level of `torch.func`?"""
    return in_forward_mode() or torch._C._are_functorch_transforms_active()


def _forward_autograd(*arguments):
    if _transformed():
        return second().forward(second().PLAIN, *arguments)
    return _Attention.apply(*arguments) if _requires_grad(*arguments[1:4]) else forward_below_autograd(*arguments)


def _backward_autograd(*arguments):
    if _requires_grad(*arguments[1:8]) or _transformed():
        return second().backward(second().PLAIN, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return BACKWARD(*arguments)


_LIBRARY.impl("forward", _forward_autograd, "Autograd")
_LIBRARY.impl("backward", _backward_autograd, "Autograd")


# ---- FLOPs ---------------------------------------------------------------------------------------------------------


def _matmul_flops(q_shape, k_shape, v_shape, left, right, cu_seqlens, times_qk: int, times_v: int, *more) -> int:
    """2 x visible pairs x (times_qk * dim_qk + times_v * dim_v). Lengths in `cu_seqlens` are data: one sequence is assumed."""
    *batch, len_q, heads, dim_qk = q_shape
    pairs = visible_pairs(len_q, k_shape[-3], pattern(left, right, *more)) * heads * (batch[0] if batch else 1)
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
