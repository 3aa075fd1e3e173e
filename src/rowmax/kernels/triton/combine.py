"""Partial results of the decode kernel to results: (acc, m, l) of the parts of a row are joined in their order.

    m' = max(m, m_j),  l' = 2^(m - m') l + 2^(m_j - m') l_j,  acc' alike;   at the end O = acc / l, LSE = (m + log2 l) ln 2

Items with one part are already finished. Launched behind `decode.py` by `kernels/decode_launch.py`; or, in one launch with it,
`combine_rows` is called there by the program of an item that ends last.
"""

import triton
import triton.language as tl

from rowmax.kernels.tile_ops import add_sink, clamp, finish
from rowmax.kernels.triton.parts import find_item, find_slots, join, queries_of

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def combine_rows(
    o_ptr, lse_ptr, part_ptr, sink_ptr, o_strides, b, tile, head, here, slot, first, begin, rows, packed, heads_k, len_q,
    slots, part_rows,
    GROUP: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Rows `[first, first + ROWS)` of an item from its `here` parts, the first at `slot`; `rows` of its sequence in all, which
    begins at row `begin` of q if `packed`. `CACHE`: whose modifier the loads take."""
    inside = first + tl.arange(0, ROWS)
    row = tile * BLOCK_M + inside
    real = (row < rows) & (inside < part_rows)
    behind = tl.cast(slots, tl.int64) * part_rows
    dims = tl.arange(0, BLOCK_DV)
    mask = real[:, None] & (dims < DIM_V)[None, :]
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for first_part in range(0, here, AT_ONCE):
        loaded = ()
        for i in tl.static_range(AT_ONCE):
            there = first_part + i < here  # a part that is not there leaves acc, m and l as they are
            at = clamp(slot + tl.cast(first_part + i, tl.int64) * heads_k, 0, slots - 1)
            line = at * part_rows + inside
            acc_j = tl.load(
                part_ptr + line[:, None] * DIM_V + dims[None, :], mask=mask & there, other=0.0, cache_modifier=CACHE
            )
            line += behind * DIM_V
            m_j = tl.load(part_ptr + line, mask=real & there, other=float("-inf"), cache_modifier=CACHE)
            l_j = tl.load(part_ptr + line + behind, mask=real & there, other=0.0, cache_modifier=CACHE)
            loaded += (acc_j, m_j, l_j)  # type: ignore[assignment]
        tl.debug_barrier()  # the compiler would put a load behind what is done with those in front of it
        for i in tl.static_range(AT_ONCE):
            acc, m, l = join(acc, m, l, loaded[3 * i], loaded[3 * i + 1], loaded[3 * i + 2])
    tokens = begin + row // GROUP
    heads = head * GROUP + row % GROUP
    if sink_ptr is not None:
        acc, m, l = add_sink(acc, m, l, tl.load(sink_ptr + heads, mask=real, other=0.0) * LOG2E)
    o, lse = finish(acc, m, l, 1.0)
    b64 = tl.cast(b, tl.int64)
    batch_of_q = b64 * 0 if packed else b64
    o_rows = batch_of_q * o_strides[0] + tokens.to(tl.int64) * o_strides[1] + heads.to(tl.int64) * o_strides[2]
    tl.store(o_ptr + o_rows[:, None] + dims[None, :], o.to(o_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + (batch_of_q * (heads_k * GROUP) + heads) * len_q + tokens, lse, mask=real)


@triton.jit
def combine_kernel(
    o_ptr, lse_ptr, part_ptr, seqlens_k, cu_seqlens_q, sink_ptr, o_strides,
    band, batch, heads_k, tiles, len_q, len_k, parts, slots, part_rows, pieces,
    GROUP: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, LEAST: tl.constexpr, BATCH: tl.constexpr, FIXED: tl.constexpr, DOUBLES: tl.constexpr,
    EARLY: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program for ROWS rows of an item, which has `pieces` of them; the tensors are those of `decode_kernel`. `AT_ONCE`:
    parts whose loads are under way together: one after another, 32 parts waited for 32 answers of the cache."""
    pid = tl.program_id(0)
    piece = pid % pieces
    head = pid // pieces % heads_k
    item = pid // pieces // heads_k
    b, tile = find_item(item, cu_seqlens_q, batch, tiles, len_q, GROUP, BLOCK_M)
    begin, queries = queries_of(cu_seqlens_q, b, len_q)
    here, slot = find_slots(
        b, tile, item, head, queries, seqlens_k, cu_seqlens_q, batch, heads_k, len_q, len_k, parts, band,
        GROUP, BLOCK_M, BLOCK_N, LEAST, BATCH, FIXED, DOUBLES,
    )  # fmt: skip
    if EARLY:  # every program waits: the kernel behind this one relies on both
        tl.extra.cuda.gdc_wait()
    if (tile < 0) | (tile * BLOCK_M + piece * ROWS >= queries * GROUP) | (here <= 1):
        return
    combine_rows(
        o_ptr, lse_ptr, part_ptr, sink_ptr, o_strides, b, tile, head, here, slot, piece * ROWS, begin, queries * GROUP,
        cu_seqlens_q is not None, heads_k, len_q, slots, part_rows, GROUP, DIM_V, BLOCK_M, BLOCK_DV, ROWS, AT_ONCE, "",
    )  # fmt: skip
