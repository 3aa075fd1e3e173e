"""The arithmetic of one tile, without layouts: what the Triton and the Gluon kernels share.

Functions receive tiles and index vectors and never make them (`arange` and `zeros` need a layout under Gluon).
Rows are queries, cols are keys; `s` are raw scores, `p` their exponentials, `m` the row maximum in units of `s`, `l` the row
sum, `acc` the output before division. `scale_log2 = scale * log2(e)`, so that exp(scale * s) = exp2(scale_log2 * s).
"""

import triton
import triton.language as tl

from rowmax import mask
from rowmax.kernels.triton.score_mod import modify

# Rows and columns of the tiles in which a result that came out NaN is computed once more, with `guarded_dot`.
GUARD = tl.constexpr(16)

# The type of the marks in `guarded_dot`. Triton 3.6's interpreter multiplies the bits of bf16 tiles as integers.
MARK = tl.constexpr(tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16)

# Triton's interpreter refuses a function whose module does not import triton.language; there plain Python does as well.
share = (lambda function: function) if triton.knobs.runtime.interpret else triton.jit
first_key = share(mask.first_key)
end_key = share(mask.end_key)
first_query = share(mask.first_query)
end_query = share(mask.end_query)


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def early_keys(number, band):
    """`mask.early_keys` of a `Pattern`, in the type of a number."""
    early = number * 0
    if band.left is not None or band.chunk is not None:
        if band.sink_tokens is not None:
            early = tl.maximum(early, band.sink_tokens)
        if band.prefix is not None:
            early = tl.maximum(early, band.prefix)
    return early


@triton.jit
def key_ranges(row, last, len_k, shift, band, BLOCK_N: tl.constexpr):
    """Key tiles of rows `[row, last]`: masked in [start, full_start) and [full_end, end), visible to all rows between.

    The same as `plan.tile.key_ranges`, of a `mask.Pattern` with `early` behind, whose tiles are masked too. Values are clamped
    before they are divided: `//` truncates here.
    """
    start = clamp(first_key(row, shift, band), 0, len_k) // BLOCK_N * BLOCK_N
    end = tl.maximum(clamp(end_key(last, shift, len_k, band), 0, len_k), start)
    full_start = tl.cdiv(clamp(first_key(last, shift, band), 0, len_k), BLOCK_N) * BLOCK_N
    full_start = clamp(full_start, start, end)
    full_end = clamp(end_key(row, shift, len_k, band), 0, len_k) // BLOCK_N * BLOCK_N
    full_end = tl.maximum(full_end, full_start)
    if band.__len__() > 2:
        return start, full_start, full_end, end, tl.minimum(early_keys(start, band), start)
    else:
        return start, full_start, full_end, end


@triton.jit
def early_tiles(start, band, BLOCK_N: tl.constexpr):
    """Key tiles of `early` of `key_ranges`, in front of the gap before `start`."""
    if band.__len__() > 2:
        return tl.cdiv(tl.minimum(early_keys(start, band), start), BLOCK_N)
    else:
        return 0


@triton.jit
def key_tile_start(number, start, band, BLOCK_N: tl.constexpr):
    """Where a key tile of `key_ranges` starts, counted from the first one that is walked over: those of `early` come first."""
    if band.__len__() > 2:
        early = early_tiles(start, band, BLOCK_N)
        return tl.where(number < early, 0, start - early * BLOCK_N) + number * BLOCK_N
    else:
        return start + number * BLOCK_N


@triton.jit
def query_ranges(col, last, len_q, shift, band, BLOCK_M: tl.constexpr):
    """Query tiles that see keys `[col, last]`, in the form of `key_ranges`."""
    start = clamp(first_query(col, shift, band), 0, len_q) // BLOCK_M * BLOCK_M
    most = end_query(last, shift, len_q, band)
    fewest = col
    if band.__len__() > 2:  # early keys are seen to the end
        most = tl.maximum(most, end_query(col, shift, len_q, band))
        fewest = tl.maximum(col, tl.minimum(last, early_keys(last, band)))
    end = tl.maximum(clamp(most, 0, len_q), start)
    full_start = tl.cdiv(clamp(first_query(last, shift, band), 0, len_q), BLOCK_M) * BLOCK_M
    full_start = clamp(full_start, start, end)
    full_end = clamp(end_query(fewest, shift, len_q, band), 0, len_q) // BLOCK_M * BLOCK_M
    return start, full_start, tl.maximum(full_end, full_start), end


@triton.jit
def tiles_of(ranges, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """How many tiles of `ranges` = (start, full_start, full_end, end), perhaps early, need the element mask, or do not."""
    if MASKED:
        edges = tl.cdiv(ranges[1] - ranges[0], BLOCK) + tl.cdiv(ranges[3] - ranges[2], BLOCK)
        if len(ranges) > 4:
            edges += tl.cdiv(ranges[4], BLOCK)
        return edges
    else:
        return (ranges[2] - ranges[1]) // BLOCK


@triton.jit
def tile_start(turn, ranges, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Where tile `turn` of `tiles_of` starts: both edges are one loop, so that the masked body is compiled once."""
    if MASKED:
        left = tl.cdiv(ranges[1] - ranges[0], BLOCK)
        if len(ranges) > 4:
            early = tl.cdiv(ranges[4], BLOCK)
            later = turn - early
            start = tl.where(later < left, ranges[0] + later * BLOCK, ranges[2] + (later - left) * BLOCK)
            return tl.where(turn < early, turn * BLOCK, start)
        else:
            return tl.where(turn < left, ranges[0] + turn * BLOCK, ranges[2] + (turn - left) * BLOCK)
    else:
        return ranges[1] + turn * BLOCK


@triton.jit
def visible(rows, cols, len_k, shift, band):
    """Boolean, broadcast of `rows` and `cols` (pass `rows[:, None], cols[None, :]` or the transpose)."""
    seen = cols < tl.minimum(end_key(rows, shift, len_k, band), len_k)
    if band.__len__() > 2:
        if band.left is not None or band.chunk is not None:
            near = cols >= first_key(rows, shift, band)
            if band.sink_tokens is not None or band.prefix is not None:
                near = near | (cols < early_keys(shift, band))
            seen = seen & near
    elif band.left is not None:
        seen = seen & (cols >= first_key(rows, shift, band))
    return seen


@triton.jit
def soft_cap(x):
    """`(tanh x, 1 - tanh^2 x)`, each to a few units in its last place: near 0, where 1 - e cancels, by the series."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)  # exp(-2 |x|)
    r = 1.0 / (1.0 + e)
    far = (1.0 - e) * r
    y = x * x
    near = x * (1.0 + y * (-0.33333333333333 + y * (0.13333333333333 + y * (-0.053968253968254 + y * 0.021869488536155))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0.0, -far, far)), 4.0 * e * r * r


@triton.jit
def bend(s, rows, cols, shift, scale_log2, cap, slope_log2, mod=None, head=None):
    """Raw scores to `(x, gain)`: x = log2(e) (mod(soft-capped score) + ALiBi bias), and the derivative of what stands in
    parentheses by the scaled score.

    `cap` = (scale / softcap, softcap * log2(e)) or None; `slope_log2` = slope * log2(e) or None; `mod` as in
    `triton/score_mod.py`, or None. Without cap and mod gain is unused.
    """
    if cap is None:
        x = s * scale_log2
        gain = x
    else:
        x, gain = soft_cap(s * cap[0])
        x = x * cap[1]
    if mod is not None:
        x, slope = modify(x, mod, head, rows, cols, shift)
        gain = slope if cap is None else gain * slope
    if slope_log2 is not None:
        x = x - slope_log2 * tl.abs(rows + shift - cols).to(tl.float32)
    return x, gain


@triton.jit
def add_sink(acc, m, l, sink_log2):
    """One more key of logit `sink_log2` with the value 0, after all others; m in units of log2."""
    m_new = tl.maximum(m, sink_log2)
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - pivot)
    return acc * tl.expand_dims(alpha, 1), m_new, l * alpha + tl.exp2(sink_log2 - pivot)


@triton.jit
def online_step(s, m, l, scale_log2):
    """One tile of the online softmax: `(p, m, l, alpha)`; the caller multiplies its accumulator by `alpha`.

    A row that has seen nothing keeps m = -inf, with the finite pivot 0, so that p = 0 and nothing becomes NaN.
    """
    m_new = tl.maximum(m, tl.max(s, 1))
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new * scale_log2)
    p = tl.exp2(s * scale_log2 - tl.expand_dims(pivot, 1))
    alpha = tl.exp2(m * scale_log2 - pivot)
    return p, m_new, l * alpha + tl.sum(p, 1), alpha


@triton.jit
def finish(acc, m, l, scale_log2):
    """Deferred normalisation: `(o, lse)`, lse in natural logarithm; rows that saw nothing give 0 and -inf."""
    empty = l == 0.0
    l_safe = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), (m * scale_log2 + tl.log2(l_safe)) * 0.6931471805599453)
    return acc * tl.expand_dims(1.0 / l_safe, 1), lse


@triton.jit
def score_gradient(p, dp, delta):
    """dS = P (dP - delta), delta = rowsum(dO O) - dLSE (FlashAttention, appendix B.2); without the scale."""
    return p * (dp - delta)


@triton.jit
def any_of(condition):
    """1 if any element is true, else 0; a block of any shape."""
    return tl.max(tl.ravel(condition.to(tl.int32)), 0)


@triton.jit
def guarded_dot(a, b, seen, acc):
    """`acc + a b`, where a non-finite element of b reaches exactly the rows that see it (`seen`, the shape of a).

    `a` is 0 where nothing is seen, but 0 * NaN is NaN, so in a plain product such an element reaches every row of the tile.
    Here b enters with its non-finite elements set to 0, and a second product, of "sees" with "is non-finite", both times 2^100,
    overflows to infinity in exactly the rows that see one.
    """
    bad = (b != b) | (tl.abs(b) == float("inf"))
    acc = tl.dot(a.to(b.dtype), tl.where(bad, 0.0, b), acc, input_precision="ieee")
    huge = 1.2676506e30  # 2^100: its square overflows fp32
    return tl.dot(tl.where(seen, huge, 0.0).to(MARK), tl.where(bad, huge, 0.0).to(MARK), acc)
