"""`split_kv`: few queries and many keys, dense or in pages. The keys of a row tile are shared out among programs, whose partial
results a second kernel combines (split-KV decoding, "Flash-Decoding", Dao, Haziza, Massa, Sizov 2023). Portable Triton.

All query heads of a KV head are rows of one tile, so that K and V are read once. How the keys are shared out is in the tile:

    x8    each row tile has 8 parts; x1: one, and no second kernel
    p264  about 264 parts altogether: kernels take the parts from the lengths on the device, so that sequences of different
          lengths are parts of about one size
    c16   each part has 16 tiles of keys, counted from the first key, so that the result does not depend on what else there is
    r16   the same parts, but one program takes those of a row tile in turn: bitwise the same without memory for them

Not one number here was timed: chosen by count of programs and by what compiles without spills.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Optional

import torch

from rowmax.device import Device
from rowmax.errors import ProblemError
from rowmax.paged import PagedProblem
from rowmax.plan import portable
from rowmax.plan.tile import WINDOWS_ONLY, Tile
from rowmax.problem import Problem

MOST_ROWS = 64  # queries times heads of a group: with more, a tile of queries reuses keys as well as `q_outer` does
LEAST_KEYS = 256  # fewer are not worth a second kernel, nor a part of its own
MOST_SEQUENCES = 1024  # whose lengths a program looks through to find its part
MOST_PARTS = 128
INVARIANT_KEYS = 1024  # of a part of a batch-invariant call: in every call the same, or results would differ
MOST_BYTES = 2**28  # for partial results of a batch-invariant call
TURNS_TO_BEGIN = 2  # a part takes as long to begin and to end as this many tiles of keys
MOST_DIM, MOST_DIM_V = 576, 512
_SPELLING = re.compile(r"(\d+)x(\d+) w(\d+) s(\d+) ([xpcr])(\d+)")


@dataclass(frozen=True)
class SplitTile(Tile):
    """`block_m` rows (query, head of a group), `block_n` keys, and the parts: a letter and a number as above."""

    parts: int = 1
    together: bool = False  # "p"
    fixed: str = ""  # or "c" or "r"

    @property
    def how(self) -> str:
        return self.fixed or ("p" if self.together else "x")

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} w{self.warps} s{self.stages} {self.how}{self.parts}"

    @classmethod
    def parse(cls, text: str) -> "SplitTile":
        """The inverse of `str`."""
        match = _SPELLING.fullmatch(text.strip())
        if match is None:
            raise ProblemError(f"'{text}' is no tile of split_kv; examples: '16x64 w4 s3 x8', '16x64 w4 s3 p264'")
        block_m, block_n, warps, stages, parts = (int(match[i]) for i in (1, 2, 3, 4, 6))
        return cls(block_m, block_n, warps, stages, False, parts, match[5] == "p", match[5] if match[5] in "cr" else "")


def refuses(problem: Problem, device: Device, direction: str) -> Optional[str]:
    if reason := portable.refuses(problem, device, direction):
        return reason
    if direction != "forward":
        return "has a forward only"
    paged = isinstance(problem, PagedProblem)
    if problem.packed and not paged:
        return "takes packed keys in pages only"
    if not problem.windowed:
        return WINDOWS_ONLY
    if problem.pairs or problem.dropout:
        return "computes no bias, mask or dropout"
    if problem.score_mod:
        return "calls no score_mod"
    if problem.dim_qk > MOST_DIM or problem.dim_v > MOST_DIM_V:
        return f"takes dims up to {MOST_DIM} of q and k and {MOST_DIM_V} of v, not {problem.dim_qk} and {problem.dim_v}"
    if isinstance(problem, PagedProblem) and problem.eight_bits and device.kind == "cuda" and device.capability < (8, 9):
        return f"pages in 8 bits need compute capability 8.9; {device.name} has {device.capability[0]}.{device.capability[1]}"
    if problem.len_q * problem.heads_q >= 2**31 or problem.len_q + problem.len_k >= 2**29:
        return "takes up to 2^31 pairs of query and head, and 2^29 queries and keys of a sequence"
    return None


def passes_over(problem: Problem) -> Optional[str]:
    """Why, though it runs the problem, another is taken unless this one is asked for."""
    if isinstance(problem, PagedProblem):
        return None
    if problem.len_q * problem.group > MOST_ROWS:
        return f"with more than {MOST_ROWS} queries and heads that share keys, tiles of queries reuse keys as well"
    return f"fewer than {LEAST_KEYS} keys are not worth sharing out" if problem.len_k < LEAST_KEYS else None


def misfit(problem: Problem, device: Device, tile: Tile) -> Optional[str]:
    """Why this is no tile that runs the problem, or None."""
    if not isinstance(tile, SplitTile):
        return f"{tile} is no tile of split_kv"
    if tile.block_m not in (16, 32, 64, 128) or tile.block_n not in (16, 32, 64, 128, 256) or tile.warps not in (1, 2, 4, 8):
        return "block sizes are powers of two, 16 to 128 rows and 16 to 256 keys, warps 1 to 8"
    if not 1 <= tile.stages <= 8 or tile.parts < 1:
        return "stages are 1 to 8, parts at least 1"
    invariant = isinstance(problem, PagedProblem) and problem.batch_invariant
    if invariant != (tile.how in "cr"):
        return f"'{tile.how}' is {'not' if invariant else 'only'} for batch-invariant calls"
    if tile.how == "p" and problem.batch > MOST_SEQUENCES:
        return f"looks through at most {MOST_SEQUENCES} sequences for its part; here are {problem.batch}"
    if tile.parts > 4096:
        return "a row tile has at most 4096 parts"
    return None


def row_tiles(problem: Problem, block_m: int) -> int:
    """Row tiles of a KV head, of all sequences together; packed: at least as many as there are, lengths being on the device."""
    if problem.packed:
        return problem.len_q * problem.group // block_m + problem.batch
    return -(-problem.len_q * problem.group // block_m) * problem.batch


def padded_dims(problem: Problem) -> tuple[int, int, int]:
    """Of q and k in one or two parts (or 0), and of v: powers of two, at least 16.

    >>> padded_dims(PagedProblem.parse("b1 h16/1 q1 k64 d576/512 bf16 paged64"))
    (512, 64, 512)
    """
    block_d, block_dv = (max(16, 1 << (dim - 1).bit_length()) for dim in (problem.dim_qk, problem.dim_v))
    rest = problem.dim_qk - block_d // 2
    if block_d > 64 and rest <= block_d // 4:
        return block_d // 2, max(16, 1 << (rest - 1).bit_length()), block_dv
    return block_d, 0, block_dv


def tiles(problem: Problem, device: Device, direction: str, *, splits: int = 0) -> tuple[tuple[Tile, ...], str]:
    """`splits`: the number of parts of each row tile that was asked for; 0: whatever is best."""
    block_m, block_n, warps, stages = _blocks(problem, device)
    parts, how, why = splits, "x", f"{splits} parts as asked for"
    if isinstance(problem, PagedProblem) and problem.batch_invariant:
        parts, how, why = _invariant_parts(problem, device, block_m, block_n)
    elif not splits:
        parts, how, why = _parts(problem, device, block_m, block_n)
    return (SplitTile(block_m, block_n, warps, stages, False, parts, how == "p", how if how in "cr" else ""),), why


def _blocks(problem: Problem, device: Device) -> tuple[int, int, int, int]:
    """Rows, keys, warps, stages."""
    if isinstance(problem, PagedProblem) and problem.batch_invariant:  # rows of every call go through the same instructions
        size = max(sum(padded_dims(problem)[:2]), padded_dims(problem)[2])
        if problem.dtype == torch.float32:
            return 16, 16, 4, 1
        if size > 128:
            return (16, 32, 8, 2) if size > 256 else (16, 32, 4, 2)
        return 32, 32, 4, 3
    queries = problem.max_len_q if problem.packed and problem.max_len_q is not None else problem.len_q
    rows = queries * problem.group
    size = max(sum(padded_dims(problem)[:2]), padded_dims(problem)[2])
    if problem.dtype == torch.float32:  # IEEE products on the FMA units
        return (16, 32, 4, 1) if size <= 128 else (16, 16, 4, 1)
    block_m, hopper = 16 if rows <= 16 else 32 if rows <= 32 else 64, device.capability == (9, 0)
    if size > 256:
        return (min(block_m, 32), 32, 8, 2) if device.shared_bytes >= 160_000 or device.kind == "cpu" else (16, 16, 4, 2)
    if size > 128:
        return min(block_m, 32), 32, 4, 2
    stages = 2 if 0 < device.shared_bytes < 110_000 else 3
    return (block_m, 32, 8, stages) if size == 128 and block_m == 64 and not hopper else (block_m, 64, 4, stages)


def _parts(problem: Problem, device: Device, block_m: int, block_n: int) -> tuple[int, str, str]:
    """`(parts, how, why)`."""
    programs = 2 * device.sms  # two a multiprocessor run beside each other
    items = max(row_tiles(problem, block_m) * problem.heads_k, 1)
    keys = problem.len_k
    left, right = problem.band[:2]
    if left is not None and right is not None:
        keys = min(keys, left + right + 1 + (0 if problem.packed else problem.len_q))
    if keys < 2 * LEAST_KEYS:
        return 1, "x", f"up to {keys} keys are not worth sharing out"
    if items >= 16 * programs:
        return 1, "x", f"{items} row tiles are enough for {device.sms} multiprocessors"
    if isinstance(problem, PagedProblem) and problem.batch > 1:
        if problem.batch <= MOST_SEQUENCES:
            return programs, "p", f"lengths are on the device: about {programs} parts of one size, two a multiprocessor"
        return 1, "x", f"more than {MOST_SEQUENCES} sequences are enough for {device.sms} multiprocessors"
    blocks = -(-keys // block_n)
    best = min(
        range(1, min(MOST_PARTS, keys // LEAST_KEYS) + 1),
        key=lambda parts: (-(-items * parts // programs) * (-(-blocks // parts) + TURNS_TO_BEGIN), parts),
    )
    return best, "x", f"{items * best} programs of {-(-blocks // best)} tiles of keys fill {device.sms} multiprocessors best"


def _invariant_parts(problem: Problem, device: Device, block_m: int, block_n: int) -> tuple[int, str, str]:
    turns, items = INVARIANT_KEYS // block_n, max(row_tiles(problem, block_m) * problem.heads_k, 1)
    most = -(-problem.len_k // INVARIANT_KEYS)
    rows = min(block_m, problem.len_q * problem.group)
    memory = 4 * items * most * rows * (problem.dim_v + 2)
    why = f"parts of {INVARIANT_KEYS} keys whatever else there is"
    if most > 1 and items < 8 * device.sms and memory <= MOST_BYTES:
        return turns, "c", f"{why}, a program each"
    return turns, "r", f"{why}, those of {items} row tiles in turn"


@lru_cache(maxsize=4096)
def least_turns(block_n: int) -> int:
    """Tiles of keys in the smallest part."""
    return max(LEAST_KEYS // block_n, 1)
