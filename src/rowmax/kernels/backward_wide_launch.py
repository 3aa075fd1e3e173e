"""The four launches of the Hopper backward for head dimensions above 128. To be part of `launch.py`."""

from typing import Optional

import torch

from rowmax.kernels.backward_launch import MADE, _line_descriptor, prepare_call
from rowmax.kernels.hopper_forward import GUARDED_FLAGS, _descriptor, alibi_of, given_descriptor, given_of
from rowmax.kernels.launch import Call, _bounded, _cap, _given, _padded, _programs, _row_tiles, _strides
from rowmax.numerics import LOG2E
from rowmax.plan.hopper_wide import KEYS, QUERIES, HopperWideTile, given_stages, misfit, padded_dims, shares, value_stages
from rowmax.plan.tile import Tile
from rowmax.problem import Operands, Problem

CONSUMER_ROWS = 64  # rows of a consumer of the dQ kernel, and of a mark


def wide_backward_calls(
    problem: Problem,
    operands: Operands,
    tile: HopperWideTile,
    out,
    lse,
    grad_out,
    grad_lse: Optional[torch.Tensor],
    dq,
    dk,
    dv,
) -> tuple[Call, Call, Call, Call]:
    """Rows first, then dK and dV, then dQ, then repairs. Takes memory: two numbers for a row, and a mark for 64 of them."""
    from rowmax.kernels.gluon.backward_wide_edges import repair_kernel

    why_not = misfit(problem, tile)
    if why_not:
        raise ValueError(why_not)
    q, k, v = operands[:3]
    key_tiles, flag_tiles = _row_tiles(problem, problem.len_k, KEYS), _row_tiles(problem, problem.len_q, CONSUMER_ROWS)
    key_flags, row_flags = _programs(problem, key_tiles, problem.heads_k), _programs(problem, flag_tiles, problem.heads_q)
    flags = key_flags + row_flags
    prepare = prepare_call(problem, operands, out, lse, grad_out, grad_lse, None, flags)
    lse_log2, delta, _, suspect = prepare.tensors[MADE]
    line_length = lse_log2.shape[1]
    keys = _keys(problem, operands, tile, grad_out, lse_log2, delta, suspect[:key_flags], dk, dv)
    queries = _queries(problem, operands, tile, grad_out, lse_log2, delta, suspect[key_flags:], dq)

    pairs = _given(problem, operands)
    tensors = (q, k, v, grad_out, dq, dk, dv, lse_log2, delta, suspect, *operands[3:6], *pairs[:2])
    numbers = (
        *(*pairs[3:5], _cap(problem)),
        *(_strides(t) for t in (q, k, v, grad_out, dq, dk, dv)),
        *(problem.scale, _bounded(problem), problem.batch, problem.heads_q, flag_tiles, key_tiles, row_flags, key_flags),
        *(problem.len_q, problem.len_k, line_length, problem.group, problem.dim_qk, problem.dim_v),
        *(_padded(problem.dim_qk), _padded(problem.dim_v), KEYS, GUARDED_FLAGS, problem.alibi == "batch"),
    )
    repair = Call(repair_kernel, -(-flags // GUARDED_FLAGS), tensors, numbers, Tile(KEYS, 1, 4, 1))
    return prepare, keys, queries, repair


def _keys(problem: Problem, operands: Operands, tile: HopperWideTile, grad_out, lse_log2, delta, suspect, dk, dv) -> Call:
    from rowmax.kernels.gluon.backward_wide_keys import Build, key_kernel

    q, k, v = operands[:3]
    block_d, block_dv = padded_dims(problem)
    length = lse_log2.shape[1] if problem.packed else problem.len_q
    sources = (
        *(_descriptor(q, QUERIES, block_d), _descriptor(grad_out, QUERIES, block_dv)),
        *(_descriptor(k, KEYS, block_d), _descriptor(v, KEYS, block_dv)),
        *(_line_descriptor(t, length, QUERIES) for t in (lse_log2, delta)),
        *(_descriptor(dk, KEYS, block_d), _descriptor(dv, KEYS, block_dv)),
    )
    tiles = _row_tiles(problem, problem.len_k, KEYS)
    members = _together(problem, tile, problem.len_q, problem.max_len_q, problem.heads_k)
    build = Build(
        *(problem.packed, problem.group, problem.dim_qk, problem.dim_v, block_d, block_dv, tile.stages, *tile.registers()),
        *(*_bent(problem), *given_of(problem, operands, KEYS, KEYS, given_stages(problem, tile)[0]), shares(problem, tile)),
    )
    numbers = (
        *(problem.scale * LOG2E, _cap(problem), _bounded(problem), problem.batch, problem.heads_k, tiles, members),
        *(problem.len_q, problem.len_k, build),
    )
    tensors = (*sources, *((dk, dv) if problem.packed else (None, None)), suspect, *operands[3:6])
    tensors = (*tensors, given_descriptor(problem, operands, QUERIES, KEYS, turned=True))
    return Call(key_kernel, _programs(problem, tiles, problem.heads_k), tensors, numbers, tile)


def _queries(problem: Problem, operands: Operands, tile: HopperWideTile, grad_out, lse_log2, delta, suspect, dq) -> Call:
    from rowmax.kernels.gluon.backward_wide_queries import Build, query_kernel

    q, k, v = operands[:3]
    block_d, block_dv = padded_dims(problem)
    sources = (
        *(_descriptor(q, CONSUMER_ROWS, block_d), _descriptor(grad_out, CONSUMER_ROWS, block_dv)),
        *(_descriptor(k, tile.block_n, block_d), _descriptor(v, tile.block_n, block_dv)),
        _descriptor(dq, CONSUMER_ROWS, block_d),
    )
    tiles = _row_tiles(problem, problem.len_q, tile.block_m)
    heads, (_, stages) = problem.heads_q, given_stages(problem, tile)
    members = _together(problem, tile, problem.len_k, problem.max_len_k, heads // problem.group) * problem.group
    build = Build(
        *(problem.packed, problem.group, problem.dim_qk, tile.block_n, block_d, block_dv),
        *(tile.stages, value_stages(problem, tile)),
        *(*tile.registers(), *_bent(problem), *given_of(problem, operands, CONSUMER_ROWS, tile.block_n, stages)),
    )
    numbers = (
        *(problem.scale * LOG2E, _cap(problem), _bounded(problem), problem.batch, heads, tiles, members),
        *(problem.len_q, problem.len_k, lse_log2.shape[1], build),
    )
    given = given_descriptor(problem, operands, CONSUMER_ROWS, tile.block_n)
    tensors = (*sources, dq if problem.packed else None, lse_log2, delta, suspect, *operands[3:6], given)
    return Call(query_kernel, _programs(problem, tiles, heads), tensors, numbers, tile)


def _bent(problem: Problem) -> tuple[str, bool, bool]:
    """For a `Build`: ALiBi, whose slopes each sequence may have of its own, and a soft-cap."""
    return alibi_of(problem), problem.alibi == "batch", problem.softcap > 0


def _together(problem: Problem, tile: HopperWideTile, length: int, longest: Optional[int], heads: int) -> int:
    """KV heads that take `group_mb` of L2 together for Q and dO of one query head of each, or for K and V; at least one."""
    rows = length
    if problem.packed:
        rows = longest or -(-length // max(problem.batch, 1))
    head_bytes = max(rows, 1) * 2 * (problem.dim_qk + problem.dim_v)
    return min(max((tile.group_mb << 20) // head_bytes, 1), heads * (1 if problem.packed else problem.batch))
