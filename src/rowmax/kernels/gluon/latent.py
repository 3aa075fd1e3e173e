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
but P. `HELD`: the left 256 columns of Q stay in the scorer's registers, and the place they came in is one more half of V.
`EARLY` instead: the scorer issues Q K^T of the next tile before the exponentials of this one.

K comes as 64 and twice 256 columns, whose buffers are given back by the last who reads them: 64 by the scorer, the halves by
the multipliers, for whom P is the sign that the scorer is done with them. 72 KiB every 3330 cycles on all multiprocessors are
5 TB/s, more than HBM has: programs with the two row tiles of a sequence of 128 heads stand side by side, so that L2 serves one.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from rowmax.kernels.gluon.layouts import (
    column_layout,
    number_layout,
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
PIECE = gl.constexpr(128)  # of them at once: ptxas takes no product with 128 registers of sums in a block of 512 threads
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
        HELD: Q's first columns are held in registers.
        HALVES, ROPES: halves of V, and last columns of K, in flight.
        REGISTERS, SCORER_REGISTERS, PRODUCER_REGISTERS: of one thread.
        AHEAD: tiles that are fetched into L2 so far ahead; 0: none. Takes pages whose keys lie side by side.
        EARLY: scores of a tile are computed during the exponentials of the one before.
        FIRST: turns of the halves' ring before K.
    """

    PER_PAGE: int
    NEED_LSE: bool
    HELD: bool
    HALVES: int
    ROPES: int
    REGISTERS: int
    SCORER_REGISTERS: int
    PRODUCER_REGISTERS: int
    AHEAD: int = 0
    EARLY: bool = False
    FIRST: int = 0

    def __post_init__(self):  # in a kernel, an attribute of a constant is a constant only if it says so
        for name, value in vars(self).copy().items():
            object.__setattr__(self, name, gl.constexpr(value))
        object.__setattr__(self, "FIRST", gl.constexpr(int(self.HELD.value)))


@_core.builtin
def prefetch(pointers, size, _semantic=None, _generator=None):
    """`size` bytes at each pointer into the L2 cache."""
    code = f"cp.async.bulk.prefetch.L2.global [$1], {_core._unwrap_if_constexpr(size)}; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic)


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


@gluon.jit
def _producer(work, k_ptr, page_stride, table, table_stride, pages, sources, buffers, rings, BUILD: gl.constexpr):
    """Fetches Q, then K; the page of a tile is looked up a tile ahead."""
    q_source, q_rope_source, k_source, k_rope_source = sources
    halves, ropes, q_left, q_right, q_rope, _weights, _alphas = buffers
    half_ring, rope_ring, q_left_ring, q_ring, q_rope_ring, _weight_ring = rings
    turns = _of(work, TURNS)
    if turns > 0:
        b = _of(work, BATCH)
        token = _of(work, TOKEN)
        head = _of(work, HEAD)
        low = _of(work, LOW)
        table += _far(work, SEQUENCE) * table_stride
        page = _page(table, low, pages, BUILD)
        zero = turns * 0
        if BUILD.HELD:
            _fetch(half_ring, halves, q_source, (b, head, token, 0), zero, BUILD.HALVES)
        else:
            _fetch(q_left_ring, q_left, q_source, (b, head, token, 0), zero, 1)
        _fetch(q_ring, q_right, q_source, (b, head, token, HALF), zero, 1)
        _fetch(q_rope_ring, q_rope, q_rope_source, (b, head, token, 2 * HALF), zero, 1)
        for j in range(turns):
            following = _page(table, low + gl.minimum(j + 1, turns - 1), pages, BUILD)
            slot = (low + j) % BUILD.PER_PAGE * KEYS
            _fetch(rope_ring, ropes, k_rope_source, (page, slot, 0, 2 * HALF), j, BUILD.ROPES)
            _fetch(half_ring, halves, k_source, (page, slot, 0, 0), BUILD.FIRST + 2 * j, BUILD.HALVES)
            _fetch(half_ring, halves, k_source, (page, slot, 0, HALF), BUILD.FIRST + 1 + 2 * j, BUILD.HALVES)
            if BUILD.AHEAD > 0:
                if (head == 0) & (j + BUILD.AHEAD < turns):
                    later = low + j + BUILD.AHEAD
                    first = _page(table, later, pages, BUILD).to(gl.int64) * page_stride
                    first += later % BUILD.PER_PAGE * (KEYS * (2 * HALF + ROPE))
                    lanes = gl.arange(0, 32, layout=number_layout(gl.num_warps()))
                    prefetch(k_ptr + first + lanes * (2 * HALF + ROPE) * 2, (2 * HALF + ROPE) * 4)
            page = following


@gluon.jit
def _half(halves, turn, BUILD: gl.constexpr):
    return halves.index(buffer_of(turn, BUILD.HALVES)).reshape([KEYS, HALF])


@gluon.constexpr_function
def clear_layout():
    """`[64, 64]` in rows of 16 bytes for each thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def _clear(v, count):
    """Keys from `count` on are no keys of the sequence: 0 times what lies there must be 0."""
    rows = gl.arange(0, KEYS, layout=row_layout(clear_layout()))
    for c in gl.static_range(4):
        part = v.slice(64 * c, 64, dim=1)
        x = part.load(clear_layout())
        part.store(gl.where(gl.expand_dims(rows < count, 1), x, 0.0))
    fence_async_shared()


@gluon.jit
def _scores(q, j, wanted, buffers, rings, BUILD: gl.constexpr):
    """Q K^T of a tile, issued but not awaited, in the order in which K arrives. Not `wanted`: of whatever lies there."""
    halves, ropes, _q_left, _q_right, _q_rope, _weights, _alphas = buffers
    half_ring, rope_ring, _q_left_ring, _q_ring, _q_rope_ring, _weight_ring = rings
    left, right, rope = q
    zeros = gl.zeros([ROWS, KEYS], gl.float32, score_layout(KEYS))
    turn = BUILD.FIRST + 2 * j
    wait_full(rope_ring, j, BUILD.ROPES, wanted)
    k = ropes.index(buffer_of(j, BUILD.ROPES)).reshape([KEYS, ROPE])
    s = warpgroup_mma(rope, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    wait_full(half_ring, turn, BUILD.HALVES, wanted)
    s = warpgroup_mma(left, _half(halves, turn, BUILD).permute((1, 0)), s, is_async=True)
    wait_full(half_ring, turn + 1, BUILD.HALVES, wanted)
    return warpgroup_mma(right, _half(halves, turn + 1, BUILD).permute((1, 0)), s, is_async=True)


@gluon.jit
def _give_weights(s, m, l, j, behind, scale_log2, buffers, rings, BUILD: gl.constexpr):
    """`(m, l)`. `behind`: keys from this tile's first one to the end."""
    halves, _ropes, _q_left, _q_right, _q_rope, weights, alphas = buffers
    _half_ring, _rope_ring, _q_left_ring, _q_ring, _q_rope_ring, weight_ring = rings
    s = s * scale_log2
    if behind < KEYS:
        cols = gl.arange(0, KEYS, layout=column_layout(score_layout(KEYS)))
        s = gl.where(gl.expand_dims(cols < behind, 0), s, float("-inf"))
    p, m, l, alpha = online_step(s, m, l, 1.0, False, True, True)
    wait_empty(weight_ring, j, 1)
    alphas.index(0).store(alpha)
    weights.index(0).store(p.to(weights.dtype))
    if behind < KEYS:
        _clear(_half(halves, BUILD.FIRST + 2 * j, BUILD), behind)
        _clear(_half(halves, BUILD.FIRST + 1 + 2 * j, BUILD), behind)
    give(weight_ring, j, 1)
    return m, l


@gluon.jit
def _scorer(work, lse_ptr, part_ptr, scale_log2, buffers, rings, BUILD: gl.constexpr):
    """P of every tile with what the sums are to be multiplied by before it is added; at the end 1 / l, and LSE or m and l."""
    halves, _ropes, q_left, q_right, q_rope, _weights, alphas = buffers
    half_ring, rope_ring, q_left_ring, q_ring, q_rope_ring, weight_ring = rings
    turns = _of(work, TURNS)
    end = _of(work, END)
    first = _of(work, LOW) * KEYS
    l = thread_sum(gl.zeros([ROWS, KEYS], gl.float32, score_layout(KEYS)))
    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout(score_layout(KEYS)))
    if turns > 0:
        zero = turns * 0
        left = q_left.index(0).reshape([ROWS, HALF])
        if BUILD.HELD:
            wait_full(half_ring, zero, BUILD.HALVES)
            left = _half(halves, zero, BUILD).load(weight_layout(KEYS))
            release(half_ring, zero, BUILD.HALVES)
        else:
            wait_full(q_left_ring, zero, 1)
        wait_full(q_ring, zero, 1)
        wait_full(q_rope_ring, zero, 1)
        right = q_right.index(0).reshape([ROWS, HALF])
        rope = q_rope.index(0).reshape([ROWS, ROPE])
        q = (left, right, rope)
        if BUILD.EARLY:
            s = warpgroup_mma_wait(0, deps=[_scores(q, zero, True, buffers, rings, BUILD)])
            release(rope_ring, zero, BUILD.ROPES)
            for j in range(turns):
                following = _scores(q, j + 1, j + 1 < turns, buffers, rings, BUILD)
                m, l = _give_weights(s, m, l, j, end - first - j * KEYS, scale_log2, buffers, rings, BUILD)
                s = warpgroup_mma_wait(0, deps=[following])
                if j + 1 < turns:
                    release(rope_ring, j + 1, BUILD.ROPES)
        else:
            for j in range(turns):
                s = warpgroup_mma_wait(0, deps=[_scores(q, j, True, buffers, rings, BUILD)])
                release(rope_ring, j, BUILD.ROPES)
                m, l = _give_weights(s, m, l, j, end - first - j * KEYS, scale_log2, buffers, rings, BUILD)
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
    return scale_unless_one(acc, alpha, PIECE // 2)


@gluon.jit
def _store(acc, inverse, first, work, o_ptr, part_ptr, kind):
    """Columns of O from `first` on, or of a partial result."""
    rows = gl.arange(0, ROWS, layout=row_layout(out_layout(PIECE)))
    cols = gl.expand_dims(first + gl.arange(0, PIECE, layout=column_layout(out_layout(PIECE))), 0)
    if kind == PART:
        gl.store(part_ptr + _far(work, ACC) + gl.expand_dims(rows * 2 * HALF, 1) + cols, acc)
    if kind == WHOLE:
        line = gl.expand_dims(rows * _far(work, OUT_STEP), 1)
        gl.store(o_ptr + _far(work, OUT) + line + cols, (acc * inverse).to(o_ptr.dtype.element_ty))


@gluon.jit
def _multiplier(work, o_ptr, part_ptr, buffers, rings, WHICH: gl.constexpr, BUILD: gl.constexpr):
    """One half of O. P is copied to registers, so that its place is free at once."""
    halves, _ropes, _q_left, _q_right, _q_rope, weights, alphas = buffers
    half_ring, _rope_ring, _q_left_ring, _q_ring, _q_rope_ring, weight_ring = rings
    turns = _of(work, TURNS)
    left = gl.zeros([ROWS, PIECE], gl.float32, out_layout(PIECE))
    right = gl.zeros([ROWS, PIECE], gl.float32, out_layout(PIECE))
    for j in range(turns):
        turn = BUILD.FIRST + WHICH + 2 * j
        wait_full(half_ring, turn, BUILD.HALVES)
        v = _half(halves, turn, BUILD)
        wait_full(weight_ring, j, 1)
        p = weights.index(0).load(weight_layout(PIECE))
        alpha = gl.expand_dims(alphas.index(0).load(row_layout(out_layout(PIECE))), 1)
        release(weight_ring, j, 1)
        left = _scaled(left, alpha)
        right = _scaled(right, alpha)
        left = warpgroup_mma(p, v.slice(0, PIECE, dim=1), left, is_async=True)
        right = warpgroup_mma(p, v.slice(PIECE, PIECE, dim=1), right, is_async=True)
        left, right = warpgroup_mma_wait(0, deps=[left, right])
        release(half_ring, turn, BUILD.HALVES)
    wait_full(weight_ring, turns, 1)
    inverse = gl.expand_dims(alphas.index(0).load(row_layout(out_layout(PIECE))), 1)
    kind = _of(work, KIND)
    _store(left, inverse, WHICH * HALF, work, o_ptr, part_ptr, kind)
    _store(right, inverse, WHICH * HALF + PIECE, work, o_ptr, part_ptr, kind)


@gluon.jit
def latent_kernel(
    q_source, q_rope_source,  # descriptors of [B, H, T, D], a packed tensor with B = 1
    k_source, k_rope_source,  # of [page, slot, 1, D]
    k_ptr,  # the pages once more, to fetch them into L2
    o_ptr, lse_ptr,  # as `triton/work.py` says where; None: no LSE
    part_ptr,  # fp32, as of `triton/decode.py`; any pointer where no item has several parts
    table_ptr,  # [B, columns]
    work_ptr,  # int64 [programs, FIELDS]
    page_stride, table_stride, scale_log2, pages,
    BUILD: gl.constexpr,
):  # fmt: skip
    """A program does what it is told."""
    dtype: gl.constexpr = q_source.dtype
    halves = gl.allocate_shared_memory(dtype, [BUILD.HALVES, 1, KEYS, 1, HALF], k_source.layout)
    ropes = gl.allocate_shared_memory(dtype, [BUILD.ROPES, 1, KEYS, 1, ROPE], k_rope_source.layout)
    q_left = halves
    if not BUILD.HELD:
        q_left = gl.allocate_shared_memory(dtype, [1, 1, ROWS, 1, HALF], q_source.layout)
    q_right = gl.allocate_shared_memory(dtype, [1, 1, ROWS, 1, HALF], q_source.layout)
    q_rope = gl.allocate_shared_memory(dtype, [1, 1, ROWS, 1, ROPE], q_rope_source.layout)
    weights = gl.allocate_shared_memory(dtype, [1, ROWS, KEYS], share_layout(KEYS, dtype))
    alphas = gl.allocate_shared_memory(gl.float32, [1, ROWS], slot_layout())
    half_ring = open_ring(BUILD.HALVES, 1)
    rope_ring = open_ring(BUILD.ROPES, 1)
    q_left_ring = open_ring(1, 1)
    q_ring = open_ring(1, 1)
    q_rope_ring = open_ring(1, 1)
    weight_ring = open_ring(1, 2)
    fence_async_shared()
    if not BUILD.NEED_LSE:
        lse_ptr = part_ptr
    sources = (q_source, q_rope_source, k_source, k_rope_source)
    buffers = (halves, ropes, q_left, q_right, q_rope, weights, alphas)
    rings = (half_ring, rope_ring, q_left_ring, q_ring, q_rope_ring, weight_ring)
    # Constants stand inside the calls: a tuple in a variable would turn them into tensors.
    gl.warp_specialize([
        (_multiplier, (work_ptr, o_ptr, part_ptr, buffers, rings, 0, BUILD)),
        (_multiplier, (work_ptr, o_ptr, part_ptr, buffers, rings, 1, BUILD)),
        (_scorer, (work_ptr, lse_ptr, part_ptr, scale_log2, buffers, rings, BUILD)),
        (_producer, (work_ptr, k_ptr, page_stride, table_ptr, table_stride, pages, sources, buffers, rings, BUILD)),
    ], [4, 4, 1], [BUILD.REGISTERS, BUILD.SCORER_REGISTERS, BUILD.PRODUCER_REGISTERS])  # fmt: skip
