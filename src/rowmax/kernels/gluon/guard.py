"""Rows whose result in `forward.py` is suspect, computed once more as the portable kernel does: normally none.

Launched behind every forward. A program looks at one byte for each of its rows and ends.
"""

import triton
import triton.language as tl

from rowmax.kernels.address import head_base, locate
from rowmax.kernels.triton.forward import _store_guarded


@triton.jit
def guard_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr,  # [B, T, H, D] or [T, H, D]
    lse_ptr,  # fp32 [B, H, len_q] or [H, len_q]; None: not wanted
    suspect_ptr,  # int8, as lse
    cu_seqlens_q, cu_seqlens_k,  # [batch + 1]; None: dense
    q_strides, k_strides, v_strides, o_strides,  # (batch, row, head)
    scale_log2, band, batch, heads, tiles, len_q, len_k,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    total_q = len_q
    row, head, b, begin_q, len_q, begin_k, len_k = locate(
        tl.program_id(0), cu_seqlens_q, cu_seqlens_k, batch, heads, tiles, len_q, len_k, ROWS
    )
    if row >= len_q:
        return
    b = tl.cast(b, tl.int32)
    line = (b.to(tl.int64) * heads + head) * total_q + begin_q
    rows = row + tl.arange(0, ROWS)
    suspect = tl.load(suspect_ptr + line + rows, mask=rows < len_q, other=0)
    if tl.max(suspect.to(tl.int32), 0) == 0:
        return
    _store_guarded(
        head_base(q_ptr, q_strides, b, begin_q, head), head_base(k_ptr, k_strides, b, begin_k, head // GROUP),
        head_base(v_ptr, v_strides, b, begin_k, head // GROUP), head_base(o_ptr, o_strides, b, begin_q, head),
        None if lse_ptr is None else lse_ptr + line, q_strides[1], k_strides[1], v_strides[1], o_strides[1],
        row, tl.minimum(row + ROWS, len_q) - 1, len_q, len_k, len_k - len_q, band, scale_log2, DIM, DIM_V, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
