"""The three launches of the Hopper backward; `launch.py` runs them."""

from typing import Any, Optional

import torch

from rowmax.kernels.hopper_forward import GUARDED_FLAGS, _descriptor, alibi_of, given_descriptor, given_of
from rowmax.kernels.launch import Call, _bounded, _cap, _given, _padded, _programs, _row_tiles, _strides
from rowmax.mask import Band
from rowmax.numerics import LOG2E
from rowmax.plan.hopper_backward import KEYS, HopperBackwardTile, given_stages, misfit, padded_dims, slots
from rowmax.plan.tile import Tile
from rowmax.problem import Operands, Problem

ROWS = 64  # of a program before and behind
MADE = slice(4, 8)  # of the tensors of the first launch: what it hands on to the others
PARTS = slice(5, 7)  # of the tensors of the last launch: dK and dV of parts of a group, or None


def hopper_backward_calls(
    problem: Problem,
    operands: Operands,
    tile: HopperBackwardTile,
    out,
    lse,
    grad_out,
    grad_lse: Optional[torch.Tensor],
    dq,
    dk,
    dv,
) -> tuple[Call, Call, Call]:
    """Rows first, then the gradients, then dQ in its own type. Takes memory: dQ in fp32, and two numbers for a row.

    A tile of several parts takes dK and dV of each part in fp32 as well.
    """
    from rowmax.kernels.gluon.backward import Build, backward_kernel
    from rowmax.kernels.gluon.backward_edges import finish_kernel

    why_not = misfit(problem, tile)
    if why_not:
        raise ValueError(why_not)
    q, k, v, cu_seqlens_q, cu_seqlens_k = operands[:5]
    block_d, block_dv = padded_dims(problem)
    batch = 1 if problem.packed else problem.batch
    sums = q.new_empty((problem.heads_q * batch, problem.len_q, problem.dim_qk), dtype=torch.float32)
    parts: tuple = (None, None)
    if tile.parts > 1:
        lines = problem.heads_k * batch * tile.parts
        parts = tuple(q.new_empty((lines, *t.shape[-3::2]), dtype=torch.float32) for t in (k, v))
    key_tiles = _row_tiles(problem, problem.len_k, KEYS)
    flags = _programs(problem, key_tiles, problem.heads_k)
    cleared, counts_at = flags, -(-flags // 4) * 4  # counters stand behind the marks, at a multiple of 16 bytes
    if tile.ordered:
        cleared = counts_at + 1 + _programs(problem, _row_tiles(problem, problem.len_q, tile.block_m), problem.heads_q)
    prepare = prepare_call(problem, operands, out, lse, grad_out, grad_lse, sums, cleared)
    lse_log2, delta, _, suspect = prepare.tensors[MADE]
    line_length = lse_log2.shape[1]

    sources = (
        *(_descriptor(q, tile.block_m, block_d), _descriptor(grad_out, tile.block_m, block_dv)),
        *(_descriptor(k, KEYS, block_d), _descriptor(v, KEYS, block_dv)),
        *(_line_descriptor(t, line_length if problem.packed else problem.len_q, tile.block_m) for t in (lse_log2, delta)),
        *(_sum_descriptor(sums), _descriptor(dk, KEYS, block_d), _descriptor(dv, KEYS, block_dv)),
    )
    tiles = _row_tiles(problem, problem.len_k, tile.block_n)
    whole = problem.len_q % tile.block_m == 0 and problem.len_k % tile.block_n == 0
    hides = problem.packed or problem.band != Band(None, None) or not whole
    build = Build(
        *(problem.packed, problem.group // tile.parts, tile.parts, problem.dim_qk, problem.dim_v),
        *(tile.block_m, block_d, block_dv, tile.stages, tile.block_n // KEYS, *tile.registers()),
        *(alibi_of(problem), problem.alibi == "batch", tile.ordered, slots(problem, tile), hides),
        *(problem.dropout > 0, problem.softcap > 0),
        *given_of(problem, operands, tile.block_m, KEYS, given_stages(problem, tile)),
    )
    pairs = _given(problem, operands)
    numbers = (
        *(problem.scale * LOG2E, _cap(problem), pairs[5], _bounded(problem), problem.batch, problem.heads_k, tiles),
        *(_heads_together(problem, tile), problem.len_q, problem.len_k, build),
    )
    pointers = (dk, dv) if problem.packed and tile.parts == 1 else parts
    counters = suspect[counts_at:] if tile.ordered else None
    tensors = (*sources, *pointers, suspect, counters, cu_seqlens_q, cu_seqlens_k, operands.slopes)
    tensors = (*tensors, given_descriptor(problem, operands, tile.block_m, KEYS, turned=True), pairs[2])
    backward = Call(backward_kernel, _programs(problem, tiles, problem.heads_k * tile.parts), tensors, numbers, tile)

    row_tiles, programs = _row_programs(problem)
    flags_each = GUARDED_FLAGS if tile.parts == 1 else 1
    tensors = (q, k, v, grad_out, sums, *parts, dq, dk, dv, lse_log2, delta, suspect, cu_seqlens_q, cu_seqlens_k)
    tensors = (*tensors, operands.slopes, *pairs[:3])
    numbers = (
        *(*pairs[3:], _cap(problem)),
        *(_strides(t) for t in (q, k, v, grad_out, dq, dk, dv)),
        *(problem.scale, _bounded(problem), problem.batch, problem.heads_q, row_tiles, key_tiles, programs, flags),
        *(problem.len_q, problem.len_k, line_length, problem.group, problem.dim_qk, problem.dim_v),
        *(_padded(problem.dim_qk), _padded(problem.dim_v), ROWS, KEYS, flags_each, tile.parts),
        problem.alibi == "batch",
    )
    finish = Call(finish_kernel, programs + -(-flags // flags_each), tensors, numbers, Tile(ROWS, 1, 4, 1))
    return prepare, backward, finish


def _row_programs(problem: Problem) -> tuple[int, int]:
    """Tiles of ROWS rows of a head, and of all."""
    tiles = _row_tiles(problem, problem.len_q, ROWS)
    return tiles, _programs(problem, tiles, problem.heads_q)


def prepare_call(
    problem: Problem, operands: Operands, out, lse, grad_out, grad_lse: Optional[torch.Tensor], sums, flags: int
) -> Call:
    """Facts of rows. `MADE` of its tensors: LSE, delta, the given sums (or None) and marks; the last two are cleared."""
    from rowmax.kernels.gluon.backward_edges import prepare_kernel

    lines = problem.heads_q * (1 if problem.packed else problem.batch)
    line_length = -(-problem.len_q // 4) * 4 + (4 * problem.batch if problem.packed else 0)  # `address.line_begin`
    make = out.new_zeros if problem.packed else out.new_empty  # between sequences are numbers that nobody writes
    made = (*make((2, lines, line_length), dtype=torch.float32), sums, out.new_empty(flags, dtype=torch.int32))
    tiles, programs = _row_programs(problem)
    tensors = (out, grad_out, lse, None if grad_lse is None else grad_lse.contiguous(), *made, operands.cu_seqlens_q)
    numbers = (
        *(_strides(out), _strides(grad_out), problem.batch, problem.heads_q, tiles, problem.len_q, line_length, flags),
        *(problem.dim_qk, problem.dim_v, ROWS, _padded(problem.dim_qk), _padded(problem.dim_v)),
        1 << (-(-flags // programs) - 1).bit_length(),
    )
    return Call(prepare_kernel, programs, tensors, numbers, Tile(ROWS, 1, 4, 1))


def _line_descriptor(lines: torch.Tensor, length: int, rows: int) -> Any:
    """TMA's view of `[B * H, T]`, of which `length` numbers count."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from rowmax.kernels.gluon.layouts import line_layout

    return TensorDescriptor(lines, (lines.shape[0], length), lines.stride(), [1, rows], line_layout())


def _sum_descriptor(sums: torch.Tensor) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from rowmax.kernels.gluon.layouts import sum_layout

    return TensorDescriptor(sums, tuple(sums.shape), sums.stride(), [1, 64, 64], sum_layout())


def _heads_together(problem: Problem, tile: HopperBackwardTile) -> int:
    """KV heads, or parts, that take `group_mb` of L2 together for Q, dO and dQ of one query head of each; at least one.

    The key tiles of a KV head walk over the heads of its group at about the same time.
    """
    rows = problem.len_q
    if problem.packed:
        rows = problem.max_len_q or -(-problem.len_q // max(problem.batch, 1))
    head_bytes = max(rows, 1) * (6 * problem.dim_qk + 2 * problem.dim_v)
    heads = max((tile.group_mb << 20) // head_bytes, 1)
    return min(heads, problem.heads_k * tile.parts * (1 if problem.packed else problem.batch))
