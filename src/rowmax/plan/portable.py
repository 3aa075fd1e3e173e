"""`q_outer`, the portable Triton kernels (FlashAttention-2): any GPU that Triton compiles for."""

import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Optional

import torch

from rowmax.device import Device
from rowmax.plan.tile import Tile
from rowmax.problem import Problem


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


@lru_cache(maxsize=1)
def _interpreting() -> bool:
    """Triton's own switch: kernels then run on the CPU, one operation after another, to be tested without a GPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def refuses(problem: Problem, device: Device, direction: str) -> Optional[str]:
    if not _has_triton():
        return "Triton is not installed: pip install 'rowmax[triton]'"
    if device.kind != "cuda" and not _interpreting():
        return f"runs on a GPU; the tensors are on {device.kind}"
    if problem.dtype == torch.float64:
        return "fp64 runs on the CPU only"
    return None


def tiles(problem: Problem, device: Device, direction: str) -> tuple[tuple[Tile, ...], str]:
    if direction == "forward":
        return (Tile(128, 64, 8, 3),), "untuned"
    return (Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)), "untuned"
