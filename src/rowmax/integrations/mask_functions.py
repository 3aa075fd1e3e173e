"""What a mask function of transformers lets queries see, read by calling it once on symbols.

    k <= q                               right side 0
    k > q - w                            left side w - 1
    (k - p) // c == (q - p) // c         chunks of c positions, counted behind p of padding
    ids[b, q] == ids[b, k]               sequences

and intersections of these. Called by `transformers.make_mask`.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rowmax.errors import Unsupported

EAGER = 'load the model with attn_implementation="eager"'
INSTEAD = EAGER + ' or "sdpa"'

# A side of the band: how many keys a query sees beyond its own position, None for all of them.
Limit = Optional[int]


class Seen(NamedTuple):
    """What a mask function says: a band around a query's own position, perhaps within chunks and sequences."""

    left: Limit = None
    right: Limit = None
    sequence_ids: Optional[Tensor] = None
    by_position: bool = False  # the band counts positions inside a sequence, not tokens of the batch
    chunk: Optional[int] = None
    padding: Optional[Tensor] = None  # `[B]`: tokens before a row's first chunk
    device: None = None  # read and ignored by transformers' intersection of masks

    def to(self, _) -> "Seen":
        return self

    def __and__(self, other: "Seen") -> "Seen":
        ids = other.sequence_ids if self.sequence_ids is None else self.sequence_ids
        by_position = self.by_position or other.by_position
        if self.chunk is not None and other.chunk is not None:
            raise TypeError("chunks of two sizes")
        chunk, padding = self[4:6] if other.chunk is None else other[4:6]
        return Seen(_tighter(self.left, other.left), _tighter(self.right, other.right), ids, by_position, chunk, padding)


class _Padding:
    """Stands for `padding[batch]`."""

    def __init__(self, table: Tensor):
        self.table = table


class _Index:
    """Stands for every query ("q") or every key ("k") in a mask function, in place of a tensor of indices.

    It knows the few operations of masks that are bands; any other raises, and so refuses the mask. `table`: the tensor
    in which the index was looked up; `offset`: what was added; `padding`: what was subtracted in each row; `chunk`: what it
    was divided by.
    """

    def __init__(
        self,
        axis: str,
        table: Optional[Tensor] = None,
        offset: int = 0,
        padding: Optional[Tensor] = None,
        chunk: Optional[int] = None,
    ):
        self.axis, self.table, self.offset, self.padding, self.chunk = axis, table, offset, padding, chunk

    def new_ones(self, *_, **__) -> Seen:
        return Seen()

    def __sub__(self, other):
        if self.chunk is not None or self.padding is not None:
            return NotImplemented
        if isinstance(other, _Padding):
            return _Index(self.axis, self.table, self.offset, other.table) if self.offset == 0 else NotImplemented
        if isinstance(other, _Index):
            return _Distance(self, other)
        return _Index(self.axis, self.table, self.offset - other)

    def __floordiv__(self, size: int) -> "_Index":
        if self.chunk is not None or self.offset or self.padding is None or not isinstance(size, int):
            return NotImplemented
        return _Index(self.axis, self.table, 0, self.padding, size)

    def __ge__(self, other) -> Seen:  # query >= 0: always
        return Seen() if other == 0 and self._bare() and self.offset == 0 else NotImplemented

    def __le__(self, query) -> Seen:  # key <= query
        return self._band(query, right=query.offset - self.offset)

    def __gt__(self, query) -> Seen:  # key > query - window
        return self._band(query, left=self.offset - query.offset - 1)

    def __eq__(self, other):  # the same sequence, or the same chunk
        if not isinstance(other, _Index) or self.table is not other.table or {self.axis, other.axis} != {"q", "k"}:
            return NotImplemented
        if self.chunk is not None and self.chunk == other.chunk and self.padding is other.padding:
            return Seen(by_position=self.table is not None, chunk=self.chunk, padding=self.padding)
        if self.table is None or not (self._bare() and other._bare()):
            return NotImplemented
        return Seen(sequence_ids=self.table)

    __hash__ = None  # type: ignore[assignment]

    def _bare(self) -> bool:
        return self.chunk is None and self.padding is None

    def _band(self, query: "_Index", left: Limit = None, right: Limit = None) -> Seen:
        bare = self._bare() and query._bare()
        if (self.axis, query.axis) != ("k", "q") or self.table is not query.table or not bare:
            raise TypeError("a comparison that is not of a key with a query")
        return Seen(left, right, None, self.table is not None)


class _Distance:
    """The distance between a query and a key."""

    def __init__(self, a: _Index, b: _Index):
        self.key, self.query = (a, b) if a.axis == "k" else (b, a)

    def __abs__(self) -> "_Distance":
        return self

    def __le__(self, window: int) -> Seen:
        return self.key._band(self.query, window, window)


class _Lookups(TorchFunctionMode):
    """`table[batch, index]` with an `_Index` gives an `_Index`, `table[batch]` a `_Padding`; the batch is None."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__ and args[1] is None:
            return _Padding(args[0])
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple) and isinstance(args[1][-1], _Index):
            return _Index(args[1][-1].axis, args[0])
        return func(*args, **(kwargs or {}))


def read(function, custom: bool) -> Seen:
    """What a mask function does, found by calling it on symbols: no tensor of indices, no private name.

    Raises:
        Unsupported: it does something that a band of keys, perhaps within chunks or sequences, cannot express.
    """
    if custom:  # its ids need not be runs, its values need not be indices
        raise Unsupported(_unknown(function))
    try:
        with _Lookups():
            seen = function(None, None, _Index("q"), _Index("k"))
    except (TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise Unsupported(_unknown(function)) from error
    if not isinstance(seen, Seen) or (seen.by_position and seen.sequence_ids is None):
        raise Unsupported(_unknown(function))
    packed = seen.sequence_ids is not None
    if seen.chunk is not None and (seen.left is not None or seen.right != 0 or (packed and not seen.by_position)):
        raise Unsupported(_unknown(function))
    return seen


def _unknown(function) -> str:
    return (
        f"rowmax attention serves causal, bidirectional, sliding-window, chunked, padded and packed masks; this model asks for "
        f"another ('{getattr(function, '__qualname__', '?')}'). Instead, {INSTEAD}."
    )


def _tighter(a: Limit, b: Limit) -> Limit:
    return b if a is None else a if b is None else min(a, b)
