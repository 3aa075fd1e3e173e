"""dK and dV for head dimensions up to 256 on Hopper: two warpgroups share out the work on 64 keys, not the keys.

    S = K Q^T,  P = exp(scale S - LSE),  dV = P dO            the first warpgroup
    dP = V dO^T,  dS = P (dP - delta),  dK = scale dS Q       the second one

dK or dV of 64 keys and 256 dimensions takes half of a warpgroup's registers, so that neither could hold both. P goes from the
first to the second through shared memory, in fp32: each thread leaves what the same thread of the other warpgroup needs. Of a
soft-cap that is P (1 - t^2), with which dP - delta is to be multiplied (`backward_scores.py`, which bends and hides scores).
Names and the rest are those of `backward.py`; dQ is computed by `backward_wide_queries.py`. Launched by
`backward_wide_launch.py`. The shape is our own.

Who waits for whom:

* At the end of a turn each warpgroup multiplies the scores of the next one, behind its gradient, and awaits both there: a sum
  that is in flight where a loop goes round makes ptxas put every product after the one before. The tensor cores have work
  during the exponentials because the other warpgroup's products are then on their way.
* Tiles of Q and dO are done with about a turn after they were first read. With two of each, the next ones are on their way for
  another turn, which is what L2 needs for 64 KB.
* One reader gives a buffer back for both: dK of a turn comes after P, hence after S and the LSE, so that the second warpgroup
  gives back Q, and the place of P with it; where P has one place only, it gives that back as soon as it has read it. dO of the
  turn after the next is fetched behind the Q of that turn, hence after dP and delta of this one, so that the first warpgroup
  gives back dO, after dV.

NaN and infinities as in `backward.py`.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from rowmax.kernels.address import line_begin
from rowmax.kernels.gluon.backward import _mark, _nothing, _scores, _store
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
    _note,
    locate,
    place_of,
    ranges_of,
)
from rowmax.kernels.gluon.layouts import (
    column_layout,
    line_layout,
    number_layout,
    out_layout,
    own_layout,
    own_shared_layout,
    score_layout,
    slot_layout,
    weight_layout,
)
from rowmax.kernels.gluon.names import as_bits, store_wait
from rowmax.kernels.gluon.ring import (
    buffer_of,
    fill,
    fill_with_line,
    give,
    meet,
    open_ring,
    release,
    wait_empty,
    wait_full,
)

QUERIES = gl.constexpr(64)  # of a tile


@dataclass(frozen=True)
class Build:
    """What is fixed when the kernel is compiled.

    Attributes:
        GROUP: query heads of a KV head.
        DIM, DIM_V: head dimensions; BLOCK_D, BLOCK_DV: in shared memory, zero-filled.
        BLOCK_M, CONSUMERS: 64 queries of a tile and once 64 keys, for what is shared with `backward.py`.
        STAGES: Q and dO tiles in flight.
        REGISTERS, PRODUCER_REGISTERS: of one thread.
        ALIBI, PER_SEQUENCE, CAP: as in the forward; GIVEN and what begins so, too: rows are 64 or 1.
        SHARES: turns whose P are in shared memory: as Q tiles, or one where what is given for pairs takes the room.
    """

    PACKED: bool
    GROUP: int
    DIM: int
    DIM_V: int
    BLOCK_D: int
    BLOCK_DV: int
    STAGES: int
    REGISTERS: int
    PRODUCER_REGISTERS: int
    ALIBI: str
    PER_SEQUENCE: bool
    CAP: bool
    GIVEN: str
    GIVEN_ROWS: int
    GIVEN_BATCH: int
    GIVEN_HEAD: int
    GIVEN_STAGES: int
    GIVEN_APART: int
    SHARES: int
    BLOCK_M: int = 64
    CONSUMERS: int = 1

    def __post_init__(self):  # in a kernel, an attribute of a constant is a constant only if it says so
        for name, value in vars(self).copy().items():
            object.__setattr__(self, name, gl.constexpr(value))


# ---- producer --------------------------------------------------------------------------------------------------------------


@gluon.jit
def _producer(first_line, ranges, notes, given, sources, buffers, rings, BUILD: gl.constexpr):
    """Fetches K and V, and for every turn Q and dO with two numbers for each row."""
    q_source, do_source, k_source, v_source, lse_source, delta_source, _dk, _dv = sources
    q_buffers, do_buffers, k_buffers, v_buffers, lse_buffers, delta_buffers, _shares = buffers
    q_ring, do_ring, k_ring, v_ring, _share_ring = rings
    turns, _row, _full, _full_end = ranges
    head = _note(notes, HEAD)
    b = _note(notes, BATCH)
    first_key = _note(notes, BEGIN_K) + _note(notes, COL)
    member = head * BUILD.GROUP - first_line  # of a line, the head of Q
    shift = _note(notes, SHIFT)  # of a row, its place in a line
    q_parts = (q_buffers, q_source)
    do_parts = (do_buffers, do_source)
    lse_parts = (lse_buffers, lse_source)
    delta_parts = (delta_buffers, delta_source)
    if turns > 0:
        fill(k_ring, (k_buffers, k_source, k_buffers, k_source), b, first_key, head, 0, 1, 0, 1, 0)
        for turn in range(turns):
            row, line = place_of(turn, first_line, ranges, BUILD)
            fill_with_line(q_ring, q_parts, lse_parts, b, row, member + line, line, row + shift, turn, BUILD.STAGES)
            if turn == 0:
                fill(v_ring, (v_buffers, v_source, v_buffers, v_source), b, first_key, head, 0, 1, 0, 1, 0)
            if BUILD.GIVEN != "":
                fetch_given(given, b, member + line, row, first_key, turn, BUILD)
            fill_with_line(do_ring, do_parts, delta_parts, b, row, member + line, line, row + shift, turn, BUILD.STAGES)


# ---- consumers -------------------------------------------------------------------------------------------------------------


@gluon.jit
def _to_own(p):
    """`[64, 64]` to `[8, 128, 4]`, what each of 128 threads holds: a row is 16 w + 8 h + g, a column 8 i + 2 t + e."""
    return p.reshape([4, 2, 8, 8, 4, 2]).permute(3, 0, 2, 4, 1, 5).reshape([8, 128, 4])


@gluon.jit
def _from_own(p):
    return p.reshape([8, 4, 8, 4, 2, 2]).permute(1, 4, 2, 0, 3, 5).reshape([KEYS, QUERIES])


@gluon.jit
def _scores_of(buffers, tiles, place, turn, STAGES: gl.constexpr, BLOCK: gl.constexpr, BUILD: gl.constexpr):
    """`[keys, queries]` of K and Q, or of V and dO, of a turn: issued, not awaited."""
    keys = buffers.index(_nothing(place)).reshape([KEYS, BLOCK])
    return _scores(keys, tiles.index(buffer_of(turn, STAGES)).reshape([QUERIES, BLOCK]), BUILD)


@gluon.jit
def _lse_of(turn, buffers, BUILD: gl.constexpr):
    """Of a turn, loaded while S is multiplied: 4% of the backward. Beside a soft-cap there are no registers for it."""
    lse = buffers[4].index(buffer_of(turn, BUILD.STAGES)).reshape([QUERIES])
    return lse if BUILD.CAP else lse.load(column_layout(score_layout(QUERIES)))


@gluon.jit
def _weights(s, lse, given, turn, line, ranges, notes, band, scale_log2, buffers, share_ring, BUILD: gl.constexpr):
    """P of a turn, given to the other warpgroup, and in 16 bits as the first factor of dV."""
    q_buffers, _do_buffers, _k_buffers, _v_buffers, _lse_buffers, _delta_buffers, shares = buffers
    row, _line = place_of(turn, line, ranges, BUILD)
    LOADED: gl.constexpr = not BUILD.CAP
    weights, p = weights_of(s, lse, given, row, turn, ranges, notes, band, scale_log2, q_buffers.dtype, 0, BUILD, True, LOADED)
    if BUILD.SHARES < BUILD.STAGES:
        wait_empty(share_ring, turn, BUILD.SHARES)
    shares.index(buffer_of(turn, BUILD.SHARES)).store(_to_own(p))
    give(share_ring, turn, BUILD.SHARES)
    return gl.convert_layout(weights, weight_layout(BUILD.BLOCK_DV))


@gluon.jit
def _value_gradient(p, dv, turn, do_buffers, do_ring, BUILD: gl.constexpr):
    wait_full(do_ring, turn, BUILD.STAGES)
    do = do_buffers.index(buffer_of(turn, BUILD.STAGES)).reshape([QUERIES, BUILD.BLOCK_DV])
    return warpgroup_mma(p, do, dv, is_async=True)


@gluon.jit
def _value_consumer(line, ranges, notes, band, scale_log2, out, given, sources, buffers, rings, BUILD: gl.constexpr):
    """P for the other warpgroup, and dV."""
    _q, _do, _k, _v, _lse, _delta, _dk, dv_source = sources
    q_buffers, do_buffers, k_buffers, v_buffers, _lse_buffers, _delta_buffers, _shares = buffers
    q_ring, do_ring, k_ring, _v_ring, share_ring = rings
    turns, row, _full, _full_end = ranges
    dv = gl.zeros([KEYS, BUILD.BLOCK_DV], gl.float32, out_layout(BUILD.BLOCK_DV))
    if turns > 0:
        wait_full(k_ring, row * 0, 1)
        wait_full(q_ring, row * 0, BUILD.STAGES)
        s = warpgroup_mma_wait(0, deps=[_scores_of(k_buffers, q_buffers, row, row * 0, BUILD.STAGES, BUILD.BLOCK_D, BUILD)])
        lse = _lse_of(row * 0, buffers, BUILD)
        for turn in range(turns - 1):
            p = _weights(s, lse, given, turn, line, ranges, notes, band, scale_log2, buffers, share_ring, BUILD)
            dv = _value_gradient(p, dv, turn, do_buffers, do_ring, BUILD)
            wait_full(q_ring, turn + 1, BUILD.STAGES)
            s = _scores_of(k_buffers, q_buffers, turn, turn + 1, BUILD.STAGES, BUILD.BLOCK_D, BUILD)
            lse = _lse_of(turn + 1, buffers, BUILD)
            dv = warpgroup_mma_wait(1, deps=[dv])
            release(do_ring, turn, BUILD.STAGES)
            s = warpgroup_mma_wait(0, deps=[s])
        p = _weights(s, lse, given, turns - 1, line, ranges, notes, band, scale_log2, buffers, share_ring, BUILD)
        dv = warpgroup_mma_wait(0, deps=[_value_gradient(p, dv, turns - 1, do_buffers, do_ring, BUILD)])
    meet(2)  # nobody reads V any more: dV goes where it was
    _dk_ptr, dv_ptr, _suspect_ptr, heads = out
    dv_part = (v_buffers.index(0), dv_source, dv_ptr)
    b = _note(notes, BATCH)
    begin_k = _note(notes, BEGIN_K)
    head = _note(notes, HEAD)
    _store(dv.to(dv_source.dtype), dv_part, b, begin_k, _note(notes, COL), head, heads, _note(notes, LEN_K), BUILD.DIM_V, BUILD)
    store_wait(0)


@gluon.jit
def _key_gradient(dp, dk, turn, buffers, rings, BUILD: gl.constexpr):
    """dS of a turn from the other warpgroup's P, and dK, issued."""
    q_buffers, _do_buffers, _k_buffers, _v_buffers, _lse_buffers, delta_buffers, shares = buffers
    q_ring, _do_ring, _k_ring, _v_ring, share_ring = rings
    i = buffer_of(turn, BUILD.STAGES)
    delta = delta_buffers.index(i).reshape([QUERIES]).load(column_layout(score_layout(QUERIES)))
    wait_full(share_ring, turn, BUILD.SHARES)
    p = gl.convert_layout(_from_own(shares.index(buffer_of(turn, BUILD.SHARES)).load(own_layout())), score_layout(QUERIES))
    if BUILD.SHARES < BUILD.STAGES:
        release(share_ring, turn, BUILD.SHARES)
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(q_buffers.dtype)
    wait_full(q_ring, turn, BUILD.STAGES)
    q = q_buffers.index(i).reshape([QUERIES, BUILD.BLOCK_D])
    return warpgroup_mma(gl.convert_layout(ds, weight_layout(BUILD.BLOCK_D)), q, dk, is_async=True)


@gluon.jit
def _key_consumer(ranges, notes, scale_log2, out, sources, buffers, rings, BUILD: gl.constexpr):
    """dK from the other warpgroup's P."""
    _q, _do, _k, _v, _lse, _delta, dk_source, _dv = sources
    _q_buffers, do_buffers, k_buffers, v_buffers, _lse_buffers, _delta_buffers, _shares = buffers
    q_ring, do_ring, _k_ring, v_ring, _share_ring = rings
    turns, row, _full, _full_end = ranges
    dk = gl.zeros([KEYS, BUILD.BLOCK_D], gl.float32, out_layout(BUILD.BLOCK_D))
    if turns > 0:
        wait_full(v_ring, row * 0, 1)
        wait_full(do_ring, row * 0, BUILD.STAGES)
        dp = warpgroup_mma_wait(0, deps=[_scores_of(v_buffers, do_buffers, row, row * 0, BUILD.STAGES, BUILD.BLOCK_DV, BUILD)])
        for turn in range(turns - 1):
            dk = _key_gradient(dp, dk, turn, buffers, rings, BUILD)
            wait_full(do_ring, turn + 1, BUILD.STAGES)
            dp = _scores_of(v_buffers, do_buffers, turn, turn + 1, BUILD.STAGES, BUILD.BLOCK_DV, BUILD)
            dk = warpgroup_mma_wait(1, deps=[dk])
            release(q_ring, turn, BUILD.STAGES)
            dp = warpgroup_mma_wait(0, deps=[dp])
        dk = warpgroup_mma_wait(0, deps=[_key_gradient(dp, dk, turns - 1, buffers, rings, BUILD)])
    meet(2)  # nobody reads K any more: dK goes where it was
    dk_ptr, _dv_ptr, suspect_ptr, heads = out
    len_k = _note(notes, LEN_K)
    col = _note(notes, COL)
    _mark(dk, col, len_k, suspect_ptr + _note(notes, FLAG))
    dk_part = (k_buffers.index(0), dk_source, dk_ptr)
    b = _note(notes, BATCH)
    begin_k = _note(notes, BEGIN_K)
    head = _note(notes, HEAD)
    dk = (dk * (scale_log2 * 0.6931471805599453)).to(dk_source.dtype)
    _store(dk, dk_part, b, begin_k, col, head, heads, len_k, BUILD.DIM, BUILD)
    store_wait(0)


@gluon.jit
def key_kernel(
    q_source, do_source, k_source, v_source,  # descriptors of [B, T, H, D], a packed tensor with B = 1
    lse_source, delta_source,  # fp32 [B * H, length] or [H, length]: the LSE in base 2, and delta; see `address.line_begin`
    dk_source, dv_source,  # as k and v
    dk_ptr, dv_ptr,  # packed: [T, H, D]; None: dense
    suspect_ptr,  # int32, one for every 64 keys, numbered as by `address.locate`, all 0: becomes 1 where a key is suspect
    cu_seqlens_q, cu_seqlens_k,  # [batch + 1]; None: dense
    slopes_ptr,  # fp32 [H] or [B, H], H of Q; None: no ALiBi
    given_source,  # descriptor of a bias or of a mask in bytes, [B|1, H|1, Q|1, K]; None: there is neither
    scale_log2,
    cap,  # as `tile_ops.bend` takes it
    band, batch, heads, tiles, members, len_q, len_k,
    BUILD: gl.constexpr,
):  # fmt: skip
    """A key tile. `heads`: of K. `tiles`: of a head. `members`: heads of a group (`locate`)."""
    dtype: gl.constexpr = q_source.dtype
    q_buffers = gl.allocate_shared_memory(dtype, [BUILD.STAGES, 1, QUERIES, 1, BUILD.BLOCK_D], q_source.layout)
    do_buffers = gl.allocate_shared_memory(dtype, [BUILD.STAGES, 1, QUERIES, 1, BUILD.BLOCK_DV], do_source.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [1, 1, KEYS, 1, BUILD.BLOCK_D], k_source.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [1, 1, KEYS, 1, BUILD.BLOCK_DV], v_source.layout)
    lse_buffers = gl.allocate_shared_memory(gl.float32, [BUILD.STAGES, 1, QUERIES], line_layout())
    delta_buffers = gl.allocate_shared_memory(gl.float32, [BUILD.STAGES, 1, QUERIES], line_layout())
    shares = gl.allocate_shared_memory(gl.float32, [BUILD.SHARES, 8, 128, 4], own_shared_layout())
    q_ring = open_ring(BUILD.STAGES, 1)
    do_ring = open_ring(BUILD.STAGES, 1)
    k_ring = open_ring(1, 1)
    v_ring = open_ring(1, 1)
    share_ring = open_ring(BUILD.SHARES, 1)
    # None inside a tuple does not reach the warps: what is not used is some pointer instead.
    if not BUILD.PACKED:
        dk_ptr = suspect_ptr
        dv_ptr = suspect_ptr
        cu_seqlens_q = suspect_ptr
        cu_seqlens_k = suspect_ptr
    given = (q_ring, q_buffers, q_source)
    if BUILD.GIVEN != "":
        given = open_given(given_source, BUILD)
    fence_async_shared()
    work = (cu_seqlens_q, cu_seqlens_k, batch, heads, tiles, members, len_q, len_k)
    col, head, b, sequence, begin_k, own_k, begin_q, own_q = locate(gl.program_id(0), work, BUILD)
    line = (b * heads + head) * BUILD.GROUP
    ranges = ranges_of(col, begin_q, own_q, own_k, band, BUILD)
    MEMBERS: gl.constexpr = BUILD.GROUP if BUILD.ALIBI != "" else 2 if BUILD.CAP else 0
    notes = gl.allocate_shared_memory(gl.int32, [NOTES + MEMBERS, 1], slot_layout())
    zero = gl.full([1], 0, gl.int32, number_layout(gl.num_warps()))
    notes.index(COL).store(zero + col)
    notes.index(HEAD).store(zero + head)
    notes.index(BATCH).store(zero + b)
    notes.index(BEGIN_K).store(zero + begin_k)
    notes.index(LEN_K).store(zero + own_k)
    notes.index(BEGIN_Q).store(zero + begin_q)
    notes.index(LEN_Q).store(zero + own_q)
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
        notes.index(FLAG).store(zero + head * (len_k // KEYS + batch) + begin_k // KEYS + sequence + col // KEYS)
        notes.index(SHIFT).store(zero + line_begin(begin_q, sequence) - begin_q)
    else:
        notes.index(FLAG).store(zero + (b * heads + head) * gl.cdiv(len_k, KEYS) + col // KEYS)
        notes.index(SHIFT).store(zero)
    out = (dk_ptr, dv_ptr, suspect_ptr, heads)
    sources = (q_source, do_source, k_source, v_source, lse_source, delta_source, dk_source, dv_source)
    buffers = (q_buffers, do_buffers, k_buffers, v_buffers, lse_buffers, delta_buffers, shares)
    rings = (q_ring, do_ring, k_ring, v_ring, share_ring)
    # Constants stand inside the calls: a tuple in a variable would turn them into tensors.
    gl.warp_specialize([
        (_value_consumer, (line, ranges, notes, band, scale_log2, out, given, sources, buffers, rings, BUILD)),
        (_key_consumer, (ranges, notes, scale_log2, out, sources, buffers, rings, BUILD)),
        (_producer, (line, ranges, notes, given, sources, buffers, rings, BUILD)),
    ], [4, 1], [BUILD.REGISTERS, BUILD.PRODUCER_REGISTERS])  # fmt: skip
