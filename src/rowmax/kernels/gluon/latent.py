"""Decoding with latent attention (MLA) on Hopper: 64 rows of one query against a part of its sequence's keys, in pages.

    m = rowmax(S),  l = rowsum(2^(S - m)),  acc = 2^(S - m) V    S = scale log2(e) Q K^T,  V = the first 512 of K's 576 columns

A block has four parts: a producer warp fetches K; the scorer, a warpgroup, computes P = 2^(S - m) and all that belongs to rows;
two multipliers, a warpgroup each, multiply it with the left and the right 256 columns of V, 128 registers of sums in a thread.
P and the factors of the sums go through shared memory. Launched by `kernels/latent_launch.py`; programs are told what to do by
`triton/work.py`, and there partial results are joined, too.
Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding" (2023); the online softmax is that of `forward.py`. The shape is our own.

Cycles of a multiprocessor for 64 rows and 64 keys, counted (tensor cores 4096 FLOP, shared memory 128 bytes a cycle):

    tensor cores     Q K^T 36 x 32 = 1152, P V 16 x 64 = 1024: 2176; 600 TFLOP/s of the chip at 1.7 GHz are 3330
    shared memory    K written once 576, read by Q K^T 576, by P V 512; Q 320 (all of it from shared memory: 576); P 192: 2176

With S cut in two, 32 keys for each of two warpgroups that also have the sums, Q would be read twice as often, 2880 in all, and
everybody would wait for both row maxima. With roles P V of a tile runs beside Q K^T of the next and has nothing to wait for
but P.

K comes as 64 columns and in pieces of 128, the left and the right half's in turn, whose buffers are given back by the last who
reads them: 64 by the scorer, pieces by the multipliers, for whom P is the sign that the scorer is done with them; the tile
after the next begins to arrive when half of P V is done. 72 KiB every 3330 cycles on all multiprocessors are 5 TB/s, more than
HBM has: programs with the two row tiles of a sequence of 128 heads stand side by side, so that L2 serves one.

Tried and slower, or no faster (figures in `plan/latent.py`): Q K^T of the next tile issued before the exponentials of this one,
which holds values of one tile and keys of two; pieces of 256 columns; columns of Q in registers for the sake of one more piece.
"""

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
from rowmax.kernels.gluon.ring import buffer_of, give, open_ring, release, wait_empty, wait_full
from rowmax.kernels.gluon.softmax import finish, online_step, thread_sum
from rowmax.kernels.tile_ops import clamp

ROWS = gl.constexpr(64)  # query heads of a tile
KEYS = gl.constexpr(64)  # of a tile
HALF = gl.constexpr(256)  # columns of V that one warpgroup multiplies
WIDTH = gl.constexpr(128)  # of a piece of K; ptxas takes no product with 128 registers of sums in a block of 512 threads
EACH = gl.constexpr(4)  # pieces of a tile
PIECES = gl.constexpr(8)  # in flight
ROPES = gl.constexpr(2)  # of the other columns of K, in flight
ROPE = gl.constexpr(64)  # columns of Q and K that are none of V
REGISTERS = gl.constexpr(176)  # of a thread that multiplies P with V; the first stand there twice
SCORER_REGISTERS = gl.constexpr(136)
PRODUCER_REGISTERS = gl.constexpr(24)
# What a program is told, numbers of 64 bits (`triton/work.py`).
SEQUENCE, BATCH, TOKEN, HEAD, LOW, TURNS, END, KIND, OUT, OUT_STEP, LSE, LSE_STEP, ACC, M, L = map(gl.constexpr, range(15))
FIELDS = gl.constexpr(16)  # the last is for who joins the parts
WHOLE = gl.constexpr(1)  # kinds of work: the rows have no other part
PART = gl.constexpr(2)


@gluon.jit
def _far(work, FIELD: gl.constexpr):
    """What this program is told."""
    return gl.load(work + gl.program_id(0) * FIELDS + FIELD)


@gluon.jit
def _of(work, FIELD: gl.constexpr):
    return _far(work, FIELD).to(gl.int32)


@gluon.jit
def _page(table, tile, pages, PER_PAGE: gl.constexpr):
    """Of a tile of keys."""
    return clamp(gl.load(table + tile // PER_PAGE), 0, pages - 1).to(gl.int32)


@gluon.jit
def _fetch(ring, buffers, source, place, turn, STAGES: gl.constexpr):
    """When the buffer is empty, load a box into it."""
    full, _ = ring
    i = buffer_of(turn, STAGES)
    wait_empty(ring, turn, STAGES)
    mbarrier.expect(full.index(i), source.block_type.nbytes)
    tma_load(source, [place[0], place[1], place[2], place[3]], full.index(i), buffers.index(i))


@gluon.constexpr_function
def column_of(c):
    """Where the c-th piece of a row begins: the left half's and the right half's in turn."""
    return c % 2 * 256 + c // 2 * 128


@gluon.jit
def _producer(work, table, table_stride, pages, sources, buffers, rings, PER_PAGE: gl.constexpr):
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
        page = _page(table, low, pages, PER_PAGE)
        zero = turns * 0
        for c in gl.static_range(EACH):
            _fetch(q_ring, q_pieces, q_source, (b, head, token, column_of(c)), zero + c, EACH)
        _fetch(q_rope_ring, q_rope, q_rope_source, (b, head, token, 2 * HALF), zero, 1)
        for j in range(turns):
            following = _page(table, low + gl.minimum(j + 1, turns - 1), pages, PER_PAGE)
            slot = (low + j) % PER_PAGE * KEYS
            _fetch(rope_ring, ropes, k_rope_source, (page, slot, 0, 2 * HALF), j, ROPES)
            for c in gl.static_range(EACH):
                place = (page, slot, 0, column_of(c))
                _fetch(piece_ring, pieces, k_source, place, EACH * j + c, PIECES)
            page = following


@gluon.jit
def _piece(pieces, turn):
    return pieces.index(buffer_of(turn, PIECES)).reshape([KEYS, WIDTH])


@gluon.constexpr_function
def clear_layout():
    """`[64, 64]` in rows of 16 bytes for each thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def _clear(v, count):
    """Keys from `count` on are no keys of the sequence: 0 times what lies there must be 0."""
    rows = gl.arange(0, KEYS, layout=row_layout(clear_layout()))
    for c in gl.static_range(WIDTH // 64):
        part = v.slice(64 * c, 64, dim=1)
        x = part.load(clear_layout())
        part.store(gl.where(gl.expand_dims(rows < count, 1), x, 0.0))
    fence_async_shared()


@gluon.jit
def _scores(q, j, buffers, rings):
    """Q K^T of a tile, issued but not awaited, in the order in which K arrives."""
    pieces, ropes, _q_pieces, _q_rope, _weights, _alphas = buffers
    piece_ring, rope_ring, _q_ring, _q_rope_ring, _weight_ring = rings
    of_pieces, rope = q
    s = gl.zeros([ROWS, KEYS], gl.float32, score_layout(KEYS))
    wait_full(rope_ring, j, ROPES)
    k = ropes.index(buffer_of(j, ROPES)).reshape([KEYS, ROPE])
    s = warpgroup_mma(rope, k.permute((1, 0)), s, use_acc=False, is_async=True)
    for c in gl.static_range(EACH):
        turn = EACH * j + c
        wait_full(piece_ring, turn, PIECES)
        s = warpgroup_mma(of_pieces[c], _piece(pieces, turn).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _give_weights(s, m, l, j, behind, scale_log2, buffers, rings):
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
        for c in gl.static_range(EACH):
            _clear(_piece(pieces, EACH * j + c), behind)
    give(weight_ring, j, 1)
    return m, l


@gluon.jit
def _scorer(work, lse_ptr, part_ptr, scale_log2, buffers, rings, NEED_LSE: gl.constexpr):
    """P of every tile with what the sums are to be multiplied by before it is added; at the end 1 / l, and LSE or m and l."""
    _pieces, _ropes, q_pieces, q_rope, _weights, alphas = buffers
    _piece_ring, rope_ring, q_ring, q_rope_ring, weight_ring = rings
    turns = _of(work, TURNS)
    keys = _of(work, END) - _of(work, LOW) * KEYS  # from the first tile to the end
    l = thread_sum(gl.zeros([ROWS, KEYS], gl.float32, score_layout(KEYS)))
    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout(score_layout(KEYS)))
    if turns > 0:
        zero = turns * 0
        of_pieces = ()
        for c in gl.static_range(EACH):
            wait_full(q_ring, zero + c, EACH)
            of_pieces += (q_pieces.index(c).reshape([ROWS, WIDTH]),)  # type: ignore[assignment]
        wait_full(q_rope_ring, zero, 1)
        q = (of_pieces, q_rope.index(0).reshape([ROWS, ROPE]))
        for j in range(turns):
            s = warpgroup_mma_wait(0, deps=[_scores(q, j, buffers, rings)])
            release(rope_ring, j, ROPES)
            m, l = _give_weights(s, m, l, j, keys - j * KEYS, scale_log2, buffers, rings)
    inverse, lse = finish(m, gl.convert_layout(gl.sum(l, 1), m.type.layout), 1.0)
    wait_empty(weight_ring, turns, 1)
    alphas.index(0).store(inverse)
    give(weight_ring, turns, 1)
    kind = _of(work, KIND)
    rows = gl.arange(0, ROWS, layout=row_layout(score_layout(KEYS)))
    if kind == PART:
        gl.store(part_ptr + _far(work, M) + rows, m)
        gl.store(part_ptr + _far(work, L) + rows, gl.convert_layout(gl.sum(l, 1), m.type.layout))
    if NEED_LSE:
        if kind == WHOLE:
            gl.store(lse_ptr + _far(work, LSE) + rows * _far(work, LSE_STEP), lse)


@gluon.jit
def _scaled(acc, alpha):
    acc, alpha = gl.broadcast(acc, alpha)
    return scale_unless_one(acc, alpha, WIDTH // 2)


@gluon.jit
def _store(acc, inverse, first, work, o_ptr, part_ptr, kind):
    """Columns of O from `first` on, or of a partial result."""
    rows = gl.arange(0, ROWS, layout=row_layout(out_layout(WIDTH)))
    cols = gl.expand_dims(first + gl.arange(0, WIDTH, layout=column_layout(out_layout(WIDTH))), 0)
    if kind == PART:
        gl.store(part_ptr + _far(work, ACC) + gl.expand_dims(rows * 2 * HALF, 1) + cols, acc)
    if kind == WHOLE:
        line = gl.expand_dims(rows * _far(work, OUT_STEP), 1)
        gl.store(o_ptr + _far(work, OUT) + line + cols, (acc * inverse).to(o_ptr.dtype.element_ty))


@gluon.jit
def _multiplier(work, o_ptr, part_ptr, buffers, rings, WHICH: gl.constexpr):
    """One half of O. P is copied to registers, so that its place is free at once."""
    pieces, _ropes, _q_pieces, _q_rope, weights, alphas = buffers
    piece_ring, _rope_ring, _q_ring, _q_rope_ring, weight_ring = rings
    turns = _of(work, TURNS)
    left = gl.zeros([ROWS, WIDTH], gl.float32, out_layout(WIDTH))
    right = gl.zeros([ROWS, WIDTH], gl.float32, out_layout(WIDTH))
    for j in range(turns):
        turn = EACH * j + WHICH
        wait_full(piece_ring, turn, PIECES)
        v = _piece(pieces, turn)
        wait_full(weight_ring, j, 1)
        p = weights.index(0).load(weight_layout(WIDTH))
        alpha = gl.expand_dims(alphas.index(0).load(row_layout(out_layout(WIDTH))), 1)
        release(weight_ring, j, 1)
        left = _scaled(left, alpha)
        right = _scaled(right, alpha)
        left = warpgroup_mma(p, v, left, is_async=True)
        wait_full(piece_ring, turn + 2, PIECES)
        right = warpgroup_mma(p, _piece(pieces, turn + 2), right, is_async=True)
        left = warpgroup_mma_wait(1, deps=[left])
        release(piece_ring, turn, PIECES)
        right = warpgroup_mma_wait(0, deps=[right])
        release(piece_ring, turn + 2, PIECES)
    wait_full(weight_ring, turns, 1)
    inverse = gl.expand_dims(alphas.index(0).load(row_layout(out_layout(WIDTH))), 1)
    kind = _of(work, KIND)
    _store(left, inverse, WHICH * HALF, work, o_ptr, part_ptr, kind)
    _store(right, inverse, WHICH * HALF + WIDTH, work, o_ptr, part_ptr, kind)


@gluon.jit
def latent_kernel(
    q_source, q_rope_source,  # descriptors of [B, H, T, D], a packed tensor with B = 1
    k_source, k_rope_source,  # of [page, slot, 1, D]
    o_ptr, lse_ptr,  # as `triton/work.py` says where; None: no LSE
    part_ptr,  # fp32, as of `triton/decode.py`; any pointer where no item has several parts
    table_ptr,  # [B, columns]
    work_ptr,  # int64 [programs, FIELDS]
    table_stride, scale_log2, pages,
    PER_PAGE: gl.constexpr, NEED_LSE: gl.constexpr,
):  # fmt: skip
    """A program does what it is told. `PER_PAGE`: tiles of keys in a page."""
    dtype: gl.constexpr = q_source.dtype
    pieces = gl.allocate_shared_memory(dtype, [PIECES, 1, KEYS, 1, WIDTH], k_source.layout)
    ropes = gl.allocate_shared_memory(dtype, [ROPES, 1, KEYS, 1, ROPE], k_rope_source.layout)
    q_pieces = gl.allocate_shared_memory(dtype, [EACH, 1, ROWS, 1, WIDTH], q_source.layout)
    q_rope = gl.allocate_shared_memory(dtype, [1, 1, ROWS, 1, ROPE], q_rope_source.layout)
    weights = gl.allocate_shared_memory(dtype, [1, ROWS, KEYS], share_layout(KEYS, dtype))
    alphas = gl.allocate_shared_memory(gl.float32, [1, ROWS], slot_layout())
    piece_ring = open_ring(PIECES, 1)
    rope_ring = open_ring(ROPES, 1)
    q_ring = open_ring(EACH, 1)
    q_rope_ring = open_ring(1, 1)
    weight_ring = open_ring(1, 2)
    fence_async_shared()
    if not NEED_LSE:
        lse_ptr = part_ptr
    sources = (q_source, q_rope_source, k_source, k_rope_source)
    buffers = (pieces, ropes, q_pieces, q_rope, weights, alphas)
    rings = (piece_ring, rope_ring, q_ring, q_rope_ring, weight_ring)
    # Constants stand inside the calls: a tuple in a variable would turn them into tensors.
    gl.warp_specialize([
        (_multiplier, (work_ptr, o_ptr, part_ptr, buffers, rings, 0)),
        (_multiplier, (work_ptr, o_ptr, part_ptr, buffers, rings, 1)),
        (_scorer, (work_ptr, lse_ptr, part_ptr, scale_log2, buffers, rings, NEED_LSE)),
        (_producer, (work_ptr, table_ptr, table_stride, pages, sources, buffers, rings, PER_PAGE)),
    ], [4, 4, 1], [REGISTERS, SCORER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
