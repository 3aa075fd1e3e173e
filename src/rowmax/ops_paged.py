"""The torch operators of serving: `rowmax::paged` and `rowmax::paged_into`, attention over a paged cache, and
`rowmax::append_kv`, which writes new keys and values into it.

They validate (`PagedProblem.describe`), take the plan and run it, as `ops` does for dense and packed tensors. There are no
gradients. Called by `serving`.
"""

from dataclasses import replace

import torch

from rowmax.arguments import check_tensors
from rowmax.cpu import paged as cpu_paged
from rowmax.device import Device
from rowmax.errors import ProblemError
from rowmax.ops import MOST, ON_CPU, PLAIN, _own_precision, kernels
from rowmax.paged import AppendOperands, PagedOperands, PagedProblem, check_append
from rowmax.plan import plan
from rowmax.problem import aligned

_LIBRARY = torch.library.Library("rowmax", "FRAGMENT")
_launches: dict = {}  # form of a call -> its launch

_SCHEMA = (
    "bool need_lse, Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor seqlens_k, Tensor? cu_seqlens_q, "
    "Tensor? k_scale, Tensor? v_scale, SymInt? max_seqlen_q, float? scale, SymInt? left, SymInt? right, SymInt? num_splits, "
    "bool batch_invariant, str plan"
)
_LIBRARY.define(f"paged({_SCHEMA}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(f"paged_into(Tensor(a!) out, {_SCHEMA}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
PAGED = torch.ops.rowmax.paged.default
PAGED_INTO = torch.ops.rowmax.paged_into.default


def describe(*call):
    """`(problem, operands)`, validated."""
    operands = PagedOperands(*call[:8])
    max_seqlen_q, scale, left, right, _, invariant, _ = call[8:]
    numbers = {"left": left, "right": right, "scale": scale, "max_len_q": max_seqlen_q, "batch_invariant": invariant}
    return PagedProblem.describe(operands, **numbers), operands


def shapes_of(problem: PagedProblem, q: torch.Tensor) -> tuple[tuple, tuple]:
    """Of the output and the LSE: as `Problem.outputs`, without the queries' dimension where q has none."""
    out_shape, lse_shape = problem.outputs()
    if q.dim() == 3 and not problem.packed:
        return (out_shape[0], *out_shape[2:]), lse_shape[:2]
    return out_shape, lse_shape


def plan_paged(*call):
    """`(problem, operands, plan)` of a call, whose last are `num_splits`, `batch_invariant` and the plan's spelling."""
    *_, num_splits, invariant, prefer = call
    problem, operands = describe(*call)
    if num_splits is not None and num_splits < 1:
        raise ProblemError(f"num_splits must be at least 1, or None for the plan's own; got {num_splits} for '{problem}'.")
    if num_splits is not None and invariant:
        raise ProblemError("batch_invariant fixes the parts that keys are shared out in; leave num_splits out.")
    rows = {"aligned": _for_latent(problem, operands)}
    chosen = plan(problem, Device.of(operands.q), prefer=prefer, **rows)
    if num_splits is not None and chosen.algorithm not in ON_CPU:  # the CPU has one way
        tile = replace(chosen.tiles[0], parts=num_splits, together=False)
        chosen = plan(problem, Device.of(operands.q), prefer=f"{chosen.algorithm}[{tile}]", **rows)
    return problem, operands, chosen


def _for_latent(problem: PagedProblem, operands: PagedOperands) -> bool:
    """Are tensors of latent attention aligned, with values that are the first columns of the keys? True of all other calls."""
    q, k, v, *_ = operands
    if problem.dim_v == problem.dim_qk or q.is_cpu:
        return True
    return aligned(q, k) and v.data_ptr() == k.data_ptr() and v.stride() == k.stride()


def _check_out(problem: PagedProblem, q, out) -> None:
    check_tensors(out=out)
    shape, _ = shapes_of(problem, q)
    like = (tuple(out.shape), out.dtype, out.device) == (tuple(shape), q.dtype, q.device)
    if not like or (out.numel() and out.stride(-1) != 1):
        raise ProblemError(
            f"out must be {q.dtype} {list(shape)} on {q.device} with stride 1 in its last dimension; got {out.dtype} "
            f"{list(out.shape)} with strides {out.stride()} on {out.device}."
        )


def form_of(numbers, out, tensors):
    """All that a call's launch depends on: `numbers`, and of its tensors everything but contents and addresses. None: the call
    has to be looked at by itself, as one with a tensor of some other type."""
    _, k, v, *_ = tensors
    if type(k) not in PLAIN or type(v) not in PLAIN:
        return None
    try:
        form: list = [numbers, k.data_ptr() == v.data_ptr()]
        for t in (*tensors, out):
            if t is None:
                form.append(None)
            elif type(t) in PLAIN:
                form += (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16)
            else:
                return None
    except RuntimeError:  # a tensor without addresses
        return None
    return tuple(form)


def kept(form):
    """The launch of calls of this form, if there was one."""
    try:
        return _launches.get(form)
    except TypeError:  # an argument that cannot be hashed, and which will be told so
        return None


def keep(form, launch) -> None:
    if form is not None and launch is not None:
        if len(_launches) >= MOST:
            _launches.clear()
        _launches[form] = launch


def run(out, need_lse, *call):
    """`(out, lse)`, lse None unless it is needed; `out` None: made here."""
    return run_kept(None, out, need_lse, *call)


def run_kept(form, out, need_lse, *call):
    """The same; the launch is kept for other calls of the form."""
    problem, operands, chosen = plan_paged(*call)
    if out is not None:
        _check_out(problem, operands.q, out)
    q = operands.q
    out_shape, lse_shape = shapes_of(problem, q)
    if chosen.algorithm in ON_CPU:
        out = q.new_empty(out_shape) if out is None else out
        lse = q.new_empty(lse_shape, dtype=problem.lse_dtype) if need_lse else None
        with _own_precision():
            cpu_paged.forward(problem, operands, chosen, need_lse, out, lse)
        return out, lse
    launch = launch_of(problem, chosen, q)
    keep(form, launch)
    return launch(need_lse, out, operands)


def launch_of(problem: PagedProblem, chosen, q: torch.Tensor):
    """Of calls like this one, by kernels."""
    kernels()
    from rowmax.kernels.decode_launch import Paged

    return Paged(problem, chosen, *shapes_of(problem, q))


def _run_eagerly(out, need_lse, *call):
    """What the operators run, below autograd."""
    form = form_of((need_lse, *call[8:]), out, call[:8])
    launch = kept(form)
    if launch is not None:
        return launch(need_lse, out, call[:8])
    return run_kept(form, out, need_lse, *call)


def _paged(need_lse, *call):
    out, lse = _run_eagerly(None, need_lse, *call)
    return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse


def _paged_into(out, need_lse, *call):
    _, lse = _run_eagerly(out, need_lse, *call)
    return out.new_empty(0, dtype=torch.float32) if lse is None else lse


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("paged", _paged, _key)
    _LIBRARY.impl("paged_into", _paged_into, _key)


@torch.library.register_fake("rowmax::paged", lib=_LIBRARY)
def _paged_fake(need_lse, q, *call):
    problem, _ = describe(q, *call)
    out_shape, lse_shape = shapes_of(problem, q)
    return q.new_empty(out_shape), q.new_empty(lse_shape if need_lse else (0,), dtype=problem.lse_dtype)


@torch.library.register_fake("rowmax::paged_into", lib=_LIBRARY)
def _paged_into_fake(out, need_lse, q, *call):
    problem, _ = describe(q, *call)
    _check_out(problem, q, out)
    return q.new_empty(shapes_of(problem, q)[1] if need_lse else (0,), dtype=problem.lse_dtype)


def _refuse_gradients(*tensors) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise ProblemError(
            "attention over a paged cache has no gradients, and an input requires them. Call it under torch.no_grad() or with "
            "detached tensors, or call rowmax.attention."
        )


def _paged_autograd(need_lse, q, k, v, *rest):
    _refuse_gradients(q, k, v)
    with torch._C._AutoDispatchBelowAutograd():
        return PAGED(need_lse, q, k, v, *rest)


def _paged_into_autograd(out, need_lse, q, k, v, *rest):
    _refuse_gradients(out, q, k, v)
    with torch._C._AutoDispatchBelowAutograd():
        return PAGED_INTO(out, need_lse, q, k, v, *rest)


_LIBRARY.impl("paged", _paged_autograd, "Autograd")
_LIBRARY.impl("paged_into", _paged_into_autograd, "Autograd")


# ---- append ---------------------------------------------------------------------------------------------------------

_LIBRARY.define(
    "append_kv(Tensor(a!) k_pages, Tensor(b!)? v_pages, Tensor k, Tensor? v, Tensor block_table, Tensor seqlens_k, "
    "Tensor? cu_seqlens, Tensor? cos, Tensor? sin, Tensor? k_scale, Tensor? v_scale, bool interleaved) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
APPEND = torch.ops.rowmax.append_kv.default


def _append_on_the_cpu(*call):
    operands = AppendOperands(*call[:-1])
    check_append(operands)
    cpu_paged.append(operands, call[-1])


def _append_by_kernels(*call):
    operands = AppendOperands(*call[:-1])
    check_append(operands)
    kernels()
    from rowmax.kernels.decode_launch import append

    append(operands, call[-1])


def _append_autograd(*call):
    _refuse_gradients(*(t for t in call[:4] if t is not None))
    with torch._C._AutoDispatchBelowAutograd():
        APPEND(*call)


_LIBRARY.impl("append_kv", _append_on_the_cpu, "CPU")
_LIBRARY.impl("append_kv", _append_by_kernels, "CUDA")
_LIBRARY.impl("append_kv", _append_autograd, "Autograd")


@torch.library.register_fake("rowmax::append_kv", lib=_LIBRARY)
def _append_fake(*call):
    check_append(AppendOperands(*call[:-1]))
