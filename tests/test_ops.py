"""The operators inside PyTorch: schema and fakes, compilation, autocast, checkpointing, FLOP counts, memory."""

import shutil

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import rowmax
from rowmax import Problem, testing
from rowmax.mask import visible_pairs
from rowmax.ops import BACKWARD, FORWARD

PROBLEMS = {
    "dense": ("b2 h4/2 q5 k7 d16 fp32 causal", "contiguous"),
    "window": ("b1 h2 q9 k6 d8/24 bf16 window(3,1)", "gaps"),
    "packed": ("b3 h4/2 q12 k12 d16 fp32 packed causal", "heads_first"),
    "packed, sides differ": ("b3 h2 q12 k17 d16 fp16 packed maxq9 maxk9", "odd"),
    "broadcast": ("b2 h4/2 q5 k5 d16 fp32", "broadcast"),
    "no keys": ("b2 h4/2 q5 k0 d16 fp32", "contiguous"),
    "no queries": ("b2 h4/2 q0 k5 d16 bf16 causal", "contiguous"),
}


def arguments(problem, operands):
    """What both operators take last."""
    left, right = problem.band
    return (*operands[:5], problem.max_len_q, problem.max_len_k, problem.scale, left, right, problem.deterministic, "")


@pytest.mark.parametrize("need_lse", [True, False])
@pytest.mark.parametrize(("text", "layout"), PROBLEMS.values(), ids=PROBLEMS)
def test_opcheck_forward(text, layout, need_lse):
    problem = Problem.parse(text)
    operands = testing.operands(problem, layout=layout)
    if need_lse:
        operands = operands._replace(**{name: getattr(operands, name).detach().requires_grad_() for name in "qkv"})
    torch.library.opcheck(FORWARD, (need_lse, *arguments(problem, operands)))


@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False), (True, False, True)])
@pytest.mark.parametrize(("text", "layout"), PROBLEMS.values(), ids=PROBLEMS)
def test_opcheck_backward(text, layout, needs):
    problem = Problem.parse(text)
    operands = testing.operands(problem, layout=layout)
    out, lse = testing.attend(problem, operands)
    grad_out, grad_lse = testing.cotangents(problem, layout=layout)
    call = (needs, grad_out, grad_lse, out, lse, *arguments(problem, operands))
    torch.library.opcheck(BACKWARD, call, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.parametrize(("text", "layout"), PROBLEMS.values(), ids=PROBLEMS)
def test_fakes_have_the_shapes_types_and_strides_of_the_real_ones(text, layout, backend, device):
    problem = Problem.parse(text)
    operands = testing.operands(problem, layout=layout, device=device)
    grad_out, grad_lse = testing.cotangents(problem, layout=layout, device=device)
    try:
        rowmax.plan(problem, rowmax.Device.of(operands.q), prefer=backend)
    except rowmax.Unsupported as refused:
        pytest.skip(str(refused))
    call = (*arguments(problem, operands)[:-1], backend)
    for need_lse in (True, False):
        same_metadata(FORWARD, (need_lse, *call))
    out, lse = FORWARD(True, *call)
    for needs, *given in (((True, True, True), grad_out, grad_lse), ((False, True, False), None, grad_lse)):
        same_metadata(BACKWARD, (needs, *given, out, lse, *call))


def same_metadata(operator, call):
    real = operator(*call)
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        fake = operator(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in call))
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.dtype, one.stride(), one.device) == (other.shape, other.dtype, other.stride(), other.device)


@pytest.mark.parametrize("layout", list(testing.LAYOUTS))
def test_outputs_are_contiguous_whatever_the_inputs(layout, backend, device):
    problem = Problem.parse("b2 h4/2 q6 k6 d16 fp32 causal")
    operands = testing.operands(problem, layout=layout, device=device)
    out, lse = testing.attend(problem, operands, backend)
    assert out.is_contiguous()
    assert lse.is_contiguous()


# ---- torch.compile -------------------------------------------------------------------------------------------------


def step(q, k, v):
    out, lse = rowmax.attention(q * 2, k, v, causal=True, return_lse=True)
    return (out.sin().sum(), lse.sum())


def packed_step(q, k, v, cu_q, cu_k):
    return rowmax.attention_varlen(q * 2, k, v, cu_q, cu_k, window=(4, 0)).sin().sum()


def test_compile_makes_one_graph_for_many_lengths():
    """No break, and at most two graphs: one for the first length, one for all others."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    torch._dynamo.reset()
    for length in (5, 8, 13, 16, 21, 34):
        inputs = [torch.randn(2, length, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
        sum(compiled(*inputs)).backward()
        grads = [t.grad.clone() for t in inputs]
        for t in inputs:
            t.grad = None
        sum(step(*inputs)).backward()
        for grad, t in zip(grads, inputs, strict=True):
            torch.testing.assert_close(grad, t.grad)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("capture", [False, True])
def test_a_number_read_in_a_compiled_function_is_a_hint_or_a_side(capture):
    """`.item()` of a tensor: a number of which the trace knows nothing, and which guards nothing."""
    x, cu = torch.randn(6, 2, 16, requires_grad=True), torch.tensor([0, 2, 6], dtype=torch.int32)

    def attend(x, cu, n):
        hints = {"max_seqlen_q": n.item(), "max_seqlen_k": n.item()}
        dense = rowmax.attention(x[None], x[None], x[None], window=(n.item(), 0))
        return rowmax.attention_varlen(x, x, x, cu, cu, causal=True, **hints) + dense[0]

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=capture):
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        for number in (4, 1):
            n = torch.tensor(number)
            assert torch.equal(*(torch.autograd.grad(call(x, cu, n).square().sum(), x)[0] for call in (compiled, attend)))
        with pytest.raises((rowmax.ProblemError, torch._dynamo.exc.TorchRuntimeError), match="a distance of at least 0"):
            compiled(x, cu, torch.tensor(-1))


def test_compile_packed_makes_one_graph_for_many_batches():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(packed_step, fullgraph=True, dynamic=True, backend=counter)
    torch._dynamo.reset()
    for seed, (batch, total) in enumerate(((3, 20), (4, 27), (5, 40), (2, 33))):
        problem = Problem.parse(f"b{batch} h4/2 q{total} k{total} d16 fp32 packed")
        operands = testing.operands(problem, seed=seed)
        torch.testing.assert_close(compiled(*operands[:5]), packed_step(*operands[:5]))
    assert counter.frame_count <= 2


def test_compile_shares_a_graph_between_windows():
    """Window sizes are numbers of the call, not parts of the graph."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(
        lambda q, w: rowmax.attention(q, q, q, window=(w, 0)), fullgraph=True, dynamic=True, backend=counter
    )
    torch._dynamo.reset()
    q = torch.randn(1, 30, 2, 16)
    for window in (3, 5, 9, 12):
        torch.testing.assert_close(compiled(q, window), rowmax.attention(q, q, q, window=(window, 0)))
    assert counter.frame_count <= 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU")
def test_inductor():
    torch._dynamo.reset()
    inputs = [torch.randn(1, 9, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    compiled = torch.compile(step, fullgraph=True)
    grads = torch.autograd.grad(sum(compiled(*inputs)), inputs)
    want = torch.autograd.grad(sum(step(*inputs)), inputs)
    for grad, other in zip(grads, want, strict=True):
        torch.testing.assert_close(grad, other)


def test_validation_errors_survive_compilation():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k: rowmax.attention(q, k, k), backend="eager")
    with pytest.raises(Exception, match="multiple of KV heads"):
        compiled(torch.randn(1, 4, 3, 8), torch.randn(1, 4, 2, 8))


# ---- autocast, checkpointing, modes --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_converts_mixed_types_and_gradients_come_back_in_their_own(dtype, backend, device):
    q = torch.randn(1, 6, 4, 16, device=device, requires_grad=True)
    k = torch.randn(1, 6, 2, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    v = torch.randn(1, 6, 2, 16, device=device, dtype=torch.float16, requires_grad=True)
    try:
        with torch.autocast(device, dtype):
            out, lse = rowmax.attention(q, k, v, causal=True, return_lse=True, plan=backend)
            (out.sum() + lse.sum()).backward()
    except rowmax.Unsupported as refused:
        pytest.skip(str(refused))
    want = rowmax.attention(*(t.detach().to(dtype) for t in (q, k, v)), causal=True, plan=backend)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out, want, rtol=0, atol=0)
    assert [t.grad.dtype for t in (q, k, v)] == [torch.float32, torch.bfloat16, torch.float16]


def test_autocast_leaves_fp64_alone():
    q = torch.randn(1, 3, 2, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert rowmax.attention(q, q, q).dtype == torch.float64


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(reentrant):
    inputs = [torch.randn(1, 9, heads, 16, requires_grad=True) for heads in (4, 2, 2)]

    def block(q, k, v):
        return rowmax.attention(q, k, v, causal=True).sin()

    want = torch.autograd.grad(block(*inputs).sum(), inputs)
    checkpoint(block, *inputs, use_reentrant=reentrant).sum().backward()
    for t, grad in zip(inputs, want, strict=True):
        assert torch.equal(t.grad, grad)


def test_selective_checkpointing_may_save_or_recompute_the_operator():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    inputs = [torch.randn(1, 9, heads, 16, requires_grad=True) for heads in (4, 2, 2)]

    def block(q, k, v):
        return rowmax.attention(q.sin(), k, v, causal=True).sin()

    want = torch.autograd.grad(block(*inputs).sum(), inputs)
    for choice in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE):

        def policy(_context, operator, *_, choice=choice, **__):
            return choice if operator == FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

        def contexts(policy=policy):
            return create_selective_checkpoint_contexts(policy)

        out = checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts)
        for grad, other in zip(torch.autograd.grad(out.sum(), inputs), want, strict=True):
            assert torch.equal(grad, other)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(mode):
    q = torch.randn(1, 5, 2, 8, requires_grad=True)
    with mode():
        out = rowmax.attention(q, q, q)
    assert not out.requires_grad
    torch.testing.assert_close(out, rowmax.attention(q, q, q).detach())


def test_the_default_dtype_and_device_of_torch_change_nothing():
    q = torch.randn(1, 5, 2, 8)
    want, want_lse = rowmax.attention(q, q, q, return_lse=True)
    try:
        torch.set_default_dtype(torch.float64)
        out, lse = rowmax.attention(q, q, q, return_lse=True)
        with torch.device("meta"):
            again = rowmax.attention(q, q, q)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    assert lse.dtype == torch.float32
    assert torch.equal(again, want)


# ---- FLOPs and derivatives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["b2 h4/2 q5 k7 d16 fp32 causal", "b1 h2 q9 k6 d8/24 fp32 window(3,1)", "b3 h4 q8 k8 d16 fp32"]
)
def test_flop_counter(text):
    problem = Problem.parse(text)
    operands = testing.operands(problem)
    leaves = [t.requires_grad_() for t in operands[:3]]
    pairs = visible_pairs(problem.len_q, problem.len_k, problem.band) * problem.batch * problem.heads_q
    with FlopCounterMode(display=False) as counter:
        out, _ = testing.attend(problem, operands._replace(**dict(zip("qkv", leaves, strict=True))))
    assert counter.get_total_flops() == 2 * pairs * (problem.dim_qk + problem.dim_v)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (3 * problem.dim_qk + 2 * problem.dim_v)


def test_flops_of_equal_dims_are_four_and_ten_per_pair_and_dimension():
    problem = Problem.parse("b2 h4 q16 k16 d32 fp32 causal")
    q, k, v = (t.requires_grad_() for t in testing.operands(problem)[:3])
    pairs = 2 * 4 * 16 * 17 // 2
    with FlopCounterMode(display=False) as counter:
        rowmax.attention(q, k, v, causal=True).sum().backward()
    assert counter.get_total_flops() == (4 + 10) * pairs * 32


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("text", ["b1 h2/1 q9 k12 d16 fp32 causal", "b3 h2/1 q14 k14 d16 fp16 packed window(3,0)"])
def test_any_subset_of_inputs_may_need_a_gradient(text, needed, backend, device):
    """The same gradients as when all need one, bit for bit, and None for the others."""
    problem = Problem.parse(text)
    operands = testing.operands(problem, device=device)
    grad_out, grad_lse = testing.cotangents(problem, device=device)
    try:
        rowmax.plan(problem, rowmax.Device.of(operands.q), prefer=backend)
    except rowmax.Unsupported as refused:
        pytest.skip(str(refused))

    def gradients(which):
        leaves = [t.detach().requires_grad_(i in which) for i, t in enumerate(operands[:3])]
        results = testing.attend(problem, operands._replace(q=leaves[0], k=leaves[1], v=leaves[2]), backend)
        torch.autograd.backward(results, (grad_out, grad_lse))
        return [t.grad for t in leaves]

    every = gradients((0, 1, 2))
    for i, grad in enumerate(gradients(needed)):
        if i in needed:
            assert torch.equal(grad, every[i])
        else:
            assert grad is None


@pytest.mark.parametrize("text", ["b2 h4/2 q9 k12 d16 fp32 causal", "b1 h2 q9 k9 d16 fp32"])
def test_either_result_alone_carries_its_gradient(text, backend, device):
    """A loss of the LSE alone gives dV = 0 and what the definition gives for q and k; never a silent 0 for all."""
    problem = Problem.parse(text)
    operands = testing.operands(problem, device=device)
    grad_out, grad_lse = testing.cotangents(problem, device=device)
    try:
        rowmax.plan(problem, rowmax.Device.of(operands.q), prefer=backend)
    except rowmax.Unsupported as refused:
        pytest.skip(str(refused))
    leaves = [t.detach().requires_grad_() for t in operands[:3]]
    for given in ((grad_out, None), (None, grad_lse)):
        results = testing.attend(problem, operands._replace(q=leaves[0], k=leaves[1], v=leaves[2]), backend)
        pairs = [(r, g) for r, g in zip(results, given, strict=True) if g is not None]
        grads = torch.autograd.grad([r for r, _ in pairs], leaves, [g for _, g in pairs])
        report = testing.check_backward(problem, operands, grads, *given)
        assert report.ok, str(report)
        if given[0] is None:
            assert bool((grads[2] == 0).all())


@pytest.mark.parametrize("text", ["b1 h2 q4 k6 d3 fp64 causal", "b1 h4/2 q5 k3 d2/4 fp64 window(1,1)"])
def test_gradcheck(text):
    """Finite differences of the CPU path in fp64, through both results."""
    problem = Problem.parse(text)
    operands = testing.operands(problem)
    leaves = tuple(t.requires_grad_() for t in operands[:3])

    def call(q, k, v):
        out, lse = testing.attend(problem, operands._replace(q=q, k=k, v=v), "tiled")
        return out, torch.where(torch.isneginf(lse), 0.0, lse)

    assert torch.autograd.gradcheck(call, leaves)


def test_gradcheck_packed():
    problem = Problem.parse("b3 h2 q7 k8 d3 fp64 packed causal")
    operands = testing.operands(problem, lengths=((2, 3), (0, 1), (4, 4)))
    leaves = tuple(t.requires_grad_() for t in operands[:3])
    assert torch.autograd.gradcheck(lambda q, k, v: testing.attend(problem, operands._replace(q=q, k=k, v=v))[0], leaves)
