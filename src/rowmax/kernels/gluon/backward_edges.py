"""What runs before and behind `backward.py`, in plain Triton: facts of rows and cleared sums, then dQ in its own type.

`prepare_kernel` also clears the sums of dQ and the marks, so that one launch does all that. `finish_kernel` rounds the sums and
computes once more, as the portable kernels do, rows of dQ with a NaN and the 64 keys of each mark: normally none. Where blocks
had parts of a group of query heads, it adds up their dK and dV.
"""

import triton
import triton.language as tl

from rowmax.kernels.address import find_sequence, head_base, line_begin, load_tile, locate, slopes_base, store_tile
from rowmax.kernels.tile_ops import GUARD, any_of
from rowmax.kernels.triton.backward import LOG2E, _store_guarded_dq, _walk_queries
from rowmax.kernels.triton.dropout import dropping
from rowmax.kernels.triton.given import pair_base


@triton.jit
def _place(pid, begin, cu_rows, batch, tiles, BLOCK: tl.constexpr):
    """In a line of numbers, where the sequence begins that `locate` gave this program."""
    if cu_rows is None:
        return 0
    else:
        return line_begin(begin, find_sequence(tiles - 1 - pid % tiles, cu_rows, batch, BLOCK))


@triton.jit
def prepare_kernel(
    o_ptr, do_ptr,  # [B, T, H, D] or [T, H, D]
    lse_ptr, dlse_ptr,  # fp32 [B, H, T] or [H, T], contiguous; dlse_ptr None: no gradient
    lse_log2_ptr, delta_ptr,  # results, fp32, a line of `line_length` numbers for each head; packed: see `address.line_begin`
    sum_ptr, suspect_ptr,  # to be cleared: fp32 [B, H, T, DIM] or [H, T, DIM], None: there are none; int32 [flags]
    cu_seqlens_q,  # [batch + 1]; None: dense
    o_strides, do_strides, batch, heads, tiles, len_q, line_length, flags,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    FLAGS: tl.constexpr,
):  # fmt: skip
    """As `row_kernel`. Lines are as long as TMA wants them; FLAGS: how many marks a program clears."""
    pid = tl.program_id(0)
    row, head, b, begin, own_q, _begin, _own = locate(
        pid, cu_seqlens_q, cu_seqlens_q, batch, heads, tiles, len_q, len_q, BLOCK_M
    )
    b = tl.cast(b, tl.int32)
    line = b.to(tl.int64) * heads + head
    numbers = pid * FLAGS + tl.arange(0, FLAGS)
    tl.store(suspect_ptr + numbers, 0, mask=numbers < flags)
    if sum_ptr is not None:
        sum_base = sum_ptr + (line * len_q + begin) * DIM
        store_tile(sum_base, tl.zeros([BLOCK_M, BLOCK_D], tl.float32), row, DIM, own_q, DIM, BLOCK_M, BLOCK_D)
    o = load_tile(head_base(o_ptr, o_strides, b, begin, head), row, o_strides[1], own_q, DIM_V, BLOCK_M, BLOCK_DV, True)
    do = load_tile(head_base(do_ptr, do_strides, b, begin, head), row, do_strides[1], own_q, DIM_V, BLOCK_M, BLOCK_DV, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    rows = row + tl.arange(0, BLOCK_M)
    given = line * len_q + begin + rows
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + given, mask=rows < own_q, other=0.0)
    lse_log2 = tl.load(lse_ptr + given, mask=rows < own_q, other=0.0) * LOG2E
    lse_log2 = tl.where(lse_log2 == float("-inf"), float("inf"), lse_log2)  # a row that sees nothing has no weights
    # Where a unit in the last place is 1/8 and more, rounding could lift a weight over 1, up to infinity: round up instead.
    lse_log2 = tl.where(tl.abs(lse_log2) > 1048576.0, lse_log2 + tl.abs(lse_log2) * 4.76837158203125e-07, lse_log2)
    made = line * line_length + _place(pid, begin, cu_seqlens_q, batch, tiles, BLOCK_M) + rows
    tl.store(delta_ptr + made, delta, mask=rows < own_q)
    tl.store(lse_log2_ptr + made, lse_log2, mask=rows < own_q)


@triton.jit
def finish_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, sum_ptr,  # sum: fp32 [B, H, T, DIM] or [H, T, DIM], contiguous
    dk_parts_ptr, dv_parts_ptr,  # as sum, with PARTS times the heads of K; None: dK and dV are ready
    dq_ptr, dk_ptr, dv_ptr,  # results: dq whole, the others where a mark is
    lse_ptr, delta_ptr, suspect_ptr,  # of `prepare_kernel` and `backward_kernel`
    cu_seqlens_q, cu_seqlens_k,  # [batch + 1]; None: dense
    slopes_ptr,  # fp32 [H] or [B, H]; None: no ALiBi
    bias_ptr, mask_ptr,  # [B, H, len_q, len_k]; None: none
    seed_ptr,  # int64 [1]; None: no dropout
    bias_strides, mask_strides,  # (batch, head, query, key)
    odds,  # of dropout: (p 2^15, 1 / (1 - p))
    cap,  # as `tile_ops.bend` takes it
    q_strides, k_strides, v_strides, do_strides, dq_strides, dk_strides, dv_strides,  # (batch, row, head)
    scale, band, batch, heads, tiles, key_tiles, programs, flags, len_q, len_k, line_length,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FLAGS: tl.constexpr, PARTS: tl.constexpr, PER_SEQUENCE: tl.constexpr,
):  # fmt: skip
    """The first `programs` have ROWS rows of dQ each, the others FLAGS marks of KEYS keys each; with PARTS, a key tile."""
    pid = tl.program_id(0)
    if pid < programs:
        row, head, b, begin_q, own_q, begin_k, own_k = locate(
            pid, cu_seqlens_q, cu_seqlens_k, batch, heads, tiles, len_q, len_k, ROWS
        )
        if row < own_q:
            b = tl.cast(b, tl.int32)
            line = b.to(tl.int64) * heads + head
            sums = load_tile(sum_ptr + (line * len_q + begin_q) * DIM, row, DIM, own_q, DIM, ROWS, BLOCK_D, True)
            dq_base = head_base(dq_ptr, dq_strides, b, begin_q, head)
            store_tile(dq_base, sums * scale, row, dq_strides[1], own_q, DIM, ROWS, BLOCK_D)
            if any_of(sums != sums) > 0:  # perhaps a NaN or infinity of K or V that not every row sees
                tl.debug_barrier()
                own = line * line_length + _place(pid, begin_q, cu_seqlens_q, batch, tiles, ROWS)
                if slopes_ptr is not None:
                    slopes = slopes_base(slopes_ptr, pid, cu_seqlens_q, batch, heads, tiles, heads, ROWS, PER_SEQUENCE)
                _store_guarded_dq(
                    head_base(q_ptr, q_strides, b, begin_q, head), head_base(k_ptr, k_strides, b, begin_k, head // GROUP),
                    head_base(v_ptr, v_strides, b, begin_k, head // GROUP), head_base(do_ptr, do_strides, b, begin_q, head),
                    dq_base, lse_ptr + own, delta_ptr + own, q_strides[1], k_strides[1], v_strides[1], do_strides[1],
                    dq_strides[1], row, tl.minimum(row + ROWS, own_q) - 1, own_q, own_k, own_k - own_q, band, scale,
                    cap, None if slopes_ptr is None else tl.load(slopes + head) * LOG2E,
                    None if bias_ptr is None else pair_base(bias_ptr, bias_strides, b, head), bias_strides,
                    None if mask_ptr is None else pair_base(mask_ptr, mask_strides, b, head), mask_strides,
                    None if seed_ptr is None else dropping(seed_ptr, odds, pid, cu_seqlens_q, batch, heads, tiles, ROWS),
                    head, DIM, DIM_V, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
    else:
        first = (pid - programs) * FLAGS
        numbers = first + tl.arange(0, FLAGS)
        marks = tl.load(suspect_ptr + numbers, mask=numbers < flags, other=0)
        if dk_parts_ptr is not None:
            _add_parts(
                first, dk_parts_ptr, dv_parts_ptr, dk_ptr, dv_ptr, cu_seqlens_k, dk_strides, dv_strides, batch, heads // GROUP,
                key_tiles, len_k, DIM, DIM_V, BLOCK_D, BLOCK_DV, KEYS, PARTS,
            )  # fmt: skip
            tl.debug_barrier()
        if tl.max(marks, 0) > 0:
            for number in range(first, tl.minimum(first + FLAGS, flags)):
                if tl.max(tl.where(numbers == number, marks, 0), 0) > 0:
                    _store_guarded_keys(
                        number, q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, cu_seqlens_q, cu_seqlens_k,
                        slopes_ptr, PER_SEQUENCE,
                        q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, scale, band, batch, heads,
                        key_tiles, len_q, len_k, line_length, GROUP, DIM, DIM_V, BLOCK_D, BLOCK_DV, KEYS,
                        bias_ptr, mask_ptr, bias_strides, mask_strides, cap, seed_ptr, odds,
                    )  # fmt: skip


@triton.jit
def _keys_of(number, cu_seqlens_k, cu_seqlens_q, batch, heads, key_tiles, len_k, len_q, KEYS: tl.constexpr):
    """As `locate`, of the key tile with this number: the marks are in ascending order."""
    pid = number - number % key_tiles + (key_tiles - 1 - number % key_tiles)
    return locate(pid, cu_seqlens_k, cu_seqlens_q, batch, heads, key_tiles, len_k, len_q, KEYS)


@triton.jit
def _add_parts(
    number, dk_parts_ptr, dv_parts_ptr, dk_ptr, dv_ptr, cu_seqlens_k, dk_strides, dv_strides, batch, heads, key_tiles, len_k,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, KEYS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """dK and dV of a key tile: the sum over the parts of its head's group, in order."""
    col, head, b, begin, own_k, _begin, _own = _keys_of(
        number, cu_seqlens_k, cu_seqlens_k, batch, heads, key_tiles, len_k, len_k, KEYS
    )
    if col < own_k:
        b = tl.cast(b, tl.int32)
        dk = tl.zeros([KEYS, BLOCK_D], tl.float32)
        dv = tl.zeros([KEYS, BLOCK_DV], tl.float32)
        for part in range(PARTS):
            first = ((b.to(tl.int64) * heads + head) * PARTS + part) * len_k + begin
            dk += load_tile(dk_parts_ptr + first * DIM, col, DIM, own_k, DIM, KEYS, BLOCK_D, True)
            dv += load_tile(dv_parts_ptr + first * DIM_V, col, DIM_V, own_k, DIM_V, KEYS, BLOCK_DV, True)
        store_tile(head_base(dk_ptr, dk_strides, b, begin, head), dk, col, dk_strides[1], own_k, DIM, KEYS, BLOCK_D)
        store_tile(head_base(dv_ptr, dv_strides, b, begin, head), dv, col, dv_strides[1], own_k, DIM_V, KEYS, BLOCK_DV)


@triton.jit
def _store_guarded_keys(
    number, q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, cu_seqlens_q, cu_seqlens_k,
    slopes_ptr, PER_SEQUENCE: tl.constexpr,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, scale, band, batch, heads, key_tiles, len_q, len_k,
    line_length,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    KEYS: tl.constexpr, bias_ptr=None, mask_ptr=None, bias_strides=None, mask_strides=None, cap=None, seed_ptr=None, odds=None,
):  # fmt: skip
    """dK and dV of the keys of one mark, with `guarded_dot`."""
    col, kv_head, b, begin_k, own_k, begin_q, own_q = _keys_of(
        number, cu_seqlens_k, cu_seqlens_q, batch, heads // GROUP, key_tiles, len_k, len_q, KEYS
    )
    b = tl.cast(b, tl.int32)
    first_head = kv_head * GROUP
    line = (b.to(tl.int64) * heads + first_head) * line_length
    own = line + _place(key_tiles - 1 - number % key_tiles, begin_q, cu_seqlens_k, batch, key_tiles, KEYS)
    k_base = head_base(k_ptr, k_strides, b, begin_k, kv_head)
    v_base = head_base(v_ptr, v_strides, b, begin_k, kv_head)
    q_base = head_base(q_ptr, q_strides, b, begin_q, first_head)
    do_base = head_base(do_ptr, do_strides, b, begin_q, first_head)
    pid = number - number % key_tiles + (key_tiles - 1 - number % key_tiles)
    if slopes_ptr is None:
        slopes = None
    else:
        slopes = first_head + slopes_base(
            slopes_ptr, pid, cu_seqlens_k, batch, heads // GROUP, key_tiles, heads, KEYS, PER_SEQUENCE
        )
    if seed_ptr is None:
        drop = None
    else:
        drop = dropping(seed_ptr, odds, pid, cu_seqlens_k, batch, heads // GROUP, key_tiles, KEYS)
    zero = own_q * 0
    for piece in range(col, tl.minimum(col + KEYS, own_k), GUARD):
        dk, dv, _ = _walk_queries(
            tl.zeros([GUARD, BLOCK_D], tl.float32), tl.zeros([GUARD, BLOCK_DV], tl.float32),
            load_tile(k_base, piece, k_strides[1], own_k, DIM, GUARD, BLOCK_D, True),
            load_tile(v_base, piece, v_strides[1], own_k, DIM_V, GUARD, BLOCK_DV, True),
            q_base, do_base, lse_ptr + own, delta_ptr + own, q_strides, do_strides, (zero, zero, zero, own_q), piece,
            line_length, own_q, own_k, own_k - own_q, band, scale * LOG2E,
            cap, slopes, None if bias_ptr is None else pair_base(bias_ptr, bias_strides, b, first_head), bias_strides,
            None if mask_ptr is None else pair_base(mask_ptr, mask_strides, b, first_head), mask_strides, drop, first_head,
            GROUP, DIM, DIM_V, GUARD, GUARD, BLOCK_D, BLOCK_DV,
            True, True, True, True, 1,
        )  # fmt: skip
        dk_base = head_base(dk_ptr, dk_strides, b, begin_k, kv_head)
        dv_base = head_base(dv_ptr, dv_strides, b, begin_k, kv_head)
        store_tile(dk_base, dk * scale, piece, dk_strides[1], own_k, DIM, GUARD, BLOCK_D)
        store_tile(dv_base, dv, piece, dv_strides[1], own_k, DIM_V, GUARD, BLOCK_DV)
