"""Scores of rows to what dP - delta is to be multiplied with, for dQ above 128 head dimensions on Hopper.

    P = exp(scale S + bias - LSE),  or  P (1 - t^2) with P = exp(cap t - LSE) and t = tanh(scale S / cap)

What `backward_scores.py` is for transposed scores. A bias or a mask comes as tiles of 64 rows, or one, of a key tile, through a
ring of each consumer, which gives its buffer back at once. Used by `backward_wide_queries.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rowmax.kernels.gluon.backward_names import add_bias, capped_weights
from rowmax.kernels.gluon.backward_scores import LOWEST, _far
from rowmax.kernels.gluon.backward_walk import COL, LEN_K, LEN_Q, NOTES, _note
from rowmax.kernels.gluon.index import along, hide
from rowmax.kernels.gluon.layouts import axis_layout, column_layout
from rowmax.kernels.gluon.names import as_number
from rowmax.kernels.gluon.ring import buffer_of, fill_given, open_ring, release_read, wait_full
from rowmax.kernels.gluon.scores import add_slopes, slopes_behind

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # of a consumer


@gluon.jit
def open_given_rows(source, BUILD: gl.constexpr):
    """Ring, buffers and descriptor of what is given for pairs: a tile for each consumer, of its own rows."""
    tiles: gl.constexpr = BUILD.GIVEN_STAGES * CONSUMERS
    shape: gl.constexpr = [tiles * BUILD.GIVEN_APART, 1, 1, BUILD.GIVEN_ROWS, BUILD.BLOCK_N]
    return open_ring(tiles, 1), gl.allocate_shared_memory(source.dtype, shape, source.layout), source


@gluon.jit
def fetch_given_rows(given, place, turn, both, BUILD: gl.constexpr):
    """Producer: what is given for a turn, which the first consumer may not take."""
    ring, buffers, source = given
    b, head, row, col = place
    for c in gl.static_range(CONSUMERS):
        own = row + c * ROWS if BUILD.GIVEN_ROWS > 1 else 0
        to = (b * BUILD.GIVEN_BATCH, head * BUILD.GIVEN_HEAD, own, col)
        if c > 0 or both:
            fill_given(ring, (buffers, source), to, turn, BUILD.GIVEN_STAGES, c, CONSUMERS, BUILD.GIVEN_APART)


@gluon.jit
def _take_given_rows(x, given, turn, CONSUMER: gl.constexpr, BUILD: gl.constexpr):
    """`x + bias`, x in units of log2, or x where the mask is set, else -inf."""
    ring, buffers, _source = given
    wait_full(ring, turn, BUILD.GIVEN_STAGES, True, CONSUMER, CONSUMERS)
    tile = buffers.index(buffer_of(turn, BUILD.GIVEN_STAGES, CONSUMER, CONSUMERS) * BUILD.GIVEN_APART)
    if BUILD.GIVEN_ROWS == 1:
        own, x = gl.broadcast(gl.expand_dims(tile.reshape([BUILD.BLOCK_N]).load(column_layout(x.type.layout)), 0), x)
    else:
        own = tile.reshape([ROWS, BUILD.BLOCK_N]).load(x.type.layout)
    release_read(ring, turn, BUILD.GIVEN_STAGES, CONSUMER, CONSUMERS)
    if BUILD.GIVEN == "bias":
        return add_bias(x, own.to(gl.float32))
    else:
        return gl.where(own != 0, x, float("-inf"))


@gluon.jit
def _row_weights_of_capped(z, lse, place, edge, unit, band, dtype: gl.constexpr):
    """What is hidden has no weight, and no say in how the cap is computed."""
    row, col, len_q, len_k = place
    if edge:
        z = hide(z, row, col, len_k, len_k - len_q, band, LOWEST)
        far = _far(gl.where(z == LOWEST, 0.0, z))
    else:
        far = _far(z)
    own, z = gl.broadcast(lse, z)
    wanted, z = gl.broadcast(gl.expand_dims(far, 1), z)
    _weights, p = capped_weights(z, own, unit, wanted, dtype, z.shape[1] // 2)  # those of 16 bits nobody needs
    return p


@gluon.jit
def row_weights_of(
    s, lse, given, col, turn, ranges, notes, band, scale_log2, dtype: gl.constexpr, CONSUMER: gl.constexpr, BUILD: gl.constexpr
):  # fmt: skip
    """Of the keys from `col` on. lse: `[64, 1]`. But for a soft-cap, what rows do not see is not hidden yet."""
    _turns, _fewer, _start, full, full_end = ranges
    row = _note(notes, COL) + CONSUMER * ROWS
    if BUILD.CAP:
        edge = (col < full) | (col >= full_end)
        place = (row, col, _note(notes, LEN_Q), _note(notes, LEN_K))
        unit = as_number(_note(notes, NOTES + 1))
        return _row_weights_of_capped(s * as_number(_note(notes, NOTES)), lse, place, edge, unit, band, dtype)
    x = s * scale_log2
    if BUILD.GIVEN != "":
        x = _take_given_rows(x, given, turn, CONSUMER, BUILD)
    if BUILD.ALIBI != "":
        slope = as_number(_note(notes, NOTES))
        shift = _note(notes, LEN_K) - _note(notes, LEN_Q)
        if BUILD.ALIBI == "around":
            return gl.exp2(add_slopes(x, row, col, shift, slope) - lse)
        else:
            parts, own = slopes_behind(x, row, col, shift, slope)
            LAYOUT: gl.constexpr = parts.type.layout
            lse = gl.convert_layout(lse.reshape([s.shape[0]]), axis_layout(LAYOUT, 0))
            rows = slope * along(s.shape[0], LAYOUT, 0).to(gl.float32)  # which `slopes_behind` leaves to a maximum
            rows += gl.expand_dims(gl.expand_dims(gl.expand_dims(lse, 1), 2), 3)
            return gl.convert_layout(gl.exp2(parts - (rows - own)).reshape(s.shape), s.type.layout)
    else:
        return gl.exp2(x - lse)
