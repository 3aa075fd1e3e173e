"""Launch kernels on tensors carved out of larger, filled memory, and see whether they read or wrote outside of them.

A read outside becomes a NaN in a result, or a result that depends on the filler; a write outside changes a margin or a gap.
Works on a GPU and in the interpreter.
"""

import math

import torch

MARGIN = 4096  # elements on each side: more than a tile


class OutOfBounds(AssertionError):
    """A kernel wrote outside its tensors."""


def guarded(launch_module, filler: float = math.nan):
    """A replacement for `launch._launch` that launches on guarded copies and copies the results back."""
    original = launch_module._launch

    def launch(device, call):
        kernel, programs, arguments, tile = call
        tensors = [(i, x) for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)]
        guards = {i: _Guard(x, filler) for i, x in tensors}
        copies = tuple(guards[i].copy if i in guards else x for i, x in enumerate(arguments))
        original(device, (kernel, programs, copies, tile))
        for i, guard in guards.items():
            guard.finish(f"argument {i} of {getattr(kernel, '__name__', kernel)}")

    return launch


class _Guard:
    """The memory between the first and the last element of a tensor, gaps included, with a margin before and behind."""

    def __init__(self, tensor: torch.Tensor, filler: float):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        span = last + 1 if tensor.numel() else 0
        self.flat = tensor.as_strided((span,), (1,))
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
