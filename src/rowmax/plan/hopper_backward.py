"""The tiles of the backward for NVIDIA Hopper in Gluon (`kernels/gluon/backward.py`), and what it takes."""

import re
from dataclasses import dataclass
from itertools import product
from typing import Optional

from rowmax.mask import Band
from rowmax.plan.tile import Tile
from rowmax.problem import Problem

KEYS = 64  # of a consumer
SHARED_BYTES = 232_448  # that a block may take
BARRIERS = 1024  # bytes, and more than are needed
MARK = "backward"
WORDS = ("ahead", "apart", "held")


@dataclass(frozen=True)
class HopperBackwardTile(Tile):
    """Queries and keys of a tile; keys are shared out to two consumers.

    Attributes:
        stages: Q and dO tiles in flight.
        ahead: S of the next turn is multiplied in this one.
        apart: a warpgroup of its own multiplies dQ; for head dimensions up to 64.
        held: K and V stay in the consumers' registers; with `apart` only, as there is no room otherwise.
        group_mb: heads are computed in groups whose Q, dO and dQ take this much of the L2 cache; 0: one after another.
    """

    ahead: bool = False
    apart: bool = False
    held: bool = False
    group_mb: int = 0

    def registers(self) -> tuple[int, int, int]:
        """Of a thread of a consumer, of those that add up dQ and of the producer, whose warp counts as four."""
        return (200, 80, 32) if self.apart else (240, 0, 24)

    def __str__(self) -> str:
        words = [MARK, *(word for word in WORDS if getattr(self, word))]
        return " ".join(
            [f"{self.block_m}x{self.block_n}", f"s{self.stages}", *words, *[f"g{self.group_mb}"] * (self.group_mb > 0)]
        )

    @classmethod
    def parse(cls, text: str) -> "HopperBackwardTile":
        """The inverse of `str`: `64x128 s2 backward ahead g16`; "backward" tells it from a tile of the forward."""
        size, *words = text.split()
        block_m, block_n = map(int, size.split("x"))
        number = {word[0]: int(word[1:]) for word in words if re.fullmatch(r"[sg]\d+", word)}
        unknown = [word for word in words if not re.fullmatch(r"[sg]\d+", word) and word not in (MARK, *WORDS)]
        if unknown or block_m not in (64, 128) or block_n != 2 * KEYS:
            raise ValueError(
                f"'{text}' is no tile of this kernel; an example: '64x128 s2 backward ahead g16': 64 or 128 queries, "
                f"{2 * KEYS} keys, and of {', '.join(WORDS)} any"
            )
        switches = {word: word in words for word in WORDS}
        return cls(block_m, block_n, 4, number.get("s", 2), False, **switches, group_mb=number.get("g", 0))


# Largest padded head dimension -> tile for a full mask or a window, and for a causal one.
_TABLE = {64: ("64x128 s2 apart held g16", "64x128 s2 apart held g16"), 128: ("64x128 s2 ahead g16", "64x128 s2 ahead g16")}


def padded_dims(problem: Problem) -> tuple[int, int]:
    """Head dimensions in shared memory, zero-filled: of Q and K, and of V.

    That of Q and K is not the smaller one: with 64 and 128 registers spill.

    >>> padded_dims(Problem.parse("b1 h1 q1 d40/96 bf16"))
    (128, 128)
    """
    block_d, block_dv = (max(64, 1 << (dim - 1).bit_length()) for dim in (problem.dim_qk, problem.dim_v))
    return max(block_d, block_dv), block_dv


def shared_bytes(problem: Problem, tile: HopperBackwardTile) -> int:
    """Shared memory of a block, but for the barriers' few hundred bytes, which `BARRIERS` covers."""
    block_d, block_dv = padded_dims(problem)
    rows = tile.stages * tile.block_m
    sums = (1 if tile.apart else tile.block_n // KEYS) * 64 * 64 * 4
    shares = 2 * tile.block_n * tile.block_m * 2
    return 2 * (rows + tile.block_n) * (block_d + block_dv) + 8 * rows + sums + shares + BARRIERS


def misfit(problem: Problem, tile: HopperBackwardTile) -> Optional[str]:
    """Why the kernel has no such build for these head dimensions."""
    block_d = padded_dims(problem)[0]
    parts = tile.block_m * block_d // 4096  # of dQ, 64x64 each: one for each of those that multiply them
    if parts != (1 if tile.apart else tile.block_n // KEYS):
        return f"'{tile}' does not divide dQ for head dimension {problem.dim_qk} (padded to {block_d})"
    if tile.held and not tile.apart:
        return f"'{tile}' needs more registers than there are: K and V are held with 'apart' only"
    bytes_ = shared_bytes(problem, tile)
    return f"'{tile}' takes {bytes_} bytes of shared memory of {SHARED_BYTES}" if bytes_ > SHARED_BYTES else None


def grid(problem: Problem) -> list[HopperBackwardTile]:
    """Every tile that fits."""
    switches = [dict(zip(WORDS, values, strict=True)) for values in product((False, True), repeat=len(WORDS))]
    sizes = [(block_m, stages, group_mb) for block_m in (64, 128) for stages in (2, 3) for group_mb in (0, 4, 8, 16, 32)]
    made = (
        HopperBackwardTile(block_m, 2 * KEYS, 4, stages, **words, group_mb=group_mb)
        for (block_m, stages, group_mb), words in product(sizes, switches)
    )
    return [tile for tile in made if not misfit(problem, tile)]


def refuses(problem: Problem) -> Optional[str]:
    """What `hopper.refuses` does not say already: device, dtype, dims of 16 bytes and Triton are as for the forward."""
    if problem.deterministic:
        return "adds up dQ in no fixed order, and the call is deterministic"
    if max(problem.dim_qk, problem.dim_v) > 128:
        return (
            f"takes head dimensions up to 128, not {problem.dim_qk} and {problem.dim_v}: dK and dV would not fit into registers"
        )
    return None


def tiles(problem: Problem) -> tuple[HopperBackwardTile, str]:
    text = _TABLE[padded_dims(problem)[0]][problem.band == Band(None, 0)]
    return HopperBackwardTile.parse(text), "not yet measured"
