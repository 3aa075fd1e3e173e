"""Sink tokens, a prefix and chunks through the public call: what each means in other words, and what is refused.

That their numbers are right is the family "patterns" of `cases.py`.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import rowmax
from rowmax import Device, Problem, ProblemError, Unsupported, plan, reference
from rowmax.analysis import report
from rowmax.paged import PagedProblem
from rowmax.plan.tile import WINDOWS_ONLY

PATTERNS = {
    "sink tokens": {"window": (3, 0), "sink_tokens": 2},
    "chunks": {"causal": True, "chunk": 4},
    "blocks": {"chunk": 4},
    "chunks with a window and sink tokens": {"window": (2, 1), "chunk": 5, "sink_tokens": 3},
    "prefix": {"causal": True, "prefix": 5},
    "all": {"window": (3, 0), "sink_tokens": 4, "prefix": 2, "chunk": 6},
}


def random_call(len_q=12, len_k=12, batch=2):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, len_q, 4, 16), *((batch, len_k, 2, 16),) * 2)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def dense(options, len_q, len_k):
    """What `options` let queries see."""
    sides = {**options}
    left, right = sides.pop("window", (None, None))
    return reference.visible(len_q, len_k, left, 0 if sides.pop("causal", False) else right, **sides)


def same(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", [(12, 12), (7, 15), (15, 7)])
@pytest.mark.parametrize("options", PATTERNS.values(), ids=PATTERNS)
def test_the_same_as_a_dense_mask(options, lengths):
    inputs = [t.requires_grad_() for t in random_call(*lengths)]
    results = []
    for arguments in (options, {"mask": dense(options, *lengths)[None, None]}):
        out, lse = rowmax.attention(*inputs, return_lse=True, **arguments)
        results.append((out, lse, *torch.autograd.grad(out.sin().sum() + lse.exp().sum(), inputs)))
    same(*results)


def test_second_order():
    """A backward through the backward, and forward mode, against autograd through the definition."""
    inputs, options = [t.requires_grad_() for t in random_call(7, 10, batch=1)], {"sink_tokens": 3, "prefix": 2, "chunk": 6}
    ours = lambda *t: rowmax.attention(*t, window=(2, 0), **options)  # noqa: E731
    theirs = lambda *t: reference.attention(*t, left=2, right=0, **options)[0]  # noqa: E731
    results = []
    for attend in (ours, theirs):
        first = torch.autograd.grad(attend(*inputs).sin().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs)
        primals = tuple(t.detach() for t in inputs)
        results.append((*second, torch.func.jvp(attend, primals, tuple(t.cos() for t in primals))[1]))
    same(*results)


def test_chunks_are_sequences_of_their_own():
    q, k, v = random_call()
    ends = torch.tensor([0, 5, 10, 12], dtype=torch.int32)
    for causal in (True, False):
        whole = rowmax.attention(q, k, v, causal=causal, chunk=5)
        for b in range(2):
            same((whole[b],), (rowmax.attention_varlen(q[b], k[b], v[b], ends, ends, causal=causal),))


def test_the_last_query_of_a_stream_sees_first_and_last_keys():
    """StreamingLLM keeps the first tokens and the last ones: the same as if the others had never been."""
    q, k, v = random_call(1, 40)
    kept = [torch.cat([t[:, :4], t[:, -8:]], 1) for t in (k, v)]
    same((rowmax.attention(q, k, v, window=(7, 0), sink_tokens=4),), (rowmax.attention(q, *kept),))


def test_a_prefix_sees_itself_whole():
    q, k, v = random_call()
    out = rowmax.attention(q, k, v, causal=True, prefix=5)
    same((out[:, :5],), (rowmax.attention(q[:, :5], k[:, :5], v[:, :5]),))
    same((out[:, 5:],), (rowmax.attention(q[:, 5:], k, v, causal=True),))


@pytest.mark.parametrize("lengths", [(12, 12), (7, 15), (15, 7)])
def test_every_sequence_has_a_prefix_of_its_own(lengths):
    inputs, prefix = [t.requires_grad_() for t in random_call(*lengths, batch=4)], torch.tensor([0, 5, 1, 40])
    sink, slopes = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_(), torch.rand(4, 4).double()
    seen = torch.stack([reference.visible(*lengths, right=0, prefix=n) for n in prefix.tolist()])[:, None]
    bent = {"softcap": 3.0, "sink": sink}
    ours = rowmax.attention(*inputs, causal=True, prefix=prefix, alibi_slopes=slopes, return_lse=True, **bent)
    results = []
    for out, lse in (ours, reference.attention(*inputs, seen=seen, slopes=slopes, **bent)):
        results.append((out, lse, *torch.autograd.grad(out.sin().sum() + lse.exp().sum(), [*inputs, sink])))
    same(*results)


def test_packed_and_padded_sequences_have_prefixes_of_their_own():
    q, k, v = random_call()
    out = rowmax.attention(
        q, k, v, causal=True, prefix=torch.tensor([3, 6]), seqlens_k=torch.tensor([12, 9]), leftpad_k=torch.tensor([4, 0])
    )
    same((out[:1, 4:],), (rowmax.attention(q[:1, 4:], k[:1, 4:], v[:1, 4:], causal=True, prefix=3),))
    same((out[1:],), (rowmax.attention(q[1:], k[1:, :9], v[1:, :9], causal=True, prefix=6),))
    ends = torch.tensor([0, 5, 5, 11], dtype=torch.int32)  # the last row belongs to none
    out, lse = rowmax.attention_varlen(
        q[0], k[0], v[0], ends, ends, causal=True, prefix=torch.tensor([2, 7, 4]), return_lse=True
    )
    for (begin, end), n in (((0, 5), 2), ((5, 11), 4)):
        one = rowmax.attention(*(t[:1, begin:end] for t in (q, k, v)), causal=True, prefix=n, return_lse=True)
        same((out[begin:end], lse[:, begin:end]), (one[0][0], one[1][0]))
    assert not out[11:].any()
    assert bool((lse[:, 11:] == -torch.inf).all())


def test_padded_batches_count_from_their_own_first_key():
    q, k, v = random_call(12, 12)
    options = {"window": (3, 0), "sink_tokens": 2, "chunk": 7}
    out = rowmax.attention(q, k, v, seqlens_k=torch.tensor([12, 9]), leftpad_k=torch.tensor([4, 0]), **options)
    same((out[:1, 4:],), (rowmax.attention(q[:1, 4:], k[:1, 4:], v[:1, 4:], **options),))
    same((out[1:],), (rowmax.attention(q[1:], k[1:, :9], v[1:, :9], **options),))


def test_what_a_window_says_as_well_is_a_window():
    q, k, v = random_call()
    plain = rowmax.attention(q, k, v, causal=True)
    for options in ({"sink_tokens": 4}, {"prefix": 0}, {"sink_tokens": 0, "prefix": 0}):
        with torch.profiler.profile() as profile:
            out = rowmax.attention(q, k, v, causal=True, **options)
        assert torch.equal(out, plain)
        assert not any(event.key.endswith("_masked") for event in profile.key_averages())


def test_one_graph_and_the_flops_of_visible_pairs():
    q, k, v = (t.float() for t in random_call(32, 32, batch=1))
    options = {"window": (7, 0), "sink_tokens": 2, "chunk": 16}
    with FlopCounterMode(display=False) as counter:
        whole = rowmax.attention(q, k, v, **options)
    assert counter.get_total_flops() == 4 * 16 * 4 * int(dense(options, 32, 32).sum())
    traced = torch.compile(lambda *t: rowmax.attention(*t, **options), backend="eager", fullgraph=True)
    assert torch.equal(traced(q, k, v), whole)


def test_pages_have_sink_tokens_for_one_new_token():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 4, 16, generator=generator)
    pages = [torch.randn(12, 4, 2, 16, generator=generator) for _ in range(2)]
    table, lengths = torch.randperm(12, generator=generator).view(4, 3).int(), torch.tensor([12, 7, 3, 0], dtype=torch.int32)
    options = {"window": (4, 0), "sink_tokens": 5, "return_lse": True}
    into = torch.empty_like(q)
    for invariant in (False, True):
        out, lse = rowmax.attention_paged(q, *pages, table, lengths, out=into, batch_invariant=invariant, **options)
        assert out is into
        for b, n in enumerate(lengths.tolist()):
            k, v = (t[table[b].long()].flatten(0, 1)[None, :n] for t in pages)
            want, want_lse = rowmax.attention(q[b : b + 1, None], k, v, **options)
            torch.testing.assert_close(out[b], want[0, 0])
            torch.testing.assert_close(lse[b], want_lse[0, :, 0])
    with pytest.raises(Unsupported, match="one new token"):
        rowmax.attention_paged(q[:, None].expand(-1, 2, -1, -1), *pages, table, lengths, **options)
    with pytest.raises(ProblemError, match="at least 0"):
        rowmax.attention_paged(q, *pages, table, lengths, window=(4, 0), sink_tokens=-1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sink_tokens": -1}, "sink_tokens must be at least 0"),
        ({"prefix": -2, "causal": True}, "prefix must be at least 0"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"chunk": 4.0}, "chunk must be an integer"),
        ({"sink_tokens": True}, "sink_tokens must be an integer"),
        ({"prefix": torch.tensor([3, 4])}, "causal=True and no window"),
        ({"prefix": torch.tensor([3, 4]), "causal": True, "window": None, "chunk": 4}, "without chunk"),
        ({"prefix": torch.tensor([3, 4]), "causal": True, "window": None, "dropout_p": 0.1}, "without dropout"),
        ({"prefix": torch.tensor([3]), "causal": True, "window": None}, r"tensor \[B\]"),
        ({"prefix": torch.tensor([3, -1]), "causal": True, "window": None}, "at least 0 in every sequence"),
    ],
)
def test_errors_say_what_is_wrong(options, said):
    with pytest.raises(ProblemError, match=said):
        rowmax.attention(*random_call(), **{"window": (3, 3), **options})


@pytest.mark.parametrize("words", ["window(63,0) sink_tokens=4", "causal prefix=32", "causal chunk=512"])
def test_who_runs_them_and_who_refuses(words):
    problem, device = Problem.parse(f"b2 h8/2 q2048 k2048 d128 bf16 {words}"), Device.named("H200")
    for direction in ("forward", "backward"):
        assert plan(problem, device, direction=direction).algorithm == "hopper"
        assert plan(problem, Device.named("A100"), direction=direction).algorithm == "q_outer"
    early = "sink_tokens" in words
    for dim, tile in ((128, "64x128 s2 backward"), (256, "128x64 s2 wide")):  # first keys of all heads begin at once
        found = plan(problem.with_(dim_qk=dim, dim_v=dim), device, direction="backward").tiles
        assert [str(each).removesuffix(" p4") for each in found] == [f"{tile} g{1024 if early else 16}"]
    for name in ("split_kv", "kv_outer", "dense", "warp_split"):
        with pytest.raises(Unsupported, match=WINDOWS_ONLY):
            plan(problem, device, prefer=name)
    for name in ("H200", "cpu"):
        with pytest.raises(Unsupported, match=WINDOWS_ONLY):
            plan(PagedProblem.parse(f"b2 h8/2 q1 k2048 d128 bf16 paged16 {words}"), Device.named(name))


def test_explain_counts_what_is_seen():
    device = Device.named("H200")
    found = {}
    for words in ("window(63,0)", "window(63,0) sink_tokens=64", "causal chunk=64", "causal"):
        found[words] = report.explain(Problem.parse(f"b1 h8 q4096 k4096 d128 bf16 {words}"), device)
    assert found["window(63,0) sink_tokens=64"]["fields"]["sink_tokens"] == 64
    pairs = {words: one["visible_pairs"] for words, one in found.items()}
    assert pairs["causal chunk=64"] < pairs["window(63,0)"] < pairs["window(63,0) sink_tokens=64"] < pairs["causal"]
