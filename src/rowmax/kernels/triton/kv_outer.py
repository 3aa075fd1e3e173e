"""FlashAttention-1 forward: K/V tiles outside, Q tiles inside, one program a (head, sequence).

    for each K/V tile:  for each Q tile:  O, m, l from memory;  one step of the online softmax;  O, m, l to memory

O stays divided by l after every step, so that it is the attention over the keys so far, in fp32. Q, O, m and l cross the memory
bus once for every K/V tile, and only batch x heads programs have work: what FlashAttention-2 (`forward.py`) turned around. It
is here to be measured beside it, and runs when it is asked for by name. Launched by `kernels/generations.py`.
Source: Dao et al., "FlashAttention" (2022), algorithm 1.
"""

import triton
import triton.language as tl

from rowmax.kernels.address import extent, head_base, load_tile, store_tile
from rowmax.kernels.tile_ops import any_of, finish, online_step, query_ranges, tile_start, tiles_of, visible
from rowmax.kernels.triton.forward import _store_guarded


@triton.jit
def _walk(
    k, v, q_base, acc_base, m_base, l_base, q_stride, ranges, col, len_q, len_k, shift, band, scale_log2,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One K/V tile against the Q tiles that see it: those that need the element mask, or the others."""
    for turn in tl.range(0, tiles_of(ranges, BLOCK_M, MASKED), num_stages=STAGES):
        row = tile_start(turn, ranges, BLOCK_M, MASKED)
        rows = row + tl.arange(0, BLOCK_M)
        q = load_tile(q_base, row, q_stride, len_q, DIM, BLOCK_M, BLOCK_D, True)  # [BLOCK_M, BLOCK_D]
        s = tl.dot(q, k.T, input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
        if MASKED:
            cols = col + tl.arange(0, BLOCK_N)
            s = tl.where(visible(rows[:, None], cols[None, :], len_k, shift, band), s, float("-inf"))
        m = tl.load(m_base + rows, mask=rows < len_q, other=float("-inf"))
        l = tl.load(l_base + rows, mask=rows < len_q, other=0.0)
        acc = load_tile(acc_base, row, BLOCK_DV, len_q, BLOCK_DV, BLOCK_M, BLOCK_DV, True)  # fp32, divided by l
        p, m, l_new, alpha = online_step(s, m, l, 1.0)
        acc = acc * (l * alpha)[:, None]
        acc, _ = finish(tl.dot(p.to(v.dtype), v, acc, input_precision="ieee"), m, l_new, 1.0)
        tl.store(m_base + rows, m, mask=rows < len_q)
        tl.store(l_base + rows, l_new, mask=rows < len_q)
        store_tile(acc_base, acc, row, BLOCK_DV, len_q, BLOCK_DV, BLOCK_M, BLOCK_DV)


@triton.jit
def kv_outer_kernel(
    q_ptr, k_ptr, v_ptr,  # [B, T, H, D] or [T, H, D]
    o_ptr,  # as q, with DIM_V
    lse_ptr,  # fp32 [B, H, len_q] or [H, len_q]; None: not wanted
    acc_ptr,  # fp32 [B, H, len_q, BLOCK_DV] or [H, len_q, BLOCK_DV]: O between turns
    m_ptr, l_ptr,  # fp32 [B, H, len_q] or [H, len_q]
    cu_seqlens_q, cu_seqlens_k,  # [batch + 1]; None: dense
    q_strides, k_strides, v_strides, o_strides,  # (batch, row, head)
    scale_log2, band, heads, len_q, len_k,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % heads
    b = tl.program_id(0) // heads
    lines = (b.to(tl.int64) * heads + head) * len_q  # rows in front of this head's, in acc, m, l and lse
    begin_q = 0
    begin_k = 0
    if cu_seqlens_q is not None:
        lines = head.to(tl.int64) * len_q
        begin_q, len_q = extent(cu_seqlens_q, b, len_q)
        begin_k, len_k = extent(cu_seqlens_k, b, len_k)
        lines += begin_q
        b = b * 0
    shift = len_k - len_q
    q_base = head_base(q_ptr, q_strides, b, begin_q, head)
    k_base = head_base(k_ptr, k_strides, b, begin_k, head // GROUP)
    v_base = head_base(v_ptr, v_strides, b, begin_k, head // GROUP)
    o_base = head_base(o_ptr, o_strides, b, begin_q, head)
    acc_base = acc_ptr + lines * BLOCK_DV
    m_base = m_ptr + lines
    l_base = l_ptr + lines

    for row in range(0, len_q, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        nothing = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        store_tile(acc_base, nothing, row, BLOCK_DV, len_q, BLOCK_DV, BLOCK_M, BLOCK_DV)
        tl.store(m_base + rows, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=rows < len_q)
        tl.store(l_base + rows, tl.zeros([BLOCK_M], tl.float32), mask=rows < len_q)

    for col in range(0, len_k, BLOCK_N):
        tl.debug_barrier()  # a row's numbers are read by other threads than those that wrote them
        k = load_tile(k_base, col, k_strides[1], len_k, DIM, BLOCK_N, BLOCK_D, True)  # [BLOCK_N, BLOCK_D]
        v = load_tile(v_base, col, v_strides[1], len_k, DIM_V, BLOCK_N, BLOCK_DV, True)  # [BLOCK_N, BLOCK_DV]
        start, full_start, full_end, end = query_ranges(col, tl.minimum(col + BLOCK_N, len_k) - 1, len_q, shift, band, BLOCK_M)
        full_end = tl.where(col + BLOCK_N > len_k, full_start, full_end)  # keys past the end are hidden from all
        ranges = (start, full_start, full_end, end)
        _walk(
            k, v, q_base, acc_base, m_base, l_base, q_strides[1], ranges, col, len_q, len_k, shift, band, scale_log2,
            DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, False, STAGES,
        )  # fmt: skip
        _walk(
            k, v, q_base, acc_base, m_base, l_base, q_strides[1], ranges, col, len_q, len_k, shift, band, scale_log2,
            DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, True, STAGES,
        )  # fmt: skip

    tl.debug_barrier()
    for row in range(0, len_q, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        acc = load_tile(acc_base, row, BLOCK_DV, len_q, BLOCK_DV, BLOCK_M, BLOCK_DV, True)
        m = tl.load(m_base + rows, mask=rows < len_q, other=float("-inf"))
        l = tl.load(l_base + rows, mask=rows < len_q, other=0.0)
        store_tile(o_base, acc, row, o_strides[1], len_q, DIM_V, BLOCK_M, BLOCK_DV)
        if lse_ptr is None:
            lse_base = None
        else:
            lse_base = lse_ptr + lines
            _, lse = finish(acc, m, l, 1.0)
            tl.store(lse_base + rows, lse, mask=rows < len_q)
        if any_of(acc != acc) > 0:  # perhaps a NaN or infinity of V that not every row sees
            tl.debug_barrier()
            _store_guarded(
                q_base, k_base, v_base, o_base, lse_base, q_strides[1], k_strides[1], v_strides[1], o_strides[1], row,
                tl.minimum(row + BLOCK_M, len_q) - 1, len_q, len_k, shift, band, scale_log2, None, None, None, None, None,
                None, None, None, None, DIM,
                DIM_V, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
