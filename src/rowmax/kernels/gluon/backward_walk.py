"""What the blocks of the Hopper backward do: which key tile is whose, and over which queries it walks, in which order.

Used by `backward.py`, `backward_wide_keys.py` and `backward_wide_queries.py`, whose `BUILD` says the sizes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rowmax.kernels.address import extent, find_sequence, in_group
from rowmax.kernels.gluon.layouts import number_layout
from rowmax.kernels.tile_ops import query_ranges

KEYS = gl.constexpr(64)  # of a consumer
NOWHERE = gl.constexpr(0x40000000)  # a row past the end of every tensor
# What is not needed in every turn: in shared memory instead of registers.
COL, HEAD, BATCH, FLAG, BEGIN_K, LEN_K, BEGIN_Q, LEN_Q, SHIFT, TOTAL_K = map(gl.constexpr, range(10))
NOTES = gl.constexpr(10)  # behind them, slopes of a group in units of log2, or a soft-cap


@gluon.jit
def locate(tile, work, BUILD: gl.constexpr):
    """`(col, head, b, sequence, begin_k, len_k, begin_q, len_q)` of a key tile; `head` is one of K.

    Heads come in groups of `members`, whose Q and dO stay in L2; inside a group the first key tile of every head first, which
    with a causal mask is the longest. Packed: `b` is 0, and a surplus tile starts at or past its sequence's end.
    """
    cu_seqlens_q, cu_seqlens_k, batch, heads, tiles, members, len_q, len_k = work
    BLOCK_N: gl.constexpr = BUILD.CONSUMERS * KEYS
    every = heads
    if not BUILD.PACKED:
        every = heads * batch
    head, key_tile = in_group(tile, every, tiles, members)
    if BUILD.PACKED:
        sequence = find_sequence(key_tile, cu_seqlens_k, batch, BLOCK_N)
        begin_k, own_k = extent(cu_seqlens_k, sequence, len_k)
        begin_q, own_q = extent(cu_seqlens_q, sequence, len_q)
        col = (key_tile - begin_k // BLOCK_N - sequence) * BLOCK_N
        return gl.where(col < 0, own_k, col), head, tile * 0, sequence, begin_k, own_k, begin_q, own_q
    else:
        return key_tile * BLOCK_N, head % heads, head // heads, tile * 0, tile * 0, len_k, tile * 0, len_q


@gluon.jit
def ranges_of(col, begin_q, len_q, len_k, band, BUILD: gl.constexpr):
    """`(turns, row, full, full_end)`: `row`, counted in the tensor, is where the query tile of the first turn starts.

    Turns go from the last rows to the first, and at each through the heads of the group: the key tiles of a causal head end at
    the same row, so that those side by side read the same Q and dO, and add to the same dQ, at about the same time, in L2.
    All queries of tiles from `full` to before `full_end` see all keys of the tile.
    """
    BLOCK_N: gl.constexpr = BUILD.CONSUMERS * KEYS
    last = gl.minimum(col + BLOCK_N, len_k) - 1
    start, full, full_end, end = query_ranges(col, last, len_q, len_k - len_q, band, BUILD.BLOCK_M)
    if col + BLOCK_N > len_k:  # keys past the end
        full_end = full
    tiles = gl.cdiv(end - start, BUILD.BLOCK_M)
    turns = gl.where(col < len_k, BUILD.GROUP * tiles, 0)
    return turns, begin_q + start + (tiles - 1) * BUILD.BLOCK_M, begin_q + full, begin_q + full_end


@gluon.jit
def place_of(turn, line, ranges, BUILD: gl.constexpr):
    """`(row, line)` of a turn, for the first line of the group: all its heads, then the query tile before."""
    _turns, row, _full, _full_end = ranges
    return row - turn // BUILD.GROUP * BUILD.BLOCK_M, line + turn % BUILD.GROUP


@gluon.jit
def _place_before(turn, line, ranges, BUILD: gl.constexpr):
    """Of the turn before; of the first turn, rows past the last of all."""
    row, line = place_of(turn - 1, line, ranges, BUILD)
    return gl.where(turn == 0, NOWHERE, row), gl.where(turn == 0, 0, line)


@gluon.jit
def _note(notes, FIELD: gl.constexpr):
    return gl.max(notes.index(FIELD).load(number_layout(gl.num_warps())), 0)
