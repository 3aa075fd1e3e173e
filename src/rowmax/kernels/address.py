"""Where a sequence, a head and a tile of rows live: dense `[B, T, H, D]` and packed `[T, H, D]`.

All offsets are 64-bit: a tensor may exceed 2^31 elements. `cu_seqlens` values are clamped into the tensors, so that hostile
ones give wrong numbers at worst, never an access outside.
"""

import triton
import triton.language as tl

from rowmax.kernels.tile_ops import clamp


@triton.jit
def find_sequence(tile, cu_seqlens, batch, BLOCK: tl.constexpr):
    """The sequence that row tile `tile` of a packed tensor belongs to.

    Sequence b owns the tiles from `cu[b] // BLOCK + b` on: at least as many as it needs, without a scan over the lengths
    and without knowing them on the host. Surplus tiles find themselves past their sequence's end and return.
    """
    low = 0
    high = batch
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle).to(tl.int32) // BLOCK + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def extent(cu_seqlens, b, total):
    """`(begin, length)` of sequence b in a packed tensor of `total` rows."""
    begin = clamp(tl.load(cu_seqlens + b), 0, total).to(tl.int32)
    end = clamp(tl.load(cu_seqlens + b + 1), begin, total).to(tl.int32)
    return begin, end - begin


@triton.jit
def in_group(tile, every, tiles, members):
    """`(head, place)`: of which of `every` heads a tile is, and which of its `tiles`, counted in the order of the walk.

    Heads come in groups of `members`, whose other side stays in L2; inside a group the first tile of every head first.
    """
    group = tile // (tiles * members)
    place = tile % (tiles * members)
    present = tl.minimum(members, every - group * members)
    return group * members + place % present, place // present


@triton.jit
def line_begin(begin, sequence):
    """Where a packed sequence begins in a line of numbers that TMA reads: at a multiple of 4 numbers, which are 16 bytes.

    From anywhere else loading is an illegal instruction. Sequences do not overlap; a line has 4 numbers more for each.
    """
    return (begin // 4 + sequence) * 4


@triton.jit
def locate(pid, cu_rows, cu_others, batch, heads, tiles, len_rows, len_others, BLOCK: tl.constexpr):
    """The work of one program: `(tile_start, head, b, begin_rows, len_rows, begin_others, len_others)`.

    Tiles of one head run side by side, so that they share its K/V in L2; the last tile first: with a causal mask it is the
    longest. Packed: `b` is 0 (rows are counted from `begin`), and a surplus tile starts at or past its sequence's end.
    """
    tile = tiles - 1 - pid % tiles
    head = pid // tiles % heads
    if cu_rows is None:
        return tile * BLOCK, head, pid // (tiles * heads), 0, len_rows, 0, len_others
    else:
        b = find_sequence(tile, cu_rows, batch, BLOCK)
        begin_rows, own_rows = extent(cu_rows, b, len_rows)
        begin_others, own_others = extent(cu_others, b, len_others)
        start = (tile - begin_rows // BLOCK - b) * BLOCK
        return tl.where(start < 0, own_rows, start), head, 0, begin_rows, own_rows, begin_others, own_others


@triton.jit
def sequence_of(pid, cu_rows, batch, program_heads, tiles, BLOCK: tl.constexpr):
    """The number of the sequence of the program of `locate`, packed or not."""
    if cu_rows is None:
        return pid // (tiles * program_heads)
    else:
        return find_sequence(tiles - 1 - pid % tiles, cu_rows, batch, BLOCK)


@triton.jit
def slopes_base(slopes, pid, cu_rows, batch, program_heads, tiles, heads, BLOCK: tl.constexpr, PER_SEQUENCE: tl.constexpr):
    """Pointer to the slopes of all heads, `[heads]`, for the program of `locate`: those of its sequence if each has its own."""
    if PER_SEQUENCE:
        b = sequence_of(pid, cu_rows, batch, program_heads, tiles, BLOCK)
        return slopes + b.to(tl.int64) * heads
    else:
        return slopes


@triton.jit
def head_base(pointer, strides, b, begin, head):
    """Pointer to row 0, dimension 0 of one head of one sequence. `strides` are (batch, row, head)."""
    return pointer + b.to(tl.int64) * strides[0] + tl.cast(begin, tl.int64) * strides[1] + head.to(tl.int64) * strides[2]


@triton.jit
def source(base, row_stride, length, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """What `load_tile` loads from: a TMA descriptor of the sequence's own rows, or the pointer itself."""
    if DESCRIPTOR:
        return tl.make_tensor_descriptor(base, [tl.maximum(length, 1), DIM], [row_stride, 1], [ROWS, COLS])
    else:
        return base


@triton.jit
def load_tile(
    origin, start, row_stride, length, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, MASKED: tl.constexpr
):
    """Rows `[start, start + ROWS)`, `[ROWS, COLS]`; 0 past `length` (if `MASKED`) and past `DIM`."""
    if isinstance(origin, tl.tensor_descriptor):
        return origin.load([start, 0])
    else:
        rows = start + tl.arange(0, ROWS)
        dims = tl.arange(0, COLS)
        pointers = origin + rows.to(tl.int64)[:, None] * row_stride + dims[None, :]
        if MASKED and COLS != DIM:
            return tl.load(pointers, mask=(rows < length)[:, None] & (dims < DIM)[None, :], other=0.0)
        elif MASKED:
            return tl.load(pointers, mask=(rows < length)[:, None], other=0.0)
        elif COLS != DIM:
            return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def group_source(
    base, strides, length, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """What `load_member` loads from: the heads of one group, `base` at the first."""
    if DESCRIPTOR:
        return tl.make_tensor_descriptor(
            base, [GROUP, tl.maximum(length, 1), DIM], [strides[2], strides[1], 1], [1, ROWS, COLS]
        )
    else:
        return base


@triton.jit
def load_member(
    origin, member, start, strides, length, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, MASKED: tl.constexpr
):
    """`load_tile` from head `member` of a group."""
    if isinstance(origin, tl.tensor_descriptor):
        return origin.load([member, start, 0]).reshape([ROWS, COLS])
    else:
        base = origin + tl.cast(member, tl.int64) * strides[2]
        return load_tile(base, start, strides[1], length, DIM, ROWS, COLS, MASKED)


@triton.jit
def store_tile(base, value, start, row_stride, length, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Store `[ROWS, COLS]` at rows `[start, start + ROWS)`, clipped to `length` and `DIM`."""
    rows = start + tl.arange(0, ROWS)
    dims = tl.arange(0, COLS)
    pointers = base + rows.to(tl.int64)[:, None] * row_stride + dims[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=(rows < length)[:, None] & (dims < DIM)[None, :])
