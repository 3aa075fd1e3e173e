"""`S_dmask`: the weights of a call with dropout, negative where dropped, `[B, H, Tq, Tk]`. For tests and for looking at.

It needs memory of the size of the scores, whatever the backend: it is made from the LSE, by the definition.
"""

from itertools import pairwise
from typing import Optional

import torch

from rowmax import reference


def s_dmask(
    q, k, lse, chosen: dict, cu_seqlens_q=None, cu_seqlens_k=None, max_q: Optional[int] = None, max_k: Optional[int] = None
):
    """In the type of q. `lse`: natural logarithm, of `rowmax.attention`; `chosen`: its keyword arguments.

    Packed: `[B, H, max_q, max_k]`, 0 behind a sequence's end; lengths are read back from the device.
    """
    if cu_seqlens_q is None:
        parts = [_weights(q[b], k[b], lse[b], chosen, b) for b in range(q.shape[0])]
        shape = (q.shape[2], q.shape[1], k.shape[1])
        return torch.stack(parts) if parts else q.new_zeros((0, *shape))
    rows, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    longest = [max([b - a for a, b in pairwise(cu)], default=0) for cu in (rows, keys)]
    size = [found if given is None else given for found, given in zip(longest, (max_q, max_k), strict=True)]
    result = q.new_zeros(len(rows) - 1, q.shape[1], *size)
    for b in range(len(rows) - 1):
        own, seen = slice(rows[b], rows[b + 1]), slice(keys[b], keys[b + 1])
        weights = _weights(q[own], k[seen], lse[:, own], chosen, b)
        result[b, :, : weights.shape[1], : weights.shape[2]] = weights
    return result


def _weights(q, k, lse, chosen: dict, number: int) -> torch.Tensor:
    """`[H, Tq, Tk]` of sequence `number`: q `[Tq, H, D]`, k `[Tk, Hk, D]`, lse `[H, Tq]`."""
    left, right = chosen["window"]
    slopes, cap = chosen.get("alibi_slopes"), chosen.get("softcap")
    heads = torch.arange(q.shape[1], device=q.device) // (q.shape[1] // k.shape[1])
    wide = lse.dtype
    scores = torch.einsum("ihd,jhd->hij", q.to(wide), k.to(wide)[:, heads]) * chosen.get("scale", q.shape[-1] ** -0.5)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if slopes is not None:
        scores = scores + reference.alibi((slopes if slopes.dim() == 1 else slopes[number]).to(wide), len(q), len(k))
    seen = reference.visible(len(q), len(k), left, 0 if chosen["causal"] else right, device=q.device)
    weights = torch.where(seen, torch.exp(scores - torch.where(torch.isinf(lse), 0.0, lse).unsqueeze(-1)), 0.0)
    rows = torch.arange(len(q), device=q.device)
    kept = reference.dropout(int(chosen["seed"]), chosen["dropout_p"], [number], q.shape[1], len(q), len(k), rows)[0]
    return torch.where(kept, weights, -weights).to(q.dtype)
