"""The tiles of the backward for head dimensions above 128 on NVIDIA Hopper (`kernels/gluon/backward_wide_*.py`)."""

import re
from dataclasses import dataclass, replace
from typing import Optional

from rowmax.device import Device
from rowmax.errors import ProblemError
from rowmax.mask import early_keys
from rowmax.plan.hopper_backward import EARLY_MB, given_letters, number_bytes
from rowmax.plan.tile import Tile
from rowmax.problem import Problem

KEYS = 64  # of a tile
FEWER_KEYS = 32  # of a tile of the dQ kernel, where what is given for pairs takes the room
QUERIES = 64  # of a tile of the dK/dV kernel
ROWS = 128  # of a tile of the dQ kernel: two consumers of 64
SHARED_BYTES = 232_448  # that a block may take
BARRIERS = 1024  # bytes, of these and of a few numbers, and more than are needed
MARK = "wide"
_TILE = "128x64 s2 wide g16"
_SPELLING = re.compile(rf"{ROWS}x({KEYS}|{FEWER_KEYS}) s([0-9]) {MARK}(?: g([0-9]{{1,4}}))?")


@dataclass(frozen=True)
class HopperWideTile(Tile):
    """A tile of the dQ kernel, of 64 keys or of 32; that of the dK/dV kernel is always 64x64.

    Attributes:
        stages: Q and dO tiles in flight, and K and V tiles there as far as they fit.
        group_mb: heads are computed in groups whose operands take this much of the L2 cache; 0: one after another.
    """

    group_mb: int = 0

    def registers(self) -> tuple[int, int]:
        """Of a thread of a consumer and of the producer, whose warp counts as four."""
        return 240, 24

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} s{self.stages} {MARK}" + f" g{self.group_mb}" * (self.group_mb > 0)

    @classmethod
    def parse(cls, text: str) -> "HopperWideTile":
        """The inverse of `str`: `128x64 s2 wide g16`; "wide" tells it from other tiles."""
        match = _SPELLING.fullmatch(text.strip())
        if match is None:
            raise ProblemError(f"'{text}' is no tile of the wide Hopper backward; an example: '{ROWS}x{KEYS} s2 {MARK} g16'")
        return cls(ROWS, int(match[1]), 4, int(match[2]), False, int(match[3] or 0))


def padded_dims(problem: Problem) -> tuple[int, int]:
    """Head dimensions in shared memory, zero-filled: of Q and K, and of V.

    >>> padded_dims(Problem.parse("b1 h1 q1 d192/128 bf16"))
    (256, 128)
    """
    return 256, max(64, 1 << (problem.dim_v - 1).bit_length())


def value_stages(problem: Problem, tile: HopperWideTile) -> int:
    """V tiles in flight in the dQ kernel: as many as there is room for, at most as K tiles."""
    block_d, block_dv = padded_dims(problem)
    left = SHARED_BYTES - BARRIERS - 2 * (ROWS * (block_d + block_dv) + tile.stages * tile.block_n * block_d)
    return min(left // (2 * tile.block_n * block_dv), tile.stages)


def given_bytes(problem: Problem, tile: HopperWideTile) -> tuple[int, int]:
    """Of a bias or a mask, a tile of the dK/dV kernel, and two of the dQ kernel; or 0. TMA writes to multiples of 128 bytes."""
    if not problem.pairs:
        return 0, 0
    row = (QUERIES if "q" in given_letters(problem) else 1) * number_bytes(problem)
    return max(row * KEYS, 128), 2 * max(row * tile.block_n, 128)


def shares(problem: Problem, tile: HopperWideTile) -> int:
    """Turns whose P are in shared memory in the dK/dV kernel: as Q tiles, or one where a bias or a mask takes the room."""
    fits = _key_bytes(problem, tile, tile.stages) + given_bytes(problem, tile)[0] <= SHARED_BYTES
    return tile.stages if fits or not problem.pairs else 1


def given_stages(problem: Problem, tile: HopperWideTile) -> tuple[int, int]:
    """Tiles of a bias or a mask in flight in the two kernels: two where there is room."""
    keys, queries = given_bytes(problem, tile)
    left = SHARED_BYTES - _key_bytes(problem, tile, shares(problem, tile)), SHARED_BYTES - _query_bytes(problem, tile)
    return 1 + (2 * keys <= left[0]), 1 + (2 * queries <= left[1])


def shared_bytes(problem: Problem, tile: HopperWideTile) -> tuple[int, int]:
    """Shared memory of a block of the dK/dV and of the dQ kernel, of which barriers and a few numbers take `BARRIERS`."""
    stages, given = given_stages(problem, tile), given_bytes(problem, tile)
    keys = _key_bytes(problem, tile, shares(problem, tile)) + stages[0] * given[0]
    return keys, _query_bytes(problem, tile) + stages[1] * given[1]


def _key_bytes(problem: Problem, tile: HopperWideTile, places: int) -> int:
    """Without what is given for pairs. `places` of P."""
    block_d, block_dv = padded_dims(problem)
    slopes = 4 * problem.group if problem.alibi else 0
    tiles_of_both = 2 * (KEYS + tile.stages * QUERIES) * (block_d + block_dv)
    return tiles_of_both + tile.stages * 8 * QUERIES + places * 4 * KEYS * QUERIES + slopes + BARRIERS


def _query_bytes(problem: Problem, tile: HopperWideTile) -> int:
    block_d, block_dv = padded_dims(problem)
    keys = tile.block_n * (tile.stages * block_d + value_stages(problem, tile) * block_dv)
    return 2 * ROWS * (block_d + block_dv) + 2 * keys + BARRIERS


def misfit(problem: Problem, tile: HopperWideTile) -> Optional[str]:
    """Why the kernels have no such build for these head dimensions."""
    if tile.stages < 2:
        return f"'{tile}': a turn reads two Q tiles and two K tiles, so that stages are at least 2"
    bytes_ = max(shared_bytes(problem, tile))
    if bytes_ > SHARED_BYTES or value_stages(problem, tile) < 1:
        return f"'{tile}' takes {bytes_} bytes of shared memory of {SHARED_BYTES}"
    return None


def refuses(problem: Problem) -> Optional[str]:
    """What `hopper.refuses` does not say already: device, dtype, dims of 16 bytes and Triton are as for the forward."""
    most = max(problem.dim_qk, problem.dim_v)
    if not 128 < most <= 256:
        return f"takes head dimensions above 128 and up to 256, not {problem.dim_qk} and {problem.dim_v}"
    reason = misfit(problem, _tile(problem))
    return f"its backward {reason}" if reason else None


def _tile(problem: Problem) -> HopperWideTile:
    """With 32 keys shared memory takes longer for S and dP than the tensor cores: only where 64 leave too little room."""
    tile = HopperWideTile.parse(_TILE)
    if early_keys(problem.band):
        tile = replace(tile, group_mb=EARLY_MB)
    return tile if misfit(problem, tile) is None or not problem.pairs else replace(tile, block_n=FEWER_KEYS)


def tiles(problem: Problem, device: Device) -> tuple[HopperWideTile, str]:
    why = "d256 at 16k tokens on an H200: 539 / 538 TFLOP/s full / causal"
    return _tile(problem), why if problem.plain else f"{why}, of a plain call; what bends or hides scores was not timed"


def grid(problem: Problem) -> list[HopperWideTile]:
    """Every tile that fits."""
    made = (replace(_tile(problem), group_mb=group_mb) for group_mb in (0, 8, 16, 32))
    return [tile for tile in made if not misfit(problem, tile)]
