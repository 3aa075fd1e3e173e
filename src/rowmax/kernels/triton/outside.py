"""Rows of packed tensors that no sequence holds: numbers become 0, LSEs -inf. All others are left to the kernels behind it.

A buffer that is longer than its sequences has such rows behind the last one, and perhaps in front of the first. To fill the
whole result beforehand took 40 of 365 us on an H200 (32k tokens, 16 heads of 128 dims). Launched by `kernels/launch.py`.
"""

import triton
import triton.language as tl

from rowmax.kernels.tile_ops import clamp

AT_ONCE: tl.constexpr = tl.constexpr(256)  # sequences


@triton.jit
def _wipe(pointer, low, high, width, BLOCK: tl.constexpr):
    """Rows `[low, high)` of `[rows, width]`, contiguous."""
    base = pointer + tl.cast(low, tl.int64) * width
    count = (high - low) * width
    for first in range(0, count, BLOCK):
        places = first + tl.arange(0, BLOCK)
        tl.store(base + places, tl.zeros([BLOCK], pointer.dtype.element_ty), mask=places < count)


@triton.jit(do_not_specialize=["batch", "rows", "heads"])  # every batch has others
def outside_kernel(
    x_ptr, y_ptr,  # [rows, width] each, contiguous; y None: there is none
    lse_ptr,  # fp32 [heads, rows]; None: not wanted
    cu_seqlens,  # [batch + 1]
    batch, rows, x_width, y_width, heads,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for ROWS rows. Where `cu_seqlens` decreases or leaves the tensor, any row may be nobody's: all become 0."""
    falls = batch * 0
    for first in range(0, batch, AT_ONCE):
        b = first + tl.arange(0, AT_ONCE)
        here = tl.load(cu_seqlens + b, mask=b < batch, other=0)
        following = tl.load(cu_seqlens + b + 1, mask=b < batch, other=0)
        falls += tl.sum(((here < 0) | (following < here) | (following > rows)).to(tl.int32), 0)
    begin = clamp(tl.load(cu_seqlens), 0, rows).to(tl.int32)
    end = clamp(tl.load(cu_seqlens + batch), begin, rows).to(tl.int32)
    if falls > 0:
        end = begin
    row = tl.program_id(0) * ROWS
    last = tl.minimum(row + ROWS, rows)
    if (row >= begin) & (last <= end):
        return
    before = tl.maximum(tl.minimum(last, begin), row)  # rows from `row` to here lie in front of the first sequence
    behind = tl.maximum(tl.minimum(last, tl.maximum(row, end)), before)  # those from here on behind the last
    _wipe(x_ptr, row, before, x_width, BLOCK)
    _wipe(x_ptr, behind, last, x_width, BLOCK)
    if y_ptr is not None:
        _wipe(y_ptr, row, before, y_width, BLOCK)
        _wipe(y_ptr, behind, last, y_width, BLOCK)
    if lse_ptr is not None:
        own = row + tl.arange(0, ROWS)
        outside = (own < before) | (own >= behind)
        for head in range(heads):
            line = lse_ptr + tl.cast(head, tl.int64) * rows
            tl.store(line + own, tl.full([ROWS], float("-inf"), tl.float32), mask=outside & (own < last))
