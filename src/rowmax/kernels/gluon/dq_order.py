"""dQ added up in a fixed order, so that a backward is bitwise repeatable: for `backward.py`, where `BUILD.ORDERED`.

    dQ[i] = ((dS[i, j0]^T K[j0] + dS[i, j0 + 1]^T K[j0 + 1]) + ...),  j0: the first key tile that query tile i sees

Each query tile of a head has a counter of the key tiles that have added their share. A block adds its own when the counter says
that all key tiles before it have; it counts itself when its sum has arrived in memory.

Nobody waits for ever. A block waits only for blocks of its head (and sequence) with key tiles before its own. Those have
earlier numbers: `locate` deals out the key tiles of a head in ascending order, and a block draws its number when it runs. So
the block with the lowest number of those unfinished waits for nobody, and it runs. Which key tiles add to a query tile is
arithmetic (`_turn_of`): those between the first that its first row sees and a block that comes here, as both ends of what a
key tile walks over rise with the key tile; and before these all of first keys that no left side hides. That all of them exist
is known of sequences that lie one behind the other; `cu_seqlens` that say otherwise are wrong, and then nobody waits.

Nobody waits for long. All blocks of a head walk from its last query tile to the first, and in the order in which they start, so
that a block comes to a query tile when the one before it has left. (Beside first keys that stay in sight others do wait: the
key tile of those walks over all queries, and they over few.) Consumers do not wait themselves: they lay dQ into one of two
buffers, which two warps empty in turn; one waits for a counter or for a sum to arrive while the other does so for the next
turn. That dQ has been laid down they learn from the ring of dS: a consumer gives dS of a turn after dQ of the one before.
Beside a bias or a mask there is room for one buffer alone. Then consumers wait until dQ of the turn before is on its way.

What orders the sums: `cp.async.bulk.wait_group` (not `.read`) returns when a sum has been performed in memory, and completion
includes a fence from TMA's accesses to ordinary ones; the counter is then raised with release and read with acquire, which a
fence to TMA's accesses follows before the next sum. Source: the counters are those of FlashAttention's deterministic backward.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rowmax.kernels.gluon.backward_walk import BEGIN_Q, COL, KEYS, LEN_K, LEN_Q, _note, place_of
from rowmax.kernels.gluon.layouts import number_layout
from rowmax.kernels.gluon.names import count_up, store_wait, tma_add, wait_count, wait_sums
from rowmax.kernels.gluon.ring import buffer_of, open_ring, release, wait_empty, wait_full
from rowmax.kernels.tile_ops import clamp, early_keys, first_key

SIDE = gl.constexpr(64)  # rows and columns of dQ that are added at once
ADDERS = gl.constexpr(2)  # warps that add dQ, each of every ADDERS-th turn; as many turns' dS are in shared memory
AT_ONCE = gl.constexpr(32)  # sequences that a warp looks at together


@gluon.jit
def draw_number(counts_ptr):
    """Of the block: 0 for the first to ask."""
    return gl.atomic_add(counts_ptr, 1, sem="relaxed")


@gluon.jit
def open_slots_of_sums(BUILD: gl.constexpr):
    """The ring of dQ in shared memory; only "empty" is used, see above."""
    return open_ring(BUILD.SLOTS, 1)


@gluon.jit
def buffer_of_sum(buffer):
    """`[columns, rows]` of a part of dQ: transposed, because stores of it meet no bank twice (`layouts.sum_layout`)."""
    return buffer.reshape([SIDE, SIDE]).permute((1, 0))


@gluon.jit
def lay_down(dq, dq_buffers, sum_ring, turn, CONSUMER: gl.constexpr, BUILD: gl.constexpr):
    """A consumer's part of dQ of the turn before. What was written to shared memory before is fenced as well."""
    wait_empty(sum_ring, turn, BUILD.SLOTS)
    buffer_of_sum(dq_buffers.index(buffer_of(turn, BUILD.SLOTS) * BUILD.CONSUMERS + CONSUMER)).store(dq)
    fence_async_shared()


@gluon.jit
def _one_behind_the_other(cu_seqlens, batch, total):
    """1 if the sequences of a packed tensor of `total` rows ascend in it, else 0."""
    places = gl.arange(0, AT_ONCE, layout=number_layout(gl.num_warps()))
    wrong = gl.where((gl.load(cu_seqlens) < 0) | (gl.load(cu_seqlens + batch) > total), 1, 0)
    for first in range(0, batch, AT_ONCE):
        here = first + places
        begin = gl.load(cu_seqlens + here, mask=here < batch, other=0)
        end = gl.load(cu_seqlens + here + 1, mask=here < batch, other=0)
        wrong = gl.maximum(wrong, gl.max(gl.where(end < begin, 1, 0), 0))
    return 1 - wrong


@gluon.jit
def _turn_of(row, notes, band, BUILD: gl.constexpr):
    """How many key tiles add to the query tile at `row` of its sequence before this one.

    Those of early keys all do; of others, those from the first one that the row sees.
    """
    BLOCK_N: gl.constexpr = BUILD.CONSUMERS * KEYS
    len_k = _note(notes, LEN_K)
    first = clamp(first_key(row, len_k - _note(notes, LEN_Q), band), 0, len_k)
    if band.__len__() > 2:
        tile = _note(notes, COL) // BLOCK_N
        early = gl.cdiv(early_keys(first, band), BLOCK_N)
        return gl.where(tile < early, tile, tile - gl.maximum(first // BLOCK_N - early, 0))
    else:
        return _note(notes, COL) // BLOCK_N - first // BLOCK_N


@gluon.jit
def _adder(line, ranges, notes, band, order, dq_source, dq_buffers, rings, WRITER: gl.constexpr, BUILD: gl.constexpr):
    """One of ADDERS warps: adds every ADDERS-th dQ to memory.

    `order`: counters, where those of this sequence begin in a line, and how many a line has; packed, also cu_seqlens of keys,
    how many sequences there are, and rows of K.
    """
    share_ring, sum_ring = rings
    counts_ptr, first_count, line_counts, cu_seqlens_k, batch, total_k = order
    turns, _row, _full, _full_end = ranges
    ACROSS: gl.constexpr = BUILD.BLOCK_D // SIDE  # parts side by side
    waits = 1
    if BUILD.PACKED:
        if turns > 0:
            waits = _one_behind_the_other(cu_seqlens_k, batch, total_k)
    counts_ptr += first_count
    for use in range(WRITER, gl.where(turns > 0, turns + 1, 0), ADDERS):
        wait_full(share_ring, use, ADDERS)
        if use == 0:  # there is no turn before
            release(sum_ring, use, BUILD.SLOTS)
        else:
            row, own_line = place_of(use - 1, line, ranges, BUILD)
            own_row = row - _note(notes, BEGIN_Q)
            count_ptr = counts_ptr + (own_line.to(gl.int64) * line_counts + own_row // BUILD.BLOCK_M)
            wait_count(count_ptr, waits * _turn_of(own_row, notes, band, BUILD))
            for part in gl.static_range(BUILD.CONSUMERS):
                buffer = dq_buffers.index(WRITER % BUILD.SLOTS * BUILD.CONSUMERS + part)
                tma_add(dq_source, [own_line, row + part // ACROSS * SIDE, part % ACROSS * SIDE], buffer)
            store_wait(0)
            release(sum_ring, use, BUILD.SLOTS)
            wait_sums()
            count_up(count_ptr)
