"""What a query sees, as two functions of its row: the first visible key and one past the last.

Plain arithmetic and no imports: the same source runs on Python ints (tile counts, FLOPs), on torch tensors (CPU path)
and, wrapped by `triton.jit`, in the kernels.

`shift = len_k - len_q` aligns the diagonal to the bottom right: the last query sees the last key. Results are not
clamped to `[0, len_k]`; callers clamp with the minimum and maximum of their own world. Ends are exclusive.
"""

from typing import NamedTuple, Optional


class Band(NamedTuple):
    """Keys kept on each side of the diagonal, self included; `None` is no limit. Causal is `right=0`."""

    left: Optional[int] = None
    right: Optional[int] = None


def first_key(row, shift, band):
    """The first key that `row` sees (unclamped)."""
    if band.left is None:
        return row * 0
    else:
        return row + (shift - band.left)


def end_key(row, shift, len_k, band):
    """One past the last key that `row` sees (unclamped)."""
    if band.right is None:
        return row * 0 + len_k
    else:
        return row + (shift + band.right + 1)


def first_query(col, shift, band):
    """The first query that sees key `col` (unclamped): the inverse of `end_key`."""
    if band.right is None:
        return col * 0
    else:
        return col - (shift + band.right)


def end_query(col, shift, len_q, band):
    """One past the last query that sees key `col` (unclamped): the inverse of `first_key`."""
    if band.left is None:
        return col * 0 + len_q
    else:
        return col - (shift - band.left - 1)


def visible_pairs(len_q, len_k, band):
    """How many (query, key) pairs are visible: exact, in O(1) arithmetic by ranges of rows.

    >>> visible_pairs(4, 4, Band(None, 0))
    10
    """
    shift = len_k - len_q
    ends = _clamped_sum(shift + 1 + band.right, len_q, len_k) if band.right is not None else len_q * len_k
    starts = _clamped_sum(shift - band.left, len_q, len_k) if band.left is not None else 0
    if band.left is not None and band.right is not None and band.left + band.right + 1 < 0:
        return 0
    return ends - starts


def _clamped_sum(offset, rows, limit):
    """sum over i in [0, rows) of min(max(i + offset, 0), limit)."""
    low = min(max(-offset, 0), rows)  # rows before this give 0
    high = min(max(limit - offset, low), rows)  # rows from this on give `limit`
    return (low + offset + high - 1 + offset) * (high - low) // 2 + (rows - high) * limit
