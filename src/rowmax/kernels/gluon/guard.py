"""Tiles of 64 rows of which one is suspect in `forward.py`, computed once more as the portable kernel does: normally none.

Launched behind every forward. A program looks at a few flags together, normally all 0, and ends; it leaves them all 0.
"""

import triton
import triton.language as tl

from rowmax.kernels.address import head_base, locate, slopes_base
from rowmax.kernels.triton.dropout import dropping
from rowmax.kernels.triton.forward import LOG2E, _store_guarded
from rowmax.kernels.triton.given import pair_base


@triton.jit
def guard_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr,  # [B, T, H, D] or [T, H, D]
    lse_ptr,  # fp32 [B, H, len_q] or [H, len_q]; None: not wanted
    suspect_ptr,  # int32 [total], 0 or 1; 0 afterwards
    cu_seqlens_q, cu_seqlens_k,  # [batch + 1]; None: dense
    slopes_ptr, sink_ptr,  # fp32 [H] or [B, H]; [H]; None: no ALiBi, no sink
    bias_ptr, mask_ptr,  # [B, H, len_q, len_k]; None: none
    seed_ptr,  # int64 [1]; None: no dropout
    q_strides, k_strides, v_strides, o_strides,  # (batch, row, head)
    bias_strides, mask_strides,  # (batch, head, query, key)
    odds,  # of dropout: (p 2^15, 1 / (1 - p))
    scale_log2, cap, band, batch, heads, tiles, total, len_q, len_k,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, FLAGS: tl.constexpr, EARLY: tl.constexpr, PER_SEQUENCE: tl.constexpr,
):  # fmt: skip
    """`cap`: as `tile_ops.bend` takes it. `EARLY`: it may start before the forward has ended, and has to wait for it."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    numbers = tl.program_id(0) * FLAGS + tl.arange(0, FLAGS)
    flags = tl.load(suspect_ptr + numbers, mask=numbers < total, other=0)
    if tl.max(flags, 0) == 0:
        return
    tl.debug_barrier()  # every warp has read them
    tl.store(suspect_ptr + numbers, 0, mask=numbers < total)
    first = tl.program_id(0) * FLAGS
    for number in range(first, tl.minimum(first + FLAGS, total)):
        if tl.max(tl.where(numbers == number, flags, 0), 0) > 0:
            pid = number - number % tiles + (tiles - 1 - number % tiles)
            row, head, b, begin_q, own_q, begin_k, own_k = locate(
                pid, cu_seqlens_q, cu_seqlens_k, batch, heads, tiles, len_q, len_k, ROWS
            )
            if row < own_q:
                if slopes_ptr is not None:
                    slopes = slopes_base(slopes_ptr, pid, cu_seqlens_q, batch, heads, tiles, heads, ROWS, PER_SEQUENCE)
                b = tl.cast(b, tl.int32)
                line = (b.to(tl.int64) * heads + head) * len_q + begin_q
                _store_guarded(
                    head_base(q_ptr, q_strides, b, begin_q, head), head_base(k_ptr, k_strides, b, begin_k, head // GROUP),
                    head_base(v_ptr, v_strides, b, begin_k, head // GROUP), head_base(o_ptr, o_strides, b, begin_q, head),
                    None if lse_ptr is None else lse_ptr + line, q_strides[1], k_strides[1], v_strides[1], o_strides[1],
                    row, tl.minimum(row + ROWS, own_q) - 1, own_q, own_k, own_k - own_q, band, scale_log2,
                    cap, None if slopes_ptr is None else tl.load(slopes + head) * LOG2E,
                    None if sink_ptr is None else tl.load(sink_ptr + head) * LOG2E,
                    None if bias_ptr is None else pair_base(bias_ptr, bias_strides, b, head), bias_strides,
                    None if mask_ptr is None else pair_base(mask_ptr, mask_strides, b, head), mask_strides,
                    None if seed_ptr is None else dropping(
                        seed_ptr, odds, pid, cu_seqlens_q, batch, heads, tiles, ROWS
                    ), head, DIM, DIM_V, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
