"""Decoding with latent attention (MLA) on Hopper: 64 rows of one query against a part of its sequence's keys, in pages.

    m = rowmax(S),  l = rowsum(2^(S - m)),  acc = 2^(S - m) V    S = scale log2(e) Q K^T,  V = the first 512 of K's 576 columns

A block has four parts: a producer warp fetches K; the scorer, a warpgroup, computes P = 2^(S - m) and all that belongs to rows;
two multipliers, a warpgroup each, multiply it with the left and the right 256 columns of V, 128 registers of sums in a thread.
P and the factors of the sums go through shared memory. Launched by `kernels/latent_launch.py`; programs are told what to do by
`triton/work.py`, and partial results are joined by `triton/combine.py`.
Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding" (2023); the online softmax is that of `forward.py`. The shape is our own.

Cycles of a multiprocessor for 64 rows and 64 keys, counted (tensor cores 4096 FLOP, shared memory 128 bytes a cycle):

    tensor cores     Q K^T 36 x 32 = 1152, P V 16 x 64 = 1024: 2176; 600 TFLOP/s of the chip at 1.7 GHz are 3330
    shared memory    K written once 576, read by Q K^T 576, by P V 512; Q 320 (all of it from shared memory: 576); P 192: 2176

With S cut in two, 32 keys for each of two warpgroups that also have the sums, Q would be read twice as often, 2880 in all, and
everybody would wait for both row maxima. With roles P V of a tile runs beside Q K^T of the next and has nothing to wait for
but P. `HELD`: the first columns of Q stay in the scorer's registers, and the place they came in is one more piece of K.
`EARLY`: the scorer issues Q K^T of the next tile before the exponentials of this one.

K comes as 64 columns and in pieces of 256 or 128, the left and the right half's in turn, whose buffers are given back by the
last who reads them: 64 by the scorer, pieces by the multipliers, for whom P is the sign that the scorer is done with them.
`EARLY` holds this tile's values and the next one's keys at once; with pieces of 128 columns the tile after them begins to
arrive when half of P V is done. 72 KiB every 3330 cycles on all multiprocessors are 5 TB/s, more than HBM has: programs with
the two row tiles of a sequence of 128 heads stand side by side, so that L2 serves one.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from rowmax.kernels.gluon.layouts import (
    column_layout,
    out_layout,
    row_layout,
    score_layout,
    share_layout,
    slot_layout,
    weight_layout,
)
from rowmax.kernels.gluon.names import scale_unless_one, tma_load
from rowmax.kernels.gluon.ring import buffer_of, give, open_ring, release, release_read, wait_empty, wait_full
from rowmax.kernels.gluon.softmax import finish, online_step, thread_sum
from rowmax.kernels.tile_ops import clamp

ROWS = gl.constexpr(64)  # query heads of a tile
KEYS = gl.constexpr(64)  # of a tile
HALF = gl.constexpr(256)  # columns of V that one warpgroup multiplies
STEP = gl.constexpr(128)  # of them at once: ptxas takes no product with 128 registers of sums in a block of 512 threads
ROPE = gl.constexpr(64)  # columns of Q and K that are none of V
# What a program is told, numbers of 64 bits (`triton/work.py`).
SEQUENCE, BATCH, TOKEN, HEAD, LOW, TURNS, END, KIND, OUT, OUT_STEP, LSE, LSE_STEP, ACC, M, L = map(gl.constexpr, range(15))
FIELDS = gl.constexpr(16)
WHOLE = gl.constexpr(1)  # kinds of work: the rows have no other part
PART = gl.constexpr(2)


@dataclass(frozen=True)
class Build:
    """What is fixed when the kernel is compiled.

    Attributes:
        PER_PAGE: tiles of keys in a page.
        WIDTH: columns of a piece of K, 256 or 128.
        HELD: pieces of Q that are held in registers, from its first columns on.
        HELD_ROPE: 1: so are the last columns of Q; those of K are then multiplied last, so that one buffer does.
        PIECES, ROPES: pieces of K, and last columns of it, in flight.
        EARLY: scores of a tile are computed during the exponentials of the one before.
        REGISTERS, SCORER_REGISTERS, PRODUCER_REGISTERS: of one thread.
        EACH: pieces of a tile.
    """

    PER_PAGE: int
    NEED_LSE: bool
    WIDTH: int
    HELD: int
    HELD_ROPE: int
    PIECES: int
    ROPES: int
    EARLY: bool
    REGISTERS: int
    SCORER_REGISTERS: int
    PRODUCER_REGISTERS: int
    EACH: int = 0

    def __post_init__(self):  # in a kernel, an attribute of a constant is a constant only if it says so
        for name, value in vars(self).copy().items():
            object.__setattr__(self, name, gl.constexpr(value))
        object.__setattr__(self, "EACH", gl.constexpr(2 * HALF.value // self.WIDTH.value))


@gluon.jit
def _far(work, FIELD: gl.constexpr):
    """What this program is told."""
    return gl.load(work + gl.program_id(0) * FIELDS + FIELD)


@gluon.jit
def _of(work, FIELD: gl.constexpr):
    return _far(work, FIELD).to(gl.int32)


@gluon.jit
def _page(table, tile, pages, BUILD: gl.constexpr):
    """Of a tile of keys."""
    return clamp(gl.load(table + tile // BUILD.PER_PAGE), 0, pages - 1).to(gl.int32)


@gluon.jit
def _fetch(ring, buffers, source, place, turn, STAGES: gl.constexpr):
    """When the buffer is empty, load a box into it."""
    full, _ = ring
    i = buffer_of(turn, STAGES)
    wait_empty(ring, turn, STAGES)
    mbarrier.expect(full.index(i), source.block_type.nbytes)
    tma_load(source, [place[0], place[1], place[2], place[3]], full.index(i), buffers.index(i))


@gluon.constexpr_function
def column_of(c, WIDTH):
    """Where the c-th piece of a row begins: the left half's and the right half's in turn."""
    return c % 2 * 256 + c // 2 * WIDTH


@gluon.constexpr_function
def held_of(c, HELD):
    """Which of the held pieces the c-th piece is, or -1. Held are the first pieces of the left half."""
    return c // 2 if c % 2 == 0 and c // 2 < HELD else -1


@gluon.constexpr_function
def stored_of(c, HELD):
    """Which of the pieces of Q in shared memory the c-th piece is, if it is not held."""
    return c - min((c + 1) // 2, HELD)


@gluon.jit
def _producer(work, table, table_stride, pages, sources, buffers, rings, BUILD: gl.constexpr):
    """Fetches Q, then K; the page of a tile is looked up a tile ahead."""
    q_source, q_rope_source, k_source, k_rope_source = sources
    pieces, ropes, q_pieces, q_rope, _weights, _alphas = buffers
    piece_ring, rope_ring, q_ring, q_rope_ring, _weight_ring = rings
    turns = _of(work, TURNS)
    if turns > 0:
        b = _of(work, BATCH)
        token = _of(work, TOKEN)
        head = _of(work, HEAD)
        low = _of(work, LOW)
        table += _far(work, SEQUENCE) * table_stride
        page = _page(table, low, pages, BUILD)
        zero = turns * 0
        for c in gl.static_range(BUILD.HELD):
            _fetch(piece_ring, pieces, q_source, (b, head, token, c * BUILD.WIDTH), zero + c, BUILD.PIECES)
        for c in gl.static_range(BUILD.EACH):
            if held_of(c, BUILD.HELD) < 0:
                place = (b, head, token, column_of(c, BUILD.WIDTH))
                _fetch(q_ring, q_pieces, q_source, place, zero + stored_of(c, BUILD.HELD), BUILD.EACH - BUILD.HELD)
        if BUILD.HELD_ROPE:
            _fetch(rope_ring, ropes, q_rope_source, (b, head, token, 2 * HALF), zero, BUILD.ROPES)
        else:
            _fetch(q_rope_ring, q_rope, q_rope_source, (b, head, token, 2 * HALF), zero, 1)
        for j in range(turns):
            following = _page(table, low + gl.minimum(j + 1, turns - 1), pages, BUILD)
            slot = (low + j) % BUILD.PER_PAGE * KEYS
            if not BUILD.HELD_ROPE:
                _fetch(rope_ring, ropes, k_rope_source, (page, slot, 0, 2 * HALF), j, BUILD.ROPES)
            for c in gl.static_range(BUILD.EACH):
                place = (page, slot, 0, column_of(c, BUILD.WIDTH))
                _fetch(piece_ring, pieces, k_source, place, _turn(j, c, BUILD), BUILD.PIECES)
            if BUILD.HELD_ROPE:
                _fetch(rope_ring, ropes, k_rope_source, (page, slot, 0, 2 * HALF), 1 + j, BUILD.ROPES)
            page = following


@gluon.jit
def _turn(j, c, BUILD: gl.constexpr):
    """Of the ring of pieces, of the c-th piece of tile j; before K there is what is held of Q."""
    return BUILD.HELD + BUILD.EACH * j + c


@gluon.jit
def _piece(pieces, turn, BUILD: gl.constexpr):
    return pieces.index(buffer_of(turn, BUILD.PIECES)).reshape([KEYS, BUILD.WIDTH])


@gluon.constexpr_function
def clear_layout():
    """`[64, 64]` in rows of 16 bytes for each thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def _clear(v, count, WIDTH: gl.constexpr):
    """Keys from `count` on are no keys of the sequence: 0 times what lies there must be 0."""
    rows = gl.arange(0, KEYS, layout=row_layout(clear_layout()))
    for c in gl.static_range(WIDTH // 64):
        part = v.slice(64 * c, 64, dim=1)
        x = part.load(clear_layout())
        part.store(gl.where(gl.expand_dims(rows < count, 1), x, 0.0))
    fence_async_shared()


@gluon.jit
def _last_columns(s, rope, j, wanted, buffers, rings, BUILD: gl.constexpr):
    """S, with the product of the columns that are none of V."""
    _pieces, ropes, _q_pieces, _q_rope, _weights, _alphas = buffers
    _piece_ring, rope_ring, _q_ring, _q_rope_ring, _weight_ring = rings
    turn = BUILD.HELD_ROPE + j
    wait_full(rope_ring, turn, BUILD.ROPES, wanted)
    k = ropes.index(buffer_of(turn, BUILD.ROPES)).reshape([KEYS, ROPE])
    return warpgroup_mma(rope, k.permute((1, 0)), s, use_acc=BUILD.HELD_ROPE == 1, is_async=True)


@gluon.jit
def _scores(q, j, wanted, buffers, rings, BUILD: gl.constexpr):
    """Q K^T of a tile, issued but not awaited, in the order in which K arrives. Not `wanted`: of whatever lies there."""
    pieces, _ropes, _q_pieces, _q_rope, _weights, _alphas = buffers
    piece_ring, _rope_ring, _q_ring, _q_rope_ring, _weight_ring = rings
    of_pieces, rope = q
    s = gl.zeros([ROWS, KEYS], gl.float32, score_layout(KEYS))
    if not BUILD.HELD_ROPE:
        s = _last_columns(s, rope, j, wanted, buffers, rings, BUILD)
    for c in gl.static_range(BUILD.EACH):
        turn = _turn(j, c, BUILD)
        wait_full(piece_ring, turn, BUILD.PIECES, wanted)
        k = _piece(pieces, turn, BUILD).permute((1, 0))
        s = warpgroup_mma(of_pieces[c], k, s, use_acc=c > 0 or not BUILD.HELD_ROPE, is_async=True)
    if BUILD.HELD_ROPE:
        s = _last_columns(s, rope, j, wanted, buffers, rings, BUILD)
    return s


@gluon.jit
def _give_weights(s, m, l, j, behind, scale_log2, buffers, rings, BUILD: gl.constexpr):
    """`(m, l)`. `behind`: keys from this tile's first one to the end."""
    pieces, _ropes, _q_pieces, _q_rope, weights, alphas = buffers
    _piece_ring, _rope_ring, _q_ring, _q_rope_ring, weight_ring = rings
    s = s * scale_log2
    if behind < KEYS:
        cols = gl.arange(0, KEYS, layout=column_layout(score_layout(KEYS)))
        s = gl.where(gl.expand_dims(cols < behind, 0), s, float("-inf"))
    p, m, l, alpha = online_step(s, m, l, 1.0, False, True, True)
    wait_empty(weight_ring, j, 1)
    alphas.index(0).store(alpha)
    weights.index(0).store(p.to(weights.dtype))
    if behind < KEYS:
        for c in gl.static_range(BUILD.EACH):
            _clear(_piece(pieces, _turn(j, c, BUILD), BUILD), behind, BUILD.WIDTH)
    give(weight_ring, j, 1)
    return m, l


@gluon.jit
def _q_piece(buffers, rings, zero, c: gl.constexpr, BUILD: gl.constexpr):
    """The c-th piece of Q, in registers or in shared memory."""
    pieces, _ropes, q_pieces, _q_rope, _weights, _alphas = buffers
    piece_ring, _rope_ring, q_ring, _q_rope_ring, _weight_ring = rings
    if held_of(c, BUILD.HELD) >= 0:
        turn = zero + held_of(c, BUILD.HELD)
        wait_full(piece_ring, turn, BUILD.PIECES)
        q = _piece(pieces, turn, BUILD).load(weight_layout(KEYS))
        release_read(piece_ring, turn, BUILD.PIECES)
        return q
    else:
        stored: gl.constexpr = stored_of(c, BUILD.HELD)
        wait_full(q_ring, zero + stored, BUILD.EACH - BUILD.HELD)
        return q_pieces.index(stored).reshape([ROWS, BUILD.WIDTH])


@gluon.jit
def _q_last(buffers, rings, zero, BUILD: gl.constexpr):
    """The columns of Q that are none of V's, in registers or in shared memory."""
    _pieces, ropes, _q_pieces, q_rope, _weights, _alphas = buffers
    _piece_ring, rope_ring, _q_ring, q_rope_ring, _weight_ring = rings
    if BUILD.HELD_ROPE:
        wait_full(rope_ring, zero, BUILD.ROPES)
        rope = ropes.index(0).reshape([ROWS, ROPE]).load(weight_layout(KEYS))
        release_read(rope_ring, zero, BUILD.ROPES)
        return rope
    else:
        wait_full(q_rope_ring, zero, 1)
        return q_rope.index(0).reshape([ROWS, ROPE])


@gluon.jit
def _scorer(work, lse_ptr, part_ptr, scale_log2, buffers, rings, BUILD: gl.constexpr):
    """P of every tile with what the sums are to be multiplied by before it is added; at the end 1 / l, and LSE or m and l."""
    _pieces, _ropes, _q_pieces, _q_rope, _weights, alphas = buffers
    _piece_ring, rope_ring, _q_ring, _q_rope_ring, weight_ring = rings
    turns = _of(work, TURNS)
    keys = _of(work, END) - _of(work, LOW) * KEYS  # from the first tile to the end
    l = thread_sum(gl.zeros([ROWS, KEYS], gl.float32, score_layout(KEYS)))
    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout(score_layout(KEYS)))
    if turns > 0:
        zero = turns * 0
        of_pieces = ()
        for c in gl.static_range(BUILD.EACH):
            of_pieces += (_q_piece(buffers, rings, zero, c, BUILD),)
        q = (of_pieces, _q_last(buffers, rings, zero, BUILD))
        if BUILD.EARLY:
            s = warpgroup_mma_wait(0, deps=[_scores(q, zero, True, buffers, rings, BUILD)])
            release(rope_ring, zero + BUILD.HELD_ROPE, BUILD.ROPES)
            for j in range(turns):
                following = _scores(q, j + 1, j + 1 < turns, buffers, rings, BUILD)
                m, l = _give_weights(s, m, l, j, keys - j * KEYS, scale_log2, buffers, rings, BUILD)
                s = warpgroup_mma_wait(0, deps=[following])
                if j + 1 < turns:
                    release(rope_ring, j + 1 + BUILD.HELD_ROPE, BUILD.ROPES)
        else:
            for j in range(turns):
                s = warpgroup_mma_wait(0, deps=[_scores(q, j, True, buffers, rings, BUILD)])
                release(rope_ring, j + BUILD.HELD_ROPE, BUILD.ROPES)
                m, l = _give_weights(s, m, l, j, keys - j * KEYS, scale_log2, buffers, rings, BUILD)
    inverse, lse = finish(m, gl.convert_layout(gl.sum(l, 1), m.type.layout), 1.0)
    wait_empty(weight_ring, turns, 1)
    alphas.index(0).store(inverse)
    give(weight_ring, turns, 1)
    kind = _of(work, KIND)
    rows = gl.arange(0, ROWS, layout=row_layout(score_layout(KEYS)))
    if kind == PART:
        gl.store(part_ptr + _far(work, M) + rows, m)
        gl.store(part_ptr + _far(work, L) + rows, gl.convert_layout(gl.sum(l, 1), m.type.layout))
    if BUILD.NEED_LSE:
        if kind == WHOLE:
            gl.store(lse_ptr + _far(work, LSE) + rows * _far(work, LSE_STEP), lse)


@gluon.jit
def _scaled(acc, alpha):
    acc, alpha = gl.broadcast(acc, alpha)
    return scale_unless_one(acc, alpha, STEP // 2)


@gluon.jit
def _store(acc, inverse, first, work, o_ptr, part_ptr, kind):
    """Columns of O from `first` on, or of a partial result."""
    rows = gl.arange(0, ROWS, layout=row_layout(out_layout(STEP)))
    cols = gl.expand_dims(first + gl.arange(0, STEP, layout=column_layout(out_layout(STEP))), 0)
    if kind == PART:
        gl.store(part_ptr + _far(work, ACC) + gl.expand_dims(rows * 2 * HALF, 1) + cols, acc)
    if kind == WHOLE:
        line = gl.expand_dims(rows * _far(work, OUT_STEP), 1)
        gl.store(o_ptr + _far(work, OUT) + line + cols, (acc * inverse).to(o_ptr.dtype.element_ty))


@gluon.jit
def _multiplier(work, o_ptr, part_ptr, buffers, rings, WHICH: gl.constexpr, BUILD: gl.constexpr):
    """One half of O. P is copied to registers, so that its place is free at once."""
    pieces, _ropes, _q_pieces, _q_rope, weights, alphas = buffers
    piece_ring, _rope_ring, _q_ring, _q_rope_ring, weight_ring = rings
    turns = _of(work, TURNS)
    left = gl.zeros([ROWS, STEP], gl.float32, out_layout(STEP))
    right = gl.zeros([ROWS, STEP], gl.float32, out_layout(STEP))
    for j in range(turns):
        turn = _turn(j, WHICH, BUILD)
        wait_full(piece_ring, turn, BUILD.PIECES)
        v = _piece(pieces, turn, BUILD)
        wait_full(weight_ring, j, 1)
        p = weights.index(0).load(weight_layout(STEP))
        alpha = gl.expand_dims(alphas.index(0).load(row_layout(out_layout(STEP))), 1)
        release(weight_ring, j, 1)
        left = _scaled(left, alpha)
        right = _scaled(right, alpha)
        if BUILD.EACH == 2:
            left = warpgroup_mma(p, v.slice(0, STEP, dim=1), left, is_async=True)
            right = warpgroup_mma(p, v.slice(STEP, STEP, dim=1), right, is_async=True)
            left, right = warpgroup_mma_wait(0, deps=[left, right])
            release(piece_ring, turn, BUILD.PIECES)
        else:
            left = warpgroup_mma(p, v, left, is_async=True)
            wait_full(piece_ring, turn + 2, BUILD.PIECES)
            right = warpgroup_mma(p, _piece(pieces, turn + 2, BUILD), right, is_async=True)
            left = warpgroup_mma_wait(1, deps=[left])
            release(piece_ring, turn, BUILD.PIECES)
            right = warpgroup_mma_wait(0, deps=[right])
            release(piece_ring, turn + 2, BUILD.PIECES)
    wait_full(weight_ring, turns, 1)
    inverse = gl.expand_dims(alphas.index(0).load(row_layout(out_layout(STEP))), 1)
    kind = _of(work, KIND)
    _store(left, inverse, WHICH * HALF, work, o_ptr, part_ptr, kind)
    _store(right, inverse, WHICH * HALF + STEP, work, o_ptr, part_ptr, kind)


@gluon.jit
def latent_kernel(
    q_source, q_rope_source,  # descriptors of [B, H, T, D], a packed tensor with B = 1
    k_source, k_rope_source,  # of [page, slot, 1, D]
    o_ptr, lse_ptr,  # as `triton/work.py` says where; None: no LSE
    part_ptr,  # fp32, as of `triton/decode.py`; any pointer where no item has several parts
    table_ptr,  # [B, columns]
    work_ptr,  # int64 [programs, FIELDS]
    table_stride, scale_log2, pages,
    BUILD: gl.constexpr,
):  # fmt: skip
    """A program does what it is told."""
    dtype: gl.constexpr = q_source.dtype
    pieces = gl.allocate_shared_memory(dtype, [BUILD.PIECES, 1, KEYS, 1, BUILD.WIDTH], k_source.layout)
    ropes = gl.allocate_shared_memory(dtype, [BUILD.ROPES, 1, KEYS, 1, ROPE], k_rope_source.layout)
    q_pieces = gl.allocate_shared_memory(dtype, [BUILD.EACH - BUILD.HELD, 1, ROWS, 1, BUILD.WIDTH], q_source.layout)
    q_rope = ropes
    if not BUILD.HELD_ROPE:
        q_rope = gl.allocate_shared_memory(dtype, [1, 1, ROWS, 1, ROPE], q_rope_source.layout)
    weights = gl.allocate_shared_memory(dtype, [1, ROWS, KEYS], share_layout(KEYS, dtype))
    alphas = gl.allocate_shared_memory(gl.float32, [1, ROWS], slot_layout())
    piece_ring = open_ring(BUILD.PIECES, 1)
    rope_ring = open_ring(BUILD.ROPES, 1)
    q_ring = open_ring(BUILD.EACH - BUILD.HELD, 1)
    q_rope_ring = open_ring(1, 1)
    weight_ring = open_ring(1, 2)
    fence_async_shared()
    if not BUILD.NEED_LSE:
        lse_ptr = part_ptr
    sources = (q_source, q_rope_source, k_source, k_rope_source)
    buffers = (pieces, ropes, q_pieces, q_rope, weights, alphas)
    rings = (piece_ring, rope_ring, q_ring, q_rope_ring, weight_ring)
    # Constants stand inside the calls: a tuple in a variable would turn them into tensors.
    gl.warp_specialize([
        (_multiplier, (work_ptr, o_ptr, part_ptr, buffers, rings, 0, BUILD)),
        (_multiplier, (work_ptr, o_ptr, part_ptr, buffers, rings, 1, BUILD)),
        (_scorer, (work_ptr, lse_ptr, part_ptr, scale_log2, buffers, rings, BUILD)),
        (_producer, (work_ptr, table_ptr, table_stride, pages, sources, buffers, rings, BUILD)),
    ], [4, 4, 1], [BUILD.REGISTERS, BUILD.SCORER_REGISTERS, BUILD.PRODUCER_REGISTERS])  # fmt: skip
