"""Arguments of `flash_attn`, in the words of rowmax, and results in those of `flash_attn`. For the modules beside this one."""

import math
from typing import Any, Optional

import torch

from rowmax.arguments import check_tensors
from rowmax.errors import ProblemError, Unsupported


def options(q, *, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, len_k: Optional[int] = None) -> dict:
    """Keyword arguments of `rowmax.attention`. `len_k`: a side of the window that reaches as far is no limit. With dropout, a
    seed is drawn here, from torch's generator of q's device."""
    dropout_p, softcap = check_dropout(dropout_p), number("softcap", softcap)
    chosen: dict[str, Any] = {"causal": flag("causal", causal), "window": window(window_size, len_k)}
    if softmax_scale is not None:
        chosen["scale"] = number("softmax_scale", softmax_scale)
    if not softcap <= 0:
        chosen["softcap"] = softcap
    if alibi_slopes is not None:
        check_tensors(alibi_slopes=alibi_slopes)
        chosen["alibi_slopes"] = alibi_slopes
    if dropout_p:
        seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=q.device)
        chosen.update(dropout_p=dropout_p, seed=seed)
    return chosen


def check_dropout(dropout_p) -> float:
    dropout_p = number("dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        raise ProblemError(f"dropout_p must be at least 0 and below 1; got {dropout_p}.")
    return dropout_p


def number(name: str, value) -> float:
    """What `float` takes, a tensor of one element among it."""
    if type(value) is float:
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ProblemError(f"{name} must be a number; got {_kind(value)}.") from None


def flag(name: str, value) -> bool:
    """What has a truth value."""
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):
        raise ProblemError(f"{name} must be True or False; got {_kind(value)}.") from None


def _kind(value) -> str:
    return f"{value!r:.80}" if isinstance(value, (int, float, str, tuple, list)) or value is None else type(value).__name__


def refuse_dropout(chosen: dict, where: str) -> None:
    if "dropout_p" in chosen:
        raise Unsupported(f"rowmax.flash_attn has no dropout {where}; got dropout_p={chosen['dropout_p']}. Pass 0.0.")


def window(window_size, len_k: Optional[int] = None) -> tuple[Optional[int], Optional[int]]:
    """-1 is no limit there, None here."""
    try:
        sides = [int(side) for side in window_size]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        sides = []
    if len(sides) != 2 or min(sides) < -1:
        raise ProblemError(f"window_size must be a pair of numbers of keys, -1 for no limit; got {window_size!r}.")
    left, right = (None if side == -1 or (len_k is not None and side >= len_k) else side for side in sides)
    return left, right


def rows(*tensors, needed: int = 3):
    """q, k, v and qv with a last stride of 1, as rowmax takes them. The first `needed` must be there."""
    try:
        found = [t if t is None or t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous() for t in tensors]
    except (AttributeError, IndexError, RuntimeError):
        found = []
    if not found or any(t is None for t in found[:needed]):
        named = dict(zip(("q", "k", "v", "qv"), tensors, strict=False))
        check_tensors(**{name: t for i, (name, t) in enumerate(named.items()) if i < needed or t is not None})
        raise ProblemError(f"tensors must have dimensions; got shapes {[list(t.shape) for t in tensors if t is not None]}.")
    return found


def apart(name: str, tensor, dim: int, parts: int) -> tuple[torch.Tensor, ...]:
    """The parts of a packed tensor, which lie along `dim`."""
    check_tensors(**{name: tensor})
    if tensor.dim() <= dim or tensor.shape[dim] != parts:
        layout = "[B, T, " if dim == 2 else "[T, "
        raise ProblemError(f"{name} must be {layout}{parts}, H, D]; got {list(tensor.shape)}.")
    return tensor.unbind(dim)


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
    if value is None or (isinstance(value, torch.Tensor) and value.device.type != "cpu"):
        return None
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ProblemError(f"a maximal length must be a number or None; got {_kind(value)}.") from None
