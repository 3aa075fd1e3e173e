"""Scores that are bent, in the Hopper kernels: soft-cap, ALiBi, sink, as `tile_ops.bend` and `tile_ops.add_sink` define them.

    x_ij = cap tanh(s_ij / cap) - slope |i + shift - j|,    l_i += exp(sink - m_i)

The tensor cores need 2048 cycles for a 128x128 tile of d128, and a multiprocessor 1024 for one exponential of each element:
there is no time for two more of them. So tanh is a polynomial on the FMA units as long as every score that a warp holds is
small: below 0.2 caps two coefficients do (`names.TANH_SHORT`), below 0.6 caps four (`names.TANH`), with all roundings to 2.4e-7
of the score, which is the 4 2^-24 that the error budget allows for those of the product. A warp that holds a larger one
computes exactly, with one exponential and one reciprocal an element. (`tanh.approx`, one instruction, is off by 2^-11: by up to
0.012 in the LSE at a cap of 50, of which 0.0002 are allowed.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rowmax.kernels.gluon.index import along
from rowmax.kernels.gluon.layouts import row_layout
from rowmax.kernels.gluon.names import (
    NEAR,
    NEARER,
    TANH,
    TANH_SHORT,
    any_above,
    as_number,
    exp2_of_odd,
    odd,
    sum_of_sizes,
    tanh_where,
    warp_where,
)

LEAST = gl.constexpr(2.0**-126)
BOUND, SHORT_BOUND = gl.constexpr(NEAR), gl.constexpr(NEARER)
C1, C2, C3, C4 = map(gl.constexpr, TANH)
SHORT1, SHORT2 = map(gl.constexpr, TANH_SHORT)


@gluon.jit
def of_threads(s):
    """`[M, N]` as `[M, 2, N / 16, 4, 2]`: the threads of a quad, which hold a row, lie along the fourth axis."""
    return s.reshape([s.shape[0], 2, s.shape[1] // 16, 4, 2])


@gluon.jit
def of_tile(parts, s):
    """The inverse of `of_threads`, in the layout of the tile s."""
    return gl.convert_layout(parts.reshape(s.shape), s.type.layout)


@gluon.jit
def each(x):
    """A number `[M, 4]` of each row and thread, for every element of `of_threads`."""
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 1), 2), 4)


@gluon.jit
def in_threads(x, like):
    """A number `[M]` of each row in every thread of its quad, `[M, 4]` as `like`."""
    own, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(x, row_layout(like.type.layout)), 1), like)
    return own


@gluon.jit
def thread_max(s):
    """`[M, N]` to `[M, 4]`: the largest of what each thread of a quad holds of a row."""
    return gl.max(gl.max(gl.max(of_threads(s), 4), 2), 1)


@gluon.jit
def cap_scores(s, cap, unit, COUNT: gl.constexpr, SHORT: gl.constexpr):
    """`(s, factors)`: `capped(s, factors)` are soft-capped scores in units of log2. To be masked, with -inf, in between.

    cap: scale / soft-cap; `unit`: what s are to be multiplied with, without a cap. COUNT: elements of a thread. factors `[M,
    4]`: of the polynomial, two with SHORT, else four. Whether a warp's scores are small is asked of the sums of two sizes,
    which takes half as many comparisons. Where they are not, s are replaced by capped ones, and the factors leave them alone:
    all but the first one vanish (the last one nearly: times the infinity of a hidden key it must not be NaN).
    """
    parts = of_threads(s)
    left, right = gl.split(parts)
    largest = gl.max(gl.max(sum_of_sizes(left, right), 2), 1)
    far = any_above(as_number(largest) * cap, SHORT_BOUND if SHORT else BOUND)
    parts, wanted = gl.broadcast(parts, each(far))
    s = of_tile(tanh_where(parts, wanted, cap, COUNT), s)
    square = cap * cap
    if SHORT:
        c1 = unit * SHORT1 * square
        c2 = unit * SHORT2 * square * square
        return s, (warp_where(far, c1, 0.0), warp_where(far, c2, LEAST))
    else:
        c1 = unit * C1 * square
        c2 = unit * C2 * square * square
        c3 = unit * C3 * square * square * square
        c4 = unit * C4 * (square * square) * (square * square)
        return s, (warp_where(far, c1, 0.0), warp_where(far, c2, 0.0), warp_where(far, c3, 0.0), warp_where(far, c4, LEAST))


@gluon.jit
def capped(x, unit, factors, SHORT: gl.constexpr):
    """Of numbers `[M, 4]`."""
    y = x * x
    if SHORT:
        c1, c2 = factors
        return x * (unit + y * (c1 + y * c2))
    else:
        c1, c2, c3, c4 = factors
        return x * (unit + y * (c1 + y * (c2 + y * (c3 + y * c4))))


@gluon.jit
def _each_of(factors, SHORT: gl.constexpr):
    if SHORT:
        c1, c2 = factors
        return each(c1), each(c2)
    else:
        c1, c2, c3, c4 = factors
        return each(c1), each(c2), each(c3), each(c4)


@gluon.jit
def capped_tile(s, unit, factors, SHORT: gl.constexpr):
    """`capped` of a tile."""
    return of_tile(odd(of_threads(s), unit, _each_of(factors, SHORT)), s)


@gluon.jit
def exp2_of_capped(s, unit, factors, pivot, SHORT: gl.constexpr):
    """`exp2(capped(s) - pivot)` of a tile, pivot `[M, 4]`."""
    return of_tile(exp2_of_odd(of_threads(s), unit, _each_of(factors, SHORT), each(pivot)), s)


@gluon.jit
def add_slopes(s, row, col, shift, slope):
    """`s - slope |i + shift - j|`, `slope` in units of s. A column is 8 i + 2 t + e, of which a thread has all i: constants."""
    parts = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    LAYOUT: gl.constexpr = parts.type.layout
    eights = (8 * along(parts.shape[1], LAYOUT, 1)).to(gl.float32)
    own = col - shift + 2 * along(4, LAYOUT, 2) + along(2, LAYOUT, 3)
    rows = row + along(s.shape[0], LAYOUT, 0)
    parts = parts - slope * gl.abs((rows - own).to(gl.float32) - eights)
    return gl.convert_layout(parts.reshape(s.shape), s.type.layout)


@gluon.jit
def slopes_behind(s, row, col, shift, slope):
    """`(parts, own)`, together `s - slope (row + shift - j)`: `add_slopes` but for a number of each row, where no visible key
    lies ahead of its query. parts `[M, N / 8, 4, 2]`, and own of its last two axes.

    A column is 8 i + 2 t + e, of which a thread has every i: constants, and each a multiplication with an addition. The rest is
    a number of a thread and e, which the maxima and the pivots take.
    """
    parts = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    LAYOUT: gl.constexpr = parts.type.layout
    eights = (8 * along(parts.shape[1], LAYOUT, 1)).to(gl.float32)
    own = col - shift - row + 2 * along(4, LAYOUT, 2) + along(2, LAYOUT, 3)
    return parts + slope * eights, slope * own.to(gl.float32)


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
