"""`latent`: decoding with multi-head latent attention (576 / 512, one KV head) on NVIDIA Hopper (`kernels/gluon/latent.py`).

Tiles are spelled as those of `split_kv`, which takes what is refused here: `64x64 w4 s5 p132`. Rows and keys are always 64, and
the stages are pieces of 64 keys in flight, half of the values each (32 KiB), or a quarter:

    s5    halves; the first 256 columns of Q are held in registers, so that there is room for two tiles and a half
    s4    halves; all of Q lies in shared memory
    s8    quarters, and scores are computed a tile ahead of their weights; all of Q lies in shared memory
    s9    as s8; the last 64 columns of Q are held in registers, for a quarter more

An H200 took for 128 sequences of 8192 keys and 128 heads, pages of 64, in us by graph replay (median and least of 60):

    split_kv  1303.8 (1286.5)
    s5 p132    571.5  (541.2)    s5 p264  563.8 (524.5)    s5 x1  548.8 (520.0), 532 TFLOP/s
    s4 p132    562.9  (546.2)    the others have not been timed

Here p132 and p264 cut nothing: programs, their order and their tiles of keys are those of x1. What x1 spares is the combine
kernel, which finds nothing to do, and looking through all lengths in it and in `triton/work.py`. How long sequences are the
plan cannot see, and one of several lengths needs the parts: who knows that they are even, and many, asks for `num_splits=1`.
Without any P V the kernel took 421.7, with one page for all keys 503.4: it waits for scores and weights, which one warpgroup
computes in turn; so s8 and s9. Fetching tiles into the L2 ahead of their time cost 2%.
"""

from dataclasses import replace
from typing import NamedTuple, Optional

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


class Kind(NamedTuple):
    """Attributes:
    width: columns of a piece of K.
    held: pieces of Q in registers.
    held_rope: 1: the last 64 columns of Q are so, too.
    early: scores of a tile are computed during the exponentials of the one before.
    registers: of a thread that multiplies P with V, of one that computes P, and of the producer; the first stand there twice.
    """

    width: int
    held: int
    held_rope: int
    early: bool
    registers: tuple[int, int, int]


KINDS = {
    4: Kind(256, 0, 0, False, (192, 104, 24)),
    5: Kind(256, 1, 0, False, (176, 136, 24)),
    8: Kind(128, 0, 0, True, (176, 136, 24)),
    9: Kind(128, 0, 1, True, (176, 136, 24)),
}


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


def misfit(problem: Problem, device: Device, tile: Tile) -> Optional[str]:
    """Why this is no tile that runs the problem, or None."""
    if (
        not isinstance(tile, SplitTile)
        or (tile.block_m, tile.block_n, tile.warps) != (ROWS, KEYS, 4)
        or tile.stages not in KINDS
    ):
        return f"tiles are {ROWS}x{KEYS} w4 with {', '.join(f's{stages}' for stages in KINDS)}"
    if tile.once:
        return "has a second kernel"
    return split_kv.misfit(problem, device, replace(tile, stages=1))  # whose stages are other ones


def tiles(problem: Problem, device: Device, direction: str) -> tuple[tuple[Tile, ...], str]:
    """Few sequences, too, though only 128 have been timed. A tile of 64 keys takes 2.2 us of a multiprocessor here, 571.5 of
    248 in turn, and 5.2 in `split_kv`; so a part of the least size, four tiles, ends 12 us earlier, for one more launch of 2 or
    3 us. One sequence of 8192 keys and 128 heads has 64 of them, one of 65536 132 of 16 tiles."""
    assert isinstance(problem, PagedProblem)  # `refuses` checked it
    why = "571.5 us, split_kv 1303.8, with 128 sequences of 8192 keys on an H200"
    if problem.batch > split_kv.MOST_SEQUENCES:
        return (SplitTile(ROWS, KEYS, 4, 5),), f"so many sequences fill the multiprocessors; {why}"
    tile = SplitTile(ROWS, KEYS, 4, 5, False, device.sms, True)
    return (tile,), f"lengths are on the device: about a part for each multiprocessor, which holds one block; {why}"
