"""Arguments of `flash_attn_interface` in the words of rowmax. For the modules beside this one."""

from typing import Any, Optional

import torch

from rowmax.errors import ProblemError, Unsupported
from rowmax.flash_attn.arguments import options


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
    if attention_chunk:
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
    if qv.shape[:-1] != q.shape[:-1] or qv.shape[-1] != v.shape[-1]:
        raise ProblemError(f"qv must have q's shape with v's last dimension; got {list(qv.shape)} beside {list(q.shape)}.")
    return torch.cat([q, qv], -1), torch.cat([k, v], -1)


def check_splits(num_splits: int) -> None:
    if not 0 <= num_splits <= 256:
        raise ProblemError(f"num_splits must be in 0..256, where 0 leaves it to the plan; got {num_splits}.")


def nothing(like: torch.Tensor) -> torch.Tensor:
    """Partial results, of which there are none."""
    return torch.empty(0, dtype=torch.float32, device=like.device)


def used(cu_seqlens: torch.Tensor, seqused: Optional[torch.Tensor]) -> torch.Tensor:
    """Where the rows in use of each sequence end."""
    first, last = cu_seqlens[:-1], cu_seqlens[1:]
    return last if seqused is None else torch.minimum(first + seqused.clamp(min=0), last)
