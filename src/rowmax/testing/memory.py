"""Where tensors of a test lie, and what lies around them: layouts, NaN-filled margins and gaps, poisoned allocations.

A read outside a tensor's elements, or an output row that nobody wrote, becomes a NaN in the result.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

LAYOUTS = {
    "contiguous": "as torch.randn returns it",
    "heads_first": "[B, H, T, D] storage (packed: [H, T, D]) seen through a transpose",
    "gaps": "16 elements after each head and token, holding NaN; NaN before and behind",
    "odd": "base one element off any alignment, odd strides, NaN in the gaps",
    "fused": "q, k, v sliced from one [.., Hq + 2 Hk, D] tensor (needs len_q = len_k, dim_qk = dim_v)",
    "broadcast": "k and v expanded over their heads with stride 0",
}
MARGIN_BYTES = 4096


def carve(tensor: torch.Tensor, *, gap: int = 0, offset: int = 0) -> torch.Tensor:
    """A copy of `tensor` in the middle of a NaN-filled allocation (integers: the smallest).

    Args:
        gap: filled elements after each run of the last dimension, and after each run of every other.
        offset: elements by which the first one is off the alignment of the allocation.
    """
    strides, step = [0] * tensor.dim(), 1
    for dim in reversed(range(tensor.dim())):
        strides[dim] = step
        step = step * max(tensor.shape[dim], 1) + gap
    margin = MARGIN_BYTES // tensor.element_size()
    storage = torch.full((2 * margin + offset + step,), _filler(tensor.dtype), dtype=tensor.dtype, device=tensor.device)
    return storage.as_strided(tensor.shape, strides, margin + offset).copy_(tensor)


def margins_intact(tensor: torch.Tensor) -> bool:
    """Does everything around and between the elements of a carved tensor still hold what `carve` put there?"""
    storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    outside = torch.ones_like(storage, dtype=torch.bool)
    outside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    left = storage[outside]
    return bool(torch.isnan(left).all() if tensor.is_floating_point() else (left == _filler(tensor.dtype)).all())


def place(q, k, v, layout: str) -> tuple[torch.Tensor, ...]:
    """q, k, v with the same values in a layout of `LAYOUTS` ("broadcast" repeats the first KV head)."""
    if layout == "broadcast":
        return place_one(q, "contiguous"), *(t[..., :1, :].contiguous().expand_as(t) for t in (k, v))
    if layout == "fused":
        if q.shape[:-2] != k.shape[:-2] or q.shape[-1] != v.shape[-1]:
            shapes = ", ".join(str(list(t.shape)) for t in (q, k, v))
            raise ValueError(f"layout 'fused' needs equal lengths and head dimensions; got {shapes}.")
        return torch.cat([q, k, v], -2).split([t.shape[-2] for t in (q, k, v)], -2)
    return tuple(place_one(t, layout) for t in (q, k, v))


def place_one(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """One tensor in a layout; those that concern several tensors leave it contiguous."""
    if layout in ("contiguous", "fused", "broadcast"):
        return tensor.contiguous()
    if layout == "heads_first":
        return tensor.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "gaps":
        return carve(tensor, gap=16)
    if layout == "odd":
        return carve(tensor, gap=1, offset=1)
    raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got '{layout}'.")


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, torch fills the memory of new tensors with NaN (integers: the largest), so that an unwritten row shows."""
    enabled, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill


def _filler(dtype: torch.dtype):
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).min
