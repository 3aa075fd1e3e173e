"""Arguments of `flash_attn`, in the words of rowmax, and results in those of `flash_attn`. For the modules beside this one."""

import math
from typing import Any, Optional

import torch

from rowmax.errors import ProblemError, Unsupported


def options(q, *, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, len_k: Optional[int] = None) -> dict:
    """Keyword arguments of `rowmax.attention`. `len_k`: a side of the window that reaches as far is no limit. With dropout, a
    seed is drawn here, from torch's generator of q's device."""
    check_dropout(dropout_p)
    chosen: dict[str, Any] = {"causal": bool(causal), "window": window(window_size, len_k)}
    if softmax_scale is not None:
        chosen["scale"] = float(softmax_scale)
    if softcap > 0:
        chosen["softcap"] = float(softcap)
    if alibi_slopes is not None:
        chosen["alibi_slopes"] = alibi_slopes
    if dropout_p:
        seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=q.device)
        chosen.update(dropout_p=float(dropout_p), seed=seed)
    return chosen


def check_dropout(dropout_p: float) -> None:
    if not 0 <= dropout_p < 1:
        raise ProblemError(f"dropout_p must be at least 0 and below 1; got {dropout_p}.")


def refuse_dropout(chosen: dict, where: str) -> None:
    if "dropout_p" in chosen:
        raise Unsupported(f"rowmax.flash_attn has no dropout {where}; got dropout_p={chosen['dropout_p']}. Pass 0.0.")


def window(window_size, len_k: Optional[int] = None) -> tuple[Optional[int], Optional[int]]:
    """-1 is no limit there, None here."""
    try:
        sides = [int(side) for side in window_size]
    except (TypeError, ValueError):
        sides = []
    if len(sides) != 2 or min(sides) < -1:
        raise ProblemError(f"window_size must be a pair of numbers of keys, -1 for no limit; got {window_size!r}.")
    left, right = (None if side == -1 or (len_k is not None and side >= len_k) else side for side in sides)
    return left, right


def rows(*tensors):
    """Tensors whose last stride is 1, as rowmax takes them."""
    return [t if t is None or t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous() for t in tensors]


def their_lse(lse: torch.Tensor) -> torch.Tensor:
    """+inf where a row sees nothing, as there; -inf here."""
    return torch.where(torch.isneginf(lse), math.inf, lse)


def our_lse(lse: torch.Tensor) -> torch.Tensor:
    """The inverse of `their_lse`."""
    return torch.where(torch.isposinf(lse), -math.inf, lse)


def no_mask(q: torch.Tensor) -> torch.Tensor:
    """`S_dmask` where there is no dropout: an empty tensor."""
    return q.new_empty(0)


def length(value) -> Optional[int]:
    """A `max_seqlen`, which may come as a tensor. It is a hint; one on a GPU is not read."""
    if isinstance(value, torch.Tensor):
        return int(value) if value.device.type == "cpu" else None
    return value if value is None else int(value)
