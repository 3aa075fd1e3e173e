"""Pages in 8 bits: what storing loses is within the budget of docs/semantics.md, and the cache finds scales by itself."""

import math

import pytest
import torch

import rowmax
from rowmax import PagedKVCache, ProblemError, append_kv, attention_paged, reference
from rowmax.paged import E4M3, AppendOperands, PagedProblem
from rowmax.testing import paged
from test_cache import BACKENDS, run

HEADS_K, GROUP, DIM, DIM_V, SIZE, PAGES = 2, 2, 16, 24, 4, 12
PLANS = ["gathered", *(["split_kv[16x16 w4 s2 x2]"] if "interpreted" in BACKENDS else [])]
HALF_STEP = 2.0**-4 * (1 + 2.0**-20)  # of a number; the division by the scale is rounded, too
LEAST = 2.0**-10  # of the scale


def draw(tokens, factor=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS_K * GROUP, DIM), (HEADS_K, DIM), (HEADS_K, DIM_V))
    return [factor * torch.randn(tokens, *shape, generator=generator, dtype=torch.float32).bfloat16() for shape in shapes]


def of_tokens(scale, tokens, table):
    """`[T, Hk, 1]`: the scale of each token's numbers."""
    pages = table[torch.arange(tokens) // SIZE].long()
    return (scale.expand(tokens, -1) if scale.dim() == 1 else scale[pages]).unsqueeze(-1).double()


def read_back(pages, scale, tokens, table):
    where = table[torch.arange(tokens) // SIZE].long(), torch.arange(tokens) % SIZE
    return pages[where].double() * of_tokens(scale, tokens, table)


def budget(q, k, v, k_scale, v_scale):
    """Of the output `[T, H, Dv]` and the LSE `[H, T]`, from the numbers before they were stored; causal."""
    tokens = q.shape[0]
    heads = torch.arange(HEADS_K * GROUP) // GROUP
    q, k, v = (t.double() for t in (q, k, v))
    lost_k, lost_v = HALF_STEP * k.abs() + LEAST * k_scale, HALF_STEP * v.abs() + LEAST * v_scale
    seen = torch.ones(tokens, tokens).tril().bool()
    scores = torch.einsum("ihd,jhd->hij", q, k[:, heads]) * DIM**-0.5
    p = scores.masked_fill(~seen, -math.inf).softmax(-1)
    lost = torch.einsum("ihd,jhd->hij", q.abs(), lost_k[:, heads]) * DIM**-0.5
    most = lost.masked_fill(~seen, 0).amax(-1)  # [H, T]
    weight = torch.einsum("hij,jhd->ihd", p, v.abs()[:, heads])
    stored = torch.einsum("hij,jhd->ihd", p, lost_v[:, heads])
    grown = torch.exp(2 * most).T.unsqueeze(-1)
    return (grown - 1) * weight + grown * stored, most


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_of_pages_of_nobody_go_nowhere(backend):
    """Rows with a NaN are computed again, 16 keys a turn: the last turns lie past the end, where page 0 would stand."""
    problem = PagedProblem.parse("b2 h4/2 q6 k320 d64 bf16 causal paged16 e4m3")
    plan = "split_kv" if backend == "interpreted" else None
    for kind in ("normal", "nan(q)"):
        report = paged.check_paged(problem, [(6, 300), (6, 16)], kind, plan=plan, page_scales=True)
        assert report.ok, str(report)


@pytest.mark.parametrize("by_page", [False, True])
def test_what_storing_loses_is_within_the_budget(by_page):
    """On the CPU: Triton's interpreter rounds to 8 bits wrongly (7.8 to 4); `gpu_serving.py` compares a GPU with the CPU."""
    tokens, table = 21, torch.randperm(PAGES, generator=torch.Generator().manual_seed(1))[:6].int()
    for factor in (0.05, 1.0, 3.0):
        q, k, v = draw(tokens, factor)
        k_scale = k.abs().float().amax((0, 2)) / 448
        v_scale = v.abs().float().amax((0, 2)) / 448
        if by_page:
            k_scale, v_scale = (scale * torch.linspace(1, 2, PAGES).unsqueeze(1) for scale in (k_scale, v_scale))
        pages = [torch.zeros(PAGES, SIZE, HEADS_K, dim, dtype=E4M3) for dim in (DIM, DIM_V)]
        append_kv(
            *(*pages, k, v, table[None], torch.tensor([tokens])),
            cu_seqlens=torch.tensor([0, tokens]),
            **{"k_scale": k_scale, "v_scale": v_scale},
        )
        meant = [read_back(page, scale, tokens, table) for page, scale in zip(pages, (k_scale, v_scale), strict=True)]
        before = reference.attention(q[None].double(), k[None].double(), v[None].double(), right=0)
        after = reference.attention(q[None].double(), *(t[None] for t in meant), right=0)
        scales = [of_tokens(scale, tokens, table) for scale in (k_scale, v_scale)]
        allowed = budget(q, k, v, *scales)
        for new, old, most in zip(after, before, allowed, strict=True):
            ratio = (new[0] - old[0]).abs() / most
            assert float(ratio.max()) <= 1
            assert float(ratio.max()) > 0.01, "a budget that nobody comes near says nothing"


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_too_large_becomes_the_largest_number(backend):
    k = torch.tensor([1e4, -1e4, 448.0, 3.0]).bfloat16().view(1, 1, 4)
    pages, scale = torch.zeros(2, 4, 1, 4, dtype=E4M3), torch.tensor([[1.0], [2.0]])
    run(backend, AppendOperands(pages, None, k, None, torch.tensor([[1]]), torch.tensor([1]), None, None, None, scale, None))
    assert pages[1, 0, 0].float().tolist() == [448.0, -448.0, 224.0, 1.5]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("by_page", [False, True])
def test_each_number_is_divided_by_its_own_scale(backend, by_page):
    """Numbers that 8 bits hold exactly."""
    generator = torch.Generator().manual_seed(0)
    tokens, table = 10, torch.tensor([[5, 2, 7]])
    meant = [torch.randint(-15, 16, (tokens, HEADS_K, dim), generator=generator).float() for dim in (DIM, DIM_V)]
    shape = (PAGES, HEADS_K) if by_page else (HEADS_K,)
    scales = [2.0 ** torch.randint(-3, 4, shape, generator=generator) for _ in "kv"]
    new = [(t * of_tokens(scale, tokens, table[0])).bfloat16() for t, scale in zip(meant, scales, strict=True)]
    pages = [torch.zeros(PAGES, SIZE, HEADS_K, dim, dtype=E4M3) for dim in (DIM, DIM_V)]
    bounds = torch.tensor([0, tokens])
    run(backend, AppendOperands(*pages, *new, table, bounds[1:], bounds, None, None, *scales))
    for memory, want in zip(pages, meant, strict=True):
        where = table[0][torch.arange(tokens) // SIZE], torch.arange(tokens) % SIZE
        assert torch.equal(memory[where].float(), want)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("by_page", [False, True])
def test_each_scale_alone_has_its_linear_effect(plan, by_page):
    """Powers of two: twice the scale of a head's values is twice its output, twice that of its keys is twice its queries."""
    q = draw(2)[0][:, :, :DIM]
    pages = [torch.randn(PAGES, SIZE, HEADS_K, dim).to(E4M3) for dim in (DIM, DIM_V)]
    given = (*pages, torch.tensor([[3, 5], [0, 7]]), torch.tensor([7, 5]))
    scale = torch.tensor([4.0, 0.5]).expand(PAGES, -1).contiguous() if by_page else torch.tensor([4.0, 0.5])
    factor = torch.tensor([4.0, 4.0, 0.5, 0.5])[:, None]
    ones = torch.ones_like(scale)  # so that the same way is taken

    def attend(queries, k_scale=ones, v_scale=ones):
        return attention_paged(queries, *given, k_scale=k_scale, v_scale=v_scale, plan=plan)

    plain, turned = attend(q), attend((q.float() * factor).bfloat16())
    assert torch.equal(attend(q, v_scale=scale), (plain.float() * factor).bfloat16())
    assert torch.equal(attend(q, k_scale=scale), turned)
    assert not torch.equal(turned, plain)


@pytest.mark.parametrize("same", [False, True])
def test_a_cache_in_8_bits_finds_its_scales(same):
    """Filled in chunks and by single tokens, beside another sequence, shared and copied on write."""
    cache = PagedKVCache(PAGES, page_size=SIZE, heads=HEADS_K, dim=DIM, dim_v=DIM_V, dtype=E4M3, layers=2, max_sequences=3)
    cache.k_scale.fill_(math.nan)  # of pages of nobody
    a, b = cache.add(), cache.add()
    q, k, v = draw(14)
    begin = 0
    for count in (7, 1, 1, 5):
        step = cache.extend([a, b], count if same else [count, 0])
        rows = slice(begin, begin + count)
        new = [t[rows] for t in (q, k, v)]
        if same:
            new = [torch.stack([t, t.flip(0)]) for t in new]
        cache.append(step, new[1], new[2], layer=1)
        out = cache.attend(step, new[0], layer=1)
        begin += count
    fork = cache.fork(a)
    more = draw(1, seed=5)
    step = cache.extend([fork], 1)
    cache.append(step, more[1][None], more[2][None], layer=1)
    cache.attend(step, more[0][None], layer=1)
    tables = [torch.tensor(cache._pages[sequence]) for sequence in (a, fork)]
    assert tables[0][-1] != tables[1][-1]
    for table, tail in zip(tables, ((), (more,)), strict=True):
        tokens = 14 + len(tail)
        wants = [torch.cat([t, *(extra[i] for extra in tail)]).double() for i, t in enumerate((q, k, v))]
        for pages, scale, want in zip((cache.k_pages, cache.v_pages), (cache.k_scale, cache.v_scale), wants[1:], strict=True):
            meant = read_back(pages[1], scale[1], tokens, table)
            lost = HALF_STEP * want.abs() + LEAST * of_tokens(scale[1], tokens, table)
            assert bool(((meant - want).abs() <= lost).all())
    rows = out[0] if same else out
    expected = reference.attention(q[None].double(), k[None].double(), v[None].double(), right=0)[0][0, 9:]
    scales = [of_tokens(t[1], 14, tables[0]) for t in (cache.k_scale, cache.v_scale)]
    allowed = budget(q, k, v, *scales)[0][9:]
    rounding = 2.0**-8 * (expected.abs() + v.double().abs().amax())  # of the output, and of P
    assert bool(((rows.double() - expected).abs() <= allowed + rounding).all())
    cache.check()


def test_a_latent_cache_in_8_bits():
    cache = PagedKVCache(4, page_size=4, heads=1, dim=16, dim_v=8, latent=True, dtype=E4M3)
    a = cache.add()
    step = cache.extend([a], 5)
    latent = torch.randn(1, 5, 1, 16).bfloat16()
    cache.append(step, latent)
    out = cache.attend(step, latent.repeat(1, 1, 4, 1))
    meant = [cache.k_pages[0, page].double() * cache.k_scale[0, page, :, None].double() for page in cache._pages[a]]
    keys = torch.cat(meant)[None, :5]
    expected = reference.attention(latent.repeat(1, 1, 4, 1).double(), keys, keys[..., :8], right=0)[0]
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-7)


def test_scales_are_told_what_is_wrong_with_them():
    pages, q = torch.zeros(3, 4, 2, 16, dtype=E4M3), torch.zeros(1, 4, 16, dtype=torch.bfloat16)
    given = (q, pages, pages, torch.tensor([[1, 0]]), torch.tensor([3]))
    for k_scale, v_scale, says in (
        (torch.ones(3), None, r"\[Hk\], here \[2\], or \[page, Hk\], here \[3, 2\]"),
        (torch.ones(2, 3).T, None, "contiguous"),
        (torch.ones(3, 2), torch.ones(2), r"both be \[Hk\] or both \[page, Hk\]"),
        (torch.ones(2).double(), None, "torch.float32"),
        (torch.tensor([1.0, -2.0]), None, r"k_scale\[1\] is -2"),
        (None, torch.tensor([[1.0, 1], [1, math.inf], [1, 1]]), r"v_scale\[1, 1\] is inf"),
    ):
        with pytest.raises(ProblemError, match=says):
            attention_paged(*given, k_scale=k_scale, v_scale=v_scale)
    unused = torch.tensor([[1.0, 1], [1, 1], [math.nan, 1]])
    assert attention_paged(*given, k_scale=unused).shape == q.shape


def test_debug_names_the_token_that_has_no_place(monkeypatch):
    """Where the operator itself does not look, as on a GPU."""
    pages, k = torch.zeros(3, 4, 1, 2), torch.zeros(2, 1, 2)
    monkeypatch.setattr(rowmax.serving, "APPEND", lambda *_: None)
    for table, lengths, says in (
        ([[0, 9], [1, 2]], [5, 1], r"block_table\[0, 1\] is 9"),
        ([[0, 9], [1, 2]], [1, -3], r"seqlens_k\[1\] is -3"),
    ):
        given = (pages, pages.clone(), k, k, torch.tensor(table), torch.tensor(lengths))
        append_kv(*given)
        with pytest.raises(ProblemError, match=says):
            append_kv(*given, debug=True)
