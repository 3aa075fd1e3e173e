"""Sink tokens, prefixes and chunks in the Hopper kernels, simulated on the CPU, and mutants of what is there for them only."""

import os

import pytest
import torch

from rowmax import Problem, testing

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels before and behind run in Triton's interpreter", allow_module_level=True)

import simulate
import simulate_backward
import simulate_backward_wide

from rowmax.plan.hopper import HopperTile
from rowmax.plan.hopper_backward import HopperBackwardTile
from rowmax.plan.hopper_wide import HopperWideTile

NARROW, LAZY, THREE = "128x32 s2 q1 pingpong lazy dynamic", "128x64 s2 q2 lazy static", "192x32 s3 q2 lazy dynamic g1"
STEADY, ONE = "128x64 s2 q1 pingpong steady dynamic", "64x32 s2 q1 static"
DOWN, DOWN_64, PARTS = "64x128 s2 backward", "128x128 s2 backward g1", "128x128 s2 backward p2"
ORDERED, ORDERED_64 = "64x128 s2 backward ordered", "128x128 s2 backward g1 ordered"
WIDE = "128x64 s2 wide g1"

FORWARD = [
    ("b1 h2/1 q200 k200 d64 bf16 causal prefix=90", LAZY, "probe"),
    ("b1 h1 q200 k300 d64 bf16 window(40,0) sink_tokens=10", NARROW, "probe"),
    ("b1 h2 q200 k200 d64 fp16 causal chunk=70", LAZY, "probe"),
    ("b1 h1 q200 k300 d64 fp16 window(20,9) sink_tokens=70 prefix=5", THREE, "probe"),
    ("b1 h1 q150 k260 d128 bf16 chunk=100 sink_tokens=33", "128x64 s2 q1 lazy static", "v_onehot"),
    ("b1 h1 q300 k100 d64 bf16 chunk=90 prefix=3", ONE, "normal"),  # rows before the first key see the prefix only
    ("b1 h1 q300 k100 d64 bf16 causal chunk=30 sink_tokens=3", THREE, "normal"),  # others see nothing
    ("b1 h1 q5 k400 d64 bf16 window(70,0) sink_tokens=90", ONE, "normal"),
    ("b1 h1 q100 k300 d64 bf16 window(70,0) sink_tokens=299", NARROW, "probe"),  # no gap
    ("b3 h2/1 q300 k300 d64 bf16 packed window(30,0) sink_tokens=33", NARROW, "probe"),
    ("b3 h1 q300 k400 d64 bf16 packed causal chunk=50 prefix=20", ONE, "probe"),
    ("b1 h2 q130 k200 d64 bf16 causal prefix=100 alibi", LAZY, "normal"),  # keys ahead of their queries
    ("b1 h2 q130 k300 d64 bf16 window(30,0) sink_tokens=40 alibi softcap=9.0 sink", NARROW, "normal"),
    ("b1 h2 q130 k304 d64 bf16 window(30,0) sink_tokens=40 bias(hqk)", "128x32 s3 q1 lazy static", "normal"),
    ("b1 h2 q130 k304 d64 bf16 window(30,0) sink_tokens=40 dropout=0.2", NARROW, "normal"),
    (
        "b1 h1 q128 k128 d64 bf16 causal prefix=64",
        STEADY,
        "spiky",
    ),  # some rows see a whole key tile first, where others saw two
    ("b1 h1 q150 k290 d64 bf16 window(40,0) sink_tokens=10", STEADY, "spiky"),
]
BACKWARD = [
    ("b1 h2/1 q200 k200 d64 bf16 causal prefix=90", DOWN_64, "probe"),
    ("b1 h1 q200 k400 d64 bf16 window(40,0) sink_tokens=10", DOWN_64, "probe"),
    ("b1 h1 q200 k200 d128 bf16 causal chunk=70", DOWN, "probe"),
    ("b1 h1 q150 k400 d64 fp16 window(20,9) sink_tokens=150 prefix=5", DOWN_64, "probe"),
    ("b1 h1 q300 k100 d64 bf16 chunk=90 prefix=3", DOWN_64, "normal"),
    ("b3 h4/2 q200 k200 d64 bf16 packed window(30,0) sink_tokens=33", PARTS, "probe"),
    ("b3 h1 q200 k300 d64 bf16 packed causal chunk=50 sink_tokens=3", DOWN_64, "probe"),
    ("b1 h2 q130 k200 d64 bf16 causal prefix=100 alibi", DOWN_64, "normal"),
    ("b1 h1 q130 k200 d64 bf16 chunk=60 softcap=9.0", DOWN_64, "normal"),
    ("b1 h1 q100 k104 d64 bf16 window(9,0) sink_tokens=7 bias(qk)", DOWN_64, "normal"),
    ("b1 h1 q200 k200 d256 bf16 causal prefix=90", WIDE, "probe"),
    ("b1 h1 q150 k300 d192/128 bf16 window(40,0) sink_tokens=10", WIDE, "probe"),
    ("b1 h1 q150 k150 d256 fp16 chunk=70", WIDE, "probe"),
    ("b3 h2/1 q200 k200 d144 bf16 packed window(30,9) sink_tokens=73 chunk=90", WIDE, "normal"),
]
IN_ORDER = [
    ("b1 h2 q200 k600 d64 bf16 window(40,0) sink_tokens=10", ORDERED_64),
    ("b1 h2/1 q130 k600 d64 bf16 window(40,3) sink_tokens=150", ORDERED_64),
    ("b1 h1 q130 k400 d128 bf16 causal chunk=200", ORDERED),
    ("b1 h1 q200 k400 d64 bf16 causal prefix=200", ORDERED_64),
    ("b3 h1 q300 k600 d64 bf16 packed window(30,0) sink_tokens=33 chunk=170", ORDERED_64),
]


def forward(text, tile, kind="normal", **options):
    problem = Problem.parse(text)
    operands = testing.operands(problem, kind)
    out, lse, suspect = simulate.forward(problem, operands, HopperTile.parse(tile), **options)
    return testing.check_forward(problem, operands, out, lse), suspect


def backward(text, tile, kind="normal", **options):
    problem = Problem.parse(text)
    operands = testing.operands(problem, kind)
    out, lse = testing.attend(problem, operands)
    given = testing.cotangents(problem)
    if "wide" in tile:
        run, parsed = simulate_backward_wide.backward, HopperWideTile.parse(tile)
    else:
        run, parsed = simulate_backward.backward, HopperBackwardTile.parse(tile)
    dq, dk, dv, *marks = run(problem, operands, parsed, out, lse, *given, **options)
    grads = (dq, None, None) if options.get("kernels") == ("query_kernel",) else (dq, dk, dv)
    return testing.check_backward(problem, operands, grads, *given, out), torch.cat(marks), (dq, dk, dv)


def of_queries(*arguments, **options):
    """Of a wide backward only the kernel of dQ."""
    return backward(*arguments, kernels=("query_kernel",), **options)


@pytest.mark.parametrize(("text", "tile", "kind"), FORWARD)
def test_a_simulated_forward_is_right(text, tile, kind):
    for late in (False, True):
        report, suspect = forward(text, tile, kind, late=late)
        assert report.ok, str(report)
        assert not bool((suspect == 1).any()), "finite operands, yet rows are computed once more"


@pytest.mark.parametrize(("text", "tile", "kind"), BACKWARD)
def test_a_simulated_backward_is_right(text, tile, kind):
    report, marks, _ = backward(text, tile, kind, late=len(text) % 2 == 0)
    assert report.ok, str(report)
    assert not bool((marks == 1).any()), "finite operands, yet something is computed once more"


@pytest.mark.parametrize(("text", "tile"), IN_ORDER)
def test_the_order_of_sums_is_that_of_the_keys(text, tile):
    report, _, one = backward(text, tile, seed=1)
    assert report.ok, str(report)
    _, _, other = backward(text, tile, seed=2, late=True, running=1)
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("kind", ["nan(v)", "inf(v)", "nan(k)"])
@pytest.mark.parametrize(
    "words", ["window(40,0) sink_tokens=100", "causal chunk=50", "packed causal prefix=70"], ids=lambda words: words.split()[-1]
)
def test_a_value_that_is_not_finite_reaches_exactly_the_rows_that_see_it(words, kind):
    report, suspect = forward(f"b2 h1 q150 k200 d64 fp16 {words}", NARROW, kind)
    assert report.ok, str(report)
    assert bool((suspect == 1).any())


# ---- mutants ---------------------------------------------------------------------------------------------------------------

SINKS, CHUNKS = "b1 h1 q150 k300 d64 bf16 window(40,0) sink_tokens=40", "b1 h1 q150 k200 d64 bf16 chunk=70"
CAUSAL_CHUNKS, PREFIX = "b1 h1 q150 k200 d64 bf16 causal chunk=70", "b1 h1 q128 k128 d64 bf16 causal prefix=64"
SINKS_256, FIRST_SINKS = SINKS.replace("d64", "d136"), "b1 h1 q300 k500 d64 bf16 window(20,0) sink_tokens=150"
ROW_ENDS = "b1 h1 q100 k300 d136 bf16 causal chunk=150 sink_tokens=40"
START = "tl.where(number < early, 0, start - early * BLOCK_N)"
EARLY, TURNS = "near | (eights < early_keys(row, band) - own)", "early + gl.cdiv(end - start, BUILD.BLOCK_N)"
BEHIND = "gl.where(tile < early, tile, tile - gl.maximum(first // BLOCK_N - early, 0))"

FORWARD_MUTANTS = {
    "first keys are not walked over": (TURNS, TURNS.removeprefix("early + "), SINKS, NARROW),
    "tiles before the gap are not masked": ("full = early + (full_start", "full = 0 * early + (full_start", SINKS, NARROW),
    "the last tiles are masked a gap too late": (
        "full_end = early + (full_end",
        "full_end = 2 * early + (full_end",
        "b1 h1 q150 k300 d64 bf16 window(140,0) sink_tokens=40",
        NARROW,
    ),
    "no gap": (START, "start - early * BLOCK_N", SINKS, NARROW),
    "a tile before the gap too many": (START, START.replace("number <", "number <="), SINKS, NARROW),
    "a tile before the gap too few": (START, START.replace("< early", "< early - 1"), SINKS, NARROW),
    "first keys not taken off": (START, START.replace("start - early * BLOCK_N", "start"), SINKS, NARROW),
    "first keys are hidden": (EARLY, "near", SINKS, NARROW),
    "one first key too few": (EARLY, EARLY.replace("eights <", "eights + 1 <"), SINKS, NARROW),
    "one first key too many": (EARLY, EARLY.replace("eights <", "eights <="), SINKS, NARROW),
    "a chunk's left side is not hidden": ("near = eights >= first_key", "near = eights >= 0 * first_key", CAUSAL_CHUNKS, LAZY),
    "no first maximum in a whole key tile": (
        "clamp(end_key(row, len_k - len_q, len_k, band) - 1, 0",
        "clamp(end_key(row - 1, len_k - len_q, len_k, band), 0",
        PREFIX,
        STEADY,
    ),
}
BACKWARD_MUTANTS = {
    "a chunk's first query is not hidden": ("is not None or band.__len__() > 2:", "is not None:", CHUNKS, DOWN_64),
    "first keys are not seen to the end": (
        "most = tl.maximum(most, end_query(col",
        "most = tl.maximum(most, 0 * end_query(col",
        SINKS,
        DOWN_64,
    ),
    "first keys' neighbours are seen to the end": (
        "fewest = tl.maximum(col, tl.minimum(last, early_keys(last, band)))",
        "fewest = col",
        "b1 h1 q400 k400 d64 bf16 window(40,0) sink_tokens=40",
        DOWN_64,
    ),
    "key tiles of the gap are waited for": (BEHIND, "tile", FIRST_SINKS, ORDERED_64),
    "key tiles before the gap are not waited for": (BEHIND, "gl.maximum(tile - first // BLOCK_N, 0)", FIRST_SINKS, ORDERED_64),
    "those before the gap wait as others do": (BEHIND, BEHIND[29:-1], FIRST_SINKS, ORDERED_64),
    "dQ of first keys left out": (
        "early + gl.cdiv(end - start, BUILD.BLOCK_N), 0)",
        "gl.cdiv(end - start, BUILD.BLOCK_N), 0)",
        SINKS_256,
        WIDE,
    ),
    "dQ of the first rows without its last key tiles": (
        "gl.maximum(early + gl.cdiv(seen",
        "gl.maximum(gl.cdiv(seen",
        ROW_ENDS,
        WIDE,
    ),
}


def wrong(run, text, tile, replacement, count) -> bool:
    for seed in range(count):
        try:
            report, marks, *_ = run(
                text, tile, "probe" if seed % 2 else "normal", seed=seed, late=seed % 2 == 0, repair=False, mutants=replacement
            )
        except simulate.Wrong:
            return True
        if not report.ok or bool((marks == 1).any()):
            return True
    return False


@pytest.mark.parametrize("name", FORWARD_MUTANTS)
def test_a_mutant_of_the_forward_fails(name):
    old, new, text, tile = FORWARD_MUTANTS[name]
    assert wrong(forward, text, tile, ((old, new),), 4), f"mutant '{name}' lives"


@pytest.mark.parametrize("given", sorted({mutant[2:] for mutant in FORWARD_MUTANTS.values()}), ids=" ".join)
def test_the_forward_itself_lives(given):
    assert not wrong(forward, *given, (), 2)


@pytest.mark.parametrize("name", BACKWARD_MUTANTS)
def test_a_mutant_of_the_backward_fails(name):
    old, new, text, tile = BACKWARD_MUTANTS[name]
    assert wrong(of_queries if "wide" in tile else backward, text, tile, ((old, new),), 3), f"mutant '{name}' lives"


@pytest.mark.parametrize("given", sorted({mutant[2:] for mutant in BACKWARD_MUTANTS.values()}), ids=" ".join)
def test_the_backward_itself_lives(given):
    assert not wrong(of_queries if "wide" in given[1] else backward, *given, (), 1)
