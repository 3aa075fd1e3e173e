"""Soft-caps and ALiBi in the Hopper backward for head dimensions above 128: simulated and mutated, and when the plan takes it.

What bends scores of keys is `backward_scores.py`, whose own mutants are in `test_gluon_backward_scores.py`.
"""

import os

import pytest
import torch

from rowmax import Device, Problem, plan, reference, testing

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels before and behind run in Triton's interpreter", allow_module_level=True)

import simulate_backward_wide
from gluon_mutants import only
from test_gluon_backward_wide_simulation import ACROSS, DOWN, TILE, fails, non_finite, run

from rowmax.plan.hopper_wide import SHARED_BYTES, shared_bytes

H200 = Device.named("H200")
CAPPED, FLAT = "b1 h4/2 q130 k200 d136 bf16 causal softcap=2.0", "b1 h2 q200 k100 d136 bf16 softcap=2.0"
SLOPED, AROUND = "b2 h4/2 q130 k200 d136 bf16 causal alibi(batch)", "b1 h2 q130 k200 d136 fp16 alibi"
PACKED = "b3 h4/2 q200 k200 d136 bf16 packed causal alibi(batch)"
CASES = [
    (CAPPED, "spiky"),
    ("b1 h2 q200 k300 d256 bf16 causal softcap=50.0", "normal"),
    ("b1 h2 q70 k130 d256 fp16 softcap=2.0 scale=-0.1", "spiky(90)"),
    ("b1 h2 q129 k130 d192/128 bf16 window(40,3) softcap=5.0", "spiky"),
    ("b2 h4/2 q200 k129 d256 bf16 causal softcap=3.0", "normal"),  # with rows that see nothing
    ("b3 h4/2 q200 k200 d256 bf16 packed causal softcap=1.0", "spiky"),
    (SLOPED, "normal"),
    ("b1 h2 q200 k130 d256 bf16 causal alibi", "spiky"),
    (AROUND, "normal"),
    ("b1 h4/2 q129 k130 d64/256 bf16 window(40,0) alibi", "normal"),
    ("b3 h4/2 q150 k200 d256 bf16 packed window(40,20) alibi(batch)", "normal"),
    ("b1 h2 q130 k130 d192/128 bf16 causal alibi sink", "normal"),
]


@pytest.mark.parametrize(("text", "kind"), CASES)
def test_scores_that_are_bent_reach_the_gradients(text, kind):
    problem = Problem.parse(text)
    report, marks = run(problem, testing.operands(problem, kind), late=len(text) % 2 == 0)
    assert report.ok, str(report)
    assert not bool((marks == 1).any()), "finite operands, yet something is computed once more"


def test_hidden_keys_have_no_say_in_how_a_cap_is_computed():
    """Bit by bit: a large score that a query does not see changes nothing."""
    problem = Problem.parse("b1 h1 q64 k80 d136 fp16 causal softcap=30.0")
    operands = testing.operands(problem)
    out, lse = testing.attend(problem, operands)
    hidden = ~reference.visible(64, 80, *problem.band)[:60].any(0)  # from all rows but the last ones, whose gradient is 0
    grad_out, grad_lse = testing.cotangents(problem)
    grad_out[:, 60:], grad_lse[..., 60:] = 0.0, 0.0
    found = []
    for keys in (operands.k, operands.k.clone()):
        if found:
            keys[:, hidden] = 1e4
        found.append(simulate_backward_wide.backward(problem, operands._replace(k=keys), TILE, out, lse, grad_out, grad_lse))
    (dq, dk, dv, *_), (dq_again, dk_again, dv_again, *_) = found
    assert torch.equal(dq[:, :60], dq_again[:, :60])
    assert torch.equal(dk[:, ~hidden], dk_again[:, ~hidden])
    assert torch.equal(dv[:, ~hidden], dv_again[:, ~hidden])


@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
@pytest.mark.parametrize(
    "words", ["b2 h2/1 q70 k140 d136 fp16 causal softcap=2.0", "b3 h2/1 q150 k150 d144 fp16 packed alibi(batch)"]
)
def test_a_value_that_is_not_finite_reaches_what_sees_it_and_nothing_else(where, words):
    """What is computed once more is bent as well."""
    grads, _, expected = non_finite(where, words)
    for mine, theirs in zip(grads, expected, strict=True):
        assert torch.equal(mine.isfinite(), theirs.isfinite())
        assert float((mine - theirs)[theirs.isfinite()].abs().max()) < 0.1


# ---- mutants -----------------------------------------------------------------------------------------------------------------

SHIFT = "shift = _note(notes, LEN_K) - _note(notes, LEN_Q)"
EACH, EACH_KEY = (
    "slopes_ptr += (b + sequence).to(gl.int64) * heads",
    "slopes_ptr += (b + sequence).to(gl.int64) * (heads * BUILD.GROUP)",
)
# name -> (replacements, problem, kernel)
MUTANTS = {
    # dQ
    "scores in units of log2": (only("s * as_number(_note(notes, NOTES))", "s * scale_log2"), CAPPED, ACROSS),
    "the cap in natural units": (only("as_bits(cap[1])", "as_bits(cap[1] / 1.4426950408889634)"), CAPPED, ACROSS),
    "no derivative of the cap": (only("    _weights, p = capped", "    p, _gain = capped"), CAPPED, ACROSS),
    "hidden keys are no lower than others": (only("band, LOWEST)", "band, 0.0)"), CAPPED, ACROSS),
    "nothing hidden under a cap": (only("edge = (col < full) | (col >= full_end)", "edge = col < 0"), CAPPED, ACROSS),
    "hidden from the first consumer's rows": (only("CONSUMER * s.shape[0]", "0 * s.shape[0]"), CAPPED, ACROSS),
    "keys of the turn before": (only("col + BLOCK_N, ranges", "col, ranges"), CAPPED, ACROSS),
    "slopes at the keys of the turn before": (only("col + BLOCK_N, ranges", "col, ranges"), SLOPED, ACROSS),
    "slopes of the first consumer's rows": (only("CONSUMER * s.shape[0]", "0 * s.shape[0]"), AROUND, ACROSS),
    "rows of a tile as one": (only("rows = slope * along", "rows = 0.0 * along"), SLOPED, ACROSS),
    "keys ahead as keys behind": (only('if BUILD.ALIBI == "around"', "if False"), AROUND, ACROSS),
    "slopes without the shift": (only(SHIFT, "shift = 0"), AROUND, ACROSS),
    "slopes of the first head": (only("gl.load(slopes_ptr + head)", "gl.load(slopes_ptr)"), AROUND, ACROSS),
    "slopes of the first sequence": (only(EACH, "pass"), SLOPED, ACROSS),
    "slopes of the first packed sequence": (only(EACH, EACH.replace(" + sequence", "")), PACKED, ACROSS),
    "slopes in natural units": (only("head) * 1.4426950408889634)", "head))"), AROUND, ACROSS),
    # dK and dV
    "the weights handed over": (only("store(_to_own(p))", "store(_to_own(weights.float()))"), FLAT, DOWN),
    "the derivative in dV": (only("gl.convert_layout(weights, ", "gl.convert_layout(p.to(q_buffers.dtype), "), FLAT, DOWN),
    "the cap in natural units, keys": (only("as_bits(cap[1])", "as_bits(cap[1] / 1.4426950408889634)"), CAPPED, DOWN),
    "the unit as the factor, keys": (only("as_bits(cap[0])", "as_bits(cap[1])"), CAPPED, DOWN),
    "slopes of the first member": (only("head * BUILD.GROUP + member)", "head * BUILD.GROUP)"), SLOPED, DOWN),
    "slopes of the first sequence, keys": (only(EACH_KEY, "pass"), SLOPED, DOWN),
    "slopes of the first packed sequence, keys": (only(EACH_KEY, EACH_KEY.replace(" + sequence", "")), PACKED, DOWN),
    "slopes in natural units, keys": (only("+ member) * 1.4426950408889634", "+ member)"), AROUND, DOWN),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name):
    replacements, text, kernels = MUTANTS[name]
    problem = Problem.parse(text)
    assert fails(replacements, problem, testing.operands(problem, "spiky"), kernels), f"mutant '{name}' lives"


# ---- plan --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["softcap=50.0", "alibi", "alibi(batch)", "softcap=50.0 sink deterministic"])
@pytest.mark.parametrize("dims", ["256", "160", "192/128", "64/256"])
def test_the_plan_takes_hopper_and_its_tile_fits(words, dims):
    problem = Problem.parse(f"b2 h16/4 q4096 k4096 d{dims} bf16 causal {words}")
    found = plan(problem, H200, direction="backward")
    assert found.algorithm == "hopper"
    assert max(shared_bytes(problem, found.tiles[0])) <= SHARED_BYTES


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("h16 d256 softcap=50.0 alibi", "a soft-cap without ALiBi, biases and masks only"),
        ("h16 d192/128 bias(hqk)", "biases and masks up to 128 dimensions only"),
        ("h16 d256 mask(bk)", "biases and masks up to 128 dimensions only"),
        ("h512/1 d256 alibi", "bytes of shared memory"),
        ("h16 d256 dropout=0.1", "its backward computes no dropout"),
    ],
)
def test_what_it_refuses(words, reason):
    found = plan(Problem.parse(f"b2 q4096 k4096 bf16 causal {words}"), H200, direction="backward")
    assert found.algorithm == "q_outer"
    assert reason in dict(found.refusals)["hopper"]
