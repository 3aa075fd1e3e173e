"""Dropout through the public calls: the generator, what it keeps, reproducibility, the operator, and what is refused.

That outputs and gradients are right is the family "dropout" of `cases.py`.
"""

from itertools import pairwise

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

import rowmax
from rowmax import Problem, ProblemError, Unsupported, reference, testing
from rowmax.cpu.dropout import philox
from rowmax.ops_masked import BACKWARD_MASKED, FORWARD_MASKED

# Of the paper's own library: rounds, counter, key -> words.
KNOWN = [
    (10, (0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (7, (0, 0, 0, 0), 0, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, (2**32 - 1,) * 4, 2**64 - 1, "5207ddc2 45165e59 4d8ee751 8c52f662"),
]


def arguments(problem, operands, plan=""):
    left, right = problem.band
    numbers = (problem.max_len_q, problem.max_len_k, problem.scale, left, right, problem.deterministic, plan, problem.softcap)
    return (*operands, *numbers, problem.dropout)


def random_call(dtype=torch.float64, lengths=(9, 12), heads=(4, 2), batch=2):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, lengths[0], heads[0], 16), *((batch, lengths[1], heads[1], 16),) * 2)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("rounds", "counter", "key", "words"), KNOWN)
def test_the_generator_is_the_published_one(rounds, counter, key, words):
    found = philox([torch.tensor([value]) for value in counter], key, rounds)
    assert [f"{int(word):08x}" for word in found] == words.split()


def test_it_keeps_as_often_as_it_should_and_without_pattern():
    """P15: within 5 standard deviations; of all pairs, and of neighbours in any direction together."""
    for p in (0.1, 0.5):
        kept = reference.dropout(77, p, range(4), 4, 128, 129).double()
        for shift in ((0, 0, 0, 1), (0, 0, 0, 8), (0, 0, 0, 32), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0)):
            other = torch.roll(kept, shift, (0, 1, 2, 3))
            rate = (1 - p) if not any(shift) else (1 - p) ** 2
            deviation = (rate * (1 - rate) / kept.numel()) ** 0.5 * (1 if not any(shift) else 1.5)  # pairs overlap
            assert abs(float((kept * other).mean()) - rate) < 5 * deviation, (p, shift)


@pytest.mark.parametrize("text", ["b2 h4/2 q20 k24 d24 fp32", "b3 h4/2 q50 k60 d24 fp32 packed causal"])
def test_every_backend_drops_the_same(text, backend, device):
    """Equal scores, and values that are unit vectors: the output is the row of weights. Forward, and dV in the backward."""
    problem = Problem.parse(text + " dropout=0.3")
    operands = testing.operands(problem, device=device)
    q, v = torch.zeros_like(operands.q), torch.eye(24, device=device)
    span = 24 if not problem.packed else None
    if problem.packed:
        cu = operands.cu_seqlens_k.tolist()
        v = torch.cat([v.repeat(3, 1)[: b - a] for a, b in pairwise(cu)])
    v = v[None, :, None].expand(2, -1, 2, -1) if span else v[:, None].expand(-1, 2, -1)
    v = v.contiguous().requires_grad_()
    try:
        out, lse = testing.attend(problem, operands._replace(q=q, v=v), backend)
        plain = testing.attend(problem.with_(dropout=0.0), operands._replace(q=q, v=v, seed=None), backend)
    except Unsupported as refused:
        pytest.skip(str(refused))
    assert torch.equal(lse, plain[1])  # the LSE knows nothing of it
    if not problem.packed:
        kept = reference.dropout(int(operands.seed), 0.3, range(2), 4, 20, 24).to(device)
        assert torch.equal(out.transpose(1, 2) > 0, kept)
        (dv,) = torch.autograd.grad(out.sum(), v)
        want = kept.unflatten(1, (2, 2)).sum((2, 3)).transpose(1, 2) / 24 * problem.drop_factor
        torch.testing.assert_close(dv, want[..., None].expand_as(dv).to(dv.dtype), rtol=1e-5, atol=1e-6)
        return
    cu_q = operands.cu_seqlens_q.tolist()
    for b, (a, end) in enumerate(pairwise(cu_q)):
        len_k = cu[b + 1] - cu[b]
        kept = reference.dropout(int(operands.seed), 0.3, [b], 4, end - a, len_k)[0].to(device)
        kept = kept & reference.visible(end - a, len_k, right=0, device=device)
        for j in range(min(len_k, 24)):
            columns = kept[..., j::24].any(-1)  # keys whose unit vector it is
            assert torch.equal((out[a:end, :, j] > 0).T, columns)


def test_a_seed_says_it_all():
    q, k, v = random_call()

    def call(**options):
        return rowmax.attention(q, k, v, dropout_p=0.4, **options)

    assert torch.equal(call(seed=5), call(seed=torch.tensor([5])))
    assert torch.equal(call(seed=5), call(seed=torch.tensor(5)))
    assert not torch.equal(call(seed=5), call(seed=6))
    assert not torch.equal(call(seed=5), call(seed=5 + 2**32))
    torch.manual_seed(3)
    one, two = call(), call()
    torch.manual_seed(3)
    assert torch.equal(one, call())
    assert not torch.equal(one, two)
    state = torch.get_rng_state()
    assert torch.equal(rowmax.attention(q, k, v, dropout_p=0.0), rowmax.attention(q, k, v))
    rowmax.attention(q, k, v, dropout_p=0.0, seed=None, softcap=2.0)
    assert torch.equal(state, torch.get_rng_state()), "nothing dropped, and yet something drawn"


def test_checkpointing_drops_the_same_again():
    """B135."""
    q, k, v = (t.requires_grad_() for t in random_call())

    def block(*inputs):
        return rowmax.attention(*inputs, dropout_p=0.4).sin()

    results = []
    for run in (block, lambda *inputs: checkpoint(block, *inputs, use_reentrant=False)):
        torch.manual_seed(1)
        results.append(torch.autograd.grad(run(q, k, v).sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("text", ["b2 h2/1 q4 k6 d3 fp64 causal softcap=1.5 sink bias(hqk)", "b2 h2 q6 k7 d3 fp64 packed"])
def test_gradcheck(text):
    problem = Problem.parse(text + " dropout=0.3")
    operands = testing.operands(problem, lengths=((2, 3), (4, 4)) if problem.packed else None)
    leaves = tuple(t.clone().requires_grad_() for t in operands[:3])

    def call(q, k, v):
        return testing.attend(problem, operands._replace(q=q, k=k, v=v), "tiled")

    assert torch.autograd.gradcheck(call, leaves)


def test_padding_comes_with_it():
    q, k, v = random_call()
    out = rowmax.attention(q, k, v, seqlens_k=torch.tensor([7, 12]), dropout_p=0.3, seed=1)
    want = rowmax.attention(q[1:], k[1:], v[1:])
    assert out.shape == q.shape
    assert not torch.allclose(out[1:], want)


@pytest.mark.parametrize("text", ["b2 h4/2 q9 k12 d16 fp32 causal", "b3 h4/2 q12 k12 d16 bf16 packed sink"])
def test_opcheck(text):
    problem = Problem.parse(text + " dropout=0.3")
    operands = testing.operands(problem)
    leaves = operands._replace(**{name: getattr(operands, name).detach().requires_grad_() for name in "qkv"})
    torch.library.opcheck(FORWARD_MASKED, (True, *arguments(problem, leaves)))
    out, lse = testing.attend(problem, operands)
    call = ((True, True, True, problem.sink, False), *testing.cotangents(problem), out, lse, *arguments(problem, operands))
    torch.library.opcheck(BACKWARD_MASKED, call, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


def test_compile_makes_one_graph_and_draws_anew_in_every_call():
    def step(q, k, v):
        return rowmax.attention(q * 2, k, v, causal=True, dropout_p=0.3)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    torch._dynamo.reset()
    for length in (5, 8, 13):
        inputs = [t.requires_grad_() for t in random_call(torch.float32, lengths=(length, length))]
        one, two = compiled(*inputs), compiled(*inputs)
        assert not torch.equal(one, two)
        torch.autograd.grad(one.sum(), inputs)
    assert counter.frame_count <= 2


WRONG = {
    "dropout_p must be at least 0 and below 1; got 1.0": {"dropout_p": 1.0},
    "got -0.1": {"dropout_p": -0.1},
    "got nan": {"dropout_p": float("nan")},
    "dropout_p must be a Python number": {"dropout_p": "often"},
    "seed must be an integer of 64 bits": {"dropout_p": 0.1, "seed": 1.5},
    r"seed must be an int64 tensor of shape \[1\]; got torch.int32": {
        "dropout_p": 0.1,
        "seed": torch.zeros(1, dtype=torch.int32),
    },
    "seed is on meta": {"dropout_p": 0.1, "seed": torch.zeros(1, dtype=torch.int64, device="meta")},
}


@pytest.mark.parametrize(("words", "options"), WRONG.items(), ids=WRONG)
def test_a_wrong_call_says_what_is_wrong(words, options):
    with pytest.raises(ProblemError, match=words):
        rowmax.attention(*random_call(), **options)


def test_problems_with_dropout():
    problem = Problem.parse("b2 h4 q8 k9 d16 bf16 packed dropout=0.1")
    assert Problem.parse(str(problem)) == problem
    plan = rowmax.plan(problem, rowmax.Device.named("H200"))
    assert plan.algorithm == "q_outer"
