"""Every layout of the Hopper kernels, by what it holds. A consumer is one warpgroup of 4 warps with 64 rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def score_layout(BLOCK_N):
    """S and P in fp32, as QK^T leaves them: a row lies in the four threads of a quad, two neighbours of every eight in each."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])


@gluon.constexpr_function
def out_layout(BLOCK_DV):
    """The accumulator. Rows lie in the same threads as those of S: converting a column vector moves nothing."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_DV, 16])


@gluon.constexpr_function
def weight_layout(BLOCK_DV):
    """P in 16 bits as the first factor of PV, from registers: the conversion from `score_layout` moves nothing."""
    return gl.DotOperandLayout(operand_index=0, parent=out_layout(BLOCK_DV), k_width=2)


@gluon.constexpr_function
def row_layout(layout):
    return gl.SliceLayout(1, layout)


@gluon.constexpr_function
def column_layout(layout):
    return gl.SliceLayout(0, layout)


@gluon.constexpr_function
def axis_layout(layout, axis):
    """A vector along one axis of a tile with four."""
    for other in (3, 2, 1, 0):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.constexpr_function
def number_layout(warps):
    """One number, in every thread."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.constexpr_function
def slot_layout():
    """A ring of single numbers in shared memory."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.constexpr_function
def tile_layout(rows, columns, dtype):
    """`[1, rows, 1, columns]` of a tensor `[B, T, H, D]` in shared memory, as TMA writes it and the tensor cores read it."""
    return gl.NVMMASharedLayout.get_default_for([1, rows, 1, columns], dtype)


@gluon.constexpr_function
def given_layout(rows, columns, dtype, turned=False):
    """`[1, 1, rows, columns]` of what is given for pairs in shared memory: too little to be swizzled where queries share it.

    A thread takes two neighbours of a row, or `turned` of a column. Of 32 bits, neighbours of a row lie in 32 bytes with those
    that the threads beside it take: swizzled by more, such pieces of two rows would share their banks.
    """
    if rows == 1:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=dtype.primitive_bitwidth, rank=4)
    if dtype.primitive_bitwidth == 32 and not turned:
        return gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=32, rank=4)
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], dtype)


@gluon.constexpr_function
def pair_layout(layout):
    """A number for every two neighbours of a row, of a tile `[rows, columns / 2, 2]`."""
    return gl.SliceLayout(2, layout)


@gluon.constexpr_function
def last_layout(layout):
    """Those neighbours: 0 and 1."""
    return gl.SliceLayout(0, gl.SliceLayout(1, layout))


@gluon.constexpr_function
def thread_layout(layout):
    """`[M, 4]`, of a tile `[M, 2, N / 16, 4, 2]`: converting between those of S and of the accumulator moves nothing."""
    return gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, layout)))


@gluon.constexpr_function
def kept_layout(layout):
    """The same of a tile `[M, N / 8, 4, 2]`."""
    return gl.SliceLayout(1, gl.SliceLayout(3, layout))


# ---- backward --------------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def share_layout(BLOCK_M, dtype):
    """dS^T of one consumer in shared memory, `[64, BLOCK_M]`."""
    return gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], dtype)


@gluon.constexpr_function
def sum_layout():
    """`[1, 64, 64]` of dQ in fp32 in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([1, 64, 64], gl.float32)


@gluon.constexpr_function
def line_layout():
    """A number for each row of a tile, `[1, rows]`, in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.constexpr_function
def own_layout():
    """A tile of 64 x 64 scores as `[8, 128, 4]`: for each of 128 threads the 32 numbers that `score_layout` gives it."""
    registers = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    lanes, warps = [[0, 1 << i, 0] for i in range(5)], [[0, 32, 0], [0, 64, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [8, 128, 4])


@gluon.constexpr_function
def own_shared_layout():
    """That in shared memory: threads take 16 bytes each, side by side."""
    return gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
