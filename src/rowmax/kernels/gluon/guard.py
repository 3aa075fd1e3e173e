"""Tiles of rows of which one is suspect in `forward.py`, computed once more as the portable kernel does: normally none.

Launched behind every forward. A program looks at a few flags together, normally all 0, and ends; it leaves them all 0. What is
suspect because a weight exceeded fp32 costs the time of a portable forward of these tiles; a NaN or an infinity of V that not
every row sees, the slow way by which that kernel keeps it from the others.
"""

import triton
import triton.language as tl

from rowmax.kernels.address import locate
from rowmax.kernels.triton.forward import attend_tile


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
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRESCALE: tl.constexpr, STAGES: tl.constexpr, FLAGS: tl.constexpr,
    EARLY: tl.constexpr, PER_SEQUENCE: tl.constexpr,
):  # fmt: skip
    """`cap`: as `tile_ops.bend` takes it. `FLAGS`: looked at together. `EARLY`: it may start before the forward has ended, and
    has to wait for it."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    programs = tl.num_programs(0)
    turns = tl.arange(0, FLAGS)
    # Row tiles of a head follow one another, long ones behind short ones with a causal mask: every second turn is backwards.
    own = turns * programs + tl.where(turns % 2 == 0, tl.program_id(0), programs - 1 - tl.program_id(0))
    for first in range(0, total, programs * FLAGS):
        numbers = first + own
        flags = tl.load(suspect_ptr + numbers, mask=numbers < total, other=0)
        if tl.max(flags, 0) != 0:
            tl.debug_barrier()  # every warp has read them
            tl.store(suspect_ptr + numbers, 0, mask=numbers < total)
            for turn in range(FLAGS):
                number = tl.max(tl.where((turns == turn) & (flags != 0), numbers, -1), 0)
                if number >= 0:
                    pid = number - number % tiles + (tiles - 1 - number % tiles)
                    place = locate(pid, cu_seqlens_q, cu_seqlens_k, batch, heads, tiles, len_q, len_k, ROWS)
                    if place[0] < place[4]:
                        attend_tile(
                            pid, place, q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, cu_seqlens_q, cu_seqlens_k, slopes_ptr, sink_ptr,
                            bias_ptr, mask_ptr, seed_ptr, None, q_strides, k_strides, v_strides, o_strides, bias_strides,
                            mask_strides, odds, scale_log2, cap, band, batch, heads, tiles, len_q, len_k,
                            GROUP, DIM, DIM_V, ROWS, BLOCK_N, BLOCK_D, BLOCK_DV, PRESCALE, STAGES, False, PER_SEQUENCE, None, 0,
                        )  # fmt: skip
