"""Soft-cap, ALiBi and sink logits through the public calls: their limits, their operators, and what is refused.

That their numbers are right is the family "scores" of `cases.py`.
"""

import math

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import rowmax
from rowmax import Problem, ProblemError, Unsupported, reference, testing
from rowmax.ops_scored import BACKWARD_SCORED, FORWARD_SCORED

ALL = "b2 h4/2 q9 k12 d16 fp32 causal softcap=2.0 alibi(batch) sink"
PROBLEMS = {
    "all": (ALL, "contiguous"),
    "packed": ("b3 h4/2 q12 k12 d16 fp32 packed causal alibi", "heads_first"),
    "sink": ("b1 h2 q9 k6 d8/24 bf16 window(3,1) sink", "gaps"),
    "no keys": ("b2 h4/2 q5 k0 d16 fp32 softcap=3.0 sink", "contiguous"),
}


def arguments(problem, operands, plan=""):
    left, right = problem.band
    numbers = (problem.max_len_q, problem.max_len_k, problem.scale, left, right, problem.deterministic, plan, problem.softcap)
    return (*operands[:7], *numbers)


def random_call(seed=0, heads=(4, 2), lengths=(9, 12), dtype=torch.float64, batch=2):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, lengths[0], heads[0], 16), *((batch, lengths[1], heads[1], 16),) * 2)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


# ---- limits --------------------------------------------------------------------------------------------------------

OFF = {
    "a huge cap": {"softcap": 1e30},
    "slopes of 0": {"alibi_slopes": torch.zeros(4)},
    "a sink of -inf": {"sink": torch.full((4,), -math.inf)},
}


@pytest.mark.parametrize("options", OFF.values(), ids=OFF)
def test_what_does_nothing_changes_nothing(options):
    inputs = [t.requires_grad_() for t in random_call(lengths=(12, 9))]  # three rows see nothing
    results = []
    for given in ({}, options):
        out, lse = rowmax.attention(*inputs, causal=True, return_lse=True, **given)
        loss = out.sin().sum() + torch.where(torch.isneginf(lse), 0.0, lse).sum()
        results.append((out, lse, *torch.autograd.grad(loss, inputs)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_sink_is_a_key_whose_value_is_zero():
    """One more key, orthogonal to all queries but for one coordinate that carries the logit."""
    q, k, v = random_call(heads=(2, 2))
    sink = torch.tensor([1.5, -0.5], dtype=torch.float64)
    one = torch.ones(*q.shape[:3], 1, dtype=q.dtype)
    more_k = torch.cat([torch.cat([k, torch.zeros_like(k[..., :1])], -1), torch.zeros(2, 1, 2, 17, dtype=k.dtype)], 1)
    more_k[:, -1, :, -1] = sink / 0.25
    more_v = torch.cat([v, torch.zeros_like(v[:, :1])], 1)
    want = rowmax.attention(torch.cat([q, one], -1), more_k, more_v, scale=0.25, return_lse=True)
    for got, other in zip(rowmax.attention(q, k, v, sink=sink, return_lse=True), want, strict=True):
        torch.testing.assert_close(got, other, rtol=1e-12, atol=1e-12)


def test_parts_merge_with_the_sink_in_one_of_them():
    q, k, v = random_call(lengths=(6, 20))
    sink = torch.tensor([3.0, -2.0, 20.0, 0.0], dtype=torch.float64)
    want, want_lse = rowmax.attention(q, k, v, sink=sink, return_lse=True)
    for first in (0, 7, 20):  # also where one part has no keys
        parts = [rowmax.attention(q, k[:, :first], v[:, :first], sink=sink, return_lse=True)]
        parts.append(rowmax.attention(q, k[:, first:], v[:, first:], return_lse=True))
        out, lse = rowmax.merge(*zip(*parts, strict=True))
        torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sink", [20.0, -20.0])
def test_a_large_sink_takes_the_weight_and_a_small_one_none(sink, backend, device):
    """B130: a sink of 0 alone would not show that one is ignored."""
    q, k, v = (t.to(device) for t in random_call(dtype=torch.float32))
    try:
        out = rowmax.attention(q, k, v, sink=torch.full((4,), sink, device=device), plan=backend)
        plain = rowmax.attention(q, k, v, plan=backend)
    except Unsupported as refused:
        pytest.skip(str(refused))
    if sink > 0:
        assert float(out.abs().max()) < 1e-5
    else:
        torch.testing.assert_close(out, plain)


def test_alibi_of_one_query_against_many_keys_is_the_last_row_of_all():
    """B127: a cache and a whole sequence agree, because distances count from the diagonal of the last key."""
    q, k, v = random_call(lengths=(12, 12))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    whole, whole_lse = rowmax.attention(q, k, v, causal=True, alibi_slopes=slopes, return_lse=True)
    out, lse = rowmax.attention(q[:, -1:], k, v, causal=True, alibi_slopes=slopes, return_lse=True)
    torch.testing.assert_close(out[:, 0], whole[:, -1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse[..., 0], whole_lse[..., -1], rtol=1e-12, atol=1e-12)


# ---- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["b1 h4/2 q4 k6 d3 fp64 causal softcap=1.5 alibi sink", "b2 h2 q5 k3 d2/4 fp64 causal sink"])
def test_gradcheck(text):
    """Finite differences in fp64, through both results, also of the sink."""
    problem = Problem.parse(text)
    operands = testing.operands(problem)
    leaves = tuple(t.clone().requires_grad_() for t in (*operands[:3], operands.sink))

    def call(q, k, v, sink):
        return testing.attend(problem, operands._replace(q=q, k=k, v=v, sink=sink), "tiled")

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("needed", [(3,), (0, 3), (1, 2), (0, 1, 2, 3)])
def test_any_subset_of_inputs_may_need_a_gradient(needed, backend, device):
    """B129, B91: also the sink alone, whose gradient is -sum p_sink delta. Bit for bit as when all need one."""
    problem = Problem.parse(ALL)
    operands = testing.operands(problem, device=device)
    given = testing.cotangents(problem, device=device)
    try:
        rowmax.plan(problem, rowmax.Device.of(operands.q), prefer=backend)
    except Unsupported as refused:
        pytest.skip(str(refused))

    def gradients(which):
        leaves = [t.detach().clone().requires_grad_(i in which) for i, t in enumerate((*operands[:3], operands.sink))]
        tensors = operands._replace(**dict(zip(("q", "k", "v", "sink"), leaves, strict=True)))
        torch.autograd.backward(testing.attend(problem, tensors, backend), given)
        return [t.grad for t in leaves]

    every = gradients((0, 1, 2, 3))
    for i, grad in enumerate(gradients(needed)):
        assert torch.equal(grad, every[i]) if i in needed else grad is None
    out, lse = testing.attend(problem, operands, backend)
    delta = (out * given[0]).sum(-1).transpose(1, 2) - given[1]
    want = -(torch.exp(operands.sink[:, None] - lse) * delta).sum((0, 2))
    torch.testing.assert_close(every[3], want, rtol=1e-4, atol=1e-5)


def test_a_sink_keeps_its_type_and_gets_its_gradient_in_it():
    q, k, v = random_call(dtype=torch.bfloat16)
    sink = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    rowmax.attention(q, k, v, sink=sink).float().sum().backward()
    assert sink.grad.dtype == torch.bfloat16
    assert float(sink.grad.abs().max()) > 0


def test_gradients_of_slopes_are_refused():
    q, k, v = (t.requires_grad_() for t in random_call())
    with pytest.raises(NotImplementedError, match=r"alibi_slopes\.detach"):
        rowmax.attention(q, k, v, alibi_slopes=torch.ones(4, requires_grad=True))


# ---- the operators -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "layout"), PROBLEMS.values(), ids=PROBLEMS)
def test_opcheck(text, layout):
    problem = Problem.parse(text)
    operands = testing.operands(problem, layout=layout)
    leaves = operands._replace(**{name: getattr(operands, name).detach().requires_grad_() for name in "qkv"})
    torch.library.opcheck(FORWARD_SCORED, (True, *arguments(problem, leaves)))
    torch.library.opcheck(FORWARD_SCORED, (False, *arguments(problem, operands)))
    out, lse = testing.attend(problem, operands)
    given = testing.cotangents(problem, layout=layout)
    for needs in ((True, True, True, problem.sink), (False, True, False, False)):
        call = (needs, *given, out, lse, *arguments(problem, operands))
        torch.library.opcheck(BACKWARD_SCORED, call, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


def test_compile_makes_one_graph_for_many_lengths():
    sink, slopes = torch.randn(4).requires_grad_(), torch.rand(4)

    def step(q, k, v):
        return rowmax.attention(q * 2, k, v, causal=True, softcap=5.0, alibi_slopes=slopes, sink=sink).sin().sum()

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    torch._dynamo.reset()
    for length in (5, 8, 13, 16):
        inputs = [t.requires_grad_() for t in random_call(length, lengths=(length, length), dtype=torch.float32)]
        grads = torch.autograd.grad(compiled(*inputs), [*inputs, sink])
        for grad, want in zip(grads, torch.autograd.grad(step(*inputs), [*inputs, sink]), strict=True):
            torch.testing.assert_close(grad, want)
    assert counter.frame_count <= 2


def test_autocast_and_checkpointing():
    q, k, v = (t.requires_grad_() for t in random_call(dtype=torch.float32))
    sink = torch.randn(4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert rowmax.attention(q, k, v, sink=sink, softcap=3.0).dtype == torch.bfloat16

    def block(*inputs):
        return rowmax.attention(*inputs[:3], causal=True, sink=inputs[3]).sin()

    want = torch.autograd.grad(block(q, k, v, sink).sum(), (q, k, v, sink))
    got = torch.autograd.grad(checkpoint(block, q, k, v, sink, use_reentrant=False).sum(), (q, k, v, sink))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_flops_are_those_of_the_products():
    q, k, v = (t.requires_grad_() for t in random_call(dtype=torch.float32))
    totals = []
    for options in ({}, {"softcap": 2.0, "sink": torch.zeros(4)}):
        with FlopCounterMode(display=False) as counter:
            rowmax.attention(q, k, v, causal=True, **options).sum().backward()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


def test_slopes_of_a_packed_batch_are_those_of_each_sequence():
    """B126: `[H]` and `[B, H]` in every entry."""
    q, k, v = (t.flatten(0, 1) for t in random_call(lengths=(10, 10)))
    cu = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    slopes = torch.rand(3, 4, dtype=torch.float64)
    want = reference.attention_varlen(q, k, v, cu, cu, right=0, slopes=slopes)
    got = rowmax.attention_varlen(q, k, v, cu, cu, causal=True, alibi_slopes=slopes, return_lse=True)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


# ---- errors --------------------------------------------------------------------------------------------------------

WRONG = {
    "softcap must be a positive number": {"softcap": -1.0},
    "softcap must be a Python number": {"softcap": torch.tensor(2.0)},
    r"alibi_slopes must have shape \[H\] or \[B, H\]": {"alibi_slopes": torch.ones(2)},
    r"here \[4\] or \[2, 4\]": {"alibi_slopes": torch.ones(1, 4)},
    "alibi_slopes must be a tensor of floating point": {"alibi_slopes": [0.5] * 4},
    r"sink must have shape \[H\]": {"sink": torch.ones(2, 4)},
    "sink must be a tensor of floating point": {"sink": torch.ones(4, dtype=torch.int64)},
}


@pytest.mark.parametrize(("words", "options"), WRONG.items(), ids=WRONG)
def test_a_wrong_call_says_what_is_wrong(words, options):
    with pytest.raises(ProblemError, match=words):
        rowmax.attention(*random_call(), **options)


def test_the_operator_takes_slopes_and_sinks_in_the_type_of_the_lse():
    problem = Problem.parse("b2 h4/2 q9 k12 d16 fp32 sink")
    operands = testing.operands(problem)
    with pytest.raises(ProblemError, match=r"sink must be torch\.float32"):
        FORWARD_SCORED(False, *arguments(problem, operands._replace(sink=operands.sink.double())))


def test_hopper_takes_both_passes_and_says_where_it_does_not():
    h200 = rowmax.Device.named("H200")
    for words in ("softcap=30.0", "alibi", "sink"):
        for dims in ("d128", "d192/128", "d256"):
            problem = Problem.parse(f"b4 h16 q4096 k4096 {dims} bf16 causal {words}")
            for direction in ("forward", "backward"):
                assert rowmax.plan(problem, h200, direction=direction).algorithm == "hopper"
    both = Problem.parse("b4 h16 q4096 k4096 d128 bf16 causal softcap=30.0 alibi")
    assert rowmax.plan(both, h200, direction="forward").algorithm == "hopper"
    backward = rowmax.plan(both, h200, direction="backward")
    assert backward.algorithm == "q_outer"
    assert "a soft-cap without ALiBi" in dict(backward.refusals)["hopper"]
