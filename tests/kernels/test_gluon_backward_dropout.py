"""Dropout in the Hopper backward: its PTX run for a warp, the kernel simulated and mutated."""

import os
import random

import numpy as np
import pytest
import torch

from rowmax import Problem, reference, testing

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels before and behind run in Triton's interpreter", allow_module_level=True)

import simulate_backward
import simulate_warp
from gluon_mutants import only
from simulate_scores import NAMES
from test_gluon_backward_simulation import PLAIN, WIDE, fails, non_finite, run
from test_gluon_dropout import drawn

from rowmax.kernels.gluon import philox
from rowmax.plan.hopper_backward import HopperBackwardTile

CASES = [
    ("b2 h4/2 q130 k200 d64 bf16 causal dropout=0.1", WIDE, "normal"),
    ("b1 h2 q200 k300 d128 bf16 causal dropout=0.5", PLAIN, "normal"),
    ("b2 h4/2 q200 k129 d64 fp16 causal dropout=0.3", f"{WIDE} p2", "spiky"),  # with rows that see nothing
    ("b3 h4/2 q300 k300 d64 fp16 packed window(9,7) dropout=0.9", WIDE, "normal"),
    ("b4 h2/1 q300 k280 d128 bf16 packed causal dropout=0.3", PLAIN, "normal"),
    ("b1 h2 q129 k130 d72/40 bf16 window(40,3) softcap=5.0 dropout=0.2", PLAIN, "spiky"),
    ("b1 h2 q150 k200 d64 bf16 causal softcap=2.0 dropout=0.3", WIDE, "spiky"),
    ("b2 h4/2 q130 k136 d64 bf16 causal alibi dropout=0.3", WIDE, "normal"),
    ("b1 h2 q130 k136 d128 fp16 bias(hqk) dropout=0.3", PLAIN, "normal"),
    ("b2 h2 q130 k144 d64 bf16 mask(bqk) dropout=0.3", WIDE, "normal"),
    ("b1 h2 q1 k1 d64 bf16 dropout=0.5", WIDE, "normal"),
]


@pytest.mark.parametrize(("text", "tile", "kind"), CASES)
def test_gradients_are_of_the_weights_that_the_definition_keeps(text, tile, kind):
    problem = Problem.parse(text)
    report, suspect = run(problem, testing.operands(problem, kind), tile, late=len(text) % 2 == 0)
    assert report.ok, str(report)
    assert not bool((suspect == 1).any()), "finite operands, yet keys are computed once more"


@pytest.mark.parametrize("tile", [WIDE, f"{WIDE} ordered"])
def test_of_equal_scores_dv_shows_which_weights_are_kept(tile):
    """dO is a unit vector in each of 64 rows, so that dV of a key is its column of kept weights."""
    problem = Problem.parse("b2 h4/2 q64 k150 d64 fp16 dropout=0.4")
    operands = testing.operands(problem)
    operands = operands._replace(q=operands.q.zero_())
    out, lse = testing.attend(problem, operands)
    grad_out = torch.eye(64, dtype=torch.float16).view(1, 64, 1, 64).repeat(2, 1, 4, 1)
    grad_out[:, :, 1::2] *= 2.0  # the second head of a group
    _, _, dv, _ = simulate_backward.backward(problem, operands, HopperBackwardTile.parse(tile), out, lse, grad_out)
    kept = reference.dropout(int(operands.seed), 0.4, range(2), 4, 64, 150).double()
    want = (kept[:, ::2] + 2 * kept[:, 1::2]).permute(0, 3, 1, 2) / 150 * problem.drop_factor
    torch.testing.assert_close(dv.double(), want, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        *((where, "q130 k200 d64 fp16 causal") for where in ("q", "v")),
        *((where, "q200 k200 d64 fp16 packed window(9,3)") for where in ("k", "do")),
    ],
)
def test_a_value_that_is_not_finite_reaches_what_sees_it_and_nothing_else(where, words):
    """What is computed once more drops the same."""
    grads, _, expected = non_finite(where, f"b2 h2/1 {words} dropout=0.4", WIDE)
    for mine, theirs in zip(grads, expected, strict=True):
        assert torch.equal(mine.isfinite(), theirs.isfinite())
        assert float((mine - theirs)[theirs.isfinite()].abs().max()) < 0.1


# ---- draws -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [64, 128])
def test_its_instructions_keep_what_the_definition_keeps(queries):
    """A warp's 16 keys, with numbers up to their last bits; and as `simulate.py` has it."""
    rnd = random.Random(queries)
    lanes = np.arange(32)
    registers = queries // 4  # of two neighbours each, of both keys of a lane in turn
    code = philox._code_across([f"${i}" for i in range(registers)], *(f"${2 * registers + i}" for i in range(7)))
    copied = [f"mov.b32 ${i}, ${registers + i};" for i in range(registers)]  # outputs that lie where their inputs do
    for most, p in ((1, 0.1), (2, 1e-9), (2**16, 0.003), (2**16, 0.02), (2**17, 0.5), (2**17, 0.95), (2**17, 0.9687)):
        seed = rnd.randrange(-(2**63), 2**63)
        row, col = queries * rnd.randrange(2 * most), 16 * rnd.randrange(most)
        head, sequence = rnd.randrange(most), rnd.randrange(most)
        least = 0x10001 * Problem.parse(f"b1 h1 q1 d64 fp16 dropout={p}").drop_below
        numbers = (row, head, sequence, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, least)
        given = torch.from_numpy(np.random.default_rng(queries).integers(1, 2**15, (16, queries), np.int16))
        rows = row + torch.arange(queries)
        want = torch.where(drawn(seed, p, sequence, head, rows, col, 16).mT, given, -(2**15))
        keys = (col + torch.arange(16)).view(-1, 1).expand(16, queries)
        as_halves = NAMES["keep_across"](given.view(torch.float16), keys, *(torch.tensor(n) for n in numbers), queries)
        assert torch.equal(want.to(torch.int16), as_halves.view(torch.int16))

        places = [(lanes // 4 + 8 * (i % 2), 8 * (i // 2) + 2 * (lanes % 4)) for i in range(registers)]
        halves, kept = given.numpy().astype(np.uint32), want.numpy().astype(np.uint32) & 0xFFFF
        pairs = [halves[line, c] | halves[line, c + 1] << np.uint32(16) for line, c in places]
        found = simulate_warp.run("\n".join([*copied, *code]), [*pairs, col + lanes // 4, *numbers], registers)
        for word, (line, c) in zip(found, places, strict=True):
            assert np.array_equal(word & 0xFFFF, kept[line, c])
            assert np.array_equal(word >> 16, kept[line, c + 1])


def test_the_sign_of_a_weight_tells_what_of_dp_is_dropped():
    written: dict = {}
    whole, philox.gl = philox.gl, type("gl", (), {"float32": None})
    philox.gl.inline_asm_elementwise = staticmethod(lambda code, *_, **options: written.update(code=code))
    try:
        philox.kept.__wrapped__(None, None, _semantic=object())
    finally:
        philox.gl = whole
    x, other = np.float32([1.5, -2.0, np.inf, 3.0] * 8).view(np.uint32), np.float32([np.nan, 7.0] * 16).view(np.uint32)
    weights = np.uint32([0x80003C00, 0x3C008000, 0x80008000, 0x00000001] * 8)
    first, second = simulate_warp.run(written["code"], [x, other, weights], 2)
    assert np.array_equal(first, np.where(weights & 0x8000, 0, x))
    assert np.array_equal(second, np.where(weights >> 16 & 0x8000, 0, other))


# ---- mutants -----------------------------------------------------------------------------------------------------------------

HALF, GROUPED = "b2 h2 q200 k200 d64 fp16 causal dropout=0.5", "b2 h4/2 q130 k200 d64 fp16 dropout=0.5"
PACKED, NARROW = "b3 h2 q300 k300 d64 fp16 packed causal dropout=0.5", "b2 h2 q200 k200 d128 fp16 causal dropout=0.5"
DROP = "            weights = drop_weights(weights, drop, row, turn, notes, CONSUMER, BUILD)\n"
OWN = "own_row = row - _note(notes, BEGIN_Q)\n    return"
MASK = "            dp = kept(dp, weights) * drop[3]\n"
MUTANTS = {
    "nothing is dropped": (only(DROP, "            pass\n"), HALF, WIDE),
    "nothing of dP is dropped": (only(MASK, "            dp = dp * drop[3]\n"), HALF, WIDE),
    "the factor of dP left out": (only(MASK, MASK.replace(" * drop[3]", "")), HALF, WIDE),
    "the factor of dV left out": (only("        dv *= drop[3]\n", "        pass\n"), HALF, WIDE),
    "the factor of dV at half": (only("        dv *= drop[3]\n", "        dv *= drop[3] * 0.5\n"), NARROW, PLAIN),
    "keys of the other consumer": (
        only("first = _note(notes, COL) + CONSUMER * KEYS", "first = _note(notes, COL)"), HALF, WIDE,
    ),
    "queries of the tensor": (only(OWN, "own_row = row\n    return"), PACKED, WIDE),
    "queries of the turn before": (only(OWN, "own_row = row - BUILD.BLOCK_M\n    return"), HALF, WIDE),
    "every head alike": (only("BUILD.GROUP + turn % BUILD.GROUP\n    first", "BUILD.GROUP\n    first"), GROUPED, WIDE),
    "heads of KV": (only("head = _note(notes, HEAD) * BUILD.GROUP +", "head = _note(notes, HEAD) +"), GROUPED, WIDE),
    "sequences alike": (only("drop = (seed_ptr, odds, b + sequence)", "drop = (seed_ptr, odds, sequence)"), HALF, WIDE),
    "packed sequences alike": (only("drop = (seed_ptr, odds, b + sequence)", "drop = (seed_ptr, odds, b)"), PACKED, WIDE),
    "half of the seed": (only("uniform((seed >> 32).to(gl.int32))", "uniform(seed.to(gl.int32))"), HALF, WIDE),
    "half of the odds": (only("odds[0] * 0x10001", "(odds[0] >> 1) * 0x10001"), HALF, WIDE),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name):
    replacements, text, tile = MUTANTS[name]
    problem = Problem.parse(text)
    assert fails(replacements, problem, testing.operands(problem), tile), f"mutant '{name}' lives"
