"""What arrives at a public call beside its tensors, one argument at a time: checked for its kind, and put as operators take it.

What depends on the tensors is checked in `problem` and `scores`. For `api` and `serving`.
"""

from numbers import Integral, Real
from typing import NamedTuple, Optional, Union

import torch

from rowmax.errors import ProblemError
from rowmax.mask import pattern
from rowmax.score_mod import Bound, ScoreMod

Window = tuple[Optional[int], Optional[int]]
_NO_LIMIT = 2**31 - 1  # no tensor has so many tokens


class Beside(NamedTuple):
    """What bends, hides or drops scores, as the caller gave it. A call that has none of it has no `Beside`."""

    softcap: Optional[float] = None
    slopes: Optional[torch.Tensor] = None  # of ALiBi, `[H]` or `[B, H]`
    sink: Optional[torch.Tensor] = None  # `[H]`
    bias: Optional[torch.Tensor] = None  # `[B|1, H|1, Tq|1, Tk|1]`
    mask: Optional[torch.Tensor] = None  # alike
    seed: Union[None, int, torch.Tensor] = None
    dropout_p: float = 0
    score_mod: Union[None, ScoreMod, Bound] = None
    sink_tokens: Optional[int] = None
    prefix: Union[None, int, torch.Tensor] = None  # a tensor `[B]` is a number for each sequence: two calls (`prefixes`)
    chunk: Optional[int] = None

    @property
    def scored(self) -> bool:
        """Is there nothing but what `rowmax::forward_scored` takes?"""
        pairwise = self.bias is self.mask is self.score_mod is self.sink_tokens is self.prefix is self.chunk is None
        return pairwise and not self.dropout_p


def beside(
    causal, window, softcap, slopes, sink, bias, mask, seed, dropout_p, score_mod, sink_tokens, prefix, chunk
) -> Optional[Beside]:
    """All of a call's, or None where it comes to nothing: sink tokens without a left side to hide them, dropout of 0.

    Raises:
        ProblemError: one of the last five has the wrong type.
    """
    nothing = softcap is slopes is sink is bias is mask is score_mod is sink_tokens is prefix is chunk is None
    if nothing and type(dropout_p) in (int, float) and not dropout_p:
        return None
    dropout_p = 0 if dropout_p is None else number("dropout_p", dropout_p)
    if not (sink_tokens is prefix is chunk is None):
        sink_tokens, prefix, chunk = seen(causal, window, sink_tokens, prefix, chunk) or (None,) * 3
    given = Beside(softcap, slopes, sink, bias, mask, seed, dropout_p, score_mod, sink_tokens, prefix, chunk)
    return None if softcap is slopes is sink is None and given.scored else given


def seen(causal: bool, window: Optional[Window], sink_tokens, prefix, chunk) -> tuple:
    """What a `mask.Pattern` has beside its sides; empty where a window says the same."""
    sink_tokens, chunk = integer("sink_tokens", sink_tokens), integer("chunk", chunk)
    if isinstance(prefix, torch.Tensor):
        return sink_tokens or None, prefix, chunk
    left, right = band(causal, window)
    return pattern(left, right, sink_tokens, integer("prefix", prefix), chunk)[2:]


def band(causal: bool, window: Optional[Window]):
    """`(left, right)` of the band that both arguments describe together."""
    if window is None:
        return (None, 0) if causal else (None, None)
    try:
        left, right = window
        left, right = _whole(left), _whole(right)
    except (TypeError, ValueError):
        raise ProblemError(f"window must be a pair (left, right) of integers or None; got {window!r}.") from None
    if causal and right is not None and right < 0:
        raise ProblemError(f"window must be None for no limit or a distance of at least 0 on each side; got {window!r}.")
    left, right = (None if type(side) is int and side >= _NO_LIMIT else side for side in (left, right))
    return left, (0 if causal else right)


def integer(name: str, value) -> Optional[int]:
    try:
        return _whole(value)
    except TypeError:
        raise ProblemError(f"{name} must be an integer or None; got {_kind(value)}") from None


def _whole(value):
    """Integers, numpy's too, and None.

    Raises:
        TypeError: anything else, booleans and tensors among it.
    """
    if value is None or type(value) is int or isinstance(value, torch.SymInt):
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError
    return int(value)


def number(name: str, value) -> float:
    """A number as a float, numpy's too.

    Raises:
        ProblemError: it is none, or has no float.
    """
    if type(value) is float:
        return value
    if isinstance(value, (bool, torch.Tensor)) or not isinstance(value, Real):
        raise ProblemError(f"{name} must be a Python number or None; got {_kind(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ProblemError(f"{name} must be a finite number, at most 1e38 in size; got an integer beyond any float.") from None


def _kind(value) -> str:
    name = type(value).__name__
    return f"{name}. For a tensor, call .item() once." if hasattr(value, "item") else f"{name} {value!r:.80}."


def flags(**given) -> None:
    """
    Raises:
        ProblemError: one is neither True nor False.
    """
    for name, value in given.items():
        if value is not True and value is not False:
            raise ProblemError(f"{name} must be True or False; got {value!r} of type {type(value).__name__}.")
