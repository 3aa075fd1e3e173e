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
    if nothing and seed is None and type(dropout_p) in (int, float) and not dropout_p:
        return None
    if not (seed is None or isinstance(seed, (torch.Tensor, torch.SymInt)) or _is_seed(seed)):
        raise ProblemError(f"seed must be an integer of 64 bits, an int64 tensor [1] or None; got {_kind(seed)}")
    dropout_p = 0 if dropout_p is None else number("dropout_p", dropout_p)
    if not (sink_tokens is prefix is chunk is None):
        sink_tokens, prefix, chunk = seen(causal, window, sink_tokens, prefix, chunk) or (None,) * 3
    given = Beside(softcap, slopes, sink, bias, mask, seed, dropout_p, score_mod, sink_tokens, prefix, chunk)
    return None if softcap is slopes is sink is None and given.scored else given


def check_tensors(**given) -> None:
    """Of each: a tensor whose elements have places in memory.

    Raises:
        ProblemError: it is something else; None is for the caller to leave out.
    """
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise ProblemError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}.")
        if tensor.is_nested:
            raise ProblemError(
                f"{name} is a nested tensor, and must be a strided one. Its sequences are packed in {name}.values(), where "
                f"{name}.offsets() says: pass these to attention_varlen, as {name} and its cu_seqlens."
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = tensor.dtype if tensor.is_quantized else tensor.layout
            fix = f"{name}.dequantize()" if tensor.is_quantized else f"{name}.to_dense()"
            raise ProblemError(f"{name} must be a strided tensor; got {kind}. Pass {fix}.")


def seen(causal: bool, window: Optional[Window], sink_tokens, prefix, chunk) -> tuple:
    """What a `mask.Pattern` has beside its sides; empty where a window says the same."""
    each = not isinstance(prefix, torch.Tensor)
    sink_tokens, chunk = integer("sink_tokens", sink_tokens), integer("chunk", chunk)
    number_of = integer("prefix", prefix) if each else None
    for name, value, least in (("sink_tokens", sink_tokens, 0), ("prefix", number_of, 0), ("chunk", chunk, 1)):
        if type(value) is int and value < least:
            raise ProblemError(f"{name} must be at least {least}, or None for none; got {value}.")
    if not each:
        return sink_tokens or None, prefix, chunk
    left, right = band(causal, window)
    return pattern(left, right, sink_tokens, number_of, chunk)[2:]


def _is_seed(value) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and -(2**63) <= int(value) < 2**63


def band(causal: bool, window: Optional[Window]):
    """`(left, right)` of the band that both arguments describe together."""
    if window is None:
        return (None, 0) if causal else (None, None)
    try:
        if not isinstance(window, (tuple, list)):
            raise TypeError
        left, right = window
        left, right = _whole(left), _whole(right)
    except (TypeError, ValueError):
        raise ProblemError(f"window must be a pair (left, right) of integers or None; got {window!r}.") from None
    if causal and right is not None and right < 0:
        raise ProblemError(f"window must be None for no limit or a distance of at least 0 on each side; got {window!r}.")
    left, right = (None if type(side) is int and side >= _NO_LIMIT else side for side in (left, right))
    return left, (0 if causal else right)


def integer(name: str, value) -> Optional[int]:
    """An integer, numpy's too, cut off where it is larger than any tensor, or None.

    Raises:
        ProblemError: it is something else.
    """
    try:
        return _whole(value)
    except TypeError:
        raise ProblemError(f"{name} must be an integer or None; got {_kind(value)}") from None


def counted(name: str, value, least: int = 1, most: int = _NO_LIMIT) -> int:
    """An integer, numpy's too, in a range.

    Raises:
        ProblemError: it is none, or out of the range.
    """
    try:
        whole = _whole(value)
    except TypeError:
        whole = None
    if whole is None or not least <= whole <= most:
        limit = f"at least {least}" if most == _NO_LIMIT else f"from {least} to {most}"
        raise ProblemError(f"{name} must be an integer, {limit}; got {_kind(value)}")
    return whole


def _whole(value):
    """Integers, numpy's too, cut off beyond the length of any tensor; and None.

    Raises:
        TypeError: anything else, booleans and tensors among it.
    """
    if type(value) is not int:
        if value is None or isinstance(value, torch.SymInt):
            return value
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError
        value = int(value)
    return value if -_NO_LIMIT <= value <= _NO_LIMIT else -_NO_LIMIT if value < 0 else _NO_LIMIT


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
