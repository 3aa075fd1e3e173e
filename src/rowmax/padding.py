"""Dense tensors with padding as packed ones: where the keys, and the queries, of each row of the batch begin and end.

Packed sequences cost nothing where they have no queries or no keys. So a row of the batch becomes three of them: the live keys
and the queries that see them; the queries behind, which see nothing; the keys up to the next row's first live one, which nobody
sees. Every backend that takes packed sequences then takes padding, and skips it. For `api`.
"""

from typing import NamedTuple, Optional

import torch

from rowmax.errors import ProblemError

RUNS = 3  # sequences that a row of the batch becomes


class Lengths(NamedTuple):
    """int32 or int64 `[B]` each: queries that count, end of the keys that count, keys in front that do not. None: all, none."""

    seqlens_q: Optional[torch.Tensor] = None
    seqlens_k: Optional[torch.Tensor] = None
    leftpad_k: Optional[torch.Tensor] = None


def cu_seqlens(lengths: Lengths, batch: int, len_q: int, len_k: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """`cu_seqlens_q, cu_seqlens_k` `[RUNS * B + 1]`, int32, over `B * len_q` and `B * len_k` rows. On a GPU values are clamped.

    Raises:
        ProblemError: a tensor is no `[B]` of integers on the tensors' device, or, on the CPU, has a value out of range.
    """
    for name, tensor in zip(Lengths._fields, lengths, strict=True):
        _check(name, tensor, batch, device)
    row = torch.arange(batch, dtype=torch.int32, device=device)
    nothing = torch.zeros_like(row)
    queries, end, begin = (
        nothing + limit if t is None else t.to(torch.int32) for t, limit in zip(lengths, (len_q, len_k, 0), strict=True)
    )
    if device.type == "cpu" and not torch.compiler.is_compiling():
        _check_values(lengths, len_q, end, len_k)
    queries, end = queries.clamp(0, len_q), end.clamp(0, len_k)
    begin = torch.minimum(begin.clamp(min=0), end)
    first_q, first_k = row * len_q, row * len_k
    cu_q = torch.stack([first_q, first_q + queries, first_q + len_q], 1).flatten()
    cu_k = torch.stack([first_k + begin, first_k + end, first_k + end], 1).flatten()
    # In front of each live run is one with no queries: the keys behind the row before, and the padding on the left.
    return torch.nn.functional.pad(cu_q, (1, 0)), torch.nn.functional.pad(cu_k, (1, 0))


def _check(name: str, tensor, batch: int, device) -> None:
    if tensor is None:
        return
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.int32, torch.int64):
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ProblemError(f"{name} must be an int32 or int64 tensor [B], one number for each row of the batch; got {kind}.")
    if tuple(tensor.shape) != (batch,):
        raise ProblemError(f"{name} must have shape [B], here [{batch}]; got {list(tensor.shape)}.")
    if tensor.device != device:
        raise ProblemError(f"{name} is on {tensor.device} and q on {device}; move it with .to(q.device).")


def _check_values(lengths: Lengths, len_q: int, end: torch.Tensor, len_k: int) -> None:
    """Only on the CPU, where reading costs nothing."""
    most: dict = {"seqlens_q": len_q, "seqlens_k": len_k, "leftpad_k": end}
    for name, tensor in zip(Lengths._fields, lengths, strict=True):
        if tensor is not None and bool(((tensor < 0) | (tensor > most[name])).any()):
            limit = "seqlens_k" if name == "leftpad_k" else str(most[name])
            raise ProblemError(f"{name} must be from 0 to {limit} in every row of the batch; got {tensor.tolist()[:8]}.")
