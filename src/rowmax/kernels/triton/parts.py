"""Which part of the work a program of the decode and the combine kernel has.

An item is a tile of rows (query, head of a group) of one KV head of one sequence; its keys are shared out in parts. Lengths are
read on the device, clamped into the tensors. Both kernels call the same functions and so agree about every part.
"""

import triton
import triton.language as tl

from rowmax.kernels.tile_ops import clamp, end_key, first_key, share
from rowmax.plan import fixed_parts as where

SIZES: tl.constexpr = tl.constexpr(16)  # of parts that are weighed, up to twice the least
TO_BEGIN: tl.constexpr = tl.constexpr(2)  # tiles of keys in whose time a part begins and ends

first_tile = share(where.first_tile)
part_of = share(where.part_of)


@triton.jit
def keys_of(seqlens, b, most):
    """Keys of sequence b; dense: `most`."""
    if seqlens is None:
        return most
    else:
        return clamp(tl.load(seqlens + b), 0, most).to(tl.int32)


@triton.jit
def queries_of(cu_seqlens, b, len_q):
    """`(first row of q, queries)` of sequence b."""
    if cu_seqlens is None:
        return 0, len_q
    else:
        begin = clamp(tl.load(cu_seqlens + b), 0, len_q).to(tl.int32)
        end = clamp(tl.load(cu_seqlens + b + 1), begin, len_q).to(tl.int32)
        return begin, end - begin


@triton.jit
def find_item(item, cu_seqlens, batch, tiles, len_q, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """`(b, tile of b)`. Packed: sequence b owns the items from `rows before it // BLOCK_M + b` on; some are surplus, and may be
    counted below 0."""
    if cu_seqlens is None:
        return item // tiles, item % tiles
    else:
        low = 0
        high = batch
        while high - low > 1:
            middle = (low + high) // 2
            first = clamp(tl.load(cu_seqlens + middle), 0, len_q).to(tl.int32) * GROUP // BLOCK_M + middle
            if first <= item:
                low = middle
            else:
                high = middle
        return low, item - clamp(tl.load(cu_seqlens + low), 0, len_q).to(tl.int32) * GROUP // BLOCK_M - low


@triton.jit
def key_span(tile, queries, keys, band, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`(start, end)` of the keys that a row tile sees; the start is a multiple of BLOCK_N. Sums stay within 32 bits: the
    launcher bounds the band."""
    shift = keys - queries
    first = tile * BLOCK_M // GROUP
    last = (tl.minimum((tile + 1) * BLOCK_M, queries * GROUP) - 1) // GROUP
    start = clamp(first_key(first, shift, band), 0, keys) // BLOCK_N * BLOCK_N
    end = clamp(end_key(last, shift, keys, band), 0, keys)
    return start, tl.maximum(end, start)


@triton.jit
def fixed_parts(start, end, BLOCK_N: tl.constexpr, FIXED: tl.constexpr, DOUBLES: tl.constexpr):
    """`(first, one past the last)` of the parts that keys `[start, end)` lie in, by `plan/fixed_parts.py`; of no keys, none."""
    first = part_of(start // BLOCK_N, FIXED, DOUBLES)
    last = part_of(tl.maximum(tl.cdiv(end, BLOCK_N) - 1, 0), FIXED, DOUBLES)
    return first, tl.where(end > start, last + 1, first)


@triton.jit
def shares(
    seqlens, cu_seqlens, batch, heads_k, len_q, most, programs, band,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """For every sequence, `[BATCH]`: `(its number, row tiles, parts of each)`; of all heads together about `programs` parts.

    A part has the same number of key tiles at most for all, so that long sequences have many; the number is that of SIZES by
    which the programs would end first. Sequences without rows have no parts.
    """
    b = tl.arange(0, BATCH)
    there = b < batch
    keys = clamp(tl.load(seqlens + b, mask=there, other=0), 0, most).to(tl.int32)
    if cu_seqlens is None:
        queries = tl.where(there, len_q, 0)
    else:
        begin = clamp(tl.load(cu_seqlens + b, mask=there, other=0), 0, len_q).to(tl.int32)
        queries = clamp(tl.load(cu_seqlens + b + 1, mask=there, other=0), begin, len_q).to(tl.int32) - begin
    tiles = tl.cdiv(queries * GROUP, BLOCK_M)
    seen = keys  # of the row tile that sees most, nearly
    if band.left is not None and band.right is not None:
        seen = tl.minimum(keys, band.left + band.right + 1 + tl.minimum(queries, (BLOCK_M + GROUP - 1) // GROUP))
    turns = tl.cdiv(seen, BLOCK_N)
    work = tl.sum(tiles.to(tl.int64) * turns, 0) * heads_k
    least = tl.maximum(tl.minimum(tl.cdiv(work, programs), tl.max(turns, 0)), LEAST).to(tl.int32)
    # Larger parts may be fewer than programs run beside each other, where parts of the least size are a few more.
    size = least[None] + least[None] * tl.arange(0, SIZES) // SIZES
    parts = tl.maximum(tl.cdiv(turns[None, :], size[:, None]), 1)  # [SIZES, BATCH]
    count = tl.sum(tiles[None, :] * parts, 1) * heads_k
    alone = size + TO_BEGIN
    time = tl.where(count <= programs, alone, tl.cdiv(work + TO_BEGIN * count.to(tl.int64), programs) + alone)
    best = tl.min(tl.where(time == tl.min(time, 0), size, 2 * least), 0)
    return b, tiles, tl.maximum(tl.cdiv(turns, best), 1)


@triton.jit
def find_part(
    pid, seqlens, cu_seqlens, batch, heads_k, tiles, len_q, most, parts, band,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """`(b, tile, head, part, parts of the item, slot)` of a program: heads side by side, then parts, tiles, sequences.

    BATCH 0: every item has `parts` parts, or with FIXED up to as many. Otherwise `parts` is about how many there are in all.
    A program without work gets tile -1. The slot is where the partial result goes, if the item has several parts.
    """
    head = pid % heads_k
    line = pid // heads_k
    if BATCH == 0:
        b, tile = find_item(line // parts, cu_seqlens, batch, tiles, len_q, GROUP, BLOCK_M)
        return b, tile, head, line % parts, parts, pid.to(tl.int64)
    else:
        number, own_tiles, own_parts = shares(
            seqlens, cu_seqlens, batch, heads_k, len_q, most, parts, band, GROUP, BLOCK_M, BLOCK_N, LEAST, BATCH
        )
        lines = own_tiles * own_parts
        b = tl.sum((tl.cumsum(lines, 0) <= line).to(tl.int32), 0)
        before = tl.sum(tl.where(number < b, lines, 0), 0)
        slots = tl.sum(tl.where((number < b) & (own_parts > 1), lines, 0), 0)
        here = tl.maximum(tl.sum(tl.where(number == b, own_parts, 0), 0), 1)
        tile = tl.where(b < batch, (line - before) // here, -1)
        return b, tile, head, (line - before) % here, here, (slots + line - before).to(tl.int64) * heads_k + head


@triton.jit
def find_slots(
    b, tile, item, head, queries, seqlens, cu_seqlens, batch, heads_k, len_q, most, parts, band,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr, BATCH: tl.constexpr,
    FIXED: tl.constexpr, DOUBLES: tl.constexpr,
):  # fmt: skip
    """`(parts, first slot)` of an item; its parts lie `heads_k` slots apart. The other way round from `find_part`."""
    if FIXED:
        start, end = key_span(tile, queries, keys_of(seqlens, b, most), band, GROUP, BLOCK_M, BLOCK_N)
        first, last = fixed_parts(start, end, BLOCK_N, FIXED, DOUBLES)
        return last - first, item.to(tl.int64) * parts * heads_k + head
    elif BATCH == 0:
        return parts, item.to(tl.int64) * parts * heads_k + head
    else:
        number, own_tiles, own_parts = shares(
            seqlens, cu_seqlens, batch, heads_k, len_q, most, parts, band, GROUP, BLOCK_M, BLOCK_N, LEAST, BATCH
        )
        slots = tl.sum(tl.where((number < b) & (own_parts > 1), own_tiles * own_parts, 0), 0)
        here = tl.sum(tl.where(number == b, own_parts, 0), 0)
        return here, (slots + tile * here).to(tl.int64) * heads_k + head


@triton.jit
def join(acc, m, l, acc_j, m_j, l_j):
    """The union of two disjoint sets of keys, m in units of log2. A row that has seen nothing has m = -inf."""
    m_new = tl.maximum(m, m_j)
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
    mine = tl.exp2(m - pivot)
    other = tl.exp2(m_j - pivot)
    acc = tl.fma(acc_j, tl.broadcast_to(other[:, None], acc_j.shape), acc * mine[:, None])
    return acc, m_new, tl.fma(l_j, other, l * mine)
