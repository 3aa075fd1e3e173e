"""What a call gives for pairs of queries and keys: an added bias and a boolean mask, read tile by tile.

    x = log2(e) (score + bias),  -inf where the mask is False or the bias is -inf

Both are `[B, H, Tq, Tk]` of any strides, 0 in dimensions that are broadcast. For `forward`, `backward` and `bias`.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LARGEST: tl.constexpr = tl.constexpr(3e38)  # of a bias, in units of log2


@triton.jit
def pair_base(pointer, strides, b, head):
    """Pointer to the first query and key of one head of one sequence. `strides` are (batch, head, query, key)."""
    return pointer + tl.cast(b, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]


@triton.jit
def _load(base, strides, rows, cols, len_q, len_k):
    row = tl.min(tl.ravel(rows), 0)
    col = tl.min(tl.ravel(cols), 0)
    corner = base + row.to(tl.int64) * strides[2] + col.to(tl.int64) * strides[3]
    offsets = (rows - row) * strides[2] + (cols - col) * strides[3]
    return tl.load(corner + offsets, mask=(rows < len_q) & (cols < len_k), other=0)


@triton.jit
def give(x, rows, cols, len_q, len_k, bias, bias_strides, mask, mask_strides):
    """`(x, shown)` of a tile: the bias added to x, and -inf and False where a key is hidden. `rows` and `cols` broadcast to it;
    `bias` and `mask` are by `pair_base`."""
    shown = cols < len_k
    if bias is not None:
        added = _load(bias, bias_strides, rows, cols, len_q, len_k).to(tl.float32)
        shown = added != float("-inf")
        # The lowest number of a type is a number, and stays one: a row of nothing else is a row of ties.
        added = added * LOG2E
        x = x + tl.where(added < -LARGEST, -LARGEST, tl.where(added > LARGEST, LARGEST, added))
    if mask is not None:
        shown = shown & (_load(mask, mask_strides, rows, cols, len_q, len_k) != 0)
    return tl.where(shown, x, float("-inf")), shown
