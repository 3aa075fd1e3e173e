"""A window cut into short sequences, so that few large operations compute it and little that it hides.

Row blocks of a window see equally many keys, each block `STEP` keys further than the one before: they are a batch of short
sequences whose keys overlap in memory, views of what was given. The first rows, for which the window is cut off, and the last
are a sequence each (l, r are the sides of the window):

    rows   [0, head)               [head, head + count * STEP)              [.., len_q)
    keys   [0, head + shift + r)   count times STEP + l + r, every STEP,    [.., len_k)
                                   from head + shift - l

The gradients of keys are sums over the pieces that overlap there: `add_overlapping`. The backward in 16 bits is not cut:
to convert or copy keys that overlap costs what it saves, and in bf16 pieces know too little to round scores (with the forward,
d64, one thread of an AMD EPYC: h2 q4096 k4096 bf16 window(1000,0) 115 ms cut, 89 whole; h8 q2048 k2048 fp32 window(256,0) 78
and 90).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from rowmax.cpu.blocks import COMPUTE, Chunks, Geometry
from rowmax.mask import AnyBand, Band
from rowmax.plan.cpu import CUT_ROWS as STEP

_MOST_SCORES = 2**20  # of an operation: they stay in the caches
# Fewer are not worth operations of their own.
_LEAST_SCORES = 2**18


class Piece(NamedTuple):
    """Equally long sequences: `number` is that of the first, rows and cols as in `blocks.sequences`. `blocks`: they are row
    blocks of one sequence."""

    number: int
    geometry: Geometry
    rows: list
    cols: list
    blocks: bool = False

    def chunks(self, tile, group: int, half: bool) -> Chunks:
        """How it is computed: `blocks.Chunks.of`."""
        batch, _, heads = self.rows[0].shape[:3]
        if self.blocks:
            tile = replace(tile, block_n=max(min(tile.block_n, _MOST_SCORES // tile.block_m), self.geometry.len_k))
        return Chunks.of(tile, self.geometry, batch, heads // group, group, half, by_head=self.blocks)


def is_cut(problem, tile, geometry: Geometry, direction: str = "forward") -> bool:
    """Do `pieces` cut sequences of this geometry? What depends on where a pair lies stays whole."""
    if direction == "backward" and problem.dtype in COMPUTE:
        return False
    if not problem.windowed or None in geometry.band[:2] or not replace(problem, softcap=0.0, sink=False).plain:
        return False
    left, right = _sides(geometry)
    _, count = _head_and_count(geometry)
    width = STEP + left + right
    fits = tile.block_m >= 2 * STEP and width <= tile.block_n
    return fits and count > 1 and count * STEP * width * problem.heads_q >= _LEAST_SCORES


def pieces(cut: bool, band: AnyBand, number: int, rows: list, cols: list) -> Iterator[Piece]:
    """Of a set of equally long sequences, as in `blocks.numbered_sequences`: itself, or each of them `cut`."""
    geometry = Geometry(rows[0].shape[1], cols[0].shape[1], band)
    if not cut:
        yield Piece(number, geometry, rows, cols)
        return
    for b in range(rows[0].shape[0]):
        yield from _cut(number + b, geometry, [t[b] for t in rows], [t[b] for t in cols])


def _sides(geometry: Geometry) -> tuple[int, int]:
    left, right = geometry.band[:2]
    return left or 0, right or 0


def _head_and_count(geometry: Geometry) -> tuple[int, int]:
    left, right = _sides(geometry)
    head = max(left - geometry.shift, 0)
    return head, (geometry.len_q - right - head) // STEP


def _cut(number: int, geometry: Geometry, rows: list, cols: list) -> Iterator[Piece]:
    """rows, cols `[T, H, ...]`."""
    shift, (left, right) = geometry.shift, _sides(geometry)
    head, count = _head_and_count(geometry)
    tail, width = head + count * STEP, STEP + left + right
    # Where the last row sees the last key of its piece, the diagonal of the piece is that of the window's end.
    ending = Band(left + right, 0)
    if head:
        end = head + shift + right
        yield Piece(number, Geometry(head, end, ending), [t[None, :head] for t in rows], [t[None, :end] for t in cols])
    own_rows = [t[head:tail].unflatten(0, (count, STEP)) for t in rows]
    own_cols = [t[head + shift - left :].unfold(0, width, STEP)[:count].movedim(-1, 1) for t in cols]
    yield Piece(number, Geometry(STEP, width, ending), own_rows, own_cols, blocks=True)
    if tail < geometry.len_q:
        first = tail + shift - left
        rest = Geometry(geometry.len_q - tail, geometry.len_k - first, geometry.band)
        yield Piece(number, rest, [t[None, tail:] for t in rows], [t[None, first:] for t in cols])


def add_overlapping(target, part, factor: float) -> None:
    """`target += factor * part`, `[count, h, width, D]`, where each piece of `target` lies `STEP` keys behind the one before:
    so many keys of all pieces are added at once, which do not overlap."""
    for first in range(0, part.shape[2], STEP):
        keys = slice(first, first + STEP)
        target[:, :, keys].add_(part[:, :, keys], alpha=factor)
