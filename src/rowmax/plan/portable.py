"""`q_outer`, the portable Triton kernels (FlashAttention-2): any GPU that Triton compiles for.

The tile tables. Hopper's rows were chosen by speed on an H200 among tiles that compile without spills (2026-11-29, triton
3.6.0, bf16, b1 q16384 k16384 with h32 d64, h16 d128, h8 d256). Their comments give TFLOP/s of the whole pass, full / causal,
from one run in `benchmarks/results/tiles/`. Rows of other chips are the largest of a list that compile without spills within
the chip's shared memory: no such chip was at hand to time them.
"""

import os
from dataclasses import replace
from functools import lru_cache
from typing import Optional

import torch

from rowmax.device import Device
from rowmax.plan.tile import Tile
from rowmax.problem import Problem
from rowmax.score_mod import lacks

_parse = Tile.parse

# Largest head dimension -> (forward, dQ, dK/dV) or (forward, dQ, dK, dV).
_HOPPER = {
    # Forward 431 / 411 (128x128 w4 s3 tma: 442 / 415, spills 8 bytes if causal; w8 355 / 356). Backward 357 / 345
    # (dK/dV 32x128 w4 s3: 350 / 328; 128x128 w8 s2 tma: 351 / 335).
    64: ("128x64 w4 s4 tma", "64x64 w4 s3 tma", "64x64 w4 s3 tma"),
    # 504 / 515 (128x128 w8 s3 tma: 469 / 484). 426 / 414 (dQ 128x128 w8 s2 tma: 399 / 385; dK/dV 64x128 w8 s3 tma: 395 / 370).
    128: ("64x64 w4 s3 tma", "128x64 w8 s3 tma", "64x64 w4 s2 tma"),
    # 528 / 511 (without tma 438 / 446; 128x32 w8 s3 tma 450 / 444). 296 / 290 (dQ 128x32 w8 s2 tma: 272 / 272; w8 s2:
    # 262 / 262, with it dK 32x128 w8 s2 tma: 250 / 247, dV 64x128 w8 s2 tma: 259 / 269). dK and dV in one kernel spill.
    256: ("128x64 w8 s2 tma", "128x32 w8 s3", "64x128 w8 s1 tma", "32x128 w8 s3 tma"),
}
# Sink tokens, prefixes and chunks take the same tiles, untimed. With chunks dK spills 24 to 32 bytes at 256 dimensions, on a
# B200 dK/dV 32 bytes at 128; no other kernel of 64, 128 and 256 dimensions and of the four generations does.
# Of a backward that bends scores (soft-cap, ALiBi), which takes more registers: the tiles above spill. Untimed. Soft-cap and
# slopes for each sequence together spill 8 and 24 bytes at 128 dimensions.
_HOPPER_BENT = {
    64: ("64x64 w4 s3 tma", "64x64 w4 s2 tma"),
    128: ("64x64 w4 s2 tma", "32x64 w4 s2 tma"),
    256: ("128x32 w8 s3", "32x128 w8 s1 tma", "32x128 w8 s3 tma"),
}
# Where a bias or a mask is read for every pair both passes take more registers still: the tiles above spill. Untimed. At 128
# dimensions dK/dV spills 24 bytes (32x32 does not, nor does it use Hopper's tensor cores), at 256 dQ 8 and dK 136, and every
# smaller tile that was tried more. On other chips the tables' tiles spill up to 760 bytes of a bias.
_HOPPER_PAIRS = {
    64: ("128x64 w8 s3 tma", "64x32 w4 s3 tma", "64x64 w4 s1 tma"),
    128: ("128x32 w8 s3 tma", "64x32 w4 s2 tma", "32x64 w4 s2 tma"),
    256: ("64x32 w8 s2 tma", "64x32 w8 s2", "32x128 w8 s1 tma", "32x128 w8 s3 tma"),
}
# Where weights are dropped; as measured by compilation, without spills.
_HOPPER_DROPOUT = {
    64: ("64x64 w4 s3 tma", "64x64 w4 s3 tma", "64x64 w4 s3 tma"),
    128: ("64x64 w4 s3 tma", "64x64 w4 s2 tma", "32x64 w4 s2 tma"),
    256: ("128x32 w8 s2 tma", "128x32 w8 s2", "32x128 w8 s1 tma", "32x128 w8 s3 tma"),
}
_PAIRS_WHY = "untimed; compiles without spills where a bias or a mask is read for every pair, or weights are dropped"
_AMPERE = {
    64: ("128x64 w4 s3", "128x64 w8 s2", "64x128 w8 s2"),
    128: ("128x64 w8 s2", "64x64 w8 s1", "32x64 w8 s2"),
    256: ("64x32 w8 s2", "64x32 w8 s1", "32x32 w8 s1", "32x64 w8 s1"),
}
_ADA = {  # 99 KB of shared memory a block
    64: ("128x64 w4 s3", "64x64 w4 s2", "64x128 w8 s2"),
    128: ("128x64 w8 s2", "64x64 w8 s1", "32x64 w8 s2"),
    256: ("64x32 w8 s2", "64x32 w8 s1", "16x64 w8 s1", "32x32 w8 s1"),
}
_BLACKWELL = {
    64: ("128x64 w4 s3 tma", "64x64 w4 s3 tma", "64x64 w4 s3 tma"),
    128: ("128x128 w8 s2 tma", "64x64 w8 s2", "32x64 w8 s2"),
    256: ("128x32 w8 s2 tma", "64x32 w8 s1", "32x64 w8 s1", "32x64 w8 s1"),
}
_FP32 = {
    64: ("64x32 w4 s1", "32x32 w4 s1", "32x32 w4 s1"),
    128: ("32x32 w4 s1", "32x32 w4 s1", "32x32 w4 s1"),
    256: ("32x16 w4 s1", "16x16 w4 s1", "16x16 w4 s1", "16x16 w4 s1"),
}
SMALL = "64x64 w4 s3"  # forward, d <= 128, where larger tiles would leave multiprocessors idle


@lru_cache(maxsize=1)
def _interpreting() -> bool:
    """Triton's own switch: kernels then run on the CPU, one operation after another, to be tested without a GPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def refuses(problem: Problem, device: Device, direction: str) -> Optional[str]:
    if device.kind != "cuda" and not _interpreting():
        return f"runs on a GPU; the tensors are on {device.kind}"
    if device.kind == "cuda" and device.capability < (8, 0):
        return f"needs compute capability 8.0 or newer; {device.name} has {device.capability[0]}.{device.capability[1]}"
    if problem.dtype == torch.float64:
        return "fp64 runs on the CPU only"
    return lacks(problem.score_mod, "backward" if direction == "backward" else "forward")


def tiles(problem: Problem, device: Device, direction: str) -> tuple[tuple[Tile, ...], str]:
    table, why = _table(problem, device)
    dim = max(problem.dim_qk, problem.dim_v)
    row = next(row for largest, row in table.items() if dim <= largest)
    if table is _HOPPER and (problem.pairs or problem.dropout):
        special = _HOPPER_PAIRS if problem.pairs else _HOPPER_DROPOUT
        row = next(row for largest, row in special.items() if dim <= largest)
        chosen, why = tuple(map(_parse, row[1:] if direction == "backward" else row[:1])), _PAIRS_WHY
    elif direction == "backward":
        bent = table is _HOPPER and (problem.softcap > 0 or problem.alibi != "" or problem.score_mod != "")
        if bent:
            row = next(("", *tiles) for largest, tiles in _HOPPER_BENT.items() if dim <= largest)
            why = "untimed; compiles without spills where scores are bent"
        chosen = tuple(map(_parse, row[1:]))
    else:
        queries = problem.max_len_q if problem.packed and problem.max_len_q is not None else problem.len_q
        blocks = -(-queries // 128) * problem.heads_q * problem.batch
        small = dim <= 128 and table is not _FP32 and (queries <= 64 or (blocks < device.sms and not problem.packed))
        chosen = (_parse(SMALL if small else row[0]),)
        if small:
            why = "few queries: smaller tiles waste fewer rows and occupy more multiprocessors"
    if table is _HOPPER and (problem.dim_qk % 16 or problem.dim_v % 16):
        chosen = tuple(replace(tile, descriptors=True) for tile in chosen)
        why += "; descriptors, since Triton vectorises loads only of strides that are multiples of 16"
    return chosen, why


def _table(problem: Problem, device: Device):
    if problem.dtype == torch.float32:
        return _FP32, "IEEE fp32 products run on the FMA units: small tiles"
    if device.capability >= (10, 0):
        return _BLACKWELL, "untimed; compiles without spills"
    if device.capability >= (9, 0):
        return _HOPPER, "fastest without spills on an H200 at 16k tokens"
    if device.capability == (8, 9):
        return _ADA, "untimed; compiles without spills in 99 KB of shared memory"
    return _AMPERE, "untimed; compiles without spills"
