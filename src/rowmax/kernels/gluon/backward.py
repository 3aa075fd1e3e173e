"""FlashAttention-3 backward for Hopper: a block owns a K/V tile, and a producer warp fetches the Q and dO tiles that see it.

    S = K Q^T,  P = exp(scale S - LSE),  dP = V dO^T,  dS = P (dP - delta)
    dV = P dO,  dK = scale dS Q,  dQ = scale dS^T K

Scores are transposed, `[keys, queries]`, so that P and dS are at once the first factors of dV and dK, from registers. Each
consumer has 64 keys, whose dK and dV stay in its registers over the queries of every head in the group. dQ is a sum over
blocks: the consumers lay their dS into shared memory, multiply it with the K of all of them, and TMA adds the product to fp32
memory, in no fixed order. Launched by `kernels/backward_launch.py`, between the kernels of `backward_edges.py`.
Source: Shah et al., "FlashAttention-3" (2024), its backward; the delay of dQ by a turn and what stands where are our own.

Who waits for whom:

* dQ of a turn is multiplied in the next one. By then every consumer has long laid down its dS, so that nobody stands still for
  the others, and the tensor cores have work during the exponentials: dP of this turn and dQ of the last one. A consumer's dS of
  turn t goes where that of turn t - 2 was: it has seen all dS of turn t - 1, and each consumer gives its own only when its
  product with those of turn t - 2 is done. Before the first turn there is no dS: what is multiplied then is added to rows
  past the end of the tensor, which TMA leaves out; a branch would cost more. (Rows before the first it does not leave out:
  adding there is an illegal instruction.)
* S of the next turn is multiplied at the end of this one, while dQ goes its way, and awaited there as well: a sum that is in
  flight where a loop goes round makes ptxas put every product after the one before. So does a lack of registers: each product
  is issued where those of an earlier one have become free.
* Consumers issue dV, dK and dQ in turn, so that one's products run while the other computes its exponentials.

Scores are bent, biased and hidden in `backward_scores.py`; a sink needs nothing here, as it is in the LSE. Where weights are
dropped, Z (`backward_dropout.py`) says which are kept, dV = (Z P) dO / (1 - p) and dS = P (Z dP / (1 - p) - delta).

What was tried and was slower stands in `docs/lessons/hopper-backward.md`.

NaN and infinities. Where a query does not see a key, P is 0, but 0 * NaN is NaN, in all three products. 64 keys whose dK or dV
have a NaN leave a mark; these, and rows of dQ with a NaN, are computed once more by the kernel launched behind.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from rowmax.kernels.address import line_begin
from rowmax.kernels.gluon.backward_dropout import drop_weights, seed_of
from rowmax.kernels.gluon.backward_scores import fetch_given, open_given, weights_of
from rowmax.kernels.gluon.backward_walk import (
    BATCH,
    BEGIN_K,
    BEGIN_Q,
    COL,
    FLAG,
    HEAD,
    KEYS,
    LEN_K,
    LEN_Q,
    NOTES,
    SHIFT,
    TOTAL_K,
    _note,
    _place_before,
    locate,
    place_of,
    ranges_of,
)
from rowmax.kernels.gluon.dq_order import SIDE, _adder, buffer_of_sum, draw_number, lay_down, open_slots_of_sums
from rowmax.kernels.gluon.layouts import (
    column_layout,
    line_layout,
    number_layout,
    out_layout,
    row_layout,
    score_layout,
    share_layout,
    slot_layout,
    sum_layout,
    weight_layout,
)
from rowmax.kernels.gluon.names import as_bits, store_wait, tma_add, tma_store
from rowmax.kernels.gluon.philox import kept
from rowmax.kernels.gluon.ring import (
    begin_turns,
    buffer_of,
    end_turns,
    fill,
    fill_with_line,
    give,
    give_turn,
    meet,
    open_ring,
    open_shares,
    release,
    take_turn,
    wait_full,
)

SHARES = gl.constexpr(2)  # turns whose dS are in shared memory


@dataclass(frozen=True)
class Build:
    """What is fixed when the kernel is compiled.

    Attributes:
        GROUP: query heads of a KV head, or of a part of its group.
        PARTS: of a group, each with blocks of its own, which leave dK and dV in fp32 to be added up.
        DIM, DIM_V: head dimensions; BLOCK_D, BLOCK_DV: in shared memory, zero-filled.
        BLOCK_M: queries of a tile.
        STAGES: Q and dO tiles in flight.
        CONSUMERS: of 64 keys each.
        ALIBI, PER_SEQUENCE, CAP: as in the forward; GIVEN and what begins so, too: rows are BLOCK_M or 1.
        ORDERED: dQ is added up in a fixed order: `dq_order.py`.
        SLOTS: turns whose dQ are in shared memory.
        HIDES: whether there may be hidden keys: not with a full mask and tiles that are all whole.
        DROPS: weights are dropped: `backward_dropout.py`.
        REGISTERS, PRODUCER_REGISTERS: of one thread.
    """

    PACKED: bool
    GROUP: int
    PARTS: int
    DIM: int
    DIM_V: int
    BLOCK_M: int
    BLOCK_D: int
    BLOCK_DV: int
    STAGES: int
    CONSUMERS: int
    REGISTERS: int
    PRODUCER_REGISTERS: int
    ALIBI: str
    PER_SEQUENCE: bool
    ORDERED: bool
    SLOTS: int
    HIDES: bool
    DROPS: bool
    CAP: bool
    GIVEN: str
    GIVEN_ROWS: int
    GIVEN_BATCH: int
    GIVEN_HEAD: int
    GIVEN_STAGES: int
    GIVEN_APART: int

    def __post_init__(self):  # in a kernel, an attribute of a constant is a constant only if it says so
        for name, value in vars(self).copy().items():
            object.__setattr__(self, name, gl.constexpr(value))


# ---- producer --------------------------------------------------------------------------------------------------------------


@gluon.jit
def _producer(first_line, ranges, notes, given, sources, buffers, rings, BUILD: gl.constexpr):
    """Fetches K and V, and for every turn Q and dO with two numbers for each row."""
    q_source, do_source, k_source, v_source, lse_source, delta_source, _dq, _dk, _dv = sources
    q_buffers, do_buffers, k_buffers, v_buffers, lse_buffers, delta_buffers, _dq, _shares = buffers
    q_ring, do_ring, k_ring, v_ring, _share_ring, _sum_ring = rings
    turns, _row, _full, _full_end = ranges
    head = _note(notes, HEAD)
    b = _note(notes, BATCH)
    first_key = _note(notes, BEGIN_K) + _note(notes, COL)
    member = head * BUILD.GROUP - first_line  # of a line, the head of Q
    shift = _note(notes, SHIFT)  # of a row, its place in a line
    k_parts = (k_buffers, k_source, k_buffers, k_source)
    v_parts = (v_buffers, v_source, v_buffers, v_source)
    q_parts = (q_buffers, q_source)
    do_parts = (do_buffers, do_source)
    lse_parts = (lse_buffers, lse_source)
    delta_parts = (delta_buffers, delta_source)
    if turns > 0:
        for c in gl.static_range(BUILD.CONSUMERS):
            fill(k_ring, k_parts, b, first_key + c * KEYS, head // BUILD.PARTS, c, BUILD.CONSUMERS, 0, 1, 0)
        for turn in range(turns):
            row, line = place_of(turn, first_line, ranges, BUILD)
            fill_with_line(q_ring, q_parts, lse_parts, b, row, member + line, line, row + shift, turn, BUILD.STAGES)
            if turn == 0:
                for c in gl.static_range(BUILD.CONSUMERS):
                    fill(v_ring, v_parts, b, first_key + c * KEYS, head // BUILD.PARTS, c, BUILD.CONSUMERS, 0, 1, 0)
            if BUILD.GIVEN != "":
                fetch_given(given, b, member + line, row, first_key, turn, BUILD)
            fill_with_line(do_ring, do_parts, delta_parts, b, row, member + line, line, row + shift, turn, BUILD.STAGES)


# ---- consumers -------------------------------------------------------------------------------------------------------------


@gluon.jit
def _nothing(x):
    """0, for x of 0 and more, which compilers do not know: what would be the same in every turn is not kept in registers.

    Of each operand in shared memory that would be a descriptor for every 16 dimensions.
    """
    return x >> 31


@gluon.jit
def _scores(keys, queries, BUILD: gl.constexpr):
    """`[keys, queries]` of K and Q, or of V and dO: issued, not awaited."""
    zero = gl.zeros([KEYS, BUILD.BLOCK_M], gl.float32, score_layout(BUILD.BLOCK_M))
    return warpgroup_mma(keys, queries.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _next_scores(k, q_buffers, q_ring, turn, turns, BUILD: gl.constexpr):
    """S of the next turn, issued; behind the last one, of what lies in the buffer, and nobody looks at it."""
    wait_full(q_ring, turn + 1, BUILD.STAGES, turn + 1 < turns)
    q = q_buffers.index(buffer_of(turn + 1, BUILD.STAGES)).reshape([BUILD.BLOCK_M, BUILD.BLOCK_D])
    return _scores(k, q, BUILD)


@gluon.jit
def _query_gradient(shares, k_buffers, turn, PART: gl.constexpr, BUILD: gl.constexpr):
    """64 rows and columns of dQ, transposed: K^T dS, issued and not awaited: one product for each consumer's keys."""
    ROW: gl.constexpr = PART // (BUILD.BLOCK_D // SIDE) * SIDE
    COLUMN: gl.constexpr = PART % (BUILD.BLOCK_D // SIDE) * SIDE
    dq = gl.zeros([SIDE, SIDE], gl.float32, out_layout(SIDE))
    for c in gl.static_range(BUILD.CONSUMERS):
        ds = shares.index(buffer_of(turn, SHARES) * BUILD.CONSUMERS + c)
        if BUILD.BLOCK_M > SIDE:
            ds = ds.slice(ROW, SIDE, dim=1)
        k = k_buffers.index(c + _nothing(turn)).reshape([KEYS, BUILD.BLOCK_D])
        if BUILD.BLOCK_D > SIDE:
            k = k.slice(COLUMN, SIDE, dim=1)
        dq = warpgroup_mma(k.permute((1, 0)), ds, dq, use_acc=c > 0, is_async=True)
    return dq


@gluon.jit
def _add(dq, dq_buffer, line, row, dq_source, PART: gl.constexpr, BUILD: gl.constexpr):
    """Through a buffer to global memory. What was written to shared memory before is fenced as well."""
    ROW: gl.constexpr = PART // (BUILD.BLOCK_D // SIDE) * SIDE
    COLUMN: gl.constexpr = PART % (BUILD.BLOCK_D // SIDE) * SIDE
    store_wait(0)  # the sum before has left the buffer
    buffer_of_sum(dq_buffer).store(dq)
    fence_async_shared()
    tma_add(dq_source, [line, row + ROW, COLUMN], dq_buffer)


@gluon.jit
def _consumer(
    line, ranges, notes, band, scale_log2, drop, out, given, sources, buffers, rings, CONSUMER: gl.constexpr,
    BUILD: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys."""
    _q, _do, _k, _v, _lse, _delta, dq_source, dk_source, dv_source = sources
    q_buffers, do_buffers, k_buffers, v_buffers, lse_buffers, delta_buffers, dq_buffers, shares = buffers
    q_ring, do_ring, k_ring, v_ring, share_ring, sum_ring = rings
    turns, first_row, _full, _full_end = ranges
    dtype: gl.constexpr = q_buffers.dtype
    COLUMN: gl.constexpr = column_layout(score_layout(BUILD.BLOCK_M))
    LATE: gl.constexpr = BUILD.DROPS and BUILD.BLOCK_M > SIDE  # draws take registers that dP of 128 queries would have
    dk = gl.zeros([KEYS, BUILD.BLOCK_D], gl.float32, out_layout(BUILD.BLOCK_D))
    dv = gl.zeros([KEYS, BUILD.BLOCK_DV], gl.float32, out_layout(BUILD.BLOCK_DV))
    drop = seed_of(drop, BUILD)
    wanted = turns > 0
    for c in gl.static_range(BUILD.CONSUMERS):
        wait_full(k_ring, c, BUILD.CONSUMERS, wanted)
    wait_full(v_ring, CONSUMER, BUILD.CONSUMERS, wanted)
    wait_full(q_ring, first_row * 0, BUILD.STAGES, wanted)
    k = k_buffers.index(CONSUMER).reshape([KEYS, BUILD.BLOCK_D])
    begin_turns(CONSUMER, BUILD.CONSUMERS)
    s = warpgroup_mma_wait(0, deps=[_scores(k, q_buffers.index(0).reshape([BUILD.BLOCK_M, BUILD.BLOCK_D]), BUILD)])
    for turn in range(turns):
        row, _line = place_of(turn, line, ranges, BUILD)
        i = buffer_of(turn, BUILD.STAGES)
        k = k_buffers.index(CONSUMER + _nothing(row)).reshape([KEYS, BUILD.BLOCK_D])
        v = v_buffers.index(CONSUMER + _nothing(row)).reshape([KEYS, BUILD.BLOCK_DV])
        q = q_buffers.index(i).reshape([BUILD.BLOCK_M, BUILD.BLOCK_D])
        do = do_buffers.index(i).reshape([BUILD.BLOCK_M, BUILD.BLOCK_DV])
        wait_full(do_ring, turn, BUILD.STAGES)
        if not LATE:
            dp = _scores(v, do, BUILD)
        lse = lse_buffers.index(i).reshape([BUILD.BLOCK_M])
        weights, p = weights_of(s, lse, given, row, turn, ranges, notes, band, scale_log2, dtype, CONSUMER, BUILD, BUILD.HIDES)
        if BUILD.DROPS:
            weights = drop_weights(weights, drop, row, turn, notes, CONSUMER, BUILD)
        if LATE:
            dp = _scores(v, do, BUILD)
        take_turn(CONSUMER)
        dv = warpgroup_mma(gl.convert_layout(weights, weight_layout(BUILD.BLOCK_DV)), do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        delta = delta_buffers.index(i).reshape([BUILD.BLOCK_M]).load(COLUMN)
        if BUILD.DROPS:
            dp = kept(dp, weights) * drop[3]
        ds = (p * (dp - gl.expand_dims(delta, 0))).to(dtype)
        dk = warpgroup_mma(gl.convert_layout(ds, weight_layout(BUILD.BLOCK_D)), q, dk, is_async=True)
        before = turn + 3  # the turn before, two rounds later: not negative, and none is awaited in the first turn
        wait_full(share_ring, before, SHARES)
        dq = _query_gradient(shares, k_buffers, before, CONSUMER, BUILD)
        give_turn(CONSUMER, BUILD.CONSUMERS)
        shares.index(buffer_of(turn, SHARES) * BUILD.CONSUMERS + CONSUMER).store(ds)
        dv, dk = warpgroup_mma_wait(BUILD.CONSUMERS, deps=[dv, dk])
        release(q_ring, turn, BUILD.STAGES)
        s = _next_scores(k, q_buffers, q_ring, turn, turns, BUILD)
        dq = warpgroup_mma_wait(1, deps=[dq])
        if BUILD.ORDERED:
            lay_down(dq, dq_buffers, sum_ring, turn, CONSUMER, BUILD)
        else:
            last_row, last_line = _place_before(turn, line, ranges, BUILD)
            _add(dq, dq_buffers.index(CONSUMER + _nothing(row)), last_line, last_row, dq_source, CONSUMER, BUILD)
        give(share_ring, turn, SHARES)
        s = warpgroup_mma_wait(0, deps=[s])
    if turns > 0:
        wait_full(share_ring, turns - 1, SHARES)
        dq = warpgroup_mma_wait(0, deps=[_query_gradient(shares, k_buffers, turns - 1, CONSUMER, BUILD)])
        if BUILD.ORDERED:
            lay_down(dq, dq_buffers, sum_ring, turns, CONSUMER, BUILD)
            give(share_ring, turns, SHARES)
        else:
            last_row, last_line = _place_before(turns, line, ranges, BUILD)
            _add(dq, dq_buffers.index(CONSUMER), last_line, last_row, dq_source, CONSUMER, BUILD)
    end_turns(CONSUMER)
    meet(BUILD.CONSUMERS)  # nobody reads K any more: dK goes where it was
    dk_ptr, dv_ptr, suspect_ptr, heads = out
    head = _note(notes, HEAD)
    b = _note(notes, BATCH)
    begin_k = _note(notes, BEGIN_K)
    len_k = _note(notes, LEN_K)
    col = _note(notes, COL) + CONSUMER * KEYS
    _mark(dk, col, len_k, suspect_ptr + _note(notes, FLAG) + CONSUMER)
    dk *= scale_log2 * 0.6931471805599453
    if BUILD.DROPS:
        dv *= drop[3]
    if BUILD.PARTS > 1:
        first = (b * heads + head).to(gl.int64) * _note(notes, TOTAL_K) + begin_k + col
        _store_rows(dk_ptr, dk, first, 1, col, len_k, BUILD.DIM)
        _store_rows(dv_ptr, dv, first, 1, col, len_k, BUILD.DIM_V)
    else:
        dk_part = (k_buffers.index(CONSUMER), dk_source, dk_ptr)
        dv_part = (v_buffers.index(CONSUMER), dv_source, dv_ptr)
        _store(dk.to(dtype), dk_part, b, begin_k, col, head, heads, len_k, BUILD.DIM, BUILD)
        _store(dv.to(dtype), dv_part, b, begin_k, col, head, heads, len_k, BUILD.DIM_V, BUILD)
    store_wait(0)


@gluon.jit
def _thread_sum(x):
    """`[M, N]` to `[M, 4]`: what each thread of a quad holds of a row, summed."""
    parts = x.reshape([x.shape[0], 2, x.shape[1] // 16, 4, 2])
    return gl.sum(gl.sum(gl.sum(parts, 4), 2), 1)


@gluon.jit
def _mark(dk, col, len_k, flag_ptr):
    """1 at `flag_ptr` if dK of a key inside has a NaN; infinities of both signs may count as one.

    dV needs no look: what makes it NaN at a hidden place, dO that is not finite, makes dP so, and 0 dP is NaN in dK.
    """
    total = _thread_sum(dk)
    bad = total != total
    cols = col + gl.arange(0, KEYS, layout=row_layout(bad.type.layout))
    gl.store(flag_ptr + gl.where(bad, 0, 0), 1, mask=bad & gl.expand_dims(cols < len_k, 1))


@gluon.jit
def _store_rows(pointer, x, first, step, col, length, DIM: gl.constexpr):
    """The keys from `col` to before `length`, at rows `first`, `first + step`, ... of DIM numbers."""
    cols = gl.arange(0, KEYS, layout=row_layout(x.type.layout))
    dims = gl.arange(0, x.shape[1], layout=column_layout(x.type.layout))
    starts = (first + cols * step) * DIM
    keep = gl.expand_dims(col + cols < length, 1) & (gl.expand_dims(dims, 0) < DIM)
    gl.store(pointer + gl.expand_dims(starts, 1) + gl.expand_dims(dims, 0), x, mask=keep)


@gluon.jit
def _store(x, part, b, begin, col, head, heads, length, DIM: gl.constexpr, BUILD: gl.constexpr):
    """64 rows by TMA, which clips at the end of a dense tensor; at the end of a packed sequence by pointers."""
    buffer, source, pointer = part
    if BUILD.PACKED and col + KEYS > length:
        _store_rows(pointer, x, (begin + col).to(gl.int64) * heads + head, heads, col, length, DIM)
    else:
        buffer.reshape([KEYS, x.shape[1]]).store(x)
        fence_async_shared()
        tma_store(source, [b, begin + col, head, 0], buffer)


@gluon.jit
def backward_kernel(
    q_source, do_source, k_source, v_source,  # descriptors of [B, T, H, D], a packed tensor with B = 1
    lse_source, delta_source,  # fp32 [B * H, length] or [H, length]: the LSE in base 2, and delta; see `address.line_begin`
    dq_source,  # fp32 [B * H, len_q, DIM] or [H, len_q, DIM], 0 before: dQ / scale
    dk_source, dv_source,  # as k and v
    dk_ptr, dv_ptr,  # packed: [T, H, D]; with PARTS: fp32 [B * H * PARTS, T, D], H outside T; None: dense
    suspect_ptr,  # int32, one for every 64 keys, numbered as by `address.locate`, all 0: becomes 1 where a key is suspect
    counts_ptr,  # int32, all 0: blocks that run, then for each line a counter for each query tile; None: dQ in no order
    cu_seqlens_q, cu_seqlens_k,  # [batch + 1]; None: dense
    slopes_ptr,  # fp32 [H] or [B, H]; None: no ALiBi
    given_source,  # descriptor of a bias or of a mask in bytes, [B|1, H|1, Q|1, K]; None: there is neither
    seed_ptr,  # int64 [1]; None: no dropout
    scale_log2,
    cap,  # as `tile_ops.bend` takes it
    odds,  # of dropout: (p 2^15, 1 / (1 - p))
    band, batch, heads, tiles, members, len_q, len_k,
    BUILD: gl.constexpr,
):  # fmt: skip
    """A key tile. `heads`: of K; below, parts count as heads. `tiles`: of a head. `members`: heads together (`locate`)."""
    dtype: gl.constexpr = q_source.dtype
    BLOCK_M: gl.constexpr = BUILD.BLOCK_M
    q_buffers = gl.allocate_shared_memory(dtype, [BUILD.STAGES, 1, BLOCK_M, 1, BUILD.BLOCK_D], q_source.layout)
    do_buffers = gl.allocate_shared_memory(dtype, [BUILD.STAGES, 1, BLOCK_M, 1, BUILD.BLOCK_DV], do_source.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [BUILD.CONSUMERS, 1, KEYS, 1, BUILD.BLOCK_D], k_source.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [BUILD.CONSUMERS, 1, KEYS, 1, BUILD.BLOCK_DV], v_source.layout)
    lse_buffers = gl.allocate_shared_memory(gl.float32, [BUILD.STAGES, 1, BLOCK_M], line_layout())
    delta_buffers = gl.allocate_shared_memory(gl.float32, [BUILD.STAGES, 1, BLOCK_M], line_layout())
    SUMS: gl.constexpr = BUILD.CONSUMERS * BUILD.SLOTS
    dq_buffers = gl.allocate_shared_memory(gl.float32, [SUMS, 1, SIDE, SIDE], sum_layout())
    shares = gl.allocate_shared_memory(dtype, [SHARES * BUILD.CONSUMERS, KEYS, BLOCK_M], share_layout(BLOCK_M, dtype))
    q_ring = open_ring(BUILD.STAGES, BUILD.CONSUMERS)
    do_full, _ = open_ring(BUILD.STAGES, BUILD.CONSUMERS)
    _, q_empty = q_ring
    do_ring = (do_full, q_empty)  # Q and dO are done with together
    k_ring = open_ring(BUILD.CONSUMERS, 1)
    v_ring = open_ring(BUILD.CONSUMERS, 1)
    share_ring = open_shares(SHARES, BUILD.CONSUMERS, 1)
    sum_ring = share_ring
    number = gl.program_id(0)
    if BUILD.ORDERED:
        sum_ring = open_slots_of_sums(BUILD)
        number = draw_number(counts_ptr)
    # None inside a tuple does not reach the warps: what is not used is some pointer instead.
    if not BUILD.PACKED and BUILD.PARTS == 1:
        dk_ptr = suspect_ptr
        dv_ptr = suspect_ptr
    if not BUILD.PACKED:
        cu_seqlens_q = suspect_ptr
        cu_seqlens_k = suspect_ptr
    given = (q_ring, q_buffers, q_source)
    if BUILD.GIVEN != "":
        given = open_given(given_source, BUILD)
    fence_async_shared()
    heads *= BUILD.PARTS
    work = (cu_seqlens_q, cu_seqlens_k, batch, heads, tiles, members, len_q, len_k)
    col, head, b, sequence, begin_k, own_k, begin_q, own_q = locate(number, work, BUILD)
    line = (b * heads + head) * BUILD.GROUP
    if BUILD.PACKED:
        flag = head // BUILD.PARTS * (len_k // KEYS + batch) + begin_k // KEYS + sequence + col // KEYS
    else:
        flag = (b * heads + head) // BUILD.PARTS * gl.cdiv(len_k, KEYS) + col // KEYS
    ranges = ranges_of(col, begin_q, own_q, own_k, band, BUILD)
    MEMBERS: gl.constexpr = BUILD.GROUP if BUILD.ALIBI != "" else 2 if BUILD.CAP else 0
    notes = gl.allocate_shared_memory(gl.int32, [NOTES + MEMBERS, 1], slot_layout())
    zero = gl.full([1], 0, gl.int32, number_layout(gl.num_warps()))
    notes.index(COL).store(zero + col)
    notes.index(HEAD).store(zero + head)
    notes.index(BATCH).store(zero + b)
    notes.index(FLAG).store(zero + flag)
    notes.index(BEGIN_K).store(zero + begin_k)
    notes.index(LEN_K).store(zero + own_k)
    notes.index(BEGIN_Q).store(zero + begin_q)
    notes.index(LEN_Q).store(zero + own_q)
    notes.index(TOTAL_K).store(zero + len_k)
    if BUILD.ALIBI != "":
        if BUILD.PER_SEQUENCE:
            slopes_ptr += (b + sequence).to(gl.int64) * (heads * BUILD.GROUP)
        for member in gl.static_range(BUILD.GROUP):
            slope = gl.load(slopes_ptr + head * BUILD.GROUP + member) * 1.4426950408889634
            notes.index(NOTES + member).store(zero + as_bits(slope))
    if BUILD.CAP:
        notes.index(NOTES).store(zero + as_bits(cap[0]))
        notes.index(NOTES + 1).store(zero + as_bits(cap[1]))
    if BUILD.PACKED:
        notes.index(SHIFT).store(zero + line_begin(begin_q, sequence) - begin_q)
    else:
        notes.index(SHIFT).store(zero)
    if BUILD.DROPS:
        drop = (seed_ptr, odds, b + sequence)
    else:
        drop = (suspect_ptr, scale_log2, scale_log2)
    out = (dk_ptr, dv_ptr, suspect_ptr, heads)
    sources = (q_source, do_source, k_source, v_source, lse_source, delta_source, dq_source, dk_source, dv_source)
    buffers = (q_buffers, do_buffers, k_buffers, v_buffers, lse_buffers, delta_buffers, dq_buffers, shares)
    rings = (q_ring, do_ring, k_ring, v_ring, share_ring, sum_ring)
    # Constants stand inside the calls: a tuple in a variable would turn them into tensors.
    if BUILD.ORDERED:
        if BUILD.PACKED:
            order = (counts_ptr + 1, begin_q // BLOCK_M + sequence, len_q // BLOCK_M + batch, cu_seqlens_k, batch, len_k)
        else:
            order = (counts_ptr + 1, 0, gl.cdiv(len_q, BLOCK_M), counts_ptr, 0, 0)
        sums = (share_ring, sum_ring)
        FEW: gl.constexpr = BUILD.PRODUCER_REGISTERS
        gl.warp_specialize([
            (_consumer, (line, ranges, notes, band, scale_log2, drop, out, given, sources, buffers, rings, 0, BUILD)),
            (_consumer, (line, ranges, notes, band, scale_log2, drop, out, given, sources, buffers, rings, 1, BUILD)),
            (_producer, (line, ranges, notes, given, sources, buffers, rings, BUILD)),
            (_adder, (line, ranges, notes, band, order, dq_source, dq_buffers, sums, 0, BUILD)),
            (_adder, (line, ranges, notes, band, order, dq_source, dq_buffers, sums, 1, BUILD)),
        ], [4, 1, 1, 1], [BUILD.REGISTERS, FEW, FEW, FEW])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (line, ranges, notes, band, scale_log2, drop, out, given, sources, buffers, rings, 0, BUILD)),
            (_consumer, (line, ranges, notes, band, scale_log2, drop, out, given, sources, buffers, rings, 1, BUILD)),
            (_producer, (line, ranges, notes, given, sources, buffers, rings, BUILD)),
        ], [4, 1], [BUILD.REGISTERS, BUILD.PRODUCER_REGISTERS])  # fmt: skip
