"""Candidates on the CPU: torch's own flash operator where it covers the problem, the tiled algorithm elsewhere.

Reasons give times in ms on two cores of a virtual AMD EPYC with AVX-512 bf16 (torch 2.13, b1 h8 q2048 k2048, 2026-11-29):
`benchmarks/results/amd-epyc-2026-11-29.json`. Those of half types in fp32 and of grouped heads are of two cores with AVX2 and
no AVX-512: `benchmarks/results/cpu/half-types-avx2-2026-12-01.json`. Smaller tiles spend more on starting operations, larger
ones leave the caches and hide more of a causal mask.

Tried for what torch's operator takes with a dense mask alone, and no faster (two threads, 2026-11-30, d64: packed causal
sequences of 75 to 512 tokens, window(256,0); ms forward, backward, beside what runs):

    torch's operator for each packed sequence          bf16 12.7, 31.5 (11.5, 25.7)   fp32 12.3, 26.8 (11.3, 25.9)
    torch's operator on 32 rows of the window a piece  bf16 10.3, 30.5 (11.3, 25.9)   fp32 10.0, 25.6 (11.4, 29.4), without its
                                                       first 256 rows, and before gradients of overlapping keys are added
    half of the heads in each of two Python threads    packed fp32 16.1, 33.7 (11.5, 26.0)   window fp32 13.7, 34.1 (12.0, 29.7)
    packed sequences side by side, padded              operations of 2^20 scores leave the caches, of 2^19 they are as many

Products of [64, 320, 64] run at 92 GFLOP/s in fp32 and 190 in bf16 on one core, near those of large matrices, while what is
computed at once stays below some 2^20 scores; beyond, fp32 drops to 63. At that rate the two of window(256,0), q2048 h8 in
pieces of 64 rows, take 7.3 ms on two cores, and visible pairs alone 5.5; torch's operator with a dense mask takes 60, for 8.5
times as many pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import torch

from rowmax.device import Device
from rowmax.mask import AnyBand, Band
from rowmax.paged import PagedProblem
from rowmax.plan.tile import WINDOWS_ONLY, Tile
from rowmax.problem import Problem
from rowmax.score_mod import lacks

HALF = (torch.float16, torch.bfloat16)
CUT_ROWS = 64  # of a window that is cut into short sequences: `cpu/pieces.py`


def block_rows(tile: Tile, len_q: int, heads: int, band: AnyBand) -> int:
    """Rows of a block of the tiled algorithm, of a sequence of which `heads` query heads are computed at once.

    Of a window of w keys r rows compute r + w each, and of a causal sequence half of r more than they see; fewer rows waste
    less, but start more operations. 8 heads, d64, causal, packed sequences of 75 to 512 tokens, forward and backward on one
    thread of an AMD EPYC (ms): 64 rows 57 in bf16 and 62 in fp32, 128 rows 53 and 64, 256 rows 54 and 71. Two threads, 16 heads
    to 512 tokens: 64 rows 117 and 130, 128 rows 106 and 132; to 100 tokens in bf16 53 and 46; 32 heads, d128, bf16 159 and 168.
    """
    if band.right is None:
        return tile.block_m
    if band.left is not None:
        return tile.block_m // 2
    rows = CUT_ROWS
    heads = max(heads, 1)
    while rows < max(1024 // heads, min(2 * CUT_ROWS, 2048 // heads), len_q // 8):
        rows *= 2
    return min(rows, tile.block_m)


@dataclass(frozen=True)
class Candidate:
    """`refuses` gives the reason or None; `tiles` the tiles and why these."""

    refuses: Callable[[Problem, Device, str], Optional[str]]
    tiles: Callable[[Problem, Device, str], tuple[tuple[Tile, ...], str]]


def _aten_refuses(problem: Problem, device: Device, direction: str) -> Optional[str]:
    if device.kind != "cpu":
        return f"runs on the CPU; the tensors are on {device.kind}"
    if not problem.plain:
        return "torch's CPU operator takes no soft-cap, ALiBi, sink logits, bias, mask or score_mod here, and no dropout"
    if problem.packed:
        return "torch's CPU operator takes no packed sequences"
    if problem.band not in (Band(), Band(None, 0)):
        return f"torch's CPU operator takes no {'window' if problem.windowed else 'sink tokens, prefix or chunks'}"
    if problem.band == Band(None, 0) and problem.len_q != problem.len_k:
        return "torch's CPU operator aligns causal masks to the top left; here len_q != len_k"
    if problem.dim_qk != problem.dim_v:
        return "torch's CPU operator needs dim_v == dim_qk"
    if problem.scale == 0:
        return "torch's CPU operator leaves its scores unwritten where the scale is 0"
    if min(problem.batch, problem.len_q, problem.len_k, problem.heads_q) == 0:
        return "torch's CPU operator takes no empty tensors"
    if problem.dtype == torch.bfloat16 and device.fast_bf16:
        return "row blocks with few large operations are faster in bf16 (d64 full, 2 cores: 41 ms, torch's operator 61)"
    if problem.dtype in HALF and problem.group > 1 and problem.len_q < problem.len_k:
        return "tiles take the queries of grouped heads together (b1 h32/8 q4 k4096 d128 bf16: 10 ms, torch's operator 15)"
    return None


def _aten_tiles(problem: Problem, device: Device, direction: str):
    # The tile serves the gradient of the LSE, which torch's operator does not take.
    if problem.dtype in HALF:
        reason = (
            "torch's operator, on copies in fp32, is faster than tiles (d64 full, 2 cores with AVX2: 66 ms, tiles 77 and 75)"
        )
    else:
        reason = "torch's operator is the faster in fp32 (d64 full, 2 cores: 53 ms, with the backward 194)"
    return (Tile(256, 8192),), reason


def _tiled_refuses(problem: Problem, device: Device, direction: str) -> Optional[str]:
    if device.kind != "cpu":
        return f"runs on the CPU; the tensors are on {device.kind}"
    return lacks(problem.score_mod, "reference")


def _tiled_tiles(problem: Problem, device: Device, direction: str):
    return (Tile(256, 8192),), "row blocks over all visible columns keep the matmuls large"


def _gathered_refuses(problem: Problem, device: Device, direction: str) -> Optional[str]:
    if device.kind != "cpu":
        return f"runs on the CPU; the tensors are on {device.kind}"
    if not isinstance(problem, PagedProblem):
        return "keys are not in pages"
    if not problem.windowed:
        return WINDOWS_ONLY
    return None if direction == "forward" else "has a forward only"


def _gathered_tiles(problem: Problem, device: Device, direction: str):
    return (Tile(256, 8192),), "the pages of one sequence after the other are gathered; then as 'tiled'"


ATEN = Candidate(_aten_refuses, _aten_tiles)
TILED = Candidate(_tiled_refuses, _tiled_tiles)
GATHERED = Candidate(_gathered_refuses, _gathered_tiles)
