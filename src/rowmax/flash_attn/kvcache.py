"""`flash_attn_with_kvcache`: append to a cache, turn by position, attend. Inference only.

A contiguous cache is one page a sequence, which `attention_paged` reads where it lies. With ALiBi, a soft-cap or padding on the
left it is a packed tensor instead (`live`); pages, and the sequences that `cache_batch_idx` names, are then copied first, which
takes the memory and the time of reading the whole cache once more.
"""

from typing import Any, NamedTuple, Optional, Union

import torch

from rowmax.arguments import check_tensors, counted
from rowmax.errors import ProblemError
from rowmax.flash_attn.arguments import flag, options, rows, their_lse
from rowmax.flash_attn.live import attend_cache, gathered
from rowmax.paged import rotate
from rowmax.serving import append_kv, attention_paged

MOST_SPLITS = 128


@torch.no_grad()
def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens: Optional[Union[int, torch.Tensor]] = None,
    cache_batch_idx: Optional[torch.Tensor] = None,
    cache_leftpad: Optional[torch.Tensor] = None,
    block_table: Optional[torch.Tensor] = None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """Attention of q `[B, Tq, H, D]` over a cache, to which k and v are added first.

    Args:
        k_cache, v_cache: `[sequences, Tcache, Hk, D]`, or with `block_table` pages `[page, slot, Hk, D]`. Changed in place.
        k, v: `[B, Tnew, Hk, D]`, written at `cache_seqlens`.
        rotary_cos, rotary_sin: `[positions, R / 2]`: k is turned by its positions and q by the same ones if the mask is causal
            or has a window, else all of q by the first of them. They need k.
        cache_seqlens: keys in the cache before: a number or int32 `[B]`; `None`: all of them.
        cache_batch_idx: int32 `[B]`: the sequence of the cache for each of q.
        cache_leftpad: int32 `[B]`: keys at the beginning of a sequence that are padding.
        block_table: int32 `[B, pages]`.
        num_splits: 0, as the plan decides, or how many parts keys are shared out in.

    Returns:
        out `[B, Tq, H, D]`; with `return_softmax_lse` also lse `[B, H, Tq]`, fp32, +inf where a query sees no key.
    """
    q, k, v = rows(q, k, v, needed=1)
    check(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    num_splits = counted("num_splits", num_splits, 0, MOST_SPLITS)
    given = {"dropout_p": 0.0, "softmax_scale": softmax_scale, "causal": causal, "alibi_slopes": alibi_slopes}
    chosen: dict[str, Any] = options(q, **given, window_size=window_size, softcap=softcap)
    along = chosen["causal"] or tuple(window_size) != (-1, -1)
    interleaved = flag("rotary_interleaved", rotary_interleaved)
    rotary = None if rotary_cos is None else Rotary(rotary_cos, rotary_sin, interleaved, along)
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    out, lse = attend_and_append(cache, q, k, v, rotary, num_splits, chosen)
    return (out, their_lse(lse)) if flag("return_softmax_lse", return_softmax_lse) else out


class Rotary(NamedTuple):
    """Tables `[positions, pairs]`.

    Attributes:
        along: queries are at consecutive positions, not all at the first.
        start: `[B]`, the first position of queries and new keys, if it is not the number of keys before.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool
    along: bool
    start: Optional[torch.Tensor] = None

    def turned(self, x, begin, cu_seqlens, along: bool):
        """x `[B, T, H, D]`, or packed with `cu_seqlens`, whose sequences begin at position `begin` `[B]`."""
        if cu_seqlens is None:
            positions = begin.unsqueeze(1) + torch.arange(x.shape[1], device=x.device) * int(along)
        else:
            rows = torch.arange(x.shape[0], device=x.device)
            sequence = torch.searchsorted(cu_seqlens[1:], rows, right=True).clamp(max=max(begin.shape[0] - 1, 0))
            positions = begin[sequence] + (rows - cu_seqlens[sequence]) * int(along)
        at = positions.long().clamp(0, self.cos.shape[0] - 1)
        return rotate(x, self.cos[at], self.sin[at], interleaved=self.interleaved)


class Cache(NamedTuple):
    """As the arguments of `flash_attn_with_kvcache`."""

    k: torch.Tensor
    v: torch.Tensor
    seqlens: Optional[Union[int, torch.Tensor]]
    batch_idx: Optional[torch.Tensor]
    leftpad: Optional[torch.Tensor]
    block_table: Optional[torch.Tensor]


def attend_and_append(
    cache: Cache, q, k, v, rotary: Optional[Rotary], num_splits: int, chosen: dict, cu_q=None, cu_new=None, max_seqlen_q=None
):
    """`(out, lse)`, -inf where a query sees no key; q and the new k, v dense, or packed with `cu_q`, `cu_new`."""
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    table = cache.block_table
    if table is None:
        sequence = torch.arange(batch, device=q.device) if cache.batch_idx is None else cache.batch_idx
        table = sequence.to(torch.int32).unsqueeze(1)
    before = table.shape[1] * cache.k.shape[1] if cache.seqlens is None else cache.seqlens
    if not isinstance(before, torch.Tensor):
        before = torch.full((batch,), counted("cache_seqlens", before, 0), dtype=torch.int32, device=q.device)
    total = before
    if k is not None and v is not None:
        total = before + (k.shape[1] if cu_new is None else cu_new[1:] - cu_new[:-1])
        turned: dict[str, Any] = {}
        if rotary is not None and rotary.start is None:
            turned = {"rotary_cos": rotary.cos, "rotary_sin": rotary.sin, "interleaved": rotary.interleaved}
        elif rotary is not None:
            k = rotary.turned(k, rotary.start, cu_new, True)
        append_kv(cache.k, cache.v, k, v, table, total, cu_seqlens=cu_new, **turned)
    if rotary is not None:
        q = rotary.turned(q, before if rotary.start is None else rotary.start, cu_q, rotary.along)
    if cache.leftpad is None and "softcap" not in chosen and "alibi_slopes" not in chosen:
        hints = {"cu_seqlens_q": cu_q, "max_seqlen_q": max_seqlen_q, "num_splits": num_splits or None}
        return attention_paged(q, cache.k, cache.v, table, total, return_lse=True, **hints, **chosen)
    copied = cache.block_table is not None or cache.batch_idx is not None
    k_all, v_all = (gathered(t, table) if copied else t[:batch] for t in (cache.k, cache.v))
    if cu_q is not None:
        return attend_cache(q, cu_q, k_all, v_all, total, cache.leftpad, chosen, max_seqlen_q)
    len_q = q.shape[1]
    cu_q = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * len_q
    out, lse = attend_cache(q.flatten(0, 1), cu_q, k_all, v_all, total, cache.leftpad, chosen, len_q)
    return out.unflatten(0, (batch, len_q)), lse.unflatten(1, (batch, len_q)).transpose(0, 1)


def check(q, k_cache, v_cache, k, v, cos, sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table) -> None:
    """Of dense queries.

    Raises:
        ProblemError: arguments that contradict each other, and new keys that do not fit: nothing was written then.
    """
    check_kinds(q, k_cache, v_cache, k, v, cos, sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    if q.dim() != 4 or k_cache.dim() != 4 or v_cache.dim() != 4:
        raise ProblemError(
            f"q and the caches must have rank 4; got {list(q.shape)}, {list(k_cache.shape)}, {list(v_cache.shape)}."
        )
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ProblemError("k_cache and v_cache are changed in place and must have stride 1 in their last dimension.")
    if any(t is not None and t.dim() != 4 for t in (k, v)):
        raise ProblemError(f"k and v must have rank 4; got {[list(t.shape) for t in (k, v) if t is not None]}.")
    if (k is None) != (v is None):
        raise ProblemError("k and v come together; one of them is missing.")
    if k is not None and cache_seqlens is None:
        raise ProblemError("k and v are written at cache_seqlens, which is missing.")
    if (cos is None) != (sin is None) or (cos is not None and k is None):
        raise ProblemError(
            "rotary_cos and rotary_sin come together, and need k, v: what is in the cache has been turned already."
        )
    if block_table is not None and (cache_leftpad is not None or cache_batch_idx is not None):
        raise ProblemError("block_table takes neither cache_leftpad nor cache_batch_idx: pages say where keys lie.")
    if block_table is None and cache_batch_idx is None and k_cache.shape[0] < q.shape[0]:
        raise ProblemError(f"the cache has {k_cache.shape[0]} sequences and q {q.shape[0]}.")
    lengths = cache_seqlens
    if isinstance(lengths, torch.Tensor) and lengths.device.type == "cpu" and lengths.numel():
        lengths = int(lengths.max())
    if k is not None and not (lengths is None or isinstance(lengths, torch.Tensor)):
        room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        if lengths + k.shape[1] > room:
            raise ProblemError(
                f"{k.shape[1]} new keys behind {lengths} do not fit in a cache of {room}: nothing was written. Make it longer, "
                "or drop keys."
            )


def check_kinds(
    q, k_cache, v_cache, k, v, cos, sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, **lengths
) -> None:
    """Tensors are such, and integers where they say where keys lie, `[B]` or a table `[B, pages]`, all on one device.
    `lengths`: others that are integers of one dimension, or None."""
    optional = {"k": k, "v": v, "rotary_cos": cos, "rotary_sin": sin}
    places = {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad, "block_table": block_table, **lengths}
    if isinstance(cache_seqlens, torch.Tensor):
        places["cache_seqlens"] = cache_seqlens
    elif cache_seqlens is not None:
        counted("cache_seqlens", cache_seqlens, 0)
    given = {name: t for name, t in {**optional, **places}.items() if t is not None}
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, **given)
    cu = lengths.get("cu_seqlens_q")
    batch = cu.shape[0] - 1 if cu is not None and cu.dim() == 1 else q.shape[0]
    for name, tensor in given.items():
        if tensor.device != q.device:
            raise ProblemError(f"{name} is on {tensor.device} and q on {q.device}; move it with .to(q.device).")
        if name not in places:
            continue
        size = batch + 1 if name.startswith("cu_") else batch
        rank = 2 if name == "block_table" else 1
        if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != rank or tensor.shape[0] != size or size < 0:
            layout = "[B, pages]" if rank == 2 else "[B + 1]" if name.startswith("cu_") else "[B]"
            raise ProblemError(
                f"{name} must be int32 or int64 {layout}, here with B = {max(batch, 0)}; got {tensor.dtype} "
                f"{list(tensor.shape)}."
            )
    if cos is not None and sin is not None and (cos.dim() != 2 or cos.shape != sin.shape or not cos.shape[0]):
        raise ProblemError(
            f"rotary_cos and rotary_sin must be [positions, R / 2] alike; got {list(cos.shape)} and {list(sin.shape)}."
        )
    named = cache_batch_idx is not None or block_table is not None
    if named and batch > 0 and 0 in (*k_cache.shape[:1], *v_cache.shape[:1]):
        raise ProblemError(f"the caches have no sequences or pages; got {list(k_cache.shape)} and {list(v_cache.shape)}.")
