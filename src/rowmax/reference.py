"""The oracle: attention from its definition, dense, differentiable to any order. Slow on purpose.

Written by index comparison with an explicit boolean mask; shares no helper with anything else in the package, so that a
mistake in the mask geometry or the softmax cannot hide in both. Pass fp64 tensors for a result to compare against.
"""

import torch


def visible(
    len_q: int, len_k: int, left=None, right=None, sink_tokens=None, prefix=None, chunk=None, *, device=None, rows=None
) -> torch.Tensor:
    """Boolean `[len_q, len_k]`: does query i see key j? The last query is aligned with the last key. `rows`: only those.

    Within a chunk of positions and the window; the left side of both hides none of the first `sink_tokens` keys, and nothing
    hides the first `prefix` keys.
    """
    i = (torch.arange(len_q, device=device) if rows is None else rows).unsqueeze(1)
    j = torch.arange(len_k, device=device).unsqueeze(0)
    distance = j - (i + len_k - len_q)
    seen = torch.ones(i.shape[0], len_k, dtype=torch.bool, device=device)
    chunks = j * 0  # from the query's to the key's
    if chunk is not None:
        chunks = j // chunk - (i + len_k - len_q).div(chunk, rounding_mode="floor")
    if left is not None:
        seen &= distance >= -left
    if chunk is not None:
        seen &= chunks >= 0
    if sink_tokens is not None:
        seen |= j < sink_tokens
    if right is not None:
        seen &= distance <= right
    if chunk is not None:
        seen &= chunks <= 0
    if prefix is not None:
        seen |= j < prefix
    return seen


def alibi(slopes, len_q: int, len_k: int, rows=None) -> torch.Tensor:
    """`[..., H, len_q, len_k]`: -slope * |i + len_k - len_q - j| for slopes `[H]` or `[B, H]`. `rows`: only those."""
    i = (torch.arange(len_q, device=slopes.device) if rows is None else rows).unsqueeze(1)
    j = torch.arange(len_k, device=slopes.device).unsqueeze(0)
    return -slopes[..., None, None] * (i + len_k - len_q - j).abs().to(slopes.dtype)


def dropout(seed: int, p: float, sequences, heads: int, len_q: int, len_k: int, rows=None) -> torch.Tensor:
    """Boolean `[len(sequences), heads, len_q, len_k]`: the weights that a seed keeps. `sequences`: numbers; `rows`: only those.

    Of Philox4x32 with 7 rounds, key (seed % 2^32, seed // 2^32), counter (8 (i // 16) + i % 8, 4 (j // 16) + j % 8 // 2, head,
    sequence), word 2 (j // 8 % 2) + i // 8 % 2 has in its half j % 2, the low one first, 15 bits below the highest that are at
    least p 2^15, rounded.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    device = rows.device if rows is not None else None
    j = torch.arange(len_k, device=device)
    i = (torch.arange(len_q, device=device) if rows is None else rows).view(-1, 1)
    h = torch.arange(heads, device=device).view(-1, 1, 1)
    b = torch.tensor(list(sequences), dtype=torch.int64, device=device).view(-1, 1, 1, 1)
    full = torch.zeros(b.shape[0], heads, i.shape[0], len_k, dtype=torch.int64, device=device)
    x = [full + 8 * (i // 16) + i % 8, full + 4 * (j // 16) + j % 8 // 2, full + h, full + b]
    key, mask = [seed % 2**32, seed // 2**32 % 2**32], 2**32 - 1

    def product(factor, y):  # (high, low) words, by halves of 16 bits
        low, high = factor * (y & 0xFFFF), factor * (y >> 16)
        whole = low + ((high & 0xFFFF) << 16)
        return ((high >> 16) + (whole >> 32)) & mask, whole & mask

    for turn in range(7):
        high0, low0 = product(0xD2511F53, x[0])
        high2, low2 = product(0xCD9E8D57, x[2])
        k0, k1 = ((key[n] + turn * step) % 2**32 for n, step in enumerate((0x9E3779B9, 0xBB67AE85)))
        x = [high2 ^ x[1] ^ k0, low2, high0 ^ x[3] ^ k1, low0]
    place = 2 * (j // 8 % 2) + i // 8 % 2
    word = torch.where(place == 0, x[0], torch.where(place == 1, x[1], torch.where(place == 2, x[2], x[3])))
    return torch.where(j % 2 == 0, word, word // 2**16) % 2**15 >= _dropped(p)


def _dropped(p: float) -> int:
    """Of 2^15 draws, those for which a weight is dropped."""
    return min(max(round(p * 2**15), 1), 2**15 - 1) if p else 0


def dropout_factor(p: float) -> float:
    """What `dropout` keeps is multiplied with this, 1 / (1 - p) for p as it is rounded: the expected output is as without."""
    return 1 / (1 - _dropped(p) / 2**15)


def attention(
    q,
    k,
    v,
    *,
    left=None,
    right=None,
    sink_tokens=None,
    prefix=None,
    chunk=None,
    scale=None,
    seen=None,
    softcap=0.0,
    slopes=None,
    bias=None,
    sink=None,
    kept=None,
    dropout_p=0.0,
    score_mod=None,
):
    """`(out, lse)` of dense attention in the inputs' own dtype.

    Args:
        q: `[B, Tq, Hq, D]`; k: `[B, Tk, Hk, D]`; v: `[B, Tk, Hk, Dv]`.
        left, right: the window around the diagonal; `None` is no limit. Causal is `right=0`.
        sink_tokens, prefix, chunk: of `visible`.
        seen: boolean `[Tq, Tk]` (or broadcastable to `[B, Hq, Tq, Tk]`) used instead of the window.
        softcap: c > 0 makes a scaled score s into c tanh(s / c).
        slopes: `[Hq]` or `[B, Hq]`, the bias of `alibi`; bias: any, broadcastable to `[B, Hq, Tq, Tk]`. Both are added after
            the soft-cap, before the mask.
        kept: boolean `[B, Hq, Tq, Tk]`, as of `dropout`: other weights become 0, these are multiplied by `dropout_factor`.
        sink: `[Hq]`, one more logit in the denominator and the LSE of every row of a head, without a value.
        score_mod: `f(score, batch, head, row, col)` of tensors that broadcast to the scores, the row counted as keys are
            (i + Tk - Tq): makes scores behind the soft-cap into others. What it makes -inf has no weight.

    Returns:
        out `[B, Tq, Hq, Dv]` and lse `[B, Hq, Tq]`; rows that see nothing are 0 and -inf (with a sink: the sink), with zero
        gradients.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    heads = torch.arange(q.shape[2], device=q.device) // group
    if seen is None:
        seen = visible(q.shape[1], k.shape[1], left, right, sink_tokens, prefix, chunk, device=q.device)
    scores = torch.einsum("bihd,bjhd->bhij", q, k[:, :, heads]) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if score_mod is not None:
        sequence, head = (torch.arange(n, device=q.device) for n in (q.shape[0], q.shape[2]))
        row = torch.arange(q.shape[1], device=q.device) + k.shape[1] - q.shape[1]
        col = torch.arange(k.shape[1], device=q.device)
        scores = score_mod(scores, sequence.view(-1, 1, 1, 1), head.view(-1, 1, 1), row.view(-1, 1), col)
        seen = seen & (scores != -torch.inf)
    if slopes is not None:
        scores = scores + alibi(slopes, q.shape[1], k.shape[1]).to(q.dtype)
    if bias is not None:
        scores = scores + bias.to(q.dtype)
        seen = seen & (bias != -torch.inf)
    scores = torch.where(seen, scores, -torch.inf)
    keys = scores.shape[-1]
    dead = ~seen.any(-1, keepdim=True).expand(*scores.shape[:-1], 1)
    if sink is not None:  # the last column, which sees no value
        logits = sink.to(q.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores, dead = torch.cat([scores, logits], -1), dead & (logits == -torch.inf)
    safe = torch.where(dead, 0.0, scores)  # a row of -inf would make softmax NaN
    p = torch.where(seen, torch.softmax(safe, -1)[..., :keys], 0.0)
    if kept is not None:
        p = torch.where(kept, p * dropout_factor(dropout_p), 0.0)
    values = v[:, :, heads]
    finite = torch.isfinite(values)
    out = torch.einsum("bhij,bjhd->bihd", p, torch.where(finite, values, 0.0))
    if not bool(finite.all()):  # a value reaches exactly the rows that see it: 0 * NaN must not count
        out = torch.where(_sees_any(seen, ~finite, p), torch.nan, out)
    if scores.shape[-1] == 0:
        return out, torch.full(scores.shape[:-1], -torch.inf, dtype=q.dtype, device=q.device)
    lse = torch.where(dead.squeeze(-1), -torch.inf, torch.logsumexp(safe, -1))
    return out, lse


def _sees_any(seen, marked, like):
    """`[B, Tq, H, D]`: does row i see a key whose value element is marked?"""
    seen = seen.expand(like.shape).to(torch.float64)
    return torch.einsum("bhij,bjhd->bihd", seen, marked.to(torch.float64)) > 0


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, slopes=None, **common):
    """`(out, lse)` of packed attention, one sequence after another: out `[Tq, Hq, Dv]`, lse `[Hq, Tq]`.

    Args:
        common: left, right, sink_tokens, prefix, chunk, scale, softcap and sink, as for `attention`.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf)
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs, lses, last = [], [], 0
    for i in range(len(bounds_q) - 1):
        (q0, q1), (k0, k1) = bounds_q[i : i + 2], bounds_k[i : i + 2]
        own = None if slopes is None else slopes if slopes.dim() == 1 else slopes[i]
        o, m = attention(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], slopes=own, **common)
        outs += [out[last:q0], o[0]]
        lses += [lse[:, last:q0], m[0]]
        last = q1
    return torch.cat([*outs, out[last:]]), torch.cat([*lses, lse[:, last:]], 1)
