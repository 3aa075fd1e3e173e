"""FlashAttention-3 forward for Hopper: one producer warp fetches tiles by TMA, consumers of 64 rows multiply and exponentiate.

    m = rowmax(S),  l = rowsum(exp(S - m)),  O = exp(S - m) V / l,  LSE = m + log l

The shape and the names are those of `kernels/triton/forward.py`; what is added is who waits for whom (`ring.py`). Launched by
`kernels/launch.py`. Source: Shah et al., "FlashAttention-3" (2024), algorithm 2 with its two overlaps: the softmax of key tile
j runs while the tensor cores do P V of tile j - 1 for the same consumer, and, in turns (`PINGPONG`), products of the others.

Key tiles are walked from the last to the first. The producer tells the consumers which rows are next (`announce`): to work that
out takes a warp longer than to compute a key tile, so that it does so ahead of time, and once instead of in every consumer.

Figures below are from an H200, d128, 16k tokens: cycles that a multiprocessor takes for a 128x128 tile, of which the tensor
cores need 2048; it takes 2330 now.

* Q K^T of a tile is issued before P V of the one before: products finish in the order of their issue, and S is awaited first.
* The accumulator is scaled between the two issues. Left alone, ptxas does so after the wait for P V, where nothing else runs:
  2970 cycles instead of 2840. `LAZY` leaves most scalings out altogether: about 100 less.
* The wait for the next K tile stands between the exponentials and the wait for P V: its loop ends a basic block, and without
  it ptxas moves the wait for P V above the exponentials, so that nothing overlaps.
* `STEADY`: no maxima in the loop, and no shuffles for them (`softmax.py`): 5 to 8% less time.
* Row sums stay apart in the four threads of a row until the end: 3070 cycles before, 2970 after.
* Between two row tiles nothing stands still either (`_consumer`). Before, a row tile of 2k keys cost 6860 cycles beside its
  loop, a quarter of all; now 4200.
* No mask in the loop where the diagonal allows it (`SKIPS`). With three consumers, a branch for it makes ptxas finish one row
  before it begins the next, for want of registers: 2720 cycles a turn instead of 2330 (d64, 192x128).

NaN and infinities. 0 * NaN is NaN, so a non-finite V at a key that a row does not see, in a tile that others see, reaches the
row's accumulator; TMA cannot leave it out, and to look at every V tile would cost every call. Instead a suspect row leaves a
mark for its 64 rows, and `guard.py`, launched behind, computes these once more as the portable kernel does and wipes the mark.
It reuses that kernel's code as it is; here, the same code would take registers from the loop.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from rowmax.kernels.gluon.build import (
    BATCH,
    BEGIN_Q,
    BENT_FIELDS,
    DROP_FIELDS,
    FIELDS,
    FLAG,
    FULL,
    FULL_END,
    HEAD,
    LEN_K,
    LEN_Q,
    ROW,
    ROWS,
    SINK,
    SLOPE,
    SLOTS,
    START,
    TURNS,
)
from rowmax.kernels.gluon.dropout import dropped, dropping
from rowmax.kernels.gluon.given import LARGEST, take_given
from rowmax.kernels.gluon.index import hide
from rowmax.kernels.gluon.layouts import column_layout, out_layout, row_layout, score_layout, thread_layout, weight_layout
from rowmax.kernels.gluon.names import as_number, opaque, scale_unless_one, store_wait, tma_store
from rowmax.kernels.gluon.producer import producer
from rowmax.kernels.gluon.ring import (
    begin_turns,
    buffer_of,
    give_turn,
    open_ring,
    open_slots,
    release,
    release_told,
    take_turn,
    told,
    wait_full,
    wait_told,
)
from rowmax.kernels.gluon.scores import (
    add_slopes,
    cap_scores,
    capped,
    capped_tile,
    each,
    of_threads,
    of_tile,
    slopes_behind,
    thread_max,
    with_sink,
)
from rowmax.kernels.gluon.softmax import (
    HEADROOM,
    LOWEST,
    capped_step,
    finish,
    first_pivot,
    not_far_below,
    online_step,
    settle,
    sloped_step,
    steady_capped_step,
    steady_sloped_step,
    steady_step,
    thread_sum,
)
from rowmax.kernels.tile_ops import key_tile_start

# ---- consumers -------------------------------------------------------------------------------------------------------------


@gluon.jit
def _scores(q_buffers, q_index, buffers, turn, BUILD: gl.constexpr):
    """Q K^T of a key tile, issued but not awaited."""
    _q_buffers, k_buffers, _v_buffers, _o_buffers, q2_buffers, k2_buffers, _given_buffers = buffers
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
def _scale_rows(acc, factor):
    return acc * gl.expand_dims(gl.convert_layout(factor, row_layout(acc.type.layout)), 1)


@gluon.jit
def _place(slots, round, key_tile, work, band, CONSUMER: gl.constexpr, BUILD: gl.constexpr):
    """`(row, col, len_q, len_k)`: where a tile of scores lies in its sequence."""
    _cu_q, _cu_k, _order, _batch, _heads, _tiles, _members, len_q, len_k = work
    if BUILD.PACKED:
        len_q = told(slots, round, SLOTS, LEN_Q)
        len_k = told(slots, round, SLOTS, LEN_K)
    row = CONSUMER * ROWS + told(slots, round, SLOTS, ROW)
    return row, key_tile_start(key_tile, told(slots, round, SLOTS, START), band, BUILD.BLOCK_N), len_q, len_k


@gluon.jit
def _softmax(
    s, m, l, alpha, slots, round, key_tile, turn, full, work, band, scale_log2, cap, buffers, rings,
    FIRST: gl.constexpr, CONSUMER: gl.constexpr, BUILD: gl.constexpr,
):  # fmt: skip
    """`(p, m, l, alpha)`, p as the first factor of P V. `full`: key tiles from one to below the other need no mask."""
    _q_buffers, _k_buffers, v_buffers, _o_buffers, _q2_buffers, _k2_buffers, given_buffers = buffers
    _q_ring, _k_ring, _v_ring, given_ring = rings
    if BUILD.PRESCALE:
        s = s * scale_log2
    if BUILD.CAP:
        if BUILD.BANDED or FIRST:  # what is hidden has no say in how the cap is computed
            first, end = full
            if (key_tile >= end) | (key_tile < first):
                own_row, own_col, own_q, own_k = _place(slots, round, key_tile, work, band, CONSUMER, BUILD)
                s = hide(s, own_row, own_col, own_k, own_k - own_q, band, 0.0)
        s, factors = cap_scores(s, cap, 1.0 if BUILD.PRESCALE else scale_log2, BUILD.BLOCK_N // 2, BUILD.SHORT)
        if BUILD.GIVEN == "bias":
            s = capped_tile(s, 1.0 if BUILD.PRESCALE else scale_log2, factors, BUILD.SHORT)
    if BUILD.GIVEN != "":  # behind the last tile nobody sends any; before the band hides what a bias may hold there
        s = take_given(s, given_ring, given_buffers, turn, key_tile >= 0, CONSUMER, BUILD)
    if FIRST or BUILD.BANDED:  # a branch: two loops after one another would make LLVM unpack and pack P on every turn
        first, end = full
        if (key_tile < first) | (key_tile >= end):
            own_row, own_col, own_q, own_k = _place(slots, round, key_tile, work, band, CONSUMER, BUILD)
            s = hide(s, own_row, own_col, own_k, own_k - own_q, band, float("-inf"))
            if BUILD.STEADY and not FIRST:  # rows that have seen nothing before
                if BUILD.CAP:
                    tops = capped(thread_max(s), 1.0 if BUILD.PRESCALE else scale_log2, factors, BUILD.SHORT)
                    m = not_far_below(first_pivot(m, tops, 0))
                else:
                    m = first_pivot(m, thread_max(s) * (1.0 if BUILD.PRESCALE else scale_log2), HEADROOM)
    if BUILD.ALIBI != "":
        if BUILD.CAP and BUILD.GIVEN != "bias":
            s = capped_tile(s, 1.0 if BUILD.PRESCALE else scale_log2, factors, BUILD.SHORT)
        own_row, own_col, own_q, own_k = _place(slots, round, key_tile, work, band, CONSUMER, BUILD)
        slope = as_number(told(slots, round, SLOTS, SLOPE))
        if BUILD.ALIBI == "around":
            s = add_slopes(s, own_row, own_col, own_k - own_q, slope)
        else:
            parts, own = slopes_behind(s, own_row, own_col, own_k - own_q, slope)
    EMPTY: gl.constexpr = FIRST or BUILD.BANDED or BUILD.GIVEN != ""
    unit = 1.0 if BUILD.PRESCALE or BUILD.CAP else scale_log2
    if BUILD.CAP and BUILD.ALIBI == "" and BUILD.GIVEN != "bias":
        raw = 1.0 if BUILD.PRESCALE else scale_log2
        if BUILD.STEADY:
            p, m, l = steady_capped_step(s, m, l, raw, factors, FIRST, BUILD.SHORT)
        else:
            p, m, l, alpha = capped_step(s, m, l, raw, factors, FIRST, EMPTY, BUILD.LAZY, BUILD.SHORT)
    elif BUILD.ALIBI == "behind":
        if BUILD.STEADY:
            p, m, l = steady_sloped_step(s, parts, own, m, l, unit, FIRST)
        else:
            p, m, l, alpha = sloped_step(s, parts, own, m, l, unit, FIRST, EMPTY, BUILD.LAZY)
    elif BUILD.STEADY:
        p, m, l = steady_step(s, m, l, unit, FIRST)
    else:
        p, m, l, alpha = online_step(s, m, l, unit, FIRST, EMPTY, BUILD.LAZY)
    if BUILD.STEADY and FIRST:
        alpha = gl.full(l.shape, 1.0, gl.float32, l.type.layout)
    return gl.convert_layout(p.to(v_buffers.dtype), weight_layout(BUILD.BLOCK_DV)), m, l, alpha


@gluon.jit
def _skip(slots, round, turns, turn, work, rings, CONSUMER: gl.constexpr, BUILD: gl.constexpr):
    """How many key tiles at the begin are hidden from all rows of this consumer; they are given back unused."""
    skipped = turns * 0
    if BUILD.SKIPS:
        _q_ring, k_ring, v_ring, _given_ring = rings
        _cu_q, _cu_k, _order, _batch, _heads, _tiles, _members, len_q, len_k = work
        last = told(slots, round, SLOTS, ROW) + (CONSUMER + 1) * ROWS - 1 + len_k - len_q
        skipped = gl.maximum(turns - 1 - gl.maximum(last, 0) // BUILD.BLOCK_N, 0)
        for i in range(skipped):
            if BUILD.PINGPONG:
                take_turn(CONSUMER)
                give_turn(CONSUMER, BUILD.CONSUMERS)
            wait_full(k_ring, turn + i, BUILD.STAGES)
            release(k_ring, turn + i, BUILD.STAGES)
            wait_full(v_ring, turn + i, BUILD.STAGES)
            release(v_ring, turn + i, BUILD.STAGES)
    return skipped


@gluon.jit
def _products(
    acc, p, alpha, drop, own, round, turn, v_turn, band, buffers, rings, CONSUMER: gl.constexpr, BUILD: gl.constexpr
):  # fmt: skip
    """`(s, acc)`: Q K^T of the key tile of `turn`, then P V of that of `v_turn`, both issued and not awaited.

    own: what `dropped` takes of the second. Its draws are made while the first one is computed; with 128 dimensions before
    both. Times over a call without dropout (H200): d128 causal 1.537 so, 1.570 between, without a mask 1.548 and 1.550; d64
    causal 1.890 and 1.730. Others were measured between them only.
    """
    q_buffers, _k_buffers, v_buffers, _o_buffers, _q2_buffers, _k2_buffers, _given_buffers = buffers
    _q_ring, _k_ring, v_ring, _given_ring = rings
    DRAWS_FIRST: gl.constexpr = BUILD.BLOCK_D + BUILD.BLOCK_D2 == 128
    if DRAWS_FIRST:
        p = dropped(p, drop, own, band, CONSUMER, BUILD)
    if BUILD.PINGPONG:
        take_turn(CONSUMER)
    s = _scores(q_buffers, buffer_of(round, BUILD.Q_STAGES, CONSUMER, BUILD.CONSUMERS), buffers, turn, BUILD)
    if not DRAWS_FIRST:
        p = dropped(p, drop, own, band, CONSUMER, BUILD)
    wait_full(v_ring, v_turn, BUILD.STAGES)
    if BUILD.STEADY and BUILD.CAP and BUILD.ALIBI == "":
        acc = acc
    elif BUILD.STEADY:
        parts = of_threads(acc)
        parts, factor = gl.broadcast(parts, each(gl.convert_layout(alpha, thread_layout(parts.type.layout))))
        acc = of_tile(scale_unless_one(parts, factor, BUILD.BLOCK_DV // 2), acc)
    elif BUILD.LAZY:
        factor = gl.expand_dims(gl.convert_layout(alpha, row_layout(acc.type.layout)), 1)
        acc, factor = gl.broadcast(acc, factor)
        acc = scale_unless_one(acc, factor, BUILD.BLOCK_DV // 2)
    else:
        acc = _scale_rows(acc, opaque(alpha))
    v = v_buffers.index(buffer_of(v_turn, BUILD.STAGES)).reshape([BUILD.BLOCK_N, BUILD.BLOCK_DV])
    acc = warpgroup_mma(p, v, acc, is_async=True)
    if BUILD.PINGPONG:
        give_turn(CONSUMER, BUILD.CONSUMERS)
    return s, acc


@gluon.jit
def _close(m, l, drop, slots, round, scale_log2, work, out, CONSUMER: gl.constexpr, BUILD: gl.constexpr):
    """`(1 / l, far)`, and the LSE stored: all that is left of a tile's rows but O. `far`: rows whose result is suspect."""
    _cu_q, _cu_k, _order, _batch, heads, _tiles, _members, total_q, _total_k = work
    _o_ptr, lse_ptr, _suspect_ptr = out
    if BUILD.STEADY:
        m = gl.max(m, 1)
    m = gl.convert_layout(m, row_layout(out_layout(BUILD.BLOCK_DV)))
    l = gl.convert_layout(gl.sum(l, 1), row_layout(out_layout(BUILD.BLOCK_DV)))
    top = m
    total = l
    if BUILD.GIVEN == "bias":  # as far as `triton/given.py` lets one go
        m = gl.maximum(gl.minimum(m, LARGEST), -LARGEST)
    if BUILD.ALIBI == "behind" or BUILD.SINK:
        if not (BUILD.PRESCALE or BUILD.CAP or BUILD.STEADY):
            m = m * scale_log2
        if BUILD.ALIBI == "behind":  # what `slopes_behind` left out
            slope = as_number(told(slots, round, SLOTS, SLOPE)) * (1.0 if BUILD.PRESCALE or BUILD.CAP else scale_log2)
            m = m - slope * gl.arange(0, ROWS, layout=row_layout(out_layout(BUILD.BLOCK_DV))).to(gl.float32)
        alpha = 1.0
        if BUILD.SINK:
            m, l, alpha = with_sink(m, l, as_number(told(slots, round, SLOTS, SINK)))
        inverse, lse = finish(m, l, 1.0)
        inverse = inverse * alpha
    else:
        inverse, lse = finish(m, l, 1.0 if BUILD.PRESCALE or BUILD.CAP or BUILD.STEADY else scale_log2)
    if BUILD.DROPS:
        inverse = inverse * drop[3]
    if BUILD.NEED_LSE:
        row = told(slots, round, SLOTS, ROW) + CONSUMER * ROWS
        line = (told(slots, round, SLOTS, BATCH).to(gl.int64) * heads + told(slots, round, SLOTS, HEAD)) * total_q
        len_q = total_q
        if BUILD.PACKED:
            line += told(slots, round, SLOTS, BEGIN_Q)
            len_q = told(slots, round, SLOTS, LEN_Q)
        rows = row + gl.arange(0, ROWS, layout=row_layout(out_layout(BUILD.BLOCK_DV)))
        gl.store(lse_ptr + line + rows, lse, mask=rows < len_q)
    # Beyond 2^24 a maximum differs from its own rounded product with the scale by more than 1.
    if BUILD.STEADY:  # sums that exceeded fp32, too
        far = ((gl.abs(top) > 16777216.0) & (top != LOWEST)) | (total == float("inf"))
    else:
        far = (gl.abs(top * scale_log2) > 16777216.0) & (top > float("-inf"))
    return inverse, far


@gluon.jit
def _store(
    acc, inverse, far, slots, round, o_buffer, work, out, o_source, CONSUMER: gl.constexpr, BUILD: gl.constexpr
):  # fmt: skip
    """O by TMA, which clips at the end of a dense tensor; at the end of a packed sequence by pointers."""
    _cu_q, _cu_k, _order, _batch, heads, _tiles, _members, total_q, _total_k = work
    o_ptr, _lse_ptr, suspect_ptr = out
    row = told(slots, round, SLOTS, ROW) + CONSUMER * ROWS
    head = told(slots, round, SLOTS, HEAD)
    b = told(slots, round, SLOTS, BATCH)
    flag = told(slots, round, SLOTS, FLAG) + CONSUMER
    begin_q = 0
    len_q = total_q
    if BUILD.PACKED:
        begin_q = told(slots, round, SLOTS, BEGIN_Q)
        len_q = told(slots, round, SLOTS, LEN_Q)
    total = thread_sum(acc)
    bad = total != total
    if BUILD.STEADY:
        bad = total - total != 0.0  # infinite, too
    if BUILD.STEADY or not (BUILD.PRESCALE or BUILD.CAP):
        bad = bad | gl.expand_dims(gl.convert_layout(far, row_layout(bad.type.layout)), 1)
    own = row + gl.arange(0, ROWS, layout=row_layout(bad.type.layout))
    gl.store(suspect_ptr + flag + gl.where(bad, 0, 0), 1, mask=bad & gl.expand_dims(own < len_q, 1))
    if BUILD.PACKED and row + ROWS > len_q:
        rows = row + gl.arange(0, ROWS, layout=row_layout(acc.type.layout))
        dims = gl.arange(0, BUILD.BLOCK_DV, layout=column_layout(acc.type.layout))
        starts = ((begin_q + rows).to(gl.int64) * heads + head) * BUILD.DIM_V
        keep = gl.expand_dims(rows < len_q, 1) & (gl.expand_dims(dims, 0) < BUILD.DIM_V)
        o = _scale_rows(acc, inverse).to(o_source.dtype)
        gl.store(o_ptr + gl.expand_dims(starts, 1) + gl.expand_dims(dims, 0), o, mask=keep)
    else:
        if BUILD.BLOCK_DV == BUILD.BLOCK_O:
            _store_by_tma(acc, inverse, o_buffer, b, begin_q + row, head, 0, o_source, BUILD)
        else:  # the second half is scaled while the first one leaves
            left, right = gl.split(acc.reshape([ROWS, 2, BUILD.BLOCK_O]).permute(0, 2, 1))
            left = gl.convert_layout(left, out_layout(BUILD.BLOCK_O))
            right = gl.convert_layout(right, out_layout(BUILD.BLOCK_O))
            _store_by_tma(left, inverse, o_buffer, b, begin_q + row, head, 0, o_source, BUILD)
            _store_by_tma(right, inverse, o_buffer, b, begin_q + row, head, BUILD.BLOCK_O, o_source, BUILD)


@gluon.jit
def _store_by_tma(acc, inverse, o_buffer, b, row, head, column, o_source, BUILD: gl.constexpr):
    o = _scale_rows(acc, inverse).to(o_source.dtype)
    store_wait(0)  # the one before has read the buffer
    o_buffer.reshape([ROWS, BUILD.BLOCK_O]).store(o)
    fence_async_shared()
    tma_store(o_source, [b, row, head, column], o_buffer)


@gluon.jit
def _consumer(
    work, drop, band, out, scale_log2, cap, sources, buffers, rings, slots, CONSUMER: gl.constexpr, BUILD: gl.constexpr
):  # fmt: skip
    """The rows of one consumer, tile after tile.

    The last product of one tile is issued together with the first of the next, whose softmax runs meanwhile. Behind the last
    tile, that next one is made of what lies in the buffers, and nobody looks at it: a branch would cost more.
    """
    q_buffers, _k_buffers, _v_buffers, o_buffers, _q2_buffers, _k2_buffers, _given_buffers = buffers
    _q_source, _k_source, _v_source, o_source, _q2_source, _k2_source, _given_source = sources
    q_ring, k_ring, v_ring, _given_ring = rings
    if BUILD.PINGPONG:
        begin_turns(CONSUMER, BUILD.CONSUMERS)
    round = gl.program_id(0) * 0
    turn = round * 0
    drop = dropping(drop, BUILD)
    wait_told(slots, round, SLOTS)
    turns = told(slots, round, SLOTS, TURNS)
    if turns > 0:
        wait_full(q_ring, round, BUILD.Q_STAGES, True, CONSUMER, BUILD.CONSUMERS)
        done = _skip(slots, round, turns, turn, work, rings, CONSUMER, BUILD)
        turn += done
        wait_full(k_ring, turn, BUILD.STAGES)
        if BUILD.PINGPONG:
            take_turn(CONSUMER)
        s = _scores(q_buffers, buffer_of(round, BUILD.Q_STAGES, CONSUMER, BUILD.CONSUMERS), buffers, turn, BUILD)
        if BUILD.PINGPONG:
            give_turn(CONSUMER, BUILD.CONSUMERS)
        s = warpgroup_mma_wait(0, deps=[s])
        release(k_ring, turn, BUILD.STAGES)
        m = gl.full([ROWS], float("-inf"), gl.float32, row_layout(score_layout(BUILD.BLOCK_N)))
        full = (told(slots, round, SLOTS, FULL), told(slots, round, SLOTS, FULL_END))
        left = turns - 1 - done
        p, m, l, alpha = _softmax(
            s, m, m, m, slots, round, left, turn, full, work, band, scale_log2, cap, buffers, rings, True, CONSUMER, BUILD
        )
        turn += 1
        wait_full(k_ring, turn, BUILD.STAGES, left > 0)
        while turns > 0:
            acc = gl.zeros([ROWS, BUILD.BLOCK_DV], gl.float32, out_layout(BUILD.BLOCK_DV))
            full = (told(slots, round, SLOTS, FULL), told(slots, round, SLOTS, FULL_END))
            for j in range(1 + done, turns):
                s, acc = _products(
                    acc, p, alpha, drop, (slots, round, turns - j), round, turn, turn - 1, band, buffers, rings, CONSUMER, BUILD
                )
                if BUILD.STEADY and (not BUILD.CAP or BUILD.ALIBI != ""):  # capped scores are bounded
                    m, l, alpha = settle(m, l)
                s = warpgroup_mma_wait(1, deps=[s])
                release(k_ring, turn, BUILD.STAGES)
                if BUILD.Q_STAGES == 1:  # the next Q has no other place: make room as soon as this one was used
                    if j + 1 == turns:
                        release(q_ring, round, BUILD.Q_STAGES, CONSUMER, BUILD.CONSUMERS)
                p, m, l, alpha = _softmax(
                    s, m, l, alpha, slots, round, turns - 1 - j, turn, full, work, band, scale_log2, cap, buffers, rings,
                    False, CONSUMER, BUILD,
                )  # fmt: skip
                wait_full(k_ring, turn + 1, BUILD.STAGES, j + 1 < turns)
                acc = warpgroup_mma_wait(0, deps=[acc])
                release(v_ring, turn - 1, BUILD.STAGES)
                turn += 1
            if BUILD.Q_STAGES == 1:
                if turns - done == 1:
                    release(q_ring, round, BUILD.Q_STAGES, CONSUMER, BUILD.CONSUMERS)

            v_turn = turn - 1
            wait_told(slots, round + 1, SLOTS)
            turns = told(slots, round + 1, SLOTS, TURNS)
            wait_full(q_ring, round + 1, BUILD.Q_STAGES, turns > 0, CONSUMER, BUILD.CONSUMERS)
            done = _skip(slots, round + 1, turns, turn, work, rings, CONSUMER, BUILD)
            turn += done
            wait_full(k_ring, turn, BUILD.STAGES, turns > 0)
            s, acc = _products(
                acc, p, alpha, drop, (slots, round, 0), round + 1, turn, v_turn, band, buffers, rings, CONSUMER, BUILD
            )
            if BUILD.Q_STAGES > 1:
                release(q_ring, round, BUILD.Q_STAGES, CONSUMER, BUILD.CONSUMERS)
            o_buffer = o_buffers.index(CONSUMER)
            full = (told(slots, round + 1, SLOTS, FULL), told(slots, round + 1, SLOTS, FULL_END))
            left = turns - 1 - done
            if BUILD.CONSUMERS == 3:  # the softmax afterwards: both at once would take too many registers
                inverse, far = _close(m, l, drop, slots, round, scale_log2, work, out, CONSUMER, BUILD)
                s, acc = warpgroup_mma_wait(0, deps=[s, acc])
                release(k_ring, turn, BUILD.STAGES)
                release(v_ring, v_turn, BUILD.STAGES)
                _store(acc, inverse, far, slots, round, o_buffer, work, out, o_source, CONSUMER, BUILD)
                p, m, l, alpha = _softmax(
                    s, m, l, alpha, slots, round + 1, left, turn, full, work, band, scale_log2, cap, buffers, rings,
                    True, CONSUMER, BUILD,
                )  # fmt: skip
                wait_full(k_ring, turn + 1, BUILD.STAGES, left > 0)
            else:
                s = warpgroup_mma_wait(1, deps=[s])
                release(k_ring, turn, BUILD.STAGES)
                old_m = m
                old_l = l
                p, m, l, alpha = _softmax(
                    s, m, l, alpha, slots, round + 1, left, turn, full, work, band, scale_log2, cap, buffers, rings,
                    True, CONSUMER, BUILD,
                )  # fmt: skip
                inverse, far = _close(old_m, old_l, drop, slots, round, scale_log2, work, out, CONSUMER, BUILD)
                wait_full(k_ring, turn + 1, BUILD.STAGES, (left > 0) & (done == 0))
                acc = warpgroup_mma_wait(0, deps=[acc])
                release(v_ring, v_turn, BUILD.STAGES)
                if BUILD.SKIPS:  # with a key tile skipped, the next K may stand behind the V that takes the place of this one
                    wait_full(k_ring, turn + 1, BUILD.STAGES, left > 0)
                _store(acc, inverse, far, slots, round, o_buffer, work, out, o_source, CONSUMER, BUILD)
            release_told(slots, round, SLOTS)
            round += 1
            turn += 1
        store_wait(0)


@gluon.jit
def forward_kernel(
    q_source, k_source, v_source, o_source,  # descriptors of [B, T, H, D], a packed tensor with B = 1
    q2_source, k2_source,  # for dimensions from BLOCK_D on; None: there are none
    o_ptr,  # packed: [T, H, DIM_V]; None: dense
    lse_ptr,  # fp32 [B, H, len_q] or [H, len_q]; None: not wanted
    suspect_ptr,  # int32, one for every 64 rows, numbered as by `address.locate`, all 0: becomes 1 where a row is suspect
    counter,  # int32 [1], 0 before and after; None: the schedule is not "dynamic"
    cu_seqlens_q, cu_seqlens_k,  # [batch + 1]; None: dense
    order_ptr,  # int32 [2 batch + 1] from `order.py`; None: dense
    slopes_ptr, sink_ptr,  # fp32 [H] or [B, H]; [H]; None: no ALiBi, no sink
    given_source,  # descriptor of a bias or of a mask in bytes, [B|1, H|1, Q|1, K]; None: there is neither
    seed_ptr,  # int64 [1]; None: no dropout
    scale_log2, cap, odds, band, batch, heads, tiles, members, total, len_q, len_k,
    BUILD: gl.constexpr,
):  # fmt: skip
    """`cap`: as `scores.cap_scores` takes it; None: there is none. `odds`: of dropout, as for the portable kernel, or None.

    `tiles`: of a head, and `total`, of all heads; packed: at most. `members`: heads of a group (`locate`).
    """
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
    o_buffers = gl.allocate_shared_memory(dtype, [BUILD.CONSUMERS, 1, ROWS, 1, BUILD.BLOCK_O], o_source.layout)
    q_ring = open_ring(BUILD.Q_STAGES * BUILD.CONSUMERS, 1)
    k_ring = open_ring(BUILD.STAGES, BUILD.CONSUMERS)
    v_ring = open_ring(BUILD.STAGES, BUILD.CONSUMERS)
    given_buffers = q_buffers
    given_ring = q_ring
    if BUILD.GIVEN != "":
        given_tiles: gl.constexpr = BUILD.GIVEN_STAGES * BUILD.CONSUMERS * BUILD.GIVEN_APART
        given_shape: gl.constexpr = [given_tiles, 1, 1, BUILD.GIVEN_ROWS, BUILD.BLOCK_N]
        given_buffers = gl.allocate_shared_memory(given_source.dtype, given_shape, given_source.layout)
        given_ring = open_ring(BUILD.GIVEN_STAGES * BUILD.CONSUMERS, 1)
    else:
        given_source = q_source
    # None inside a tuple does not reach the warps: what is not used is some pointer instead.
    if not BUILD.PACKED:
        o_ptr = suspect_ptr
        cu_seqlens_q = suspect_ptr
        cu_seqlens_k = suspect_ptr
        order_ptr = suspect_ptr
    if not BUILD.NEED_LSE:
        lse_ptr = suspect_ptr
    if BUILD.SCHEDULE == "static":
        counter = suspect_ptr
    if BUILD.ALIBI == "":
        slopes_ptr = suspect_ptr
    if not BUILD.SINK:
        sink_ptr = suspect_ptr
    if not BUILD.DROPS:
        seed_ptr = suspect_ptr
        odds = (len_q, scale_log2)
    if not BUILD.CAP:
        cap = scale_log2
    bent_fields: gl.constexpr = BENT_FIELDS if BUILD.ALIBI != "" or BUILD.SINK else FIELDS
    slots = open_slots(SLOTS, DROP_FIELDS if BUILD.DROPS else bent_fields, BUILD.CONSUMERS)
    bent = (slopes_ptr, sink_ptr, 1.0 if BUILD.PRESCALE or BUILD.CAP else scale_log2)
    fence_async_shared()
    work = (cu_seqlens_q, cu_seqlens_k, order_ptr, batch, heads, tiles, members, len_q, len_k)
    out = (o_ptr, lse_ptr, suspect_ptr)
    sources = (q_source, k_source, v_source, o_source, q2_source, k2_source, given_source)
    buffers = (q_buffers, k_buffers, v_buffers, o_buffers, q2_buffers, k2_buffers, given_buffers)
    rings = (q_ring, k_ring, v_ring, given_ring)
    # Constants stand inside the calls: a tuple in a variable would turn them into tensors.
    if BUILD.CONSUMERS == 1:
        gl.warp_specialize([
            (_consumer, (work, (seed_ptr, odds), band, out, scale_log2, cap, sources, buffers, rings, slots, 0, BUILD)),
            (producer, (work, bent, band, total, counter, sources, buffers, rings, slots, BUILD)),
        ], [1], [BUILD.PRODUCER_REGISTERS])  # fmt: skip
    elif BUILD.CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (work, (seed_ptr, odds), band, out, scale_log2, cap, sources, buffers, rings, slots, 0, BUILD)),
            (_consumer, (work, (seed_ptr, odds), band, out, scale_log2, cap, sources, buffers, rings, slots, 1, BUILD)),
            (producer, (work, bent, band, total, counter, sources, buffers, rings, slots, BUILD)),
        ], [4, 1], [BUILD.REGISTERS, BUILD.PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (work, (seed_ptr, odds), band, out, scale_log2, cap, sources, buffers, rings, slots, 0, BUILD)),
            (_consumer, (work, (seed_ptr, odds), band, out, scale_log2, cap, sources, buffers, rings, slots, 1, BUILD)),
            (_consumer, (work, (seed_ptr, odds), band, out, scale_log2, cap, sources, buffers, rings, slots, 2, BUILD)),
            (producer, (work, bent, band, total, counter, sources, buffers, rings, slots, BUILD)),
        ], [4, 4, 1], [BUILD.REGISTERS, BUILD.REGISTERS, BUILD.PRODUCER_REGISTERS])  # fmt: skip
