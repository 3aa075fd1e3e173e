"""The tiles of the backward for NVIDIA Hopper in Gluon (`kernels/gluon/backward.py`), and what it takes."""

import re
from dataclasses import dataclass, replace
from itertools import product
from typing import Optional

from rowmax.device import Device
from rowmax.errors import ProblemError
from rowmax.mask import Band, early_keys
from rowmax.plan.tile import Tile
from rowmax.problem import Problem

KEYS = 64  # of a consumer
SHARED_BYTES = 232_448  # that a block may take
BARRIERS = 896  # bytes, of these and of a few numbers, and more than are needed
LARGEST = 128  # head dimension: dK and dV of 64 keys stay in the registers of a consumer
_EVEN, _UNEVEN = 0.9, 1.75  # blocks for each SM below which the query heads of a KV head get blocks of their own
MARK = "backward"  # tells its tiles from those of the forward
_SPELLING = re.compile(
    rf"([0-9]{{1,4}})x([0-9]{{1,4}})(?: +s([0-9]{{1,2}}))? +{MARK}(?: +g([0-9]{{1,4}}))?(?: +p([0-9]{{1,4}}))?( +ordered)?"
)


@dataclass(frozen=True)
class HopperBackwardTile(Tile):
    """Queries and keys of a tile; keys are shared out to two consumers.

    Attributes:
        stages: Q and dO tiles in flight.
        group_mb: heads are computed in groups whose Q, dO and dQ take this much of the L2 cache; 0: one after another.
        parts: into which the query heads of a KV head are divided, each with blocks of its own; dK and dV are added up in fp32.
        ordered: key tiles add their shares of dQ one behind the other, so that the sum is bitwise repeatable.
    """

    group_mb: int = 0
    parts: int = 1
    ordered: bool = False

    def registers(self) -> tuple[int, int]:
        """Of a thread of a consumer and of the producer, whose warp counts as four; together at most 65,536 in a block."""
        return 240, 24

    def __str__(self) -> str:
        words = [f"{self.block_m}x{self.block_n}", f"s{self.stages}", MARK, *[f"g{self.group_mb}"] * (self.group_mb > 0)]
        return " ".join([*words, *[f"p{self.parts}"] * (self.parts > 1), *["ordered"] * self.ordered])

    @classmethod
    def parse(cls, text: str) -> "HopperBackwardTile":
        """The inverse of `str`: `64x128 s2 backward g16`. Says nothing about which of them run."""
        match = _SPELLING.fullmatch(text.strip())
        if match is None:
            raise ProblemError(f"'{text}' is no tile of the Hopper backward; an example: '64x128 s2 backward g16'")
        block_m, block_n, stages, group_mb, parts = (int(number or 0) for number in match.groups()[:5])
        ordered = match[6] is not None
        return cls(block_m, block_n, 4, stages or 2, group_mb=group_mb, parts=parts or 1, ordered=ordered)


# Largest padded head dimension -> the tile, and TFLOP/s at 16k tokens, full / causal (results/h200-2026-11-30-second.json).
# With 64 queries d64 made 489 / 476, where 128 made 536 / 518.
_TABLE = {64: ("128x128 s2 backward g16", "566 / 564"), 128: ("64x128 s2 backward g16", "635 / 627")}
# The same where dQ is added up in a fixed order -> L2 of a group in MB with a causal mask, and how fast, full / causal; of a
# size that is not here the portable kernels are (benchmarks/results/hopper-steps/ordered-h200-2026-11-30.json). d128, causal,
# groups of 16 and 32 MB: 384 and 390 TFLOP/s at 2k tokens, 521 and 535 at 16k, 518 and 527 at 8k with 32/8 heads. d64, full, 2k
# tokens, of 16, 32, 64 and 128 MB: 425, 424, 404, 324.
_IN_ORDER = {
    64: (16, "0.93 of its speed in any order, causal 0.84"),
    128: (32, "0.93 of its speed in any order, causal 0.90 and more"),
}

# L2 of a group in MB where a window's or chunk's left side hides no first keys: all heads together. The key tile of such keys
# walks over all later queries. With one head after another that of the last head begins when little else is left: reckoned in
# turns, 520 instead of 306 (16 heads, 16k tokens, d128, window (1023, 0), 64 first keys, 132 multiprocessors). Untimed.
EARLY_MB = 1024

# Tiles of a bias's gradient, whose kernel is `kernels/triton/bias.py`: of programs with one tile each, and of those that walk
# over many. One each, causal, d128, 16 heads, 16k tokens, on an H200: 64x32 w4 s2 tma 14.3 ms, 64x64 w4 s2 12.3, 128x64 w8 s2
# 14.2, 128x64 w4 s2 12.0, 64x128 w4 s2 11.6, though it keeps 37 numbers on the stack. In a walk these would be 221 to 340: the
# other tile keeps none there. Untimed.
_BIAS_TILE, _BIAS_WALK = Tile.parse("64x128 w4 s2"), Tile.parse("64x32 w4 s2 tma")
# Above 128 dimensions 64x128 keeps 336 bytes on the stack, 64x64 none; in a walk 64x32 keeps 232, this one 144. Untimed.
_WIDE_BIAS_TILE, _WIDE_BIAS_WALK = Tile.parse("64x64 w4 s2"), Tile.parse("128x32 w8 s3")


def bias_tile(problem: Problem) -> Tile:
    """Queries and keys of a program of the kernel of a bias's gradient.

    >>> str(bias_tile(Problem.parse("b1 h16 q4096 k4096 d64 bf16 bias(hqk)")))
    '64x128 w4 s2'
    """
    letters = problem.bias.partition(",")[0]
    walks = "q" not in letters or "k" not in letters or not ("b" in letters or problem.batch == 1)
    walks = walks or not ("h" in letters or problem.heads_q == 1)
    if max(problem.dim_qk, problem.dim_v) > LARGEST:
        return _WIDE_BIAS_WALK if walks else _WIDE_BIAS_TILE
    return _BIAS_WALK if walks else _BIAS_TILE


def padded_dims(problem: Problem) -> tuple[int, int]:
    """Head dimensions in shared memory, zero-filled: of Q and K, and of V.

    That of Q and K is not the smaller one: with 64 and 128 registers spill.

    >>> padded_dims(Problem.parse("b1 h1 q1 d40/96 bf16"))
    (128, 128)
    """
    block_d, block_dv = (max(64, 1 << (dim - 1).bit_length()) for dim in (problem.dim_qk, problem.dim_v))
    return max(block_d, block_dv), block_dv


def number_bytes(problem: Problem) -> int:
    """Of one number of a bias or a mask."""
    return (4 if "," in problem.bias else 2) if problem.bias else 1


def given_letters(problem: Problem) -> str:
    """Letters of what a bias or a mask is given for."""
    return (problem.bias or problem.mask).partition(",")[0]


def given_bytes(problem: Problem, tile: HopperBackwardTile) -> int:
    """Of a tile of a bias or of a mask, for both consumers, or 0. TMA writes to multiples of 128 bytes."""
    if not problem.pairs:
        return 0
    rows = tile.block_m if "q" in given_letters(problem) else 1
    return max(rows * tile.block_n * number_bytes(problem), tile.block_n // KEYS * 128)


def slots(problem: Problem, tile: HopperBackwardTile) -> int:
    """Turns whose dQ are in shared memory: where they are added up in order, two, if there is room."""
    return 2 if tile.ordered and _shared_bytes(problem, tile, 2) + given_bytes(problem, tile) <= SHARED_BYTES else 1


def given_stages(problem: Problem, tile: HopperBackwardTile) -> int:
    """Tiles of a bias or a mask in flight: two where there is room."""
    needs = _shared_bytes(problem, tile, slots(problem, tile)) + 2 * given_bytes(problem, tile)
    return 2 if needs <= SHARED_BYTES else 1


def shared_bytes(problem: Problem, tile: HopperBackwardTile) -> int:
    """Shared memory of a block, of which barriers and a few numbers take what `BARRIERS` covers."""
    given = given_stages(problem, tile) * given_bytes(problem, tile)
    return _shared_bytes(problem, tile, slots(problem, tile)) + given


def _shared_bytes(problem: Problem, tile: HopperBackwardTile, slots: int) -> int:
    """Without what is given for pairs."""
    block_d, block_dv = padded_dims(problem)
    slopes = 4 * (problem.group // tile.parts) if problem.alibi else 0
    rows = tile.stages * tile.block_m
    sums = tile.block_n // KEYS * 64 * 64 * 4 * slots
    shares = 2 * tile.block_n * tile.block_m * 2
    return 2 * (rows + tile.block_n) * (block_d + block_dv) + 8 * rows + sums + shares + slopes + BARRIERS


def misfit(problem: Problem, tile: HopperBackwardTile) -> Optional[str]:
    """Why the kernel has no such build for these head dimensions."""
    block_d = padded_dims(problem)[0]
    queries = 8192 // block_d  # dQ of a tile is two parts of 64 x 64, one for each consumer
    if (tile.block_m, tile.block_n) != (queries, 2 * KEYS):
        return f"for head dimensions padded to {block_d} a tile is {queries}x{2 * KEYS}"
    if not (2 <= tile.stages <= 8 and 0 <= tile.group_mb <= 1024):
        return "stages are 2 to 8, groups at most 1024 MB"
    if tile.parts < 1 or problem.group % tile.parts:
        return f"a group of {problem.group} query heads does not divide into {tile.parts} parts"
    if problem.deterministic and not tile.ordered:
        return "adds up dQ in no fixed order, and the call is deterministic: a tile for it ends with 'ordered'"
    needs = shared_bytes(problem, tile)
    return f"needs {needs:,} bytes of shared memory; a block may take {SHARED_BYTES:,}" if needs > SHARED_BYTES else None


def grid(problem: Problem) -> list[HopperBackwardTile]:
    """Every tile that fits."""
    block_m = 8192 // padded_dims(problem)[0]
    made = (
        HopperBackwardTile(block_m, 2 * KEYS, 4, stages, group_mb=group_mb, ordered=problem.deterministic)
        for stages, group_mb in product((2, 3), (0, 4, 8, 16, 32))
    )
    return [tile for tile in made if not misfit(problem, tile)]


def refuses(problem: Problem) -> Optional[str]:
    """What `hopper.refuses` does not say already: device, dtype, dims of 16 bytes and Triton are as for the forward."""
    size = padded_dims(problem)[0]
    if problem.deterministic and size not in _IN_ORDER:
        return f"its backward adds up dQ of d{size} in no fixed order, and the call is deterministic"
    reason = misfit(problem, replace(HopperBackwardTile.parse(_TABLE[size][0]), ordered=problem.deterministic))
    return f"its backward {reason}" if reason else None


def tiles(problem: Problem, device: Device) -> tuple[HopperBackwardTile, str]:
    size = padded_dims(problem)[0]
    text, reached = _TABLE[size]
    tile, parts = HopperBackwardTile.parse(text), 1
    blocks = -(-problem.len_k // tile.block_n) * problem.heads_k * (1 if problem.packed else problem.batch)
    # Blocks of one length need one for each SM. Of different lengths, about two, so that the long ones do not end alone.
    least = device.sms * (_EVEN if problem.band == Band(None, None) and not problem.packed else _UNEVEN)
    while blocks * parts < least and parts < problem.group:
        parts = next(more for more in range(parts + 1, problem.group + 1) if problem.group % more == 0)
    why = f"d{size} at 16k tokens on an H200: {reached} TFLOP/s full / causal"
    if problem.dropout:
        why += ", without dropout"
    if problem.deterministic:
        group_mb, share = _IN_ORDER[size]
        if problem.band[:2] == Band(None, 0):
            tile = replace(tile, group_mb=group_mb)
        why += "; dQ is added up in a fixed order, as the call is deterministic"
        why += f": {share}" if problem.plain else ", which was timed for plain scores alone"
    if early_keys(problem.band):
        tile = replace(tile, group_mb=EARLY_MB)
    return replace(tile, parts=parts, ordered=problem.deterministic), why
