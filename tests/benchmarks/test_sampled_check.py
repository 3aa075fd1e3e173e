"""The benchmark's check has the power to see small mistakes in large problems, and accepts what is right."""

import pytest
import torch

import rowmax
from calls import make_operands
from check import Check
from rowmax import reference, testing
from rowmax.problem import Problem

PROBLEMS = (
    "b1 h4/2 q300 k300 d64 bf16 causal",
    "b2 h2 q130 k200 d32/48 fp16",
    "b1 h2 q100 k260 d64 fp32 causal",
    "b1 h2 q256 k256 d32 bf16 window(31,0)",
    "b4 h2 q200 k200 d32 bf16 causal packed maxq90 maxk90",
)


def _truth(problem, operands, grad_out, **changes):
    """`(out, dq, dk, dv)` of the definition in fp64, rounded once to the storage type; `changes` make it wrong."""
    leaves = [t.double().requires_grad_() for t in operands[:3]]
    common = {"left": problem.band.left, "right": problem.band.right, "scale": problem.scale, **changes}
    if problem.packed:
        out, _ = reference.attention_varlen(*leaves, *operands[3:5], **common)
    else:
        out, _ = reference.attention(*leaves, **common)
    grads = torch.autograd.grad(out, leaves, grad_out.double())
    return tuple(t.detach().to(problem.dtype) for t in (out, *grads))


def _checks(problem, seed=0):
    operands, grad_out = make_operands(problem, torch.device("cpu"), seed)
    return operands, grad_out, Check(problem, operands), Check(problem, operands, grad_out)


@pytest.mark.parametrize("spelling", PROBLEMS)
def test_right_results_pass(spelling):
    problem = Problem.parse(spelling)
    operands, grad_out, forward, backward = _checks(problem)
    out, *grads = _truth(problem, operands, grad_out)
    assert forward.broken((out,)) == []
    assert backward.broken(grads) == []


@pytest.mark.parametrize("spelling", PROBLEMS)
def test_our_results_pass(spelling):
    problem = Problem.parse(spelling)
    operands, grad_out, forward, backward = _checks(problem, seed=1)
    leaves = [t.clone().requires_grad_() for t in operands[:3]]
    common = {"window": tuple(problem.band), "scale": problem.scale}
    if problem.packed:
        out = rowmax.attention_varlen(*leaves, *operands[3:5], **common)
    else:
        out = rowmax.attention(*leaves, **common)
    assert forward.broken((out,)) == []
    assert backward.broken(torch.autograd.grad(out, leaves, grad_out)) == []


@pytest.mark.parametrize("spelling", PROBLEMS)
def test_a_scale_off_by_one_percent_is_seen(spelling):
    problem = Problem.parse(spelling)
    operands, grad_out, forward, backward = _checks(problem)
    out, *grads = _truth(problem, operands, grad_out, scale=problem.scale * 1.01)
    assert forward.broken((out,))
    assert backward.broken(grads)


def test_one_key_too_many_or_too_few_is_seen():
    problem = Problem.parse("b1 h2 q256 k256 d32 bf16 window(31,0)")
    operands, grad_out, forward, backward = _checks(problem)
    for changes in ({"right": 1}, {"left": 30}, {"left": 32}):
        out, *grads = _truth(problem, operands, grad_out, **changes)
        assert forward.broken((out,)), changes
        assert backward.broken(grads), changes


def test_what_a_sample_could_miss_is_covered():
    """First and last rows and keys are always in the sample, and every element must be finite."""
    problem = Problem.parse("b1 h2 q3000 k3000 d16 bf16 causal")
    operands, grad_out, forward, backward = _checks(problem)
    out, *grads = _truth(problem, operands, grad_out)
    spoiled = out.clone()
    spoiled[:, -1] = 0
    assert forward.broken((spoiled,))
    spoiled = out.clone()
    spoiled[0, 1234, 1, 7] = torch.nan
    assert "NaN" in forward.broken((spoiled,))[0]
    for i in range(3):
        wrong = [grad.clone() for grad in grads]
        wrong[i][:, -1] = 0
        assert backward.broken(wrong), i


@pytest.mark.parametrize("i", range(3))
def test_a_head_that_gets_another_heads_gradient_is_seen(i):
    problem = Problem.parse("b1 h4/2 q300 k300 d64 bf16 causal")
    operands, grad_out, _, backward = _checks(problem)
    _, *grads = _truth(problem, operands, grad_out)
    grads[i] = grads[i].roll(1, 2)
    assert backward.broken(grads)


def test_gradients_that_were_not_asked_for_are_skipped():
    problem = Problem.parse(PROBLEMS[0])
    operands, grad_out, _, backward = _checks(problem)
    _, dq, _, _ = _truth(problem, operands, grad_out)
    assert backward.broken((dq, None, None)) == []


BENT = "b1 h4/2 q200 k220 d32 {} causal softcap=4.0 alibi sink bias(hqk) mask(qk) dropout=0.2"


def _bent_gradients(problem, operands, grad_out):
    """`(out, gradients)` of rowmax, as a sink and a bias have them too."""
    leaves = [operands[at].clone().requires_grad_() for at in (0, 1, 2, 6, 7)]
    own = operands._replace(**dict(zip(("q", "k", "v", "sink", "bias"), leaves, strict=True)))
    out = testing.attend(problem, own, return_lse=False)
    return out.detach(), torch.autograd.grad(out, leaves, grad_out)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_everything_that_bends_scores_is_checked(dtype):
    """Right results pass, and those of operands that differ a little are seen, in each of their gradients."""
    problem = Problem.parse(BENT.format(dtype))
    operands, grad_out, forward, backward = _checks(problem)
    out, grads = _bent_gradients(problem, operands, grad_out)
    assert forward.broken((out,)) == []
    assert backward.broken(grads) == []
    for name, changed in {
        "slopes": operands.slopes * 1.05,
        "sink": operands.sink + 0.1,
        "bias": operands.bias.roll(1, 3),
        "mask": operands.mask.roll(1, 3),
        "seed": operands.seed + 1,
    }.items():
        wrong, wrong_grads = _bent_gradients(problem, operands._replace(**{name: changed}), grad_out)
        assert forward.broken((wrong,)), name
        said = " ".join(backward.broken(wrong_grads))
        assert all(f"{gradient}:" in said for gradient in ("dq", "dk", "dv", "dbias")), (name, said)
        if name == "sink" and dtype == "fp32":  # in 16 bits a sum over rows may be off by more
            assert "dsink:" in said
    wrong, wrong_grads = _bent_gradients(problem.with_(softcap=4.2), operands, grad_out)
    assert forward.broken((wrong,))
    assert backward.broken(wrong_grads)
    assert backward.broken((*grads[:3], grads[3].roll(1), grads[4]))[0].startswith("dsink")
    assert backward.broken((*grads[:4], grads[4].roll(1, 1)))[0].startswith("dbias")
