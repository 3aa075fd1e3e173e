"""FlashAttention-2 forward: Q tile outside, K/V tiles inside, one program a (Q tile, head, sequence).

    m = rowmax(S),  l = rowsum(exp(S - m)),  O = exp(S - m) V / l,  LSE = m + log l

m and l are kept for the running prefix of keys (online softmax), O is divided by l once at the end, and one number a row,
the LSE, is all that the backward needs. S may be bent first (`tile_ops.bend`: soft-cap, ALiBi), and a sink logit be added to l;
what a problem has not is None here, and costs nothing. Launched by `kernels/launch.py`.
Source: Dao, "FlashAttention-2" (2023), algorithm 1.
"""

import triton
import triton.language as tl

from rowmax.kernels.address import head_base, load_tile, locate, sequence_of, slopes_base, source, store_tile
from rowmax.kernels.tile_ops import (
    GUARD,
    add_sink,
    any_of,
    bend,
    finish,
    guarded_dot,
    key_ranges,
    online_step,
    tile_start,
    tiles_of,
    visible,
)
from rowmax.kernels.triton.dropout import dropping, kept
from rowmax.kernels.triton.given import give, pair_base

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _walk(
    acc, m, l, q, k_source, v_source, k_stride, v_stride, ranges, row, len_q, len_k, shift, band, scale_log2, cap,
    slope_log2, bias, bias_strides, mask, mask_strides, drop, head,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRESCALE: tl.constexpr, MASKED: tl.constexpr, GUARDED: tl.constexpr, STAGES: tl.constexpr,
    mod=None,
):  # fmt: skip
    """The one loop body: over the key tiles that need the element mask, or over the others."""
    GIVEN: tl.constexpr = bias is not None or mask is not None
    for turn in tl.range(0, tiles_of(ranges, BLOCK_N, MASKED), num_stages=STAGES):
        col = tile_start(turn, ranges, BLOCK_N, MASKED)
        k = load_tile(k_source, col, k_stride, len_k, DIM, BLOCK_N, BLOCK_D, MASKED)  # [BLOCK_N, BLOCK_D]
        s = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if cap is not None or slope_log2 is not None or mod is not None:
            rows = row + tl.arange(0, BLOCK_M)
            cols = col + tl.arange(0, BLOCK_N)
            s, _ = bend(s, rows[:, None], cols[None, :], shift, scale_log2, cap, slope_log2, mod, head)
        elif PRESCALE:
            s = s * scale_log2
        if GIVEN:
            rows = row + tl.arange(0, BLOCK_M)
            cols = col + tl.arange(0, BLOCK_N)
            s, shown = give(s, rows[:, None], cols[None, :], len_q, len_k, bias, bias_strides, mask, mask_strides)
        if MASKED:
            rows = row + tl.arange(0, BLOCK_M)
            cols = col + tl.arange(0, BLOCK_N)
            seen = visible(rows[:, None], cols[None, :], len_k, shift, band)
            if GIVEN:
                seen = seen & shown
            s = tl.where(seen, s, float("-inf"))
        p, m, l, alpha = online_step(s, m, l, 1.0 if PRESCALE else scale_log2)
        acc = acc * alpha[:, None]
        if drop is not None:
            p = tl.where(kept(drop, head, row, col, BLOCK_M, BLOCK_N, False), p, 0.0)
        v = load_tile(v_source, col, v_stride, len_k, DIM_V, BLOCK_N, BLOCK_DV, MASKED)  # [BLOCK_N, BLOCK_DV]
        if GUARDED:
            acc = guarded_dot(p, v, seen, acc)
        else:
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, m, l


@triton.jit
def _store_guarded(
    q_base, k_base, v_base, o_base, lse_base, q_stride, k_stride, v_stride, o_stride, row, last, len_q, len_k, shift, band,
    scale_log2, cap, slope_log2, sink_log2, bias, bias_strides, mask, mask_strides,
    drop, head,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, mod=None,
):  # fmt: skip
    """Rows `[row, last]` once more, with `guarded_dot` and scaled scores, in pieces too small to cost the kernel registers."""
    zero = len_k * 0
    for piece in range(row, last + 1, GUARD):
        q = load_tile(q_base, piece, q_stride, len_q, DIM, GUARD, BLOCK_D, True)
        m = tl.full([GUARD], float("-inf"), tl.float32)
        l = tl.zeros([GUARD], tl.float32)
        acc = tl.zeros([GUARD, BLOCK_DV], tl.float32)
        acc, m, l = _walk(
            acc, m, l, q, k_base, v_base, k_stride, v_stride, (zero, zero, zero, len_k), piece, len_q, len_k, shift, band,
            scale_log2, cap, slope_log2, bias, bias_strides, mask, mask_strides, drop, head, DIM, DIM_V,
            GUARD, GUARD, BLOCK_D, BLOCK_DV, True, True, True, 1, mod,
        )  # fmt: skip
        if sink_log2 is not None:
            acc, m, l = add_sink(acc, m, l, sink_log2)
        o, lse = finish(acc, m, l, 1.0)
        if drop is not None:
            o = o * drop[3]
        store_tile(o_base, o, piece, o_stride, len_q, DIM_V, GUARD, BLOCK_DV)
        if lse_base is not None:
            rows = piece + tl.arange(0, GUARD)
            tl.store(lse_base + rows, lse, mask=rows < len_q)


@triton.jit
def attend_tile(
    pid, place, q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, cu_seqlens_q, cu_seqlens_k, slopes_ptr, sink_ptr, bias_ptr, mask_ptr,
    seed_ptr, numbers_ptr, q_strides, k_strides, v_strides, o_strides, bias_strides, mask_strides, odds,
    scale_log2, cap, band, batch, heads, tiles, len_q, len_k,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRESCALE: tl.constexpr, STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PER_SEQUENCE: tl.constexpr, FUNCTION: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """The rows of one program, `place` of `locate` for `pid`, from loads to stores; arguments as for `forward_kernel`."""
    total_q = len_q
    total_k = len_k
    row, head, b, begin_q, len_q, begin_k, len_k = place
    shift = len_k - len_q
    b = tl.cast(b, tl.int32)
    k_base = head_base(k_ptr, k_strides, b, begin_k, head // GROUP)
    v_base = head_base(v_ptr, v_strides, b, begin_k, head // GROUP)
    q_base = head_base(q_ptr, q_strides, b, begin_q, head)
    q = load_tile(q_base, row, q_strides[1], len_q, DIM, BLOCK_M, BLOCK_D, True)
    k_source = source(k_base, k_strides[1], len_k, DIM, BLOCK_N, BLOCK_D, DESCRIPTORS)
    v_source = source(v_base, v_strides[1], len_k, DIM_V, BLOCK_N, BLOCK_DV, DESCRIPTORS)

    if slopes_ptr is None:
        slope_log2 = None
    else:
        slopes = slopes_base(slopes_ptr, pid, cu_seqlens_q, batch, heads, tiles, heads, BLOCK_M, PER_SEQUENCE)
        slope_log2 = tl.load(slopes + head) * LOG2E
    bias = None if bias_ptr is None else pair_base(bias_ptr, bias_strides, b, head)
    mask = None if mask_ptr is None else pair_base(mask_ptr, mask_strides, b, head)
    if seed_ptr is None:
        drop = None
    else:
        drop = dropping(seed_ptr, odds, pid, cu_seqlens_q, batch, heads, tiles, BLOCK_M)
    sequence = 0 if FUNCTION is None else sequence_of(pid, cu_seqlens_q, batch, heads, tiles, BLOCK_M)

    last = tl.minimum(row + BLOCK_M, len_q) - 1
    ranges = key_ranges(row, last, len_k, shift, band, BLOCK_N)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    acc, m, l = _walk(
        acc, m, l, q, k_source, v_source, k_strides[1], v_strides[1], ranges, row, len_q, len_k, shift, band,
        scale_log2, cap, slope_log2, bias, bias_strides, mask, mask_strides, drop, head, DIM, DIM_V,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRESCALE, False, False, STAGES,
        None if FUNCTION is None else (FUNCTION, FUNCTION, NUMBERS, numbers_ptr, heads, sequence),
    )  # fmt: skip
    acc, m, l = _walk(
        acc, m, l, q, k_source, v_source, k_strides[1], v_strides[1], ranges, row, len_q, len_k, shift, band,
        scale_log2, cap, slope_log2, bias, bias_strides, mask, mask_strides, drop, head, DIM, DIM_V,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRESCALE, True, False, STAGES,
        None if FUNCTION is None else (FUNCTION, FUNCTION, NUMBERS, numbers_ptr, heads, sequence),
    )  # fmt: skip
    bad = any_of(acc != acc)
    if not PRESCALE:  # beyond 2^24 a maximum differs from its own rounded product with the scale by more than 1
        bad |= any_of((tl.abs(m * scale_log2) > 16777216.0) & (m > float("-inf")))
    if sink_ptr is None:
        o, lse = finish(acc, m, l, 1.0 if PRESCALE else scale_log2)
    else:
        acc, m, l = add_sink(acc, m if PRESCALE else m * scale_log2, l, tl.load(sink_ptr + head) * LOG2E)
        o, lse = finish(acc, m, l, 1.0)
    if drop is not None:
        o = o * drop[3]
    # Where everything lies once more, from a program id that depends on the loops (bad is at most 1): kept, it would spill.
    row, head, b, begin_q, len_q, begin_k, len_k = locate(
        pid + (bad >> 8), cu_seqlens_q, cu_seqlens_k, batch, heads, tiles, total_q, total_k, BLOCK_M
    )
    b = tl.cast(b, tl.int32)
    o_base = head_base(o_ptr, o_strides, b, begin_q, head)
    store_tile(o_base, o, row, o_strides[1], len_q, DIM_V, BLOCK_M, BLOCK_DV)
    if lse_ptr is None:
        lse_base = None
    else:
        rows = row + tl.arange(0, BLOCK_M)
        lse_base = lse_ptr + (b.to(tl.int64) * heads + head) * total_q + begin_q
        tl.store(lse_base + rows, lse, mask=rows < len_q)
    if bad > 0:  # perhaps a NaN or infinity of V that not every row sees
        tl.debug_barrier()
        if slopes_ptr is not None:
            slopes = slopes_base(slopes_ptr, pid + (bad >> 8), cu_seqlens_q, batch, heads, tiles, heads, BLOCK_M, PER_SEQUENCE)
        once_more = 0 if FUNCTION is None else sequence_of(pid + (bad >> 8), cu_seqlens_q, batch, heads, tiles, BLOCK_M)
        _store_guarded(
            head_base(q_ptr, q_strides, b, begin_q, head), head_base(k_ptr, k_strides, b, begin_k, head // GROUP),
            head_base(v_ptr, v_strides, b, begin_k, head // GROUP), o_base, lse_base, q_strides[1], k_strides[1], v_strides[1],
            o_strides[1], row, tl.minimum(row + BLOCK_M, len_q) - 1, len_q, len_k, len_k - len_q, band, scale_log2,
            cap, None if slopes_ptr is None else tl.load(slopes + head) * LOG2E,
            None if sink_ptr is None else tl.load(sink_ptr + head) * LOG2E,
            None if bias_ptr is None else pair_base(bias_ptr, bias_strides, b, head), bias_strides,
            None if mask_ptr is None else pair_base(mask_ptr, mask_strides, b, head), mask_strides,
            None if seed_ptr is None else dropping(
                seed_ptr, odds, pid + (bad >> 8), cu_seqlens_q, batch, heads, tiles, BLOCK_M
            ), head, DIM, DIM_V, BLOCK_D, BLOCK_DV,
            None if FUNCTION is None else (FUNCTION, FUNCTION, NUMBERS, numbers_ptr, heads, once_more),
        )  # fmt: skip


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr,  # [B, T, H, D] or [T, H, D]
    o_ptr,  # as q, with DIM_V
    lse_ptr,  # fp32 [B, H, len_q] or [H, len_q]; None: not wanted
    cu_seqlens_q, cu_seqlens_k,  # [batch + 1]; None: dense
    slopes_ptr, sink_ptr,  # fp32 [H] or [B, H]; [H]; None: no ALiBi, no sink
    bias_ptr, mask_ptr,  # [B, H, len_q, len_k]; None: none
    seed_ptr,  # int64 [1]; None: no dropout
    numbers_ptr,  # fp32 [NUMBERS, H], of FUNCTION; None: none
    q_strides, k_strides, v_strides, o_strides,  # (batch, row, head)
    bias_strides, mask_strides,  # (batch, head, query, key)
    odds,  # of dropout: (p 2^15, 1 / (1 - p))
    scale_log2, cap, band, batch, heads, tiles, len_q, len_k,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRESCALE: tl.constexpr, STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PER_SEQUENCE: tl.constexpr, FUNCTION: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """`PRESCALE`: scores are scaled before the maximum is taken, as a scale <= 0, a cap and a bias require; otherwise inside
    the exponential. `PER_SEQUENCE`: slopes are [B, H]. `FUNCTION`: of scores, by the caller, or None."""
    pid = tl.program_id(0)
    place = locate(pid, cu_seqlens_q, cu_seqlens_k, batch, heads, tiles, len_q, len_k, BLOCK_M)
    if place[0] >= place[4]:
        return
    attend_tile(
        pid, place, q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, cu_seqlens_q, cu_seqlens_k, slopes_ptr, sink_ptr, bias_ptr, mask_ptr,
        seed_ptr, numbers_ptr, q_strides, k_strides, v_strides, o_strides, bias_strides, mask_strides, odds,
        scale_log2, cap, band, batch, heads, tiles, len_q, len_k, GROUP, DIM, DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        PRESCALE, STAGES, DESCRIPTORS, PER_SEQUENCE, FUNCTION, NUMBERS,
    )  # fmt: skip
