"""Row blocks of Q outside, column tiles of K/V inside: the walk that the forward and the backward share.

A chunk is some KV heads of some sequences. The query heads of a group are folded into the rows of their KV head,
`[n, G * rows, D]` against `[n, cols, D]`, so that K and V are never repeated. A score block has at most
`block_m * block_n` fp32 elements of the plan's tile, whatever the lengths: memory is linear in the length.
"""

import functools
import itertools
import math
import threading
from collections.abc import Iterator
from typing import NamedTuple, Optional

import torch

from rowmax.mask import AnyBand, early_keys, end_key, first_key, first_query, visible
from rowmax.plan.cpu import block_rows
from rowmax.plan.tile import early, key_ranges

# The type that scores are computed in. A half type's products are exact in fp32; fp16 matmuls are 40 times slower here.
COMPUTE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
# The type of the large matmuls whose operands (P, dS) may be rounded: bf16 has fast ones, and fp32 sums inside.
MATMUL = {torch.float16: torch.float32}
if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # no AVX-512, say: torch then multiplies bf16 60 times as slowly as fp32
    MATMUL[torch.bfloat16] = torch.float32


_ALIGNMENT = 64  # bytes; torch's own memory begins there
KEPT_BYTES = 64 * 2**20  # default tiles take half of it
_MOST_VIEWS = 1024
_MOST_OF_EDGES = 2**21  # elements, about
_of_thread = threading.local()


class Scratch:
    """The large temporaries of a call, by name; fresh memory for each block would cost 10% of the forward in page faults, and
    fresh memory for each call 5%. So a thread keeps them for its next call, `KEPT_BYTES` at most."""

    def __init__(self):
        # Where torch fills new memory, to show what is read before it is written, no old memory is used.
        filling = torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory
        kept = _Kept({}, {}, {}) if filling else _kept_by_thread()
        self._flat, self._views, self._edges = kept

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with undefined contents; the next one of this name takes its memory."""
        view = self._views.get((name, shape, dtype))
        if view is not None:
            return view
        size = math.prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < size:
            if sum(t.nbytes for t in self._flat.values()) + size * dtype.itemsize > KEPT_BYTES:
                self._flat, self._views = dict(self._flat), {}  # from here on for this call alone
            with torch.inference_mode(False):  # the next call may be outside of it
                self._flat[name, dtype] = flat = torch.empty(size, dtype=dtype, device="cpu")
            self._views.clear()  # of the memory that it replaces too
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        with torch.inference_mode(False):
            self._views[name, shape, dtype] = view = flat[:size].view(shape)
        return view

    def edge(self, rows: int, cols: int, first: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """`[rows, cols]`: 0 where `first + i <= j < end + i`, -inf elsewhere; read only. The blocks of a call share a few of
        them, and so do layers."""
        key = (rows, cols, first, end, dtype)
        edge = self._edges.get(key)
        if edge is None:
            if rows * cols * len(self._edges) > _MOST_OF_EDGES:
                self._edges.clear()
            with torch.inference_mode(False):
                j = torch.arange(cols, device="cpu") - torch.arange(rows, device="cpu").unsqueeze(1)
                seen = (j >= first) & (j < end)
                self._edges[key] = edge = torch.zeros(seen.shape, dtype=dtype, device="cpu").masked_fill_(~seen, -torch.inf)
        return edge


class _Kept(NamedTuple):
    """What a thread keeps for its next call: memory by name and type, tensors in it by name, shape and type (to make one takes
    as long as a small operation), and the masks of edges."""

    flat: dict[tuple[str, torch.dtype], torch.Tensor]
    views: dict[tuple, torch.Tensor]
    edges: dict[tuple, torch.Tensor]


def _kept_by_thread() -> _Kept:
    if not hasattr(_of_thread, "kept"):
        _of_thread.kept = _Kept({}, {}, {})
    return _of_thread.kept


class Geometry(NamedTuple):
    """Lengths and band of one set of equally long sequences; rows and columns are counted from their start."""

    len_q: int
    len_k: int
    band: AnyBand

    @property
    def shift(self) -> int:
        return self.len_k - self.len_q

    @property
    def live_row(self) -> int:
        """Rows before this one see nothing; every later row sees a key (bottom-right alignment, sides >= 0)."""
        if self.len_k == 0:
            return self.len_q
        return min(max(first_query(0, self.shift, self.band), 0), self.len_q)

    @property
    def live_column(self) -> int:
        """Columns before this one are seen by nobody; of a window every later one is seen, if there are rows. The first of a
        chunk, so that those behind are counted from there as from the first of all."""
        first = 0 if early_keys(self.band) else first_key(self.live_row, self.shift, self.band)
        first = min(max(first, 0), self.len_k)
        return first if len(self.band) == 2 or self.band.chunk is None else first // self.band.chunk * self.band.chunk

    def row_blocks(self, step: int) -> tuple["RowBlock", ...]:
        """From the last to the first: under a causal mask the largest comes first, and the others reuse its scratch memory."""
        return _row_blocks(self, step)


class RowBlock(NamedTuple):
    """Rows `[row, row + rows)` and the columns `[start, end)` that they see; all of them see `[full_start, full_end)`. Of a
    `Pattern` all of them also see `[0, early)`, before `start`."""

    geometry: Geometry
    row: int
    rows: int
    start: int
    full_start: int
    full_end: int
    end: int
    early: int = 0

    @property
    def fewest_columns(self) -> int:
        """Columns that the row with the fewest sees; along the rows the number rises, then falls."""
        shift, len_k, band = self.geometry.shift, self.geometry.len_k, self.geometry.band
        ends = (self.row, self.row + self.rows - 1)
        return min(min(end_key(i, shift, len_k, band), len_k) - max(first_key(i, shift, band), 0) for i in ends)

    def columns_of(self, row: int) -> slice:
        """What one row of the block sees; `row` counts the rows of all heads of a group, from the block's first."""
        len_q, len_k, band = self.geometry
        start, _, _, end = key_ranges(self.row + row % self.rows, 1, len_q, len_k, 1, band)
        return slice(start, end)

    def rare_columns(self, fewest: int) -> Iterator[slice]:
        """Columns that fewer than `fewest` rows of all blocks see, if there are so many rows and the band is so wide: then they
        are at the ends."""
        len_k, (left, right) = self.geometry.len_k, self.geometry.band[:2]  # a window: others take no half scores
        low = self.start if left is None else self.geometry.shift - left + fewest - 1
        high = self.end if right is None else len_k + right - fewest + 1
        low, high = min(max(low, self.start), self.end), min(max(high, self.start), self.end)
        yield from (cols for cols in (slice(self.start, low), slice(max(low, high), self.end)) if cols.start < cols.stop)

    def tiles(self, width: int) -> Iterator[slice]:
        for first, end in ((0, self.early), (self.start, self.end)) if self.early else ((self.start, self.end),):
            for start in range(first, end, width):
                yield slice(start, min(start + width, end))

    def hide(self, s: torch.Tensor, cols: slice, scratch: Scratch, exact: bool) -> None:
        """Make the hidden scores of a tile `s` `[n, G * rows, cols]` -inf, in place; the interior of the band is not touched.

        Adding -inf is 5 times faster than overwriting, but keeps NaN: `exact` overwrites.
        """
        for low, high in ((self.start, self.full_start), (self.full_end, self.end)):
            low, high = max(low, cols.start), min(high, cols.stop)
            if low >= high:
                continue
            # Whole vectors: twice as fast, and a few visible scores more get 0 added.
            low, high = max(low // 32 * 32, cols.start), min(-(-high // 32) * 32, cols.stop)
            edge = self._edge(low, high, scratch, s.dtype)
            part = s.view(len(s), -1, self.rows, s.shape[2])[..., low - cols.start : high - cols.start]
            if exact:
                part.masked_fill_(edge != 0, -torch.inf)
            else:
                part.add_(edge)

    def _edge(self, low: int, high: int, scratch: Scratch, dtype: torch.dtype) -> torch.Tensor:
        """`[rows, high - low]`: 0 where a row sees a column, -inf elsewhere."""
        _, len_k, band = self.geometry
        shift = self.geometry.shift
        if len(band) == 2:
            first = first_key(self.row, shift, band) - low if band.left is not None else -self.rows
            end = end_key(self.row, shift, len_k, band) - low if band.right is not None else high - low
            return scratch.edge(self.rows, high - low, first, end, dtype)
        i = torch.arange(self.row, self.row + self.rows, device="cpu").unsqueeze(1)
        seen = visible(i, torch.arange(low, high, device="cpu"), shift, len_k, band)
        return torch.zeros(seen.shape, dtype=dtype, device="cpu").masked_fill_(~seen, -torch.inf)

    def blind_rows(self, cols: slice) -> Optional[torch.Tensor]:
        """`[rows]`: rows that see nothing of one of several tiles, or only early keys; None where every row sees something."""
        seen_by_all = max(cols.start, self.full_start) < min(cols.stop, self.full_end)
        if seen_by_all or (cols.start, cols.stop) == (self.start, self.end):
            return None
        i = torch.arange(self.row, self.row + self.rows, device="cpu")
        shift, len_k, band = self.geometry.shift, self.geometry.len_k, self.geometry.band
        blind = (first_key(i, shift, band) >= cols.stop) | (end_key(i, shift, len_k, band) <= cols.start)
        return blind if bool(blind.any()) else None


@functools.lru_cache(maxsize=64)  # layers meet the same lengths, and short sequences take not much longer than this
def _row_blocks(geometry: Geometry, step: int) -> tuple[RowBlock, ...]:
    len_q, len_k, band = geometry

    def block(row: int) -> RowBlock:
        rows = min(step, len_q - row)
        ranges = key_ranges(row, rows, len_q, len_k, 1, band)
        return RowBlock(geometry, row, rows, *ranges, early(ranges[0], band))

    return tuple(block(row) for row in reversed(range(geometry.live_row, len_q, step)))


def sequences(problem, operands, for_q=(), for_k=()) -> Iterator[tuple[list, list]]:
    """Each set of equally long sequences as dense views: q and `for_q`, then k, v and `for_k`.

    Every tensor has the sequence's rows in dimension 1 (packed: 0) and the heads in the next: `[B, T, H, ...]`.

    Rows that see nothing and columns that nobody sees are cut off, and sequences of nothing else left out: what they hold may
    change no bit of a result, also not by a choice that is made from the values of an operand.
    """
    return ((rows, cols) for _, rows, cols in numbered_sequences(problem, operands, for_q, for_k))


def numbered_sequences(problem, operands, for_q=(), for_k=()) -> Iterator[tuple[int, list, list]]:
    """`sequences`, and the number of the first one in each set."""
    rows, cols = [operands.q, *for_q], [operands.k, operands.v, *for_k]
    for number, (dense_rows, dense_cols) in enumerate(_dense(problem, operands, rows, cols)):
        geometry = Geometry(dense_rows[0].shape[1], dense_cols[0].shape[1], problem.band)
        row, col = geometry.live_row, geometry.live_column
        if row < geometry.len_q:
            yield number, _from(row, dense_rows), _from(col, dense_cols)


def all_seen(problem, operands) -> bool:
    """Does `sequences` leave out nothing: is every row in a sequence and sees a key, and every key in one and seen?"""

    def live(len_q: int, len_k: int) -> bool:
        geometry = Geometry(len_q, len_k, problem.band)
        return geometry.live_row == geometry.live_column == 0 and len_q > 0

    if not problem.packed:
        return live(problem.len_q, problem.len_k)
    bounds_q, bounds_k = operands.cu_seqlens_q.tolist(), operands.cu_seqlens_k.tolist()
    ends = (bounds_q[0], bounds_k[0], bounds_q[-1], bounds_k[-1]) == (0, 0, operands.q.shape[0], operands.k.shape[0])
    pairs = zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False)
    return ends and all(live(q1 - q0, k1 - k0) for q0, q1, k0, k1 in pairs if q1 > q0 or k1 > k0)


def _from(start: int, tensors: list) -> list:
    return [t[:, start:] for t in tensors] if start else tensors


def _dense(problem, operands, rows, cols) -> Iterator[tuple[list, list]]:
    if not problem.packed:
        yield rows, cols
        return
    bounds_q, bounds_k = operands.cu_seqlens_q.tolist(), operands.cu_seqlens_k.tolist()
    rows_of, cols_of = ([_sequences_of(t, bounds) for t in ts] for ts, bounds in ((rows, bounds_q), (cols, bounds_k)))
    for i in range(problem.batch):
        yield [parts[i] for parts in rows_of], [parts[i] for parts in cols_of]


def _sequences_of(t: torch.Tensor, bounds: list[int]) -> list[torch.Tensor]:
    """`[T, ...]` -> `[1, T_b, ...]` of each sequence, views: all by one operation."""
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    parts = t.unsqueeze(0).split([bounds[0], *lengths, t.shape[0] - bounds[-1]], 1)
    return list(parts[1:-1])


def by_kv_head(t: torch.Tensor, heads_k: int) -> torch.Tensor:
    """`[B, T, Hq, ...]` -> `[B, Hk, G, T, ...]`, a view."""
    return t.unflatten(2, (heads_k, -1)).movedim(1, 3)


class Chunks(NamedTuple):
    """How a set of sequences is cut: `step` rows a block, at most `width` columns a tile, KV heads by `parts`."""

    step: int
    width: int
    parts: list[tuple[slice, slice]]
    blocks: tuple[RowBlock, ...]

    @classmethod
    def of(cls, tile, geometry: Geometry, batch: int, heads_k: int, group: int, half: bool, by_head=False) -> "Chunks":
        """`half`: scores take 2 bytes, and twice as many heads fit. `by_head`: of few heads all sequences."""
        most_scores = (1 + half) * tile.block_m * tile.block_n
        step = max(1, min(block_rows(tile, geometry.len_q, batch * heads_k * group, geometry.band), geometry.len_q))
        blocks = geometry.row_blocks(step)
        widest = max((max(block.end - block.start, block.early) for block in blocks), default=0)
        width = max(1, min(widest, tile.block_n))
        most_rows = max(1, most_scores // (group * width))
        if step > most_rows:
            step, blocks = most_rows, geometry.row_blocks(most_rows)
        most_heads = max(1, most_scores // (group * step * width))
        if by_head:
            parts = [(b, h) for h, b in _rectangles(heads_k, batch, most_heads)]
        else:
            parts = list(_rectangles(batch, heads_k, most_heads)) if widest else []
        return cls(step, width, parts, blocks)


def take_heads(t: torch.Tensor, part: tuple[slice, slice]) -> torch.Tensor:
    """`t[part]`, `[b, h, ...]`; `t` itself where that is all of it."""
    if all(one.start == 0 and one.stop >= size for one, size in zip(part, t.shape, strict=False)):
        return t
    return t[part]


def _rectangles(batch: int, heads: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Cuts the `[batch, heads]` plane into pieces of at most `most` members."""
    if most >= heads:
        step = max(1, most // heads)
        for b in range(0, batch, step):
            yield slice(b, min(b + step, batch)), slice(0, heads)
        return
    for b in range(batch):
        for h in range(0, heads, most):
            yield slice(b, b + 1), slice(h, min(h + most, heads))


def fold(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[b, h, ...]` -> `[n, ...]` in `dtype`, a view where it can be one."""
    return t.to(dtype).flatten(0, 1)


def settled(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Those whose products read them as they lie: contiguous, from an address at which vectors may begin. Of anything else the
    last bits would depend on strides. Those of half types are copied as they are folded."""

    def lies_well(t) -> bool:
        return t.dtype in COMPUTE or (t.is_contiguous() and t.data_ptr() % _ALIGNMENT == 0)

    return [t if lies_well(t) else t.clone(memory_format=torch.contiguous_format) for t in tensors]


def fold_contiguous(t: torch.Tensor, dtype: torch.dtype, name: str, scratch: Scratch, *extra: float) -> torch.Tensor:
    """`[b, h, T, D]` -> `[n, T, D + len(extra)]` in `dtype`, with constants for the extra columns: K and V, once. Contiguous in
    bf16, whose matmuls would copy anything else for every block; others take rows that lie apart, and pieces that overlap."""
    dim = t.shape[-1]
    fits = t.is_contiguous() or (dtype != torch.bfloat16 and 1 in t.shape[:2])
    if t.dtype == dtype and fits and not extra:
        return t.flatten(0, 1)
    result = scratch(name, (*t.shape[:-1], dim + len(extra)), dtype)
    result[..., :dim].copy_(t)
    for i, value in enumerate(extra, dim):
        result[..., i].fill_(value)
    return result.flatten(0, 1)


def times(t: torch.Tensor, factor: float, name: str, dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
    """`factor t` in `dtype`, of which `t` is or narrower: contiguous."""
    result = scratch(name, t.shape, dtype)
    return torch.mul(t, factor, out=result) if t.dtype == dtype else result.copy_(t).mul_(factor)


def widen(k: torch.Tensor, dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
    """K in the type that scores are computed in."""
    return k if k.dtype == dtype else scratch("wide", k.shape, dtype).copy_(k)


def take_columns(t: torch.Tensor, cols: slice, scratch: Scratch) -> torch.Tensor:
    """`[n, cols, D]`; contiguous in bf16, whose matmuls take such a tensor or its transpose as it is. Anything else they copy
    first, and a transposed slice so slowly that a score matmul takes 40% more."""
    part = t[:, cols]
    if t.dtype != torch.bfloat16 or part.is_contiguous():
        return part
    return scratch("columns", part.shape, t.dtype).copy_(part)


def take_rows(block: RowBlock, *tensors: torch.Tensor) -> torch.Tensor:
    """The rows of a block of `[n, G, Tq, D]`, folded: `[n, G * rows, D]`; several tensors become one, side by side."""
    rows = [t.narrow(2, block.row, block.rows) for t in tensors]
    one = rows[0] if len(rows) == 1 else torch.cat(rows, -1)
    return (one.contiguous() if one.dtype == torch.bfloat16 else one).flatten(1, 2)  # as `fold_contiguous`
