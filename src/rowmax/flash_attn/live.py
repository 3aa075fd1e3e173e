"""Keys that live inside longer tensors: between padding on the left and room on the right, or in pages that are gathered first.

A packed tensor takes any number of sequences, and one without queries costs nothing. So the keys of a sequence become three of
them: padding, live keys, and the rest, of which the second alone has queries. Nothing is copied, but pages are.
"""

from typing import Optional

import torch

from rowmax.api import attention_varlen


def attend_live(q, cu_seqlens_q, k, v, starts, ends, next_starts, chosen: dict, hints: tuple[Optional[int], Optional[int]]):
    """`(out [Tq, H, Dv], lse [H, Tq])` of packed queries.

    Args:
        k, v: `[Tk, Hk, D]`.
        starts, ends: integers `[B]`: rows of k where the live keys of a sequence begin and end.
        next_starts: `[B]`: where the rows of the next sequence begin, at least `ends`.
        chosen: keyword arguments of `attention_varlen`; hints: `max_seqlen_q`, `max_seqlen_k`.
    """
    first, last = cu_seqlens_q[:-1], cu_seqlens_q[1:]
    cu = []
    for bounds in ((first, last, last), (starts, ends, next_starts)):
        cu.append(torch.nn.functional.pad(torch.stack([t.to(torch.int32) for t in bounds], 1).flatten(), (1, 0)))
    slopes = chosen.get("alibi_slopes")
    if slopes is not None and slopes.dim() == 2:
        chosen = {**chosen, "alibi_slopes": slopes.repeat_interleave(3, 0)}
    return attention_varlen(q, k, v, *cu, max_seqlen_q=hints[0], max_seqlen_k=hints[1], return_lse=True, **chosen)


def attend_cache(q, cu_seqlens_q, k_cache, v_cache, lengths, leftpad, chosen: dict, max_seqlen_q: Optional[int] = None):
    """`attend_live` over caches `[B, room, Hk, D]`, of which the first `lengths` `[B]` keys of each sequence count, without
    `leftpad` `[B]` ones at the beginning."""
    room = k_cache.shape[1]
    base = torch.arange(k_cache.shape[0], device=q.device) * room
    lengths = lengths.clamp(0, room)
    pad = torch.zeros_like(lengths) if leftpad is None else leftpad.clamp(min=0).minimum(lengths)
    k, v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    return attend_live(q, cu_seqlens_q, k, v, base + pad, base + lengths, base + room, chosen, (max_seqlen_q, room))


def gathered(pages: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """Pages `[page, slot, Hk, D]` in the order of `block_table` `[B, P]`, `[B, P * slot, Hk, D]`: a copy. Entries that a
    sequence does not reach may hold anything."""
    return pages[block_table.long().clamp(0, max(pages.shape[0] - 1, 0))].flatten(1, 2)
