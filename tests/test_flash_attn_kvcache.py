"""`flash_attn_with_kvcache` against loops over sequences in fp64: a seeded sample of its grid, and what is refused."""

import math
import random

import pytest
import torch

from rowmax import ProblemError, reference
from rowmax.flash_attn import flash_attn_with_kvcache
from rowmax.flash_attn.layers.rotary import apply_rotary_emb

ROOM = 48


def check(seed: int) -> None:
    rnd, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    batch, heads_k, len_q = rnd.choice((1, 2, 3)), rnd.choice((1, 2)), rnd.choice((1, 1, 3, 7))
    heads, dim = heads_k * rnd.choice((1, 2)), rnd.choice((16, 32, 59))
    kind = rnd.choice(("contiguous", "pages", "batch_idx", "leftpad"))
    bent = rnd.random() < 0.5
    new = rnd.choice((0, 1, len_q, 5))
    rotary = rnd.choice(("", "halves", "interleaved")) if new else ""
    causal, local = rnd.random() < 0.5, rnd.random() < 0.3
    window = (rnd.randint(0, ROOM), rnd.randint(0, 9)) if local else (-1, -1)
    softcap = rnd.choice((0.0, 4.0)) if bent else 0.0
    slopes = (normal(heads) if rnd.random() < 0.5 else normal(batch, heads)).abs() if bent and rnd.random() < 0.6 else None
    before = torch.tensor([rnd.randint(0, ROOM - max(new, 1)) for _ in range(batch)], dtype=torch.int32)
    if rnd.random() < 0.2:
        before = torch.full_like(before, int(before[0]))
    given_before = int(before[0]) if batch == 1 and rnd.random() < 0.5 else before
    padded = kind == "leftpad" or (kind == "batch_idx" and rnd.random() < 0.3)
    leftpad = torch.tensor([rnd.randint(0, int(n)) for n in before], dtype=torch.int32) if padded else None

    rows = batch + 2 if kind == "batch_idx" else batch
    whole = [normal(rows, ROOM, heads_k, dim) for _ in range(2)]  # the cache as it is read, sequence by sequence
    options, index = {}, list(range(batch))
    if kind == "batch_idx":
        index = rnd.sample(range(rows), batch)
        options["cache_batch_idx"] = torch.tensor(index, dtype=torch.int32)
    if kind == "pages":
        size = rnd.choice((4, 16))
        order = rnd.sample(range(batch * ROOM // size + 3), batch * ROOM // size)
        table = torch.tensor(order, dtype=torch.int32).view(batch, -1)
        caches = [torch.full((batch * ROOM // size + 3, size, heads_k, dim), math.nan, dtype=torch.float64) for _ in range(2)]
        for cache, source in zip(caches, whole, strict=True):
            cache[table.flatten().long()] = source.view(-1, size, heads_k, dim)
        options["block_table"] = table
    else:
        caches = [t.clone() for t in whole]
    q, fresh = normal(batch, len_q, heads, dim), [normal(batch, new, heads_k, dim) for _ in range(2)]
    angles = torch.rand(ROOM + 8, 8, generator=generator, dtype=torch.float64) * 6
    if new:
        options |= {"k": fresh[0], "v": fresh[1]}
    if rotary:
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": rotary == "interleaved"}
    out, lse = flash_attn_with_kvcache(
        *(q, *caches), cache_seqlens=given_before, cache_leftpad=leftpad, causal=causal, window_size=window, softcap=softcap,
        alibi_slopes=slopes, num_splits=rnd.choice((0, 1, 3)), return_softmax_lse=True, **options,
    )  # fmt: skip

    left, right = (None if side < 0 else side for side in window)
    for b in range(batch):
        start, row = int(before[b]), index[b]
        own_q, own_k, own_v = q[b : b + 1], fresh[0][b : b + 1], fresh[1][b : b + 1]
        if rotary:
            turn = (angles.cos(), angles.sin(), rotary == "interleaved")
            own_k = apply_rotary_emb(own_k, *turn, seqlen_offsets=start)
            alone = own_q.transpose(0, 1)  # every query as if it were the first
            own_q = (
                apply_rotary_emb(own_q, *turn, seqlen_offsets=start)
                if causal or local
                else apply_rotary_emb(alone, *turn, seqlen_offsets=start).transpose(0, 1)
            )
        whole[0][row, start : start + new], whole[1][row, start : start + new] = own_k[0], own_v[0]
        first = int(leftpad[b]) if leftpad is not None else 0
        k, v = (t[row : row + 1, first : start + new] for t in whole)
        own_slopes = None if slopes is None else slopes if slopes.dim() == 1 else slopes[b]
        bends = {"softcap": softcap, "slopes": own_slopes}
        want, want_lse = reference.attention(own_q, k, v, left=left, right=0 if causal else right, **bends)
        want_lse = torch.where(torch.isneginf(want_lse), math.inf, want_lse)
        torch.testing.assert_close(out[b : b + 1], want, rtol=0, atol=1e-5 if rotary else 1e-11)
        torch.testing.assert_close(lse[b : b + 1].double(), want_lse, rtol=1e-6, atol=1e-5)
    if kind == "pages":
        caches = [t[options["block_table"].long()].flatten(1, 2) for t in caches]
    for cache, want in zip(caches, whole, strict=True):  # in place, and nothing beside it
        torch.testing.assert_close(cache, want, rtol=0, atol=1e-5 if rotary else 0)


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_a_sample_of_the_grid(first):
    for seed in range(first, first + 30):
        try:
            check(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


def test_the_output_alone_and_a_whole_cache():
    q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 9, 2, 16)
    torch.testing.assert_close(flash_attn_with_kvcache(q, cache, cache), reference.attention(q, cache, cache)[0])


def test_what_contradicts_itself_or_is_not_there_says_so():
    q, cache, new = torch.randn(2, 1, 4, 16), torch.randn(2, 16, 2, 16), torch.randn(2, 1, 2, 16)
    table, idx = torch.zeros(2, 1, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    wrong = {
        "do not fit in a cache of 16": {"k": new, "v": new, "cache_seqlens": 16},  # B112
        "missing": {"k": new, "cache_seqlens": 3},
        "cache_seqlens, which": {"k": new, "v": new},
        "neither cache_leftpad": {"block_table": table, "cache_leftpad": idx},
        "num_splits": {"num_splits": 129},
        "turned already": {"rotary_cos": torch.ones(9, 2), "rotary_sin": torch.ones(9, 2)},
    }
    before = cache.clone()
    for words, options in wrong.items():
        with pytest.raises(ProblemError, match=words):
            flash_attn_with_kvcache(q, cache, cache, **options)
    assert torch.equal(cache, before), "nothing was written"
