"""dQ for head dimensions up to 256 on Hopper: the forward's shape, a block owns 128 rows, and K/V tiles stream past.

    S = Q K^T,  P = exp(scale S - LSE),  dP = dO V^T,  dS = P (dP - delta),  dQ = scale dS K

Each of two consumers has 64 rows, whose Q and dO stay in shared memory and whose dQ stays in registers, so that it needs no
sums in memory and comes out the same every time. dS is the first factor of dQ as it is, from registers. Launched by
`backward_wide_launch.py` beside `backward_wide_keys.py`. Source: Dao, "FlashAttention-2" (2023), algorithm 2, with rows and
keys exchanged in its loops; what stands where is our own. Scores are bent in `backward_wide_scores.py`.

A turn is dQ of its key tile, then S and dP of the next one, issued together and awaited one after another: P is computed while
the tensor cores do dP, and dQ is awaited first, so that its K can be replaced. Nothing is in flight where the loop goes round.
There is room for two K tiles and one V tile: V is read by one product only. What is given for pairs comes through a ring of
each consumer; where that takes more room than there is, key tiles are half as long.

NaN and infinities: where a row does not see a key, dS is set to 0, whatever P and dP are; but 0 * NaN of K is NaN. With a
soft-cap P is 0 there, and 0 * NaN of dP is NaN too. Rows with a NaN leave a mark for their 64, and `backward_wide_edges.py`
computes these once more.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from rowmax.kernels.address import extent, find_sequence, in_group, line_begin
from rowmax.kernels.gluon.backward import _mark, _nothing, _store
from rowmax.kernels.gluon.backward_walk import (
    BATCH,
    BEGIN_K,
    BEGIN_Q,
    COL,
    FLAG,
    HEAD,
    LEN_K,
    LEN_Q,
    NOTES,
    _note,
)
from rowmax.kernels.gluon.backward_wide_scores import fetch_given_rows, open_given_rows, row_weights_of
from rowmax.kernels.gluon.index import hide
from rowmax.kernels.gluon.layouts import (
    number_layout,
    out_layout,
    row_layout,
    score_layout,
    slot_layout,
    weight_layout,
)
from rowmax.kernels.gluon.names import as_bits, store_wait
from rowmax.kernels.gluon.ring import buffer_of, fill, open_ring, release, wait_full
from rowmax.kernels.tile_ops import early_tiles, end_key, key_ranges, key_tile_start

ROWS = gl.constexpr(64)  # of a consumer
CONSUMERS = gl.constexpr(2)


@dataclass(frozen=True)
class Build:
    """What is fixed when the kernel is compiled.

    Attributes:
        GROUP: query heads of a KV head.
        DIM: of Q; BLOCK_D, BLOCK_DV: head dimensions in shared memory, zero-filled.
        BLOCK_N: keys of a tile, 64 or 32.
        STAGES, V_STAGES: K tiles and V tiles in flight.
        REGISTERS, PRODUCER_REGISTERS: of one thread.
        ALIBI, PER_SEQUENCE, CAP: as in the forward; GIVEN and what begins so, too: rows are 64 or 1.
    """

    PACKED: bool
    GROUP: int
    DIM: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_DV: int
    STAGES: int
    V_STAGES: int
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

    def __post_init__(self):  # in a kernel, an attribute of a constant is a constant only if it says so
        for name, value in vars(self).copy().items():
            object.__setattr__(self, name, gl.constexpr(value))


@gluon.jit
def locate_rows(tile, work, BUILD: gl.constexpr):
    """`(row, head, b, sequence, begin_q, len_q, begin_k, len_k)` of a row tile; `head` is one of Q.

    Heads come in groups of `members`, whose K/V stay in L2; inside a group the last row tile of every head first, which with a
    causal mask is the longest. Packed: `b` is 0, and a surplus tile starts at or past its sequence's end.
    """
    cu_seqlens_q, cu_seqlens_k, batch, heads, tiles, members, len_q, len_k = work
    BLOCK: gl.constexpr = CONSUMERS * ROWS
    every = heads
    if not BUILD.PACKED:
        every = heads * batch
    head, place = in_group(tile, every, tiles, members)
    row_tile = tiles - 1 - place
    if BUILD.PACKED:
        sequence = find_sequence(row_tile, cu_seqlens_q, batch, BLOCK)
        begin_q, own_q = extent(cu_seqlens_q, sequence, len_q)
        begin_k, own_k = extent(cu_seqlens_k, sequence, len_k)
        row = (row_tile - begin_q // BLOCK - sequence) * BLOCK
        return gl.where(row < 0, own_q, row), head, tile * 0, sequence, begin_q, own_q, begin_k, own_k
    else:
        return row_tile * BLOCK, head % heads, head // heads, tile * 0, tile * 0, len_q, tile * 0, len_k


@gluon.jit
def _row_producer(ranges, notes, band, given, sources, buffers, rings, BUILD: gl.constexpr):
    """Fetches Q and dO of the consumers, and for every turn K and V."""
    q_source, do_source, k_source, v_source, _dq = sources
    q_buffers, do_buffers, k_buffers, v_buffers = buffers
    q_ring, do_ring, k_ring, v_ring = rings
    turns, fewer, start, _full, _full_end = ranges
    head = _note(notes, HEAD)
    b = _note(notes, BATCH)
    row = _note(notes, BEGIN_Q) + _note(notes, COL)
    begin = _note(notes, BEGIN_K)
    q_parts = (q_buffers, q_source, q_buffers, q_source)
    do_parts = (do_buffers, do_source, do_buffers, do_source)
    k_parts = (k_buffers, k_source, k_buffers, k_source)
    v_parts = (v_buffers, v_source, v_buffers, v_source)
    if turns > 0:
        for c in gl.static_range(CONSUMERS):
            fill(q_ring, q_parts, b, row + c * ROWS, head, c, CONSUMERS, 0, 1, 0)
        for turn in range(turns):
            col = begin + key_tile_start(turn, start, band, BUILD.BLOCK_N)
            fill(k_ring, k_parts, b, col, head // BUILD.GROUP, turn, BUILD.STAGES, 0, 1, 0)
            if turn == 0:
                for c in gl.static_range(CONSUMERS):
                    fill(do_ring, do_parts, b, row + c * ROWS, head, c, CONSUMERS, 0, 1, 0)
            fill(v_ring, v_parts, b, col, head // BUILD.GROUP, turn, BUILD.V_STAGES, 0, 1, 0)
            if BUILD.GIVEN != "":
                place = (b, head, _note(notes, COL), col - begin)
                fetch_given_rows(given, place, turn, turn < fewer, BUILD)


@gluon.jit
def _row_scores(
    rows, buffers, col, turn, CONSUMER: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """`[queries, keys]` of Q and K, or of dO and V, of a turn: issued, not awaited."""
    a = rows.index(CONSUMER + _nothing(col)).reshape([ROWS, BLOCK])
    b = buffers.index(buffer_of(turn, STAGES)).reshape([BLOCK_N, BLOCK])
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout(BLOCK_N))
    return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _row_gradient(
    p, dp, delta, dq, turn, ranges, notes, band, k_buffers, CONSUMER: gl.constexpr, BUILD: gl.constexpr
):  # fmt: skip
    """dS of a turn, and dQ, issued."""
    _turns, _fewer, start, full, full_end = ranges
    ds = p * (dp - delta)
    col = key_tile_start(turn, start, band, BUILD.BLOCK_N)
    if not BUILD.CAP and (col < full) | (col >= full_end):
        row = _note(notes, COL) + CONSUMER * ROWS
        len_q = _note(notes, LEN_Q)
        len_k = _note(notes, LEN_K)
        ds = hide(ds, row, col, len_k, len_k - len_q, band, 0.0)
    k = k_buffers.index(buffer_of(turn, BUILD.STAGES)).reshape([BUILD.BLOCK_N, BUILD.BLOCK_D])
    return warpgroup_mma(gl.convert_layout(ds.to(k_buffers.dtype), weight_layout(BUILD.BLOCK_D)), k, dq, is_async=True)


@gluon.jit
def _row_consumer(
    ranges, notes, lines, band, scale_log2, out, given, sources, buffers, rings, CONSUMER: gl.constexpr, BUILD: gl.constexpr
):  # fmt: skip
    """dQ of 64 rows."""
    _q, _do, _k, _v, dq_source = sources
    q_buffers, do_buffers, k_buffers, v_buffers = buffers
    q_ring, do_ring, k_ring, v_ring = rings
    turns, fewer, start, _full, _full_end = ranges
    lse_ptr, delta_ptr = lines
    if CONSUMER == 0:
        turns = fewer
    dq = gl.zeros([ROWS, BUILD.BLOCK_D], gl.float32, out_layout(BUILD.BLOCK_D))
    row = _note(notes, COL) + CONSUMER * ROWS
    rows = row + gl.arange(0, ROWS, layout=row_layout(score_layout(BUILD.BLOCK_N)))
    keep = rows < _note(notes, LEN_Q)
    lse = gl.expand_dims(gl.load(lse_ptr + rows, mask=keep, other=float("inf")), 1)
    delta = gl.expand_dims(gl.load(delta_ptr + rows, mask=keep, other=0.0), 1)
    if turns > 0:
        zero = turns * 0
        wait_full(q_ring, CONSUMER, CONSUMERS)
        wait_full(k_ring, zero, BUILD.STAGES)
        s = _row_scores(q_buffers, k_buffers, start, zero, CONSUMER, BUILD.STAGES, BUILD.BLOCK_D, BUILD.BLOCK_N)
        wait_full(do_ring, CONSUMER, CONSUMERS)
        wait_full(v_ring, zero, BUILD.V_STAGES)
        dp = _row_scores(do_buffers, v_buffers, start, zero, CONSUMER, BUILD.V_STAGES, BUILD.BLOCK_DV, BUILD.BLOCK_N)
        s, dp = warpgroup_mma_wait(0, deps=[s, dp])
        first = key_tile_start(zero, start, band, BUILD.BLOCK_N)
        p = row_weights_of(s, lse, given, first, zero, ranges, notes, band, scale_log2, k_buffers.dtype, CONSUMER, BUILD)
        for turn in range(turns - 1):
            release(v_ring, turn, BUILD.V_STAGES)
            dq = _row_gradient(p, dp, delta, dq, turn, ranges, notes, band, k_buffers, CONSUMER, BUILD)
            col = start + turn * BUILD.BLOCK_N
            wait_full(k_ring, turn + 1, BUILD.STAGES)
            s = _row_scores(q_buffers, k_buffers, col, turn + 1, CONSUMER, BUILD.STAGES, BUILD.BLOCK_D, BUILD.BLOCK_N)
            dq = warpgroup_mma_wait(1, deps=[dq])
            release(k_ring, turn, BUILD.STAGES)
            wait_full(v_ring, turn + 1, BUILD.V_STAGES)
            dp = _row_scores(do_buffers, v_buffers, col, turn + 1, CONSUMER, BUILD.V_STAGES, BUILD.BLOCK_DV, BUILD.BLOCK_N)
            s = warpgroup_mma_wait(1, deps=[s])
            next_col = key_tile_start(turn + 1, start, band, BUILD.BLOCK_N)
            p = row_weights_of(
                s, lse, given, next_col, turn + 1, ranges, notes, band, scale_log2, k_buffers.dtype, CONSUMER, BUILD
            )
            wait_full(v_ring, turn + 1, BUILD.V_STAGES)  # once more: it keeps the wait for dP below the exponentials
            dp = warpgroup_mma_wait(0, deps=[dp])
        release(v_ring, turns - 1, BUILD.V_STAGES)  # the other consumer may have one more
        dq = warpgroup_mma_wait(
            0, deps=[_row_gradient(p, dp, delta, dq, turns - 1, ranges, notes, band, k_buffers, CONSUMER, BUILD)]
        )
    dq_ptr, suspect_ptr, heads = out
    len_q = _note(notes, LEN_Q)
    row = _note(notes, COL) + CONSUMER * ROWS
    _mark(dq, row, len_q, suspect_ptr + _note(notes, FLAG) + CONSUMER)
    part = (q_buffers.index(CONSUMER), dq_source, dq_ptr)
    b = _note(notes, BATCH)
    begin_q = _note(notes, BEGIN_Q)
    head = _note(notes, HEAD)
    dq = (dq * (scale_log2 * 0.6931471805599453)).to(dq_source.dtype)
    _store(dq, part, b, begin_q, row, head, heads, len_q, BUILD.DIM, BUILD)
    store_wait(0)


@gluon.jit
def query_kernel(
    q_source, do_source, k_source, v_source,  # descriptors of [B, T, H, D], a packed tensor with B = 1
    dq_source,  # as q
    dq_ptr,  # packed: [T, H, D]; None: dense
    lse_ptr, delta_ptr,  # fp32 [B * H, length] or [H, length]: the LSE in base 2, and delta; see `address.line_begin`
    suspect_ptr,  # int32, one for every 64 rows, numbered as by `address.locate`, all 0: becomes 1 where a row is suspect
    cu_seqlens_q, cu_seqlens_k,  # [batch + 1]; None: dense
    slopes_ptr,  # fp32 [H] or [B, H]; None: no ALiBi
    given_source,  # descriptor of a bias or of a mask in bytes, [B|1, H|1, Q|1, K]; None: there is neither
    scale_log2,
    cap,  # as `tile_ops.bend` takes it
    band, batch, heads, tiles, members, len_q, len_k, length,
    BUILD: gl.constexpr,
):  # fmt: skip
    """A row tile. `heads`: of Q. `tiles`: of a head. `members`: heads of a group (`locate_rows`)."""
    dtype: gl.constexpr = q_source.dtype
    q_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, ROWS, 1, BUILD.BLOCK_D], q_source.layout)
    do_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, ROWS, 1, BUILD.BLOCK_DV], do_source.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [BUILD.STAGES, 1, BUILD.BLOCK_N, 1, BUILD.BLOCK_D], k_source.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [BUILD.V_STAGES, 1, BUILD.BLOCK_N, 1, BUILD.BLOCK_DV], v_source.layout)
    q_ring = open_ring(CONSUMERS, 1)
    do_ring = open_ring(CONSUMERS, 1)
    k_ring = open_ring(BUILD.STAGES, CONSUMERS)
    v_ring = open_ring(BUILD.V_STAGES, CONSUMERS)
    # None inside a tuple does not reach the warps: what is not used is some pointer instead.
    if not BUILD.PACKED:
        dq_ptr = suspect_ptr
        cu_seqlens_q = suspect_ptr
        cu_seqlens_k = suspect_ptr
    given = (q_ring, q_buffers, q_source)
    if BUILD.GIVEN != "":
        given = open_given_rows(given_source, BUILD)
    fence_async_shared()
    work = (cu_seqlens_q, cu_seqlens_k, batch, heads, tiles, members, len_q, len_k)
    row, head, b, sequence, begin_q, own_q, begin_k, own_k = locate_rows(gl.program_id(0), work, BUILD)
    last = gl.minimum(row + CONSUMERS * ROWS, own_q) - 1
    ranges = key_ranges(row, last, own_k, own_k - own_q, band, BUILD.BLOCK_N)
    start, full, full_end, end = ranges[0], ranges[1], ranges[2], ranges[3]
    early = early_tiles(start, band, BUILD.BLOCK_N)
    turns = gl.where(row < own_q, early + gl.cdiv(end - start, BUILD.BLOCK_N), 0)
    # Under a diagonal the first consumer's rows see one key tile less (or two shorter ones, of which it takes one: K comes for
    # both). It takes one in any case, since what is fetched must have arrived in the end.
    last = gl.minimum(row + ROWS, own_q) - 1
    seen = gl.maximum(gl.minimum(end_key(last, own_k - own_q, own_k, band), own_k) - start, 0)
    fewer = gl.minimum(gl.maximum(early + gl.cdiv(seen, BUILD.BLOCK_N), 1), turns)
    if BUILD.BLOCK_N < ROWS:
        fewer = gl.maximum(fewer, turns - 1)
    ranges = (turns, fewer, start, full, full_end)
    BENT: gl.constexpr = 1 if BUILD.ALIBI != "" else 2 if BUILD.CAP else 0
    notes = gl.allocate_shared_memory(gl.int32, [NOTES + BENT, 1], slot_layout())
    zero = gl.full([1], 0, gl.int32, number_layout(gl.num_warps()))
    notes.index(COL).store(zero + row)
    notes.index(HEAD).store(zero + head)
    notes.index(BATCH).store(zero + b)
    notes.index(BEGIN_K).store(zero + begin_k)
    notes.index(LEN_K).store(zero + own_k)
    notes.index(BEGIN_Q).store(zero + begin_q)
    notes.index(LEN_Q).store(zero + own_q)
    if BUILD.ALIBI != "":
        if BUILD.PER_SEQUENCE:
            slopes_ptr += (b + sequence).to(gl.int64) * heads
        notes.index(NOTES).store(zero + as_bits(gl.load(slopes_ptr + head) * 1.4426950408889634))
    if BUILD.CAP:
        notes.index(NOTES).store(zero + as_bits(cap[0]))
        notes.index(NOTES + 1).store(zero + as_bits(cap[1]))
    line = (b * heads + head).to(gl.int64) * length
    if BUILD.PACKED:
        notes.index(FLAG).store(zero + head * (len_q // ROWS + batch) + begin_q // ROWS + sequence + row // ROWS)
        line += line_begin(begin_q, sequence)
    else:
        notes.index(FLAG).store(zero + (b * heads + head) * gl.cdiv(len_q, ROWS) + row // ROWS)
    lines = (lse_ptr + line, delta_ptr + line)
    out = (dq_ptr, suspect_ptr, heads)
    sources = (q_source, do_source, k_source, v_source, dq_source)
    buffers = (q_buffers, do_buffers, k_buffers, v_buffers)
    rings = (q_ring, do_ring, k_ring, v_ring)
    # Constants stand inside the calls: a tuple in a variable would turn them into tensors.
    gl.warp_specialize([
        (_row_consumer, (ranges, notes, lines, band, scale_log2, out, given, sources, buffers, rings, 0, BUILD)),
        (_row_consumer, (ranges, notes, lines, band, scale_log2, out, given, sources, buffers, rings, 1, BUILD)),
        (_row_producer, (ranges, notes, band, given, sources, buffers, rings, BUILD)),
    ], [4, 1], [BUILD.REGISTERS, BUILD.PRODUCER_REGISTERS])  # fmt: skip
