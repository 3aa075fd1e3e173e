"""An added bias and a boolean mask through the public call: their limits, their operators, and what is refused.

That their numbers are right is the family "masks" of `cases.py`.
"""

import math

import pytest
import torch
import torch._dynamo.testing
from torch.utils.flop_counter import FlopCounterMode

import rowmax
from rowmax import Problem, ProblemError, Unsupported, reference, testing
from rowmax.ops_masked import BACKWARD_MASKED, FORWARD_MASKED

PROBLEMS = {
    "all": ("b2 h4/2 q9 k12 d16 fp32 causal softcap=2.0 alibi(batch) sink bias(hqk) mask(bk)", "contiguous"),
    "half": ("b2 h4/2 q9 k12 d16/24 bf16 bias(bhqk,fp32)", "gaps"),
    "no keys": ("b2 h2 q5 k0 d16 fp32 bias(q) mask(1) sink", "contiguous"),
}


def arguments(problem, operands, plan=""):
    left, right = problem.band
    numbers = (problem.max_len_q, problem.max_len_k, problem.scale, left, right, problem.deterministic, plan, problem.softcap)
    return (*operands, *numbers, problem.dropout)


def random_call(dtype=torch.float64, lengths=(9, 12), heads=(4, 2), batch=2):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, lengths[0], heads[0], 16), *((batch, lengths[1], heads[1], 16),) * 2)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def same(one, other, **tolerance):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 1e-12, "atol": 1e-12} | tolerance))


def seen_causal(len_q, len_k):
    return torch.ones(len_q, len_k, dtype=torch.bool).tril(len_k - len_q)


# ---- limits --------------------------------------------------------------------------------------------------------

EQUAL = {
    "a bias of 0": ({"causal": True, "bias": torch.zeros(1, 1, 1, 1, dtype=torch.float64)}, {"causal": True}),
    "a mask of True": ({"mask": torch.ones(1, 4, 9, 1, dtype=torch.bool)}, {}),
    "causal as a mask": ({"mask": seen_causal(9, 12)[None, None]}, {"causal": True}),
    "causal as a bias of -inf": (
        {"bias": torch.zeros(9, 12, dtype=torch.float64).masked_fill(~seen_causal(9, 12), -math.inf)[None, None]},
        {"causal": True},
    ),
    "slopes as a bias": (
        {"bias": reference.alibi(torch.rand(4, generator=torch.Generator().manual_seed(0)).double(), 9, 12)[None]},
        {"alibi_slopes": torch.rand(4, generator=torch.Generator().manual_seed(0)).double()},
    ),
}


@pytest.mark.parametrize(("one", "other"), EQUAL.values(), ids=EQUAL)
def test_the_same_thing_said_otherwise(one, other):
    inputs = [t.requires_grad_() for t in random_call()]
    results = []
    for options in (one, other):
        out, lse = rowmax.attention(*inputs, return_lse=True, **options)
        results.append((out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), inputs)))
    same(*results)


def test_a_hidden_key_is_no_key(backend, device):
    """Whatever it holds, NaN too: what a finite one gives, on the CPU bit for bit; and a mask and a bias of -inf hide alike."""
    q, k, v = (t.to(device) for t in random_call(torch.float32, lengths=(9, 40), heads=(2, 1), batch=1))
    shown = torch.rand(1, 1, 1, 40, generator=torch.Generator().manual_seed(1)).to(device) < 0.6
    bias = torch.zeros(1, 1, 1, 40, device=device).masked_fill(~shown, -math.inf)
    results = []
    for options, fill in (({"mask": shown}, 0.0), ({"mask": shown}, math.nan), ({"bias": bias}, math.nan)):
        tensors = [q.clone(), *(torch.where(shown[0, 0, 0][:, None, None], t, fill) for t in (k, v))]
        tensors = [t.requires_grad_() for t in tensors]
        try:
            out, lse = rowmax.attention(*tensors, return_lse=True, plan=backend, **options)
        except Unsupported as refused:
            pytest.skip(str(refused))
        results.append((out, lse, *torch.autograd.grad(out.sin().sum(), tensors)))
        assert not results[-1][3][:, ~shown[0, 0, 0]].any()
    if backend == "tiled":
        assert all(torch.equal(a, b) for a, b in zip(*results[:2], strict=True))
    same(results[0], results[1], rtol=1e-5, atol=1e-6)  # kernels compute rows with a NaN once more, in smaller tiles
    same(results[0], results[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", ["mask", "bias"])
def test_a_row_without_keys_is_0_and_has_no_gradients(given, backend, device):
    """B07: of a mask's own making, or of a bias of -inf, in the middle of the others, whose gradients are the definition's."""
    drawn = [t.to(device) for t in (*random_call(torch.float32), torch.randn(1, 1, 9, 12))]
    shown = torch.ones(1, 1, 9, 1, dtype=torch.bool, device=device)
    shown[:, :, 4] = False
    if given == "bias":
        drawn[3][:, :, 4] = -math.inf
    leaves = [t.requires_grad_() for t in drawn]
    mask = shown if given == "mask" else None
    try:
        out, lse = rowmax.attention(*leaves[:3], bias=leaves[3], mask=mask, return_lse=True, plan=backend)
    except Unsupported as refused:
        pytest.skip(str(refused))
    assert not out[:, 4].any()
    assert bool((lse[:, :, 4] == -math.inf).all())
    grads = torch.autograd.grad(out.sin().sum() + torch.where(shown[..., 0], lse, 0.0).sum(), leaves)
    assert not grads[0][:, 4].any()
    assert not grads[3][:, :, 4].any()
    others = [i for i in range(9) if i != 4]
    cut = [leaves[0][:, others], *leaves[1:3]]
    without, its_lse = rowmax.attention(*cut, bias=leaves[3][:, :, others], return_lse=True, plan=backend)
    wants = torch.autograd.grad(without.sin().sum() + its_lse.sum(), leaves)
    for grad, want in zip(grads, wants, strict=True):
        torch.testing.assert_close(grad, want)


def test_the_lowest_number_is_a_number(backend, device):
    """C.0: a row full of finfo.min is the softmax of ties, not a row without keys."""
    q, k, v = (t.to(device) for t in random_call(torch.float32))
    bias = torch.full((1, 1, 9, 12), torch.finfo(torch.float32).min, device=device)
    try:
        out = rowmax.attention(q * 0, k, v, bias=bias, plan=backend)
    except Unsupported as refused:
        pytest.skip(str(refused))
    torch.testing.assert_close(out, v.mean(1, keepdim=True).repeat_interleave(2, 2).expand_as(out), rtol=1e-5, atol=1e-6)


# ---- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("letters", ["bhqk", "qk", "bk", "hq", "1"])
def test_gradcheck(letters):
    problem = Problem.parse(f"b2 h2/1 q3 k5 d3 fp64 causal softcap=1.5 bias({letters}) mask(k)")
    operands = testing.operands(problem)
    bias = torch.randn_like(operands.bias)
    leaves = tuple(t.clone().requires_grad_() for t in (*operands[:3], bias))

    def call(q, k, v, bias):
        out, lse = testing.attend(problem, operands._replace(q=q, k=k, v=v, bias=bias), "tiled")
        return out, torch.where(torch.isneginf(lse), 0.0, lse)

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("needed", [(3,), (1, 2, 3)])
def test_any_subset_of_inputs_may_need_a_gradient(needed, backend, device):
    """B91: also the bias alone. Bit for bit as when all need one, and twice the same."""
    problem = Problem.parse("b2 h2/1 q17 k16 d16 fp32 bias(hqk) mask(bk)")
    operands = testing.operands(problem, device=device)
    given = testing.cotangents(problem, device=device)
    try:
        rowmax.plan(problem, rowmax.Device.of(operands.q), prefer=backend)
    except Unsupported as refused:
        pytest.skip(str(refused))

    def gradients(which):
        leaves = [t.detach().clone().requires_grad_(i in which) for i, t in enumerate((*operands[:3], operands.bias))]
        tensors = operands._replace(**dict(zip(("q", "k", "v", "bias"), leaves, strict=True)))
        torch.autograd.backward(testing.attend(problem, tensors, backend), given)
        return [t.grad for t in leaves]

    every = gradients((0, 1, 2, 3))
    for i, grad in enumerate(gradients(needed)):
        assert torch.equal(grad, every[i]) if i in needed else grad is None


def test_a_bias_of_any_strides_and_an_expanded_one(backend, device):
    q, k, v = (t.to(device) for t in random_call(torch.float32, lengths=(9, 12), heads=(2, 1)))
    base = torch.randn(12, 2, 9, 2, device=device)
    results = []
    for make in (lambda t: t.permute(1, 3, 2, 0)[:, :1], lambda t: t.permute(1, 3, 2, 0)[:, :1].contiguous()):
        leaf = base.clone().requires_grad_()
        for bias in (make(leaf), make(leaf).expand(2, 2, 9, 12)):
            try:
                out = rowmax.attention(q, k, v, bias=bias, plan=backend)
            except Unsupported as refused:
                pytest.skip(str(refused))
            results.append((out, torch.autograd.grad(out.sin().sum(), leaf)[0]))
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        torch.testing.assert_close(results[0][1], other[1])


# ---- the operators -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "layout"), PROBLEMS.values(), ids=PROBLEMS)
def test_opcheck(text, layout):
    problem = Problem.parse(text)
    operands = testing.operands(problem, layout=layout)
    leaves = operands._replace(
        **{name: getattr(operands, name).detach().requires_grad_() for name in ("q", "k", "v", *["bias"] * bool(problem.bias))}
    )
    torch.library.opcheck(FORWARD_MASKED, (True, *arguments(problem, leaves)))
    torch.library.opcheck(FORWARD_MASKED, (False, *arguments(problem, operands)))
    out, lse = testing.attend(problem, operands)
    given = testing.cotangents(problem, layout=layout)
    for needs in ((True, True, True, problem.sink, bool(problem.bias)), (False, True, False, False, False)):
        call = (needs, *given, out, lse, *arguments(problem, operands))
        torch.library.opcheck(BACKWARD_MASKED, call, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


def test_compile_makes_one_graph_for_many_lengths():
    def step(q, k, v, bias):
        mask = torch.ones(1, 1, 1, k.shape[1], dtype=torch.bool)
        return rowmax.attention(q * 2, k, v, causal=True, bias=bias, mask=mask).sin().sum()

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    torch._dynamo.reset()
    for length in (5, 8, 13, 16):
        inputs = [t.requires_grad_() for t in random_call(torch.float32, lengths=(length, length))]
        inputs.append(torch.randn(1, 4, length, length, requires_grad=True))
        same(torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(step(*inputs), inputs), rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 2


def test_flops_are_those_of_the_products():
    q, k, v = (t.requires_grad_() for t in random_call(torch.float32))
    totals = []
    for options in ({}, {"mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}):
        with FlopCounterMode(display=False) as counter:
            rowmax.attention(q, k, v, causal=True, **options).sum().backward()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


# ---- errors --------------------------------------------------------------------------------------------------------

WRONG = {
    r"bias must have shape \[B\|1, H\|1, Tq\|1, Tk\|1\], here sizes 1 or \[2, 4, 9, 12\]; got \[9, 12\]": {
        "bias": torch.zeros(9, 12, dtype=torch.float64)
    },
    r"mask must have shape .*got \[2, 2, 9, 12\]": {"mask": torch.ones(2, 2, 9, 12, dtype=torch.bool)},
    "mask must be torch.bool where q is torch.float64; got torch.float32": {"mask": torch.zeros(1, 1, 9, 12)},
    "bias must be torch.float64 where q is torch.float64; got torch.bool. Booleans": {
        "bias": torch.zeros(1, 1, 9, 12, dtype=torch.bool)
    },
    "bias must be a tensor": {"bias": [0.0]},
    "mask is on meta and q on cpu": {"mask": torch.ones(1, 1, 9, 12, dtype=torch.bool, device="meta")},
}


@pytest.mark.parametrize(("words", "options"), WRONG.items(), ids=WRONG)
def test_a_wrong_call_says_what_is_wrong(words, options):
    with pytest.raises(ProblemError, match=words):
        rowmax.attention(*random_call(), **options)


def test_problems_with_pairs():
    problem = Problem.parse("b2 h4 q8 k9 d16 bf16 bias(hqk,fp32) mask(bk)")
    assert Problem.parse(str(problem)) == problem
    for text, words in (("bias(kq)", "'bhqk', in this order"), ("packed mask(qk)", "dense tensors")):
        with pytest.raises(ProblemError, match=words):
            Problem.parse(f"b2 h4 q8 k9 d16 bf16 {text}")


def test_other_backends_say_why_they_pass_such_a_problem_over():
    problem = Problem.parse("b4 h16 q4096 k4096 d128 bf16 causal bias(hqk)")
    for given, direction, reason in (
        (problem.with_(mask="k"), "forward", "not both"),
        (problem.with_(mask="k"), "backward", "not both"),
        (problem.with_(softcap=30.0), "backward", "without ALiBi, biases and masks only"),
    ):
        plan = rowmax.plan(given, rowmax.Device.named("H200"), direction=direction)
        assert plan.algorithm == "q_outer"
        assert reason in dict(plan.refusals)["hopper"]
    with pytest.raises(Unsupported, match="bias, mask or score_mod"):
        rowmax.plan(problem, rowmax.Device("CPU", "cpu"), prefer="aten")


def test_kernels_refuse_what_they_cannot_count():
    """Offsets within a tile are counted in 32 bits: rows too far apart are named, not read from elsewhere."""
    q, k, v = random_call(torch.float32)
    far = torch.empty(8 * 2**23 + 12, dtype=torch.bool).as_strided((1, 1, 9, 12), (0, 0, 2**23, 1))  # never read
    try:
        rowmax.plan(Problem.parse("b2 h4/2 q9 k12 d16 fp32 mask(qk)"), rowmax.Device.of(q), prefer="q_outer")
    except Unsupported as refused:
        pytest.skip(str(refused))
    with pytest.raises(ProblemError, match=r"less than 8388608 elements apart.*mask\.contiguous"):
        rowmax.attention(q, k, v, mask=far, plan="q_outer")
