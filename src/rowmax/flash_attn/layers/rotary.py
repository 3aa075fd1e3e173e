"""Rotary position embedding: each pair (a, b) of a head's first coordinates is turned by the angle of its position.

    (a, b) -> (a cos t - b sin t, a sin t + b cos t)

Pairs are (d, d + R/2) of the first R coordinates, or neighbours where `interleaved`. In fp32, rounded once.
Source: Su et al., "RoFormer" (2021), section 3.2.
"""

from typing import Optional, Union

import torch

from rowmax.errors import ProblemError
from rowmax.paged import rotate


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Union[int, torch.Tensor] = 0,
    cu_seqlens: Optional[torch.Tensor] = None,
    max_seqlen: Optional[int] = None,
) -> torch.Tensor:
    """x turned by its positions.

    Args:
        x: `[B, T, H, D]`, or with `cu_seqlens` packed `[T, H, D]`.
        cos, sin: `[positions, R / 2]`, R at most D; coordinates from R on stay as they are.
        seqlen_offsets: position of the first token: a number, or an integer tensor `[B]`.
        inplace: write to x, and return it.
    """
    if cu_seqlens is None:
        positions = torch.arange(x.shape[1], device=x.device)
        offset = seqlen_offsets if isinstance(seqlen_offsets, int) else seqlen_offsets.unsqueeze(-1)
        return _at(x, cos, sin, (positions + offset).expand(x.shape[0], -1), interleaved, inplace)
    tokens = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:], tokens, right=True).clamp(max=max(cu_seqlens.shape[0] - 2, 0))
    offset = seqlen_offsets if isinstance(seqlen_offsets, int) else seqlen_offsets[sequence]
    return _at(x, cos, sin, tokens - cu_seqlens[sequence] + offset, interleaved, inplace)


def _at(x, cos, sin, positions, interleaved: bool, inplace: bool) -> torch.Tensor:
    """For `positions` of x's shape without its last two dimensions. Beyond the table: its last row."""
    if cos.shape != sin.shape or cos.dim() != 2 or 2 * cos.shape[1] > x.shape[-1]:
        raise ProblemError(
            f"cos and sin must be [positions, R / 2] with R at most {x.shape[-1]}; got {list(cos.shape)} and {list(sin.shape)}."
        )
    at = positions.long().clamp(0, max(cos.shape[0] - 1, 0))
    turned = rotate(x, cos[at], sin[at], interleaved=bool(interleaved))
    return x.copy_(turned) if inplace else turned


apply_rotary_emb_func = apply_rotary_emb
