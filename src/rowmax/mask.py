"""What a query sees, as two functions of its row: the first visible key and one past the last.

Plain arithmetic and no imports: the same source runs on Python ints (tile counts, FLOPs), on torch tensors (CPU path)
and, wrapped by `triton.jit`, in the kernels.

`shift = len_k - len_q` aligns the diagonal to the bottom right: the last query sees the last key. Row i is at position
i + shift of the keys. Results are not clamped to `[0, len_k]`; callers clamp with the minimum and maximum of their own world.
Ends are exclusive.

A `Pattern` has more than a window. Its first keys, `early`, are hidden by no left side, so that a row sees

    [first_key, end_key)  and  [0, min(early, end_key))

while a key is still seen by one interval of rows, `[first_query, end_query)`. In kernels it is known at compile time whether
there is more: `band.__len__()`, since `len(band)` takes no tuple there that holds None (Triton 3.6).
"""

from typing import NamedTuple, Optional, Union


class Band(NamedTuple):
    """Keys kept on each side of the diagonal, self included; `None` is no limit. Causal is `right=0`."""

    left: Optional[int] = None
    right: Optional[int] = None


class Pattern(NamedTuple):
    """A `Band` and more; made by `pattern`, which gives a `Band` where there is no more.

    Attributes:
        sink_tokens: the left side and the chunks hide none of the first so many keys; queries before them do not see them.
        prefix: every query sees the first so many keys, also those before them.
        chunk: positions are cut into chunks of so many from the first key on, and a query sees the keys of its own.
    """

    left: Optional[int] = None
    right: Optional[int] = None
    sink_tokens: Optional[int] = None
    prefix: Optional[int] = None
    chunk: Optional[int] = None


AnyBand = Union[Band, Pattern]


def pattern(left=None, right=None, sink_tokens=None, prefix=None, chunk=None) -> AnyBand:
    """The simplest band that sees the same.

    >>> pattern(None, 0, sink_tokens=4)
    Band(left=None, right=0)
    """
    if (left is None and chunk is None) or sink_tokens == 0:
        sink_tokens = None
    if (left is None and right is None and chunk is None) or prefix == 0:
        prefix = None
    if sink_tokens is prefix is chunk is None:
        return Band(left, right)
    return Pattern(left, right, sink_tokens, prefix, chunk)


def first_key(row, shift, band):
    """The first key that `row` sees (unclamped), without `early_keys`."""
    first = row * 0 if band.left is None else row + (shift - band.left)
    if band.__len__() > 2:
        if band.chunk is not None:
            position = row + shift
            # The remainder of what may be negative, wherever `%` has the sign of the dividend and where that of the divisor.
            begin = position - (position % band.chunk + band.chunk) % band.chunk
            first = first + (begin - first) * (begin > first)
    return first


def end_key(row, shift, len_k, band):
    """One past the last key that `row` sees (unclamped)."""
    end = row * 0 + len_k if band.right is None else row + (shift + band.right + 1)
    if band.__len__() > 2:
        if band.chunk is not None:
            position = row + shift
            behind = position - (position % band.chunk + band.chunk) % band.chunk + band.chunk
            end = end + (behind - end) * (behind < end)
        if band.prefix is not None:
            end = end + (band.prefix - end) * (end < band.prefix)
    return end


def first_query(col, shift, band):
    """The first query that sees key `col` (unclamped): the inverse of `end_key`."""
    first = col * 0 if band.right is None else col - (shift + band.right)
    if band.__len__() > 2:
        if band.chunk is not None:
            begin = col - col % band.chunk - shift
            first = first + (begin - first) * (begin > first)
        if band.prefix is not None:
            first = first * (col >= band.prefix)
    return first


def end_query(col, shift, len_q, band):
    """One past the last query that sees key `col` (unclamped): the inverse of `first_key`."""
    end = col * 0 + len_q if band.left is None else col - (shift - band.left - 1)
    if band.__len__() > 2:
        if band.chunk is not None:
            behind = col - col % band.chunk + band.chunk - shift
            end = end + (behind - end) * (behind < end)
        if band.sink_tokens is not None:
            end = end + (len_q - end) * (col < band.sink_tokens)
        if band.prefix is not None:
            end = end + (len_q - end) * (col < band.prefix)
    return end


def early_keys(band) -> int:
    """How many of the first keys no left side hides; 0 where there is none to hide them."""
    if len(band) == 2 or (band.left is None and band.chunk is None):
        return 0
    return max(band.sink_tokens or 0, band.prefix or 0)


def visible(row, col, shift, len_k, band):
    """Does `row` see key `col`, which exists?"""
    near = (col >= first_key(row, shift, band)) | (col < early_keys(band))
    return near & (col < end_key(row, shift, len_k, band))


def visible_pairs(len_q, len_k, band):
    """How many (query, key) pairs are visible: exact, in O(1) arithmetic by ranges of rows.

    >>> visible_pairs(4, 4, Band(None, 0))
    10
    >>> visible_pairs(4, 4, Pattern(None, 0, chunk=2))
    6
    """
    shift = len_k - len_q
    if band.left is not None and band.right is not None and band.left + band.right + 1 < 0:
        return 0
    if len(band) == 2 or band.chunk is None:
        return _pairs_of_rows(shift, len_q, 0, len_k, len_k, band)
    # Rows before the first key are in no chunk; of whole chunks the pairs change evenly from one to the next, but at few.
    before, last = min(max(-shift, 0), len_q), (len_k - 1) // band.chunk
    odd = (max(shift, 0) // band.chunk, last, (band.sink_tokens or 0) // band.chunk, (band.prefix or 0) // band.chunk)
    cuts = sorted({cut for chunk in odd for cut in (chunk, chunk + 1) if odd[0] <= cut <= last} | {last + 1})
    pairs = _pairs_of_rows(shift, before, 0, 0, len_k, band)
    for at, end in enumerate(cuts[1:]) if len_q and len_k else ():
        first = cuts[at]
        ends = [_pairs_of_chunk(chunk, shift, len_k, band) for chunk in (first, end - 1)]
        pairs += (end - first) * sum(ends) // 2
    return pairs


def _pairs_of_chunk(chunk, shift, len_k, band):
    begin, end = chunk * band.chunk, min((chunk + 1) * band.chunk, len_k)
    position = max(begin, shift)
    return _pairs_of_rows(position, end - position, begin, end, len_k, band)


def _pairs_of_rows(position, rows, begin, end, len_k, band):
    """Of rows from a position on that see, as far as their sides let them, the keys `[begin, end)` and early ones."""
    early = early_keys(band)
    always = 0 if len(band) == 2 else min(band.prefix or 0, len_k)
    most = max(end, always)
    if band.right is None:
        seen = rows * most
    else:
        seen = rows * always + _clamped_sum(position + band.right + 1 - always, rows, most - always)
    hidden = max(begin - early, 0)  # of those, by the left side, in every row
    if band.left is None:
        return seen - rows * hidden
    return seen - rows * hidden - _clamped_sum(position - band.left - early - hidden, rows, max(len_k - early - hidden, 0))


def _clamped_sum(offset, rows, limit):
    """sum over i in [0, rows) of min(max(i + offset, 0), limit)."""
    low = min(max(-offset, 0), rows)  # rows before this give 0
    high = min(max(limit - offset, low), rows)  # rows from this on give `limit`
    return (low + offset + high - 1 + offset) * (high - low) // 2 + (rows - high) * limit
