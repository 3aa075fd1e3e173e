"""The Hopper forward simulated on the CPU: results by the acceptance rule, no deadlock, no race, and mutants that must fail."""

import os

import pytest
import torch

from rowmax import Problem, reference, testing
from rowmax.problem import Operands

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the second kernel runs in Triton's interpreter", allow_module_level=True)

import canaries
import simulate
from gluon_mutants import DYNAMIC, LAZY, MUTANTS, ONE, QUEUE, SKIPS, SKIPS_STATIC, SKIPS_THREE, SKIPS_WIDE, STATIC, THREE

from rowmax.plan.hopper import HopperTile

CASES = [
    ("b1 h2/1 q200 k200 d64 bf16", STATIC),
    ("b2 h2/1 q200 k300 d64 bf16 causal", DYNAMIC),
    ("b1 h3 q129 k257 d64 fp16 causal", THREE),
    ("b1 h2 q130 k129 d128 bf16 causal", QUEUE),
    ("b2 h2 q300 k60 d64 bf16 causal", STATIC),  # rows and whole tiles that see nothing
    ("b1 h2 q300 k300 d64 bf16 window(40,0)", STATIC),
    ("b1 h2 q150 k300 d64 fp16 window(0,70)", DYNAMIC),
    ("b1 h2 q300 k100 d64 bf16 window(9,3)", QUEUE),
    ("b1 h1 q200 k200 d64 bf16 window(inf,5)", THREE),
    ("b1 h1 q200 k300 d64 bf16 window(0,0)", ONE),
    ("b1 h2 q1 k1 d64 bf16", STATIC),
    ("b1 h2 q200 k300 d64 fp16 causal", LAZY),
    ("b1 h2 q300 k300 d64 bf16 window(40,0)", LAZY),
    ("b1 h2 q5 k500 d64 bf16 causal", DYNAMIC),
    ("b1 h2 q100 k130 d72/40 bf16 causal", QUEUE),
    ("b1 h2 q100 k100 d192/128 bf16", STATIC),
    ("b1 h2 q100 k200 d96 bf16 causal", DYNAMIC),
    ("b2 h2 q100 k100 d160/24 fp16 packed causal", QUEUE),
    ("b1 h2 q100 k100 d64/128 fp16", STATIC),
    ("b1 h2/1 q70 k100 d256 bf16 causal", "128x32 s2 q1 dynamic"),
    ("b1 h2 q100 k130 d64 bf16 causal scale=-0.1", STATIC),
    ("b1 h2 q100 k130 d64 bf16 scale=0.0", QUEUE),
    ("b5 h4/2 q330 k330 d64 bf16 packed causal", STATIC),
    ("b5 h2 q330 k400 d64 bf16 packed", DYNAMIC),
    ("b3 h2/1 q300 k300 d64 fp16 packed window(9,7)", QUEUE),
    ("b4 h2 q500 k200 d64 bf16 packed causal", THREE),
    # Consumers leave out key tiles that are hidden from all their rows.
    ("b1 h3 q256 k256 d256 fp16 causal", SKIPS),
    ("b2 h4/2 q300 k428 d64 bf16 causal", SKIPS),
    ("b1 h2 q200 k264 d64 fp16 causal", SKIPS),
    ("b1 h2 q300 k108 d64 bf16 causal", SKIPS),
    ("b1 h2 q257 k257 d64 bf16 causal scale=-0.1", SKIPS_STATIC),
    ("b2 h2 q300 k300 d64 bf16 causal", SKIPS_THREE),
    ("b1 h4/2 q300 k428 d64 bf16 causal", SKIPS_THREE),
    ("b1 h2 q391 k455 d64 fp16 causal", SKIPS_THREE),
    ("b1 h2 q300 k44 d64 bf16 causal", SKIPS_THREE),
    ("b1 h2 q400 k464 d64/128 bf16 causal", SKIPS_WIDE),
    ("b1 h2 q391 k519 d192/128 bf16 causal", SKIPS_WIDE),
]


def run(problem, operands, tile, **options):
    out, lse, suspect = simulate.forward(problem, operands, HopperTile.parse(tile), **options)
    return testing.check_forward(problem, operands, out, lse), suspect


@pytest.mark.parametrize(("text", "tile"), CASES)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_simulated_kernel_is_right(text, tile, late):
    problem = Problem.parse(text)
    report, suspect = run(problem, testing.operands(problem), tile, late=late)
    assert report.ok, str(report)
    assert not bool((suspect == 1).any()), "finite operands, yet rows are computed once more"


@pytest.mark.parametrize("kind", ["probe", "spiky", "v_onehot", "constant(133120)", "shift(-245000)"])
def test_operands_that_show_one_mistake(kind):
    for text, tile in (("b1 h2/1 q150 k200 d64 bf16 causal", LAZY), ("b3 h2 q200 k200 d64 bf16 packed window(9,3)", DYNAMIC)):
        problem = Problem.parse(text)
        report, _ = run(problem, testing.operands(problem, kind), tile)
        assert report.ok, str(report)


@pytest.mark.parametrize("kind", ["nan(v)", "inf(v)", "nan(q)", "nan(k)"])
@pytest.mark.parametrize("text", ["b1 h2 q90 k140 d64 fp16 causal", "b3 h2 q90 k90 d64 fp16 packed window(9,3)"])
def test_a_value_that_is_not_finite_reaches_exactly_the_rows_that_see_it(kind, text):
    """The tiles of a row that does not see it hold it as well: such a row is suspect, and computed once more."""
    problem = Problem.parse(text)
    report, suspect = run(problem, testing.operands(problem, kind), QUEUE)
    assert report.ok, str(report)
    assert bool((suspect == 1).any())
    assert bool((suspect == 0).any())


@pytest.mark.parametrize("tile", [STATIC, THREE, ONE])
def test_flags_stand_for_64_rows_of_a_head_and_sequence(tile):
    """A NaN in one row of q, and exactly one flag is set."""
    dense, packed = Problem.parse("b2 h3 q200 k60 d64 fp16"), Problem.parse("b5 h2 q330 k330 d64 fp16 packed causal")
    starts, lengths = (0, 10, 10, 80, 210), (10, 0, 70, 130, 120)
    places = [(dense, b, row, head, (3 * b + head) * 4 + row // 64) for b, row, head in ((0, 0, 0), (1, 199, 2), (1, 64, 1))]
    for sequence, row, head in ((0, 9, 0), (2, 0, 1), (2, 69, 0), (3, 129, 1), (4, 119, 1)):
        number = head * (330 // 64 + 5) + starts[sequence] // 64 + sequence + row // 64
        places.append((packed, sequence, row, head, number))
    for problem, b, row, head, number in places:
        operands = testing.operands(problem, lengths=tuple(zip(lengths, lengths, strict=True)) if problem.packed else None)
        index = (starts[b] + row, head) if problem.packed else (b, row, head)
        operands.q[index] = float("nan")
        report, suspect = run(problem, operands, tile)
        assert report.ok, str(report)
        assert suspect.nonzero().flatten().tolist() == [number]


@pytest.mark.parametrize("tile", ["128x128 s2 q2 pingpong lazy dynamic", "128x64 s3 q1 lazy static", "192x128 s3 q2 dynamic"])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_sequences_of_as_many_keys_as_queries(tile, late):
    """One `cu_seqlens` for both: where the diagonal allows it, no key tile but a consumer's first is masked. Behind each
    sequence's keys lie the next one's, large, and behind all of them NaN."""
    problem = Problem.parse("b6 h4/2 q700 k720 d64 bf16 packed causal")
    lengths = (1, 0, 64, 130, 257, 200)
    operands = testing.operands(problem, lengths=tuple(zip(lengths, lengths, strict=True)))
    operands.k[sum(lengths) :], operands.v[sum(lengths) :] = float("nan"), float("nan")
    operands = operands._replace(cu_seqlens_k=operands.cu_seqlens_q)
    report, _ = run(problem, operands, tile, late=late)
    assert report.ok, str(report)


@pytest.mark.parametrize("blocks", [1, 2, 3, 12, 99])
def test_the_counter_is_left_at_zero_by_any_number_of_blocks(blocks):
    """The simulator looks at it after every call."""
    problem = Problem.parse("b2 h3 q200 k60 d64 bf16")
    report, _ = run(problem, testing.operands(problem), DYNAMIC, blocks=blocks)
    assert report.ok, str(report)


def test_values_that_nobody_sees_have_no_effect():
    problem = Problem.parse("b1 h2 q100 k300 d64 bf16 window(40,3)")
    operands = testing.operands(problem)
    hidden = ~reference.visible(problem.len_q, problem.len_k, *problem.band).any(0)
    k, v = operands.k.clone(), operands.v.clone()
    k[:, hidden], v[:, hidden] = float("nan"), float("inf")
    out, lse, _ = simulate.forward(problem, Operands(operands.q, k, v), HopperTile.parse(STATIC))
    report = testing.check_forward(problem, operands, out, lse)
    assert report.ok, str(report)


def test_rows_of_a_packed_tensor_outside_every_sequence_stay_as_they_are():
    problem = Problem.parse("b2 h2 q150 k150 d64 bf16 packed causal")
    operands = testing.operands(problem, lengths=((70, 60), (50, 60)))
    out, lse, _ = simulate.forward(problem, operands, HopperTile.parse(STATIC))
    assert not bool(out[120:].any())
    assert bool((lse[:, 120:] == -torch.inf).all())
    assert testing.check_forward(problem, operands, out, lse).ok


@pytest.mark.parametrize("layout", ["heads_first", "gaps", "fused"])
def test_strides_are_taken_as_they_are(layout):
    for text in ("b2 h2 q100 k100 d64 bf16", "b2 h2 q100 k100 d64 bf16 packed"):
        problem = Problem.parse(text)
        operands = testing.operands(problem, layout=layout)
        report, _ = run(problem, operands, STATIC)
        assert report.ok, str(report)


def test_without_an_lse():
    problem = Problem.parse("b1 h2 q70 k70 d64 bf16 causal")
    operands = testing.operands(problem)
    out, lse, _ = simulate.forward(problem, operands, HopperTile.parse(STATIC), need_lse=False)
    assert lse is None
    assert testing.check_forward(problem, operands, out).ok


@pytest.mark.parametrize("name", canaries.HOSTILE)
def test_lies_in_cu_seqlens_touch_nothing_outside(name):
    """The simulator raises on an access outside a tensor, and a block must come to its end."""
    problem = Problem.parse("b3 h1 q40 k40 d64 bf16 packed causal")
    for side in ("queries", "keys", "both"):
        operands = canaries.lying(testing.operands(problem), canaries.HOSTILE[name], side)
        simulate.forward(problem, operands, HopperTile.parse(DYNAMIC))


def test_repeats_are_equal_whatever_the_order():
    problem = Problem.parse("b1 h2/1 q200 k200 d64 bf16 causal")
    operands = testing.operands(problem)
    first, *others = (
        simulate.forward(problem, operands, HopperTile.parse(tile), seed=seed, late=late)
        for seed, late, tile in ((0, False, STATIC), (1, True, STATIC), (2, True, DYNAMIC.replace("g1", "")))
    )
    for other in others:
        assert torch.equal(first[0], other[0])
        assert torch.equal(first[1], other[1])


# ---- mutants ---------------------------------------------------------------------------------------------------------------


def fails(mutants, problem, operands, tile, marked: bool, seeds: int) -> bool:
    """`marked`: rows are to be computed once more."""
    for seed in range(seeds):
        options = {"seed": seed // 2, "late": seed % 2 == 0, "mutants": mutants, "repair": marked}
        try:
            report, suspect = run(problem, operands, tile, **options)
        except simulate.Wrong:
            return True
        if not report.ok or bool((suspect == 1).any()) != marked:
            return True
    return False


def ask(replacements, spelling: str, tile: str, kind: str = "normal", seeds: int = 8) -> bool:
    problem = Problem.parse(spelling)
    return fails(replacements, problem, testing.operands(problem, kind), tile, kind.startswith(("nan", "constant")), seeds)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name):
    assert ask(*MUTANTS[name]), f"mutant '{name}' lives"


@pytest.mark.parametrize("given", sorted({(*mutant[1:], "normal")[:3] for mutant in MUTANTS.values()}), ids=" ".join)
def test_the_kernel_itself_lives(given):
    assert not ask((), *given, seeds=2)
