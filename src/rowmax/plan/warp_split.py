"""`warp_split`: how the warps of one block share a tile of scores. A forward to measure two ways by, only for who asks by name.

    64x64 w4 s2 rows       each warp has rows of Q (split-Q)
    64x64 w4 s2 columns    each warp has columns of K and V (split-K/V), and results are added up in every turn
    32x64 w2 s2 late       so do warps here, but O is added up once, at the end

Tiles are the largest of a list that compile without spills (triton 3.6.0) where it says so below; no speed decided them.
"""

import re
from dataclasses import dataclass
from typing import Optional

import torch

from rowmax.device import Device
from rowmax.errors import ProblemError
from rowmax.plan import portable
from rowmax.plan.cpu import Candidate
from rowmax.plan.tile import WINDOWS_ONLY, Tile
from rowmax.problem import Problem

ALONE = "shows two ways to share a tile among warps: only if asked for by name"
SHARES = ("rows", "columns", "late")
MOST_DIM = 128  # of 256 dimensions one warp's copy of O takes more registers than a thread has
ROW, COLUMN = 16, 16  # the fewest of a warp: what mma.sync takes
_SPELLING = re.compile(rf"(\d+)x(\d+) w(\d+) s(\d+)(?: ({'|'.join(SHARES)}))?")
# Largest head dimension -> tile of `rows`. Columns of the first take 105 KB of shared memory, which compute capability 8.9 has
# not: there "32x64 w2 s2 columns". All three ways run as "32x64 w2 s2", the last with 56 bytes of spills at 128 dimensions.
_TILES = {64: "64x64 w4 s2 rows", 128: "32x64 w2 s2 rows"}


@dataclass(frozen=True)
class WarpTile(Tile):
    """A `Tile` and how its warps share it."""

    share: str = "rows"

    @property
    def groups(self) -> int:
        """Into how many the columns of a tile are divided."""
        return 1 if self.share == "rows" else self.warps

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} w{self.warps} s{self.stages} {self.share}"

    @classmethod
    def parse(cls, text: str) -> "WarpTile":
        """The inverse of `str`; without a word for the share, `rows`."""
        match = _SPELLING.fullmatch(text.strip())
        if match is None:
            raise ProblemError(f"'{text}' is no tile of warp_split; examples: '64x64 w4 s2 rows', '64x64 w4 s2 columns'")
        block_m, block_n, warps, stages = (int(match[i]) for i in (1, 2, 3, 4))
        return cls(block_m, block_n, warps, stages, False, match[5] or "rows")


def _refuses(problem: Problem, device: Device, direction: str) -> Optional[str]:
    if device.kind != "cuda":
        return f"runs on a GPU; the tensors are on {device.kind}"
    if reason := portable.refuses(problem, device, direction):
        return reason
    if direction != "forward":
        return "has a forward only"
    if not problem.windowed:
        return WINDOWS_ONLY
    if not problem.plain:
        return "takes plain scores: no soft-cap, ALiBi, sink, bias, mask or score_mod, and no dropout"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in fp16 and bf16, not {problem.dtype_name}"
    if max(problem.dim_qk, problem.dim_v) > MOST_DIM:
        return f"takes dims up to {MOST_DIM}, not {problem.dim_qk} and {problem.dim_v}"
    if problem.dim_qk % 8 or problem.dim_v % 8:
        return "rows are multiples of 16 bytes, which cp.async copies at once"
    return None


def _tiles(problem: Problem, device: Device, direction: str) -> tuple[tuple[Tile, ...], str]:
    dim = max(problem.dim_qk, problem.dim_v)
    tile = next(tile for largest, tile in _TILES.items() if dim <= largest)
    return (WarpTile.parse(tile),), f"{ALONE}; compiles without spills, untimed"


def shared_bytes(tile: WarpTile, dim: int, dim_v: int) -> int:
    """Of padded dims; the compiler takes up to 1 KB more, for the maxima and sums of rows."""
    buffers = 2 * (tile.block_m * dim + tile.stages * tile.block_n * (dim + dim_v))
    return buffers + (tile.groups > 1) * 4 * tile.groups * tile.block_m * dim_v


def registers(tile: WarpTile, dim: int, dim_v: int) -> int:
    """Of a thread, for O and scores. `columns` holds all groups' part of O and, elsewhere, the sum."""
    parts = {"rows": 1.0, "columns": tile.groups + 1.0, "late": float(tile.groups)}[tile.share]
    return int(tile.block_m * dim_v * parts + tile.block_m * tile.block_n) // (32 * tile.warps)


def misfit(problem: Problem, device: Device, tile: Tile) -> Optional[str]:
    """Why this is no tile that runs the problem, or None."""
    if not isinstance(tile, WarpTile):
        return f"{tile} is no tile of warp_split"
    if any(side not in (16, 32, 64, 128) for side in (tile.block_m, tile.block_n)) or tile.warps not in (1, 2, 4, 8):
        return "block sizes are powers of two from 16 to 128, warps 1 to 8"
    if not 2 <= tile.stages <= 4:
        return "stages are 2 to 4"
    if tile.share == "rows" and tile.block_m < ROW * tile.warps:
        return f"a warp takes at least {ROW} rows; {tile.warps} warps share {tile.block_m}"
    if tile.share != "rows" and tile.block_n < COLUMN * tile.warps:
        return f"a warp takes at least {COLUMN} columns; {tile.warps} warps share {tile.block_n}"
    return None


WARP_SPLIT = Candidate(_refuses, _tiles)
