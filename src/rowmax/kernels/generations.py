"""Calls of the forwards before FlashAttention-2, which run when they are asked for by name. Pure, as in `launch.py`."""

import torch

from rowmax.kernels.launch import Call, _bounded, _constants, _prescaled, _programs, _row_tiles, _strides
from rowmax.kernels.triton.dense import output_kernel, scores_kernel, softmax_kernel
from rowmax.kernels.triton.kv_outer import kv_outer_kernel
from rowmax.numerics import LOG2E
from rowmax.plan.generations import SOFTMAX_TILE, score_columns
from rowmax.plan.tile import Tile
from rowmax.plan.warp_split import WarpTile
from rowmax.problem import Operands, Problem


def calls(algorithm: str, problem: Problem, operands: Operands, tile: Tile, out, lse) -> tuple[Call, ...]:
    """Launched one after another they compute `out`, and `lse` unless it is None. Takes the memory that the algorithm needs."""
    if isinstance(tile, WarpTile):
        return warp_split_calls(problem, operands, tile, out, lse)
    return (dense_calls if algorithm == "dense" else kv_outer_calls)(problem, operands, tile, out, lse)


def kv_outer_calls(problem: Problem, operands: Operands, tile: Tile, out, lse) -> tuple[Call, ...]:
    """One launch; O in fp32, m and l in memory between its turns."""
    q, k, v, cu_seqlens_q, cu_seqlens_k = operands[:5]
    _, lse_shape = problem.outputs()
    constants = _constants(problem, tile)
    acc = q.new_empty((*lse_shape, constants[-1]), dtype=torch.float32)
    m, l = q.new_empty((2, *lse_shape), dtype=torch.float32)
    tensors = (q, k, v, out, lse, acc, m, l, cu_seqlens_q, cu_seqlens_k)
    numbers = (
        *(_strides(q), _strides(k), _strides(v), _strides(out), problem.scale * LOG2E, _bounded(problem)),
        *(problem.heads_q, problem.len_q, problem.len_k, *constants, tile.stages),
    )
    return (Call(kv_outer_kernel, problem.batch * problem.heads_q, tensors, numbers, tile),)


def dense_calls(problem: Problem, operands: Operands, tile: Tile, out, lse) -> tuple[Call, ...]:
    """Three launches; S in fp32 and P in the type of v in memory between them."""
    q, k, v = operands[:3]
    group, dim, _, block_m, block_n, block_d, _ = constants = _constants(problem, tile)
    columns = score_columns(problem, tile)
    row_tiles, col_tiles = -(-problem.len_q // block_m), columns // block_n
    heads, lines = problem.batch * problem.heads_q, problem.batch * problem.heads_q * problem.len_q
    s = q.new_empty((lines, columns), dtype=torch.float32)
    p = q.new_empty((lines, columns))
    scale_log2, band = problem.scale * LOG2E, _bounded(problem)
    numbers: tuple = (
        *(_strides(q), _strides(k), scale_log2, band, problem.heads_q, row_tiles, col_tiles, problem.len_q, problem.len_k),
        *(columns, group, dim, block_m, block_n, block_d),
    )
    scores = Call(scores_kernel, heads * row_tiles * col_tiles, (q, k, s), numbers, tile)
    rows = SOFTMAX_TILE.block_m
    numbers = (lines, columns, rows, SOFTMAX_TILE.block_n)
    softmax = Call(softmax_kernel, -(-lines // rows), (s, p, lse), numbers, SOFTMAX_TILE)
    numbers = (
        *(_strides(q), _strides(k), _strides(v), _strides(out), scale_log2, band, problem.heads_q, row_tiles),
        *(problem.len_q, problem.len_k, columns, *constants, tile.stages),
    )
    output = Call(output_kernel, heads * row_tiles, (p, q, k, v, out, lse), numbers, tile)
    return scores, softmax, output


def warp_split_calls(problem: Problem, operands: Operands, tile: WarpTile, out, lse) -> tuple[Call, ...]:
    """The forward, and the kernel that computes row tiles once more whose result is NaN."""
    from rowmax.kernels.gluon.guard import guard_kernel
    from rowmax.kernels.gluon.warp_split import warp_split_kernel
    from rowmax.kernels.hopper_forward import GUARDED_FLAGS, guard_tile

    q, k, v, cu_seqlens_q, cu_seqlens_k = operands[:5]
    tiles = _row_tiles(problem, problem.len_q, tile.block_m)
    programs = _programs(problem, tiles, problem.heads_q)
    suspect = q.new_zeros(programs, dtype=torch.int32)
    scale_log2, band = problem.scale * LOG2E, _bounded(problem)
    tensors = (q, k, v, out, lse, suspect, cu_seqlens_q, cu_seqlens_k)
    numbers: tuple = (
        *(tuple(stride // 8 for stride in _strides(t)) for t in (q, k, v, out)),
        *(scale_log2, band, problem.batch, problem.heads_q, tiles, problem.len_q, problem.len_k),
        *(*_constants(problem, tile), tile.groups, tile.share == "late", tile.stages),
    )
    forward = Call(warp_split_kernel, programs, tensors, numbers, tile)
    again = guard_tile(problem, tile.block_m)
    numbers = (
        *(_strides(q), _strides(k), _strides(v), _strides(out), None, None, None, scale_log2, None, band),
        *(problem.batch, problem.heads_q, tiles, programs, problem.len_q, problem.len_k),
        *(*_constants(problem, again), _prescaled(problem), again.stages, GUARDED_FLAGS, False, False),
    )
    # No slopes, sink, bias, mask or seed; nor strides and odds of the last three.
    guard = Call(guard_kernel, -(-programs // GUARDED_FLAGS), (*tensors, *(None,) * 5), numbers, again)
    return forward, guard
