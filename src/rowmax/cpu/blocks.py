"""Row blocks of Q outside, column tiles of K/V inside: the walk that the forward and the backward share.

A chunk is some KV heads of some sequences. Its query heads are folded into rows, `[n, G * rows, D]` against `[n, cols, D]`,
so that K and V are never repeated for grouped heads. A score block has at most `block_m * block_n` elements of the plan's
tile: memory grows with the length, never with its square.
"""

from typing import Iterator, NamedTuple

import torch

from rowmax.mask import end_key, first_key, first_query
from rowmax.plan.tile import key_ranges


class Columns(NamedTuple):
    """Columns `[start, end)` of K/V for one row block. Those in `[full_start, full_end)` are seen by all its rows."""

    start: int
    full_start: int
    full_end: int
    end: int


def sequences(problem, operands, for_q=(), for_k=()) -> Iterator[tuple[list, list]]:
    """Each set of sequences of one length, as dense views: those of q and `for_q`, then those of k, v and `for_k`.

    Tensors whose rows are queries and which have no head dimension last (LSE: `[B, H, T]`) come as `[B, T, H]` views.
    """
    rows, cols = [operands.q, *for_q], [operands.k, operands.v, *for_k]
    if not problem.packed:
        yield rows, cols
        return
    bounds_q, bounds_k = operands.cu_seqlens_q.tolist(), operands.cu_seqlens_k.tolist()
    for i in range(problem.batch):
        (q0, q1), (k0, k1) = bounds_q[i : i + 2], bounds_k[i : i + 2]
        if q1 > q0:
            yield [t[q0:q1].unsqueeze(0) for t in rows], [t[k0:k1].unsqueeze(0) for t in cols]


def by_kv_head(t, heads_k):
    """`[B, T, Hq, ...]` -> `[B, Hk, G, T, ...]`, a view."""
    return t.unflatten(2, (heads_k, -1)).movedim(1, 3)


def first_live_row(len_q, len_k, band) -> int:
    """Rows before this one see nothing; all later ones see at least one key (bottom-right alignment, sides >= 0)."""
    if len_k == 0:
        return len_q
    return min(max(first_query(0, len_k - len_q, band), 0), len_q)


def chunks(batch, heads, most) -> Iterator[tuple[slice, slice]]:
    """Rectangles of the `[batch, heads]` plane with at most `most` members (at least one)."""
    if most >= heads:
        step = max(1, most // heads)
        for b in range(0, batch, step):
            yield slice(b, min(b + step, batch)), slice(0, heads)
        return
    for b in range(batch):
        for h in range(0, heads, most):
            yield slice(b, b + 1), slice(h, min(h + most, heads))


def columns(row, rows, len_q, len_k, band) -> Columns:
    return Columns(*key_ranges(row, rows, len_q, len_k, 1, band))


def hide(s, value, row, rows, start, columns, shift, len_k, band) -> None:
    """Write `value` into the hidden pairs of a tile `s` `[n, G * rows, cols]` whose first column is `start`, in place.

    Only the columns at the two edges of the band are touched; the interior has no hidden pair.
    """
    end = start + s.shape[-1]
    for low, high in ((columns.start, columns.full_start), (columns.full_end, columns.end)):
        low, high = max(low, start), min(high, end)
        if low < high:
            i = torch.arange(row, row + rows).unsqueeze(1)
            j = torch.arange(low, high)
            hidden = (j < first_key(i, shift, band)) | (j >= end_key(i, shift, len_k, band))
            s.unflatten(1, (-1, rows))[..., low - start : high - start].masked_fill_(hidden, value)
