"""Repairs behind `backward_wide_keys.py` and `backward_wide_queries.py`, in plain Triton: normally none.

Rows of dQ and keys whose 64 have left a mark are computed once more as the portable kernels do, so that a NaN or infinity
reaches what sees it and nothing else. What runs in front is `prepare_kernel` of `backward_edges.py`.
"""

import triton
import triton.language as tl

from rowmax.kernels.address import head_base, locate, slopes_base
from rowmax.kernels.gluon.backward_edges import _place, _store_guarded_keys
from rowmax.kernels.triton.backward import LOG2E, _store_guarded_dq
from rowmax.kernels.triton.given import pair_base


@triton.jit
def repair_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr,  # [B, T, H, D] or [T, H, D]
    dq_ptr, dk_ptr, dv_ptr,  # results, where a mark is
    lse_ptr, delta_ptr,  # of `prepare_kernel`
    suspect_ptr,  # int32: `key_flags` marks of 64 keys each, then `row_flags` of 64 rows
    cu_seqlens_q, cu_seqlens_k,  # [batch + 1]; None: dense
    slopes_ptr,  # fp32 [H] or [B, H]; None: no ALiBi
    bias_ptr, mask_ptr,  # [B, H, len_q, len_k]; None: none
    bias_strides, mask_strides,  # (batch, head, query, key)
    cap,  # as `tile_ops.bend` takes it
    q_strides, k_strides, v_strides, do_strides, dq_strides, dk_strides, dv_strides,  # (batch, row, head)
    scale, band, batch, heads, row_tiles, key_tiles, row_flags, key_flags, len_q, len_k, line_length,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SIZE: tl.constexpr, FLAGS: tl.constexpr, PER_SEQUENCE: tl.constexpr,
):  # fmt: skip
    """FLAGS marks of keys or rows. SIZE: keys or rows of a mark."""
    first = tl.program_id(0) * FLAGS
    numbers = first + tl.arange(0, FLAGS)
    total = key_flags + row_flags
    marks = tl.load(suspect_ptr + numbers, mask=numbers < total, other=0)
    if tl.max(marks, 0) > 0:
        for number in range(first, tl.minimum(first + FLAGS, total)):
            if tl.max(tl.where(numbers == number, marks, 0), 0) > 0:
                if number < key_flags:
                    _store_guarded_keys(
                        number, q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, cu_seqlens_q, cu_seqlens_k,
                        slopes_ptr, PER_SEQUENCE,
                        q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, scale, band, batch, heads,
                        key_tiles, len_q, len_k, line_length, GROUP, DIM, DIM_V, BLOCK_D, BLOCK_DV, SIZE,
                        bias_ptr, mask_ptr, bias_strides, mask_strides, cap,
                    )  # fmt: skip
                else:
                    _store_guarded_rows(
                        number - key_flags, q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, cu_seqlens_q,
                        cu_seqlens_k, slopes_ptr, bias_ptr, mask_ptr, bias_strides, mask_strides, cap, q_strides, k_strides,
                        v_strides, do_strides, dq_strides, scale, band, batch, heads, row_tiles, len_q, len_k,
                        line_length, GROUP, DIM, DIM_V, BLOCK_D, BLOCK_DV, SIZE, PER_SEQUENCE,
                    )  # fmt: skip


@triton.jit
def _store_guarded_rows(
    number, q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, cu_seqlens_q, cu_seqlens_k, slopes_ptr, bias_ptr,
    mask_ptr, bias_strides, mask_strides, cap, q_strides, k_strides, v_strides, do_strides, dq_strides, scale, band, batch,
    heads, row_tiles, len_q, len_k, line_length,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SIZE: tl.constexpr, PER_SEQUENCE: tl.constexpr,
):  # fmt: skip
    """dQ of the rows of one mark, with `guarded_dot`."""
    pid = number - number % row_tiles + (row_tiles - 1 - number % row_tiles)
    row, head, b, begin_q, own_q, begin_k, own_k = locate(
        pid, cu_seqlens_q, cu_seqlens_k, batch, heads, row_tiles, len_q, len_k, SIZE
    )
    b = tl.cast(b, tl.int32)
    own = (b.to(tl.int64) * heads + head) * line_length + _place(pid, begin_q, cu_seqlens_q, batch, row_tiles, SIZE)
    if slopes_ptr is not None:
        slopes = slopes_base(slopes_ptr, pid, cu_seqlens_q, batch, heads, row_tiles, heads, SIZE, PER_SEQUENCE)
    _store_guarded_dq(
        head_base(q_ptr, q_strides, b, begin_q, head), head_base(k_ptr, k_strides, b, begin_k, head // GROUP),
        head_base(v_ptr, v_strides, b, begin_k, head // GROUP), head_base(do_ptr, do_strides, b, begin_q, head),
        head_base(dq_ptr, dq_strides, b, begin_q, head), lse_ptr + own, delta_ptr + own, q_strides[1], k_strides[1],
        v_strides[1], do_strides[1], dq_strides[1], row, tl.minimum(row + SIZE, own_q) - 1, own_q, own_k, own_k - own_q, band,
        scale, cap, None if slopes_ptr is None else tl.load(slopes + head) * LOG2E,
        None if bias_ptr is None else pair_base(bias_ptr, bias_strides, b, head), bias_strides,
        None if mask_ptr is None else pair_base(mask_ptr, mask_strides, b, head), mask_strides, None, None, DIM, DIM_V,
        BLOCK_D, BLOCK_DV,
    )  # fmt: skip
