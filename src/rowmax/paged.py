"""One attention call over a paged KV cache, described without its tensors.

    key j of sequence b lies in page `block_table[b, j // page_size]`, slot `j % page_size`,   0 <= j < seqlens_k[b]

A `PagedProblem` is a `Problem` whose keys lie in pages: `b4 h32/8 q1 k8192 d128 bf16 causal paged16`. `len_k` is what the block
table has room for; how many keys a sequence has is data on the device. All validation of such calls is in this file; called by
`ops_paged`.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Optional

import torch

from rowmax.arguments import check_tensors, flags
from rowmax.errors import ProblemError
from rowmax.mask import Band
from rowmax.problem import DTYPE_NAMES, MAX_SCALE, Problem, negative

E4M3 = torch.float8_e4m3fn
MOST_E4M3 = 448.0  # its largest number
MAX_DIM = 576  # of q and k in multi-head latent attention, whose values are the first 512


class PagedOperands(NamedTuple):
    """The tensors of one call. q `[B, H, D]`, `[B, T, H, D]`, or with `cu_seqlens_q` packed `[T, H, D]`. Kernels take
    dense keys in this form too: without a block table and lengths."""

    q: torch.Tensor
    k_pages: torch.Tensor  # [page, slot, Hk, D]
    v_pages: torch.Tensor  # [page, slot, Hk, Dv]
    block_table: Any  # tensor [B, pages of a sequence]
    seqlens_k: Any  # tensor [B]
    cu_seqlens_q: Optional[torch.Tensor] = None  # [B + 1]
    k_scale: Optional[torch.Tensor] = None  # fp32 [Hk] or [page, Hk], of pages in 8 bits: keys are their numbers times this
    v_scale: Optional[torch.Tensor] = None


class AppendOperands(NamedTuple):
    """The tensors of one append. k `[B, Hk, D]`, `[B, T, Hk, D]`, or with `cu_seqlens` packed `[T, Hk, D]`; v alike or None."""

    k_pages: torch.Tensor  # [page, slot, Hk, D]
    v_pages: Optional[torch.Tensor]
    k: torch.Tensor
    v: Optional[torch.Tensor]
    block_table: torch.Tensor  # [B, pages of a sequence]
    seqlens_k: torch.Tensor  # [B], with the new tokens
    cu_seqlens: Optional[torch.Tensor] = None  # [B + 1]
    cos: Optional[torch.Tensor] = None  # [positions, pairs of columns]
    sin: Optional[torch.Tensor] = None
    k_scale: Optional[torch.Tensor] = None  # as for `PagedOperands`
    v_scale: Optional[torch.Tensor] = None


@dataclass(frozen=True)
class PagedProblem(Problem):
    """What is known of a call over a paged cache without reading its tensors.

    Attributes, besides those of `Problem`:
        len_q: tokens a sequence; packed: of all sequences together.
        len_k: keys that a sequence may have: columns of the block table times `page_size`.
        page_size: slots of a page.
        eight_bits: pages hold e4m3 numbers, each head's times a scale; computed as if they were multiplied first.
        batch_invariant: the result of a query depends on nothing but itself and the keys that it sees, bit for bit.
    """

    page_size: int = 16
    batch_invariant: bool = False
    eight_bits: bool = False

    max_dim: ClassVar[int] = MAX_DIM
    more_words: ClassVar[tuple] = (
        (r"paged(\d+)", lambda m: {"page_size": int(m[1])}),
        (r"e4m3", lambda m: {"eight_bits": True}),
        (r"invariant", lambda m: {"batch_invariant": True}),
    )

    __hash__ = Problem.__hash__  # a dataclass would make its own

    def __post_init__(self):
        super().__post_init__()
        if self.page_size < 1:
            raise ProblemError(f"page_size must be at least 1; got {self.page_size} in '{self}'.")

    def __str__(self) -> str:
        return f"{super().__str__()} paged{self.page_size}" + " e4m3" * self.eight_bits + " invariant" * self.batch_invariant

    @classmethod
    def describe(  # type: ignore[override]
        cls,
        operands: PagedOperands,
        *,
        left: Optional[int] = None,
        right: Optional[int] = None,
        scale: Optional[float] = None,
        max_len_q: Optional[int] = None,
        batch_invariant: bool = False,
    ) -> "PagedProblem":
        """Validate tensors and arguments and name every dimension. Keeps no tensor and reads no device memory.

        Raises:
            ProblemError: says what arrived, what is required and the fix.
        """
        q, k, v, table, lengths, cu = operands[:6]
        _check_tensors(operands)
        shapes = (q.shape, k.shape, v.shape, table.shape, cu is not None, len(lengths))
        return _describe(cls, *shapes, q.dtype, left, right, scale, max_len_q, batch_invariant, k.dtype == E4M3)


@lru_cache(maxsize=4096)
def _described(
    cls, q_shape, k_shape, v_shape, table_shape, packed, batch, dtype, left, right, scale, max_len_q, invariant, eight_bits
) -> PagedProblem:
    shapes = f"q {list(q_shape)}, k_pages {list(k_shape)}, v_pages {list(v_shape)}"
    heads_q, dim_qk = q_shape[-2:]
    _, page_size, heads_k, _ = k_shape
    len_q = q_shape[0] if packed else 1 if len(q_shape) == 3 else q_shape[1]
    if k_shape[:-1] != v_shape[:-1]:
        raise ProblemError(f"k_pages and v_pages must agree in all but the last dimension; got {shapes}.")
    if page_size == 0:
        raise ProblemError(f"pages need at least one slot; got {shapes} (layout [page, slot, H, D]).")
    if dim_qk != k_shape[-1]:
        raise ProblemError(f"q and k_pages must have the same head dimension; got {dim_qk} and {k_shape[-1]} in {shapes}.")
    if heads_k == 0 or heads_q % heads_k:
        hint = ""
        if page_size and heads_q % page_size == 0:
            hint = " Pages stored as [page, H, slot, D] are passed as k_pages.transpose(1, 2), v_pages.transpose(1, 2)."
        raise ProblemError(
            f"query heads must be a multiple of KV heads; got {heads_q} and {heads_k} in {shapes} "
            f"(pages [page, slot, H, D]).{hint}"
        )
    if table_shape[0] != batch:
        raise ProblemError(
            f"block_table and seqlens_k must name the same sequences; got {list(table_shape)} and [{batch}] "
            "(block_table [B, pages of a sequence], seqlens_k [B])."
        )
    if not packed and q_shape[0] != batch:
        fix = " For sequences of different query lengths, packed in q, pass cu_seqlens_q." if len(q_shape) == 3 else ""
        raise ProblemError(f"q must have one entry for each of the {batch} sequences of seqlens_k; got {shapes}.{fix}")
    for name, value in (("left", left), ("right", right)):
        if negative(value):
            raise ProblemError(f"window ({name} side) must be None for no limit or a distance of at least 0; got {value}.")
    if scale is not None and not abs(scale) <= MAX_SCALE:
        raise ProblemError(f"scale must be a finite number, at most {MAX_SCALE:g} in size, or None; got {scale} with {shapes}.")
    if negative(max_len_q):
        raise ProblemError(f"max_seqlen_q must be at least 0; got {max_len_q}.")
    return cls(
        batch=batch,
        heads_q=heads_q,
        heads_k=heads_k,
        len_q=len_q,
        len_k=table_shape[1] * page_size,
        dim_qk=dim_qk,
        dim_v=v_shape[-1],
        dtype=dtype,
        band=Band(left, right),
        scale=math.nan if scale is None else float(scale),
        packed=packed,
        max_len_q=max_len_q,
        page_size=page_size,
        batch_invariant=invariant,
        eight_bits=eight_bits,
    )


def _describe(*call) -> PagedProblem:
    try:
        return _described(*call)
    except TypeError:  # symbolic sizes cannot be hashed
        return _described.__wrapped__(*call)


def _check_tensors(operands: PagedOperands) -> None:
    q, k, v, table, lengths, cu, k_scale, v_scale = operands
    ranks = (3,) if cu is not None else (3, 4)
    if q.dim() not in ranks:
        layout = "[T, H, D] beside cu_seqlens_q" if cu is not None else "[B, H, D] (one token a sequence) or [B, T, H, D]"
        raise ProblemError(f"q must have the layout {layout}; got shape {list(q.shape)}.")
    for name, pages in (("k_pages", k), ("v_pages", v)):
        if pages.dim() != 4:
            raise ProblemError(f"{name} must have the layout [page, slot, H, D]; got shape {list(pages.shape)}.")
    for name, tensor in (("q", q), ("k_pages", k), ("v_pages", v)):
        if tensor.dtype not in DTYPE_NAMES and (name == "q" or tensor.dtype != E4M3):
            raise ProblemError(f"{name} has dtype {tensor.dtype}; required is one of {', '.join(map(str, DTYPE_NAMES))}.")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ProblemError(
                f"{name} must have stride 1 in its last dimension; got strides {tensor.stride()} for shape "
                f"{list(tensor.shape)}."
            )
    if k.dtype == v.dtype == E4M3:
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise ProblemError(f"over pages in 8 bits q must be fp16 or bf16; got {q.dtype}.")
    elif not q.dtype == k.dtype == v.dtype:
        raise ProblemError(f"q, k_pages and v_pages must have one dtype; got {q.dtype}, {k.dtype}, {v.dtype}.")
    for name, factors in (("k_scale", k_scale), ("v_scale", v_scale)):
        if factors is None:
            continue
        if k.dtype != E4M3:
            raise ProblemError(f"{name} belongs to pages in 8 bits (torch.float8_e4m3fn); got pages in {k.dtype}.")
        if (
            factors.dtype != torch.float32
            or factors.shape not in (k.shape[2:3], (k.shape[0], k.shape[2]))
            or factors.device != q.device
            or not factors.is_contiguous()
        ):
            raise ProblemError(
                f"{name} must be torch.float32 [Hk], here [{k.shape[2]}], or [page, Hk], here [{k.shape[0]}, {k.shape[2]}], "
                f"contiguous on {q.device}; got {factors.dtype} {list(factors.shape)} with strides {factors.stride()} on "
                f"{factors.device}."
            )
    if k_scale is not None and v_scale is not None and k_scale.dim() != v_scale.dim():
        raise ProblemError(
            f"k_scale and v_scale must both be [Hk] or both [page, Hk]; got {list(k_scale.shape)} and {list(v_scale.shape)}. "
            "Expand the smaller one: scale.expand(pages, -1).contiguous()."
        )
    numbers = [("block_table", table, 2, "[B, pages of a sequence]"), ("seqlens_k", lengths, 1, "[B]")]
    numbers += [] if cu is None else [("cu_seqlens_q", cu, 1, "[B + 1]")]
    for name, tensor, rank, layout in numbers:
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ProblemError(f"{name} must be int32 or int64; got {tensor.dtype}. Convert it with .to(torch.int32).")
        if tensor.dim() != rank:
            raise ProblemError(f"{name} must have shape {layout}; got {list(tensor.shape)}.")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ProblemError(f"{name} must have stride 1 in its last dimension; got strides {tensor.stride()}.")
    if cu is not None and cu.shape[0] != lengths.shape[0] + 1:
        raise ProblemError(
            f"cu_seqlens_q must have one element more than seqlens_k: the first row of each sequence and, last, one past "
            f"the end; got {list(cu.shape)} and {list(lengths.shape)}."
        )
    for name, tensor in (("k_pages", k), ("v_pages", v), *((name, tensor) for name, tensor, *_ in numbers)):
        if tensor.device != q.device:
            raise ProblemError(f"{name} is on {tensor.device} and q on {q.device}; move it with .to(q.device).")


def check_values(problem: PagedProblem, operands: PagedOperands) -> None:
    """Lengths and the pages that they reach. Only for tensors on the CPU, where reading costs nothing; kernels clamp instead.

    Raises:
        ProblemError: names the sequence, what it has, and what is allowed.
    """
    q, k, _, table, lengths, cu = operands[:6]
    for b, length in enumerate(lengths.tolist()):
        if not 0 <= length <= problem.len_k:
            raise ProblemError(
                f"seqlens_k[{b}] is {length}; the block table has room for 0 to {problem.len_k} keys "
                f"({table.shape[1]} pages of {problem.page_size})."
            )
        used = table[b, : -(-length // problem.page_size)]
        wrong = ((used < 0) | (used >= k.shape[0])).nonzero()
        if not len(wrong):
            _check_scales(operands, used.long())
        else:
            column = int(wrong[0])
            raise ProblemError(
                f"block_table[{b}, {column}] is {int(used[column])}, but there are pages 0 to {k.shape[0] - 1} "
                f"(sequence {b} has {length} keys)."
            )
    if cu is not None:
        check_bounds(cu, q.shape[0])


def _check_scales(operands: PagedOperands, used: torch.Tensor) -> None:
    """Of the pages that a sequence uses."""
    for name, scale in (("k_scale", operands.k_scale), ("v_scale", operands.v_scale)):
        if scale is None:
            continue
        mine = scale if scale.dim() == 1 else scale[used]
        wrong = (~(mine > 0) | mine.isinf()).nonzero()
        if len(wrong):
            place = [int(i) for i in wrong[0]]
            value = float(mine[tuple(place)])
            if scale.dim() == 2:
                place[0] = int(used[place[0]])
            raise ProblemError(f"{name}[{', '.join(map(str, place))}] is {value}; scales are positive and finite.")


def check_bounds(cu: torch.Tensor, rows: int) -> None:
    """As `check_values`, of the bounds of packed sequences."""
    values = cu.tolist()
    if values[0] != 0 or any(y < x for x, y in pairwise(values)) or values[-1] > rows:
        raise ProblemError(
            f"cu_seqlens_q must start at 0, never decrease and end at most at {rows} (the rows that arrived); "
            f"got {values[:8]}{', ...' if len(values) > 8 else ''}."
        )


def check_append(operands: AppendOperands) -> None:
    """Validate the tensors of an append; reads no device memory.

    Raises:
        ProblemError: what arrived, what is required and the fix.
    """
    k_pages, v_pages, k, v, table, lengths, cu, cos, sin, k_scale, v_scale = operands
    if (v_pages is None) != (v is None):
        raise ProblemError("v and v_pages come together, or neither where values are columns of the keys.")
    # A call of attention with k for q has the same layouts, lengths and devices.
    _check_tensors(PagedOperands(k, k_pages, k_pages if v_pages is None else v_pages, table, lengths, cu, k_scale, v_scale))
    if v_pages is not None and k_pages.shape[:3] != v_pages.shape[:3]:
        raise ProblemError(
            f"k_pages and v_pages must agree in all but the last dimension; got {list(k_pages.shape)} and "
            f"{list(v_pages.shape)}."
        )
    pairs = [("k", k, k_pages)] if v is None or v_pages is None else [("k", k, k_pages), ("v", v, v_pages)]
    for name, new, pages in pairs:
        if new.dim() != k.dim() or new.shape[:-2] != k.shape[:-2] or new.shape[-2:] != pages.shape[-2:]:
            raise ProblemError(
                f"{name} must have k's tokens and the heads and dimension of its pages; got {list(new.shape)} beside k "
                f"{list(k.shape)} and pages {list(pages.shape)}."
            )
        if new.dtype != k.dtype or new.device != k.device or (new.shape[-1] > 1 and new.stride(-1) != 1):
            raise ProblemError(
                f"{name} must be {k.dtype} on {k.device} with stride 1 in its last dimension; got {new.dtype} on {new.device}, "
                f"strides {new.stride()}."
            )
    if table.shape[0] != lengths.shape[0] or (cu is None and k.shape[0] != lengths.shape[0]):
        raise ProblemError(
            f"block_table, seqlens_k and k must name the same sequences; got {list(table.shape)}, {list(lengths.shape)} and "
            f"{list(k.shape)}. For sequences of different lengths, packed in k, pass cu_seqlens."
        )
    if (cos is None) != (sin is None):
        raise ProblemError("rotary_cos and rotary_sin come together.")
    for name, angle in (("rotary_cos", cos), ("rotary_sin", sin)):
        if angle is None or cos is None:
            continue
        if angle.dim() != 2 or angle.shape != cos.shape or not 0 < 2 * angle.shape[1] <= k.shape[-1] or not angle.shape[0]:
            raise ProblemError(
                f"{name} must have shape [positions, pairs of columns], at most {k.shape[-1] // 2} pairs; got "
                f"{list(angle.shape)}."
            )
        if not angle.is_floating_point() or angle.device != k.device or angle.stride(-1) != 1:
            raise ProblemError(f"{name} must hold floating-point numbers on {k.device}, rows without gaps; got {angle.dtype}.")


def places(operands: AppendOperands) -> tuple[torch.Tensor, torch.Tensor]:
    """`(position, page)` of each new token. Only for lengths, table and bounds on the CPU.

    Raises:
        ProblemError: a token has no place; names the sequence.
    """
    k_pages, _, k, _, table, lengths, cu, cos, *_ = operands
    size, columns = k_pages.shape[1], table.shape[1]
    if cu is None:
        counts = torch.full_like(lengths, 1 if k.dim() == 3 else k.shape[1])
    else:
        check_bounds(cu, k.shape[0])
        counts = cu.diff()
    for b, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        if count and not count <= length <= columns * size:
            raise ProblemError(
                f"seqlens_k[{b}] is {length} with {count} new tokens; the block table has room for {columns * size} "
                f"({columns} pages of {size})."
            )
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), counts.long())
    place = torch.arange(len(sequence)) - (counts.cumsum(0) - counts).long()[sequence]
    position = (lengths - counts).long()[sequence] + place
    page = table[sequence, position // size].long()
    wrong = ((page < 0) | (page >= k_pages.shape[0])).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise ProblemError(
            f"block_table[{int(sequence[at])}, {int(position[at]) // size}] is {int(page[at])}, but there are pages 0 to "
            f"{k_pages.shape[0] - 1}."
        )
    if cos is not None and len(position) and int(position.max()) >= cos.shape[0]:
        raise ProblemError(f"rotary_cos has {cos.shape[0]} positions; a token is at {int(position.max())}.")
    return position, page


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotary embedding of the first columns of x `[..., H, D]` by angles whose `cos` and `sin` are `[..., pairs]`.

    The pairs are columns (i, pairs + i), or with `interleaved` (2i, 2i + 1). Computed in fp32 at least, rounded once.
    cos and sin have one shape, floating point; what stands before the pairs broadcasts to what stands before H in x:
    `[T, pairs]` for x `[B, T, H, D]`, `[B, pairs]` for x `[B, H, D]`.

    Raises:
        ProblemError: they do not fit.

    Method: Su et al., "RoFormer" (2021), section 3.4.2.
    """
    check_tensors(x=x, cos=cos, sin=sin)
    if type(interleaved) is not bool:
        flags(interleaved=interleaved)
    _check_angles(x, cos, sin)
    pairs = cos.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    part = x[..., : 2 * pairs].to(wide)
    one, two = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :pairs], part[..., pairs:])
    cos, sin = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)
    turned = (one * cos - two * sin, two * cos + one * sin)
    turned_part = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([turned_part.to(x.dtype), x[..., 2 * pairs :]], -1)


def _check_angles(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    shapes = f"x {list(x.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}"
    if x.dim() < 2 or cos.dim() < 1 or cos.shape != sin.shape or not 0 <= 2 * cos.shape[-1] <= x.shape[-1]:
        raise ProblemError(f"x must be [..., H, D], and cos and sin alike [..., pairs] with at most D / 2 pairs; got {shapes}.")
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ProblemError(f"{name} must be of 16 bits or more, floating point; got {tensor.dtype}.")
        if tensor.device != x.device:
            raise ProblemError(f"{name} is on {tensor.device} and x on {x.device}; move it with .to(x.device).")
    outer, own = cos.shape[:-1], x.shape[:-2]
    pairs = zip(reversed(outer), reversed(own), strict=False)
    if len(outer) > len(own) or any(size not in (1, full) for size, full in pairs):
        raise ProblemError(
            f"what stands before the pairs of cos and sin must broadcast to what stands before H in x; got {shapes}."
        )
