"""Launch kernels on tensors carved out of larger, filled memory, and see whether they read or wrote outside of them.

A read outside becomes a NaN in a result, or a result that depends on the filler; a write outside changes a margin or a gap.
Works on a GPU and in the interpreter.
"""

import contextlib
import math

import torch

from rowmax import Device, plan, testing
from rowmax.kernels import decode_launch, launch
from rowmax.problem import aligned

MARGIN = 4096  # elements on each side: more than a tile
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
# `cu_seqlens` of three sequences in 40 rows that lie.
HOSTILE = {
    "decreasing": [0, 30, 10, 40],
    "beyond the end": [0, 20, 41, 999],
    "negative": [-5, -1, 20, 40],
    "starts late": [7, 9, 20, 40],
    "all at the end": [40, 40, 40, 40],
    "smallest and largest": [INT_MIN, INT_MAX, INT_MIN, INT_MAX],
    "largest": [INT_MAX, INT_MAX, INT_MAX, INT_MAX],
    "smallest": [INT_MIN, INT_MIN, INT_MIN, INT_MIN],
    "wraps": [0, INT_MAX, INT_MIN, 40],
    "decreasing by one": [0, 21, 20, 40],
}


class OutOfBounds(AssertionError):
    """A kernel wrote outside its tensors."""


def lying(operands, values, side: str, dtype=torch.int32):
    """The operands with `values` for the `cu_seqlens` of "queries", "keys" or "both"."""
    cu = torch.tensor(values, dtype=dtype, device=operands.q.device)
    true = operands.cu_seqlens_q.to(dtype)
    return operands._replace(cu_seqlens_q=true if side == "keys" else cu, cu_seqlens_k=true if side == "queries" else cu)


def run_guarded(problem, operands, prefer: str, filler: float = math.nan):
    """`(out, lse, dq, dk, dv)` with every launch guarded, below the check of `cu_seqlens`, which reads them on a CPU alone."""
    device = operands.q.device
    options = {"prefer": prefer, "aligned": aligned(*operands[:3])}
    forward, backward = (plan(problem, Device.of(device), direction=way, **options) for way in ("forward", "backward"))
    with active(filler):
        out, lse = launch.Forward(problem, forward, True)(*operands)
        given = testing.cotangents(problem, device=device)
        return (out, lse, *launch.backward(problem, operands, out, lse, *given, (True, True, True), backward))


def run_guarded_paged(problem, operands, prefer: str, filler: float = math.nan):
    """`(out, lse)` of a call over pages with every launch guarded, below the check of lengths and ids."""
    chosen = plan(problem, Device.of(operands.q), prefer=prefer)
    with active(filler):
        return decode_launch.Paged(problem, chosen, *problem.outputs())(True, None, operands)


@contextlib.contextmanager
def active(filler: float = math.nan):
    """Inside, every launch is guarded."""
    original = launch._launch
    launch._launch = guarded(launch, filler)
    try:
        yield
    finally:
        launch._launch = original


def guarded(launch_module, filler: float = math.nan):
    """A replacement for `launch._launch` that launches on guarded copies and copies the results back."""
    original = launch_module._launch

    def launch(device, call):
        guards = [None if tensor is None else _Guard(tensor, filler) for tensor in call.tensors]
        original(device, call._replace(tensors=tuple(guard and guard.copy for guard in guards)))
        for i, guard in enumerate(guards):
            if guard is not None:
                guard.finish(f"argument {i} of {getattr(call.kernel, '__name__', call.kernel)}")

    return launch


class _Guard:
    """The memory between the first and the last element of a tensor, gaps included, with a margin before and behind."""

    def __init__(self, tensor: torch.Tensor, filler: float):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        span = last + 1 if tensor.numel() else 0
        self.flat = tensor.data.as_strided((span,), (1,))  # .data: writing back is no change that autograd should see
        filler = filler if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
        self.storage = torch.full((2 * MARGIN + span,), filler, dtype=tensor.dtype, device=tensor.device)
        self.margin = self.storage[:MARGIN].clone()
        self.inside = self.storage[MARGIN : MARGIN + span]
        self.inside.copy_(self.flat)
        self.copy = self.storage.as_strided(tensor.shape, tensor.stride(), MARGIN)
        self.gaps = torch.ones(span, dtype=torch.bool, device=tensor.device)
        self.gaps.as_strided(tensor.shape, tensor.stride(), 0).fill_(False)

    def finish(self, name: str) -> None:
        for where, margin in (("before", self.storage[:MARGIN]), ("behind", self.storage[MARGIN + len(self.flat) :])):
            if not _same_bits(margin, self.margin):
                raise OutOfBounds(f"{name}: memory {where} the tensor was written")
        if not _same_bits(self.inside[self.gaps], self.flat[self.gaps]):
            raise OutOfBounds(f"{name}: a gap between its rows was written")
        self.flat.copy_(self.inside)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.view(kind), other.view(kind))
