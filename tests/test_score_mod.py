"""Functions of scores through the public call: what they equal, that two of one name stay apart, and what is refused.

That their numbers are right on every backend is the family "mods" of `cases.py`; the functions are in `score_mods.py`.
"""

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing
import triton
import triton.language as tl

import rowmax
import score_mods
from rowmax import Problem, ProblemError, Unsupported, testing
from rowmax.ops_masked import BACKWARD_MASKED, FORWARD_MASKED


def random_call(dtype=torch.float64, lengths=(9, 12), heads=(4, 2), batch=2):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, lengths[0], heads[0], 16), *((batch, lengths[1], heads[1], 16),) * 2)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def results(inputs, **options):
    out, lse = rowmax.attention(*inputs, return_lse=True, **options)
    return (out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), inputs))


def runs(backend, mod):
    try:
        problem = Problem.parse(f"b2 h4/2 q9 k12 d16 fp32 mod({mod.key})")
        return rowmax.plan(problem, rowmax.Device.of(torch.empty(0)), prefer=backend).algorithm == backend
    except Unsupported:
        return False


# ---- what they equal -----------------------------------------------------------------------------------------------


def test_a_cap_of_ones_own_is_the_softcap(backend, device):
    if not runs(backend, score_mods.CAP):
        pytest.skip(f"{backend} calls no score_mod")
    inputs = [t.to(device).requires_grad_() for t in random_call(torch.float32)]
    same = [
        results(inputs, causal=True, plan=backend, **what) for what in ({"score_mod": score_mods.CAP(1.5)}, {"softcap": 1.5})
    ]
    for one, other in zip(*same, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


def test_a_number_is_a_tensor_of_equal_ones():
    inputs = [t.requires_grad_() for t in random_call()]
    same = [
        results(inputs, score_mod=score_mods.DISTANCE(number)) for number in (0.5, torch.tensor(0.5), torch.full((4,), 0.5))
    ]
    assert all(torch.equal(a, b) for other in same[1:] for a, b in zip(same[0], other, strict=True))


def test_the_last_query_of_a_sequence_alone_is_its_last_row():
    """A row is counted as keys are, so that decoding agrees with the whole."""
    q, k, v = random_call(lengths=(12, 12))
    whole = rowmax.attention(q, k, v, causal=True, score_mod=score_mods.EVERYTHING(1.0, 0.5))
    last = rowmax.attention(q[:, -1:], k, v, causal=True, score_mod=score_mods.EVERYTHING(1.0, 0.5))
    torch.testing.assert_close(last[:, 0], whole[:, -1])


def test_what_it_makes_of_hidden_pairs_has_no_effect(backend, device):
    """NaN, as value and as derivative."""
    if not runs(backend, score_mods.ROOT):
        pytest.skip(f"{backend} calls no score_mod")
    mask = torch.rand(2, 1, 9, 12, generator=torch.Generator().manual_seed(1)).to(device) < 0.7
    inputs = [t.to(device).requires_grad_() for t in random_call(torch.float32)]
    options = ({"causal": True}, {"causal": True, "mask": mask}, {"mask": mask.tril(3)})
    for option in options:
        pair = [results(inputs, plan=backend, score_mod=mod(0.5), **option) for mod in (score_mods.ROOT, score_mods.SAFE_ROOT)]
        assert all(torch.equal(one, other) for one, other in zip(*pair, strict=True)), option


def test_gradcheck():
    problem = Problem.parse("b2 h2/1 q3 k5 d3 fp64 causal softcap=1.5 alibi sink bias(qk) mod(everything)")
    operands = testing.operands(problem)
    names = ("q", "k", "v", "sink", "bias")
    leaves = tuple(getattr(operands._replace(bias=torch.randn_like(operands.bias)), name).clone() for name in names)

    def call(*leaves):
        return testing.attend(problem, operands._replace(**dict(zip(names, leaves, strict=True))), "tiled")

    assert torch.autograd.gradcheck(call, tuple(t.requires_grad_() for t in leaves))


def test_a_derivative_that_is_given_is_taken():
    def double(score, batch, head, row, col):
        return score * 2

    wrong = rowmax.ScoreMod(name="doubled", reference=double, derivative=lambda score, batch, head, row, col: score * 0)
    q, k, v = (t.requires_grad_() for t in random_call())
    dq, dk = torch.autograd.grad(rowmax.attention(q, k, v, score_mod=wrong).sin().sum(), (q, k))
    assert not dq.any()
    assert not dk.any()


# ---- one name, one function ----------------------------------------------------------------------------------------


@triton.jit
def _twice(score, batch, head, row, col):
    return score * 2.0


@triton.jit
def _thrice(score, batch, head, row, col):
    return score * 3.0


@triton.jit
def _two(score, batch, head, row, col):
    return 2.0


def test_two_mods_of_one_name_stay_apart(backend, device):
    """Nor do the launches that are kept mix them up; and the same functions again are the same mod."""
    makers = [
        rowmax.ScoreMod(_twice, _two, name="twin", reference=lambda score, batch, head, row, col: score * 2),
        rowmax.ScoreMod(_thrice, _two, name="twin", reference=lambda score, batch, head, row, col: score * 3),
    ]
    assert makers[0].key != makers[1].key
    again = rowmax.ScoreMod(_twice, _two, name="twin", reference=makers[0].reference)
    assert again.key == makers[0].key
    if not runs(backend, again):
        pytest.skip(f"{backend} calls no score_mod")
    q, k, v = (t.to(device) for t in random_call(torch.float32))
    for _ in range(2):
        for mod, factor in zip(makers, (2, 3), strict=True):
            got = rowmax.attention(q, k, v, score_mod=mod, plan=backend)
            torch.testing.assert_close(got, rowmax.attention(q * factor, k, v, plan=backend))


def test_a_problem_spells_its_mod():
    problem = Problem.parse("b2 h4 q8 k9 d16 bf16 mod(everything)")
    assert Problem.parse(str(problem)) == problem
    assert not problem.plain
    assert problem != problem.with_(score_mod="distance")
    plan = rowmax.plan(problem, rowmax.Device.named("H200"))
    assert plan.algorithm == "q_outer"
    others = ("hopper", "split_kv", "warp_split", "kv_outer", "dense")
    why = dict(rowmax.plan(problem.with_(len_q=1, len_k=4096), rowmax.Device.named("H200")).refusals)
    assert all("score_mod" in why[name] or "plain scores" in why[name] for name in others if name in why)
    assert "split_kv" in why
    for prefer in others:
        with pytest.raises(Unsupported):
            rowmax.plan(problem, rowmax.Device.named("H200"), prefer=prefer)


# ---- operators -----------------------------------------------------------------------------------------------------


def test_opcheck():
    problem = Problem.parse("b2 h4/2 q9 k12 d16 fp32 causal mod(everything)")
    operands = testing.operands(problem)
    numbers = (None, None, problem.scale, None, 0, False, "", 0.0, 0.0, "everything")
    leaves = (*(t.detach().requires_grad_() for t in operands[:3]), *operands[3:])
    torch.library.opcheck(FORWARD_MASKED, (True, *leaves, *numbers))
    call = (
        (True, True, True, False, False),
        *testing.cotangents(problem),
        *testing.attend(problem, operands),
        *operands,
        *numbers,
    )
    torch.library.opcheck(BACKWARD_MASKED, call, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


def test_compile_makes_one_graph():
    def step(q, k, v):
        return rowmax.attention(q * 2, k, v, causal=True, score_mod=score_mods.DISTANCE(0.5)).sin().sum()

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    torch._dynamo.reset()
    for length in (5, 8, 13):
        inputs = [t.requires_grad_() for t in random_call(torch.float32, lengths=(length, length))]
        pairs = zip(torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(step(*inputs), inputs), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other)
    assert counter.frame_count <= 2


# ---- errors --------------------------------------------------------------------------------------------------------


def in_torch(score, batch, head, row, col, strength):
    return score * strength


IN_TORCH = rowmax.ScoreMod(name="in_torch", reference=in_torch)
ON_GPU = rowmax.ScoreMod(_twice, name="on_gpu")

WRONG_CALLS = {
    r"takes 1 \(strength\) behind score, batch, head, row, col; got 0 numbers": IN_TORCH,
    r"must be a number or a floating point tensor \[Hq\], here \[4\]; got \[2\]": IN_TORCH(torch.ones(2)),
    r"must be a number or a tensor \[Hq\]; got str": IN_TORCH("0.5"),
    "is on meta and q on cpu": IN_TORCH(torch.ones(4, device="meta")),
    "Make one of it: rowmax.ScoreMod": in_torch,
    "must give one number for each score": rowmax.ScoreMod(name="sums", reference=lambda score, b, h, i, j: score[..., :2]),
    "must give a tensor; got float": rowmax.ScoreMod(name="none", reference=lambda score, b, h, i, j: 1.0),
}


@pytest.mark.parametrize(("words", "mod"), WRONG_CALLS.items(), ids=WRONG_CALLS)
def test_a_wrong_call_says_what_is_wrong(words, mod):
    with pytest.raises(ProblemError, match=words):
        rowmax.attention(*random_call(), score_mod=mod)


WRONG_MODS = {
    "must be an identifier": {"name": "my mod", "reference": in_torch},
    "needs forward": {"name": "nothing"},
    "must be a function decorated with @triton.jit; got function": {"name": "swapped", "forward": in_torch},
    "must be a function of torch tensors": {"name": "swapped", "reference": _twice},
    "derivative of a function that it has not": {"name": "half", "backward": _two, "reference": in_torch},
    r"must take the same numbers; got \(\) and \(strength\)": {"name": "uneven", "forward": _twice, "reference": in_torch},
    "each number by a name of its own": {"name": "stars", "reference": lambda score, batch, head, row, col, *numbers: score},
}


@pytest.mark.parametrize(("words", "given"), WRONG_MODS.items(), ids=WRONG_MODS)
def test_a_wrong_mod_says_what_is_wrong(words, given):
    with pytest.raises(ProblemError, match=words):
        rowmax.ScoreMod(**given)


def test_functions_that_triton_takes_for_one_are_refused():
    def make(factor: tl.constexpr):
        @triton.jit
        def function(score, batch, head, row, col):
            return score * factor

        return function

    with pytest.raises(ProblemError, match="give them different names"):
        rowmax.ScoreMod(make(2), make(3), name="alike")


def test_what_is_not_there_is_refused_where_it_is_needed():
    q, k, v = random_call(torch.float32)
    with pytest.raises(Unsupported, match="without reference=, the function that the CPU calls"):
        rowmax.attention(q, k, v, score_mod=ON_GPU, plan="tiled")
    gpu = rowmax.Device.named("H200")
    with pytest.raises(Unsupported, match="without forward=, the function that kernels call"):
        rowmax.plan(Problem.parse("b1 h4 q9 k9 d16 bf16 mod(in_torch)"), gpu)
    with pytest.raises(Unsupported, match="without backward=, the function that its gradients need"):
        rowmax.plan(Problem.parse("b1 h4 q9 k9 d16 bf16 mod(on_gpu)"), gpu, direction="backward")
    with pytest.raises(Unsupported, match="no score_mod 'unheard_of' was made in this process"):
        rowmax.plan(Problem.parse("b1 h4 q9 k9 d16 bf16 mod(unheard_of)"), gpu)
    with pytest.raises(NotImplementedError, match=r"pass strength\.detach"):
        rowmax.attention(q, k, v, score_mod=IN_TORCH(torch.ones(4, requires_grad=True)))
    with pytest.raises(ProblemError, match="come without a score_mod"):
        rowmax.attention(q, k, v, score_mod=IN_TORCH(1.0), seqlens_k=torch.tensor([3, 4]))
    with pytest.raises(TypeError, match="in each process"):
        pickle.dumps(IN_TORCH)
    assert copy.deepcopy(IN_TORCH(2.0)) == IN_TORCH(2.0)
