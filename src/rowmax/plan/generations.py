"""`kv_outer` (FlashAttention-1) and `dense` (scores in memory): forwards to measure the others by. Only for who asks by name,
as is `warp_split.py`.

Tiles are the largest of a list that compile without spills (triton 3.6.0); no speed decided them. FlashAttention-1's own block
sizes, M/4d columns and min(M/4d, d) rows for M numbers of shared memory, are 128 or 64 at 64 and 128 dimensions.
"""

from typing import Optional

import torch

from rowmax.device import Device
from rowmax.plan import portable, warp_split
from rowmax.plan.cpu import Candidate
from rowmax.plan.tile import WINDOWS_ONLY, Tile
from rowmax.problem import Problem

BY_NAME = {
    "kv_outer": "reads and writes O in memory for every K/V tile, and has one block a head: only if asked for by name",
    "dense": "writes N^2 scores to memory: only if asked for by name",
    "warp_split": warp_split.ALONE,
}
MAX_SCORES = 2**36  # 6 bytes each: more than the memory of any GPU
SOFTMAX_TILE = Tile(4, 1024, 4, 1)  # rows and columns of scores a step
_parse = Tile.parse

# Largest head dimension -> tile, 16 bits; and fp32, on the FMA units.
_KV_OUTER = {64: "64x64 w8 s2", 128: "64x64 w8 s2", 256: "32x32 w4 s1"}
_KV_OUTER_HOPPER = {64: "64x128 w4 s2", 128: "64x128 w4 s2", 256: "32x64 w4 s1"}  # 64 rows of d256 spill
_KV_OUTER_FP32 = {64: "32x32 w4 s1", 128: "32x32 w4 s1", 256: "16x16 w4 s1"}
_DENSE = {64: "128x128 w8 s2", 128: "128x64 w8 s2", 256: "64x64 w8 s1"}
_DENSE_FP32 = {64: "32x32 w4 s1", 128: "32x32 w4 s1", 256: "32x16 w4 s1"}


def score_columns(problem: Problem, tile: Tile) -> int:
    """Columns of S and P in memory: whole tiles."""
    return -(-problem.len_k // tile.block_n) * tile.block_n


def _dense_refuses(problem: Problem, device: Device, direction: str) -> Optional[str]:
    if found := _kv_outer_refuses(problem, device, direction):
        return found
    if problem.packed:
        return "keeps one rectangle of scores; takes no packed sequences"
    if (scores := problem.batch * problem.heads_q * problem.len_q * problem.len_k) > MAX_SCORES:
        return f"{scores:,} scores of 6 bytes fit in no GPU's memory"
    return None


def _kv_outer_refuses(problem: Problem, device: Device, direction: str) -> Optional[str]:
    if found := portable.refuses(problem, device, direction):
        return found
    if direction != "forward":
        return "has a forward only"
    if not problem.windowed:
        return WINDOWS_ONLY
    return None if problem.plain else "takes plain scores: no soft-cap, ALiBi, sink, bias, mask or score_mod, and no dropout"


def _table(name: str, half: dict[int, str], hopper: dict[int, str], full: dict[int, str]):
    def tiles(problem: Problem, device: Device, direction: str) -> tuple[tuple[Tile, ...], str]:
        dim = max(problem.dim_qk, problem.dim_v)
        table = full if problem.dtype == torch.float32 else hopper if device.capability == (9, 0) else half
        tile = next(tile for largest, tile in table.items() if dim <= largest)
        return (_parse(tile),), f"{BY_NAME[name]}; compiles without spills, untimed"

    return tiles


KV_OUTER = Candidate(_kv_outer_refuses, _table("kv_outer", _KV_OUTER, _KV_OUTER_HOPPER, _KV_OUTER_FP32))
DENSE = Candidate(_dense_refuses, _table("dense", _DENSE, _DENSE, _DENSE_FP32))
