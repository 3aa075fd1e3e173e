"""`F.scaled_dot_product_attention` by rowmax: as a function of the same arguments, and below torch's own.

    out = rowmax.sdpa(query, key, value, is_causal=True)

    from rowmax.integrations import sdpa
    sdpa.activate()     from here on torch's flash attention on CUDA, for SDPA and for `varlen_attn`, is rowmax
    sdpa.restore()      and again as before

The second goes through torch's registry of flash attention (`torch.nn.attention.activate_flash_attention_impl`). Torch decides,
as before, which calls go to flash attention; those that rowmax cannot run raise `Unsupported`, nothing is computed otherwise.
"""

from typing import Any, NoReturn, Optional

import torch

from rowmax.api import attention
from rowmax.arguments import check_tensors, flags
from rowmax.errors import ProblemError, Unsupported
from rowmax.family import refuse
from rowmax.flash_attn.interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

NAME = "rowmax"


def sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, **not_taken: NoReturn
) -> torch.Tensor:
    """Attention with the arguments and the meaning of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: `[..., H, Tq, D]`; key: `[..., Hk, Tk, D]`; value: `[..., Hk, Tk, Dv]`, at least `[T, D]`. Leading dimensions
            of 1 are broadcast. fp16, bf16, fp32 (fp64 on the CPU), D and Dv from 1 to 256.
        attn_mask: `[..., H, Tq, Tk]` with sizes of 1 and leading dimensions broadcast: boolean, True where the query sees the
            key, or added to the scores, of the query's type or fp32, with its gradient. Or a
            `torch.nn.attention.bias.CausalBias`.
        dropout_p: of the weights, from torch's generator of the device. Other weights than torch's are dropped.
        is_causal: query i sees keys j <= i: aligned to the top left, where `rowmax.attention` aligns to the bottom right. They
            differ where Tq != Tk.
        scale: `None` is `1/sqrt(D)`.
        enable_gqa: H may be a multiple of Hk; consecutive heads share a KV head.

    Returns:
        `[..., H, Tq, Dv]` in the query's type. Gradients flow to query, key, value and a mask that is added. A query that sees
        no key gives 0, where torch's own backends differ.

    Raises:
        ProblemError, Unsupported: as `rowmax.attention`, whose method it is.
    """
    if not_taken:
        refuse("sdpa", not_taken)
    aligned_right = False
    if attn_mask is not None and is_causal:
        raise ProblemError("give attn_mask or is_causal=True, not both; rowmax.attention takes causal= and mask= together.")
    if (variant := getattr(attn_mask, "variant", None)) is not None:
        attn_mask, is_causal, aligned_right = None, True, variant.name == "LOWER_RIGHT"
    if not (type(is_causal) is type(enable_gqa) is bool):
        flags(is_causal=is_causal, enable_gqa=enable_gqa)
    check_tensors(query=query, key=key, value=value, **({} if attn_mask is None else {"attn_mask": attn_mask}))
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ProblemError(f"{name} must be a tensor [..., T, D]; got {list(tensor.shape)}.")
    rank = max(query.dim(), 3)
    q, k, v = (t if t.dim() >= 3 else t.unsqueeze(0) for t in (query, key, value))
    if not q.dim() == k.dim() == v.dim():
        shapes = f"{list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        raise ProblemError(f"query, key and value must have one rank; got {shapes}.")
    if rank == 3:  # leading dimension: a batch of one head each
        q, k, v = (t.unsqueeze(-3) for t in (q, k, v))
    if not enable_gqa and q.shape[-3] != k.shape[-3]:
        if 1 not in (q.shape[-3], k.shape[-3]):
            raise ProblemError(f"{q.shape[-3]} query heads over {k.shape[-3]} KV heads need enable_gqa=True.")
        q, k, v = (t.expand(*t.shape[:-3], max(q.shape[-3], k.shape[-3]), -1, -1) for t in (q, k, v))
    try:
        lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except RuntimeError:
        shapes = f"{list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        raise ProblemError(f"leading dimensions of query, key and value must be equal or 1; got {shapes}.") from None
    q, k, v = (t.expand(*lead, -1, -1, -1).flatten(0, -4).transpose(1, 2) for t in (q, k, v))
    q, k, v = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (q, k, v))
    options: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p}
    len_q, len_k = q.shape[1], k.shape[1]
    if is_causal and (aligned_right or len_q == len_k):
        options["causal"] = True
    elif is_causal and len_k > len_q:  # nobody sees the keys behind
        k, v, options["causal"] = k[:, :len_q], v[:, :len_q], True
    elif is_causal:
        options["window"] = (None, len_q - len_k)
    if attn_mask is not None:
        options["mask" if attn_mask.dtype == torch.bool else "bias"] = _for_pairs(attn_mask, lead, rank, (q, k))
    out = attention(q, k, v, **options).transpose(1, 2).unflatten(0, lead)
    out = out.squeeze(-3) if rank == 3 else out
    return out.squeeze(0) if query.dim() == 2 else out


def _for_pairs(attn_mask: torch.Tensor, lead, rank: int, tensors) -> torch.Tensor:
    """`[B|1, H|1, Tq|1, Tk|1]` of a mask that broadcasts to `[*lead, H, Tq, Tk]`; copied only where leading sizes differ."""
    q, k = tensors
    if rank == 3 and attn_mask.dim() == 3:  # a batch of one head each
        attn_mask = attn_mask.unsqueeze(-3)
    whole = (*lead, q.shape[2], q.shape[1], k.shape[1])
    try:
        torch.broadcast_shapes(attn_mask.shape, whole)
        fits = attn_mask.dim() <= len(whole)
    except RuntimeError:
        fits = False
    if not fits:
        raise ProblemError(f"attn_mask must broadcast to {list(whole)} ([..., H, Tq, Tk]); got {list(attn_mask.shape)}.")
    mask = attn_mask[(None,) * (len(whole) - attn_mask.dim())]
    if any(size != 1 for size in mask.shape[:-3]):
        mask = mask.expand(*lead, *mask.shape[-3:])
    return mask.flatten(0, -4)


def activate() -> None:
    """Put rowmax in the place of torch's flash attention on CUDA, through torch's registry.

    Raises:
        Unsupported: this torch has no registry.
    """
    registry = _registry()
    registry.register_flash_attention_impl(NAME, register_fn=Override)
    registry.activate_flash_attention_impl(NAME)


def restore() -> None:
    """Give torch its own flash attention back."""
    registry = _registry()
    if registry.current_flash_attention_impl() == NAME:
        registry.restore_flash_attention_impl()


def _registry():
    from torch.nn import attention as registry

    if not hasattr(registry, "activate_flash_attention_impl"):
        raise Unsupported(f"torch {torch.__version__} has no registry of flash attention; call rowmax.sdpa instead.")
    return registry


class Override:
    """Torch's operators of flash attention on one kind of device, as long as it lives and is not removed."""

    def __init__(self, key: str = "CUDA"):
        self._library: Optional[torch.library.Library] = torch.library.Library("aten", "IMPL", key)
        for name, function in {
            "_flash_attention_forward": forward,
            "_flash_attention_backward": backward,
            "_flash_attention_forward_no_dropout_inplace": forward_inplace,
            "_scaled_dot_product_flash_attention": sdpa_forward,
            "_scaled_dot_product_flash_attention_backward": sdpa_backward,
        }.items():
            if hasattr(torch.ops.aten, name):
                self._library.impl(name, function, key)

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
        self._library = None


# ---- torch's operators, in the words of flash_attn -----------------------------------------------------------------


def _side(value) -> int:
    return -1 if value is None else value


def forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
):  # fmt: skip
    """`aten::_flash_attention_forward`: dense `[B, T, H, D]`, packed or in pages."""
    sides = (_side(window_size_left), _side(window_size_right))
    if cum_seq_q is None:
        if seqused_k is not None or block_table is not None:
            raise Unsupported("rowmax: seqused_k and block_table come with cum_seq_q.")
        out, lse, _, rng = _flash_attn_forward(query, key, value, dropout_p, scale, is_causal, *sides, 0.0, alibi_slopes, False)
    else:
        lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
        if cum_seq_k is None:
            raise Unsupported("rowmax: cum_seq_q needs cum_seq_k.")
        more = (*sides, 0.0, alibi_slopes, False, block_table, None, seqused_k)
        out, lse, _, rng = _flash_attn_varlen_forward(query, key, value, *lengths, dropout_p, scale, is_causal, *more)
    return out, lse, rng, rng.new_empty(()), query.new_empty(0)


def forward_inplace(out, *arguments, **named):
    """`aten::_flash_attention_forward_no_dropout_inplace`."""
    found, lse, *_ = forward(*arguments, **named)
    out.copy_(found)
    return lse


def backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """`aten::_flash_attention_backward`."""
    grads = tuple(torch.empty_like(t) for t in (query, key, value))
    tail = (dropout_p, scale, is_causal, _side(window_size_left), _side(window_size_right), 0.0, None, True)
    given = (grad_out, query, key, value, out, logsumexp, *grads)
    if cum_seq_q is None:
        _flash_attn_backward(*given, *tail, rng_state)
    else:
        _flash_attn_varlen_backward(*given, cum_seq_q, cum_seq_k, max_q, max_k, *tail, rng_state)
    return grads


def sdpa_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """`aten::_scaled_dot_product_flash_attention`: `[B, H, T, D]`; torch takes it for causal masks only where Tq = Tk."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    lengths = (query.shape[2], key.shape[2])
    out, lse, rng, unused, mask = forward(q, k, v, None, None, *lengths, dropout_p, is_causal, return_debug_mask, scale=scale)
    return out.transpose(1, 2), lse, None, None, *lengths, rng, unused, mask


def sdpa_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
    philox_offset, *, scale=None,
):  # fmt: skip
    """`aten::_scaled_dot_product_flash_attention_backward`."""
    tensors = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    rest = (logsumexp, None, None, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset)
    return tuple(grad.transpose(1, 2) for grad in backward(*tensors, *rest, scale=scale))
