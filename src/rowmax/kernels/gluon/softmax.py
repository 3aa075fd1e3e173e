"""The online softmax of `forward.py`: `tile_ops.online_step` and `tile_ops.finish` with row sums that stay in their threads.

    m' = max(m, rowmax S),  P = exp(S - m'),  l' = l exp(m - m') + rowsum P

`STEADY`: m is 30 above the maximum of the first key tile in which a row sees anything, in units of log2, and grows only where l
does: once a thread of the row holds an l above 2^24, k, 30 above log2 of l, are added to m, and l and O are scaled by 2^-k,
before the next tile.

    k = floor(log2 l) + 30 if l > 2^24 else 0,  m' = m + k,  P = exp(S - m'),  l' = l 2^-k + rowsum P

So the loop takes no maxima, a fifth of its instructions. Weights from 2^-126 to 2^127 are as exact in bf16 as those near 1, and
so is a sum of them in fp32; what is smaller is 2^-96 of the largest. Scores must rise by about 130 from one key tile to
the next before a weight, l or O exceeds fp32. It then stays infinite or NaN, which `forward.py` finds at the end, and
`guard.py` computes these rows once more. m `[M, 4]` is there in each thread of a row, like l, and in units of log2; `LOWEST`
stands for a row that has seen nothing: any finite score would make its weights infinite.

Soft-caps of up to 60 bound scores, in units of log2 by 87. There m is the first maximum or -16, whichever is larger, and stays:
weights are at most 2^103, their sums far below 2^127, and nothing is asked. (With 0 in place of -16 a row that sees one key
with a negative score has a weight that bf16 rounds: right by element, but four times the error of the textbook on an H200.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rowmax.kernels.gluon.layouts import axis_layout, kept_layout, row_layout
from rowmax.kernels.gluon.names import settled
from rowmax.kernels.gluon.scores import capped, each, exp2_of_capped, in_threads, of_threads, of_tile, thread_max

LOWEST = gl.constexpr(-3.4028234663852886e38)
LEAST_PIVOT = gl.constexpr(-16.0)
HEADROOM = gl.constexpr(30)  # of weights above 1: with few keys in its first key tile, a row may see far larger ones later
SETTLED = gl.constexpr(2.0**24)  # beyond what sums of normal scores reach, and far below 2^127


@gluon.jit
def thread_sum(p):
    """`[M, N]` to `[M, 4]`: what each thread of a quad holds of a row, summed."""
    return gl.sum(gl.sum(gl.sum(of_threads(p), 4), 2), 1)


@gluon.jit
def settle(m, l):
    """`(m, l, alpha)` before a tile: what O and l of the tiles before are scaled by."""
    l, m, alpha = settled(l, m, SETTLED, HEADROOM)
    return m, l, alpha


@gluon.jit
def _raised(m, m_new, scale_log2, FIRST: gl.constexpr, LAZY: gl.constexpr):
    """The running maximum. `LAZY`: one that grows by less than 2^8 stays."""
    if not FIRST:
        m_new = gl.maximum(m, m_new)
        if LAZY:
            m_new = gl.where((m_new - m) * scale_log2 <= 8.0, m, m_new)
    return m_new


@gluon.jit
def _carried(p, m, m_new, l, scale_log2, pivot, FIRST: gl.constexpr, LAZY: gl.constexpr):
    """`(p, m, l, alpha)` behind a tile."""
    if FIRST:
        return p, m_new, thread_sum(p), gl.full(m_new.shape, 1.0, gl.float32, m_new.type.layout)
    else:
        alpha = gl.exp2(m * scale_log2 - pivot)
        if LAZY:
            alpha = gl.where(m_new == m, 1.0, alpha)
        own = gl.convert_layout(alpha, row_layout(l.type.layout))
        return p, m_new, l * gl.expand_dims(own, 1) + thread_sum(p), alpha


@gluon.jit
def online_step(s, m, l, scale_log2, FIRST: gl.constexpr, EMPTY: gl.constexpr, LAZY: gl.constexpr):
    """`tile_ops.online_step` with l `[M, 4]`, summed over the row only at the end. `EMPTY`: a row may have seen nothing yet."""
    m_new = _raised(m, gl.max(s, 1), scale_log2, FIRST, LAZY)
    pivot = m_new * scale_log2
    if EMPTY:
        pivot = gl.where(m_new == float("-inf"), 0.0, pivot)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(pivot, 1))
    return _carried(p, m, m_new, l, scale_log2, pivot, FIRST, LAZY)


@gluon.jit
def steady_pivot(top, like, above: gl.constexpr):
    """So much above `[M]` maxima of rows, in units of log2, as m `[M, 4]`."""
    return in_threads(gl.where(top == float("-inf"), LOWEST, top + above), like)


@gluon.jit
def first_pivot(m, tops, above: gl.constexpr):
    """m, and for rows that have seen nothing yet the pivot of the largest of `tops` `[M, 4]`, in units of log2."""
    return gl.where(m == LOWEST, steady_pivot(gl.max(tops, 1), m, above), m)


@gluon.jit
def not_far_below(m):
    """The pivot of bounded scores, so that none is above it by more than 103."""
    return gl.where(m == LOWEST, m, gl.maximum(m, LEAST_PIVOT))


@gluon.jit
def steady_step(s, m, l, scale_log2, FIRST: gl.constexpr):
    """`(p, m, l)`; m and l of `settle`."""
    if FIRST:
        m = steady_pivot(gl.max(s, 1) * scale_log2, thread_max(s), HEADROOM)
    p = of_tile(gl.exp2(of_threads(s) * scale_log2 - each(m)), s)
    if FIRST:
        return p, m, thread_sum(p)
    else:
        return p, m, l + thread_sum(p)


@gluon.jit
def _sloped_top(s, parts, own):
    return gl.max(gl.max(gl.expand_dims(gl.max(parts, 1), 1) + own, 3), 2).reshape([s.shape[0]])


@gluon.jit
def steady_sloped_step(s, parts, own, m, l, scale_log2, FIRST: gl.constexpr):
    """`steady_step` as `sloped_step`."""
    LAYOUT: gl.constexpr = parts.type.layout
    if FIRST:
        top = gl.convert_layout(_sloped_top(s, parts, own), row_layout(s.type.layout))
        m = steady_pivot(top * scale_log2, thread_max(s), HEADROOM)
    rows = gl.expand_dims(gl.expand_dims(gl.convert_layout(m, kept_layout(LAYOUT)), 1), 3)
    p = gl.exp2(parts * scale_log2 - (rows - own * scale_log2))
    p = gl.convert_layout(p.reshape(s.shape), s.type.layout)
    if FIRST:
        return p, m, thread_sum(p)
    else:
        return p, m, l + thread_sum(p)


@gluon.jit
def steady_capped_step(s, m, l, unit, factors, FIRST: gl.constexpr, SHORT: gl.constexpr):
    """`steady_step` as `capped_step`, of scores that are bounded."""
    if FIRST:
        m = not_far_below(steady_pivot(gl.max(capped(thread_max(s), unit, factors, SHORT), 1), factors[0], 0))
    p = exp2_of_capped(s, unit, factors, m, SHORT)
    if FIRST:
        return p, m, thread_sum(p)
    else:
        return p, m, l + thread_sum(p)


@gluon.jit
def sloped_step(s, parts, own, m, l, scale_log2, FIRST: gl.constexpr, EMPTY: gl.constexpr, LAZY: gl.constexpr):
    """`online_step` of `parts + own` (`scores.slopes_behind`), without that sum. s: a tile of p's shape and layout."""
    top = _sloped_top(s, parts, own)
    m_new = _raised(m, gl.convert_layout(top, m.type.layout), scale_log2, FIRST, LAZY)
    pivot = m_new * scale_log2
    if EMPTY:
        pivot = gl.where(m_new == float("-inf"), 0.0, pivot)
    LAYOUT: gl.constexpr = parts.type.layout
    rows = gl.convert_layout(pivot, axis_layout(LAYOUT, 0))
    rows = gl.expand_dims(gl.expand_dims(gl.expand_dims(rows, 1), 2), 3)
    p = gl.exp2(parts * scale_log2 - (rows - own * scale_log2))
    return _carried(gl.convert_layout(p.reshape(s.shape), s.type.layout), m, m_new, l, scale_log2, pivot, FIRST, LAZY)


@gluon.jit
def capped_step(
    s, m, l, unit, factors, FIRST: gl.constexpr, EMPTY: gl.constexpr, LAZY: gl.constexpr, SHORT: gl.constexpr
):  # fmt: skip
    """`online_step` of soft-capped scores (`scores.capped`), m in units of log2.

    A cap is monotonic: the maximum is taken before, and the polynomial computed between the exponentials.
    """
    top = gl.max(capped(thread_max(s), unit, factors, SHORT), 1)
    m_new = _raised(m, gl.convert_layout(top, m.type.layout), 1.0, FIRST, LAZY)
    pivot = m_new
    if EMPTY:
        pivot = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = exp2_of_capped(s, unit, factors, in_threads(pivot, factors[0]), SHORT)
    return _carried(p, m, m_new, l, 1.0, pivot, FIRST, LAZY)


@gluon.jit
def finish(m, l, scale_log2):
    """`(1 / l, lse)` as in `tile_ops.finish`; the product with the accumulator waits for the last P V."""
    empty = l == 0.0
    l_safe = gl.where(empty, 1.0, l)
    lse = gl.where(empty, float("-inf"), (m * scale_log2 + gl.log2(l_safe)) * 0.6931471805599453)
    return 1.0 / l_safe, lse
