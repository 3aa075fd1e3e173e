"""FlashAttention-3 forward for Hopper: one producer warp fetches tiles by TMA, consumers of 64 rows multiply and exponentiate.

    m = rowmax(S),  l = rowsum(exp(S - m)),  O = exp(S - m) V / l,  LSE = m + log l

The shape and the names are those of `kernels/triton/forward.py`; what is added is who waits for whom (`ring.py`). Launched by
`kernels/launch.py`. Source: Shah et al., "FlashAttention-3" (2024), algorithm 2 with its two overlaps: the softmax of key tile
j runs while the tensor cores do P V of tile j - 1 for the same consumer, and, in turns (`PINGPONG`), products of the others.

Key tiles are walked from the last to the first. The first turn always masks its elements, later ones only where a band cuts.

The order inside `_step`, each part measured on an H200 with the kernel's prototype (d128, 16k tokens; cycles that a
multiprocessor takes for a 128x128 tile):

* Q K^T of this tile is issued before P V of the last: products finish in the order of their issue, and S is awaited first.
* The accumulator is scaled between the two issues, by an `opaque` alpha. Left alone, ptxas does so after the wait for P V,
  where nothing else runs: 2970 cycles instead of 2840.
* The wait for the next K tile stands between the exponentials and the wait for P V: its loop ends a basic block, and without
  it ptxas moves the wait for P V above the exponentials, so that nothing overlaps.
* Row sums stay apart in the four threads of a row until the end: 3070 cycles before, 2970 after.

NaN and infinities. 0 * NaN is NaN, so a non-finite V at a key that a row does not see, in a tile that others see, reaches the
row's accumulator; TMA cannot leave it out, and to look at every V tile would cost every call. Instead a suspect row leaves a
mark for its 64 rows, and `guard.py`, launched behind, computes these once more as the portable kernel does and wipes the mark.
It reuses that kernel's code as it is; here, the same code would take registers from the loop.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from rowmax.kernels.address import extent, find_sequence, sequence_of
from rowmax.kernels.gluon.layouts import (
    column_layout,
    out_layout,
    row_layout,
    score_layout,
    weight_layout,
)
from rowmax.kernels.gluon.names import opaque, scale_unless_one, store_wait, tma_store
from rowmax.kernels.gluon.ring import (
    begin_turns,
    buffer_of,
    fill,
    give_turn,
    open_ring,
    open_slots,
    publish,
    receive,
    release,
    take_turn,
    wait_full,
)
from rowmax.kernels.tile_ops import key_ranges, visible

ROWS = gl.constexpr(64)  # of a consumer: what one warpgroup multiplies at once
SLOTS = gl.constexpr(2)  # numbers of tiles handed out ahead


@dataclass(frozen=True)
class Build:
    """What is fixed when the kernel is compiled.

    Attributes:
        BLOCK_D, BLOCK_DV: head dimensions in shared memory, zero-filled.
        BLOCK_D2: those of Q and K from `BLOCK_D` on, in tiles of their own, as sizes are powers of two (192 = 128 + 64); or 0.
        BANDED: some keys between the first and the last that a tile sees may be hidden from some of its rows.
        PRESCALE: see the portable kernel.
        STAGES, Q_STAGES: K/V tiles and Q tiles in flight.
        LAZY: a maximum that grows by less than 2^8 stays, so that most turns leave the accumulator as it is.
        SCHEDULE: "grid", one block a tile; "static", block i takes tiles i, i + blocks, ...; "dynamic", the next one when free.
        REGISTERS, PRODUCER_REGISTERS: of one thread.
    """

    PACKED: bool
    NEED_LSE: bool
    GROUP: int
    DIM_V: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_D2: int
    BLOCK_DV: int
    BANDED: bool
    PRESCALE: bool
    STAGES: int
    Q_STAGES: int
    CONSUMERS: int
    PINGPONG: bool
    LAZY: bool
    SCHEDULE: str
    REGISTERS: int
    PRODUCER_REGISTERS: int

    def __post_init__(self):  # in a kernel, an attribute of a constant is a constant only if it says so
        for name, value in vars(self).copy().items():
            object.__setattr__(self, name, gl.constexpr(value))


# ---- where the work lies ---------------------------------------------------------------------------------------------------


@gluon.jit
def locate(tile, work, BUILD: gl.constexpr):
    """`(row, head, b, begin_q, len_q, begin_k, len_k)` of a tile, as `address.locate`, in another order.

    Heads come in groups of `members`, whose K/V stay in L2; inside a group the last row tile of every head first, which with a
    causal mask is the longest. Packed: `b` is 0, and a surplus tile starts at or past its sequence's end.
    """
    cu_seqlens_q, cu_seqlens_k, batch, heads, tiles, members, len_q, len_k = work
    BLOCK_M: gl.constexpr = BUILD.CONSUMERS * ROWS
    every = heads
    if not BUILD.PACKED:
        every = heads * batch
    group = tile // (tiles * members)
    place = tile % (tiles * members)
    present = gl.minimum(members, every - group * members)
    head = group * members + place % present
    row_tile = tiles - 1 - place // present
    if BUILD.PACKED:
        b = find_sequence(row_tile, cu_seqlens_q, batch, BLOCK_M)
        begin_q, own_q = extent(cu_seqlens_q, b, len_q)
        begin_k, own_k = extent(cu_seqlens_k, b, len_k)
        row = (row_tile - begin_q // BLOCK_M - b) * BLOCK_M
        return gl.where(row < 0, own_q, row), head, tile * 0, begin_q, own_q, begin_k, own_k
    else:
        return row_tile * BLOCK_M, head % heads, head // heads, tile * 0, len_q, tile * 0, len_k


@gluon.jit
def _walk(row, len_q, len_k, band, BUILD: gl.constexpr):
    """`(start, full_start, full_end, turns)`: rows that see nothing take one turn too, in which every element is masked."""
    last = gl.minimum(row + BUILD.CONSUMERS * ROWS, len_q) - 1
    start, full_start, full_end, end = key_ranges(row, last, len_k, len_k - len_q, band, BUILD.BLOCK_N)
    return start, full_start, full_end, gl.maximum(gl.cdiv(end - start, BUILD.BLOCK_N), 1)


# ---- producer --------------------------------------------------------------------------------------------------------------


@gluon.jit
def _fetch(tile, round, turn, work, band, sources, buffers, rings, BUILD: gl.constexpr):
    """All that one tile needs. `round` counts Q tiles, `turn` key tiles, over the life of the block."""
    q_source, k_source, v_source, _o_source, q2_source, k2_source = sources
    q_buffers, k_buffers, v_buffers, _o_buffers, q2_buffers, k2_buffers = buffers
    q_ring, k_ring, v_ring = rings
    q_parts = (q_buffers, q_source, q2_buffers, q2_source)
    k_parts = (k_buffers, k_source, k2_buffers, k2_source)
    v_parts = (v_buffers, v_source, v_buffers, v_source)
    SECOND: gl.constexpr = BUILD.BLOCK_D if BUILD.BLOCK_D2 > 0 else 0
    row, head, b, begin_q, len_q, begin_k, len_k = locate(tile, work, BUILD)
    if row < len_q:
        start, _full_start, _full_end, turns = _walk(row, len_q, len_k, band, BUILD)
        for c in gl.static_range(BUILD.CONSUMERS):
            first = begin_q + row + c * ROWS
            fill(q_ring, q_parts, b, first, head, round, BUILD.Q_STAGES, c, BUILD.CONSUMERS, SECOND)
        for j in range(turns):
            col = begin_k + start + (turns - 1 - j) * BUILD.BLOCK_N
            fill(k_ring, k_parts, b, col, head // BUILD.GROUP, turn, BUILD.STAGES, 0, 1, SECOND)
            fill(v_ring, v_parts, b, col, head // BUILD.GROUP, turn, BUILD.STAGES, 0, 1, 0)
            turn += 1
        round += 1
    return round, turn


@gluon.jit
def _producer(work, band, total, counter, sources, buffers, rings, slots, BUILD: gl.constexpr):
    tile = gl.program_id(0)
    round = tile * 0
    turn = tile * 0
    if BUILD.SCHEDULE == "grid":
        _fetch(tile, round, turn, work, band, sources, buffers, rings, BUILD)
    elif BUILD.SCHEDULE == "static":
        for tile in range(gl.program_id(0), total, gl.num_programs(0)):
            round, turn = _fetch(tile, round, turn, work, band, sources, buffers, rings, BUILD)
    else:
        taken = tile * 0
        while tile < total:
            publish(slots, tile, taken, SLOTS)
            taken += 1
            following = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)  # arrives while K/V are fetched
            round, turn = _fetch(tile, round, turn, work, band, sources, buffers, rings, BUILD)
            tile = following
        publish(slots, -1, taken, SLOTS)
        # Each tile adds 1, so that whoever got `total - 1` is the last one: it leaves 0 to the next call.
        gl.store(counter, 0, mask=tile >= total - 1 + gl.num_programs(0))


# ---- consumers -------------------------------------------------------------------------------------------------------------


@gluon.jit
def _thread_sum(p):
    """`[M, N]` to `[M, 4]`: what each thread of a quad holds of a row, summed."""
    parts = p.reshape([p.shape[0], 2, p.shape[1] // 16, 4, 2])
    return gl.sum(gl.sum(gl.sum(parts, 4), 2), 1)


@gluon.jit
def online_step(s, m, l, scale_log2, FIRST: gl.constexpr, EMPTY: gl.constexpr, LAZY: gl.constexpr):
    """`tile_ops.online_step` with l `[M, 4]`, summed over the row only at the end. `EMPTY`: a row may have seen nothing yet."""
    m_new = gl.max(s, 1)
    if not FIRST:
        m_new = gl.maximum(m, m_new)
        if LAZY:
            m_new = gl.where((m_new - m) * scale_log2 <= 8.0, m, m_new)
    pivot = m_new * scale_log2
    if EMPTY:
        pivot = gl.where(m_new == float("-inf"), 0.0, pivot)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(pivot, 1))
    if FIRST:
        return p, m_new, _thread_sum(p), gl.full(m_new.shape, 1.0, gl.float32, m_new.type.layout)
    else:
        alpha = gl.exp2(m * scale_log2 - pivot)
        if LAZY:
            alpha = gl.where(m_new == m, 1.0, alpha)
        own = gl.convert_layout(alpha, row_layout(l.type.layout))
        return p, m_new, l * gl.expand_dims(own, 1) + _thread_sum(p), alpha


@gluon.jit
def finish(m, l, scale_log2):
    """`(1 / l, lse)` as in `tile_ops.finish`; the product with the accumulator waits for the last P V."""
    empty = l == 0.0
    l_safe = gl.where(empty, 1.0, l)
    lse = gl.where(empty, float("-inf"), (m * scale_log2 + gl.log2(l_safe)) * 0.6931471805599453)
    return 1.0 / l_safe, lse


@gluon.jit
def _mask(s, row, col, len_k, shift, band):
    LAYOUT: gl.constexpr = s.type.layout
    rows = row + gl.arange(0, s.shape[0], layout=row_layout(LAYOUT))
    cols = col + gl.arange(0, s.shape[1], layout=column_layout(LAYOUT))
    seen = visible(gl.expand_dims(rows, 1), gl.expand_dims(cols, 0), len_k, shift, band)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _scores(q_buffers, q_index, buffers, turn, BUILD: gl.constexpr):
    """Q K^T of a key tile, issued but not awaited."""
    _q_buffers, k_buffers, _v_buffers, _o_buffers, q2_buffers, k2_buffers = buffers
    i = buffer_of(turn, BUILD.STAGES)
    q = q_buffers.index(q_index).reshape([ROWS, BUILD.BLOCK_D])
    k = k_buffers.index(i).reshape([BUILD.BLOCK_N, BUILD.BLOCK_D])
    zero = gl.zeros([ROWS, BUILD.BLOCK_N], gl.float32, score_layout(BUILD.BLOCK_N))
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if BUILD.BLOCK_D2 > 0:
        q2 = q2_buffers.index(q_index).reshape([ROWS, BUILD.BLOCK_D2])
        k2 = k2_buffers.index(i).reshape([BUILD.BLOCK_N, BUILD.BLOCK_D2])
        s = warpgroup_mma(q2, k2.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _add_values(p, v_buffers, turn, acc, BUILD: gl.constexpr):
    """`acc + P V` of a key tile, issued but not awaited."""
    v = v_buffers.index(buffer_of(turn, BUILD.STAGES)).reshape([BUILD.BLOCK_N, BUILD.BLOCK_DV])
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _scale_rows(acc, factor):
    return acc * gl.expand_dims(gl.convert_layout(factor, row_layout(acc.type.layout)), 1)


@gluon.jit
def _weights(p, v_buffers, BUILD: gl.constexpr):
    return gl.convert_layout(p.to(v_buffers.dtype), weight_layout(BUILD.BLOCK_DV))


@gluon.jit
def _step(
    acc, p, m, l, alpha, q_index, col, masked, more, turn, row, len_k, shift, band, scale_log2, buffers, rings,
    CONSUMER: gl.constexpr, BUILD: gl.constexpr,
):  # fmt: skip
    """Softmax of the key tile of `turn`, while P V of the one before runs. `more`: another key tile follows."""
    q_buffers, _k_buffers, v_buffers, _o_buffers, _q2_buffers, _k2_buffers = buffers
    _q_ring, k_ring, v_ring = rings
    if BUILD.PINGPONG:
        take_turn(CONSUMER)
    s = _scores(q_buffers, q_index, buffers, turn, BUILD)
    wait_full(v_ring, turn - 1, BUILD.STAGES)
    if BUILD.LAZY:
        factor = gl.expand_dims(gl.convert_layout(alpha, row_layout(acc.type.layout)), 1)
        acc, factor = gl.broadcast(acc, factor)
        acc = scale_unless_one(acc, factor, BUILD.BLOCK_DV // 2)
    else:
        acc = _scale_rows(acc, opaque(alpha))
    acc = _add_values(p, v_buffers, turn - 1, acc, BUILD)
    if BUILD.PINGPONG:
        give_turn(CONSUMER, BUILD.CONSUMERS)
    s = warpgroup_mma_wait(1, deps=[s])
    release(k_ring, turn, BUILD.STAGES)
    if BUILD.PRESCALE:
        s = s * scale_log2
    if BUILD.BANDED:  # a branch: two loops after one another would make LLVM unpack and pack P on every turn
        if masked:
            s = _mask(s, row, col, len_k, shift, band)
    p, m, l, alpha = online_step(s, m, l, 1.0 if BUILD.PRESCALE else scale_log2, False, BUILD.BANDED, BUILD.LAZY)
    p = _weights(p, v_buffers, BUILD)
    wait_full(k_ring, turn + 1, BUILD.STAGES, more)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(v_ring, turn - 1, BUILD.STAGES)
    return acc, p, m, l, alpha


@gluon.jit
def _attend(
    tile, round, turn, work, band, out, scale_log2, sources, buffers, rings, CONSUMER: gl.constexpr, BUILD: gl.constexpr
):  # fmt: skip
    """The rows of one consumer in one tile."""
    q_buffers, _k_buffers, v_buffers, o_buffers, _q2_buffers, _k2_buffers = buffers
    q_ring, k_ring, v_ring = rings
    tile_row, head, b, begin_q, len_q, _begin_k, len_k = locate(tile, work, BUILD)
    if tile_row < len_q:
        start, full_start, full_end, turns = _walk(tile_row, len_q, len_k, band, BUILD)
        shift = len_k - len_q
        row = tile_row + CONSUMER * ROWS
        q_index = buffer_of(round, BUILD.Q_STAGES, CONSUMER, BUILD.CONSUMERS)
        wait_full(q_ring, round, BUILD.Q_STAGES, True, CONSUMER, BUILD.CONSUMERS)

        wait_full(k_ring, turn, BUILD.STAGES)
        if BUILD.PINGPONG:
            take_turn(CONSUMER)
        s = _scores(q_buffers, q_index, buffers, turn, BUILD)
        if BUILD.PINGPONG:
            give_turn(CONSUMER, BUILD.CONSUMERS)
        s = warpgroup_mma_wait(0, deps=[s])
        release(k_ring, turn, BUILD.STAGES)
        if BUILD.PRESCALE:
            s = s * scale_log2
        s = _mask(s, row, start + (turns - 1) * BUILD.BLOCK_N, len_k, shift, band)
        m = gl.full([ROWS], float("-inf"), gl.float32, row_layout(score_layout(BUILD.BLOCK_N)))
        p, m, l, alpha = online_step(s, m, m, 1.0 if BUILD.PRESCALE else scale_log2, True, True, False)
        p = _weights(p, v_buffers, BUILD)
        acc = gl.zeros([ROWS, BUILD.BLOCK_DV], gl.float32, out_layout(BUILD.BLOCK_DV))
        turn += 1
        wait_full(k_ring, turn, BUILD.STAGES, turns > 1)
        for j in range(1, turns):
            col = start + (turns - 1 - j) * BUILD.BLOCK_N
            masked = (col < full_start) | (col >= full_end)
            acc, p, m, l, alpha = _step(
                acc, p, m, l, alpha, q_index, col, masked, j + 1 < turns, turn, row, len_k, shift, band, scale_log2, buffers,
                rings, CONSUMER, BUILD,
            )  # fmt: skip
            turn += 1
        acc = _scale_rows(acc, alpha)
        wait_full(v_ring, turn - 1, BUILD.STAGES)
        acc = _add_values(p, v_buffers, turn - 1, acc, BUILD)
        m = gl.convert_layout(m, row_layout(out_layout(BUILD.BLOCK_DV)))
        l = gl.convert_layout(gl.sum(l, 1), row_layout(out_layout(BUILD.BLOCK_DV)))
        inverse, lse = finish(m, l, 1.0 if BUILD.PRESCALE else scale_log2)
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(v_ring, turn - 1, BUILD.STAGES)
        if BUILD.BLOCK_D == BUILD.BLOCK_DV:
            o_buffer = q_buffers.index(q_index)
        else:
            o_buffer = o_buffers.index(CONSUMER)
        _store(acc, inverse, lse, m, scale_log2, o_buffer, row, head, b, begin_q, len_q, work, out, sources, BUILD)
        release(q_ring, round, BUILD.Q_STAGES, CONSUMER, BUILD.CONSUMERS)
        round += 1
    return round, turn


@gluon.jit
def _store(acc, inverse, lse, m, scale_log2, o_buffer, row, head, b, begin_q, len_q, work, out, sources, BUILD: gl.constexpr):
    """O by TMA, which clips at the end of a dense tensor; at the end of a packed sequence by pointers."""
    cu_q, _cu_k, batch, heads, _tiles, _members, total_q, _total_k = work
    _q_source, _k_source, _v_source, o_source, _q2_source, _k2_source = sources
    o_ptr, lse_ptr, suspect_ptr = out
    rows = row + gl.arange(0, ROWS, layout=row_layout(acc.type.layout))
    inside = rows < len_q
    bad = gl.sum(gl.where(acc != acc, 1, 0), 1) > 0
    if not BUILD.PRESCALE:  # beyond 2^24 a maximum differs from its own rounded product with the scale by more than 1
        bad = bad | ((gl.abs(m * scale_log2) > 16777216.0) & (m > float("-inf")))
    line = (b.to(gl.int64) * heads + head) * total_q + begin_q
    number = (b * heads + head) * gl.cdiv(total_q, ROWS) + row // ROWS
    if BUILD.PACKED:
        own = begin_q // ROWS + sequence_of(begin_q + row, cu_q, batch)
        number = head * (total_q // ROWS + batch) + own + row // ROWS
    gl.store(suspect_ptr + (number + rows * 0), 1, mask=bad & inside)
    if BUILD.NEED_LSE:
        gl.store(lse_ptr + line + rows, lse, mask=inside)
    o = _scale_rows(acc, inverse).to(o_source.dtype)
    if not BUILD.PACKED:
        _store_by_tma(o, o_buffer, b, row, head, o_source, BUILD)
    else:
        if row + ROWS <= len_q:
            _store_by_tma(o, o_buffer, b, begin_q + row, head, o_source, BUILD)
        else:
            dims = gl.arange(0, BUILD.BLOCK_DV, layout=column_layout(acc.type.layout))
            starts = ((begin_q + rows).to(gl.int64) * heads + head) * BUILD.DIM_V
            keep = gl.expand_dims(inside, 1) & (gl.expand_dims(dims, 0) < BUILD.DIM_V)
            gl.store(o_ptr + gl.expand_dims(starts, 1) + gl.expand_dims(dims, 0), o, mask=keep)


@gluon.jit
def _store_by_tma(o, o_buffer, b, row, head, o_source, BUILD: gl.constexpr):
    o_buffer.reshape([ROWS, BUILD.BLOCK_DV]).store(o)
    fence_async_shared()
    tma_store(o_source, [b, row, head, 0], o_buffer)
    store_wait(0)


@gluon.jit
def _consumer(
    work, band, total, out, scale_log2, sources, buffers, rings, slots, CONSUMER: gl.constexpr, BUILD: gl.constexpr
):  # fmt: skip
    if BUILD.PINGPONG:
        begin_turns(CONSUMER, BUILD.CONSUMERS)
    tile = gl.program_id(0)
    round = tile * 0
    turn = tile * 0
    if BUILD.SCHEDULE == "grid":
        _attend(tile, round, turn, work, band, out, scale_log2, sources, buffers, rings, CONSUMER, BUILD)
    elif BUILD.SCHEDULE == "static":
        for tile in range(gl.program_id(0), total, gl.num_programs(0)):
            round, turn = _attend(
                tile, round, turn, work, band, out, scale_log2, sources, buffers, rings, CONSUMER, BUILD
            )  # fmt: skip
    else:
        taken = tile * 0
        tile = receive(slots, taken, SLOTS)
        while tile >= 0:
            round, turn = _attend(
                tile, round, turn, work, band, out, scale_log2, sources, buffers, rings, CONSUMER, BUILD
            )  # fmt: skip
            taken += 1
            tile = receive(slots, taken, SLOTS)


@gluon.jit
def forward_kernel(
    q_source, k_source, v_source, o_source,  # descriptors of [B, T, H, D], a packed tensor with B = 1
    q2_source, k2_source,  # for dimensions from BLOCK_D on; None: there are none
    o_ptr,  # packed: [T, H, DIM_V]; None: dense
    lse_ptr,  # fp32 [B, H, len_q] or [H, len_q]; None: not wanted
    suspect_ptr,  # int32, one for every 64 rows, numbered as by `address.locate`, all 0: becomes 1 where a row is suspect
    counter,  # int32 [1], 0 before and after; None: the schedule is not "dynamic"
    cu_seqlens_q, cu_seqlens_k,  # [batch + 1]; None: dense
    scale_log2, band, batch, heads, tiles, members, total, len_q, len_k,
    BUILD: gl.constexpr,
):  # fmt: skip
    """`members`: heads of a group (`locate`). `total`: tiles of all heads."""
    dtype: gl.constexpr = q_source.dtype
    q_shape: gl.constexpr = [BUILD.Q_STAGES * BUILD.CONSUMERS, 1, ROWS, 1, BUILD.BLOCK_D]
    q_buffers = gl.allocate_shared_memory(dtype, q_shape, q_source.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [BUILD.STAGES, 1, BUILD.BLOCK_N, 1, BUILD.BLOCK_D], k_source.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [BUILD.STAGES, 1, BUILD.BLOCK_N, 1, BUILD.BLOCK_DV], v_source.layout)
    q2_buffers = q_buffers
    k2_buffers = k_buffers
    if BUILD.BLOCK_D2 > 0:
        q2_shape: gl.constexpr = [BUILD.Q_STAGES * BUILD.CONSUMERS, 1, ROWS, 1, BUILD.BLOCK_D2]
        q2_buffers = gl.allocate_shared_memory(dtype, q2_shape, q2_source.layout)
        k2_buffers = gl.allocate_shared_memory(dtype, [BUILD.STAGES, 1, BUILD.BLOCK_N, 1, BUILD.BLOCK_D2], k2_source.layout)
    else:
        q2_source = q_source
        k2_source = k_source
    o_buffers = q_buffers  # O takes the place of Q where it fits
    if BUILD.BLOCK_D != BUILD.BLOCK_DV:
        o_buffers = gl.allocate_shared_memory(dtype, [BUILD.CONSUMERS, 1, ROWS, 1, BUILD.BLOCK_DV], o_source.layout)
    q_ring = open_ring(BUILD.Q_STAGES * BUILD.CONSUMERS, 1)
    k_ring = open_ring(BUILD.STAGES, BUILD.CONSUMERS)
    v_ring = open_ring(BUILD.STAGES, BUILD.CONSUMERS)
    # None inside a tuple does not reach the warps: what is not used is some pointer instead.
    if not BUILD.PACKED:
        o_ptr = suspect_ptr
        cu_seqlens_q = suspect_ptr
        cu_seqlens_k = suspect_ptr
    if not BUILD.NEED_LSE:
        lse_ptr = suspect_ptr
    if BUILD.SCHEDULE == "dynamic":
        slots = open_slots(SLOTS, BUILD.CONSUMERS)
    else:
        slots = k_ring
        counter = suspect_ptr
    fence_async_shared()
    work = (cu_seqlens_q, cu_seqlens_k, batch, heads, tiles, members, len_q, len_k)
    out = (o_ptr, lse_ptr, suspect_ptr)
    sources = (q_source, k_source, v_source, o_source, q2_source, k2_source)
    buffers = (q_buffers, k_buffers, v_buffers, o_buffers, q2_buffers, k2_buffers)
    rings = (q_ring, k_ring, v_ring)
    # Constants stand inside the calls: a tuple in a variable would turn them into tensors.
    if BUILD.CONSUMERS == 1:
        gl.warp_specialize([
            (_consumer, (work, band, total, out, scale_log2, sources, buffers, rings, slots, 0, BUILD)),
            (_producer, (work, band, total, counter, sources, buffers, rings, slots, BUILD)),
        ], [1], [BUILD.PRODUCER_REGISTERS])  # fmt: skip
    elif BUILD.CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (work, band, total, out, scale_log2, sources, buffers, rings, slots, 0, BUILD)),
            (_consumer, (work, band, total, out, scale_log2, sources, buffers, rings, slots, 1, BUILD)),
            (_producer, (work, band, total, counter, sources, buffers, rings, slots, BUILD)),
        ], [4, 1], [BUILD.REGISTERS, BUILD.PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (work, band, total, out, scale_log2, sources, buffers, rings, slots, 0, BUILD)),
            (_consumer, (work, band, total, out, scale_log2, sources, buffers, rings, slots, 1, BUILD)),
            (_consumer, (work, band, total, out, scale_log2, sources, buffers, rings, slots, 2, BUILD)),
            (_producer, (work, band, total, counter, sources, buffers, rings, slots, BUILD)),
        ], [4, 4, 1], [BUILD.REGISTERS, BUILD.REGISTERS, BUILD.PRODUCER_REGISTERS])  # fmt: skip
