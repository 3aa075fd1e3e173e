"""Attention before FlashAttention: S and P in memory, three kernels, every score computed whether it is seen or not.

    S = scale Q K^T (fp32, -inf where hidden)      P = exp(S - m) / l,  LSE = m + log l      O = P V

S takes four bytes a score and P two, each written once and read again: of the order of N^2 bytes cross the memory bus where
`forward.py` moves N. It is here to be measured beside it, and runs when it is asked for by name. Launched by
`kernels/generations.py`.
"""

import triton
import triton.language as tl

from rowmax.kernels.address import head_base, load_tile, store_tile
from rowmax.kernels.tile_ops import any_of, finish, online_step, visible
from rowmax.kernels.triton.forward import _store_guarded


@triton.jit
def scores_kernel(
    q_ptr, k_ptr,  # [B, T, H, D]
    s_ptr,  # fp32 [B, H, len_q, s_stride], in units of log2
    q_strides, k_strides,  # (batch, row, head)
    scale_log2, band, heads, row_tiles, col_tiles, len_q, len_k, s_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of S. Columns from len_k to `s_stride`, a multiple of BLOCK_N, are -inf."""
    pid = tl.program_id(0)
    col = pid % col_tiles * BLOCK_N
    row = pid // col_tiles % row_tiles * BLOCK_M
    head = pid // (col_tiles * row_tiles) % heads
    b = pid // (col_tiles * row_tiles * heads)
    q = load_tile(head_base(q_ptr, q_strides, b, 0, head), row, q_strides[1], len_q, DIM, BLOCK_M, BLOCK_D, True)
    k = load_tile(head_base(k_ptr, k_strides, b, 0, head // GROUP), col, k_strides[1], len_k, DIM, BLOCK_N, BLOCK_D, True)
    s = tl.dot(q, k.T, input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    s = tl.where(visible(rows[:, None], cols[None, :], len_k, len_k - len_q, band), s, float("-inf"))
    line = (b.to(tl.int64) * heads + head) * len_q + rows
    tl.store(s_ptr + line[:, None] * s_stride + cols[None, :], s, mask=(rows < len_q)[:, None])


@triton.jit
def softmax_kernel(
    s_ptr,  # fp32 [B * H * len_q, s_stride]
    p_ptr,  # as s, in the type of v
    lse_ptr,  # fp32 [B * H * len_q]; None: not wanted
    lines, s_stride, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Rows of P and their LSE: one walk over the scores for m and l, another for P."""
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = (line < lines)[:, None]
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for col in range(0, s_stride, COLS):
        cols = col + tl.arange(0, COLS)
        s = tl.load(
            s_ptr + line[:, None] * s_stride + cols[None, :], mask=there & (cols < s_stride)[None, :], other=float("-inf")
        )
        _, m, l, _ = online_step(s, m, l, 1.0)
    pivot = tl.where(m == float("-inf"), 0.0, m)
    one = tl.full([ROWS, 1], 1.0, tl.float32)
    inverse, lse = finish(one, m, l, 1.0)
    for col in range(0, s_stride, COLS):
        cols = col + tl.arange(0, COLS)
        at = line[:, None] * s_stride + cols[None, :]
        inside = there & (cols < s_stride)[None, :]
        s = tl.load(s_ptr + at, mask=inside, other=float("-inf"))
        p = tl.exp2(s - pivot[:, None]) * inverse
        tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=inside)
    if lse_ptr is not None:
        tl.store(lse_ptr + line, lse, mask=line < lines)


@triton.jit
def output_kernel(
    p_ptr,  # [B, H, len_q, s_stride], in the type of v; 0 in columns from len_k on
    q_ptr, k_ptr, v_ptr,  # [B, T, H, D]; q and k are read only where O came out NaN
    o_ptr,  # as q, with DIM_V
    lse_ptr,  # fp32 [B, H, len_q]; None: not wanted
    q_strides, k_strides, v_strides, o_strides,  # (batch, row, head)
    scale_log2, band, heads, row_tiles, len_q, len_k, s_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row tile of O = P V."""
    pid = tl.program_id(0)
    row = pid % row_tiles * BLOCK_M
    head = pid // row_tiles % heads
    b = pid // (row_tiles * heads)
    lines = (b.to(tl.int64) * heads + head) * len_q
    p_base = p_ptr + lines * s_stride
    v_base = head_base(v_ptr, v_strides, b, 0, head // GROUP)
    o_base = head_base(o_ptr, o_strides, b, 0, head)
    rows = row + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for col in tl.range(0, s_stride, BLOCK_N, num_stages=STAGES):
        cols = col + tl.arange(0, BLOCK_N)
        p = tl.load(p_base + rows.to(tl.int64)[:, None] * s_stride + cols[None, :], mask=(rows < len_q)[:, None], other=0.0)
        v = load_tile(v_base, col, v_strides[1], len_k, DIM_V, BLOCK_N, BLOCK_DV, True)  # [BLOCK_N, BLOCK_DV]
        acc = tl.dot(p, v, acc, input_precision="ieee")
    store_tile(o_base, acc, row, o_strides[1], len_q, DIM_V, BLOCK_M, BLOCK_DV)
    if any_of(acc != acc) > 0:  # perhaps a NaN or infinity of V that not every row sees
        tl.debug_barrier()
        if lse_ptr is None:
            lse_base = None
        else:
            lse_base = lse_ptr + lines
        _store_guarded(
            head_base(q_ptr, q_strides, b, 0, head), head_base(k_ptr, k_strides, b, 0, head // GROUP), v_base, o_base, lse_base,
            q_strides[1], k_strides[1], v_strides[1], o_strides[1], row, tl.minimum(row + BLOCK_M, len_q) - 1, len_q, len_k,
            len_k - len_q, band, scale_log2, None, None, None, None, None, None, None, None, None,
            DIM, DIM_V, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
