"""The Hopper backward of a plan: launches of `backward_launch.py` or `backward_wide_launch.py`, kept by the form of a call."""

from collections.abc import Sequence
from typing import Any, Optional

import torch

from rowmax.kernels import launch
from rowmax.kernels.again import Again, form
from rowmax.kernels.backward_launch import MADE, PARTS, hopper_backward_calls
from rowmax.kernels.backward_wide_launch import wide_backward_calls
from rowmax.plan.hopper_wide import HopperWideTile
from rowmax.plan.tile import Tile
from rowmax.problem import Operands, Problem

_kept: dict = {}  # form of a call -> its launches and what they need made


def run(
    problem: Problem,
    operands: Operands,
    tile: Tile,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: Optional[torch.Tensor],
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes into dq, dk and dv, all three whole; packed ones are 0 before.

    Returns the LSE in base 2 and delta, `[.., heads, rows]`, for the gradient of a sink; packed, with rows of nobody,
    whose delta is 0.
    """
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    device = operands.q.device
    given = (*operands[:6], operands.bias, operands.mask, operands.seed, out, lse, grad_out, grad_lse, dq, dk, dv)
    numbers = [*map(id, given)]  # a tensor given twice, as `cu_seqlens` of both sides, may be two the next time
    key = (problem, tile, device.index, *map(form, given), *map(numbers.index, numbers))
    kept = _kept.get(key)
    if kept is not None and device.index == torch.cuda.current_device():
        again, likes = kept
        made: Sequence = _made(likes, operands.q, problem.packed)
        again(*given, *made)
        return _rows(problem, made)
    calls_of: Any = wide_backward_calls if isinstance(tile, HopperWideTile) else hopper_backward_calls
    calls = calls_of(problem, operands, tile, out, lse, grad_out, grad_lse, dq, dk, dv)
    builds = launch.launch_all(device, calls)
    made = handed_on(calls)
    if None in builds:  # the interpreter
        return _rows(problem, made)
    if len(_kept) >= launch.MAX_BUILDS:
        _kept.clear()
    likes = [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in made]
    _kept[key] = Again(calls, builds, (*given, *made)), likes
    return _rows(problem, made)


def _rows(problem: Problem, made: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    lse_log2, delta = (
        lines[:, : lines.shape[1] if problem.packed else problem.len_q].unflatten(0, (-1, problem.heads_q))
        for lines in made[:2]
    )
    return lse_log2, delta


def handed_on(calls: tuple) -> tuple[Optional[torch.Tensor], ...]:
    """Memory that one launch writes and another reads. Four launches are those of `backward_wide_launch.py`, without parts."""
    return *calls[0].tensors[MADE], *(calls[-1].tensors[PARTS] if len(calls) == 3 else ())


def _made(likes: list, q: torch.Tensor, packed: bool) -> list:
    """LSE and delta of each row, not all of which is written when rows are packed; then what there is of sums, marks, parts."""
    lse_log2, _delta, *others = likes
    lines = (q.new_zeros if packed else q.new_empty)((2, *lse_log2[0]), dtype=lse_log2[1])
    more = [None if like is None else q.new_empty(like[0], dtype=like[1]) for like in others]
    return [lines[0], lines[1], *more]
