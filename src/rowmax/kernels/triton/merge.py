"""Attention over two disjoint sets of keys to attention over both, in one launch: `rowmax.merge` of two, without gradients.

    O = (e^(a - m) A + e^(b - m) B) / (e^(a - m) + e^(b - m)),  LSE = m + ln(e^(a - m) + e^(b - m)),    m = max(a, b)

a and b are the parts' LSEs, A and B their outputs. Launched by `kernels/decode_launch.py` for prefixes that sequences share.
"""

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    a_ptr, a_lse_ptr,  # [rows, H, Dv], fp32 [H, rows]
    o_ptr, lse_ptr,  # [rows, H, Dv], fp32 [rows / T, H, T]: the other part, which the results take the place of
    a_strides, o_strides, rows, heads, len_q,
    DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program for ROWS rows of a head; strides are (row, head)."""
    pid = tl.program_id(0)
    head = (pid % heads).to(tl.int64)
    row = (pid // heads).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    lse_at = lse_ptr + (row // len_q * heads + head) * len_q + row % len_q
    a_lse = tl.load(a_lse_ptr + head * rows + row, mask=real, other=0.0)
    b_lse = tl.load(lse_at, mask=real, other=0.0)
    m = tl.maximum(a_lse, b_lse)
    pivot = tl.where(m == float("-inf"), 0.0, m)
    of_a = tl.exp(a_lse - pivot)
    of_b = tl.exp(b_lse - pivot)
    total = of_a + of_b
    dims = tl.arange(0, BLOCK_DV)
    mask = real[:, None] & (dims < DIM_V)[None, :]
    at = o_ptr + (row * o_strides[0] + head * o_strides[1])[:, None] + dims[None, :]
    a = tl.load(a_ptr + (row * a_strides[0] + head * a_strides[1])[:, None] + dims[None, :], mask=mask, other=0.0)
    b = tl.load(at, mask=mask, other=0.0)
    some = tl.where(total == 0.0, 1.0, total)
    o = (a.to(tl.float32) * of_a[:, None] + b.to(tl.float32) * of_b[:, None]) / some[:, None]
    tl.store(at, o.to(o_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_at, tl.where(total == 0.0, float("-inf"), pivot + tl.log(some)), mask=real)
