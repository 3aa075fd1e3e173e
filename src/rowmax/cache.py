"""A paged KV cache: pages dealt out to sequences that grow, share prefixes and end.

    cache = PagedKVCache(1024, page_size=16, heads=8, dim=128, dtype=torch.bfloat16, device="cuda")
    a = cache.add()                            a sequence without tokens
    step = cache.extend([a], 100)              room for 100 more tokens
    cache.append(step, k, v)                   their keys and values, [1, 100, 8, 128]
    out = cache.attend(step, q)                [1, 100, Hq, 128]
    b = cache.fork(a)                          shares the pages of a until one of them grows

The host knows which pages belong to whom; keys, values, the block table and the lengths lie on the device. Nothing is read back
from it, and what it has to be told goes there in one small copy a step.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional, Union

import torch

from rowmax.arguments import check_tensors, counted, flags
from rowmax.errors import ProblemError
from rowmax.family import CACHE_GIVES, refuse
from rowmax.problem import DTYPE_NAMES
from rowmax.serving import append_kv, attention_paged, attention_shared

E4M3 = torch.float8_e4m3fn
ROOM = 2.0  # in pages of 8 bits: how much larger than the largest before it a later number may be, and is not cut off


class CacheFull(RuntimeError):
    """There are too few free pages, sequences or columns for what was asked; nothing was changed."""


class Step(NamedTuple):
    """The sequences of one step, as `append_kv` and `attention_paged` take them: with their new tokens, which come last."""

    block_table: torch.Tensor  # int32 [B, pages of a sequence]
    seqlens_k: torch.Tensor  # int32 [B]
    cu_seqlens: Optional[torch.Tensor]  # int32 [B + 1]; None: every sequence has as many new tokens
    longest: int  # most new tokens of a sequence


class PagedKVCache:
    """Pages in 8 bits (`dtype=torch.float8_e4m3fn`) take half the memory. `append` divides keys and values by scales of their
    page, and cuts off at 448 times it: a page's scale is set when its first token is written, so that the largest number of
    the new tokens in it, of each head, becomes 224, half of what there is room for. Tokens that come to the page later may be
    twice as large.

    Attributes:
    k_pages, v_pages: `[layer, page, slot, H, D]`; `v_pages` is the first `dim_v` columns of `k_pages` where `latent`.
    k_scale, v_scale: fp32 `[layer, page, H]` of pages in 8 bits, else None.
    free_pages: how many are free; page_size: tokens in each; max_length: tokens that a sequence may have.
    """

    def __init__(
        self,
        pages: int,
        *,
        page_size: int = 16,
        heads: int,
        dim: int,
        dim_v: Optional[int] = None,
        layers: int = 1,
        latent: bool = False,
        max_sequences: int = 256,
        max_length: Optional[int] = None,
        dtype: torch.dtype = torch.bfloat16,
        device: "str | torch.device" = "cpu",
    ):
        """Args:
        pages, page_size: pages, and tokens in each.
        heads, dim, dim_v: KV heads, head dimension of keys and (None: the same) of values.
        layers: layers of a model, which share pages' numbers and lengths.
        latent: values are the first `dim_v` columns of the keys and take no memory (multi-head latent attention).
        max_sequences: sequences at a time.
        max_length: tokens of a sequence at most; None: as many as the cache holds.
        dtype: of keys and values: fp16, bf16, fp32, fp64 (on the CPU), or torch.float8_e4m3fn.

        Raises:
            ProblemError: a size is no integer of at least 1, or the type is another.
        """
        pages, page_size, layers = counted("pages", pages), counted("page_size", page_size), counted("layers", layers)
        heads, dim, max_sequences = counted("heads", heads), counted("dim", dim), counted("max_sequences", max_sequences)
        dim_v = None if dim_v is None else counted("dim_v", dim_v)
        max_length = None if max_length is None else counted("max_length", max_length)
        flags(latent=latent)
        if not isinstance(dtype, torch.dtype) or dtype not in (*DTYPE_NAMES, E4M3):
            kinds = ", ".join(map(str, (*DTYPE_NAMES, E4M3)))
            raise ProblemError(f"dtype must be one of {kinds}; got {dtype!r}.")
        dim_v = dim if dim_v is None else dim_v
        if latent and dim_v > dim:
            raise ProblemError(f"latent values are columns of the keys: dim_v must be at most {dim}; got {dim_v}.")
        self.page_size, self._latent = page_size, latent
        self.k_pages = torch.zeros(layers, pages, page_size, heads, dim, dtype=dtype, device=device)
        self.v_pages = (
            self.k_pages[..., :dim_v]
            if latent
            else torch.zeros(layers, pages, page_size, heads, dim_v, dtype=dtype, device=device)
        )
        self.k_scale: Optional[torch.Tensor] = None
        self.v_scale: Optional[torch.Tensor] = None
        if dtype == E4M3:  # one row more, for tokens whose page has its scale already
            self._scales = tuple(torch.ones(layers, pages + 1, heads, device=device) for _ in range(1 if latent else 2))
            self.k_scale, self.v_scale = self._scales[0][:, :pages], self._scales[-1][:, :pages]
        columns = pages if max_length is None else min(-(-max_length // page_size), pages)
        self._table = torch.zeros(max_sequences, columns, dtype=torch.int32, device=device)
        self.max_length = columns * page_size if max_length is None else min(max_length, columns * page_size)
        self._free = list(reversed(range(pages)))  # the last is dealt next
        self._users = [0] * pages  # sequences that have the page
        self._rows = list(reversed(range(max_sequences)))
        self._pages: dict[int, list[int]] = {}  # sequence (its row of the table) -> its pages
        self._lengths: dict[int, int] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def free_sequences(self) -> int:
        """How many may still be added."""
        return len(self._rows)

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._lengths[self._known(sequence)]

    def add(self) -> int:
        """A new sequence without tokens; the number that stands for it until it is freed.

        Raises:
            CacheFull: all `max_sequences` are in use.
        """
        if not self._rows:
            raise CacheFull(
                f"all {self._table.shape[0]} sequences are in use; free one, or make the cache with more max_sequences."
            )
        sequence = self._rows.pop()
        self._pages[sequence], self._lengths[sequence] = [], 0
        return sequence

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens: it shares their pages. A page that is not full is copied when one grows.

        Raises:
            CacheFull: as `add`; ProblemError: an unknown sequence.
        """
        source = self._known(sequence)
        other = self.add()
        self._pages[other] = list(self._pages[source])
        self._lengths[other] = self._lengths[source]
        for page in self._pages[other]:
            self._users[page] += 1
        self._table[other].copy_(self._table[source])
        return other

    def free(self, sequence: int) -> None:
        """End a sequence: pages that nobody shares are free again.

        Raises:
            ProblemError: an unknown sequence.
        """
        sequence = self._known(sequence)
        self._release(self._pages.pop(sequence))
        del self._lengths[sequence]
        self._rows.append(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens from `length` on, as when speculated ones were wrong.

        Raises:
            ProblemError: an unknown sequence, or it is shorter.
        """
        length = counted("length", length, 0)
        if length > self.length(sequence):
            raise ProblemError(f"sequence {sequence} has {self.length(sequence)} tokens; it cannot be cut to {length}.")
        pages = self._pages[sequence]
        kept = -(-length // self.page_size)
        self._release(pages[kept:])
        del pages[kept:]
        self._lengths[sequence] = length

    def extend(self, sequences: Sequence[int], tokens: Union[int, Sequence[int]]) -> Step:
        """Room for new tokens, as many for each sequence or a number for each, before they are written by `append`.

        Raises:
            CacheFull: too few pages, or a sequence would become too long. Nothing was changed.
            ProblemError: an unknown sequence, or one that is named twice.
        """
        rows = self._all_known(sequences)
        same = not isinstance(tokens, Iterable) or getattr(tokens, "ndim", 1) == 0
        given = [tokens] * len(rows) if same else tokens
        counts = [n if type(n) is int and n >= 0 else counted("tokens", n, 0) for n in given]  # type: ignore[union-attr]
        if len(set(rows)) != len(rows) or len(counts) != len(rows):
            raise ProblemError(f"extend takes each sequence once, with a number of tokens; got {rows} and {counts}.")
        wanted = 0
        for row, count in zip(rows, counts, strict=True):
            length = self._lengths[row]
            if length + count > self.max_length:
                raise CacheFull(f"sequence {row} would have {length + count} tokens; a sequence has at most {self.max_length}.")
            wanted += self._new_pages(row, count) + self._must_copy(row, count)
        wanted -= self._last_of_sharers(rows, counts)
        if wanted > len(self._free):
            raise CacheFull(
                f"{wanted} pages are wanted and {len(self._free)} are free; free sequences, or make a larger cache."
            )
        told: list[tuple[int, int, int]] = []  # row, column, page
        copies: list[tuple[int, int]] = []
        for row, count in zip(rows, counts, strict=True):
            pages = self._pages[row]
            if self._must_copy(row, count):
                old, new = pages[-1], self._take()
                self._users[old] -= 1
                copies.append((old, new))
                pages[-1] = new
                told.append((row, len(pages) - 1, new))
            for _ in range(self._new_pages(row, count)):
                told.append((row, len(pages), page := self._take()))
                pages.append(page)
            self._lengths[row] += count
        return self._tell(rows, counts, told, copies, same)

    def append(
        self,
        step: Step,
        k: torch.Tensor,
        v: Optional[torch.Tensor] = None,
        *,
        layer: int = 0,
        rotary_cos: Optional[torch.Tensor] = None,
        rotary_sin: Optional[torch.Tensor] = None,
        interleaved: bool = False,
    ) -> None:
        """Write the new tokens of a step: k `[B, T, H, D]`, or packed `[T, H, D]` where the step has a number for each
        sequence; v alike (None if latent); in the pages' type, or fp16 or bf16 for 8 bits. Other arguments as for `append_kv`.

        Raises:
            ProblemError: as `append_kv`; and there is no such layer.
        """
        layer = self._layer(step, layer)
        v_pages = None if self._latent else self.v_pages[layer]
        if self.k_scale is not None:
            check_tensors(k=k, **({} if v is None else {"v": v}))
            for scale, x in zip(self._scales, (k, v), strict=False):  # one, of a latent cache
                if x is not None:
                    _set_scales(scale[layer], x, step, self.page_size)
        append_kv(
            *(self.k_pages[layer], v_pages, k, v, step.block_table, step.seqlens_k),
            cu_seqlens=step.cu_seqlens,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            interleaved=interleaved,
            **self._scales_of(layer, self._latent),
        )

    def _scales_of(self, layer: int, keys_alone: bool = False) -> dict:
        if self.k_scale is None or self.v_scale is None:
            return {}
        return {"k_scale": self.k_scale[layer], "v_scale": None if keys_alone else self.v_scale[layer]}

    def attend(self, step: Step, q: torch.Tensor, *, layer: int = 0, **options):
        """`attention_paged` of the new tokens' queries, laid out as in `append`, over all tokens of their sequences; with its
        other arguments, but for those that the step has (`cu_seqlens_q`, `max_seqlen_q`).

        Raises:
            ProblemError, Unsupported: as `attention_paged`; and there is no such layer.
        """
        _leave_to_the_step(options)
        layer = self._layer(step, layer)
        tables = (self.k_pages[layer], self.v_pages[layer], step.block_table, step.seqlens_k)
        options = {**self._scales_of(layer), **options}
        return attention_paged(q, *tables, cu_seqlens_q=step.cu_seqlens, max_seqlen_q=step.longest, **options)

    def shared_pages(self, sequences: Sequence[int]) -> int:
        """How many full pages all of these begin with: for `attend_shared`. 0 of a single sequence."""
        known = self._all_known(sequences)
        if len(known) < 2:
            return 0
        same = 0
        for column in zip(*(self._pages[sequence] for sequence in known), strict=False):
            if len(set(column)) > 1:
                break
            same += 1
        return min([same, *(self._lengths[sequence] // self.page_size for sequence in known)])

    def attend_shared(self, step: Step, q: torch.Tensor, shared_pages: int, *, layer: int = 0, **options):
        """`attend`, with pages that all sequences of the step begin with read once; see `attention_shared`."""
        _leave_to_the_step(options)
        layer = self._layer(step, layer)
        tables = (self.k_pages[layer], self.v_pages[layer], step.block_table, step.seqlens_k, shared_pages)
        options = {**self._scales_of(layer), **options}
        return attention_shared(q, *tables, cu_seqlens_q=step.cu_seqlens, max_seqlen_q=step.longest, **options)

    def check(self) -> None:
        """For tests: what must always hold of the host's part.

        Raises:
            RuntimeError: something does not.
        """
        users = [0] * len(self._users)
        for page in (page for pages in self._pages.values() for page in pages):
            users[page] += 1
        free = set(self._free)
        sizes = {row: -(-self._lengths[row] // self.page_size) for row in self._pages}
        wrong = {
            "sequences have pages without tokens, or too few": sizes != {row: len(pages) for row, pages in self._pages.items()},
            "pages are counted wrongly": users != self._users,
            "a page is free twice": len(free) != len(self._free),
            "a page is neither free nor anyone's": free != {page for page, count in enumerate(users) if count == 0},
            "a sequence is neither free nor in use": sorted([*self._rows, *self._pages]) != list(range(self._table.shape[0])),
        }
        if any(wrong.values()):
            raise RuntimeError("; ".join(text for text, is_so in wrong.items() if is_so))

    # ---- the host's part ----

    def _known(self, sequence: int) -> int:
        number = sequence if type(sequence) is int else counted("a sequence", sequence, 0)
        if number not in self._lengths:
            raise ProblemError(f"there is no sequence {number} in the cache; there are {list(self._lengths)}.")
        return number

    def _all_known(self, sequences: Sequence[int]) -> list[int]:
        try:
            named = list(sequences)
        except (TypeError, RuntimeError):
            raise ProblemError(f"sequences are named in a list, as add() gave them; got {type(sequences).__name__}.") from None
        return [self._known(sequence) for sequence in named]

    def _layer(self, step: Step, layer: int) -> int:
        if not isinstance(step, Step):
            raise ProblemError(f"step must be what extend() gave; got {type(step).__name__}.")
        return counted("layer", layer, 0, self.k_pages.shape[0] - 1)

    def _take(self) -> int:
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _release(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def _new_pages(self, row: int, count: int) -> int:
        return -(-(self._lengths[row] + count) // self.page_size) - len(self._pages[row])

    def _must_copy(self, row: int, count: int) -> bool:
        """Will tokens be written to a page that others share?"""
        return count > 0 and self._lengths[row] % self.page_size > 0 and self._users[self._pages[row][-1]] > 1

    def _last_of_sharers(self, rows: list[int], counts: list[int]) -> int:
        """Of sequences that grow together and all share a page, the last needs no copy."""
        sharers: dict[int, int] = {}
        for row, count in zip(rows, counts, strict=True):
            if self._must_copy(row, count):
                page = self._pages[row][-1]
                sharers[page] = sharers.get(page, 0) + 1
        return sum(self._users[page] == number for page, number in sharers.items())

    # ---- the device's part ----

    def _tell(self, rows, counts, told, copies, same: bool) -> Step:
        """What changed goes to the device in one copy, which nobody waits for: the memory it comes from is not used again."""
        lengths = [self._lengths[row] for row in rows]
        bounds = [0]
        for count in counts:
            bounds.append(bounds[-1] + count)
        parts = [
            rows,
            lengths,
            bounds,
            *(list(column) for column in zip(*told, strict=True)),
            *map(list, zip(*copies, strict=True)),
        ]
        sent = torch.tensor([number for part in parts for number in part], dtype=torch.int32)
        sent = sent.to(self._table.device, non_blocking=True)
        on_device = iter(sent.split([len(part) for part in parts]))
        where, seqlens, cu = next(on_device), next(on_device), next(on_device)
        if told:
            row, column, page = next(on_device), next(on_device), next(on_device)
            self._table[row, column] = page
        if copies:
            old, new = next(on_device), next(on_device)
            self.k_pages[:, new] = self.k_pages[:, old]
            if not self._latent:
                self.v_pages[:, new] = self.v_pages[:, old]
            for scale in () if self.k_scale is None else self._scales:
                scale[:, new] = scale[:, old]
        table = self._table.index_select(0, where)
        return Step(table, seqlens, None if same else cu, max(counts, default=0))


def _leave_to_the_step(options: dict) -> None:
    given = {name: value for name, value in options.items() if name in CACHE_GIVES}
    if given:
        refuse("PagedKVCache.attend", given)


def _set_scales(scale: torch.Tensor, x: torch.Tensor, step: Step, size: int) -> None:
    """Scales `[pages + 1, H]` of the pages whose first slot is among the new tokens x of a step; nothing is read back.

    Rotation by position makes a number at most sqrt(2) times as large as the larger of its pair: less than ROOM.
    """
    if step.cu_seqlens is None:
        batch, tokens = x.shape[0], x.shape[1] if x.dim() == 4 else 1
        bounds = torch.arange(batch + 1, device=x.device) * tokens
        x = x.reshape(batch * tokens, *x.shape[-2:])
    else:
        bounds = step.cu_seqlens.long()
    if not x.shape[0]:
        return
    token = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(bounds, token, right=True).sub_(1).clamp_(0, len(bounds) - 2)
    first = (step.seqlens_k - bounds.diff())[sequence]  # position of the sequence's first new token
    position = first + token - bounds[sequence]
    column = position // size
    nobody = scale.shape[0] - 1
    page = torch.where(column * size >= first, step.block_table[sequence, column], nobody).long()
    largest = x.abs().amax(-1).float() * (ROOM / torch.finfo(E4M3).max)
    largest = torch.where(largest > 0, largest, 1.0)
    scale.index_fill_(0, page, 0.0)
    scale.scatter_reduce_(0, page.unsqueeze(1).expand_as(largest), largest, "amax")
