"""The gradient of an added bias: dS, without the factors of a soft-cap and of a score_mod, summed over the dimensions that the
bias is broadcast in.

    dB_ij = sum P_ij (dP_ij - delta_i)

A program owns a tile of the gradient, or, where it is broadcast over queries or keys, a strip of one, of one batch and head; it
walks over all tiles of scores that add to it and computes S and dP once more. The sums are fp32 and in a fixed order: no
atomics, so that repeats are bitwise equal. What is broadcast over queries or keys leaves a row of sums for each sequence and
head, which `kernels/scored_launch.py`, who launches this, adds up.
"""

import triton
import triton.language as tl

from rowmax.kernels.address import head_base, load_tile
from rowmax.kernels.tile_ops import bend, early_keys, end_key, first_key, score_gradient, visible
from rowmax.kernels.triton.dropout import kept
from rowmax.kernels.triton.given import LOG2E, give, pair_base


@triton.jit
def bias_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr,  # [B, T, H, D]; do_ptr None: only the LSE has a gradient
    db_ptr,  # the bias's own type or fp32, [B, H, len_q, len_k] with 1 for what is summed by a program
    lse_ptr, delta_ptr,  # of `row_kernel`, the LSE in base 2
    slopes_ptr, bias_ptr, mask_ptr, seed_ptr, numbers_ptr,
    q_strides, k_strides, v_strides, do_strides, bias_strides, mask_strides, odds,
    db_strides,  # (batch, head, query, key), contiguous; 0 for what is summed
    scale, cap, band, batch, heads, row_tiles, col_tiles, len_q, len_k,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PER_SEQUENCE: tl.constexpr, OWN_B: tl.constexpr, OWN_H: tl.constexpr,
    OWN_Q: tl.constexpr, OWN_K: tl.constexpr, FUNCTION: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """`OWN_*`: programs have batches, heads, row tiles, column tiles of their own; else each walks over all of them."""
    pid = tl.program_id(0)
    own_rows = row_tiles if OWN_Q else 1
    own_cols = col_tiles if OWN_K else 1
    own_heads = heads if OWN_H else 1
    first_col = pid % own_cols
    first_row = pid // own_cols % own_rows
    first_head = pid // (own_cols * own_rows) % own_heads
    first_b = pid // (own_cols * own_rows * own_heads)
    turns_k = 1 if OWN_K else col_tiles
    turns_q = 1 if OWN_Q else row_tiles
    turns_h = 1 if OWN_H else heads
    turns_b = 1 if OWN_B else batch
    shift = len_k - len_q
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for turn in range(turns_b * turns_h * turns_q * turns_k):
        col = (first_col + turn % turns_k) * BLOCK_N
        row = (first_row + turn // turns_k % turns_q) * BLOCK_M
        head = first_head + turn // (turns_k * turns_q) % turns_h
        b = first_b + turn // (turns_k * turns_q * turns_h)
        last = tl.minimum(row + BLOCK_M, len_q) - 1
        near = col + BLOCK_N > first_key(row, shift, band)
        if band.__len__() > 2:
            near = near | (col < early_keys(col, band))
        if (col < end_key(last, shift, len_k, band)) & near:
            q = load_tile(head_base(q_ptr, q_strides, b, 0, head), row, q_strides[1], len_q, DIM, BLOCK_M, BLOCK_D, True)
            k_base = head_base(k_ptr, k_strides, b, 0, head // GROUP)
            k = load_tile(k_base, col, k_strides[1], len_k, DIM, BLOCK_N, BLOCK_D, True)
            rows = row + tl.arange(0, BLOCK_M)
            cols = col + tl.arange(0, BLOCK_N)
            line = (b.to(tl.int64) * heads + head) * len_q
            lse_log2 = tl.load(lse_ptr + line + rows, mask=rows < len_q, other=float("inf"))
            delta = tl.load(delta_ptr + line + rows, mask=rows < len_q, other=0.0)
            s = tl.dot(q, k.T, input_precision="ieee")
            if slopes_ptr is None:
                slope_log2 = None
            else:
                slope_log2 = tl.load((slopes_ptr + b * heads if PER_SEQUENCE else slopes_ptr) + head) * LOG2E
            x, _gain = bend(
                s, rows[:, None], cols[None, :], shift, scale * LOG2E, cap, slope_log2,
                None if FUNCTION is None else (FUNCTION, FUNCTION, NUMBERS, numbers_ptr, heads, b), head,
            )  # fmt: skip
            bias = pair_base(bias_ptr, bias_strides, b, head)
            mask = None if mask_ptr is None else pair_base(mask_ptr, mask_strides, b, head)
            x, shown = give(x, rows[:, None], cols[None, :], len_q, len_k, bias, bias_strides, mask, mask_strides)
            p = tl.exp2(x - lse_log2[:, None])
            dp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if do_ptr is not None:
                do_base = head_base(do_ptr, do_strides, b, 0, head)
                do = load_tile(do_base, row, do_strides[1], len_q, DIM_V, BLOCK_M, BLOCK_DV, True)
                v_base = head_base(v_ptr, v_strides, b, 0, head // GROUP)
                v = load_tile(v_base, col, v_strides[1], len_k, DIM_V, BLOCK_N, BLOCK_DV, True)
                dp = tl.dot(do, v.T, input_precision="ieee")
            if seed_ptr is not None:
                drop = (tl.load(seed_ptr), tl.cast(b, tl.int32), odds[0])
                dp = tl.where(kept(drop, head, row, col, BLOCK_M, BLOCK_N, False), dp * odds[1], 0.0)
            seen = visible(rows[:, None], cols[None, :], len_k, shift, band) & shown & (rows < len_q)[:, None]
            total += tl.where(seen, score_gradient(p, dp, delta[:, None]), 0.0)
    rows = first_row * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = first_col * BLOCK_N + tl.arange(0, BLOCK_N)
    base = db_ptr + tl.cast(first_b, tl.int64) * db_strides[0] + tl.cast(first_head, tl.int64) * db_strides[1]
    if OWN_Q and OWN_K:
        offsets = rows.to(tl.int64)[:, None] * db_strides[2] + cols[None, :] * db_strides[3]
        tl.store(base + offsets, total.to(db_ptr.dtype.element_ty), mask=(rows < len_q)[:, None] & (cols < len_k)[None, :])
    elif OWN_Q:
        tl.store(base + rows.to(tl.int64) * db_strides[2], tl.sum(total, 1), mask=rows < len_q)
    else:
        tl.store(base + cols.to(tl.int64) * db_strides[3], tl.sum(total, 0), mask=cols < len_k)
