"""The Hopper forward without maxima in its loop (`STEADY` in `softmax.py`): simulated, mutated, and its PTX run as written."""

import os

import numpy as np
import pytest
import torch

from rowmax import Problem, testing
from rowmax.plan import hopper

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the second kernel runs in Triton's interpreter", allow_module_level=True)

import simulate
import simulate_scores
from gluon_mutants import STEADY, STEADY_SKIPS, STEADY_THREE, only
from test_gluon_simulation import fails

from rowmax.kernels.gluon.softmax import HEADROOM, SETTLED
from rowmax.plan.hopper import HopperTile

FULL, CAUSAL, WINDOW = "b1 h2 q90 k200 d64 bf16", "b1 h2 q128 k256 d64 bf16 causal", "b1 h2 q150 k290 d64 bf16 window(40,3)"
CASES = [
    (FULL, STEADY, "normal", False),
    (CAUSAL, STEADY_SKIPS, "spiky", False),
    ("b2 h2 q300 k60 d64 bf16 causal sink", STEADY, "normal", False),  # rows that see nothing
    ("b1 h2 q70 k161 d64 bf16 causal", STEADY, "normal", False),  # the first row sees whole key tiles only
    (WINDOW, STEADY_THREE, "normal", False),
    (WINDOW, STEADY, "shift(-200)", False),
    ("b1 h4/2 q300 k428 d64 bf16 causal", STEADY_THREE, "shift(120)", False),
    ("b5 h4/2 q330 k330 d64 bf16 packed causal", STEADY, "spiky", False),
    ("b4 h2 q300 k200 d64 bf16 packed causal", STEADY_THREE, "normal", False),
    (CAUSAL.replace("causal", "scale=-0.1"), STEADY_SKIPS, "spiky", False),
    (CAUSAL + " dropout=0.3", STEADY_SKIPS, "normal", False),
    (CAUSAL.replace("bf16", "fp16"), STEADY_SKIPS, "spiky", False),  # lazy
    (CAUSAL, STEADY_SKIPS, "constant(133120)", True),
    (CAUSAL, STEADY_SKIPS, "inf(v)", True),
]


@pytest.mark.parametrize(("text", "tile", "kind", "twice"), CASES)
def test_first_maxima_are_enough(text, tile, kind, twice):
    problem = Problem.parse(text)
    operands = testing.operands(problem, kind)
    out, lse, suspect = simulate.forward(problem, operands, HopperTile.parse(tile), late=len(text) % 2 == 0)
    report = testing.check_forward(problem, operands, out, lse)
    assert report.ok, str(report)
    assert bool((suspect == 1).any()) == twice


def rising(text: str, step: float, v: float = 1.0):
    """Scores that grow by so much from one key tile of 64 to the one met after it, in units of log2."""
    problem = Problem.parse(text)
    operands = testing.operands(problem)
    q, k = 0.2 * operands.q.float(), 0.2 * operands.k.float()
    q[..., :32] += 1.0
    k[..., :32] += (-torch.arange(problem.len_k) * (step / 64 * 0.6931 / (32 * problem.scale))).view(1, -1, 1, 1)
    return problem, operands._replace(q=q.bfloat16(), k=k.bfloat16(), v=operands.v * v)


@pytest.mark.parametrize(
    ("text", "step", "v", "twice"),
    [
        (CAUSAL, 20.0, 1.0, False),  # l passes the bound after some tiles
        (FULL, 60.0, 1.0, False),  # in every tile
        (WINDOW, 60.0, 1.0, False),
        (FULL, 100.0, 1e30, True),  # O exceeds fp32
        (CAUSAL, 110.0, 1.0, False),
        (CAUSAL, 190.0, 1.0, True),  # a weight does
        (FULL, -150.0, 1.0, False),
    ],
)
def test_scores_that_rise_from_tile_to_tile(text, step, v, twice):
    problem, operands = rising(text, step, v)
    out, lse, suspect = simulate.forward(problem, operands, HopperTile.parse(STEADY_SKIPS))
    report = testing.check_forward(problem, operands, out, lse)
    assert report.ok, str(report)
    assert bool((suspect == 1).any()) == twice


SETTLES = "l, m, alpha = settled(l, m, SETTLED, HEADROOM)"
SCALES, FINDS = "parts, factor, BUILD.BLOCK_DV // 2)", "gl.where(m == LOWEST, steady_pivot(gl.max(tops, 1), m, above), m)"
# name -> (replacements, problem, what scores rise by, tile)
MUTANTS = {
    "sums are never settled": (only(SETTLES, "alpha = l * 0 + 1"), CAUSAL, 60.0, STEADY_SKIPS),
    "O is not scaled": (only(SCALES, SCALES.replace("factor", "factor * 0 + 1")), CAUSAL, 60.0, STEADY_SKIPS),
    "pivots stay": (only(SETTLES, SETTLES.replace("l, m, alpha", "l, _, alpha")), CAUSAL, 60.0, STEADY_SKIPS),
    "infinite sums are right": (
        only(' | (total == float("inf"))', "", "total - total != 0.0", "total != total"),
        CAUSAL,
        190.0,
        STEADY_SKIPS,
    ),
    "a row starts at 0": (only('gl.where(top == float("-inf"), LOWEST, top + above)', "top * 0"), CAUSAL, -300.0, STEADY_SKIPS),
    "rows that see nothing at first have no pivot": (only(FINDS, "gl.where(m == LOWEST, 0.0, m)"), WINDOW, 300.0, STEADY),
    "every masked tile makes a pivot": (only(FINDS, "steady_pivot(gl.max(tops, 1), m, above)"), WINDOW, 60.0, STEADY),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name):
    replacements, text, step, tile = MUTANTS[name]
    problem, operands = rising(text, step)
    assert fails(replacements, problem, operands, tile, False, 2), f"mutant '{name}' lives"


def test_a_first_row_whose_keys_end_with_a_tile_is_not_computed_twice():
    """It sees nothing of the tile that comes first, and all of the next, which is masked for its sake."""
    problem = Problem.parse("b1 h1 q128 k159 d64 bf16 causal")
    operands = testing.operands(problem)
    for mutant in ((), only("gl.maximum(before, full_start), full_end)", "full_end, full_end)")):
        _, _, suspect = simulate.forward(problem, operands, HopperTile.parse(STEADY), mutants=mutant)
        assert bool((suspect == 1).any()) == bool(mutant)


@pytest.mark.parametrize("l", [(1.0, 3e7), (2.0**24, 2.0), (1e38, 2.0**60), (np.inf, 1.0), (np.nan, 1e9), (0.0, 0.0)])
def test_sums_are_settled_as_the_simulation_says(l):
    l, m = np.float32(l), np.float32([-3.5, 7.25])
    found = simulate_scores.ptx("settled", l, m, SETTLED.value, HEADROOM.value)
    wanted = simulate_scores.NAMES["settled"](
        torch.tensor(l).view(2, 1), torch.tensor(m).view(2, 1), SETTLED.value, HEADROOM.value
    )
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(one, other.flatten().numpy(), equal_nan=True)
    own = np.isfinite(l)
    assert np.all(found[0][own] <= SETTLED.value)
    assert np.array_equal(found[0][own], l[own] * found[2][own])
    assert np.array_equal(found[1][own] - m[own], -np.log2(found[2][own]))


def test_which_problems_may_be_steady():
    for text, banded, allowed in (
        *((CAUSAL, False, True), (CAUSAL, True, True), (CAUSAL.replace("bf16", "fp16"), False, False)),
        *((FULL + " bias(bhqk)", False, False), (FULL + " mask(bk)", False, False), (CAUSAL + " softcap=50.0", True, True)),
        *((CAUSAL + " alibi", False, True), (CAUSAL + " alibi", True, False)),
    ):
        assert hopper.steady_for(Problem.parse(text), banded) == allowed


@pytest.mark.parametrize("softcap", [2.0, 50.0])
def test_a_row_that_sees_one_key_gives_its_value_unchanged(softcap):
    """Whatever the sign of its score: a weight that bf16 would round is not 1."""
    problem = Problem.parse(f"b1 h2 q128 k128 d64 bf16 causal softcap={softcap}")
    operands = testing.operands(problem)
    for sign in (-1, 1):
        q = operands.q.clone()
        q[:, 0] = sign * operands.k[:, 0] * 0.5
        out, _, _ = simulate.forward(problem, operands._replace(q=q), HopperTile.parse(STEADY), late=False)
        assert torch.equal(out[:, 0], operands.v[:, 0]), f"score of sign {sign}"
