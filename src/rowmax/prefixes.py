"""Prefixes of different lengths: causal attention in which sequence b sees its first prefix[b] keys from everywhere.

    rows before the end of the prefix    see the prefix, all of it and nothing else
    rows behind it                       see what causal attention shows them, the prefix among it

Two calls over packed sequences whose keys overlap: no pair is computed twice, and every backend that takes packed sequences
takes prefixes. For `api`, which passes the call.
"""

from typing import Optional

import torch

from rowmax.arguments import Beside, check_tensors
from rowmax.errors import ProblemError


def check(prefix: torch.Tensor, batch: int, device) -> None:
    """
    Raises:
        ProblemError: it is no `[B]` of integers on the tensors' device, or, on the CPU, has a negative number.
    """
    check_tensors(prefix=prefix)
    if prefix.dtype not in (torch.int32, torch.int64) or tuple(prefix.shape) != (batch,) or prefix.device != device:
        raise ProblemError(
            f"prefix must be an integer, or an int32 or int64 tensor [B] on q's device, here [{batch}] on {device}; got "
            f"{prefix.dtype}, {list(prefix.shape)} on {prefix.device}."
        )
    if device.type == "cpu" and not torch.compiler.is_compiling() and bool((prefix < 0).any()):
        raise ProblemError(f"prefix must be at least 0 in every sequence; got {prefix.tolist()[:8]}.")


def attend(call, q, k, v, cu_q, cu_k, numbers, return_lse: bool, scores: Beside):
    """`call` is `api._call`; the prefix is among the scores."""
    max_q, max_k, scale, left, right, deterministic, plan = numbers
    prefix, slopes = scores.prefix, scores.slopes
    other = {"a bias": scores.bias, "a mask": scores.mask, "dropout": scores.dropout_p or None, "a score_mod": scores.score_mod}
    for name, value in {**other, "sink_tokens": scores.sink_tokens, "chunk": scores.chunk}.items():
        if value is not None:
            raise ProblemError(
                f"a prefix of each sequence comes without {name}; give one integer for all, or put it in a mask."
            )
    if left is not None or right != 0:
        raise ProblemError("a prefix of each sequence comes with causal=True and no window; one integer for all takes any.")
    shape = None
    if cu_q is None:
        shape = batch, len_q, len_k = q.shape[0], q.shape[1], k.shape[1]
        cu_q, cu_k = (torch.arange(batch + 1, dtype=torch.int32, device=q.device) * n for n in (len_q, len_k))
        q, k, v, max_q, max_k = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), len_q, len_k
    check(prefix, cu_q.shape[0] - 1, q.device)  # type: ignore[arg-type]
    before, behind = _halves(cu_q, cu_k, prefix)
    found = []
    for causal, (runs_q, runs_k) in ((False, before), (True, behind)):
        runs = (runs_q.shape[0] - 1) // max(cu_q.shape[0] - 1, 1)
        own = slopes.repeat_interleave(runs, 0) if slopes is not None and slopes.dim() == 2 else slopes
        half = None if scores.softcap is own is scores.sink is None else Beside(scores.softcap, own, scores.sink)
        given = (runs_q, runs_k, max_q, max_k, causal, None, scale, return_lse, deterministic, plan or None, half)
        found.append(call(q, k, v, *given))
    if not return_lse:
        return _shaped(found[0] + found[1], shape)  # each is 0 in the other's rows
    (first, first_lse), (second, second_lse) = found
    row = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    in_first = (torch.searchsorted(before[0], row, right=True) - 1) % _RUNS == 0
    return _shaped(first + second, shape), _shaped_lse(torch.where(in_first, first_lse, second_lse), shape)


_RUNS = 3  # of the rows before the prefix's end


def _halves(cu_q, cu_k, prefix):
    """`(cu_seqlens_q, cu_seqlens_k)` of both calls: runs of queries and of keys, of which one in each sequence has both."""
    cu_q, cu_k = cu_q.to(torch.int32), cu_k.to(torch.int32)
    len_q, len_k = (cu.diff().clamp(min=0) for cu in (cu_q, cu_k))
    keys = torch.minimum(prefix.clamp(0, 2**31 - 1).to(torch.int32), len_k)
    rows = torch.minimum((keys - (len_k - len_q)).clamp(min=0), len_q)
    nothing = torch.zeros_like(rows)
    before = ((rows, len_q - rows, nothing), (keys, nothing, len_k - keys))
    behind = ((rows, len_q - rows), (nothing, len_k))
    return [[_bounds(cu[:1], runs) for cu, runs in zip((cu_q, cu_k), half, strict=True)] for half in (before, behind)]


def _bounds(begin: torch.Tensor, lengths) -> torch.Tensor:
    ends = torch.stack(lengths, 1).flatten().cumsum(0, dtype=torch.int32)
    return torch.cat([begin, begin + ends])


def _shaped(out: torch.Tensor, shape: Optional[tuple]) -> torch.Tensor:
    return out if shape is None else out.unflatten(0, shape[:2])


def _shaped_lse(lse: torch.Tensor, shape: Optional[tuple]) -> torch.Tensor:
    return lse if shape is None else lse.unflatten(1, shape[:2]).transpose(0, 1).contiguous()
