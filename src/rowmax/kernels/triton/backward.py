"""FlashAttention-2 backward: recompute P from q, k and the LSE; nothing of size N x N was saved.

    delta = rowsum(dO O) - dLSE
    P = exp(scale S - LSE),  dP = dO V^T,  dS = P (dP - delta)
    dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K

Three kernels: `row_kernel` (delta, and the LSE in base 2), `query_kernel` (dQ: a program owns a Q tile and walks over keys) and
`key_kernel` (dK and dV: a program owns a K/V tile of one KV head and walks over the queries of every head in its group). S and
dP are computed twice, but no accumulator leaves the chip: no atomics, no fp32 dQ in memory, and the sums are in a fixed order,
so that repeats are bitwise equal. Launched by `kernels/launch.py`.
Source: Dao, "FlashAttention-2" (2023), algorithm 2; the LSE's gradient enters through delta.
"""

import triton
import triton.language as tl

from rowmax.kernels.address import (
    group_source,
    head_base,
    load_member,
    load_tile,
    locate,
    sequence_of,
    slopes_base,
    source,
    store_tile,
)
from rowmax.kernels.tile_ops import (
    GUARD,
    any_of,
    bend,
    guarded_dot,
    key_ranges,
    query_ranges,
    score_gradient,
    tile_start,
    tiles_of,
    visible,
)
from rowmax.kernels.triton.dropout import dropping, kept
from rowmax.kernels.triton.given import give, pair_base

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def row_kernel(
    o_ptr, do_ptr,  # [B, T, H, D] or [T, H, D]; do_ptr None: only the LSE has a gradient
    lse_ptr, dlse_ptr,  # fp32 [B, H, T] or [H, T], contiguous; dlse_ptr None: no gradient
    lse_log2_ptr, delta_ptr,  # results, as lse
    o_strides, do_strides, heads, tiles, len_q,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What the other kernels need to know of a row."""
    pid = tl.program_id(0)
    row = pid % tiles * BLOCK_M
    head = pid // tiles % heads
    b = pid // (tiles * heads)
    delta = tl.zeros([BLOCK_M], tl.float32)
    if do_ptr is not None:
        o = load_tile(head_base(o_ptr, o_strides, b, 0, head), row, o_strides[1], len_q, DIM, BLOCK_M, BLOCK_D, True)
        do = load_tile(head_base(do_ptr, do_strides, b, 0, head), row, do_strides[1], len_q, DIM, BLOCK_M, BLOCK_D, True)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    rows = row + tl.arange(0, BLOCK_M)
    base = (b.to(tl.int64) * heads + head) * len_q
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + base + rows, mask=rows < len_q, other=0.0)
    tl.store(delta_ptr + base + rows, delta, mask=rows < len_q)
    lse_log2 = tl.load(lse_ptr + base + rows, mask=rows < len_q, other=0.0) * LOG2E
    lse_log2 = tl.where(lse_log2 == float("-inf"), float("inf"), lse_log2)  # a row that sees nothing has no weights
    # Where a unit in the last place is 1/8 and more, rounding could lift a weight over 1, up to infinity: round up instead.
    lse_log2 = tl.where(tl.abs(lse_log2) > 1048576.0, lse_log2 + tl.abs(lse_log2) * 4.76837158203125e-07, lse_log2)
    tl.store(lse_log2_ptr + base + rows, lse_log2, mask=rows < len_q)


@triton.jit
def _walk_keys(
    dq, q, do, lse_log2, delta, k_source, v_source, k_stride, v_stride, ranges, row, len_q, len_k, shift, band, scale_log2,
    cap, slope_log2, bias, bias_strides, mask, mask_strides, drop, head,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, GUARDED: tl.constexpr, STAGES: tl.constexpr, mod=None,
):  # fmt: skip
    """dQ / scale of one Q tile, over the key tiles that need the element mask, or over the others."""
    GIVEN: tl.constexpr = bias is not None or mask is not None
    for turn in tl.range(0, tiles_of(ranges, BLOCK_N, MASKED), num_stages=STAGES):
        col = tile_start(turn, ranges, BLOCK_N, MASKED)
        k = load_tile(k_source, col, k_stride, len_k, DIM, BLOCK_N, BLOCK_D, MASKED)  # [BLOCK_N, BLOCK_D]
        v = load_tile(v_source, col, v_stride, len_k, DIM_V, BLOCK_N, BLOCK_DV, MASKED)  # [BLOCK_N, BLOCK_DV]
        s = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if cap is not None or slope_log2 is not None or mod is not None or GIVEN:
            rows = row + tl.arange(0, BLOCK_M)
            cols = col + tl.arange(0, BLOCK_N)
            x, gain = bend(s, rows[:, None], cols[None, :], shift, scale_log2, cap, slope_log2, mod, head)
            if GIVEN:
                x, shown = give(x, rows[:, None], cols[None, :], len_q, len_k, bias, bias_strides, mask, mask_strides)
            p = tl.exp2(x - lse_log2[:, None])
        else:
            p = tl.exp2(s * scale_log2 - lse_log2[:, None])
        dp = tl.dot(do, v.T, input_precision="ieee")
        if drop is not None:
            dp = tl.where(kept(drop, head, row, col, BLOCK_M, BLOCK_N, False), dp * drop[3], 0.0)
        ds = score_gradient(p, dp, delta[:, None])
        if cap is not None or mod is not None:
            ds = ds * gain
        if MASKED:
            rows = row + tl.arange(0, BLOCK_M)
            cols = col + tl.arange(0, BLOCK_N)
            seen = visible(rows[:, None], cols[None, :], len_k, shift, band)
            if GIVEN:
                seen = seen & shown
            ds = tl.where(seen, ds, 0.0)
        elif GIVEN:
            ds = tl.where(shown, ds, 0.0)
        if GUARDED:
            dq = guarded_dot(ds, k, seen, dq)
        else:
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def _store_guarded_dq(
    q_base, k_base, v_base, do_base, dq_base, lse_base, delta_base, q_stride, k_stride, v_stride, do_stride, dq_stride, row,
    last, len_q, len_k, shift, band, scale, cap, slope_log2, bias, bias_strides, mask, mask_strides,
    drop, head,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, mod=None,
):  # fmt: skip
    """Rows `[row, last]` of dQ once more, with `guarded_dot`; see `_store_guarded` of the forward."""
    zero = len_k * 0
    for piece in range(row, last + 1, GUARD):
        rows = piece + tl.arange(0, GUARD)
        q = load_tile(q_base, piece, q_stride, len_q, DIM, GUARD, BLOCK_D, True)
        if do_base is None:
            do = tl.zeros([GUARD, BLOCK_DV], q.dtype)
        else:
            do = load_tile(do_base, piece, do_stride, len_q, DIM_V, GUARD, BLOCK_DV, True)
        lse_log2 = tl.load(lse_base + rows, mask=rows < len_q, other=float("inf"))
        delta = tl.load(delta_base + rows, mask=rows < len_q, other=0.0)
        dq = tl.zeros([GUARD, BLOCK_D], tl.float32)
        dq = _walk_keys(
            dq, q, do, lse_log2, delta, k_base, v_base, k_stride, v_stride, (zero, zero, zero, len_k), piece, len_q, len_k,
            shift, band, scale * LOG2E, cap, slope_log2, bias, bias_strides, mask, mask_strides, drop, head, DIM, DIM_V,
            GUARD, GUARD, BLOCK_D, BLOCK_DV, True, True, 1, mod,
        )  # fmt: skip
        store_tile(dq_base, dq * scale, piece, dq_stride, len_q, DIM, GUARD, BLOCK_D)


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr,  # [B, T, H, D] or [T, H, D]; do_ptr None: only the LSE has a gradient
    dq_ptr, lse_ptr, delta_ptr,  # dq as q; of `row_kernel`, the LSE in base 2
    cu_seqlens_q, cu_seqlens_k,  # [batch + 1]; None: dense
    slopes_ptr,  # fp32 [H] or [B, H]; None: no ALiBi
    bias_ptr, mask_ptr,  # [B, H, len_q, len_k]; None: none
    seed_ptr,  # int64 [1]; None: no dropout
    numbers_ptr,  # fp32 [NUMBERS, H], of FUNCTION; None: none
    q_strides, k_strides, v_strides, do_strides, dq_strides,  # (batch, row, head)
    bias_strides, mask_strides,  # (batch, head, query, key)
    odds,  # of dropout: (p 2^15, 1 / (1 - p))
    scale, cap, band, batch, heads, tiles, len_q, len_k,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, STAGES: tl.constexpr, DESCRIPTORS: tl.constexpr,
    PER_SEQUENCE: tl.constexpr, FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """dQ."""
    total_q = len_q
    total_k = len_k
    row, head, b, begin_q, len_q, begin_k, len_k = locate(
        tl.program_id(0), cu_seqlens_q, cu_seqlens_k, batch, heads, tiles, len_q, len_k, BLOCK_M
    )
    if row >= len_q:
        return
    shift = len_k - len_q
    b = tl.cast(b, tl.int32)
    scale_log2 = scale * LOG2E
    k_base = head_base(k_ptr, k_strides, b, begin_k, head // GROUP)
    v_base = head_base(v_ptr, v_strides, b, begin_k, head // GROUP)
    q_base = head_base(q_ptr, q_strides, b, begin_q, head)
    q = load_tile(q_base, row, q_strides[1], len_q, DIM, BLOCK_M, BLOCK_D, True)
    if do_ptr is None:
        do = tl.zeros([BLOCK_M, BLOCK_DV], q.dtype)
    else:
        do_base = head_base(do_ptr, do_strides, b, begin_q, head)
        do = load_tile(do_base, row, do_strides[1], len_q, DIM_V, BLOCK_M, BLOCK_DV, True)
    rows = row + tl.arange(0, BLOCK_M)
    base = (b.to(tl.int64) * heads + head) * total_q + begin_q
    lse_log2 = tl.load(lse_ptr + base + rows, mask=rows < len_q, other=float("inf"))
    delta = tl.load(delta_ptr + base + rows, mask=rows < len_q, other=0.0)
    k_source = source(k_base, k_strides[1], len_k, DIM, BLOCK_N, BLOCK_D, DESCRIPTORS)
    v_source = source(v_base, v_strides[1], len_k, DIM_V, BLOCK_N, BLOCK_DV, DESCRIPTORS)

    if slopes_ptr is None:
        slope_log2 = None
    else:
        slopes = slopes_base(slopes_ptr, tl.program_id(0), cu_seqlens_q, batch, heads, tiles, heads, BLOCK_M, PER_SEQUENCE)
        slope_log2 = tl.load(slopes + head) * LOG2E
    bias = None if bias_ptr is None else pair_base(bias_ptr, bias_strides, b, head)
    mask = None if mask_ptr is None else pair_base(mask_ptr, mask_strides, b, head)
    if seed_ptr is None:
        drop = None
    else:
        drop = dropping(seed_ptr, odds, tl.program_id(0), cu_seqlens_q, batch, heads, tiles, BLOCK_M)
    sequence = 0 if FUNCTION is None else sequence_of(tl.program_id(0), cu_seqlens_q, batch, heads, tiles, BLOCK_M)

    last = tl.minimum(row + BLOCK_M, len_q) - 1
    ranges = key_ranges(row, last, len_k, shift, band, BLOCK_N)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq = _walk_keys(
        dq, q, do, lse_log2, delta, k_source, v_source, k_strides[1], v_strides[1], ranges, row, len_q, len_k, shift, band,
        scale_log2, cap, slope_log2, bias, bias_strides, mask, mask_strides, drop, head, DIM, DIM_V,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, False, False, STAGES,
        None if FUNCTION is None else (FUNCTION, DERIVATIVE, NUMBERS, numbers_ptr, heads, sequence),
    )  # fmt: skip
    dq = _walk_keys(
        dq, q, do, lse_log2, delta, k_source, v_source, k_strides[1], v_strides[1], ranges, row, len_q, len_k, shift, band,
        scale_log2, cap, slope_log2, bias, bias_strides, mask, mask_strides, drop, head, DIM, DIM_V,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, True, False, STAGES,
        None if FUNCTION is None else (FUNCTION, DERIVATIVE, NUMBERS, numbers_ptr, heads, sequence),
    )  # fmt: skip
    bad = any_of(dq != dq)
    # Where everything lies once more, from a program id that depends on the loops (bad is at most 1): kept, it would spill.
    row, head, b, begin_q, len_q, begin_k, len_k = locate(
        tl.program_id(0) + (bad >> 8), cu_seqlens_q, cu_seqlens_k, batch, heads, tiles, total_q, total_k, BLOCK_M
    )
    b = tl.cast(b, tl.int32)
    dq_base = head_base(dq_ptr, dq_strides, b, begin_q, head)
    store_tile(dq_base, dq * scale, row, dq_strides[1], len_q, DIM, BLOCK_M, BLOCK_D)
    if bad > 0:  # perhaps a NaN or infinity of K that not every row sees
        tl.debug_barrier()
        if slopes_ptr is not None:
            pid = tl.program_id(0) + (bad >> 8)
            slopes = slopes_base(slopes_ptr, pid, cu_seqlens_q, batch, heads, tiles, heads, BLOCK_M, PER_SEQUENCE)
        once_more = (
            0 if FUNCTION is None else sequence_of(tl.program_id(0) + (bad >> 8), cu_seqlens_q, batch, heads, tiles, BLOCK_M)
        )
        base = (b.to(tl.int64) * heads + head) * total_q + begin_q
        _store_guarded_dq(
            head_base(q_ptr, q_strides, b, begin_q, head), head_base(k_ptr, k_strides, b, begin_k, head // GROUP),
            head_base(v_ptr, v_strides, b, begin_k, head // GROUP),
            None if do_ptr is None else head_base(do_ptr, do_strides, b, begin_q, head), dq_base, lse_ptr + base,
            delta_ptr + base, q_strides[1], k_strides[1], v_strides[1], do_strides[1], dq_strides[1], row,
            tl.minimum(row + BLOCK_M, len_q) - 1, len_q, len_k, len_k - len_q, band, scale, cap,
            None if slopes_ptr is None else tl.load(slopes + head) * LOG2E,
            None if bias_ptr is None else pair_base(bias_ptr, bias_strides, b, head), bias_strides,
            None if mask_ptr is None else pair_base(mask_ptr, mask_strides, b, head), mask_strides,
            None if seed_ptr is None else dropping(
                seed_ptr, odds, tl.program_id(0) + (bad >> 8), cu_seqlens_q, batch, heads, tiles, BLOCK_M
            ), head, DIM, DIM_V, BLOCK_D, BLOCK_DV,
            None if FUNCTION is None else (FUNCTION, DERIVATIVE, NUMBERS, numbers_ptr, heads, once_more),
        )  # fmt: skip


@triton.jit
def _walk_queries(
    dk, dv, k, v, q_source, do_source, lse_base, delta_base, q_strides, do_strides, ranges, col, total_q, len_q, len_k, shift,
    band, scale_log2, cap, slopes, bias, bias_strides, mask, mask_strides, drop, first_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, MASKED: tl.constexpr,
    GUARDED: tl.constexpr, STAGES: tl.constexpr, mod=None,
):  # fmt: skip
    """`(dK / scale, dV, 0)` of one K/V tile over the masked or the other query tiles of every head in the group, in one loop.

    The 0 is the sign of a row: compilers do not know it, so that what is computed from it cannot be moved before the loop.
    Scores are transposed, [BLOCK_N, BLOCK_M], so that P and dS are at once the left operands of dV and dK.
    """
    GIVEN: tl.constexpr = bias is not None or mask is not None
    tiles = tiles_of(ranges, BLOCK_M, MASKED)
    zero = tiles * 0
    for turn in tl.range(0, GROUP * tiles, num_stages=STAGES):
        # For a group of one a zero that the compiler does not see through: with a plain 0 ptxas spills, a division costs time.
        member = turn // tiles if GROUP > 1 else tl.cast(col < 0, tl.int32)
        row = tile_start(turn - member * tiles, ranges, BLOCK_M, MASKED)
        if scale_log2 == float("inf"):  # never: a use of dk here makes Triton wait for last turn's product inside the turn.
            if WANT_DK:  # Without it the product stays in flight over the back edge, and ptxas serialises every wgmma (C7515).
                dk = dk * 2.0
            else:
                dv = dv * 2.0
        zero = row >> 31
        rows = row + tl.arange(0, BLOCK_M)
        row_base = tl.cast(member, tl.int64) * total_q
        q = load_member(q_source, member, row, q_strides, len_q, DIM, BLOCK_M, BLOCK_D, MASKED)  # [BLOCK_M, BLOCK_D]
        s = tl.dot(k, q.T, input_precision="ieee")  # [BLOCK_N, BLOCK_M]
        if MASKED:  # a row past the end: LSE inf, so that P = 0
            lse_log2 = tl.load(lse_base + row_base + rows, mask=rows < len_q, other=float("inf"))
        else:
            lse_log2 = tl.load(lse_base + row_base + rows)
        if cap is not None or slopes is not None or mod is not None or GIVEN:
            cols = col + tl.arange(0, BLOCK_N)
            slope_log2 = None if slopes is None else tl.load(slopes + member) * LOG2E
            x, gain = bend(
                s, rows[None, :], cols[:, None], shift, scale_log2, cap, slope_log2, mod,
                None if mod is None else first_head + member,
            )  # fmt: skip
            if GIVEN:
                x, shown = give(
                    x, rows[None, :], cols[:, None], len_q, len_k,
                    None if bias is None else bias + tl.cast(member, tl.int64) * bias_strides[1], bias_strides,
                    None if mask is None else mask + tl.cast(member, tl.int64) * mask_strides[1], mask_strides,
                )  # fmt: skip
            p = tl.exp2(x - lse_log2[None, :])
        else:
            p = tl.exp2(s * scale_log2 - lse_log2[None, :])
        if MASKED:
            cols = col + tl.arange(0, BLOCK_N)
            seen = visible(rows[None, :], cols[:, None], len_k, shift, band) & (rows < len_q)[None, :]
            if GIVEN:
                seen = seen & shown
            p = tl.where(seen, p, 0.0)
        elif GIVEN:
            p = tl.where(shown, p, 0.0)
        if drop is not None:
            keep = kept(drop, first_head + member, row, col, BLOCK_M, BLOCK_N, True)
        if do_source is not None:
            do = load_member(do_source, member, row, do_strides, len_q, DIM_V, BLOCK_M, BLOCK_DV, MASKED)
        if WANT_DK and not MASKED:
            dp = 0.0 if do_source is None else tl.dot(v, do.T, input_precision="ieee")
        if WANT_DV and do_source is not None:
            z = p if drop is None else tl.where(keep, p * drop[3], 0.0)
            if GUARDED:
                dv = guarded_dot(z, do, seen, dv)
            else:
                dv = tl.dot(z.to(do.dtype), do, dv, input_precision="ieee")
        if WANT_DK:
            if MASKED:
                dp = 0.0 if do_source is None else tl.dot(v, do.T, input_precision="ieee")
            if MASKED:  # loaded late: it is needed late, and registers are short
                delta = tl.load(delta_base + row_base + rows, mask=rows < len_q, other=0.0)
            else:
                delta = tl.load(delta_base + row_base + rows)
            if drop is not None:
                dp = tl.where(keep, dp * drop[3], 0.0)
            ds = score_gradient(p, dp, delta[None, :])
            if cap is not None or mod is not None:
                ds = ds * gain
            if MASKED:
                ds = tl.where(seen, ds, 0.0)
            elif GIVEN:
                ds = tl.where(shown, ds, 0.0)
        if WANT_DK:
            if GUARDED:
                dk = guarded_dot(ds, q, seen, dk)
            else:
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv, zero


@triton.jit(do_not_specialize=["len_k"])  # for keys and queries of one token ptxas 12.8 crashes
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr,  # [B, T, H, D] or [T, H, D]; do_ptr None: only the LSE has a gradient
    dk_ptr, dv_ptr, lse_ptr, delta_ptr,  # dk as k, dv as v; of `row_kernel`, the LSE in base 2
    cu_seqlens_q, cu_seqlens_k,  # [batch + 1]; None: dense
    slopes_ptr,  # fp32 [H] or [B, H]; None: no ALiBi
    bias_ptr, mask_ptr,  # [B, H, len_q, len_k]; None: none
    seed_ptr,  # int64 [1]; None: no dropout
    numbers_ptr,  # fp32 [NUMBERS, H], of FUNCTION; None: none
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,  # (batch, row, head)
    bias_strides, mask_strides,  # (batch, head, query, key)
    odds,  # of dropout: (p 2^15, 1 / (1 - p))
    scale, cap, band, batch, heads, tiles, len_q, len_k,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PER_SEQUENCE: tl.constexpr, FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    """dK and dV, or one of them: together they share the scores, apart each has the registers to itself."""
    total_q = len_q
    total_k = len_k
    col, kv_head, b, begin_k, len_k, begin_q, len_q = locate(
        tl.program_id(0), cu_seqlens_k, cu_seqlens_q, batch, heads // GROUP, tiles, len_k, len_q, BLOCK_N
    )
    if col >= len_k:
        return
    shift = len_k - len_q
    b = tl.cast(b, tl.int32)
    scale_log2 = scale * LOG2E
    k = load_tile(head_base(k_ptr, k_strides, b, begin_k, kv_head), col, k_strides[1], len_k, DIM, BLOCK_N, BLOCK_D, True)
    v = load_tile(head_base(v_ptr, v_strides, b, begin_k, kv_head), col, v_strides[1], len_k, DIM_V, BLOCK_N, BLOCK_DV, True)
    first_head = kv_head * GROUP
    row_base = (b.to(tl.int64) * heads + first_head) * total_q + begin_q
    lse_base = lse_ptr + row_base
    delta_base = delta_ptr + row_base
    q_base = head_base(q_ptr, q_strides, b, begin_q, first_head)
    q_source = group_source(q_base, q_strides, len_q, GROUP, DIM, BLOCK_M, BLOCK_D, DESCRIPTORS)
    if do_ptr is None:
        do_source = None
    else:
        do_base = head_base(do_ptr, do_strides, b, begin_q, first_head)
        do_source = group_source(do_base, do_strides, len_q, GROUP, DIM_V, BLOCK_M, BLOCK_DV, DESCRIPTORS)

    if slopes_ptr is None:
        slopes = None
    else:
        slopes = first_head + slopes_base(
            slopes_ptr, tl.program_id(0), cu_seqlens_k, batch, heads // GROUP, tiles, heads, BLOCK_N, PER_SEQUENCE
        )
    bias = None if bias_ptr is None else pair_base(bias_ptr, bias_strides, b, first_head)
    mask = None if mask_ptr is None else pair_base(mask_ptr, mask_strides, b, first_head)
    if seed_ptr is None:
        drop = None
    else:
        drop = dropping(seed_ptr, odds, tl.program_id(0), cu_seqlens_k, batch, heads // GROUP, tiles, BLOCK_N)
    sequence = 0 if FUNCTION is None else sequence_of(tl.program_id(0), cu_seqlens_k, batch, heads // GROUP, tiles, BLOCK_N)

    ranges = query_ranges(col, tl.minimum(col + BLOCK_N, len_k) - 1, len_q, shift, band, BLOCK_M)
    EDGE_M: tl.constexpr = BLOCK_M // 2 if BLOCK_M > 16 else BLOCK_M  # masked tiles need registers for the mask and pointers
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    dk, dv, zero = _walk_queries(
        dk, dv, k, v, q_source, do_source, lse_base, delta_base, q_strides, do_strides, ranges, col, total_q, len_q, len_k,
        shift, band, scale_log2, cap, slopes, bias, bias_strides, mask, mask_strides, drop, first_head, GROUP, DIM, DIM_V,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, WANT_DK, WANT_DV, False, False, STAGES,
        None if FUNCTION is None else (FUNCTION, DERIVATIVE, NUMBERS, numbers_ptr, heads, sequence),
    )  # fmt: skip
    # Where everything lies once more, from a program id that depends on the loop: kept over the loop, it would spill.
    col, kv_head, b, begin_k, len_k, begin_q, len_q = locate(
        tl.program_id(0) + zero, cu_seqlens_k, cu_seqlens_q, batch, heads // GROUP, tiles, total_k, total_q, BLOCK_N
    )
    b = tl.cast(b, tl.int32)
    first_head = kv_head * GROUP
    row_base = (b.to(tl.int64) * heads + first_head) * total_q + begin_q
    q_base = head_base(q_ptr, q_strides, b, begin_q, first_head)
    do_base = None if do_ptr is None else head_base(do_ptr, do_strides, b, begin_q, first_head)
    if slopes_ptr is not None:
        pid = tl.program_id(0) + zero
        slopes = first_head + slopes_base(
            slopes_ptr, pid, cu_seqlens_k, batch, heads // GROUP, tiles, heads, BLOCK_N, PER_SEQUENCE
        )
    bias = None if bias_ptr is None else pair_base(bias_ptr, bias_strides, b, first_head)
    mask = None if mask_ptr is None else pair_base(mask_ptr, mask_strides, b, first_head)
    if seed_ptr is not None:
        drop = dropping(seed_ptr, odds, tl.program_id(0) + zero, cu_seqlens_k, batch, heads // GROUP, tiles, BLOCK_N)
    if FUNCTION is not None:
        sequence = sequence_of(tl.program_id(0) + zero, cu_seqlens_k, batch, heads // GROUP, tiles, BLOCK_N)
    ranges = query_ranges(col, tl.minimum(col + BLOCK_N, len_k) - 1, len_q, len_k - len_q, band, BLOCK_M)
    dk, dv, _ = _walk_queries(
        dk, dv, k, v, q_base, do_base, lse_ptr + row_base, delta_ptr + row_base, q_strides, do_strides, ranges, col, total_q,
        len_q, len_k, len_k - len_q, band, scale_log2, cap, slopes, bias, bias_strides, mask, mask_strides, drop, first_head,
        GROUP, DIM, DIM_V, EDGE_M, BLOCK_N, BLOCK_D, BLOCK_DV, WANT_DK, WANT_DV, True, False, 1,
        None if FUNCTION is None else (FUNCTION, DERIVATIVE, NUMBERS, numbers_ptr, heads, sequence),
    )  # fmt: skip
    bad = 0
    if WANT_DK:
        bad += any_of(dk != dk)
    if WANT_DV:
        bad += any_of(dv != dv)
    # And once more (bad is at most 2).
    col, kv_head, b, begin_k, len_k, begin_q, len_q = locate(
        tl.program_id(0) + (bad >> 8), cu_seqlens_k, cu_seqlens_q, batch, heads // GROUP, tiles, total_k, total_q, BLOCK_N
    )
    b = tl.cast(b, tl.int32)
    if WANT_DK:
        dk_base = head_base(dk_ptr, dk_strides, b, begin_k, kv_head)
        store_tile(dk_base, dk * scale, col, dk_strides[1], len_k, DIM, BLOCK_N, BLOCK_D)
    if WANT_DV:
        dv_base = head_base(dv_ptr, dv_strides, b, begin_k, kv_head)
        store_tile(dv_base, dv, col, dv_strides[1], len_k, DIM_V, BLOCK_N, BLOCK_DV)
    if bad > 0:  # perhaps a NaN or infinity of Q or dO that not every key is seen by
        tl.debug_barrier()
        first_head = kv_head * GROUP
        row_base = (b.to(tl.int64) * heads + first_head) * total_q + begin_q
        k_base = head_base(k_ptr, k_strides, b, begin_k, kv_head)
        v_base = head_base(v_ptr, v_strides, b, begin_k, kv_head)
        q_base = head_base(q_ptr, q_strides, b, begin_q, first_head)
        do_base = None if do_ptr is None else head_base(do_ptr, do_strides, b, begin_q, first_head)
        if slopes_ptr is not None:
            pid = tl.program_id(0) + (bad >> 8)
            slopes = first_head + slopes_base(
                slopes_ptr, pid, cu_seqlens_k, batch, heads // GROUP, tiles, heads, BLOCK_N, PER_SEQUENCE
            )
        once_more = (
            0
            if FUNCTION is None
            else sequence_of(tl.program_id(0) + (bad >> 8), cu_seqlens_k, batch, heads // GROUP, tiles, BLOCK_N)
        )
        zero = len_q * 0
        for piece in range(col, tl.minimum(col + BLOCK_N, len_k), GUARD):
            dk_piece, dv_piece, _ = _walk_queries(
                tl.zeros([GUARD, BLOCK_D], tl.float32), tl.zeros([GUARD, BLOCK_DV], tl.float32),
                load_tile(k_base, piece, k_strides[1], len_k, DIM, GUARD, BLOCK_D, True),
                load_tile(v_base, piece, v_strides[1], len_k, DIM_V, GUARD, BLOCK_DV, True),
                q_base, do_base, lse_ptr + row_base, delta_ptr + row_base, q_strides, do_strides,
                (zero, zero, zero, len_q), piece, total_q, len_q, len_k, len_k - len_q, band, scale_log2,
                cap, slopes,
                None if bias_ptr is None else pair_base(bias_ptr, bias_strides, b, first_head), bias_strides,
                None if mask_ptr is None else pair_base(mask_ptr, mask_strides, b, first_head), mask_strides,
                None if seed_ptr is None else dropping(
                    seed_ptr, odds, tl.program_id(0) + (bad >> 8), cu_seqlens_k, batch, heads // GROUP, tiles, BLOCK_N
                ), first_head, GROUP, DIM, DIM_V, GUARD, GUARD, BLOCK_D, BLOCK_DV, WANT_DK, WANT_DV, True, True, 1,
                None if FUNCTION is None else (FUNCTION, DERIVATIVE, NUMBERS, numbers_ptr, heads, once_more),
            )  # fmt: skip
            if WANT_DK:
                store_tile(dk_base, dk_piece * scale, piece, dk_strides[1], len_k, DIM, GUARD, BLOCK_D)
            if WANT_DV:
                store_tile(dv_base, dv_piece, piece, dv_strides[1], len_k, DIM_V, GUARD, BLOCK_DV)


# One query in a group, as a constant, makes ptxas 12.8 crash too. That 16 divides a number of queries saves registers.
one_query_key_kernel = triton.jit(key_kernel.fn, do_not_specialize=["len_q", "len_k"])
