"""The tiles that `rowmax tune` tries, the most promising first, so that a search cut short has seen the best of them.

A tile is the more promising the less it differs from the one in the table, which was the best of some problem like this: a
factor of two in a side or in the warps, one stage, and a changed word count one each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import product, zip_longest
from math import log2
from typing import Any

import torch

from rowmax.device import Device
from rowmax.errors import Unsupported
from rowmax.plan import Direction, Plan, by_table, hopper, portable
from rowmax.plan.hopper import HopperTile
from rowmax.plan.resources import KERNELS, misfit
from rowmax.plan.tile import Tile
from rowmax.problem import Problem

FAR = 3  # a tile farther off than this has little in common with any that was found good
GROUPS_MB = (0, 8, 32)  # of heads whose K/V share the L2 cache


def candidates(problem: Problem, device: Device, start: Plan, position: int) -> list[Plan]:
    """`start`, a forward or a backward, with other tiles for the kernel at `position`, each once, `start` itself first.

    A forward takes those of every algorithm that runs the problem by turns.
    """
    backward = len(start.tiles) > 1 or isinstance(start.tiles[0], tuple(hopper.BACKWARD_TILES.values()))
    direction: Direction = "backward" if backward else "forward"
    found = {str(start): start}
    for plan in _by_turns(problem, device, start, position, direction):
        if not misfit(problem, device, direction, plan.algorithm, plan.tiles):
            found.setdefault(str(plan), plan)
    return list(found.values())


def _by_turns(problem: Problem, device: Device, start: Plan, position: int, direction: Direction) -> Iterator[Plan]:
    if start.algorithm == "hopper" and direction == "backward":
        grid = hopper.backward_of(problem).grid(problem)
        yield from (Plan(start.algorithm, (tile,)) for tile in _ranked(grid, start.tiles[0]))
        return
    if direction == "backward":
        kernel, near = KERNELS[direction, len(start.tiles)][position], start.tiles[position]
        for tile in _ranked(_portable_tiles(problem, device, kernel), near):
            yield Plan(start.algorithm, (*start.tiles[:position], tile, *start.tiles[position + 1 :]))
        return
    grids: dict[str, Sequence[Tile]] = {
        "hopper": _hopper_tiles(problem),
        "q_outer": _portable_tiles(problem, device, "forward"),
    }
    lists = []
    for name, grid in grids.items():
        try:
            (near,) = by_table(problem, device, prefer=name).tiles
        except Unsupported:
            continue
        lists.append([Plan(name, (tile,)) for tile in [near, *_ranked(grid, near)]])
    for turn in zip_longest(*lists):
        yield from filter(None, turn)


def _portable_tiles(problem: Problem, device: Device, kernel: str) -> list[Tile]:
    narrow = problem.dtype == torch.float32
    rows, columns = ((16, 32, 64) if narrow else (32, 64, 128) if kernel != "forward" else (64, 128)), (32, 64, 128)
    if kernel == "forward" and not narrow and problem.len_q <= 64:  # a batch of decoding steps: rows are padding
        rows = (16, 32, 64)
    if narrow:
        columns = (16, 32, 64)
    words = [False]
    if device.capability >= (9, 0) and not narrow:
        words = [True, False]
    if any(tile.descriptors for tile in portable.tiles(problem, device, "forward")[0]) and _odd(problem):
        words = [True]  # loads that are not vectorised
    return [Tile(*sizes) for sizes in product(rows, columns, (4, 8), (1, 2, 3, 4), words)]


def _odd(problem: Problem) -> bool:
    return bool(problem.dim_qk % 16 or problem.dim_v % 16)


def _hopper_tiles(problem: Problem) -> list[HopperTile]:
    found = []
    ways = [(False, False), (True, False), *[(True, True)] * hopper.steady_for(problem)]
    for block_m, block_n, stages, q_stages, pingpong, (lazy, steady), schedule, group in product(
        (64, 128, 192), (64, 128), (2, 3, 4), (1, 2), (True, False), ways, hopper.SCHEDULES, GROUPS_MB
    ):
        if pingpong and block_m == 64:
            continue  # one consumer has nobody to take turns with
        words: dict[str, Any] = {"pingpong": pingpong, "lazy": lazy, "steady": steady, "schedule": schedule, "group_mb": group}
        found.append(HopperTile(block_m, block_n, 4, stages, q_stages=q_stages, **words))
    return found


def _ranked(grid: Sequence[Tile], near: Tile) -> list[Tile]:
    """Those of the grid that are not far from `near`, the nearest first; of equals the larger, since they load less."""
    close = [tile for tile in grid if _distance(tile, near) <= FAR]
    return sorted(close, key=lambda tile: (_distance(tile, near), -tile.block_m * tile.block_n))


def _distance(one: Tile, other: Tile) -> float:
    total = 0.0
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name in ("block_m", "block_n", "warps"):
            total += abs(log2(a / b))
        elif field.name in ("stages", "q_stages"):
            total += abs(a - b)
        else:
            total += a != b
    return total
