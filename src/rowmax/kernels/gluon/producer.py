"""The warp of `forward.py` that fetches: which rows are next, where they lie, and loads in the order of their use."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rowmax.kernels.address import extent, in_group
from rowmax.kernels.gluon.build import BATCH, BEGIN_K, BEGIN_Q, HEAD, ROW, ROWS, SLOTS, START
from rowmax.kernels.gluon.layouts import number_layout
from rowmax.kernels.gluon.names import as_bits, let_next_begin
from rowmax.kernels.gluon.ring import fill, fill_given, publish, told
from rowmax.kernels.tile_ops import clamp, early_tiles, end_key, key_ranges, key_tile_start

# ---- where the work lies ---------------------------------------------------------------------------------------------------


@gluon.jit
def _ordered(place, order, batch):
    """`(sequence, row_tile)`: tile `place` of a head in the order of `order.py`; within a sequence the last row tile first."""
    before = order + batch
    found = place * 0
    for first in range(0, batch, 128):
        i = first + gl.arange(0, 128, layout=number_layout(gl.num_warps()))
        end = gl.load(before + i + 1, mask=i < batch, other=2147483647)
        found += gl.sum(gl.where(end <= place, 1, 0), 0)
    return gl.load(order + found), gl.load(before + found + 1) - 1 - place


@gluon.jit
def locate(tile, work, BUILD: gl.constexpr):
    """`(row, head, b, sequence, begin_q, len_q, begin_k, len_k)` of a tile. Packed: `b` is 0.

    Heads come in groups of `members`, whose K/V stay in L2; inside a group the last row tile of every head first, which with a
    causal mask is the longest.
    """
    cu_seqlens_q, cu_seqlens_k, order, batch, heads, tiles, members, len_q, len_k = work
    BLOCK_M: gl.constexpr = BUILD.CONSUMERS * ROWS
    every = heads
    if not BUILD.PACKED:
        every = heads * batch
    head, place = in_group(tile, every, tiles, members)
    if BUILD.PACKED:
        sequence, row_tile = _ordered(place, order, batch)
        begin_q, own_q = extent(cu_seqlens_q, sequence, len_q)
        begin_k, own_k = extent(cu_seqlens_k, sequence, len_k)
        return row_tile * BLOCK_M, head, tile * 0, sequence, begin_q, own_q, begin_k, own_k
    else:
        row = (tiles - 1 - place) * BLOCK_M
        return row, head % heads, head // heads, tile * 0, tile * 0, len_q, tile * 0, len_k


# ---- producer --------------------------------------------------------------------------------------------------------------


@gluon.jit
def _next(tile, counter, BUILD: gl.constexpr):
    if BUILD.SCHEDULE == "static":
        return tile + gl.num_programs(0)
    else:
        return gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)


@gluon.jit
def _counted(work):
    """`(work, total)` with the row tiles that packed sequences really have."""
    cu_seqlens_q, cu_seqlens_k, order, batch, heads, _tiles, members, len_q, len_k = work
    tiles = gl.load(order + 2 * batch)
    return (cu_seqlens_q, cu_seqlens_k, order, batch, heads, tiles, members, len_q, len_k), tiles * heads


@gluon.jit
def _of_head(head, sequence, heads, bent, BUILD: gl.constexpr):
    """Bits of the slope, in units of scores, and of the sink, in units of log2."""
    slopes_ptr, sink_ptr, unit = bent
    slope = head * 0
    sink = head * 0
    if BUILD.ALIBI != "":
        if BUILD.PER_SEQUENCE:
            slopes_ptr += sequence.to(gl.int64) * heads
        slope = as_bits(gl.load(slopes_ptr + head) * 1.4426950408889634 / unit)
    if BUILD.SINK:
        sink = as_bits(gl.load(sink_ptr + head) * 1.4426950408889634)
    return slope, sink


@gluon.jit
def announce(tile, round, work, bent, band, total, slots, BUILD: gl.constexpr):
    """Tell the consumers of a tile; none left: of one with 0 turns. Returns the turns.

    Rows that see nothing take one turn too, in which every element is masked.
    """
    _cu_q, _cu_k, _order, batch, heads, _tiles, _members, total_q, _total_k = work
    turns = round * 0
    if tile < total:
        row, head, b, sequence, begin_q, len_q, begin_k, len_k = locate(tile, work, BUILD)
        last = gl.minimum(row + BUILD.CONSUMERS * ROWS, len_q) - 1
        ranges = key_ranges(row, last, len_k, len_k - len_q, band, BUILD.BLOCK_N)
        start, full_start, full_end, end = ranges[0], ranges[1], ranges[2], ranges[3]
        early = early_tiles(start, band, BUILD.BLOCK_N)
        if BUILD.STEADY and BUILD.BANDED:  # a row that sees all of a key tile, and nothing behind, finds its pivot there
            before = clamp(end_key(row, len_k - len_q, len_k, band) - 1, 0, len_k) // BUILD.BLOCK_N * BUILD.BLOCK_N
            full_end = gl.where(full_end < end, gl.maximum(before, full_start), full_end)
        turns = gl.maximum(early + gl.cdiv(end - start, BUILD.BLOCK_N), 1)
        if BUILD.PACKED:
            flag = head * (total_q // ROWS + batch) + begin_q // ROWS + sequence + row // ROWS
        else:
            flag = (b * heads + head) * gl.cdiv(total_q, ROWS) + row // ROWS
        full = early + (full_start - start) // BUILD.BLOCK_N
        full_end = early + (full_end - start) // BUILD.BLOCK_N
        numbers = (turns, row, head, b, flag, start, full, full_end, begin_q, len_q, begin_k, len_k)
        if BUILD.DROPS:
            own = _of_head(head, b + sequence, heads, bent, BUILD)
            publish(slots, numbers + own + (b + sequence,), round, SLOTS)
        elif BUILD.ALIBI != "" or BUILD.SINK:
            publish(slots, numbers + _of_head(head, b + sequence, heads, bent, BUILD), round, SLOTS)
        else:
            publish(slots, numbers, round, SLOTS)
    else:
        publish(slots, (turns, turns, turns, turns, turns, turns, turns, turns, turns, turns, turns, turns), round, SLOTS)
    return turns


@gluon.jit
def producer(work, bent, band, total, counter, sources, buffers, rings, slots, BUILD: gl.constexpr):
    """Fetches all that the tiles of a block need. `round` counts tiles, `turn` key tiles.

    The next tile is taken as late as its first loads allow, with two key tiles of this one to go: a tile taken early is one
    that a block which comes to its end before cannot have. To locate it takes longer than to compute a key tile.
    """
    q_source, k_source, v_source, _o_source, q2_source, k2_source, given_source = sources
    q_buffers, k_buffers, v_buffers, _o_buffers, q2_buffers, k2_buffers, given_buffers = buffers
    q_ring, k_ring, v_ring, given_ring = rings
    q_parts = (q_buffers, q_source, q2_buffers, q2_source)
    k_parts = (k_buffers, k_source, k2_buffers, k2_source)
    v_parts = (v_buffers, v_source, v_buffers, v_source)
    SECOND: gl.constexpr = BUILD.BLOCK_D if BUILD.BLOCK_D2 > 0 else 0
    let_next_begin()  # the guard
    round = gl.program_id(0) * 0
    turn = round * 0
    tile = gl.program_id(0)
    if BUILD.PACKED:
        work, total = _counted(work)
    turns = announce(tile, round, work, bent, band, total, slots, BUILD)
    while turns > 0:
        b = told(slots, round, SLOTS, BATCH)
        head = told(slots, round, SLOTS, HEAD)
        first = told(slots, round, SLOTS, BEGIN_Q) + told(slots, round, SLOTS, ROW)
        for c in gl.static_range(BUILD.CONSUMERS):
            fill(q_ring, q_parts, b, first + c * ROWS, head, round, BUILD.Q_STAGES, c, BUILD.CONSUMERS, SECOND)
        group = head // BUILD.GROUP
        begin = told(slots, round, SLOTS, BEGIN_K)
        start = told(slots, round, SLOTS, START)
        following = turns * 1
        for j in range(turns):
            col = begin + key_tile_start(turns - 1 - j, start, band, BUILD.BLOCK_N)
            fill(k_ring, k_parts, b, col, group, turn, BUILD.STAGES, 0, 1, SECOND)
            if BUILD.GIVEN != "":
                row = told(slots, round, SLOTS, ROW)
                for c in gl.static_range(BUILD.CONSUMERS):
                    own = row + c * ROWS if BUILD.GIVEN_ROWS > 1 else 0
                    place = (b * BUILD.GIVEN_BATCH, head * BUILD.GIVEN_HEAD, own, col)
                    fill_given(
                        given_ring, (given_buffers, given_source), place, turn,
                        BUILD.GIVEN_STAGES, c, BUILD.CONSUMERS, BUILD.GIVEN_APART,
                    )  # fmt: skip
            fill(v_ring, v_parts, b, col, group, turn, BUILD.STAGES, 0, 1, 0)
            turn += 1
            if j == gl.maximum(turns - 2, 0):
                tile = _next(tile, counter, BUILD)
                following = announce(tile, round + 1, work, bent, band, total, slots, BUILD)
        turns = following
        round += 1
    if BUILD.SCHEDULE == "dynamic":  # whoever got `total - 1` is the last to add: it leaves 0 to the next call
        gl.store(counter, 0, mask=tile == total - 1 + gl.num_programs(0))
