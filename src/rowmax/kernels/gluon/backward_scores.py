"""Scores of the Hopper backward to weights: soft-cap, ALiBi, what is given for pairs, and what queries do not see.

    P = exp(scale S + bias - LSE),                or  P = exp(cap t - LSE) with t = tanh(scale S / cap),
    dS = P (dP - delta),                          or  dS = P (1 - t^2) (dP - delta)

Scores are transposed, `[keys, queries]`. Of a soft-cap, P is needed twice: in 16 bits as the first factor of dV, and times
1 - t^2 until dP is there; that product takes the registers of S, so that a turn needs no more of them than without a cap
(`backward_names.capped_weights`). As in `scores.py`, tanh is a polynomial where all arguments of a warp are small.

What is given for pairs, a bias or a mask, comes as tiles `[queries, keys]` through a ring of each consumer, which gives its
buffer back as soon as it has read it. Read the other way round, 16 bits come by `ldmatrix.trans`. Used by `backward.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rowmax.kernels.gluon.backward_names import HIDDEN, add_bias, capped_weights
from rowmax.kernels.gluon.backward_walk import BEGIN_Q, COL, KEYS, LEN_K, LEN_Q, NOTES, _note
from rowmax.kernels.gluon.index import along
from rowmax.kernels.gluon.layouts import column_layout, number_layout, row_layout
from rowmax.kernels.gluon.names import any_above, as_number
from rowmax.kernels.gluon.ring import buffer_of, fill_given, open_ring, release, release_read, wait_full
from rowmax.kernels.gluon.scores import BOUND, slopes_of_keys
from rowmax.kernels.tile_ops import end_query, first_query

LOWEST = gl.constexpr(HIDDEN)


@gluon.jit
def hide_queries(p, row, col, len_q, len_k, band, hidden):
    """`hidden` where a query does not see a key. Queries are 8 i + 2 t + e; a thread has every i: constants to compare with."""
    parts = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    LAYOUT: gl.constexpr = parts.type.layout
    cols = col + along(p.shape[0], LAYOUT, 0)
    eights = 8 * along(parts.shape[1], LAYOUT, 1)
    own = row + 2 * along(4, LAYOUT, 2) + along(2, LAYOUT, 3)
    end = gl.minimum(end_query(cols, len_k - len_q, len_q, band), len_q)
    seen = eights < gl.where(cols < len_k, end, 0) - own
    if band.right is not None or band.__len__() > 2:
        seen = seen & (eights >= first_query(cols, len_k - len_q, band) - own)
    return gl.convert_layout(gl.where(seen, parts, hidden).reshape(p.shape), p.type.layout)


@gluon.jit
def _far(z):
    """For each key, 1.0 if its warp holds an argument of tanh that the polynomial does not take, else 0.0."""
    return any_above(gl.max(gl.abs(z), 1), BOUND)


@gluon.jit
def _weights_of_capped(z, lse, place, edge, unit, band, dtype: gl.constexpr):
    """`(weights, p)`. What is hidden has no say in how the cap is computed."""
    row, col, len_q, len_k = place
    if edge:
        z = hide_queries(z, row, col, len_q, len_k, band, LOWEST)
        far = _far(gl.where(z == LOWEST, 0.0, z))
    else:
        far = _far(z)
    own, z = gl.broadcast(gl.expand_dims(lse.load(column_layout(z.type.layout)), 0), z)
    wanted, z = gl.broadcast(gl.expand_dims(far, 1), z)
    return capped_weights(z, own, unit, wanted, dtype, z.shape[1] // 2)


@gluon.jit
def open_given(source, BUILD: gl.constexpr):
    """Ring, buffers and descriptor of what is given for pairs: a tile for each consumer, of its own keys."""
    tiles: gl.constexpr = BUILD.GIVEN_STAGES * BUILD.CONSUMERS
    shape: gl.constexpr = [tiles * BUILD.GIVEN_APART, 1, 1, BUILD.GIVEN_ROWS, KEYS]
    return open_ring(tiles, 1), gl.allocate_shared_memory(source.dtype, shape, source.layout), source


@gluon.jit
def fetch_given(given, b, head, row, first_key, turn, BUILD: gl.constexpr):
    """Producer: what is given for a turn."""
    ring, buffers, source = given
    own = row if BUILD.GIVEN_ROWS > 1 else 0
    for c in gl.static_range(BUILD.CONSUMERS):
        place = (b * BUILD.GIVEN_BATCH, head * BUILD.GIVEN_HEAD, own, first_key + c * KEYS)
        fill_given(ring, (buffers, source), place, turn, BUILD.GIVEN_STAGES, c, BUILD.CONSUMERS, BUILD.GIVEN_APART)


@gluon.jit
def _take_given(x, given, turn, CONSUMER: gl.constexpr, BUILD: gl.constexpr):
    """`x + bias`, x in units of log2, or x where the mask is set, else -inf; its buffer, `[queries, keys]`, is given back."""
    ring, buffers, _source = given
    wait_full(ring, turn, BUILD.GIVEN_STAGES, True, CONSUMER, BUILD.CONSUMERS)
    tile = buffers.index(buffer_of(turn, BUILD.GIVEN_STAGES, CONSUMER, BUILD.CONSUMERS) * BUILD.GIVEN_APART)
    if BUILD.GIVEN_ROWS == 1:
        line = gl.expand_dims(tile.reshape([KEYS]).load(row_layout(x.type.layout)), 1)
        own, x = gl.broadcast(line, x)
    else:
        own = tile.reshape([BUILD.BLOCK_M, KEYS]).permute((1, 0)).load(x.type.layout)
    if BUILD.GIVEN_STAGES < BUILD.STAGES:
        release_read(ring, turn, BUILD.GIVEN_STAGES, CONSUMER, BUILD.CONSUMERS)
    else:  # the next tile comes behind a Q that is fetched when products of these weights are done: no fence
        release(ring, turn, BUILD.GIVEN_STAGES, CONSUMER, BUILD.CONSUMERS)
    if BUILD.GIVEN == "bias":
        return add_bias(x, own.to(gl.float32))
    else:
        return gl.where(own != 0, x, float("-inf"))


@gluon.jit
def weights_of(
    s, lse, given, row, turn, ranges, notes, band, scale_log2, dtype: gl.constexpr, CONSUMER: gl.constexpr, BUILD: gl.constexpr,
    HIDES: gl.constexpr = True, LOADED: gl.constexpr = False,
):  # fmt: skip
    """`(weights, p)`: P as the first factor of dV, and what dP - delta is to be multiplied with.

    lse: in shared memory, unless it was `LOADED`.
    """
    _turns, _row, full, full_end = ranges
    edge = False
    if HIDES:
        edge = (row < full) | (row >= full_end)
    if BUILD.CAP:
        place = (row - _note(notes, BEGIN_Q), _note(notes, COL) + CONSUMER * KEYS, _note(notes, LEN_Q), _note(notes, LEN_K))
        unit = as_number(_note(notes, NOTES + 1))
        return _weights_of_capped(s * as_number(_note(notes, NOTES)), lse, place, edge, unit, band, dtype)
    else:
        x = s * scale_log2
        if BUILD.GIVEN != "":
            x = _take_given(x, given, turn, CONSUMER, BUILD)
        if not LOADED:
            lse = lse.load(column_layout(s.type.layout))
        if BUILD.ALIBI == "":
            p = gl.exp2(x - gl.expand_dims(lse, 0))
        else:
            slope = as_number(gl.max(notes.index(NOTES + turn % BUILD.GROUP).load(number_layout(gl.num_warps())), 0))
            own_row = row - _note(notes, BEGIN_Q)
            own_col = _note(notes, COL) + CONSUMER * KEYS
            shift = _note(notes, LEN_K) - _note(notes, LEN_Q)
            x = slopes_of_keys(x, own_row, own_col, shift, slope, BUILD.ALIBI == "around")
            p = gl.exp2(x - gl.expand_dims(lse, 0))
        if edge:
            col = _note(notes, COL) + CONSUMER * KEYS
            p = hide_queries(p, row - _note(notes, BEGIN_Q), col, _note(notes, LEN_Q), _note(notes, LEN_K), band, 0.0)
        return p.to(dtype), p
