"""`latent`: decoding with multi-head latent attention (576 / 512, one KV head) on NVIDIA Hopper (`kernels/gluon/latent.py`).

Tiles are spelled as those of `split_kv`, which takes what is refused here: `64x64 w4 s8 p132`. Rows and keys are always 64, and
the stages are eight pieces of 64 keys in flight, a quarter of the values each (16 KiB).

An H200 took for 128 sequences of 8192 keys and 128 heads, pages of 64, in us by graph replay (median and least of 60):

    split_kv  1303.8 (1286.5)
    s8 p132    516.2  (511.3), 566 TFLOP/s; when it was timed first, right behind the checks, 570.1 (545.9)
    s8 x1      513.8  (510.9), 568 TFLOP/s

What is no longer there, x1 and p132:

    halves in flight, the first 256 columns of Q in registers: 533.8 (527.5), 572.4 (542.1)
    Q K^T of the next tile issued before the exponentials of this one: 631.4 (617.5), 647.0 (636.4)
        with the last 64 columns of Q in registers and a ninth piece: 624.5 (617.9); with halves: 718.7 (715.0), 734.1 (727.4)

Here p132 cuts nothing: programs, their order and their tiles of keys are those of x1. What x1 spares is looking through all
lengths in `triton/work.py` and a launch that finds nothing to join: 15 us, when every program of that launch looked through all
lengths, too, and nothing that shows since it reads what `work.py` found. How long sequences are the plan cannot see, and one of
several lengths needs the parts.
With halves and without any P V it took 421.7, with one page for all keys 503.4; fetching tiles into the L2 ahead of their time
cost 2%. Of one run, 566.6 (512.9) as it is, medians by less than the least ones (latent-h200-2026-11-30-third.json):

    the tile two ahead asked into the L2: one bulk request 558.9 (518.6), half of its lines by each program 559.8 (518.8), all
        by one 581.5 (539.1)
    one page for all keys: 510.9 (482.4), with a bulk request 501.3 (480.8)
    two of four pieces of the next tile multiplied early 691.3 (610.1), with the L2 asked 618.7 (554.3)

So 600 TFLOP/s are 487 us, and where all keys come from the L2 it takes about as long.
"""

from dataclasses import replace
from typing import Optional

from rowmax.device import Device
from rowmax.paged import PagedProblem
from rowmax.plan import hopper, split_kv
from rowmax.plan.split_kv import SplitTile
from rowmax.plan.tile import Tile
from rowmax.problem import Problem

ROWS = KEYS = 64  # of a tile
STAGES = 8  # pieces of keys in flight
DIM, DIM_V = 576, 512
NOT_SHARED = "takes values that are the first columns of the keys, and rows that start at multiples of 16 bytes, as TMA does"


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
    if not isinstance(tile, SplitTile) or (tile.block_m, tile.block_n, tile.warps, tile.stages) != (ROWS, KEYS, 4, STAGES):
        return f"tiles are {ROWS}x{KEYS} w4 s{STAGES}"
    if tile.once:
        return "has a second kernel"
    return split_kv.misfit(problem, device, replace(tile, stages=1))  # whose stages are other ones


def tiles(problem: Problem, device: Device, direction: str) -> tuple[tuple[Tile, ...], str]:
    """Few sequences, too, though only 128 have been timed. A tile of 64 keys takes 2.1 us of a multiprocessor here, 516 for
    248 in turn, and 5.2 in `split_kv`; so a part of the least size, four tiles, ends 12 us earlier, for one more launch of 2 or
    3 us. One sequence of 8192 keys and 128 heads has 64 of them, one of 65536 132 of 16 tiles."""
    why = "516.2 us, split_kv 1303.8, with 128 sequences of 8192 keys on an H200"
    if problem.batch > split_kv.MOST_SEQUENCES:
        return (SplitTile(ROWS, KEYS, 4, STAGES),), f"so many sequences fill the multiprocessors; {why}"
    tile = SplitTile(ROWS, KEYS, 4, STAGES, False, device.sms, True)
    return (tile,), f"lengths are on the device: about a part for each multiprocessor, which holds one block; {why}"
