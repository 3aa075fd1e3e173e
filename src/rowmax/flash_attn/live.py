"""Keys that live inside longer tensors: between padding on the left and room on the right, or in pages that are gathered first.

A packed tensor takes any number of sequences, and one without queries or keys costs nothing. So a sequence becomes four:
padding; live keys, and the queries that see them; the rest of the keys; the rest of the queries. Pages alone are copied.
"""

from typing import Optional

import torch

from rowmax.api import attention_varlen

PARTS = 4


def live_bounds(cu_seqlens_q, starts, ends, next_starts, ends_q=None) -> list[torch.Tensor]:
    """`cu_seqlens` of queries and keys of the `PARTS` sequences that each sequence becomes.

    Args:
        starts, ends: integers `[B]`: rows of k where the live keys of a sequence begin and end.
        next_starts: `[B]`: where the rows of the next sequence begin, at least `ends`.
        ends_q: `[B]`: rows of q behind these, up to the next sequence, see nothing.
    """
    first, last = cu_seqlens_q[:-1], cu_seqlens_q[1:]
    inner = last if ends_q is None else ends_q
    cu = []
    for bounds in ((first, inner, inner, last), (starts, ends, next_starts, next_starts)):
        cu.append(torch.nn.functional.pad(torch.stack([t.to(torch.int32) for t in bounds], 1).flatten(), (1, 0)))
    return cu


def attend_live(q, cu, k, v, chosen: dict, hints: tuple[Optional[int], Optional[int]], **options):
    """`(out [Tq, H, Dv], lse [H, Tq])` of packed queries over the live keys of k, v `[Tk, Hk, D]`.

    Args:
        cu: of `live_bounds`.
        chosen, options: keyword arguments of `attention_varlen`; hints: `max_seqlen_q`, `max_seqlen_k`.
    """
    slopes = chosen.get("alibi_slopes")
    if slopes is not None and slopes.dim() == 2:
        chosen = {**chosen, "alibi_slopes": slopes.repeat_interleave(PARTS, 0)}
    chosen = {**chosen, **options, "max_seqlen_q": hints[0], "max_seqlen_k": hints[1]}
    return attention_varlen(q, k, v, *cu, return_lse=True, **chosen)


def attend_cache(q, cu_seqlens_q, k_cache, v_cache, lengths, leftpad, chosen: dict, max_seqlen_q: Optional[int] = None):
    """`attend_live` over caches `[B, room, Hk, D]`, of which the first `lengths` `[B]` keys of each sequence count, without
    `leftpad` `[B]` ones at the beginning."""
    room = k_cache.shape[1]
    base = torch.arange(k_cache.shape[0], device=q.device) * room
    lengths = lengths.clamp(0, room)
    pad = torch.zeros_like(lengths) if leftpad is None else leftpad.clamp(min=0).minimum(lengths)
    k, v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    cu = live_bounds(cu_seqlens_q, base + pad, base + lengths, base + room)
    return attend_live(q, cu, k, v, chosen, (max_seqlen_q, room))


def gathered(pages: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """Pages `[page, slot, Hk, D]` in the order of `block_table` `[B, P]`, `[B, P * slot, Hk, D]`: a copy. Entries that a
    sequence does not reach may hold anything."""
    return pages[block_table.long().clamp(0, max(pages.shape[0] - 1, 0))].flatten(1, 2)
