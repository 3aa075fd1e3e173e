"""Attention of few queries over many keys, dense or in pages: a tile of rows against its part of the keys.

    m = rowmax(S),  l = rowsum(2^(S - m)),  acc = 2^(S - m) V      S = scale log2(e) Q K^T, over the keys of one part

A row is one query head at one query: the heads that share a KV head are rows of one tile, so that each key and value is read
once. An item with one part is finished here; of others (acc, m, l) go to `combine.py`, in a kernel of its own or in that
program of the item which ends last. Launched by `kernels/decode_launch.py`.
Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding" (2023); the online softmax is that of `forward.py`.
"""

import triton
import triton.language as tl

from rowmax.kernels.tile_ops import add_sink, any_of, bend, clamp, finish, guarded_dot, online_step, visible
from rowmax.kernels.triton.combine import combine_rows
from rowmax.kernels.triton.parts import find_part, first_tile, fixed_parts, join, key_span, keys_of, queries_of

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
OPAQUE: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no assembler
HALVES: tl.constexpr = tl.constexpr(32768.0)  # what weights are multiplied by to be fp16


@triton.jit
def page_ids(table, col, end, pages, page_size, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages of keys `[col, col + BLOCK_N)`, one number where they share one. Entries for keys past `end` are not read."""
    size = PAGE if PAGE > 0 else page_size
    if PAGE % BLOCK_N == 0:
        return clamp(tl.load(table + col // size, mask=col < end, other=0), 0, pages - 1).to(tl.int64)
    else:
        cols = col + tl.arange(0, BLOCK_N)
        return clamp(tl.load(table + cols // size, mask=cols < end, other=0), 0, pages - 1).to(tl.int64)


@triton.jit
def key_offsets(ids, col, strides, page_size, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """64-bit offsets of keys `[col, col + BLOCK_N)`; `strides` are (batch or page, key, head)."""
    size = PAGE if PAGE > 0 else page_size
    cols = col + tl.arange(0, BLOCK_N)
    if PAGE == 0:
        return cols.to(tl.int64) * strides[1]
    elif PAGE % BLOCK_N == 0:
        return ids * strides[0] + (col % size + tl.arange(0, BLOCK_N)).to(tl.int64) * strides[1]
    else:
        return ids * strides[0] + (cols % size).to(tl.int64) * strides[1]


@triton.jit
def places(
    table, col, end, k_strides, v_strides, pages, page_size, PAGE: tl.constexpr, ALIKE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Of keys `[col, col + BLOCK_N)` the pages, or 0, and the offsets of keys and of values."""
    ids = 0
    if PAGE:
        ids = page_ids(table, col, end, pages, page_size, PAGE, BLOCK_N)
    k_rows = key_offsets(ids, col, k_strides, page_size, PAGE, BLOCK_N)
    v_rows = k_rows
    if not ALIKE:
        v_rows = key_offsets(ids, col, v_strides, page_size, PAGE, BLOCK_N)
    return ids, k_rows, v_rows


@triton.jit
def scales_of(scales, ids, col, end, heads_k, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """What keys `[col, col + BLOCK_N)` are to be multiplied by, page by page: one number, or `[1, BLOCK_N]`. It is 1 past
    `end`, where weights are 0: scales of pages that are nobody's may be NaN."""
    if PAGE % BLOCK_N == 0:
        return tl.load(scales + ids * heads_k, mask=col < end, other=1.0)
    else:
        return tl.load(scales + ids * heads_k, mask=col + tl.arange(0, BLOCK_N) < end, other=1.0)[None, :]


@triton.jit
def load_rows(base, offsets, there, FIRST: tl.constexpr, DIM: tl.constexpr, COLS: tl.constexpr):
    """Columns `[FIRST, FIRST + COLS)` of rows at `offsets`; 0 where not `there` and from DIM on."""
    dims = FIRST + tl.arange(0, COLS)
    pointers = base + offsets[:, None] + dims[None, :]
    if FIRST + COLS > DIM:
        return tl.load(pointers, mask=there[:, None] & (dims < DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers, mask=there[:, None], other=0.0)


@triton.jit
def widen(x, dtype: tl.constexpr):
    """Exact. e4m3 becomes fp16 in one instruction for two numbers, and bf16 by way of it: the direct way takes an instruction a
    number that runs at an eighth of the others' rate. Before it is widened it must not go into the layout of a product's
    operand, where bytes are loaded one by one: Triton moves that layout in front of all that it knows to be elementwise.
    """
    if x.dtype == tl.float8e4nv:
        if OPAQUE:
            x = tl.inline_asm_elementwise(
                """{
                .reg .b16 low, high;
                mov.b32 {low, high}, $2;
                cvt.rn.f16x2.e4m3x2 $0, low;
                cvt.rn.f16x2.e4m3x2 $1, high;
                }""",
                "=r,=r,r", [x], dtype=tl.float16, is_pure=False, pack=4,
            )  # fmt: skip
        else:
            x = x.to(tl.float16)
        if dtype == tl.bfloat16:
            x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def widen_pairs(x):
    """`(fp16, fp16)` of the first and the second of the two e4m3 numbers that each number of 16 bits holds. Exact. Elements of
    16 bits come out of shared memory in the layout of a product's operand, transposed or not, and are widened there; bytes have
    to be widened and written back first, twice as many as were read."""
    if OPAQUE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low = (x & 255).to(tl.int8).to(tl.float8e4nv, bitcast=True)
        high = (x >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True)
        return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def split_columns(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Columns 0, 2, 4, ... and columns 1, 3, 5, ..."""
    return tl.split(tl.reshape(x, (ROWS, COLS // 2, 2)))


@triton.jit
def into_halves(q):
    """`(q 2^e in fp16, 2^-e)`, e for each row so that its largest finite number is between 2^14 and 2^15: what is lost are
    numbers 2^39 times smaller than it. fp16 is what e4m3 is cheaply widened to."""
    x = q.to(tl.float32)
    size = tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0)
    power = clamp(14.0 - tl.floor(tl.log2(tl.maximum(tl.max(size, 1), 1e-30))), -112.0, 112.0)
    return (x * tl.exp2(power)[:, None]).to(tl.float16), tl.exp2(-power)


@triton.jit
def _walk(
    acc, m, l, q, q2, k_base, v_base, table, k_strides, v_strides, start, low, high, end, tokens, keys, shift, band, scale_log2,
    pages, page_size, k_scales, v_scales, heads_k, cap, slopes_log2, row_scale,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, SHARED: tl.constexpr, ALIKE: tl.constexpr, GUARDED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of keys `[low, high)`, counted from `start`. Page ids are loaded in the turn that needs them, by its place in the
    source: Triton then pipelines them ahead of the keys. Carried over from the turn before, they keep it from pipelining any.
    `k_scales`, `v_scales`: None, or of each page, `heads_k` apart. `row_scale`: None, or what scores of q in fp16 are to be
    multiplied by.
    """
    dtype: tl.constexpr = tl.bfloat16 if row_scale is not None else q.dtype
    halves: tl.constexpr = row_scale is not None and (v_scales is None or PAGE % BLOCK_N == 0) and not GUARDED
    for turn in tl.range(low, high, num_stages=STAGES):
        col = start + turn * BLOCK_N
        cols = col + tl.arange(0, BLOCK_N)
        there = cols < end
        ids, k_rows, v_rows = places(table, col, end, k_strides, v_strides, pages, page_size, PAGE, ALIKE, BLOCK_N)
        k = load_rows(k_base, k_rows, there, 0, DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        k = widen(k, q.dtype)
        s = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if BLOCK_D2:
            k2 = load_rows(k_base, k_rows, there, BLOCK_D, DIM, BLOCK_D2)
            k2 = widen(k2, q.dtype)
            s = tl.dot(q2, k2.T, s, input_precision="ieee")
        if row_scale is not None:
            s *= row_scale
        if k_scales is not None:
            s *= scales_of(k_scales, ids, col, end, heads_k, PAGE, BLOCK_N)
        seen = visible(tokens[:, None], cols[None, :], keys, shift, band)
        if cap is None and slopes_log2 is None:
            s = s * scale_log2
        else:
            s, _ = bend(s, tokens[:, None], cols[None, :], shift, scale_log2, cap, slopes_log2)
        s = tl.where(seen, s, float("-inf"))
        p, m, l, alpha = online_step(s, m, l, 1.0)
        acc = acc * alpha[:, None]
        if SHARED:
            v = k
        else:
            v = load_rows(v_base, v_rows, there, 0, DIM_V, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
        if halves:  # p in fp16 keeps what is 2^-39 and more of the largest
            o = tl.dot((p * HALVES).to(tl.float16), widen(v, tl.float16), input_precision="ieee")
            if v_scales is None:
                acc += o * (1.0 / HALVES)
            else:
                acc += o * (scales_of(v_scales, ids, col, end, heads_k, PAGE, BLOCK_N) * (1.0 / HALVES))
        else:
            if v_scales is not None:
                p *= scales_of(v_scales, ids, col, end, heads_k, PAGE, BLOCK_N)
            v = widen(v, dtype)
            if GUARDED:
                acc = guarded_dot(p, v, seen & there[None, :], acc)
            else:
                acc = tl.dot(p.to(dtype), v, acc, input_precision="ieee")
    return acc, m, l


@triton.jit
def _walk_pairs(
    m, l, q, k_base, v_base, table, k_strides, v_strides, start, low, high, end, tokens, keys, shift, band, scale_log2,
    pages, page_size, k_scales, v_scales, heads_k, row_scale,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, ALIKE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`_walk` over keys and values in e4m3, two to a number of 16 bits: columns with even numbers, then those with odd ones."""
    even, odd = split_columns(q, BLOCK_M, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32)  # times HALVES
    acc_odd = tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32)
    for turn in tl.range(low, high, num_stages=STAGES):
        col = start + turn * BLOCK_N
        cols = col + tl.arange(0, BLOCK_N)
        there = cols < end
        ids, k_rows, v_rows = places(table, col, end, k_strides, v_strides, pages, page_size, PAGE, ALIKE, BLOCK_N)
        k, k_odd = widen_pairs(load_rows(k_base, k_rows, there, 0, DIM // 2, BLOCK_D // 2))
        s = tl.dot(even, k.T)
        s = tl.dot(odd, k_odd.T, s)
        by = row_scale * scale_log2
        if k_scales is not None:
            by *= scales_of(k_scales, ids, col, end, heads_k, PAGE, BLOCK_N)
        seen = visible(tokens[:, None], cols[None, :], keys, shift, band)
        s = tl.where(seen, s * by, float("-inf"))
        p, m, l, alpha = online_step(s, m, l, 1.0)
        p = (p * HALVES).to(tl.float16)  # keeps what is 2^-39 and more of the largest
        v, v_odd = widen_pairs(load_rows(v_base, v_rows, there, 0, DIM_V // 2, BLOCK_DV // 2))
        if v_scales is None:
            acc = tl.dot(p, v, acc * alpha[:, None])
            acc_odd = tl.dot(p, v_odd, acc_odd * alpha[:, None])
        else:
            by_v = scales_of(v_scales, ids, col, end, heads_k, PAGE, BLOCK_N)
            acc = tl.dot(p, v) * by_v + acc * alpha[:, None]
            acc_odd = tl.dot(p, v_odd) * by_v + acc_odd * alpha[:, None]
    return tl.reshape(tl.join(acc, acc_odd), (BLOCK_M, BLOCK_DV)) * (1.0 / HALVES), m, l


@triton.jit
def _part(
    q, q2, k_base, v_base, table, k_strides, v_strides, start, low, high, end, tokens, keys, shift, band, scale_log2, pages,
    page_size, k_scales, v_scales, heads_k, cap, slopes_log2, row_scale,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, SHARED: tl.constexpr, ALIKE: tl.constexpr,
    SEVERAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(acc, m, l) of the rows over tiles of keys `[low, high)`, counted from `start`."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    pairs: tl.constexpr = k_base.dtype.element_ty == tl.int16
    if pairs:
        acc, m, l = _walk_pairs(
            m, l, q, k_base, v_base, table, k_strides, v_strides, start, low, high, end, tokens, keys, shift, band, scale_log2,
            pages, page_size, k_scales, v_scales, heads_k, row_scale,
            DIM, DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PAGE, ALIKE, STAGES,
        )  # fmt: skip
    else:
        acc, m, l = _walk(
            acc, m, l, q, q2, k_base, v_base, table, k_strides, v_strides, start, low, high, end, tokens, keys, shift, band,
            scale_log2, pages, page_size, k_scales, v_scales, heads_k, cap, slopes_log2, row_scale,
            DIM, DIM_V, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, PAGE, SHARED, ALIKE, False, STAGES,
        )  # fmt: skip
    if SEVERAL:
        k_once, v_once, k_apart, v_apart = k_base, v_base, k_strides, v_strides
        if pairs:
            k_once = k_base.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
            v_once = v_base.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
            k_apart = (k_strides[0] * 2, k_strides[1] * 2, k_strides[2] * 2)
            v_apart = (v_strides[0] * 2, v_strides[1] * 2, v_strides[2] * 2)
        if any_of(acc != acc) > 0:  # perhaps a NaN or infinity of V that not every row sees
            m = tl.full([BLOCK_M], float("-inf"), tl.float32)
            l = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
            few: tl.constexpr = 16  # keys a turn: they cost the kernel no registers
            small: tl.constexpr = BLOCK_N // few
            acc, m, l = _walk(
                acc, m, l, q, q2, k_once, v_once, table, k_apart, v_apart, start, low * small, high * small, end, tokens,
                keys, shift, band, scale_log2, pages, page_size, k_scales, v_scales, heads_k, cap, slopes_log2, row_scale,
                DIM, DIM_V, few, BLOCK_D, BLOCK_D2, BLOCK_DV, PAGE, SHARED, ALIKE, True, 1,
            )  # fmt: skip
    return acc, m, l


@triton.jit
def decode_kernel(
    q_ptr,  # [B, T, Hq, D], or packed [T, Hq, D]
    k_ptr, v_ptr,  # [B, T, Hk, D], or pages [page, slot, Hk, D]; of e4m3 perhaps pairs as int16, strides in pairs
    o_ptr,  # as q, with DIM_V
    lse_ptr,  # fp32 [B, Hq, T] or [Hq, T]; None: not wanted
    part_ptr,  # fp32, acc [slots, part_rows, DIM_V], then m, then l [slots, part_rows]; None: every item has one part
    table_ptr, seqlens_k, cu_seqlens_q,  # [B, columns], [B], [B + 1]; None: dense
    k_scale_ptr, v_scale_ptr,  # fp32 [Hk], or [page, Hk]: what keys and values are to be multiplied by; None: nothing
    slopes_ptr, sink_ptr,  # fp32 [Hq] or [B, Hq] of ALiBi; fp32 [Hq] of sinks; None: there are none
    ended_ptr,  # int32 [slots], zeros before and after: how many programs of the item at a first slot have ended; or None
    q_strides, k_strides, v_strides, o_strides,  # (batch or page, row, head)
    cap, slope_stride,  # as `tile_ops.bend` takes it, or None; between the sequences' slopes
    table_stride, scale_log2, band, batch, heads_k, tiles, len_q, len_k, pages, page_size, parts, slots, part_rows,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, SHARED: tl.constexpr,
    ALIKE: tl.constexpr, SEVERAL: tl.constexpr, LEAST: tl.constexpr, BATCH: tl.constexpr, FIXED: tl.constexpr,
    DOUBLES: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, BY_PAGE: tl.constexpr, ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """`PAGE`: slots of a page; 0: none; below 0, of large pages, what divides both their size and BLOCK_N, so that one build
    serves all sizes. `BLOCK_D2`: columns of q and k behind the first BLOCK_D, or 0. `SHARED`: v is the first columns of k.
    `ALIKE`: k and v have the same strides.
    `SEVERAL`: a row tile may hold queries that see different keys, or a tile of keys some that one does not see.
    `FIXED`: tiles of keys in the first parts, so that a sequence has the same parts whatever else there is (`DOUBLES`:
    `plan/fixed_parts.py`); without memory for partial results a program takes all parts of its rows in turn.
    `EARLY`: the combine kernel may be launched before this one has ended. `BY_PAGE`: each page has scales of its own.
    `ROWS`, `AT_ONCE`: of `combine_rows`, if programs that have ended are counted and the last one combines: all have stored
    their parts then, and it joins them in their order, so that which one it is makes no difference to a bit."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    b, tile, head, part, here, slot = find_part(
        tl.program_id(0), seqlens_k, cu_seqlens_q, batch, heads_k, tiles, len_q, len_k, parts, band,
        GROUP, BLOCK_M, BLOCK_N, LEAST, BATCH,
    )  # fmt: skip
    if tile < 0:
        return
    begin, queries = queries_of(cu_seqlens_q, b, len_q)
    rows = queries * GROUP
    if tile * BLOCK_M >= rows:
        return
    keys = keys_of(seqlens_k, b, len_k)
    start, end = key_span(tile, queries, keys, band, GROUP, BLOCK_M, BLOCK_N)
    turns = tl.cdiv(end - start, BLOCK_N)
    if FIXED:  # parts begin at the same keys, whatever else there is to do
        first, last = fixed_parts(start, end, BLOCK_N, FIXED, DOUBLES)
        here = last - first
        if part_ptr is not None:
            if (part >= here) & (part > 0):
                return
            back = tl.maximum(here - 1 - part, 0)  # the last first: large ones that come last would be waited for
            slot += tl.cast(back - part, tl.int64) * heads_k
            part = back
            first += part
            last = first + 1
    else:
        each = tl.cdiv(turns, here)
        low = tl.minimum(part * each, turns)
        high = tl.minimum(low + each, turns)

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = row // GROUP
    real = row < rows
    b64 = tl.cast(b, tl.int64)
    batch_of_q = b64 if cu_seqlens_q is None else b64 * 0
    heads = head * GROUP + row % GROUP
    q_rows = (begin + tokens).to(tl.int64) * q_strides[1] + heads.to(tl.int64) * q_strides[2]
    q_base = q_ptr + batch_of_q * q_strides[0]
    q = load_rows(q_base, q_rows, real, 0, DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    q2 = q
    if BLOCK_D2:
        q2 = load_rows(q_base, q_rows, real, BLOCK_D, DIM, BLOCK_D2)
    row_scale = None
    bytes_or_pairs: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv or k_ptr.dtype.element_ty == tl.int16
    if bytes_or_pairs and q_ptr.dtype.element_ty == tl.bfloat16 and BLOCK_D2 == 0:
        q, back = into_halves(q)
        q2 = q
        row_scale = back[:, None]
    of_head = tl.cast(head, tl.int64)
    k_scales = None
    v_scales = None
    if BY_PAGE:
        if k_scale_ptr is not None:
            k_scales = k_scale_ptr + head
        if v_scale_ptr is not None:
            v_scales = v_scale_ptr + head
    elif k_scale_ptr is not None:
        scale_log2 *= tl.load(k_scale_ptr + head)
    k_base = k_ptr + of_head * k_strides[2]
    v_base = v_ptr + of_head * v_strides[2]
    table = k_ptr  # not read
    if PAGE:
        table = table_ptr + b64 * table_stride
    else:
        k_base += b64 * k_strides[0]
        v_base += b64 * v_strides[0]

    slopes_log2 = None
    if slopes_ptr is not None:
        slopes_log2 = tl.load(slopes_ptr + b64 * slope_stride + heads, mask=real, other=0.0)[:, None] * LOG2E
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if FIXED:
        for number in range(first, last):
            low = tl.maximum(first_tile(number, FIXED, DOUBLES) - start // BLOCK_N, 0)
            high = tl.minimum(first_tile(number + 1, FIXED, DOUBLES) - start // BLOCK_N, turns)
            acc_j, m_j, l_j = _part(
                q, q2, k_base, v_base, table, k_strides, v_strides, start, low, high, end, tokens, keys,
                keys - queries, band, scale_log2, pages, page_size, k_scales, v_scales, heads_k, cap, slopes_log2, row_scale,
                DIM, DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, PAGE, SHARED, ALIKE, SEVERAL, STAGES,
            )  # fmt: skip
            acc, m, l = join(acc, m, l, acc_j, m_j, l_j)
    else:
        acc, m, l = _part(
            q, q2, k_base, v_base, table, k_strides, v_strides, start, low, high, end, tokens, keys,
            keys - queries, band, scale_log2, pages, page_size, k_scales, v_scales, heads_k, cap, slopes_log2, row_scale,
            DIM, DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, PAGE, SHARED, ALIKE, SEVERAL, STAGES,
        )  # fmt: skip
    if not BY_PAGE:
        if v_scale_ptr is not None:
            acc *= tl.load(v_scale_ptr + head)
    dims = tl.arange(0, BLOCK_DV)
    if part_ptr is not None:
        if here > 1:
            inside = tl.arange(0, BLOCK_M)
            kept = real & (inside < part_rows)
            line = clamp(slot, 0, slots - 1) * part_rows + inside
            tl.store(part_ptr + line[:, None] * DIM_V + dims[None, :], acc, mask=kept[:, None] & (dims < DIM_V)[None, :])
            line += tl.cast(slots, tl.int64) * part_rows * DIM_V
            tl.store(part_ptr + line, m, mask=kept)
            tl.store(part_ptr + line + tl.cast(slots, tl.int64) * part_rows, l, mask=kept)
            if ended_ptr is not None:
                of_item = ended_ptr + clamp(slot - tl.cast(part, tl.int64) * heads_k, 0, slots - 1)
                tl.debug_barrier()  # what all warps have stored is released by the one that counts
                if tl.atomic_add(of_item, 1, sem="acq_rel", scope="gpu") == here - 1:
                    tl.store(of_item, 0)
                    for inside_first in range(0, part_rows, ROWS):
                        combine_rows(
                            o_ptr, lse_ptr, part_ptr, sink_ptr, o_strides, b, tile, head, here,
                            slot - tl.cast(part, tl.int64) * heads_k, inside_first, begin, rows, cu_seqlens_q is not None,
                            heads_k, len_q, slots, part_rows, GROUP, DIM_V, BLOCK_M, BLOCK_DV, ROWS, AT_ONCE, ".cg",
                        )  # fmt: skip
            return
    if sink_ptr is not None:  # once, where all keys have been seen
        acc, m, l = add_sink(acc, m, l, tl.load(sink_ptr + heads, mask=real, other=0.0) * LOG2E)
    o, lse = finish(acc, m, l, 1.0)
    o_rows = batch_of_q * o_strides[0] + (begin + tokens).to(tl.int64) * o_strides[1] + heads.to(tl.int64) * o_strides[2]
    tl.store(
        o_ptr + o_rows[:, None] + dims[None, :], o.to(o_ptr.dtype.element_ty), mask=real[:, None] & (dims < DIM_V)[None, :]
    )
    if lse_ptr is not None:
        line = (batch_of_q * (heads_k * GROUP) + heads) * len_q + begin + tokens
        tl.store(lse_ptr + line, lse, mask=real)
