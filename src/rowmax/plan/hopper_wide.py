"""The tiles of the backward for head dimensions above 128 on NVIDIA Hopper (`kernels/gluon/backward_wide_*.py`)."""

import re
from dataclasses import dataclass
from typing import Optional

from rowmax.device import Device
from rowmax.errors import ProblemError
from rowmax.plan.tile import Tile
from rowmax.problem import Problem

KEYS = 64  # of a tile, in both kernels
QUERIES = 64  # of a tile of the dK/dV kernel
ROWS = 128  # of a tile of the dQ kernel: two consumers of 64
SHARED_BYTES = 232_448  # that a block may take
BARRIERS = 1024  # bytes, of these and of a few numbers, and more than are needed
MARK = "wide"
_TILE = "128x64 s2 wide g16"
_SPELLING = re.compile(rf"{ROWS}x{KEYS} s([0-9]) {MARK}(?: g([0-9]{{1,4}}))?")


@dataclass(frozen=True)
class HopperWideTile(Tile):
    """A tile of the dQ kernel; that of the dK/dV kernel is always 64x64.

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
        return cls(ROWS, KEYS, 4, int(match[1]), False, int(match[2] or 0))


def padded_dims(problem: Problem) -> tuple[int, int]:
    """Head dimensions in shared memory, zero-filled: of Q and K, and of V.

    >>> padded_dims(Problem.parse("b1 h1 q1 d192/128 bf16"))
    (256, 128)
    """
    return 256, max(64, 1 << (problem.dim_v - 1).bit_length())


def value_stages(problem: Problem, tile: HopperWideTile) -> int:
    """V tiles in flight in the dQ kernel: as many as there is room for, at most as K tiles."""
    block_d, block_dv = padded_dims(problem)
    left = SHARED_BYTES - BARRIERS - 2 * (ROWS * (block_d + block_dv) + tile.stages * KEYS * block_d)
    return min(left // (2 * KEYS * block_dv), tile.stages)


def shared_bytes(problem: Problem, tile: HopperWideTile) -> tuple[int, int]:
    """Shared memory of a block of the dK/dV and of the dQ kernel, but for what `BARRIERS` covers."""
    block_d, block_dv = padded_dims(problem)
    slopes = 4 * problem.group if problem.alibi else 0
    keys = 2 * (KEYS + tile.stages * QUERIES) * (block_d + block_dv) + tile.stages * (8 * QUERIES + 4 * KEYS * QUERIES)
    queries = 2 * ROWS * (block_d + block_dv) + 2 * KEYS * (tile.stages * block_d + value_stages(problem, tile) * block_dv)
    return keys + slopes + BARRIERS, queries + BARRIERS


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
    if problem.pairs:
        return "its backward computes biases and masks up to 128 dimensions only"
    reason = misfit(problem, HopperWideTile.parse(_TILE))
    return f"its backward {reason}" if reason else None


def tiles(problem: Problem, device: Device) -> tuple[HopperWideTile, str]:
    return HopperWideTile.parse(_TILE), "d256 at 16k tokens on an H200: 518 / 529 TFLOP/s full / causal"


def grid(problem: Problem) -> list[HopperWideTile]:
    """Every tile that fits."""
    made = (HopperWideTile(ROWS, KEYS, 4, 2, False, group_mb) for group_mb in (0, 8, 16, 32))
    return [tile for tile in made if not misfit(problem, tile)]
