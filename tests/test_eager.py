"""Launches kept by the form of a call: what calls of the operator and the shortcut of eager calls without gradients may reuse,
and when the shortcut must step aside."""

import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import rowmax
import score_mods
from rowmax import Problem, ops, testing


@pytest.fixture(autouse=True)
def nothing_prepared():
    ops.forget()


pytestmark = pytest.mark.parametrize(
    ("backend", "device"), [("tiled", "cpu"), ("q_outer", "cpu"), pytest.param("q_outer", "cuda", marks=pytest.mark.gpu)]
)


@pytest.fixture
def planned(monkeypatch):
    """One entry for each call whose plan was asked for."""
    calls = []
    monkeypatch.setattr(ops, "plan_forward", lambda *call, original=ops.plan_forward: calls.append(call) or original(*call))
    return calls


def anew(function):
    """Its result, though nothing were kept."""
    kept, ops._launches = ops._launches, {}
    try:
        return function()
    finally:
        ops._launches = kept


class Names(TorchDispatchMode):
    """The operators that pass by."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.seen.append(str(function))
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("text", ["b2 h4/2 q5 k7 d16 fp32 causal", "b3 h2 q12 k17 d16/8 fp16 packed window(3,1)"])
def test_a_prepared_call_gives_what_the_operator_gives_on_new_data(text, backend, device):
    problem = Problem.parse(text)
    for seed in range(3):
        operands = testing.operands(problem, device=device, seed=seed)
        out, lse = testing.attend(problem, operands, plan=backend)
        with Names() as names:
            want, want_lse = anew(lambda operands=operands: testing.attend(problem, operands, plan=backend))
        assert "rowmax.forward.default" in names.seen
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)


def test_calls_that_differ_do_not_share_a_launch(backend, device):
    wide = torch.randn(1, 6, 2, 33, device=device)
    q, unaligned = wide[..., :16], wide[..., 1:17]
    packed = q.contiguous()
    k, v = torch.randn(2, 1, 6, 2, 16, device=device)
    variants = [
        {},
        {"causal": True},
        {"window": (1, None)},
        {"window": (None, 1)},
        {"scale": 0.5},
        {"scale": -0.5},
        {"return_lse": True},
        {"causal": True, "window": (1, 0)},
    ]
    calls = [
        lambda queries=queries, options=options: rowmax.attention(queries, k, v, plan=backend, **options)
        for options in variants
        for queries in (q, unaligned, packed)
    ]
    wants = [anew(call) for call in calls]
    for _ in range(2):  # the second turn is prepared
        for call, want in zip(calls, wants, strict=True):
            torch.testing.assert_close(call(), want, rtol=0, atol=0)
            with Names():  # the operator
                torch.testing.assert_close(call(), want, rtol=0, atol=0)
    known = len(ops._launches)
    rowmax.attention(q.half(), k.half(), v.half(), plan=backend)
    rowmax.attention(q[:, :5], k, v, plan=backend)
    assert len(ops._launches) == known + 2


def test_listeners_see_the_operator_of_a_prepared_call(backend, device):
    q = torch.randn(1, 5, 2, 16, device=device)
    rowmax.attention(q, q, q, plan=backend)
    rowmax.attention(q, q, q, plan=backend)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        rowmax.attention(q, q, q, plan=backend)
    assert any(event.key == "rowmax::forward" for event in profiled.key_averages())
    many = torch.randn(3, 1, 5, 2, 16, device=device)
    out = torch.func.vmap(lambda x: rowmax.attention(x, x, x, plan=backend))(many)
    assert torch.equal(out, torch.stack([rowmax.attention(x, x, x, plan=backend) for x in many]))


class Wrapped(torch.Tensor):
    """A subclass that counts what reaches it."""

    seen = 0

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        cls.seen += "rowmax" in str(function)
        return super().__torch_function__(function, types, arguments, options or {})


def test_a_tensor_subclass_sees_the_operator(backend, device):
    q = torch.randn(1, 5, 2, 16, device=device)
    want = rowmax.attention(q, q, q, plan=backend)
    before = Wrapped.seen
    out = rowmax.attention(q.as_subclass(Wrapped), q, q, plan=backend)
    assert Wrapped.seen > before
    assert torch.equal(out.as_subclass(torch.Tensor), want)


def test_bad_input_is_refused_though_an_equal_call_was_prepared(backend, device):
    q = torch.randn(1, 5, 2, 16, device=device)
    rowmax.attention(q, q, q, scale=1.0, window=(1, 1), plan=backend)
    for options in ({"scale": True}, {"window": (True, 1)}, {"scale": float("nan")}):
        with pytest.raises(rowmax.ProblemError):
            rowmax.attention(q, q, q, plan=backend, **{"scale": 1.0, "window": (1, 1), **options})
    with pytest.raises(rowmax.ProblemError):
        rowmax.attention(q, q.transpose(1, 3), q, plan=backend)


def test_the_memory_of_prepared_calls_is_bounded(backend, device, monkeypatch):
    monkeypatch.setattr(ops, "MOST", 3)
    for length in range(2, 9):
        q = torch.randn(1, length, 1, 16, device=device)
        rowmax.attention(q, q, q, plan=backend)
        assert len(ops._launches) <= 3


# ---- the operator ----------------------------------------------------------------------------------------------------------


def test_training_and_eager_calls_share_a_launch(backend, device, planned):
    problem = Problem.parse("b2 h4/2 q5 k7 d16 fp32 causal")
    for seed in range(3):
        operands = testing.operands(problem, device=device, seed=seed)
        want = anew(lambda operands=operands: testing.attend(problem, operands, plan=backend))
        planned.clear()
        leaves = [t.clone().requires_grad_() for t in operands[:3]]
        results = testing.attend(problem, operands._replace(q=leaves[0], k=leaves[1], v=leaves[2]), plan=backend)
        for got in (results, testing.attend(problem, operands, plan=backend)):
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])
        sum(t.sum() for t in results).backward()
        assert all(bool(t.grad.isfinite().all()) for t in leaves)
        assert len(ops._launches) == 1
        if backend not in ops.ON_CPU:
            assert len(planned) == (seed == 0)
    ops.forget()
    assert not ops._launches
    testing.attend(problem, operands, plan=backend)
    assert planned
    testing.attend(problem, operands, plan=backend, return_lse=False)
    assert len(ops._launches) == 2


def test_a_compiled_call_keeps_its_launch(backend, device, planned):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q: rowmax.attention(q, q, q, plan=backend), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for length in (4, 6, 4, 6):
        q = torch.randn(1, length, 2, 16, device=device)
        want = anew(lambda q=q: rowmax.attention(q, q, q, plan=backend))
        planned.clear()
        assert torch.equal(compiled(q), want)
        assert not any(isinstance(size, torch.SymInt) for form in ops._launches for size in form[3])
    assert len(ops._launches) == 2
    assert not planned or backend in ops.ON_CPU


def test_the_operator_checks_lengths_that_the_host_holds_and_straightens_others(backend, device):
    q = torch.randn(6, 2, 16, device=device)
    cu = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    apart = torch.stack([cu, cu - 1], 1)[:, 0]

    def call(cu_q, cu_k):
        return ops.FORWARD(True, q, q, q, cu_q, cu_k, None, None, 0.25, None, 0, False, backend)

    want = anew(lambda: call(cu, cu))
    for _ in range(2):
        for lengths in ((cu, cu), (apart, cu), (cu, apart), (cu.long(), cu.long())):
            for got, expected in zip(call(*lengths), want, strict=True):
                assert torch.equal(got, expected)
    for lengths in ((cu, None), (None, cu)):
        with pytest.raises(rowmax.ProblemError):
            call(*lengths)
    if device == "cpu":
        assert not ops._launches
        cu[1] = 7
        with pytest.raises(rowmax.ProblemError):
            call(cu, cu)
    else:
        assert len(ops._launches) == 2


def test_kept_launches_keep_no_tensor_alive(backend, device):
    q = torch.randn(1, 5, 2, 16, device=device)
    gone = [weakref.ref(t) for t in (q, rowmax.attention(q, q, q, plan=backend))]
    del q
    assert [ref() for ref in gone] == [None, None]


# ---- rowmax.prepare --------------------------------------------------------------------------------------------------------

DENSE, PACKED = "b2 h4/2 q5 k7 d16 fp32 causal", "b3 h2 q12 k17 d16/8 fp16 packed window(3,1)"


def prepare(problem, operands, **options):
    q, k, v, cu_q, cu_k = operands[:5]
    masks = {"window": tuple(problem.band)}
    return rowmax.prepare(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **masks, **options)


@pytest.mark.parametrize("text", [DENSE, PACKED])
def test_a_prepared_call_sees_what_was_written_in_place(text, backend, device):
    problem = Problem.parse(text)
    operands = testing.operands(problem, device=device)
    attend = prepare(problem, operands, return_lse=True, plan=backend)
    first = attend()
    for seed in range(3):
        for target, source in zip(operands, testing.operands(problem, device=device, seed=seed), strict=True):
            if target is not None:
                target.copy_(source)
        results = attend()
        assert all(a is b for a, b in zip(results, first, strict=True))
        for got, want in zip(results, testing.attend(problem, operands, plan=backend), strict=True):
            assert torch.equal(got, want)


def bent(device, **changes):
    """What a call may have beside q, k and v, for `b2 h4/2 q5 k7`, all of whose tensors may be written in place."""
    slopes, sink = torch.rand(4, device=device), torch.randn(4, device=device)
    bias = torch.randn(2, 4, 5, 7, device=device)
    return {"softcap": 3.0, "alibi_slopes": slopes, "sink": sink, "bias": bias, **changes}


@pytest.mark.parametrize(
    "names", [("softcap", "alibi_slopes", "sink"), ("sink",), ("bias", "mask"), ("score_mod", "chunk"), ()]
)
def test_a_prepared_call_takes_what_bends_or_hides_scores(names, backend, device):
    q, k, v = (torch.randn(2, length, heads, 16, device=device) for length, heads in ((5, 4), (7, 2), (7, 2)))
    mask = torch.rand(2, 1, 5, 7, device=device) < 0.7
    given = bent(device, mask=mask, score_mod=score_mods.DISTANCE(0.1), chunk=4)
    options = {name: given[name] for name in names} | {"window": (3, 0), "sink_tokens": 1, "prefix": 2} | {"plan": backend}
    attend = rowmax.prepare(q, k, v, return_lse=True, **options)
    for _ in range(3):
        for got, want in zip(attend(), rowmax.attention(q, k, v, return_lse=True, **options), strict=True):
            assert torch.equal(got, want)
        for tensor in (q, k, v, *(given[name] for name in ("alibi_slopes", "sink", "bias"))):
            tensor.copy_(torch.randn_like(tensor))
        mask.logical_not_()


def test_a_prepared_sink_of_rows_without_keys_is_their_lse(backend, device):
    q, k, sink = torch.randn(1, 5, 2, 16, device=device), torch.randn(1, 0, 2, 16, device=device), torch.randn(2, device=device)
    out, lse = rowmax.prepare(q, k, k, sink=sink, return_lse=True, plan=backend)()
    assert torch.equal(lse, sink.view(1, 2, 1).expand(1, 2, 5))
    assert not bool(out.any())


def test_a_prepared_call_says_what_it_would_have_to_copy(backend, device):
    q = torch.randn(1, 5, 2, 16, device=device)
    for name in ("sink", "alibi_slopes"):
        with pytest.raises(
            rowmax.ProblemError, match=f"reads {name} in place and needs it in torch.float32; got torch.bfloat16"
        ):
            rowmax.prepare(q, q, q, plan=backend, **{name: torch.ones(2, dtype=torch.bfloat16, device=device)})
        with pytest.raises(rowmax.ProblemError, match=f"reads {name} in place and needs it contiguous"):
            rowmax.prepare(q, q, q, plan=backend, **{name: torch.ones(4, device=device)[::2]})
    with pytest.raises(rowmax.ProblemError, match="no gradients"):
        rowmax.prepare(q, q, q, sink=torch.ones(2, device=device, requires_grad=True))
    with pytest.raises(rowmax.Unsupported, match="one prefix for all"):
        rowmax.prepare(q, q, q, causal=True, prefix=torch.tensor([2], device=device))


def test_rows_that_leave_every_sequence_are_cleared(backend, device):
    problem = Problem.parse(PACKED)
    operands = testing.operands(problem, device=device, lengths=((6, 5), (4, 6), (2, 6)))
    attend = prepare(problem, operands, return_lse=True, plan=backend)
    attend()
    for cu in operands[3:5]:
        cu.copy_(torch.tensor([0, 2, 4, 6]))
    out, lse = attend()
    assert not bool(out[6:].any())
    assert bool((lse[:, 6:] == -torch.inf).all())
    assert bool(out[:6].any())


def test_a_prepared_call_without_lse_or_keys_or_in_inference_mode(backend, device):
    q, k = torch.randn(1, 5, 2, 16, device=device), torch.randn(1, 0, 2, 16, device=device)
    attend = rowmax.prepare(q, k, k, return_lse=True, plan=backend)
    out, lse = attend()
    assert not bool(out.any())
    assert bool((lse == -torch.inf).all())
    with torch.inference_mode():
        x = torch.randn(1, 5, 2, 16, device=device)
        attend = rowmax.prepare(x, x, x, plan=backend)
        want = attend().clone()
    assert torch.equal(attend(), want)
    del x
    assert torch.equal(attend(), want)


def test_a_prepared_call_reads_negated_tensors_right(backend, device):
    q = torch.randn(1, 5, 2, 16, device=device)
    negated = torch._neg_view(q)
    want = rowmax.attention(-q, q, q, plan=backend)
    assert torch.equal(rowmax.prepare(negated, q, q, plan=backend)(), want)


def test_prepare_refuses_what_it_cannot_give(backend, device):
    q = torch.randn(1, 5, 2, 16, device=device, requires_grad=True)
    with pytest.raises(rowmax.ProblemError, match=r"no gradients.*torch\.no_grad"):
        rowmax.prepare(q, q, q, plan=backend)
    with torch.no_grad():
        assert not rowmax.prepare(q, q, q, plan=backend)().requires_grad
    packed, cu = torch.randn(6, 2, 16, device=device), torch.tensor([0, 9, 6, 9], dtype=torch.int32, device=device)[::2]
    for options in ({"cu_seqlens_q": cu, "cu_seqlens_k": cu}, {"cu_seqlens_q": 3}, {"causal": 1}, {"scale": True}):
        with pytest.raises(rowmax.ProblemError):
            rowmax.prepare(packed, packed, packed, plan=backend, **options)


def test_autograd_notices_that_a_prepared_output_was_overwritten(backend, device):
    q = torch.randn(1, 5, 2, 16, device=device)
    attend = rowmax.prepare(q, q, q, plan=backend)
    weight = torch.ones((), device=device, requires_grad=True)
    loss = (attend() * weight).sum()
    attend()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_prepared_call_says_what_it_is(backend, device):
    q = torch.randn(1, 5, 2, 16, device=device)
    text = repr(rowmax.prepare(q, q, q, causal=True, plan=backend))
    assert "b1 h2 q5 k5 d16 fp32 causal" in text
    assert backend in text
