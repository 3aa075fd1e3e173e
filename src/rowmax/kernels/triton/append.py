"""New keys and values into the pages of their sequences, keys rotated by their position if that is wanted.

    pages[block_table[b, j // page_size], j % page_size] = x_j,   j = seqlens_k[b] - (new tokens of b) + its place among them

Rotary embedding (Su et al., "RoFormer", 2021): pairs (x, y) of the first columns become (x cos - y sin, x sin + y cos), the
pair being columns (2i, 2i + 1) or (i, i + half). Launched by `kernels/decode_launch.py`.
"""

import triton
import triton.language as tl

from rowmax.kernels.tile_ops import clamp
from rowmax.kernels.triton.parts import queries_of


@triton.jit
def append_kernel(
    k_ptr, v_ptr,  # [B, T, Hk, D], or packed [T, Hk, D]; v None: keys alone
    k_pages, v_pages,  # [page, slot, Hk, D]
    table_ptr, seqlens_ptr, cu_seqlens,  # [B, columns], [B], [B + 1] or None
    cos_ptr, sin_ptr,  # [positions, PAIRS]; None: no rotation
    k_scale_ptr, v_scale_ptr,  # fp32 [Hk] or [page, Hk], of pages in 8 bits: what these are to be multiplied by; None: 1
    k_strides, v_strides, k_page_strides, v_page_strides,  # (batch or page, row, head)
    table_stride, cos_stride, sin_stride, batch, heads, tokens, columns, pages, page_size, positions,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, MOST: tl.constexpr, BY_PAGE: tl.constexpr,
):  # fmt: skip
    """One program for a token of one head. `tokens`: of each sequence, or packed of all. What would lie outside of the table or
    the pages is not written."""
    pid = tl.program_id(0)
    head = (pid % heads).to(tl.int64)
    row = pid // heads
    if cu_seqlens is None:
        b = row // tokens
        place = row % tokens
        count = tokens
    else:
        b = row * 0
        high = b + batch
        while high - b > 1:  # the last sequence that begins at this row or before
            middle = (b + high) // 2
            if tl.load(cu_seqlens + middle) <= row:
                b = middle
            else:
                high = middle
        begin, count = queries_of(cu_seqlens, b, tokens)
        place = row - begin
    if (place < 0) | (place >= count):  # a row of no sequence
        return
    position = tl.load(seqlens_ptr + b).to(tl.int64) - count + place
    if (position < 0) | (position >= tl.cast(columns, tl.int64) * page_size):
        return
    b64 = tl.cast(b, tl.int64)
    page = tl.load(table_ptr + b64 * table_stride + position // page_size).to(tl.int64)
    if (page < 0) | (page >= pages):
        return
    slot = position % page_size
    scale = head
    if BY_PAGE:
        scale += page * heads

    first = b64 if cu_seqlens is None else b64 * 0
    row = (place if cu_seqlens is None else row).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    k_row = k_ptr + first * k_strides[0] + row * k_strides[1] + head * k_strides[2]
    k = tl.load(k_row + dims, mask=dims < DIM, other=0.0)
    if cos_ptr is not None:
        turned = dims < 2 * PAIRS
        if INTERLEAVED:
            pair = dims // 2
            second = dims % 2 == 1
            other = tl.where(second, dims - 1, dims + 1)
        else:
            pair = dims % PAIRS
            second = dims >= PAIRS
            other = tl.where(second, dims - PAIRS, dims + PAIRS)
        at = tl.minimum(position, positions - 1)
        cos = tl.load(cos_ptr + at * cos_stride + pair, mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + at * sin_stride + pair, mask=turned, other=0.0).to(tl.float32)
        partner = tl.load(k_row + other, mask=turned, other=0.0).to(tl.float32)
        k = tl.where(turned, k.to(tl.float32) * cos + tl.where(second, partner, -partner) * sin, k.to(tl.float32))
    if k_scale_ptr is not None:
        k = tl.div_rn(k.to(tl.float32), tl.load(k_scale_ptr + scale))
    if k_pages.dtype.element_ty == tl.float8e4nv:
        k = tl.where(k == k, clamp(k.to(tl.float32), -MOST, MOST), k.to(tl.float32))  # what is no number stays none
    to = k_pages + page * k_page_strides[0] + slot * k_page_strides[1] + head * k_page_strides[2]
    tl.store(to + dims, k.to(k_pages.dtype.element_ty), mask=dims < DIM)
    if v_ptr is not None:
        dims_v = tl.arange(0, BLOCK_DV)
        v_row = v_ptr + first * v_strides[0] + row * v_strides[1] + head * v_strides[2]
        v = tl.load(v_row + dims_v, mask=dims_v < DIM_V, other=0.0)
        if v_scale_ptr is not None:
            v = tl.div_rn(v.to(tl.float32), tl.load(v_scale_ptr + scale))
        if v_pages.dtype.element_ty == tl.float8e4nv:
            v = tl.where(v == v, clamp(v.to(tl.float32), -MOST, MOST), v.to(tl.float32))
        to = v_pages + page * v_page_strides[0] + slot * v_page_strides[1] + head * v_page_strides[2]
        tl.store(to + dims_v, v.to(v_pages.dtype.element_ty), mask=dims_v < DIM_V)
