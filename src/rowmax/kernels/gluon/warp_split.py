"""One forward whose warps share a tile of scores by rows or by columns: split-Q against split-K/V. For Ampere and later.

A tile of scores is `[GROUPS, BLOCK_M, BLOCK_N / GROUPS]`, its columns in groups. Where they lie is one argument:

    rows     GROUPS = 1: the warps of a block share the rows. A warp needs Q of its own rows, all of K and V, and no results of
             another.
    columns  GROUPS = warps: each warp has all rows and its own columns. It needs all of Q, and K and V of its own columns; but
             the maximum of a row, and O = sum over groups of P V, are then spread over warps, and are put together through
             shared memory, behind barriers, in every turn, as in FlashAttention-1.
    late     as columns, but O stays apart, a copy for each warp, until the end: nothing but maxima is exchanged in a turn, for
             GROUPS times the registers of O.

Otherwise it is `triton/forward.py`: Q tile outside, K/V tiles inside, fetched ahead by cp.async; products are mma.sync. A row
tile whose result came out NaN leaves a mark and is computed once more (`guard.py`). Launched by `kernels/generations.py`.
Source: Dao, "FlashAttention-2" (2023), section 3.3.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from rowmax.kernels.address import head_base, locate
from rowmax.kernels.tile_ops import any_of, key_ranges, visible


@gluon.constexpr_function
def score_layout(groups, warps):
    """S, P and the partial O of groups, `[groups, rows, columns]`, as the tensor cores leave them: warps side by side along the
    groups where there are any, otherwise along the rows."""
    shape = [groups, warps // groups, 1]
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=shape, instr_shape=[1, 16, 8])


@gluon.constexpr_function
def sum_layout(columns, warps):
    """O `[groups, rows, columns]` with all groups of an element in one thread, which adds them up."""
    across = min(columns // 4, 32)
    return gl.BlockedLayout([1, 1, 4], [1, 32 // across, across], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def fetch_layout(columns, warps):
    """Rows of K and V on their way: 16 bytes of a row in each thread."""
    across = min(columns // 8, 32)
    return gl.BlockedLayout([1, 1, 8], [1, 32 // across, across], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def shared_layout(columns):
    """Tiles of 16-bit numbers in shared memory: 16 bytes of a row together, those of eight rows in different banks."""
    per_phase = max(64 // columns, 1)
    return gl.SwizzledSharedLayout(8, per_phase, max(min(8 // per_phase, columns // 8), 1), [2, 1, 0])


@gluon.constexpr_function
def plain_layout():
    """fp32 partial O in shared memory."""
    return gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])


@gluon.constexpr_function
def factor_layout(operand, layout):
    """A factor of a product whose sum has `layout`."""
    return gl.DotOperandLayout(operand_index=operand, parent=layout, k_width=2)


@gluon.constexpr_function
def row_layout(layout):
    """A number for each row of `[groups, rows, columns]`, the same for all groups."""
    return gl.SliceLayout(0, gl.SliceLayout(2, layout))


@gluon.constexpr_function
def group_layout(layout):
    """A number for each group and row."""
    return gl.SliceLayout(2, layout)


@gluon.constexpr_function
def column_layout(layout):
    return gl.SliceLayout(0, gl.SliceLayout(1, layout))


@gluon.constexpr_function
def member_layout(layout):
    return gl.SliceLayout(1, gl.SliceLayout(2, layout))


@gluon.jit
def _rows(x):
    """`[rows]` beside `[groups, rows, columns]`."""
    return gl.expand_dims(gl.expand_dims(x, 0), 2)


@gluon.jit
def _columns(start, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Numbers of keys, `[groups, 1, columns of a group]`."""
    group = gl.arange(0, GROUPS, layout=member_layout(LAYOUT))
    cols = gl.arange(0, BLOCK_N // GROUPS, layout=column_layout(LAYOUT))
    starts = gl.expand_dims(gl.expand_dims(start + group * (BLOCK_N // GROUPS), 1), 2)
    return starts + gl.expand_dims(gl.expand_dims(cols, 0), 1)


@gluon.jit
def _fetch(
    base, row_stride, start, length, buffer, DIM: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr
):
    """Rows `[start, start + ROWS)` into shared memory `[GROUPS, ROWS / GROUPS, COLS]`, 0 past `length` and `DIM`."""
    layout: gl.constexpr = fetch_layout(COLS, gl.num_warps())
    group = gl.arange(0, GROUPS, layout=member_layout(layout))
    row = gl.arange(0, ROWS // GROUPS, layout=row_layout(layout))
    dims = gl.expand_dims(gl.expand_dims(gl.arange(0, COLS, layout=column_layout(layout)), 0), 1)
    rows = gl.expand_dims(gl.expand_dims(start + group * (ROWS // GROUPS), 1), 2) + _rows(row)
    pointers = base + rows.to(gl.int64) * row_stride + dims
    async_copy.async_copy_global_to_shared(buffer, pointers, mask=(rows < length) & (dims < DIM))


@gluon.jit
def _added_up(parts, exchange, LAYOUT: gl.constexpr):
    """`[1, rows, columns]` of `[groups, rows, columns]` whose groups lie in different warps: through shared memory."""
    exchange.store(parts)
    return gl.expand_dims(gl.sum(exchange.load(LAYOUT), 0), 0)


@gluon.jit
def warp_split_kernel(
    q_ptr, k_ptr, v_ptr,  # [B, T, H, D] or [T, H, D], rows at multiples of 16 bytes
    o_ptr,  # as q, with DIM_V
    lse_ptr,  # fp32 [B, H, len_q] or [H, len_q]; None: not wanted
    suspect_ptr,  # int32, one for each program, numbered by `address.locate`, all 0: becomes 1 where a result is NaN
    cu_seqlens_q, cu_seqlens_k,  # [batch + 1]; None: dense
    q_eighths, k_eighths, v_eighths, o_eighths,  # strides (batch, row, head) in units of 8 numbers
    scale_log2, band, batch, heads, tiles, len_q, len_k,
    GROUP: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, GROUPS: gl.constexpr, LATE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = score_layout(GROUPS, warps)
    EXCHANGE: gl.constexpr = GROUPS > 1 and not LATE  # O is added up in every turn
    o_layout: gl.constexpr = sum_layout(BLOCK_DV, warps) if EXCHANGE else layout
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q_strides = (q_eighths[0] * 8, q_eighths[1] * 8, q_eighths[2] * 8)
    k_strides = (k_eighths[0] * 8, k_eighths[1] * 8, k_eighths[2] * 8)
    v_strides = (v_eighths[0] * 8, v_eighths[1] * 8, v_eighths[2] * 8)
    o_strides = (o_eighths[0] * 8, o_eighths[1] * 8, o_eighths[2] * 8)
    total_q = len_q
    pid = gl.program_id(0)
    row, head, b, begin_q, len_q, begin_k, len_k = locate(
        pid, cu_seqlens_q, cu_seqlens_k, batch, heads, tiles, len_q, len_k, BLOCK_M
    )
    if row >= len_q:
        return
    shift = len_k - len_q
    b = gl.to_tensor(b)
    head_k = head // GROUP
    q_base = head_base(q_ptr, q_strides, b, begin_q, head)
    k_base = head_base(k_ptr, k_strides, b, begin_k, head_k)
    v_base = head_base(v_ptr, v_strides, b, begin_k, head_k)
    o_base = head_base(o_ptr, o_strides, b, begin_q, head)

    q_smem = gl.allocate_shared_memory(dtype, [1, BLOCK_M, BLOCK_D], shared_layout(BLOCK_D))
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, GROUPS, BLOCK_N // GROUPS, BLOCK_D], shared_layout(BLOCK_D))
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, GROUPS, BLOCK_N // GROUPS, BLOCK_DV], shared_layout(BLOCK_DV))
    if GROUPS > 1:
        exchange = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_M, BLOCK_DV], plain_layout())

    last = gl.minimum(row + BLOCK_M, len_q) - 1
    start, full_start, full_end, end = key_ranges(row, last, len_k, shift, band, BLOCK_N)
    turns = gl.cdiv(end - start, BLOCK_N)
    _fetch(q_base, q_strides[1], row, len_q, q_smem, DIM, 1, BLOCK_M, BLOCK_D)
    for stage in gl.static_range(STAGES - 1):
        col = start + stage * BLOCK_N
        _fetch(k_base, k_strides[1], col, gl.minimum(len_k, end), k_smem.index(stage), DIM, GROUPS, BLOCK_N, BLOCK_D)
        _fetch(v_base, v_strides[1], col, gl.minimum(len_k, end), v_smem.index(stage), DIM_V, GROUPS, BLOCK_N, BLOCK_DV)
        async_copy.commit_group()

    rows = row + gl.arange(0, BLOCK_M, layout=row_layout(layout))
    m = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=row_layout(layout))
    l = gl.zeros([GROUPS, BLOCK_M], gl.float32, layout=group_layout(layout))  # of each group, added up at the end
    acc = gl.zeros([1 if EXCHANGE else GROUPS, BLOCK_M, BLOCK_DV], gl.float32, layout=o_layout)
    for turn in range(turns):
        col = start + turn * BLOCK_N
        ahead = turn + STAGES - 1
        if STAGES > 1:
            async_copy.wait_group(STAGES - 2)
        place = ahead % STAGES
        next_col = start + ahead * BLOCK_N
        _fetch(k_base, k_strides[1], next_col, gl.minimum(len_k, end), k_smem.index(place), DIM, GROUPS, BLOCK_N, BLOCK_D)
        _fetch(v_base, v_strides[1], next_col, gl.minimum(len_k, end), v_smem.index(place), DIM_V, GROUPS, BLOCK_N, BLOCK_DV)
        async_copy.commit_group()

        here = turn % STAGES
        q = q_smem.load(factor_layout(0, layout))
        q, _ = gl.broadcast(q, gl.zeros([GROUPS, BLOCK_M, BLOCK_D], dtype, layout=factor_layout(0, layout)))
        k = k_smem.index(here).permute((0, 2, 1)).load(factor_layout(1, layout))
        s = mma_v2(q, k, gl.zeros([GROUPS, BLOCK_M, BLOCK_N // GROUPS], gl.float32, layout=layout)) * scale_log2
        if (col < full_start) | (col + BLOCK_N > full_end):
            s = gl.where(visible(_rows(rows), _columns(col, GROUPS, BLOCK_N, layout), len_k, shift, band), s, float("-inf"))
        m_new = gl.maximum(m, gl.max(gl.max(s, 2), 0))
        pivot = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(s - _rows(pivot))
        alpha = gl.exp2(m - pivot)
        m = m_new
        l = l * gl.expand_dims(alpha, 0) + gl.sum(p, 2)
        v = v_smem.index(here).load(factor_layout(1, layout))
        p = gl.convert_layout(p.to(dtype), factor_layout(0, layout))
        if EXCHANGE:
            part = mma_v2(p, v, gl.zeros([GROUPS, BLOCK_M, BLOCK_DV], gl.float32, layout=layout))
            acc = acc * _rows(gl.convert_layout(alpha, row_layout(o_layout))) + _added_up(part, exchange, o_layout)
        else:
            acc = mma_v2(p, v, acc * _rows(alpha))
    async_copy.wait_group(0)

    l = gl.sum(l, 0)
    if GROUPS > 1 and LATE:
        acc = _added_up(acc, exchange, sum_layout(BLOCK_DV, warps))
    end_layout: gl.constexpr = acc.type.layout
    empty = l == 0.0
    l_safe = gl.where(empty, 1.0, l)
    if lse_ptr is not None:
        lse = gl.where(empty, float("-inf"), (m + gl.log2(l_safe)) * 0.6931471805599453)
        line = (b.to(gl.int64) * heads + head) * total_q + begin_q
        gl.store(lse_ptr + line + rows, lse, mask=rows < len_q)
    acc = acc * _rows(gl.convert_layout(1.0 / l_safe, row_layout(end_layout)))
    gl.store(suspect_ptr + (pid + tiles - 1 - 2 * (pid % tiles)), any_of(acc != acc))
    rows = row + gl.arange(0, BLOCK_M, layout=row_layout(end_layout))
    dims = gl.expand_dims(gl.expand_dims(gl.arange(0, BLOCK_DV, layout=column_layout(end_layout)), 0), 1)
    places = o_base + _rows(rows).to(gl.int64) * o_strides[1] + dims
    gl.store(places, acc.to(dtype), mask=(_rows(rows) < len_q) & (dims < DIM_V))
