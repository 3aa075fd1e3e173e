"""The functions of `flash_attn_interface` (FlashAttention 3): names, arguments, their order and defaults.

Dense tensors are `[B, T, H, D]`, packed ones `[T, H, D]` with `cu_seqlens` int32 `[B + 1]`. All return `out`, and with
`return_attn_probs` `(out, softmax_lse)`: fp32 `[B, H, T]` or `[H, T]`, natural logarithm, -inf where a query sees no key. Masks
are aligned to the bottom right: query i sees key j iff j <= i + Tk - Tq. Types, dimensions, errors (`ProblemError`,
`Unsupported`) and the method are those of `rowmax.attention`.
"""

from typing import Any, Optional, Union

import torch

from rowmax.api import attention, attention_varlen, merge
from rowmax.arguments import check_tensors, counted
from rowmax.errors import ProblemError, Unsupported
from rowmax.flash_attn.arguments import apart, flag, length, rows
from rowmax.flash_attn.kvcache import Cache, Rotary, attend_and_append, check, check_kinds
from rowmax.flash_attn.live import attend_live, live_bounds
from rowmax.flash_attn_3.arguments import check_lengths, check_splits, chosen_of, nothing, used, with_values
from rowmax.flash_attn_3.private import _flash_attn_backward  # noqa: F401, it belongs to this module there


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """Attention of q `[B, Tq, H, D]` over k `[B, Tk, Hk, D]`, v `[B, Tk, Hk, Dv]`; H is a multiple of Hk.

    Args:
        softmax_scale: `None` is `1/sqrt(D)`, with qv `1/sqrt(D + Dv)`.
        qv: `[B, Tq, H, Dv]`: scores are `q k^T + qv v^T`. Copies q and k.
        q_descale, k_descale, v_descale: of tensors in 8 bits, which are `Unsupported`.
        window_size: keys to the left and right of the diagonal, -1 for no limit.
        attention_chunk: 0; else `Unsupported`.
        softcap: above 0, scores become `softcap * tanh(score / softcap)`.
        num_splits, pack_gqa, sm_margin: hints, which the plan does not need.
        deterministic: a bitwise repeatable backward.
    """
    q, k, v, qv = rows(q, k, v, qv)
    check_splits(num_splits)
    numbers = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    len_k = k.shape[1] if k.dim() == 4 else None
    chosen = chosen_of(q, qv, (q_descale, k_descale, v_descale), attention_chunk=attention_chunk, len_k=len_k, **numbers)
    q, k = with_values(q, k, v, qv)
    flags = {"deterministic": flag("deterministic", deterministic), "return_lse": flag("return_attn_probs", return_attn_probs)}
    return attention(q, k, v, **flags, **chosen)


def flash_attn_qkvpacked_func(
    qkv,
    softmax_scale=None,
    causal=False,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    deterministic=False,
    num_heads_q=None,
    sm_margin=0,
    return_attn_probs=False,
):
    """`flash_attn_func` with q, k and v in one tensor: `[B, T, 3, H, D]`, or with `num_heads_q` = H `[B, T, H + 2 Hk, D]`."""
    check_tensors(qkv=qkv)
    if qkv.dim() == 5:
        q, k, v = apart("qkv", qkv, 2, 3)
    elif qkv.dim() != 4:
        raise ProblemError(f"qkv must be [B, T, 3, H, D], or [B, T, H + 2 Hk, D] with num_heads_q; got {list(qkv.shape)}.")
    else:
        num_heads_q = None if num_heads_q is None else counted("num_heads_q", num_heads_q, 0, qkv.shape[2])
        heads = qkv.shape[2] if num_heads_q is None else qkv.shape[2] - num_heads_q
        if num_heads_q is None or heads % 2:
            raise ProblemError(
                f"qkv [B, T, H + 2 Hk, D] needs num_heads_q = H, with an even number of heads left; got {list(qkv.shape)} and "
                f"num_heads_q={num_heads_q}."
            )
        q, k, v = qkv.split([num_heads_q, heads // 2, heads // 2], -2)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    more = {"window_size": window_size, "attention_chunk": attention_chunk, "softcap": softcap, "sm_margin": sm_margin}
    more |= {"deterministic": deterministic, "return_attn_probs": return_attn_probs}
    return flash_attn_func(q, k, v, softmax_scale, causal, **descales, **more)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """Attention of packed sequences, q `[Tq, H, D]`, k `[Tk, Hk, D]`, v `[Tk, Hk, Dv]`. The maximal lengths are hints.

    Args:
        seqused_q, seqused_k: int32 `[B]`: rows of each sequence that count, its first ones. Other rows of q give 0 and -inf.
    """
    q, k, v, qv = rows(q, k, v, qv)
    check_splits(num_splits)
    numbers = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    chosen = chosen_of(q, qv, (q_descale, k_descale, v_descale), attention_chunk=attention_chunk, **numbers)
    q, k = with_values(q, k, v, qv)
    chosen["deterministic"] = flag("deterministic", deterministic)
    return_attn_probs = flag("return_attn_probs", return_attn_probs)
    hints = (length(max_seqlen_q), length(max_seqlen_k))
    if seqused_q is None and seqused_k is None:
        chosen |= {"max_seqlen_q": hints[0], "max_seqlen_k": hints[1], "return_lse": return_attn_probs}
        return attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **chosen)
    given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k}
    check_lengths(q, **given)
    ends = used(cu_seqlens_k, seqused_k)
    cu = live_bounds(cu_seqlens_q, cu_seqlens_k[:-1], ends, cu_seqlens_k[1:], used(cu_seqlens_q, seqused_q))
    found = attend_live(q, cu, k, v, chosen, hints)
    return found if return_attn_probs else found[0]


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Attention over disjoint parts of the keys, combined: `(out, lse)`.

    Args:
        out_partial: fp32 `[parts, B, T, H, D]`, or `[parts, T, H, D]`; lse_partial: fp32 `[parts, B, T, H]`, `[parts, T, H]`.
        out: where to write; out_dtype: of the result, else that of `out_partial`.
    """
    check_tensors(out_partial=out_partial, lse_partial=lse_partial, **({} if out is None else {"out": out}))
    if not (out_dtype is None or isinstance(out_dtype, torch.dtype)):
        raise ProblemError(f"out_dtype must be a torch.dtype or None; got {type(out_dtype).__name__}.")
    like = None if out is None else (out.shape, out.device, out.is_floating_point())
    if out is not None and like != (out_partial.shape[1:], out_partial.device, True):
        raise ProblemError(
            f"out must be floating point {list(out_partial.shape[1:])} on {out_partial.device}; got {out.dtype} "
            f"{list(out.shape)} on {out.device}."
        )
    if out_partial.dim() not in (4, 5) or lse_partial.shape != out_partial.shape[:-1]:
        raise ProblemError(
            "out_partial must be [parts, B, T, H, D] or [parts, T, H, D] and lse_partial the same without D; got "
            f"{list(out_partial.shape)} and {list(lse_partial.shape)}."
        )
    result, lse = merge(out_partial.unbind(0), lse_partial.transpose(-1, -2).unbind(0))
    result = result if out_dtype is None else result.to(out_dtype)
    return (result if out is None else out.copy_(result)), lse.transpose(-1, -2)


@torch.no_grad()
def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens: Optional[Union[int, torch.Tensor]] = None,
    cache_batch_idx: Optional[torch.Tensor] = None,
    cache_leftpad: Optional[torch.Tensor] = None,
    page_table: Optional[torch.Tensor] = None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k_new: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[torch.Tensor] = None,
    q_descale: Optional[torch.Tensor] = None,
    k_descale: Optional[torch.Tensor] = None,
    v_descale: Optional[torch.Tensor] = None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    """Attention of q over a cache, to which k and v are added first. Inference only.

    Args:
        q: `[B, Tq, H, D]`, or with `cu_seqlens_q` packed `[Tq, H, D]`.
        k_cache, v_cache: `[sequences, Tcache, Hk, D]`, or with `page_table` pages `[page, slot, Hk, D]`. Changed in place.
        k, v: `[B, Tnew, Hk, D]`, or with `cu_seqlens_k_new` packed, written at `cache_seqlens`.
        qv: `Unsupported`: `rowmax.attention_paged` with `v_pages = k_pages[..., :Dv]` reads such a cache without a copy.
        rotary_cos, rotary_sin: `[positions, R / 2]`: k is turned by its positions and q by the same ones if the mask is causal
            or has a window, else all of q by the first of them. They need k.
        cache_seqlens: keys in the cache before: a number or int32 `[B]`; `None`: all of them.
        cache_batch_idx, cache_leftpad: int32 `[B]`: the sequence of the cache for each of q; keys at its beginning that are
            padding.
        page_table: int32 `[B, pages]`.
        rotary_seqlens: int32 `[B]`: the first position, if it is not `cache_seqlens`.
        scheduler_metadata, pack_gqa, sm_margin: hints, which the plan does not need.
        num_splits: 0, as the plan decides, or how many parts keys are shared out in.

    Returns:
        out, shaped as q; with `return_softmax_lse` `(out, lse, out_accum, lse_accum)`: lse `[B, H, Tq]` or `[H, Tq]`, fp32, and
        two empty tensors, which hold the parts there.
    """
    if qv is not None:
        fix = "Put both keys into one cache and call rowmax.attention_paged with v_pages=k_pages[..., :Dv]."
        raise Unsupported(f"rowmax.flash_attn_3 does not take qv over a cache. {fix}")
    q, k, v = rows(q, k, v, needed=1)
    num_splits = check_splits(num_splits)
    given = (k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, page_table)
    if cu_seqlens_q is None and cu_seqlens_k_new is None:
        check(q, k_cache, v_cache, *given)
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new, "rotary_seqlens": rotary_seqlens}
    check_kinds(q, k_cache, v_cache, *given, **lengths)
    if (k is None) != (v is None) or (rotary_cos is None) != (rotary_sin is None) or (k is not None and cache_seqlens is None):
        raise ProblemError("k and v come together and with cache_seqlens, rotary_cos with rotary_sin; one of them is missing.")
    if cache_leftpad is not None and page_table is not None:
        raise ProblemError("page_table does not take cache_leftpad: pages say where keys lie.")
    numbers = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    chosen: dict[str, Any] = chosen_of(q, None, (q_descale, k_descale, v_descale), attention_chunk=attention_chunk, **numbers)
    along = chosen["causal"] or tuple(window_size) != (-1, -1)
    rotary = None
    if rotary_cos is not None:
        rotary = Rotary(rotary_cos, rotary_sin, flag("rotary_interleaved", rotary_interleaved), along, rotary_seqlens)
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, page_table)
    packed = {"cu_q": cu_seqlens_q, "cu_new": cu_seqlens_k_new, "max_seqlen_q": length(max_seqlen_q)}
    out, lse = attend_and_append(cache, q, k, v, rotary, num_splits, chosen, **packed)
    return (out, lse, nothing(q), nothing(q)) if flag("return_softmax_lse", return_softmax_lse) else out


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens: torch.Tensor,
    qkv_dtype=torch.bfloat16,
    headdim_v=None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k_new: Optional[torch.Tensor] = None,
    cache_leftpad: Optional[torch.Tensor] = None,
    page_size: Optional[int] = None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    """An empty tensor: calls here read lengths on the device, and need nothing worked out before."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


@torch.no_grad()
def _flash_attn_forward(
    q,
    k,
    v,
    k_new=None,
    v_new=None,
    qv=None,
    out_=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    page_table=None,
    kv_batch_idx=None,
    leftpad_k=None,
    rotary_cos=None,
    rotary_sin=None,
    seqlens_rotary=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=1,
    pack_gqa=None,
    sm_margin=0,
):
    """`(out, softmax_lse, out_accum, lse_accum)` without autograd, the last two empty: over a cache if any argument of one is
    there, else of dense tensors, or of packed ones."""
    shared: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "attention_chunk": attention_chunk}
    shared |= {"window_size": (window_size_left, window_size_right), "softcap": softcap, "num_splits": num_splits, "qv": qv}
    shared |= {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    of_cache = any(t is not None for t in (k_new, v_new, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin))
    if of_cache or (cu_seqlens_k is None and seqused_k is not None):
        if seqused_q is not None or cu_seqlens_k is not None:
            raise Unsupported(
                "rowmax.flash_attn_3 takes neither seqused_q nor cu_seqlens_k over a cache: seqused_k has its lengths."
            )
        tables = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_seqlens": seqlens_rotary}
        places = {
            "cache_seqlens": seqused_k,
            "cache_batch_idx": kv_batch_idx,
            "cache_leftpad": leftpad_k,
            "page_table": page_table,
        }
        packed = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new, "max_seqlen_q": max_seqlen_q}
        more = {**tables, **places, **packed, **shared, "rotary_interleaved": rotary_interleaved, "return_softmax_lse": True}
        out, lse, *_ = flash_attn_with_kvcache(q, k, v, k_new, v_new, **more)
    elif cu_seqlens_q is not None:
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
        out, lse = flash_attn_varlen_func(q, k, v, *lengths, **shared, return_attn_probs=True)
    else:
        out, lse = flash_attn_func(q, k, v, **shared, return_attn_probs=True)
    return (out if out_ is None else out_.copy_(out)), lse, nothing(q), nothing(q)
