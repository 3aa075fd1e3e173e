"""How long a call takes on a CPU: products, scores, masked scores and operators started, each at a measured rate.

    seconds = (FLOPs / flops_per_s + scores * score_s + masked scores * masked_s + tiles * tile_s) * 2 / threads

Scores are those that `cpu/` computes: of a row block all columns that one of its rows sees. Rates are of two cores of an AMD
EPYC with AVX-512 bf16 (benchmarks/results/amd-epyc-2026-11-29.json, least squares); other CPUs differ by more than this model
knows, and cores are taken to share nothing. Called by `predict.py`.
"""

from typing import NamedTuple

from rowmax.analysis.launches import Launch, Lengths, Turn
from rowmax.device import Device
from rowmax.mask import Band
from rowmax.plan import Plan
from rowmax.plan.cpu import CUT_ROWS, block_rows
from rowmax.plan.tile import early, key_ranges
from rowmax.problem import Problem

THREADS = 2  # that the rates are of


class CpuRates(NamedTuple):
    """Of two threads. `masked_s`: more for a score in a block that a mask cuts (torch's operator: columns it does not skip)."""

    flops_per_s: float
    score_s: float
    masked_s: float
    tile_s: float


_TILED = {
    ("bf16", "forward"): CpuRates(304e9, 0.28e-9, 1.3e-9, 0.2e-3),
    ("bf16", "backward"): CpuRates(284e9, 1.2e-9, 0.0, 0.8e-3),
    ("fp32", "forward"): CpuRates(161e9, 0.4e-9, 0.0, 0.2e-3),
    ("fp32", "backward"): CpuRates(157e9, 0.7e-9, 0.0, 0.8e-3),
}
_ATEN = {"forward": CpuRates(161e9, 0.0, 1.2e-9, 0.0), "backward": CpuRates(153e9, 0.0, 3.3e-9, 0.0)}
MODELLED = ("tiled", "aten")
SOURCE = "another CPU"


def rates_of(problem: Problem, plan: Plan, direction: str) -> CpuRates:
    """Raises KeyError: there is no model of the algorithm."""
    if plan.algorithm not in MODELLED:
        raise KeyError(f"no model of {plan.algorithm} on a CPU")
    slower = 2.0 if problem.dtype_name == "fp64" else 1.0
    if plan.algorithm == "aten":
        found = _ATEN[direction]
    else:
        found = _TILED["bf16" if problem.dtype_name == "bf16" else "fp32", direction]  # fp16 is computed in fp32
    return found._replace(flops_per_s=found.flops_per_s / slower, score_s=found.score_s * slower)


def work(problem: Problem, plan: Plan, direction: str, lengths: Lengths) -> tuple[int, int, int]:
    """`(scores of all heads, those in blocks with a mask, tiles)` as computed."""
    tile = plan.tiles[0]
    cut = isinstance(problem.band, Band) and None not in problem.band and tile.block_m >= 2 * CUT_ROWS
    cut = cut and (direction == "forward" or problem.dtype_name not in ("bf16", "fp16"))
    heads = problem.heads_q * (1 if problem.packed else problem.batch)
    scores = masked = tiles = 0
    for len_q, len_k in lengths:
        step = CUT_ROWS if cut else block_rows(tile, len_q, heads, problem.band)
        for row in range(0, len_q, step):
            start, full_start, full_end, end = key_ranges(row, step, len_q, len_k, 1, problem.band)
            rows, before = min(step, len_q - row), early(start, problem.band)
            scores += rows * (end - start + before)
            masked += rows * (full_start - start + end - full_end + before) if problem.band != Band() else 0
            tiles += -(-(end - start) // tile.block_n) + -(-before // tile.block_n)
    if cut and direction == "backward":  # its rate is of blocks of 128 rows, walked one by one
        tiles = -(-tiles // 2)
    return scores * problem.heads_q, masked * problem.heads_q, tiles


def terms(
    problem: Problem, device: Device, plan: Plan, direction: str, lengths: Lengths
) -> tuple[dict[str, float], list[Launch]]:
    """Seconds of each part, which add up; and what is computed, as one launch.

    Raises:
        KeyError: there is no model of the algorithm.
    """
    rates = rates_of(problem, plan, direction)
    scores, masked, tiles = work(problem, plan, direction, lengths)
    dims = (problem.dim_qk, problem.dim_v)
    width = dims[0] + dims[1] if direction == "forward" else 3 * dims[0] + 2 * dims[1]
    share = THREADS / max(device.sms, 1)
    flops = 2.0 * scores * width
    found = {
        "hbm": 0.0,
        "l2": 0.0,
        "tensor": flops / rates.flops_per_s * share,
        "non_matmul": (scores * rates.score_s + masked * rates.masked_s) * share,
        "launch": tiles * rates.tile_s * share,
    }
    turn = Turn(flops / max(tiles, 1), scores / max(tiles, 1), 0.0, 0.0)
    return found, [Launch(plan.algorithm, ((1, tiles, 0),), turn, 1, 0.0, 0.0, threads=device.sms)]
