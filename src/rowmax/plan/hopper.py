"""`hopper`, for NVIDIA Hopper in Gluon: warps that fetch and warps that compute (`kernels/gluon/forward.py`).

Its backwards have tiles of their own: `hopper_backward.py` for head dimensions up to 128, `hopper_wide.py` above.

Measured on an H200 with triton 3.6.0, bf16, beside FlashAttention-3: `benchmarks/results/`.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from typing import Any, Optional

import torch

from rowmax.device import Device
from rowmax.errors import ProblemError
from rowmax.mask import Band
from rowmax.numerics import LOG2E
from rowmax.plan import hopper_backward, hopper_wide
from rowmax.plan.hopper_backward import HopperBackwardTile, given_letters, number_bytes
from rowmax.plan.hopper_wide import HopperWideTile
from rowmax.plan.tile import Tile
from rowmax.problem import Problem

ROWS = 64  # of a consumer
SHARED_BYTES = 232_448  # that a block may take
BARRIERS = 1024  # bytes, and more than are needed
MOST_DROPPED = 0x7C00  # of 2^15 draws: as fp16, infinity
LARGEST_CAP = 60.0  # of soft-caps that bound scores: weights relative to 0 are at most 2^87
LEAST_QUERIES = 384  # that make up for its longer begin
SCHEDULES = ("static", "dynamic")
_SPELLING = re.compile(
    r"([0-9]{1,4})x([0-9]{1,4})(?: +s([0-9]{1,2}))?(?: +q([0-9]{1,2}))?"
    rf"( +pingpong)?(?: +(lazy|steady))?(?: +({'|'.join(SCHEDULES)}))?(?: +g([0-9]{{1,4}}))?"
)
# A word of theirs -> the kind.
BACKWARD_TILES: dict[str, Any] = {hopper_backward.MARK: HopperBackwardTile, hopper_wide.MARK: HopperWideTile}
_CAP_FACTORS = 2.0**-11, 2.0**11
UNALIGNED = "TMA takes rows that start at multiples of 16 bytes, and no broadcast tensors"


@dataclass(frozen=True)
class HopperTile(Tile):
    """A `Tile` whose rows are shared out to consumers of 64 rows each.

    Attributes:
        stages: K/V tiles in flight.
        q_stages: Q tiles in flight; with 2 the next one is fetched while this one is computed.
        pingpong: consumers issue their products in turn.
        lazy: the accumulator is scaled only where a maximum has grown by 2^8 and more.
        steady: lazy, and where `steady_for` lets it no maxima are taken but in the first key tile of a row: what weights are
            relative to grows once their sum is above 2^24 (`kernels/gluon/softmax.py`).
        schedule: "static", block i of n takes every n-th tile; "dynamic", blocks take the next one.
        group_mb: heads are computed in groups whose K/V take this much of the L2 cache; 0: one head after another.
    """

    q_stages: int = 1
    pingpong: bool = False
    lazy: bool = False
    steady: bool = False
    schedule: str = "static"
    group_mb: int = 0

    @property
    def consumers(self) -> int:
        return self.block_m // ROWS

    def registers(self) -> tuple[int, int]:
        """Of a thread of a consumer and of the producer, whose warp counts as four; together at most 65,536 in a block."""
        return (160, 32) if self.consumers == 3 else (232, 40)

    def __str__(self) -> str:
        words = [
            f"{self.block_m}x{self.block_n}",
            f"s{self.stages}",
            f"q{self.q_stages}",
            *["pingpong"] * self.pingpong,
            *["steady" if self.steady else "lazy"] * self.lazy,
        ]
        return " ".join([*words, self.schedule, *[f"g{self.group_mb}"] * (self.group_mb > 0)])

    @classmethod
    def parse(cls, text: str) -> "HopperTile":
        """The inverse of `str`: `128x128 s2 q1 pingpong static g32`."""
        match = _SPELLING.fullmatch(text.strip())
        block_m, block_n = (int(match[1]), int(match[2])) if match else (0, 0)
        if match is None or block_m not in (64, 128, 192) or block_n < 16 or block_n & (block_n - 1):
            raise ProblemError(
                f"'{text}' is no tile of this kernel; an example: '128x128 s2 q1 pingpong static g32': 64, 128 or 192 rows, "
                f"a power of two of columns, and of {', '.join(SCHEDULES)} one; words in this order, each once"
            )
        stages, q_stages, group_mb = int(match[3] or 2), int(match[4] or 1), int(match[8] or 0)
        if stages < 2 or not 1 <= q_stages <= 2:  # with one stage the next K would wait for V, and V for the step that needs K
            raise ProblemError(f"'{text}': stages are 2 and more, those of Q 1 or 2")
        pingpong, lazy, steady, schedule = (
            match[5] is not None,
            match[6] is not None,
            match[6] == "steady",
            match[7] or "static",
        )
        return cls(block_m, block_n, 4, stages, False, q_stages, pingpong, lazy, steady, schedule, group_mb)


# Largest padded head dimension -> tile for a full mask or a window, and for a causal one, and what they reached (TFLOP/s, bf16,
# 16k tokens, full / causal; FlashAttention-3 in the same run: 544 / 527, 692 / 693, 750 / 746).
_TABLE = {
    # 2 x 64 rows, 3 or 4 stages: 448 / 452.
    64: ("192x128 s3 q2 lazy dynamic", "192x128 s3 q2 pingpong lazy dynamic g16", "573 / 574"),
    # Causal, groups of 16 MB: 661 where those of 8 gave 669; of 24: 636. Without pingpong 2% less at 2k keys.
    128: ("128x128 s2 q2 pingpong lazy static", "128x128 s2 q2 pingpong lazy dynamic g8", "728 / 732"),
    192: ("128x128 s2 q1 pingpong lazy static", "128x128 s2 q1 pingpong lazy dynamic g16", ""),
    # Causal, groups of 64 MB without pingpong: as good at 16k keys, 2% less at 2k, 12% at 512.
    256: ("128x64 s2 q1 lazy static", "128x64 s2 q1 pingpong lazy dynamic g32", "759 / 741"),
}
# Beside a bias or a mask, of up to 16 bits, and of 32: its tiles take the room of the second Q, and with three consumers there
# are no registers for it. One that all queries share is a line: but for those registers (and d256 with a soft-cap, which would
# spill) tiles are as without it.
_TABLE_PAIRS = {
    64: ("128x128 s3 q2 pingpong lazy dynamic g16", "128x128 s2 q2 pingpong lazy dynamic g16"),
    128: ("128x128 s2 q1 pingpong lazy dynamic g8", "128x64 s3 q1 pingpong lazy dynamic g8"),
    192: ("128x64 s3 q1 pingpong lazy dynamic g16", "128x64 s2 q1 pingpong lazy dynamic g16"),
    256: ("128x32 s3 q1 pingpong lazy dynamic g32", "128x32 s2 q1 pingpong lazy dynamic g32"),
}
# Where weights are dropped, and times over a call without dropout (H200, 16 heads, causal; d64 16k tokens, d256 8k):
# d64: 1.730; 192x128 without pingpong, whose three consumers spill: 1.894; 128x128 without: 1.903; 192x64 without: 1.969.
# d256: 1.386; with pingpong 1.467; both with three spills in a loop.
# d128, as without dropout: 1.537 at 16k; without pingpong 1.524, which was not timed without a mask; 128x64 s3 without: 1.841.
_DROPS_64, _DROPS_256 = "128x128 s3 q2 pingpong lazy dynamic g16", "128x64 s2 q1 lazy dynamic g32"
# Up to this many keys, a causal mask leaves too little of a row tile of 192: with 512 keys 253 instead of 215.
_SHORT, _SHORT_64 = 1024, "128x128 s4 q2 pingpong lazy dynamic g16"
# And K and V of a group of 256 dimensions are used too few times to be kept for more heads: with 512 keys 326 instead of 319.
_SHORT_256 = "128x64 s2 q1 pingpong lazy dynamic g8"


@lru_cache(maxsize=1)
def triton_version() -> str:
    """Its version, without importing it; "" if it is not installed."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def refuses(problem: Problem, device: Device, direction: str) -> Optional[str]:
    if device.kind != "cuda":
        return f"runs on a GPU; the tensors are on {device.kind}"
    if device.capability != (9, 0):
        return f"needs compute capability 9.0; {device.name} has {device.capability[0]}.{device.capability[1]}"
    if problem.score_mod:
        return "computes soft-caps, ALiBi, sink logits, a bias, a mask and dropout, but no score_mod"
    if problem.dropout and problem.pairs and direction == "forward":
        return "computes no dropout beside a bias or a mask"
    if problem.drop_below > MOST_DROPPED:
        return f"compares draws of dropout as fp16, up to {MOST_DROPPED / 2**15}; {problem.dropout:g} is more"
    if problem.pairs and (reason := _refuses_pairs(problem)):
        return reason
    if problem.softcap and not _CAP_FACTORS[0] <= cap_factor(problem)[1] <= _CAP_FACTORS[1]:
        return f"takes soft-caps whose polynomial is in the range of fp32, up to about 1000; {problem.softcap:g} is not"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"takes fp16 and bf16, not {problem.dtype_name}"
    if problem.dim_qk % 8 or problem.dim_v % 8:
        return f"TMA takes rows that are multiples of 16 bytes; dims {problem.dim_qk} and {problem.dim_v} are not"
    version = triton_version()
    if version and tuple(map(int, re.findall(r"\d+", version)[:2])) < (3, 6):
        return f"needs Triton 3.6 or newer with Gluon; here is {version}"
    if direction != "backward":
        return None
    if problem.softcap and (problem.alibi or problem.pairs):
        return "its backward computes a soft-cap without ALiBi, biases and masks only"
    if problem.dropout and backward_of(problem) is hopper_wide:
        return f"its backward computes dropout up to {hopper_backward.LARGEST} dimensions only"
    return backward_of(problem).refuses(problem)


def _refuses_pairs(problem: Problem) -> Optional[str]:
    names = [word for word in ("bias", "mask") if getattr(problem, word)]
    if len(names) > 1:
        return "takes a bias or a mask, not both"
    (name,) = names
    if "k" not in given_letters(problem):
        return f"takes a {name} whose last dimension is that of the keys; this one has a number for all of them"
    return None


def unaligned_pairs(problem: Problem, aligned: Optional[bool]) -> Optional[str]:
    """Why TMA does not take the rows of a bias or a mask. `aligned`: they are; None: they are contiguous."""
    if aligned is None:
        aligned = given_letters(problem) in ("", "k") or problem.len_k * number_bytes(problem) % 16 == 0
    if aligned or not problem.pairs:
        return None
    name, least = "bias" if problem.bias else "mask", 16 // number_bytes(problem)
    return (
        f"TMA takes a {name} whose rows start at multiples of 16 bytes and whose keys are neighbours: allocate rows of a "
        f"multiple of {least} numbers, and pass a slice of the first {problem.len_k}"
    )


def given_stages(problem: Problem, tile: HopperTile) -> int:
    """Tiles of a bias or a mask in flight for each consumer: two where there is room."""
    return 2 if _shared_bytes(problem, tile, out_columns(problem, tile), 2) <= SHARED_BYTES else 1


def cap_factor(problem: Problem) -> tuple[bool, float]:
    """`(scaled, factor)`: by what scores are multiplied to be the argument of a soft-cap's tanh, raw or `scaled` to log2 units.

    The coefficients of its polynomial are powers of the factor, up to the 8th, times the scale if that is not applied before.
    """
    factor = problem.scale / problem.softcap
    if 1e-4 <= problem.scale <= 1e4 and _CAP_FACTORS[0] <= factor <= _CAP_FACTORS[1]:
        return False, factor
    return True, 1.0 / (problem.softcap * LOG2E)


def backward_of(problem: Problem) -> Any:
    """The module that decides for its backward."""
    return hopper_wide if max(problem.dim_qk, problem.dim_v) > hopper_backward.LARGEST else hopper_backward


def passes_over(problem: Problem) -> Optional[str]:
    """Why, though it runs the problem, another is taken unless this one is asked for.

    With 1, 64, 128 and 256 queries a sequence `q_outer` took 0.71 to 0.88 of the time on an H200, with 2048 1.35 times as much.
    """
    queries = problem.len_q if not problem.packed else problem.len_q // max(problem.batch, 1)
    return f"with fewer than {LEAST_QUERIES} queries a sequence q_outer is faster" if queries < LEAST_QUERIES else None


def steady_for(problem: Problem, banded: bool = False) -> bool:
    """Whether maxima need not be taken in every key tile: bf16 has the range of fp32, fp16 ends at 65504.

    `banded`: behind the first key tile some keys are hidden from some rows. Then what a row sees first is looked for there,
    which takes registers that beside ALiBi there are not. Where a mask or a bias hides keys, it would be looked for everywhere.
    """
    bounded = problem.softcap <= LARGEST_CAP or bool(problem.alibi)  # or 0: there is none
    return problem.dtype == torch.bfloat16 and not problem.pairs and not (banded and problem.alibi) and bounded


def padded_dims(problem: Problem) -> tuple[int, int, int]:
    """Head dimensions in shared memory, zero-filled, all powers of two: of Q and K in one or two parts (or 0), and of V.

    >>> padded_dims(Problem.parse("b1 h1 q1 d192/128 bf16"))
    (128, 64, 128)
    """
    block_d, block_dv = (max(64, 1 << (dim - 1).bit_length()) for dim in (problem.dim_qk, problem.dim_v))
    rest = problem.dim_qk - block_d // 2
    if block_d > 64 and rest <= block_d // 4:
        return block_d // 2, max(16, 1 << (rest - 1).bit_length()), block_dv
    return block_d, 0, block_dv


def out_columns(problem: Problem, tile: HopperTile) -> int:
    """Columns of O that a consumer hands to TMA at once: all or half, at most 128, and no more than there is room for."""
    most = min(padded_dims(problem)[2], 128)
    return most if most <= 64 or _shared_bytes(problem, tile, most) <= SHARED_BYTES else most // 2


def shared_bytes(problem: Problem, tile: HopperTile) -> int:
    """Shared memory of a block, but for the barriers' few hundred bytes, which `BARRIERS` covers."""
    return _shared_bytes(problem, tile, out_columns(problem, tile), given_stages(problem, tile))


def _shared_bytes(problem: Problem, tile: HopperTile, columns: int, given: int = 1) -> int:
    """`columns` of O; `given`: tiles of a bias or a mask."""
    first, second, dim_v = padded_dims(problem)
    keys = tile.stages * tile.block_n * (first + second + dim_v)
    pairs = 0
    if problem.pairs:
        rows = tile.block_m if "q" in given_letters(problem) else tile.consumers
        pairs = given * max(rows * tile.block_n * number_bytes(problem), tile.consumers * 128)
    return 2 * (tile.q_stages * tile.block_m * (first + second) + keys + tile.block_m * columns) + pairs + BARRIERS


def _tile(text: str, problem: Problem) -> HopperTile:
    """Of a table, `steady` where it may be."""
    tile = HopperTile.parse(text)
    return replace(tile, steady=tile.lazy and steady_for(problem))


def tiles(problem: Problem, device: Device, direction: str) -> tuple[tuple[Tile, ...], str]:
    if direction == "backward":
        tile, why = backward_of(problem).tiles(problem, device)
        return (tile,), why
    first, second, block_dv = padded_dims(problem)
    size = max(first + second, block_dv)
    *tiles_of_row, reached = next(row for largest, row in _TABLE.items() if size <= largest)
    causal = problem.band[:2] == Band(None, 0)
    if problem.pairs:
        line = 64 < size <= (192 if problem.softcap else 256) and "q" not in given_letters(problem)
        beside = next(row for largest, row in _TABLE_PAIRS.items() if size <= largest)
        tile = _tile(tiles_of_row[causal] if line else beside["," in problem.bias], problem)
        return (tile,), f"beside a {'bias' if problem.bias else 'mask'}; of these tiles that of d128 was measured"
    if problem.dropout and size == 64:
        return (_tile(_DROPS_64, problem),), "draws take registers that three consumers lack: 1.75 times the plain call"
    if problem.dropout and size == 256 and causal:
        return (_tile(_DROPS_256, problem),), "with draws, turns cost 6%: 1.41 times the plain call without them"
    if causal and size == 64 and problem.len_k <= _SHORT and not problem.packed:
        return (_tile(_SHORT_64, problem),), "few keys leave too little of a row tile of 192"
    if causal and size == 256 and problem.len_k <= _SHORT and not problem.packed:
        return (_tile(_SHORT_256, problem),), "with 512 keys, 326 TFLOP/s on an H200 where groups of 32 MB make 319"
    why = f"d{size} at 16k tokens on an H200: {reached} TFLOP/s full / causal" if reached else "as for d128, not measured"
    return (_tile(tiles_of_row[causal], problem),), why
