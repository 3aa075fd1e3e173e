"""The functions of `flash_attn.flash_attn_interface`: names, arguments, their order and defaults are those of version 2.8.4.

Dense tensors are `[B, T, H, D]`, packed ones `[T, H, D]` with `cu_seqlens` int32 `[B + 1]`. All of them return `out`, and with
`return_attn_probs` `(out, softmax_lse, S_dmask)`: lse fp32 `[B, H, T]` or `[H, T]`, natural logarithm, +inf where a query sees
no key; S_dmask is empty but where weights are dropped (`dmask`). Masks are aligned to the bottom right: query i sees key j iff
j <= i + Tk - Tq. Types, dimensions (any up to 256), errors (`ProblemError`, `Unsupported`) and the method are those of
`rowmax.attention`.
"""

from typing import Optional

import torch

from rowmax.api import attention, attention_varlen
from rowmax.arguments import check_tensors
from rowmax.errors import ProblemError
from rowmax.flash_attn.arguments import apart, flag, length, no_mask, options, rows, their_lse
from rowmax.flash_attn.dmask import s_dmask
from rowmax.flash_attn.kvcache import flash_attn_with_kvcache  # noqa: F401, it belongs to this module there
from rowmax.flash_attn.private import (  # noqa: F401, the names that other libraries import from here
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_backward,
    _wrapped_flash_attn_varlen_forward,
    over_pages,
)


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Attention of q `[B, Tq, H, D]` over k, v `[B, Tk, Hk, D]`; H is a multiple of Hk.

    Args:
        dropout_p: of the weights, by a seed from torch's generator of q's device. Other weights than there are dropped.
        softmax_scale: `None` is `1/sqrt(D)`.
        window_size: keys to the left and right of the diagonal, -1 for no limit.
        softcap: above 0, scores become `softcap * tanh(score / softcap)`.
        alibi_slopes: fp32 `[H]` or `[B, H]`: adds `-slope * |i + Tk - Tq - j|`.
        deterministic: a bitwise repeatable backward.
    """
    q, k, v = rows(q, k, v)
    chosen = options(
        q,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        len_k=k.shape[1] if k.dim() == 4 else None,
    )
    return_attn_probs = flag("return_attn_probs", return_attn_probs)
    deterministic = flag("deterministic", deterministic)
    found = attention(q, k, v, deterministic=deterministic, return_lse=return_attn_probs, **chosen)
    if not return_attn_probs:
        return found
    mask = s_dmask(q.detach(), k.detach(), found[1].detach(), chosen) if dropout_p else no_mask(q)
    return found[0], their_lse(found[1]), mask


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_func` with k and v in one tensor, kv `[B, Tk, 2, Hk, D]`."""
    k, v = apart("kv", kv, 2, 2)
    return flash_attn_func(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    )


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_func` with q, k and v in one tensor, qkv `[B, T, 3, H, D]`."""
    q, k, v = apart("qkv", qkv, 2, 3)
    return flash_attn_func(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    )


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table: Optional[torch.Tensor] = None,
):
    """Attention of packed sequences, q `[Tq, H, D]`, k, v `[Tk, Hk, D]`. With `block_table` `[B, pages]` k and v are pages
    `[page, slot, Hk, D]`, and there are no gradients. The lengths are hints."""
    q, k, v = rows(q, k, v)
    chosen = options(
        q,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    return_attn_probs = flag("return_attn_probs", return_attn_probs)
    if block_table is not None:
        check_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_table=block_table)
        if cu_seqlens_k.dim() != 1 or cu_seqlens_k.dtype not in (torch.int32, torch.int64):
            raise ProblemError(
                f"cu_seqlens_k must be int32 or int64 [B + 1]; got {cu_seqlens_k.dtype} {list(cu_seqlens_k.shape)}."
            )
        lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        found = over_pages(q, k, v, cu_seqlens_q, block_table, lengths, length(max_seqlen_q), chosen)
        found = found if return_attn_probs else found[0]
    else:
        chosen |= {"max_seqlen_q": length(max_seqlen_q), "max_seqlen_k": length(max_seqlen_k)}
        chosen |= {"deterministic": flag("deterministic", deterministic), "return_lse": return_attn_probs}
        found = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **chosen)
    if not return_attn_probs:
        return found
    mask = no_mask(q)
    if dropout_p:
        lengths = (cu_seqlens_q, cu_seqlens_k, length(max_seqlen_q), length(max_seqlen_k))
        mask = s_dmask(q.detach(), k.detach(), found[1].detach(), chosen, *lengths)
    return found[0], their_lse(found[1]), mask


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_varlen_func` with kv `[Tk, 2, Hk, D]`."""
    k, v = apart("kv", kv, 1, 2)
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size),
        *(softcap, alibi_slopes, deterministic, return_attn_probs),
    )


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_varlen_func` with qkv `[T, 3, H, D]`."""
    q, k, v = apart("qkv", qkv, 1, 3)
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size),
        *(softcap, alibi_slopes, deterministic, return_attn_probs),
    )
