"""The online softmax of `forward.py`: `tile_ops.online_step` and `tile_ops.finish` with row sums that stay in their threads.

m' = max(m, rowmax S),  P = exp(S - m'),  l' = l exp(m - m') + rowsum P
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rowmax.kernels.gluon.layouts import row_layout
from rowmax.kernels.gluon.scores import capped, exp2_of_capped


@gluon.jit
def thread_sum(p):
    """`[M, N]` to `[M, 4]`: what each thread of a quad holds of a row, summed."""
    parts = p.reshape([p.shape[0], 2, p.shape[1] // 16, 4, 2])
    return gl.sum(gl.sum(gl.sum(parts, 4), 2), 1)


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
def capped_step(s, top, m, l, unit, factors, FIRST: gl.constexpr, EMPTY: gl.constexpr, LAZY: gl.constexpr):
    """`online_step` of soft-capped scores (`scores.capped`), m in units of log2. top: row maxima of s if nothing is hidden.

    A cap is monotonic: the maximum is taken before, and the polynomial computed between the exponentials.
    """
    if EMPTY:
        top = gl.max(s, 1)
    m_new = _raised(m, capped(top, unit, factors), 1.0, FIRST, LAZY)
    pivot = m_new
    if EMPTY:
        pivot = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = exp2_of_capped(s, unit, factors, pivot)
    return _carried(p, m, m_new, l, 1.0, pivot, FIRST, LAZY)


@gluon.jit
def finish(m, l, scale_log2):
    """`(1 / l, lse)` as in `tile_ops.finish`; the product with the accumulator waits for the last P V."""
    empty = l == 0.0
    l_safe = gl.where(empty, 1.0, l)
    lse = gl.where(empty, float("-inf"), (m * scale_log2 + gl.log2(l_safe)) * 0.6931471805599453)
    return 1.0 / l_safe, lse
