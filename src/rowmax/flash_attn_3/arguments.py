"""Arguments of `flash_attn_interface` in the words of rowmax. For the modules beside this one."""

from typing import Any, Optional

import torch

from rowmax.arguments import check_tensors, counted
from rowmax.errors import ProblemError, Unsupported
from rowmax.flash_attn.arguments import flag, options


def chosen_of(q, qv, descales, *, softmax_scale, causal, window_size, attention_chunk, softcap, len_k=None) -> dict[str, Any]:
    """Keyword arguments of `rowmax.attention`. The scale of q and qv together is `1/sqrt(D + Dv)`."""
    if q.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise Unsupported(
            f"rowmax.flash_attn_3 does not multiply in 8 bits; q is {q.dtype}. Convert to bf16, or keep the cache alone in 8 "
            "bits: rowmax.attention_paged takes torch.float8_e4m3fn pages with k_scale and v_scale."
        )
    for name, descale in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if descale is not None:
            raise ProblemError(f"{name} belongs to tensors in 8 bits; these are {q.dtype}. Leave it out.")
    if flag("attention_chunk", attention_chunk):
        raise Unsupported(
            f"rowmax.flash_attn_3 has no chunked attention; got attention_chunk={attention_chunk}. Pass each chunk as a "
            "sequence of its own to flash_attn_varlen_func."
        )
    if softmax_scale is None and qv is not None:
        softmax_scale = (q.shape[-1] + qv.shape[-1]) ** -0.5
    numbers = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    return options(q, dropout_p=0.0, alibi_slopes=None, len_k=len_k, **numbers)


def with_values(q, k, v, qv):
    """q and k of the scores q k^T + qv v^T: both side by side, a copy."""
    if qv is None:
        return q, k
    check_tensors(qv=qv)
    if not q.dtype == k.dtype == v.dtype == qv.dtype or not q.device == k.device == v.device == qv.device:
        raise ProblemError(
            f"q, k, v and qv must have one dtype and be on one device; got {q.dtype}, {k.dtype}, {v.dtype}, {qv.dtype} on "
            f"{q.device}, {k.device}, {v.device}, {qv.device}."
        )
    if k.shape[:-1] != v.shape[:-1]:
        raise ProblemError(f"k and v must agree in all but the last dimension; got {list(k.shape)} and {list(v.shape)}.")
    if qv.shape[:-1] != q.shape[:-1] or qv.shape[-1] != v.shape[-1]:
        raise ProblemError(f"qv must have q's shape with v's last dimension; got {list(qv.shape)} beside {list(q.shape)}.")
    return torch.cat([q, qv], -1), torch.cat([k, v], -1)


def check_splits(num_splits: int) -> int:
    """0 leaves it to the plan."""
    return counted("num_splits", num_splits, 0, 256)


def check_lengths(q, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k) -> None:
    """Of packed sequences some rows of which count: integers `[B + 1]` and `[B]` on one device."""
    named = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k}
    given = {name: t for name, t in named.items() if t is not None or name.startswith("cu")}
    check_tensors(**given)
    for name, tensor in given.items():
        rows = cu_seqlens_q.shape[0] if cu_seqlens_q.dim() == 1 else 0
        size = rows if name.startswith("cu") else rows - 1
        if tensor.dtype not in (torch.int32, torch.int64) or tuple(tensor.shape) != (size,) or tensor.device != q.device:
            raise ProblemError(
                f"{name} must be int32 or int64 [{max(size, 0)}] on {q.device}, of one batch with cu_seqlens_q; got "
                f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}."
            )


def nothing(like: torch.Tensor) -> torch.Tensor:
    """Partial results, of which there are none."""
    return torch.empty(0, dtype=torch.float32, device=like.device)


def used(cu_seqlens: torch.Tensor, seqused: Optional[torch.Tensor]) -> torch.Tensor:
    """Where the rows in use of each sequence end."""
    first, last = cu_seqlens[:-1], cu_seqlens[1:]
    return last if seqused is None else torch.minimum(first + seqused.clamp(min=0), last)
