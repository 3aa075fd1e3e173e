"""Scores of rows to what dP - delta is to be multiplied with, for dQ above 128 head dimensions on Hopper.

    P = exp(scale S + bias - LSE),  or  P (1 - t^2) with P = exp(cap t - LSE) and t = tanh(scale S / cap)

What `backward_scores.py` is for transposed scores. Used by `backward_wide_queries.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rowmax.kernels.gluon.backward_names import capped_weights
from rowmax.kernels.gluon.backward_scores import LOWEST, _far
from rowmax.kernels.gluon.backward_walk import COL, LEN_K, LEN_Q, NOTES, _note
from rowmax.kernels.gluon.index import along, hide
from rowmax.kernels.gluon.layouts import axis_layout
from rowmax.kernels.gluon.names import as_number
from rowmax.kernels.gluon.scores import add_slopes, slopes_behind


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
    s, lse, col, ranges, notes, band, scale_log2, dtype: gl.constexpr, CONSUMER: gl.constexpr, BUILD: gl.constexpr
):  # fmt: skip
    """Of the keys from `col` on. lse: `[64, 1]`. But for a soft-cap, what rows do not see is not hidden yet."""
    _turns, _fewer, _start, full, full_end = ranges
    row = _note(notes, COL) + CONSUMER * s.shape[0]
    if BUILD.CAP:
        edge = (col < full) | (col >= full_end)
        place = (row, col, _note(notes, LEN_Q), _note(notes, LEN_K))
        unit = as_number(_note(notes, NOTES + 1))
        return _row_weights_of_capped(s * as_number(_note(notes, NOTES)), lse, place, edge, unit, band, dtype)
    elif BUILD.ALIBI != "":
        slope = as_number(_note(notes, NOTES))
        shift = _note(notes, LEN_K) - _note(notes, LEN_Q)
        if BUILD.ALIBI == "around":
            return gl.exp2(add_slopes(s * scale_log2, row, col, shift, slope) - lse)
        else:
            parts, own = slopes_behind(s * scale_log2, row, col, shift, slope)
            LAYOUT: gl.constexpr = parts.type.layout
            lse = gl.convert_layout(lse.reshape([s.shape[0]]), axis_layout(LAYOUT, 0))
            rows = slope * along(s.shape[0], LAYOUT, 0).to(gl.float32)  # which `slopes_behind` leaves to a maximum
            rows += gl.expand_dims(gl.expand_dims(gl.expand_dims(lse, 1), 2), 3)
            return gl.convert_layout(gl.exp2(parts - (rows - own)).reshape(s.shape), s.type.layout)
    else:
        return gl.exp2(s * scale_log2 - lse)
