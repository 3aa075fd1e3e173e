"""`latent`: decoding with multi-head latent attention (576 / 512, one KV head) on NVIDIA Hopper (`kernels/gluon/latent.py`).

Tiles are spelled as those of `split_kv`, which takes what is refused here: `64x64 w4 s5 p132`. Rows and keys are always 64, and
the stages are halves of 64 values in flight, 32 KiB each:

    s5    the first 256 columns of Q are held in registers, so that there is room for two tiles and a half
    s4    all of Q lies in shared memory
"""

from typing import Optional

from rowmax.device import Device
from rowmax.paged import PagedProblem
from rowmax.plan import hopper, split_kv
from rowmax.plan.split_kv import SplitTile
from rowmax.plan.tile import Tile
from rowmax.problem import Problem

ROWS = KEYS = 64  # of a tile
DIM, DIM_V = 576, 512
SHARED_BYTES = 232_448
NOT_SHARED = "takes values that are the first columns of the keys, and rows that start at multiples of 16 bytes, as TMA does"
_REGISTERS = {5: (176, 136, 24), 4: (192, 104, 24)}


def registers(tile: SplitTile) -> tuple[int, int, int]:
    """Of a thread that multiplies P with V, of one that computes P, and of the producer; the first stand there twice."""
    return _REGISTERS[tile.stages]


def refuses(problem: Problem, device: Device, direction: str) -> Optional[str]:
    if direction != "forward":
        return "has a forward only"
    if not isinstance(problem, PagedProblem):
        return "takes keys in pages only"
    if (problem.dim_qk, problem.dim_v, problem.heads_k) != (DIM, DIM_V, 1):
        return f"is for latent attention: {DIM} dims of q and k, {DIM_V} of v, one KV head"
    if reason := hopper.refuses(problem, device, direction):
        return reason
    if problem.heads_q % ROWS:
        return f"takes {ROWS} query heads and multiples of them, so that rows of a tile see the same keys"
    if problem.page_size % KEYS:
        return f"TMA fetches {KEYS} keys of a page at once; pages of {problem.page_size} are not cut into such tiles"
    if problem.eight_bits or problem.batch_invariant:
        return "reads no pages in 8 bits and has no batch-invariant parts"
    if problem.band[0] is not None:
        return "computes no left side of a window"
    return split_kv.refuses(problem, device, direction)


def passes_over(problem: Problem) -> Optional[str]:
    """Why, though it runs the problem, another is taken unless this one is asked for."""
    return "has not been timed on a GPU yet"


def misfit(problem: Problem, device: Device, tile: Tile) -> Optional[str]:
    """Why this is no tile that runs the problem, or None."""
    if reason := split_kv.misfit(problem, device, tile):
        return reason
    assert isinstance(tile, SplitTile)  # `split_kv.misfit` checked it
    if (tile.block_m, tile.block_n, tile.warps) != (ROWS, KEYS, 4) or tile.stages not in _REGISTERS:
        return f"tiles are {ROWS}x{KEYS} w4 s4 and s5"
    if tile.once:
        return "has a second kernel"
    return None


def tiles(problem: Problem, device: Device, direction: str) -> tuple[tuple[Tile, ...], str]:
    assert isinstance(problem, PagedProblem)  # `refuses` checked it
    if problem.batch > split_kv.MOST_SEQUENCES:
        return (SplitTile(ROWS, KEYS, 4, 5),), "so many sequences fill the multiprocessors"
    tile = SplitTile(ROWS, KEYS, 4, 5, False, device.sms, True)
    return (tile,), "lengths are on the device: about a part for each multiprocessor, which holds one block"
