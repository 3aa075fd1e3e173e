"""The private functions of `flash_attn` that ring and sequence-parallel libraries import: both passes, without autograd.

A backward takes the output and the LSE of the whole row, which may come from several forwards merged, and fills dq, dk, dv:

    P = exp(S - LSE),  delta = rowsum(dO O),  dS = P (dO V^T - delta)
"""

from typing import Any

import torch

from rowmax.api import attention, attention_varlen
from rowmax.errors import ProblemError
from rowmax.flash_attn.arguments import (
    check_dropout,
    length,
    no_mask,
    options,
    our_lse,
    refuse_dropout,
    rows,
    their_lse,
    window,
)
from rowmax.flash_attn.dmask import s_dmask
from rowmax.flash_attn.live import attend_cache, attend_live, gathered, live_bounds
from rowmax.serving import attention_paged


@torch.no_grad()
def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    return_softmax,
):
    """`(out, softmax_lse, S_dmask, rng_state)`; dense tensors."""
    q, k, v = rows(q, k, v)
    given = {"dropout_p": dropout_p, "softmax_scale": softmax_scale, "causal": causal, "alibi_slopes": alibi_slopes}
    chosen = options(q, **given, window_size=(window_size_left, window_size_right), softcap=softcap, len_k=k.shape[1])
    out, lse = attention(q, k, v, return_lse=True, **chosen)
    mask = s_dmask(q, k, lse, chosen) if return_softmax and dropout_p else no_mask(q)
    return out, their_lse(lse), mask, _rng(q, chosen)


@torch.no_grad()
def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
    num_splits=0,
):
    """`(out, softmax_lse, S_dmask, rng_state)`; packed tensors.

    Of each sequence's keys the first `seqused_k` `[B]` count, without `leftpad_k` `[B]` ones at the beginning.
    """
    q, k, v = rows(q, k, v)
    given = {"dropout_p": dropout_p, "softmax_scale": softmax_scale, "causal": causal, "alibi_slopes": alibi_slopes}
    chosen: dict[str, Any] = options(q, **given, window_size=(window_size_left, window_size_right), softcap=softcap)
    lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1] if seqused_k is None else seqused_k
    if block_table is not None:
        out, lse = over_pages(q, k, v, cu_seqlens_q, block_table, lengths, length(max_seqlen_q), chosen, leftpad_k)
    elif seqused_k is not None or leftpad_k is not None:
        refuse_dropout(chosen, "with seqused_k or leftpad_k, which its backward is not given")
        base, end = cu_seqlens_k[:-1], cu_seqlens_k[1:]
        ends = torch.minimum(base + lengths.clamp(min=0), end)
        starts = base if leftpad_k is None else torch.minimum(base + leftpad_k.clamp(min=0), ends)
        cu = live_bounds(cu_seqlens_q, starts, ends, end)
        out, lse = attend_live(q, cu, k, v, chosen, (length(max_seqlen_q), length(max_seqlen_k)))
    else:
        hints = {"max_seqlen_q": length(max_seqlen_q), "max_seqlen_k": length(max_seqlen_k)}
        out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, **hints, **chosen)
    wanted = return_softmax and "dropout_p" in chosen
    lengths_of = (cu_seqlens_q, cu_seqlens_k, length(max_seqlen_q), length(max_seqlen_k))
    mask = s_dmask(q, k, lse, chosen, *lengths_of) if wanted else no_mask(q)
    return out, their_lse(lse), mask, _rng(q, chosen)


def over_pages(q, k_pages, v_pages, cu_seqlens_q, block_table, lengths, max_seqlen_q, chosen, leftpad=None):
    """`(out, lse)` of packed queries over pages; with ALiBi, a soft-cap or padding on the left over a copy of the pages."""
    refuse_dropout(chosen, "over pages")
    if leftpad is None and "softcap" not in chosen and "alibi_slopes" not in chosen:
        hints = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
        return attention_paged(q, k_pages, v_pages, block_table, lengths, return_lse=True, **hints, **chosen)
    k, v = gathered(k_pages, block_table), gathered(v_pages, block_table)
    return attend_cache(q, cu_seqlens_q, k, v, lengths, leftpad, chosen, max_seqlen_q)


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
):
    """Fills dq, dk and dv where they are not None; returns delta `[B, H, Tq]`, fp32."""
    sides = window((window_size_left, window_size_right), k.shape[1])
    numbers = (None, None, softmax_scale, causal, sides, softcap, alibi_slopes, deterministic)
    return _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p, None, None, *numbers, rng_state)


def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
    zero_tensors=False,
):
    """Fills dq, dk and dv where they are not None; returns delta `[H, Tq]`, fp32."""
    sides = window((window_size_left, window_size_right))
    lengths = (length(max_seqlen_q), length(max_seqlen_k))
    numbers = (*lengths, softmax_scale, causal, sides, softcap, alibi_slopes, deterministic)
    return _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p, cu_seqlens_q, cu_seqlens_k, *numbers, rng_state)


@torch.no_grad()
def _backward(
    dout, q, k, v, out, lse, targets, dropout_p, cu_q, cu_k, max_q, max_k, scale, causal, sides, softcap, slopes, deterministic,
    rng=None,
):  # fmt: skip
    check_dropout(dropout_p)
    if dropout_p and rng is None:
        raise ProblemError("a backward with dropout needs the rng_state that its forward returned.")
    dout, q, k, v, out = rows(dout, q, k, v, out)
    left, right = sides[0], 0 if causal else sides[1]
    needs = [target is not None for target in targets]
    numbers = (max_q, max_k, None if scale is None else float(scale), left, right, bool(deterministic), "")
    lse = our_lse(lse).contiguous()
    if dropout_p:
        slopes = None if slopes is None else slopes.to(lse.dtype)
        call = (dout, None, out, lse, q, k, v, cu_q, cu_k, slopes, None, None, None, rng[:1], None, *numbers)
        odds = (max(float(softcap), 0.0), float(dropout_p))
        grads = torch.ops.rowmax.backward_masked([*needs, False, False], *call, *odds)
    elif softcap > 0 or slopes is not None:
        slopes = None if slopes is None else slopes.to(lse.dtype)
        call = (dout, None, out, lse, q, k, v, cu_q, cu_k, slopes, None, *numbers, max(float(softcap), 0.0))
        grads = torch.ops.rowmax.backward_scored([*needs, False], *call)
    else:
        grads = torch.ops.rowmax.backward(needs, dout, None, out, lse, q, k, v, cu_q, cu_k, *numbers)
    for target, grad in zip(targets, grads, strict=False):
        if target is not None:
            target.copy_(grad)
    return (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(-1, -2).contiguous()


def _rng(q: torch.Tensor, chosen: dict) -> torch.Tensor:
    """`rng_state`, int64 `[2]`: the seed of dropout and 0; 0 where nothing was drawn."""
    state = q.new_zeros(2, dtype=torch.int64)
    if "seed" in chosen:
        state[:1] = chosen["seed"]
    return state


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
