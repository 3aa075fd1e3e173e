"""Both algorithms of the CPU: which one runs, what they compute and need, and who meets a non-finite value."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rowmax
from rowmax import Device, Plan, Problem, cpu, plan, reference, testing
from rowmax.cpu import half_scores

BOTH = pytest.mark.parametrize("algorithm", ["aten", "tiled", "tiled[16x16, 16x16, 16x16]"])


class Watch(TorchDispatchMode):
    """The largest tensor that an operator made, and the types of every matmul."""

    def __init__(self):
        super().__init__()
        self.largest, self.matmuls = 0, set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        if function.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            self.matmuls |= {t.dtype for t in arguments if isinstance(t, torch.Tensor)}
        return result


def run(problem, operands, spelling, grad_out=None):
    """`(out, lse)`, or with a gradient `(dq, dk, dv)` too, by the functions that the operators call."""
    chosen = Plan.parse(spelling)
    if not chosen.tiles:
        chosen = plan(problem, Device.named("cpu"), prefer=spelling)
    out, lse = cpu.forward(problem, operands, chosen, True)
    if grad_out is None:
        return out, lse
    return out, lse, *cpu.backward(problem, operands, out, lse, grad_out, None, (True, True, True), chosen)


@pytest.mark.parametrize(
    ("text", "algorithm"),
    [
        ("b1 h2 q64 k64 d64 fp32", "aten"),
        ("b1 h4/2 q64 k64 d64 fp32 causal", "aten"),
        ("b1 h2 q64 k64 d64 fp64 causal", "aten"),
        ("b1 h2 q64 k64 d64 bf16 causal", "tiled"),
        ("b1 h2 q64 k64 d64 fp16", "aten"),
        ("b1 h2 q4 k64 d64 fp16", "aten"),
        ("b1 h4/2 q64 k64 d64 fp16 causal", "aten"),
        ("b1 h4/2 q4 k64 d64 fp16", "tiled"),
        ("b1 h2 q64 k64 d64 fp32 window(9,0)", "tiled"),
        ("b2 h2 q64 k64 d64 fp32 packed", "tiled"),
    ],
)
def test_which_algorithm(text, algorithm):
    for direction in ("forward", "backward"):
        assert plan(Problem.parse(text), Device.named("cpu"), direction=direction).algorithm == algorithm


@pytest.mark.parametrize("words", ["bf16 causal", "fp16", "bf16 scale=-0.2"])
def test_half_types_in_fp32_by_torchs_operator(words):
    """On a CPU that multiplies bf16 slowly; as well as tiles, with one rounding of the result."""
    problem, slow = Problem.parse(f"b2 h4/2 q70 k70 d24 {words}"), replace(Device.named("cpu"), fast_bf16=False)
    operands, (grad_out, _) = testing.operands(problem, "spiky"), testing.cotangents(problem)
    chosen = plan(problem, slow)
    assert chosen.algorithm == "aten"
    out, lse = cpu.forward(problem, operands, chosen, True)
    report = testing.check_forward(problem, operands, out, lse)
    assert report.ok, str(report)
    assert out.is_contiguous()
    chosen = plan(problem, slow, direction="backward")
    assert chosen.algorithm == "aten"
    grads = cpu.backward(problem, operands, out, lse, grad_out, None, (True, True, True), chosen)
    report = testing.check_backward(problem, operands, grads, grad_out, None)
    assert report.ok, str(report)
    assert [grad.dtype for grad in grads] == [problem.dtype] * 3


@BOTH
@pytest.mark.parametrize("text", ["b2 h4/2 q50 k50 d24 fp32 causal", "b1 h2 q33 k47 d16 fp32"])
def test_both_algorithms_pass_the_rule(algorithm, text):
    problem = Problem.parse(text)
    for kind in ("normal", "spiky", "shift(-1000)"):
        report = testing.check(problem, kind, plan=algorithm)  # with a gradient of the LSE, which aten leaves to the tiles
        assert report.ok, str(report)


@pytest.mark.parametrize("algorithm", ["aten", "tiled"])
def test_the_gradient_of_the_lse_alone(algorithm):
    problem = Problem.parse("b1 h2 q20 k20 d8 fp64 causal")
    operands = testing.operands(problem)
    leaves = [t.requires_grad_() for t in operands[:3]]
    grad = torch.randn(1, 2, 20, dtype=torch.float64)
    _, lse = rowmax.attention(*leaves, causal=True, return_lse=True, plan=algorithm)
    dq, dk, dv = torch.autograd.grad(lse, leaves, grad, allow_unused=True)
    _, expected = reference.attention(*leaves, right=0)
    expected_dq, expected_dk, _ = torch.autograd.grad(expected, leaves, grad, allow_unused=True)
    torch.testing.assert_close(dq, expected_dq)
    torch.testing.assert_close(dk, expected_dk)
    assert dv is None or not dv.any()


@pytest.mark.parametrize("window", [(None, 0), (3, 1)])
def test_gradcheck(window):
    problem = Problem.parse("b1 h2/1 q5 k7 d3/2 fp64")
    leaves = [t.requires_grad_() for t in testing.operands(problem)[:3]]

    def call(q, k, v):
        out, lse = rowmax.attention(q, k, v, window=window, return_lse=True, plan="tiled[2x3, 2x3, 2x3]")
        return out, lse

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scale_zero_is_the_mean_of_what_is_visible(dtype):
    q, k, v = (torch.randn(1, 300, 2, 64).to(dtype).requires_grad_() for _ in range(3))
    with testing.poisoned():
        out = rowmax.attention(q, k, v, causal=True, scale=0.0)
        dq, dk, _ = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        with torch.no_grad():
            alone = rowmax.attention(q, k, v, causal=True, scale=0.0)
    mean = v.double().cumsum(1) / torch.arange(1, 301).view(1, -1, 1, 1)
    for result in (out, alone):
        torch.testing.assert_close(result.double(), mean, rtol=1e-2, atol=1e-2)
    assert not dq.any()
    assert not dk.any()


def test_fp16_is_multiplied_in_fp32():
    """torch's fp16 matmul is 40 times slower on a CPU."""
    problem = Problem.parse("b1 h2 q40 k40 d16 fp16 causal")
    operands = testing.operands(problem)
    with Watch() as watch:
        run(problem, operands, "tiled", torch.ones(1, 40, 2, 16, dtype=torch.float16))
    assert watch.matmuls == {torch.float32}


@pytest.mark.parametrize("mask", ["causal", "window(100,0)", ""])
def test_memory_is_linear_in_the_length(mask):
    """No temporary is larger than the tile's scores or 4 bytes for every element of an operand and its extra columns."""
    tile = 64 * 256
    for length in (1000, 4000):
        problem = Problem.parse(f"b1 h1 q{length} k{length} d16 bf16 {mask}".strip())
        operands = testing.operands(problem)
        with testing.poisoned(), Watch() as watch:
            run(problem, operands, "tiled[64x256, 64x256, 64x256]", torch.ones_like(operands.q))
        assert watch.largest <= max(2 * tile * 4, length * (16 + 2) * 4)


# ---- non-finite values -----------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
def test_a_non_finite_value_reaches_exactly_those_who_see_it(algorithm, where, value):
    """fp32, causal, query and key 20 of 40: without it every other result is the same bit for bit."""
    problem = Problem.parse("b1 h2 q40 k40 d8 fp32 causal")
    operands = testing.operands(problem)
    grad_out = torch.randn(operands.q.shape)
    names = ("out", "lse", "dq", "dk", "dv")
    clean = dict(zip(names, run(problem, operands, algorithm, grad_out), strict=True))
    given = {"q": operands.q.clone(), "k": operands.k.clone(), "v": operands.v.clone(), "do": grad_out.clone()}
    given[where][0, 20, 0, 3] = value
    poisoned = run(problem, operands._replace(**{name: given[name] for name in "qkv"}), algorithm, given["do"])
    poisoned = dict(zip(names, poisoned, strict=True))
    before, after = slice(0, 20), slice(21, 40)
    # Rows and keys of the first head that it cannot reach, and all of the second head.
    untouched = {"q": (before, after), "k": (before,), "v": (before,), "do": (before, after)}[where]
    for name in ("out", "dq"):
        for rows in untouched:
            assert torch.equal(poisoned[name][:, rows, 0], clean[name][:, rows, 0]), name
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(poisoned[name][:, :, 1], clean[name][:, :, 1]), name
        assert bool(clean[name].isfinite().all())
    if where in ("q", "do"):
        for name in ("dk", "dv"):  # later keys are hidden from row 20
            assert torch.equal(poisoned[name][:, after, 0], clean[name][:, after, 0]), name
    if value is torch.nan:
        reached = {"q": ("out", "dq", "dk", "dv"), "k": ("out", "dq", "dv"), "v": ("out", "dq", "dk"), "do": ("dq", "dk", "dv")}
        for name in reached[where]:
            assert bool(poisoned[name][:, 20, 0].isnan().any()), name


@pytest.mark.parametrize(
    "text", ["b1 h2 q9 k5 d8 fp32 causal", "b1 h2 q9 k9 d8 fp32 mask(q)", "b1 h2 q9 k9 d8 fp32 mask(q) sink"]
)
def test_a_nan_in_a_query_that_sees_no_key_goes_nowhere(text):
    problem = Problem.parse(text)
    operands = testing.operands(problem)
    if problem.mask:
        operands.mask[:] = True
        operands.mask[..., 2, :] = False
    clean = run(problem, operands, "tiled", torch.ones(problem.outputs()[0]))
    operands.q[0, 2, 1, 3] = torch.nan
    for one, other in zip(run(problem, operands, "tiled", torch.ones(problem.outputs()[0])), clean, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("first", [550, 599])
def test_hidden_values_in_bf16_with_many_keys(value, first, monkeypatch):
    """Rounded scores may be left for fp32 ones, so rows that do not see the value are held to the rule, not to the bit."""
    monkeypatch.setattr(half_scores, "_LEAST_SCORES", 0)
    problem = Problem.parse("b1 h2 q600 k600 d64 bf16 causal")
    operands = testing.operands(problem)
    q, k, v = (t.clone() for t in operands[:3])
    for t in (k, v):
        t[0, first:] = value
    with torch.no_grad():
        out = rowmax.attention(q, k, v, causal=True, plan="tiled")
    assert bool(out[:, :first].isfinite().all())
    assert not bool(out[:, first:].isfinite().any())
    cut = Problem.parse(f"b1 h2 q{first} k{first} d64 bf16 causal")
    report = testing.check_forward(cut, operands._replace(q=q[:, :first], k=k[:, :first], v=v[:, :first]), out[:, :first])
    assert report.ok, str(report)


def test_a_default_device_of_the_caller_does_not_matter():
    q, k, v = (torch.randn(1, 300, 2, 16).bfloat16().requires_grad_() for _ in range(3))
    with torch.device("meta"):
        out = rowmax.attention(q, k, v, window=(90, 0))
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(t.device.type == "cpu" for t in (out, *grads))
