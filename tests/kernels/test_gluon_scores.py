"""Soft-cap, ALiBi and sink in the Hopper kernels: simulated, mutated, and their PTX run as it is written."""

import os

import numpy as np
import pytest
import torch

from rowmax import Device, Problem, plan, testing

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the second kernel runs in Triton's interpreter", allow_module_level=True)

import simulate
import simulate_backward
from gluon_mutants import DYNAMIC, LAZY, QUEUE, SKIPS, STATIC, STEADY, STEADY_SKIPS, STEADY_THREE, only
from simulate_scores import ptx
from test_gluon_simulation import fails

from rowmax.kernels import hopper_backward, launch, scored_launch
from rowmax.kernels.backward_launch import hopper_backward_calls
from rowmax.kernels.gluon.names import NEAR, NEARER, TANH, TANH_SHORT
from rowmax.plan.hopper import HopperTile
from rowmax.plan.hopper_backward import HopperBackwardTile

CAPPED, SLOPED, ALL = (
    "b1 h2 q100 k140 d64 fp16 causal softcap=8.0",
    "b3 h2 q130 k130 d64 fp16 packed causal alibi(batch)",
    "b1 h4/2 q90 k140 d64 fp16 window(50,9) softcap=5.0 alibi sink",
)
MILD = CAPPED.replace("8.0", "50.0")
UNMASKED = "b1 h2 q128 k256 d64 fp16 causal softcap=4.0"  # but for the first key tile of a consumer
CASES = [
    (UNMASKED, SKIPS, "spiky"),
    (CAPPED, LAZY, "spiky"),  # some warps with large scores, others without
    ("b1 h2 q130 k200 d64 bf16 causal softcap=50.0", SKIPS, "normal"),
    (SLOPED, QUEUE, "normal"),
    (ALL, DYNAMIC, "normal"),
    ("b1 h2 q90 k60 d64 bf16 causal scale=-0.1 softcap=4.0 sink", STATIC, "normal"),
    ("b1 h2 q70 k70 d64 bf16 scale=0.0 alibi sink", QUEUE, "normal"),
    ("b1 h2 q192 k192 d64 bf16 causal alibi sink", SKIPS, "normal"),
    (ALL.replace("window(50,9)", "causal"), QUEUE, "nan(v)"),
    ("b1 h2 q70 k90 d64 bf16 softcap=180.0", LAZY, "shift(-245)"),
    (CAPPED.replace("fp16", "bf16"), STEADY, "spiky"),
    (UNMASKED.replace("fp16", "bf16"), STEADY_SKIPS, "spiky"),
    ("b1 h2 q100 k140 d64 bf16 window(20,3) softcap=40.0", STEADY, "spiky"),
    ("b1 h2 q192 k192 d64 bf16 causal softcap=8.0 alibi sink", STEADY_SKIPS, "spiky"),
    (SLOPED.replace("fp16", "bf16"), STEADY_THREE, "normal"),
]


@pytest.mark.parametrize(("text", "tile", "kind"), CASES)
def test_bent_scores_are_right(text, tile, kind):
    problem = Problem.parse(text)
    operands = testing.operands(problem, kind)
    out, lse, suspect = simulate.forward(problem, operands, HopperTile.parse(tile), late=len(text) % 2 == 0)
    report = testing.check_forward(problem, operands, out, lse)
    assert report.ok, str(report)
    assert bool((suspect == 1).any()) == kind.startswith("nan")


def test_large_scores_that_nobody_sees_change_no_bit():
    """Where a warp holds large ones the cap is computed in another way."""
    problem = Problem.parse("b1 h1 q60 k100 d64 fp16 window(20,0) softcap=9.0")
    operands = testing.operands(problem)
    k = operands.k.clone()
    k[:, :19] *= 300.0
    first, second = (simulate.forward(problem, one, HopperTile.parse(LAZY)) for one in (operands, operands._replace(k=k)))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


# name -> (replacements, problem, tile, kind)
MUTANTS = {
    "no cap": (only("c1 = unit * C1 * square", "c1 = 0 * unit * C1"), CAPPED, LAZY, "normal"),
    "large scores by the polynomial": (only("as_number(largest) * cap", "0 * as_number(largest)"), CAPPED, LAZY, "spiky"),
    "large negative scores by the polynomial": (
        only("sum_of_sizes(left, right)", "sum_of_sizes(gl.maximum(left, left * 0), gl.maximum(right, right * 0))"),
        CAPPED,
        LAZY,
        "shift(-40)",
    ),
    "the long polynomial's bound for the short one": (only("SHORT_BOUND if SHORT else BOUND", "BOUND"), MILD, LAZY, "spiky(4)"),
    "capped scores capped again": (
        only("(warp_where(far, c1, 0.0), warp_where(far, c2, 0.0)", "(warp_where(far, c1, -0.01), warp_where(far, c2, 0.0)"),
        CAPPED,
        LAZY,
        "spiky",
    ),
    "hidden keys are NaN": (only("warp_where(far, c4, LEAST)", "warp_where(far, c4, 0.0)"), CAPPED, LAZY, "spiky"),
    "hidden keys are NaN to the short one": (
        only("warp_where(far, c2, LEAST)", "warp_where(far, c2, 0.0)"),
        MILD,
        LAZY,
        "spiky",
    ),
    "slope of another head": (only("gl.load(slopes_ptr + head)", "gl.load(slopes_ptr + 0 * head)"), SLOPED, QUEUE, "normal"),
    "slopes of the first sequence": (only("slopes_ptr += sequence", "slopes_ptr += 0 * sequence"), SLOPED, QUEUE, "normal"),
    "slopes in units of log2": (only("1.4426950408889634 / unit", "1.4426950408889634"), SLOPED, QUEUE, "normal"),
    "distance from the tile's first row": (
        only("        m = m - slope * gl", "        m = m - 0 * slope * gl"),
        SLOPED,
        QUEUE,
        "normal",
    ),
    "ALiBi from the top left": (only("own = col - shift + 2", "own = col + 2"), ALL, DYNAMIC, "normal"),
    "ALiBi without its sign": (only("slope * gl.abs((rows", "slope * ((rows"), ALL, DYNAMIC, "normal"),
    "no sink": (only("l * alpha + gl.exp2(sink - pivot)", "l * alpha"), ALL, DYNAMIC, "normal"),
    "sink of another head": (only("gl.load(sink_ptr + head)", "gl.load(sink_ptr + 0 * head)"), ALL, DYNAMIC, "normal"),
    "output not scaled for the sink": (only("        inverse = inverse * alpha\n"), ALL, DYNAMIC, "spiky"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_bent_scores_fails(name):
    replacements, text, tile, kind = MUTANTS[name]
    problem = Problem.parse(text)
    assert fails(replacements, problem, testing.operands(problem, kind), tile, False, 2), f"mutant '{name}' lives"


# ---- backward ----------------------------------------------------------------------------------------------------------------

BEHIND, AROUND = (
    "b2 h4/2 q70 k90 d64 fp16 causal alibi(batch)",
    "b3 h4/2 q130 k130 d64 bf16 packed window(40,3) alibi(batch) sink",
)


def backward(text, kind="normal", mutants=()):
    problem, tile = Problem.parse(text), HopperBackwardTile.parse("128x128 s2 backward")
    operands = testing.operands(problem, kind)
    out, lse = testing.attend(problem, operands)
    cotangents = testing.cotangents(problem)
    given = (problem, operands, tile, out, lse, *cotangents)
    *grads, _suspect = simulate_backward.backward(*given, mutants=mutants)
    if problem.sink:  # its kernels know nothing of it: the LSE does; its own gradient is of the rows that they were given
        calls = hopper_backward_calls(*given, *map(torch.empty_like, operands[:3]))
        launch._launch(out.device, calls[0])
        rows = hopper_backward._rows(problem, hopper_backward.handed_on(calls))
        grads.append(scored_launch.sink_gradient(operands.sink, *rows))
    return testing.check_backward(problem, operands, grads, *cotangents, out)


@pytest.mark.parametrize("text", [BEHIND, AROUND, "b2 h4/2 q70 k90 d64 fp16 causal sink"])
def test_the_backward_of_bent_scores_is_right(text):
    report = backward(text)
    assert report.ok, str(report)


BACKWARD_MUTANTS = {
    "slope of the first head": (only("notes.index(NOTES + turn % BUILD.GROUP)", "notes.index(NOTES)"), BEHIND),
    "slopes of the first KV head": (only("head * BUILD.GROUP + member)", "member)"), BEHIND),
    "slopes of the first sequence": (only("(b + sequence).to", "(0 * b).to"), AROUND),
    "ALiBi from the top left": (only("keys = col - shift - row", "keys = col - row"), BEHIND),
    "keys of the first consumer": (only("COL) + CONSUMER * KEYS\n            shift", "COL)\n            shift"), BEHIND),
}


@pytest.mark.parametrize("name", BACKWARD_MUTANTS)
def test_a_mutant_of_the_backward_fails(name):
    replacements, text = BACKWARD_MUTANTS[name]
    assert not backward(text, mutants=replacements).ok, f"mutant '{name}' lives"


# ---- PTX ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [0.5, 8.0, 50.0, 180.0])
def test_the_cap_is_within_the_budget(cap):
    """Of the score by 2.4e-7, 4 2^-24, of which the error budget allows as much for the rounding of the product."""
    scale = 128**-0.5
    factor = scale / cap
    x = np.concatenate(
        [np.linspace(-3, 3, 150), np.linspace(-0.2, 0.2, 20), [0.0, 1e-30, NEAR, -NEAR, 30.0, -1e9, np.inf, -np.inf]]
    )
    s = np.float32(x / factor)
    wide = np.float64(s) * np.float64(np.float32(factor))
    exact = np.tanh(wide) / np.float64(np.float32(factor))
    far = ptx("tanh_where", s, np.float32(1), np.float32(factor), count=len(s))
    assert np.all(np.abs(far - exact) <= 2.0**-22 * np.minimum(np.abs(np.float64(s)), 1.5 / factor))
    assert np.array_equal(ptx("tanh_where", s, np.float32(0), np.float32(factor), count=len(s)), s)
    # Behind it, with the factors of the GPU: none for capped scores, and the polynomials of small ones.
    unit, square = np.float32(scale * 1.4426950408889634), np.float32(factor) ** 2
    hidden = np.float32([-np.inf, -1.0, 0.0, 1.0])
    for factors, given in (
        ((0.0, 0.0, 0.0, 2.0**-126), np.float32(far)),
        ((0.0, 2.0**-126), np.float32(far)),
        (tuple(unit * np.float32(c) * square**i for i, c in enumerate(TANH, 1)), s[np.abs(wide) < NEAR]),
        (tuple(unit * np.float32(c) * square**i for i, c in enumerate(TANH_SHORT, 1)), s[np.abs(wide) < NEARER]),
    ):
        assert len(given) > 15
        least = ptx("exp2_of_odd", hidden, unit, factors, np.float32(0))
        assert least[0] == 0.0, "a hidden key has no weight"
        for one in given:
            wide = np.float64(one)
            wanted = unit * (wide if factors[0] == 0.0 else np.tanh(wide * np.float32(factor)) / np.float32(factor))
            found = ptx("exp2_of_odd", np.repeat(one, 4), unit, factors, np.float32(wanted))[0]
            assert abs(np.log2(np.float64(found)) + np.float32(wanted) - wanted) <= 2.0**-22 * abs(wide * unit) + 2e-7


def test_a_warp_decides_as_one():
    for pair, above in (
        ((0.1, 0.2), 0.0),
        ((0.61, 0.2), 1.0),
        ((0.2, 0.7), 1.0),
        ((np.nan, 0.2), 1.0),
        ((0.2, np.nan), 1.0),
        ((np.inf, 0), 1.0),
    ):
        assert ptx("any_above", np.float32(pair), 0.6).tolist() == [above] * 2
    assert ptx("warp_where", np.float32([1, 1]), np.float32(3.0), 0.25).tolist() == [0.25] * 2
    assert ptx("warp_where", np.float32([0, 0]), np.float32(3.0), 0.25).tolist() == [3.0] * 2


# ---- plan --------------------------------------------------------------------------------------------------------------------


def test_the_plan_takes_hopper_for_bent_scores():
    device = Device.named("H200")

    def chosen(text, direction="forward"):
        return plan(Problem.parse(f"b1 h16 q4096 k4096 d128 {text}"), device, direction=direction)

    for text in ("softcap=50.0", "alibi", "alibi(batch) sink", "softcap=30.0 sink", "packed softcap=50.0", "dropout=0.1"):
        assert chosen(f"bf16 causal {text}").algorithm == "hopper"
    for text, reason in (
        ("bf16 softcap=100000.0", "range of fp32"),
        ("fp32 softcap=50.0", "fp16 and bf16"),
    ):
        other = chosen(text)
        assert other.algorithm == "q_outer"
        assert reason in dict(other.refusals)["hopper"]
