"""The private backward of `flash_attn_interface`, which ring libraries import: without autograd, into the caller's tensors."""

import torch

from rowmax.errors import ProblemError
from rowmax.flash_attn.arguments import length, window
from rowmax.flash_attn.live import live_bounds
from rowmax.flash_attn.private import _backward
from rowmax.flash_attn_3.arguments import used


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    sequed_q=None,
    sequed_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dq=None,
    dk=None,
    dv=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    deterministic=False,
    sm_margin=0,
) -> torch.Tensor:
    """Fills dq, dk and dv where they are not None; returns delta, fp32 `[B, H, Tq]` or `[H, Tq]`. `sequed_q`, `sequed_k`: as
    `seqused_q` and `seqused_k` of `flash_attn_varlen_func`; rows that do not count get gradients of 0."""
    packed = cu_seqlens_q is not None
    if packed != (cu_seqlens_k is not None) or (not packed and (sequed_q is not None or sequed_k is not None)):
        raise ProblemError("cu_seqlens_q and cu_seqlens_k come together, and sequed_q, sequed_k with them.")
    cu = [cu_seqlens_q, cu_seqlens_k]
    if sequed_q is not None or sequed_k is not None:
        ends = used(cu_seqlens_k, sequed_k)
        cu = live_bounds(cu_seqlens_q, cu_seqlens_k[:-1], ends, cu_seqlens_k[1:], used(cu_seqlens_q, sequed_q))
    sides = window((window_size_left, window_size_right), None if packed else k.shape[1])
    numbers = (length(max_seqlen_q), length(max_seqlen_k), softmax_scale, is_causal, sides, softcap, None, deterministic)
    return _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), 0.0, cu[0], cu[1], *numbers)
