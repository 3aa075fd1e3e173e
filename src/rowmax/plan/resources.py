"""Whether a tile can run at all: what its kernel holds in shared memory and registers, against what the device has.

The figures for `q_outer` leave out what only the compiler knows, so that they never exceed the truth: a tile that is refused
here does not launch, and a few that pass do not launch either. Those for `hopper` are exact up to the barriers' few hundred
bytes. `tests/plan/test_resources.py` compares both with what was compiled.
"""

from typing import Optional

import torch

from rowmax.device import Device
from rowmax.plan import hopper, latent, split_kv, warp_split
from rowmax.plan.generations import BY_NAME
from rowmax.plan.hopper import HopperTile, padded_dims
from rowmax.plan.tile import Tile
from rowmax.plan.warp_split import WarpTile
from rowmax.problem import Problem

KERNELS = {("forward", 1): ("forward",), ("backward", 2): ("dq", "dkdv"), ("backward", 3): ("dq", "dk", "dv")}
REGISTERS = 255  # of a thread
ON_CPU = ("aten", "tiled", "gathered")  # a backward has one tile; a second, as the kernels' plans have it, goes unused
MOST_DRAWN = 128  # keys whose draws a consumer keeps, a bit each in one register for a row
ADDRESSES = 24  # registers of a consumer for all that is no tile: with less the prototype spilled


def misfit(problem: Problem, device: Device, direction: str, algorithm: str, tiles: tuple[Tile, ...]) -> Optional[str]:
    """Why these tiles are none that `algorithm` can run the problem with, or None. Says nothing about speed."""
    if found := miscount(direction, algorithm, len(tiles)):
        return found
    if algorithm == "latent":
        return latent.misfit(problem, device, tiles[0])
    if algorithm == "split_kv":
        return split_kv.misfit(problem, device, tiles[0])
    if algorithm in ON_CPU:
        return next((f"{tile}: {found}" for tile in tiles if (found := _misfit_of_cpu(tile))), None)
    if algorithm == "hopper" and direction == "backward":
        (only,) = tiles
        own = hopper.backward_of(problem)
        found = (
            own.misfit(problem, only) if type(only) is hopper.BACKWARD_TILES[own.MARK] else "is no tile of its backward here"
        )
        return f"{only}: {found}" if found else None
    names = (algorithm,) if algorithm in BY_NAME else KERNELS[direction, len(tiles)]
    for kernel, tile in zip(names, tiles, strict=True):
        if type(tile) is not {"hopper": HopperTile, "warp_split": WarpTile}.get(algorithm, Tile):
            return f"{tile} is no tile of {algorithm}"
        if isinstance(tile, WarpTile):
            found = warp_split.misfit(problem, device, tile)
        else:
            found = _misfit_of_hopper(tile) if isinstance(tile, HopperTile) else _misfit_of_portable(tile)
        if not found and problem.dropout and isinstance(tile, HopperTile) and tile.block_n > MOST_DRAWN:
            found = f"draws for at most {MOST_DRAWN} keys at once where weights are dropped"
        if not found and kernel in BY_NAME and tile.descriptors:
            found = "loads by pointers, never by descriptors"
        if not found and device.kind != "cpu":  # Triton's interpreter has neither registers nor shared memory
            found = _too_large(problem, device, kernel, tile)
        if found:
            return f"{tile}: {found}"
    return None


def miscount(direction: str, algorithm: str, number: int) -> Optional[str]:
    """Why no plan of `algorithm` has that many tiles for one direction, or None."""
    one = direction == "forward" or algorithm == "hopper"
    numbers = (1,) if one else (1, 2) if algorithm in ON_CPU else (2, 3)
    if number in numbers:
        return None
    return f"a {direction} takes {'one tile' if numbers == (1,) else '{} or {} tiles'.format(*numbers)}, not {number}"


def shared_bytes(problem: Problem, device: Device, kernel: str, tile: Tile) -> int:
    """Shared memory of a block: exact for `hopper` but for the barriers, at most the truth for `q_outer`."""
    if isinstance(tile, HopperTile):
        return hopper.shared_bytes(problem, tile)
    dim, dim_v = _padded(problem.dim_qk), _padded(problem.dim_v)
    element = torch.finfo(problem.dtype).bits // 8
    if isinstance(tile, WarpTile):
        return warp_split.shared_bytes(tile, dim, max(dim_v, min(dim, 64)))
    if kernel == "kv_outer":  # K and V stay, Q passes
        return (tile.block_n * (dim + dim_v) + tile.block_m * dim) * element
    if kernel == "dense":  # of two products, neither of which keeps anything; one factor of Q K^T may stay in registers
        return max(max(tile.block_m, tile.block_n) * dim, tile.block_n * (tile.block_m + dim_v) * (tile.stages - 1)) * element
    rows, columns = (tile.block_m, tile.block_n) if kernel in ("forward", "dq") else (tile.block_n, tile.block_m)
    kept = rows * (dim if kernel in ("forward", "dv") else dim + dim_v)
    # Hopper's products read both factors from shared memory, so that a stage is busy until its product is done.
    asynchronous = device.capability == (9, 0) and problem.dtype != torch.float32 and rows >= 64
    buffers = tile.stages if asynchronous else tile.stages - 1
    streamed = columns * (max(dim, dim_v) if tile.stages == 1 else buffers * (dim + dim_v))
    return (kept + streamed) * element


def registers(problem: Problem, kernel: str, tile: Tile) -> int:
    """Of a thread, for accumulators, scores and what else a step holds at once."""
    scores = tile.block_m * tile.block_n
    if isinstance(tile, HopperTile):  # 64 rows in 128 threads: O, S, and P in 16 bits
        return (padded_dims(problem)[2] + tile.block_n + tile.block_n // 2) // 2 + ADDRESSES
    dim, dim_v = _padded(problem.dim_qk), _padded(problem.dim_v)
    if isinstance(tile, WarpTile):
        return warp_split.registers(tile, dim, max(dim_v, min(dim, 64)))
    held = {
        "forward": tile.block_m * dim_v + scores,
        "kv_outer": tile.block_m * dim_v + scores,
        "dense": max(tile.block_m * dim_v, scores),
        "dq": tile.block_m * dim + 2 * scores,
        "dkdv": tile.block_n * (dim + dim_v) + 2 * scores,
        "dk": tile.block_n * dim + 2 * scores,
        "dv": tile.block_n * dim_v + scores,
    }[kernel]
    return held // (32 * tile.warps)


def _misfit_of_cpu(tile: Tile) -> Optional[str]:
    if type(tile) is not Tile or tile != Tile(tile.block_m, tile.block_n):
        return "a tile on the CPU has two sides and nothing else: '256x8192'"
    return "sides are 1 and more" if min(tile.block_m, tile.block_n) < 1 else None


def _misfit_of_portable(tile: Tile) -> Optional[str]:
    sides = (tile.block_m, tile.block_n)
    if any(side not in (16, 32, 64, 128, 256) for side in sides) or tile.warps not in (1, 2, 4, 8, 16):
        return "block sizes are powers of two from 16 to 256, warps from 1 to 16"
    return None if 1 <= tile.stages <= 8 else "stages are 1 to 8"


def _misfit_of_hopper(tile: HopperTile) -> Optional[str]:
    if not (2 <= tile.stages <= 8 and 1 <= tile.q_stages <= 2 and 0 <= tile.group_mb <= 1024):
        return "stages are 2 to 8, those of Q 1 or 2, groups at most 1024 MB"
    return "has at most 256 columns" if tile.block_n > 256 else None


def _too_large(problem: Problem, device: Device, kernel: str, tile: Tile) -> Optional[str]:
    who, has = ("consumer", tile.registers()[0]) if isinstance(tile, HopperTile) else ("thread", REGISTERS)
    needs = registers(problem, kernel, tile)
    if needs > has:
        return f"needs {needs} registers a thread; a {who} has {has}"
    needs = shared_bytes(problem, device, kernel, tile)
    if needs > device.shared_bytes:
        return f"needs {needs:,} bytes of shared memory; a block may take {device.shared_bytes:,}"
    return None


def _padded(dim: int) -> int:
    """As the launcher pads: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())
