"""`append_kv` and `PagedKVCache`: what is written where, who shares what, and and that the allocator keeps its promises."""

import os

import pytest
import torch
from hypothesis import settings, strategies
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

import rowmax
import soak_cache
from rowmax import CacheFull, PagedKVCache, ProblemError, append_kv, reference, rotate
from rowmax.paged import AppendOperands

BACKENDS = ["cpu", *(["interpreted"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]


def run(backend, operands, interleaved=False):
    if backend == "cpu":
        *tensors, cu, cos, sin, k_scale, v_scale = operands
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        return append_kv(*tensors, cu_seqlens=cu, rotary_cos=cos, rotary_sin=sin, interleaved=interleaved, **scales)
    from rowmax.kernels.decode_launch import append

    return append(operands, interleaved)


def angles(positions, pairs):
    theta = torch.arange(positions)[:, None] * 10.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    return theta.cos(), theta.sin()


def rotated(x, position, pairs, interleaved):
    """From the definition, one number after another, in Python's own arithmetic."""
    cos, sin = angles(64, pairs)
    y = x.double().clone()
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, pairs + i)
        c, s = float(cos[position, i]), float(sin[position, i])
        y[..., a], y[..., b] = x[..., a].double() * c - x[..., b].double() * s, x[..., a].double() * s + x[..., b].double() * c
    return y


def place(backend, *, packed, dtype=torch.float32, heads_first=False, pairs=0, interleaved=False, v_too=True):
    """Three sequences of 5, 0 and 9 tokens get 2, 0 and 4 (or 2 each) more; everything else in the pages is left as it was."""
    torch.manual_seed(0)
    size, heads, dim, dim_v = 4, 2, 8, 6
    counts = [2, 0, 4] if packed else [2, 2, 2]
    lengths = torch.tensor([5, 0, 9]) + torch.tensor(counts)
    table = torch.tensor([[3, 8, -9, 99], [1, 77, 77, 77], [0, 5, 2, 6]], dtype=torch.int32)

    def pages(columns):
        memory = torch.randn(9, heads, size, columns) if heads_first else torch.randn(9, size, heads, columns)
        return (memory.transpose(1, 2) if heads_first else memory).to(dtype)

    k_pages, v_pages = pages(dim), pages(dim_v) if v_too else None
    lead = (sum(counts) + 1,) if packed else (3, 2)  # a packed row of no sequence, too
    k, v = torch.randn(*lead, heads, dim).to(dtype), torch.randn(*lead, heads, dim_v).to(dtype)
    cu = torch.tensor([0, 2, 2, 6]) if packed else None
    cos, sin = angles(64, pairs) if pairs else (None, None)
    expected = [k_pages.clone(), None if v_pages is None else v_pages.clone()]
    row = 0
    for b, count in enumerate(counts):
        for place in range(count):
            position = int(lengths[b]) - count + place
            page, slot = int(table[b, position // size]), position % size
            new_k, new_v = (k[row], v[row]) if packed else (k[b, place], v[b, place])
            expected[0][page, slot] = rotated(new_k, position, pairs, interleaved).to(dtype) if pairs else new_k
            if expected[1] is not None:
                expected[1][page, slot] = new_v
            row += 1
    run(backend, AppendOperands(k_pages, v_pages, k, v if v_too else None, table, lengths, cu, cos, sin), interleaved)
    return (k_pages, expected[0]), (v_pages, expected[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
def test_new_tokens_lie_where_they_belong_and_nothing_else_changes(backend, packed, heads_first):
    for got, want in place(backend, packed=packed, heads_first=heads_first, dtype=torch.float16):
        assert torch.equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [4, 3, 1])
def test_keys_are_rotated_by_their_position(backend, interleaved, pairs):
    (k, want_k), (v, want_v) = place(backend, packed=True, pairs=pairs, interleaved=interleaved)
    torch.testing.assert_close(k, want_k, rtol=1e-6, atol=1e-6)
    assert torch.equal(v, want_v)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_alone(backend):
    (k, want_k), (v, _) = place(backend, packed=False, v_too=False)
    assert torch.equal(k, want_k)
    assert v is None


def test_the_cpu_names_what_has_no_place():
    pages, k = torch.zeros(3, 4, 1, 2), torch.zeros(2, 1, 2)
    table = torch.tensor([[0, 9], [1, 2]])
    for lengths, says in (
        ([5, 1], r"block_table\[0, 1\] is 9"),
        ([9, 1], r"seqlens_k\[0\] is 9"),
        ([1, 0], r"seqlens_k\[1\] is 0"),
    ):
        with pytest.raises(ProblemError, match=says):
            append_kv(pages, pages.clone(), k, k, table, torch.tensor(lengths))
    angle = torch.ones(1, 1)
    with pytest.raises(ProblemError, match="1 positions; a token is at 3"):
        append_kv(pages, pages.clone(), k, k, table, torch.tensor([4, 1]), rotary_cos=angle, rotary_sin=angle)
    assert not pages.any()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"v": None}, "come together"),
        ({"k": torch.zeros(2, 1, 3)}, "same|heads and dimension"),
        ({"k": torch.zeros(2, 1, 2, dtype=torch.float16)}, "one dtype"),
        ({"k": torch.zeros(3, 1, 2), "v": torch.zeros(3, 1, 2)}, "name the same sequences"),
        ({"rotary_cos": torch.ones(4, 1)}, "rotary_cos and rotary_sin come together"),
        ({"rotary_cos": torch.ones(4, 2), "rotary_sin": torch.ones(4, 2)}, "at most 1 pairs"),
        ({"seqlens_k": torch.ones(2)}, "int32 or int64"),
        ({"k_pages": torch.zeros(3, 4, 1, 2, requires_grad=True)}, "no gradients"),
    ],
)
def test_wrong_appends_are_told_what_is_wrong(changes, says):
    given = {
        "k_pages": torch.zeros(3, 4, 1, 2),
        "v_pages": torch.zeros(3, 4, 1, 2),
        "k": torch.zeros(2, 1, 2),
        "v": torch.zeros(2, 1, 2),
        "block_table": torch.tensor([[0, 9], [1, 2]]),
        "seqlens_k": torch.tensor([1, 1]),
    }
    with pytest.raises(ProblemError, match=says):
        append_kv(**{**given, **changes})


def test_append_keeps_its_word_as_an_operator():
    pages, k = torch.zeros(3, 4, 1, 2), torch.ones(2, 1, 2)
    given = (pages, pages.clone(), k, k.clone(), torch.tensor([[0, 9], [1, 2]]), torch.tensor([1, 1]), *[None] * 5, False)
    torch.library.opcheck(
        rowmax.ops_paged.APPEND, given, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )

    def step(pages, values, k, table, lengths):
        append_kv(pages, values, k, k, table, lengths)
        return rowmax.attention_paged(k, pages, values, table, lengths)

    one, other = (pages.clone(), pages.clone()), (pages.clone(), pages.clone())
    rest = (torch.randn(2, 1, 2), *given[4:6])
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(*one, *rest)
    assert torch.equal(got, step(*other, *rest))
    assert torch.equal(one[0], other[0])


def test_rotated_queries_and_keys_meet_at_their_distance():
    """What rotary embedding is for: q.k depends on the distance of the positions alone."""
    cos, sin = angles(64, 4)
    q, k = torch.randn(1, 8, dtype=torch.float64), torch.randn(1, 8, dtype=torch.float64)
    for interleaved in (False, True):
        products = [
            (
                rotate(q, cos[i], sin[i], interleaved=interleaved) * rotate(k, cos[i - 5], sin[i - 5], interleaved=interleaved)
            ).sum()
            for i in range(5, 64)
        ]
        torch.testing.assert_close(torch.stack(products), products[0].expand(59))


# ---- the cache ------------------------------------------------------------------------------------------------------


def tokens(count, *shape, seed=0):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def dense(q, k, v, **options):
    """The same attention over one sequence's dense keys."""
    return reference.attention(q[None].double(), k[None].double(), v[None].double(), right=0, **options)[0][0].float()


def test_a_sequence_that_is_filled_in_chunks_and_decoded():
    cache = PagedKVCache(20, page_size=4, heads=2, dim=8, dim_v=6, layers=2, dtype=torch.float32)
    a = cache.add()
    k, v, q = tokens(30, 2, 8), tokens(30, 2, 6, seed=1), tokens(30, 4, 8, seed=2)
    begin = 0
    for count in (13, 1, 9, 7):
        step, rows = cache.extend([a], count), slice(begin, begin + count)
        for layer, sign in ((0, 1.0), (1, -1.0)):
            cache.append(step, sign * k[None, rows], v[None, rows], layer=layer)
            out = cache.attend(step, q[None, rows], layer=layer)
            begin_end = dense(q[: begin + count], sign * k[: begin + count], v[: begin + count])
            torch.testing.assert_close(out[0], begin_end[rows], rtol=1e-5, atol=1e-5)
        begin += count
    assert (cache.length(a), cache.free_pages) == (30, 20 - 8)
    cache.free(a)
    assert cache.free_pages == 20
    cache.check()


def test_forks_share_until_they_grow():
    cache = PagedKVCache(10, page_size=4, heads=1, dim=4, dtype=torch.float32)
    a = cache.add()
    prefix = tokens(6, 1, 4)
    cache.append(cache.extend([a], 6), prefix[None], prefix[None])
    forks = [cache.fork(a) for _ in range(3)]
    assert cache.free_pages == 8
    new = tokens(4, 1, 4, seed=1)
    step = cache.extend([a, *forks], 1)
    assert cache.free_pages == 8 - 3  # the last of them keeps the page that all had
    cache.append(step, new[:, None], new[:, None])
    out = cache.attend(step, new[:, None])
    for b in range(4):
        keys = torch.cat([prefix, new[b : b + 1]])
        torch.testing.assert_close(out[b, 0], dense(keys, keys, keys)[-1], rtol=1e-5, atol=1e-5)
    for sequence in (a, *forks):
        cache.free(sequence)
    cache.check()
    assert cache.free_pages == 10


def test_a_latent_cache_keeps_values_in_its_keys():
    cache = PagedKVCache(4, page_size=4, heads=1, dim=6, dim_v=4, latent=True, dtype=torch.float32)
    a, latent, q = cache.add(), tokens(5, 1, 6), tokens(5, 3, 6, seed=1)
    step = cache.extend([a], 5)
    cache.append(step, latent[None])
    torch.testing.assert_close(cache.attend(step, q[None])[0], dense(q, latent, latent[..., :4]), rtol=1e-5, atol=1e-5)
    assert cache.v_pages.data_ptr() == cache.k_pages.data_ptr()


def test_what_does_not_fit_changes_nothing():
    cache = PagedKVCache(3, page_size=4, heads=1, dim=4, max_sequences=2, max_length=9, dtype=torch.float32)
    a, b = cache.add(), cache.add()
    with pytest.raises(CacheFull, match="all 2 sequences"):
        cache.add()
    with pytest.raises(CacheFull, match="at most 9"):
        cache.extend([a], 10)
    cache.extend([a], 7)
    with pytest.raises(CacheFull, match="2 pages are wanted and 1 are free"):
        cache.extend([a, b], [2, 1])
    assert (cache.length(a), cache.length(b), cache.free_pages) == (7, 0, 1)
    for wrong in (lambda: cache.extend([a, a], 1), lambda: cache.extend([a], [1, 2])):
        with pytest.raises(ProblemError, match="each sequence once"):
            wrong()
    cache.free(b)
    with pytest.raises(ProblemError, match="no sequence"):
        cache.free(b)
    with pytest.raises(ProblemError, match="cannot be cut to 8"):
        cache.truncate(a, 8)
    cache.check()


class Serving(RuleBasedStateMachine):
    """Random steps of a cache beside lists of Python numbers: a token's key and value say which it is."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.cache = PagedKVCache(14, page_size=3, heads=1, dim=2, max_sequences=6, max_length=24, dtype=torch.float64)
        self.cache.k_pages.fill_(float("nan"))
        self.cache.v_pages.fill_(float("nan"))
        self.model = {}
        self.written = 0

    @rule(target=sequences)
    def add(self):
        try:
            sequence = self.cache.add()
        except CacheFull:
            assert len(self.model) == 6
            return multiple()
        self.model[sequence] = []
        return sequence

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        try:
            other = self.cache.fork(sequence)
        except CacheFull:
            assert len(self.model) == 6
            return multiple()
        self.model[other] = list(self.model[sequence])
        return other

    @rule(sequence=consumes(sequences))
    def free(self, sequence):
        self.cache.free(sequence)
        del self.model[sequence]

    @rule(sequence=sequences, share=strategies.floats(0, 1))
    def truncate(self, sequence, share):
        length = int(share * len(self.model[sequence]))
        self.cache.truncate(sequence, length)
        del self.model[sequence][length:]

    @rule(
        chosen=strategies.lists(sequences, min_size=1, max_size=4, unique=True),
        counts=strategies.lists(strategies.integers(0, 7), min_size=4, max_size=4),
        same=strategies.booleans(),
    )
    def grow(self, chosen, counts, same):
        counts = [counts[0]] * len(chosen) if same else counts[: len(chosen)]
        before = self.cache.free_pages, {sequence: self.cache.length(sequence) for sequence in self.model}
        try:
            step = self.cache.extend(chosen, counts[0] if same else counts)
        except CacheFull:
            assert before == (self.cache.free_pages, {sequence: self.cache.length(sequence) for sequence in self.model})
            return
        new = torch.arange(self.written, self.written + sum(counts), dtype=torch.float64)
        self.written += sum(counts)
        x = torch.stack([new, torch.ones_like(new)], -1).unsqueeze(1)  # [tokens, 1, 2]
        shaped = x.view(len(chosen), counts[0], 1, 2) if same else x
        self.cache.append(step, shaped, -shaped)
        begin = 0
        for sequence, count in zip(chosen, counts, strict=True):
            self.model[sequence] += new[begin : begin + count].tolist()
            begin += count
        self.see(step, chosen, counts, same)

    def see(self, step, chosen, counts, same):
        """Queries of zeros weigh all that they see alike: the mean of the values."""
        lead = (len(chosen), counts[0]) if same else (sum(counts),)
        q = torch.zeros(*lead, 1, 2, dtype=torch.float64)
        out = self.cache.attend(step, q).reshape(-1, 2)
        row = 0
        for sequence, count in zip(chosen, counts, strict=True):
            ids = self.model[sequence]
            for i in range(count):
                seen = ids[: len(ids) - count + i + 1]
                assert abs(float(out[row, 0]) + sum(seen) / len(seen)) < 1e-9
                row += 1

    @invariant()
    def promises(self):
        self.cache.check()
        assert set(self.cache.sequences) == set(self.model)
        for sequence, ids in self.model.items():
            where = [self.cache._pages[sequence][j // 3] * 3 + j % 3 for j in range(len(ids))]
            assert self.cache._table[sequence, : len(self.cache._pages[sequence])].tolist() == self.cache._pages[sequence]
            assert self.cache.k_pages.view(-1, 2)[where, 0].tolist() == ids
            assert self.cache.v_pages.view(-1, 2)[where, 0].neg().tolist() == ids


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_long_walk_leaves_nothing_behind():
    """`soak_cache.py` makes it a hundred times as long."""
    assert soak_cache.growth(soak_cache.walk(Serving(), 160, stretches=4)).tensors == 0
