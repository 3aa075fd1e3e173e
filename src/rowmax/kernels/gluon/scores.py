"""Scores that are bent, in the Hopper kernels: soft-cap, ALiBi, sink, as `tile_ops.bend` and `tile_ops.add_sink` define them.

    x_ij = cap tanh(s_ij / cap) - slope |i + shift - j|,    l_i += exp(sink - m_i)

The tensor cores need 2048 cycles for a 128x128 tile of d128, and a multiprocessor 1024 for one exponential of each element:
there is no time for two more of them. So tanh is a polynomial on the FMA units as long as every score that a warp holds is less
than 0.6 caps in size (`names.TANH`: with all roundings 2.4e-7 of the score, which is the 4 2^-24 that the error budget allows
for those of the product). A warp that holds a larger one computes exactly, with one exponential and one reciprocal an element.
(`tanh.approx`, one instruction, is off by 2^-11: by up to 0.012 in the LSE at a cap of 50, of which 0.0002 are allowed.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rowmax.kernels.gluon.index import along
from rowmax.kernels.gluon.names import NEAR, TANH, any_above, exp2_of_odd, odd, tanh_where, warp_where

BOUND = gl.constexpr(NEAR)
LEAST = gl.constexpr(2.0**-126)
C1, C2, C3, C4 = map(gl.constexpr, TANH)


@gluon.jit
def cap_scores(s, cap, unit, COUNT: gl.constexpr):
    """`(s, top, factors)`: `capped(s, factors)` are soft-capped scores in units of log2. To be masked, with -inf, in between.

    top: row maxima of what is returned. cap: scale / soft-cap; `unit`: what s are to be multiplied with, without a cap. COUNT:
    elements of a thread. Where a warp
    holds large scores, s are replaced by capped ones, and the factors leave them alone: all but the first one vanish (the last
    one nearly: times the infinity of a hidden key it must not be NaN).
    """
    top = gl.max(s, 1)
    far = any_above(gl.maximum(top, -gl.min(s, 1)) * cap, BOUND)
    top = tanh_where(top, far, cap, 2)
    wide, wanted = gl.broadcast(s, gl.expand_dims(far, 1))
    s = tanh_where(wide, wanted, cap, COUNT)
    square = cap * cap
    c1 = unit * C1 * square
    c2 = unit * C2 * square * square
    c3 = unit * C3 * square * square * square
    c4 = unit * C4 * (square * square) * (square * square)
    factors = (warp_where(far, c1, 0.0), warp_where(far, c2, 0.0), warp_where(far, c3, 0.0), warp_where(far, c4, LEAST))
    return s, top, factors


@gluon.jit
def capped(s, unit, factors):
    c1, c2, c3, c4 = factors
    y = s * s
    return s * (unit + y * (c1 + y * (c2 + y * (c3 + y * c4))))


@gluon.jit
def _of_columns(factors):
    c1, c2, c3, c4 = factors
    return gl.expand_dims(c1, 1), gl.expand_dims(c2, 1), gl.expand_dims(c3, 1), gl.expand_dims(c4, 1)


@gluon.jit
def capped_tile(s, unit, factors):
    """`capped` of a tile."""
    c1, c2, c3, c4 = _of_columns(factors)
    return odd(s, unit, c1, c2, c3, c4)


@gluon.jit
def exp2_of_capped(s, unit, factors, pivot):
    """`exp2(capped(s) - pivot)` of a tile."""
    c1, c2, c3, c4 = _of_columns(factors)
    return exp2_of_odd(s, unit, c1, c2, c3, c4, gl.expand_dims(pivot, 1))


@gluon.jit
def add_slopes(s, row, col, shift, slope, AHEAD: gl.constexpr):
    """`s - slope |i + shift - j|`; without AHEAD, where no visible key lies ahead of its query, `slope (i - row)` more.

    `slope` in units of s. That each row may be off by a number of its own leaves one addition an element, of what rows share.
    A column is 8 i + 2 t + e, of which a thread has every i: constants.
    """
    parts = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    LAYOUT: gl.constexpr = parts.type.layout
    eights = (8 * along(parts.shape[1], LAYOUT, 1)).to(gl.float32)
    own = col - shift + 2 * along(4, LAYOUT, 2) + along(2, LAYOUT, 3)
    if AHEAD:
        rows = row + along(s.shape[0], LAYOUT, 0)
        parts = parts - slope * gl.abs((rows - own).to(gl.float32) - eights)
    else:
        parts = parts + (slope * eights + slope * (own - row).to(gl.float32))
    return gl.convert_layout(parts.reshape(s.shape), s.type.layout)


@gluon.jit
def slopes_of_keys(s, row, col, shift, slope, AHEAD: gl.constexpr):
    """`s - slope |i + shift - j|` of transposed scores, `[keys, queries]`; without AHEAD, `slope (j - shift - i)`.

    A query is 8 i + 2 t + e, of which a thread has every i: constants.
    """
    parts = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    LAYOUT: gl.constexpr = parts.type.layout
    eights = (8 * along(parts.shape[1], LAYOUT, 1)).to(gl.float32)
    own = 2 * along(4, LAYOUT, 2) + along(2, LAYOUT, 3)
    keys = col - shift - row + along(s.shape[0], LAYOUT, 0)
    if AHEAD:
        parts = parts - slope * gl.abs((keys - own).to(gl.float32) - eights)
    else:
        parts = (parts + slope * keys.to(gl.float32)) - (slope * eights + slope * own.to(gl.float32))
    return gl.convert_layout(parts.reshape(s.shape), s.type.layout)


@gluon.jit
def with_sink(m, l, sink):
    """`(m, l, alpha)` with one more key of logit `sink`, all in units of log2. Their values are to be scaled by alpha."""
    m_new = gl.maximum(m, sink)
    pivot = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m - pivot)
    return m_new, l * alpha + gl.exp2(sink - pivot), alpha
