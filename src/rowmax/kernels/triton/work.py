"""What each program of `gluon/latent.py` has to do, found out ahead of it: the parts of `parts.py`, as lines of numbers.

Gluon's kernel has rows, keys and results to move and no registers to spare for where they lie. Launched in front of it by
`kernels/latent_launch.py`, and behind it the kernel that joins the parts, which reads of the same lines whether there are any:
`combine_kernel` looks through all lengths in each of its programs to find out.
"""

import triton
import triton.language as tl

from rowmax.kernels.triton.combine import combine_rows
from rowmax.kernels.triton.parts import find_part, key_span, keys_of, queries_of

FIELDS: tl.constexpr = tl.constexpr(16)  # of a line, in the order of the tuple below
WHOLE: tl.constexpr = tl.constexpr(1)  # kinds of work: rows that have no other part; 0: nothing is to be done
PART: tl.constexpr = tl.constexpr(2)


@triton.jit
def work_kernel(
    work_ptr,  # int64 [programs, FIELDS]
    seqlens_k, cu_seqlens_q,  # [B], [B + 1] or None
    o_strides,  # (batch, row, head); the batch's is 0 if packed
    band, batch, tiles, len_q, len_k, parts, slots,
    GROUP: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr,
    BATCH: tl.constexpr,
):  # fmt: skip
    """One program for each of the other kernel's, whose arguments these are; BLOCK_M divides GROUP, so that the rows of a tile
    are of one query and see the same keys. All heads share one KV head."""
    pid = tl.program_id(0)
    line = work_ptr + pid * FIELDS
    b, tile, _head, part, here, slot = find_part(
        pid, seqlens_k, cu_seqlens_q, batch, 1, tiles, len_q, len_k, parts, band, GROUP, BLOCK_M, BLOCK_N, LEAST, BATCH
    )
    kind = 0
    if tile >= 0:
        begin, queries = queries_of(cu_seqlens_q, b, len_q)
        if tile * BLOCK_M < queries * GROUP:
            kind = PART if here > 1 else WHOLE
            start, end = key_span(tile, queries, keys_of(seqlens_k, b, len_k), band, GROUP, BLOCK_M, BLOCK_N)
            turns = tl.cdiv(end - start, BLOCK_N)
            each = tl.cdiv(turns, here)
            low = tl.minimum(part * each, turns)
            high = tl.minimum(low + each, turns)
            head = tile * BLOCK_M % GROUP
            token = begin + tile * BLOCK_M // GROUP
            b64 = tl.cast(b, tl.int64)
            of_q = b64 if cu_seqlens_q is None else b64 * 0
            out = of_q * o_strides[0] + tl.cast(token, tl.int64) * o_strides[1] + tl.cast(head, tl.int64) * o_strides[2]
            row = tl.cast(slot, tl.int64) * BLOCK_M
            sums = tl.cast(slots, tl.int64) * BLOCK_M
            tl.store(line, b)
            tl.store(line + 1, of_q)
            tl.store(line + 2, token)
            tl.store(line + 3, head)
            tl.store(line + 4, start // BLOCK_N + low)  # the first tile of keys
            tl.store(line + 5, high - low)
            tl.store(line + 6, end)  # of the keys that the rows see
            tl.store(line + 8, out)  # where O of the first row begins
            tl.store(line + 9, o_strides[2])
            tl.store(line + 10, (of_q * GROUP + head) * len_q + token)  # its LSE
            tl.store(line + 11, len_q)
            tl.store(line + 12, row * DIM_V)  # of a partial result, acc, m and l
            tl.store(line + 13, sums * DIM_V + row)
            tl.store(line + 14, sums * (DIM_V + 1) + row)
    tl.store(line + 7, kind)
    tl.store(line + 15, tl.where((kind == PART) & (part == 0), here, 0))  # parts that are to be joined, of an item's first one
    if kind == 0:
        tl.store(line + 5, 0)


@triton.jit
def join_kernel(
    o_ptr, lse_ptr, part_ptr, work_ptr, o_strides, len_q, slots, pieces,
    PACKED: tl.constexpr, GROUP: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """`pieces` programs for each of the other kernel's, for ROWS rows each; those of an item's first part join its parts. The
    rows are heads of one query, so that the tile is that of its heads, and the sequence one that begins at its token."""
    pid = tl.program_id(0)
    line = work_ptr + pid // pieces * FIELDS
    here = tl.load(line + 15).to(tl.int32)
    if here <= 1:
        return
    b = tl.load(line).to(tl.int32)
    token = tl.load(line + 2).to(tl.int32)
    tile = tl.load(line + 3).to(tl.int32) // BLOCK_M
    slot = tl.load(line + 12) // (BLOCK_M * DIM_V)
    combine_rows(
        o_ptr, lse_ptr, part_ptr, None, o_strides, b, tile, 0, here, slot, pid % pieces * ROWS, token, GROUP,
        PACKED, 1, len_q, slots, BLOCK_M, GROUP, DIM_V, BLOCK_M, DIM_V, ROWS, AT_ONCE, "",
    )  # fmt: skip
