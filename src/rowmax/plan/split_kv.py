"""`split_kv`: few queries and many keys, dense or in pages. The keys of a row tile are shared out among programs, whose partial
results a second kernel combines (split-KV decoding, "Flash-Decoding", Dao, Haziza, Massa, Sizov 2023). Portable Triton.

All query heads of a KV head are rows of one tile, so that K and V are read once. How the keys are shared out is in the tile:

    x8    each row tile has 8 parts; x1: one, and no second kernel
    p264  about 264 parts altogether: kernels take the parts from the lengths on the device, so that sequences of different
          lengths are parts of about one size
    c8    each part has 8 tiles of keys, counted from the first key, so that the result does not depend on what else there is
    c8d24 24 parts have 8 tiles, the next 24 have 16, the next 32, and so on: `fixed_parts.py`
    r8d24 the same parts, but one program takes those of a row tile in turn: bitwise the same without memory for them; or r8
    x8 once   one kernel: of the programs of a row tile the one that ends last combines them, in their order; bitwise the same.
          Left to be asked for: of 24 tiles 16 gain, most of them up to 2%, and 8 lose up to 6%; of those chosen here 17.15 us
          for 17.54, 250.7 for 252.6 and 135.5 for 137.8, but 39.7 for 39.3, 16.9 for 16.6 and 21.4 for 20.0 (clean)

Microseconds below are replays on an H200, of `benchmarks/results/decode/sweep-h200-2026-11-30.json`, which has 400 more; clean
ones of `states-h200-2026-11-30.json`: what the L2 cache held before was written back (`benchmarks/README.md`).
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Optional

import torch

from rowmax.device import Device
from rowmax.errors import ProblemError
from rowmax.paged import PagedProblem
from rowmax.plan import fixed_parts, portable
from rowmax.plan.tile import WINDOWS_ONLY, Tile
from rowmax.problem import Problem

MOST_ROWS = 64  # queries times heads of a group: with more, a tile of queries reuses keys as well as `q_outer` does
LEAST_KEYS = 256  # fewer are not worth a second kernel, nor a part of its own
MOST_SEQUENCES = 1024  # whose lengths a program looks through to find its part
MOST_PARTS = 128
INVARIANT_KEYS = 512  # of the first parts of a batch-invariant call: in every call the same, or results would differ
# Parts of one size, those of all row tiles and KV heads of a query together: of 131072 keys and 8 heads a sequence has 83
# parts, where 256 are of 512 keys. Over the best shares one sequence of 131072 keys took 1.11 (192), 1.13 (256), 1.58 (128),
# 1.17 with all parts of 1024 keys and 1.29 of 512; one of 32768 keys 1.10, 1.11, 1.39, 1.05 and 1.20
# (`invariant-h200-2026-11-30.json`). Before that it was chosen by a model fitted to 16 rows of
# `sweep-h200-2026-11-30-second.json`, which are within 9% of it: a call takes 12 us, and 2.5 for every 16 parts of a row that
# are joined; of 264 programs at once each waits 1.2 us and then reads 1.1 tiles a us, or its share of 127. Over the best shares
# one sequence of 131072 keys should take 1.09 (192), 1.44 (128), 1.12 (256), 1.14 (512), 1.22 (192, the last parts not launched
# first); with all parts of 512 keys 1.31 (measured: 1.27), of 1024 1.14 (1.16). Of 32768 keys 1.11 (192), 1.10 (256), 1.18 (all
# of 512; measured: 1.21). Over 1 to 32 heads, 1 to 16 sequences and 1024 to 2^20 keys 192 and 256 take 1.03 to 1.10 on average,
# for every number of heads; worst, up to 1.5, are one or two sequences with one or two heads and more than 65536 keys, whose
# rows join 150 parts and more. `rowmax explain` orders them alike: 147 us (192), 149 (256), 153 (512), 157 (128), 164 (all of
# 512), 151 (of 1024).
INVARIANT_PARTS = 192
LEAST_DOUBLES = 4
MOST_BYTES = 2**28  # for partial results of a batch-invariant call
TURNS_TO_BEGIN = 2  # a part takes as long to begin and to end as this many tiles of keys
SHORT_KEYS = 2048  # up to here a fourth stage costs more to fill than it hides: 25.9 us for 23.8 with 1024 keys
MOST_BESIDE = 4  # blocks a multiprocessor, for their registers
ALONE, ALONE_PAGED = 1.03, 1.2  # one block a multiprocessor takes longer than its part of two: 137.9 us for 135.9; 166 for 141
MOST_DIM, MOST_DIM_V = 576, 512
_SPELLING = re.compile(r"(\d+)x(\d+) w(\d+) s(\d+) (?:([xp])(\d+)|([cr])(\d+)(?:d(\d+))?)( once)?")


@dataclass(frozen=True)
class SplitTile(Tile):
    """`block_m` rows (query, head of a group), `block_n` keys, and the parts: a letter and a number as above."""

    parts: int = 1
    together: bool = False  # "p"
    fixed: str = ""  # or "c" or "r"
    once: bool = False  # no second kernel
    doubles: int = 0  # of "c" and "r": so many parts have one size, then twice as large ones follow; 0: all are alike

    @property
    def how(self) -> str:
        return self.fixed or ("p" if self.together else "x")

    def __str__(self) -> str:
        parts = f"{self.how}{self.parts}" + (f"d{self.doubles}" if self.doubles else "")
        return f"{self.block_m}x{self.block_n} w{self.warps} s{self.stages} {parts}{' once' * self.once}"

    @classmethod
    def parse(cls, text: str) -> "SplitTile":
        """The inverse of `str`."""
        match = _SPELLING.fullmatch(text.strip())
        if match is None:
            raise ProblemError(f"'{text}' is no tile of split_kv; examples: '16x64 w4 s3 x8', '16x64 w4 s3 p264'")
        block_m, block_n, warps, stages = (int(match[i]) for i in (1, 2, 3, 4))
        how = (match[5] == "p", match[7] or "", match[10] is not None)
        return cls(block_m, block_n, warps, stages, False, int(match[6] or match[8]), *how, int(match[9] or 0))


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
    if tile.once and (tile.how == "r" or (tile.how == "x" and tile.parts == 1)):
        return f"'{tile.how}{tile.parts}' has no second kernel: 'once' is for parts that are combined"
    if tile.parts > 4096 or tile.doubles > 4096:
        return "a row tile has at most 4096 parts"
    if tile.doubles and tile.how not in "cr":
        return f"'{tile.how}{tile.parts}' has parts of one size; 'd' is for 'c' and 'r'"
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
    if isinstance(problem, PagedProblem) and problem.batch_invariant:
        tile, why = _invariant_parts(problem, device, *_invariant_blocks(problem, device))
    elif splits:
        tile, why = SplitTile(*_blocks(problem, device)[0], False, splits), f"{splits} parts as asked for"
    else:
        tile, why = _parts(problem, device, _blocks(problem, device))
    return (tile,), why


def _invariant_blocks(problem: Problem, device: Device) -> tuple[int, int, int, int]:
    """Rows, keys, warps, stages, so that rows of every call go through the same instructions.

    A tile of 32 rows gives the bits of one of 16: both spread the keys of a tile over all four warps, and so sum a row's
    weights in the same order. A prompt in tiles of 16 rows would read its keys from the cache twice as often.
    """
    dims = padded_dims(problem)
    size = max(dims[0] + dims[1], dims[2])
    if problem.dtype == torch.float32:
        return 16, 16, 4, 1
    if size > 128:
        return (16, 32, 8, 2) if size > 256 else (16, 32, 4, 2)
    stages = 2 if 0 < device.shared_bytes < 110_000 else 3
    if _rows(problem) > 16 and min(dims[0], dims[2]) >= 64:
        return 32, 64, 4, stages
    return 16, 64, 4, 4 if _fourth(problem, device) else stages


def _rows(problem: Problem) -> int:
    """Of a KV head of one sequence, at most."""
    queries = problem.max_len_q if problem.packed and problem.max_len_q is not None else problem.len_q
    return queries * problem.group


def _blocks(problem: Problem, device: Device) -> tuple[tuple[int, int, int, int], ...]:
    """Rows, keys, warps, stages; a second one where another number of blocks beside each other may fit the work better."""
    rows = _rows(problem)
    size = max(sum(padded_dims(problem)[:2]), padded_dims(problem)[2])
    if problem.dtype == torch.float32:  # IEEE products on the FMA units
        return ((16, 32, 4, 1) if size <= 128 else (16, 16, 4, 1),)
    block_m, hopper = 16 if rows <= 16 else 32 if rows <= 32 else 64, device.capability == (9, 0)
    eight_bits = isinstance(problem, PagedProblem) and problem.eight_bits
    if size > 256:
        if latent(problem) and hopper and not eight_bits:  # 1285 us in tiles of 64 rows, 2022 of 32, 3404 with 32 keys
            return ((block_m, 64, 8, 2),)
        large = device.shared_bytes >= 160_000 or device.kind == "cpu"
        return ((min(block_m, 32), 32, 8, 2) if large else (16, 16, 4, 2),)
    if size > 128:
        return ((min(block_m, 32), 32, 4, 2),)
    stages = 2 if 0 < device.shared_bytes < 110_000 else 3
    if size == 128 and block_m == 64 and not hopper:
        return ((block_m, 32, 8, stages),)
    if eight_bits and block_m == 16:  # 221 us with two warps, 259 with four, 319 with eight
        return ((block_m, 64, 2, stages),)
    if block_m == 16 and _fourth(problem, device):
        return (block_m, 64, 4, stages), (block_m, 64, 4, 4)
    return ((block_m, 64, 4, stages),)


def _fourth(problem: Problem, device: Device) -> bool:
    """May a fourth stage serve tiles of 16x64? Not where four blocks fit with three: 282 us for 269 with 64 dims."""
    return beside(problem, device, 16, 64, 4) >= 2 and beside(problem, device, 16, 64, 3) < MOST_BESIDE


def latent(problem: Problem) -> bool:
    """One query over one KV head whose values are, as a rule, the first columns of its keys."""
    return problem.heads_k == 1 and problem.dim_v < problem.dim_qk and problem.len_q == 1 and not problem.packed


def beside(problem: Problem, device: Device, block_m: int, block_n: int, stages: int) -> int:
    """Blocks that a multiprocessor holds, for their shared memory: tiles of keys under way, and one of q and of weights."""
    first, second, dim_v = padded_dims(problem)
    item = problem.dtype.itemsize
    stored = 1 if isinstance(problem, PagedProblem) and problem.eight_bits else item
    mine = max(stages - 1, 1) * block_n * (first + second + dim_v) * stored + block_m * (first + second + block_n) * item
    return min(max((device.shared_bytes + 1024) // (mine + 1024), 1), MOST_BESIDE) if device.shared_bytes else 2


def _parts(problem: Problem, device: Device, blocks: tuple[tuple[int, int, int, int], ...]) -> tuple[SplitTile, str]:
    block_m, block_n = blocks[0][:2]
    items = max(row_tiles(problem, block_m) * problem.heads_k, 1)
    keys = problem.len_k
    left, right = problem.band[:2]
    if left is not None and right is not None:
        keys = min(keys, left + right + 1 + (0 if problem.packed else problem.len_q))
    if keys < 2 * LEAST_KEYS:
        return SplitTile(*blocks[0]), f"up to {keys} keys are not worth sharing out"
    most = [beside(problem, device, rows, columns, stages) for rows, columns, _, stages in blocks]
    paged = isinstance(problem, PagedProblem)
    if items >= 32 * device.sms or (paged and problem.batch > MOST_SEQUENCES):
        return SplitTile(*blocks[-1]), f"{items} row tiles are enough for {device.sms} multiprocessors"
    if paged and problem.batch > 1:
        # As many parts as run at once, and four stages, with which two blocks fit a multiprocessor: 256 parts of 16 sequences
        # took 158 us where three fit, 144 where two do, and 384 parts 144; 512 row tiles of 16x32 heads 599 us for 507.
        rows, columns, warps, stages = blocks[-1] if keys > SHORT_KEYS else blocks[0]
        programs = max(most[-1] if keys > SHORT_KEYS else 2, 2) * device.sms
        tile = SplitTile(rows, columns, warps, stages, False, programs, True)
        return tile, f"lengths are on the device: about {programs} parts, which run at once"
    turns = -(-keys // block_n)
    alone = ALONE_PAGED if paged else ALONE

    def time(choice: tuple[int, int]) -> float:
        """Of the busiest multiprocessor, in tiles of keys. A round takes as long for few blocks as for all that fit."""
        which, parts = choice
        each = -(-items * parts // device.sms)
        if each > most[which]:
            each = -(-items * parts // (most[which] * device.sms)) * most[which]
        return each * (-(-turns // parts) + TURNS_TO_BEGIN) * (alone if each == 1 else 1.0)

    counts = range(1, min(MOST_PARTS, max(keys // LEAST_KEYS, 1)) + 1)
    which, best = min(((which, parts) for which in range(len(blocks)) for parts in counts), key=time)
    rows, columns, warps, stages = blocks[which]
    each = -(-turns // best)
    if not paged and (rows, warps) == (16, 4):
        programs, fourth = items * best, len(blocks) > 1
        if stages == 3 and fourth and programs <= device.sms and each * columns >= SHORT_KEYS:
            # Alone on a multiprocessor: 48.2 us for 49.0 (two warps: 49.7), clean 39.3 for 41.2; of 8 tiles rather slower.
            stages = 4
        elif stages == 3 and each > 32:
            warps = 2  # 135.3 us for 135.9, 137.8 for 138.3, 255.8 for 256.7; with few turns to its work rather slower
        elif stages == 4 and most[which] * device.sms < programs <= beside(problem, device, rows, columns, 2) * device.sms:
            # All at once, not in two rounds: 482.5 us for 483.6, clean 484.8 for 489.3; of twice as many 503.2 for 491.4.
            stages = 2
    why = f"{items * best} programs of {each} tiles of keys fill {device.sms} multiprocessors best"
    return SplitTile(rows, columns, warps, stages, False, best), why


def _invariant_parts(
    problem: Problem, device: Device, block_m: int, block_n: int, warps: int, stages: int
) -> tuple[SplitTile, str]:
    tile = SplitTile(block_m, block_n, warps, stages, False, INVARIANT_KEYS // block_n, False, "c", False, _doubles(problem))
    most, items = most_parts(problem, tile), max(row_tiles(problem, block_m) * problem.heads_k, 1)
    rows = min(block_m, problem.len_q * problem.group)
    memory = 4 * items * most * rows * (problem.dim_v + 2)
    more = f", twice as many after every {tile.doubles}" if tile.doubles else ""
    why = f"parts of {INVARIANT_KEYS} keys{more}, whatever else there is"
    if most > 1 and items < 8 * device.sms and memory <= MOST_BYTES:
        return tile, f"{why}, a program each"
    return replace(tile, fixed="r"), f"{why}, those of {items} row tiles in turn"


def _doubles(problem: Problem) -> int:
    """Parts of one size. Of what a call is about only heads and window count: neither its lengths nor its queries, nor the
    memory of its cache. A window ends where the query is, where parts that grow would be large for what is seen of them."""
    if problem.band[0] is not None:
        return 0
    heads = problem.heads_k * -(-problem.group // 16)  # row tiles of one query
    return max(INVARIANT_PARTS // max(heads, 1), LEAST_DOUBLES)


def most_parts(problem: Problem, tile: SplitTile) -> int:
    """Parts that a row tile may have, of a tile "c" or "r": those of the longest sequence, or that a window reaches into."""
    turns = max(-(-problem.len_k // tile.block_n), 1)
    most: int = fixed_parts.part_of(turns - 1, tile.parts, tile.doubles) + 1
    left, right = problem.band[:2]
    if left is not None and right is not None:  # parts are no smaller than the first, and two are cut
        seen = left + right + 1 + (tile.block_m - 1) // problem.group + 1
        most = min(most, (seen - 2) // (tile.block_n * tile.parts) + 2)
    return most


@lru_cache(maxsize=4096)
def least_turns(block_n: int) -> int:
    """Tiles of keys in the smallest part."""
    return max(LEAST_KEYS // block_n, 1)
