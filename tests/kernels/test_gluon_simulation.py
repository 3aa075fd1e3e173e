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

from rowmax.plan.hopper import HopperTile

STATIC, DYNAMIC, GRID = "128x32 s2 q1 pingpong static", "128x32 s2 q2 pingpong dynamic g1", "128x64 s3 q1 grid g1"
LAZY = "128x32 s2 q1 pingpong lazy static"
THREE, ONE = "192x64 s2 q2 pingpong static", "64x32 s2 q1 static"

CASES = [
    ("b1 h2/1 q200 k200 d64 bf16", STATIC),
    ("b2 h2/1 q200 k300 d64 bf16 causal", DYNAMIC),
    ("b1 h3 q129 k257 d64 fp16 causal", THREE),
    ("b1 h2 q130 k129 d128 bf16 causal", GRID),
    ("b2 h2 q300 k60 d64 bf16 causal", STATIC),  # rows and whole tiles that see nothing
    ("b1 h2 q300 k300 d64 bf16 window(40,0)", STATIC),
    ("b1 h2 q150 k300 d64 fp16 window(0,70)", DYNAMIC),
    ("b1 h2 q300 k100 d64 bf16 window(9,3)", GRID),
    ("b1 h1 q200 k200 d64 bf16 window(inf,5)", THREE),
    ("b1 h1 q200 k300 d64 bf16 window(0,0)", ONE),
    ("b1 h2 q1 k1 d64 bf16", STATIC),
    ("b1 h2 q200 k300 d64 fp16 causal", LAZY),
    ("b1 h2 q300 k300 d64 bf16 window(40,0)", LAZY),
    ("b1 h2 q5 k500 d64 bf16 causal", DYNAMIC),
    ("b1 h2 q100 k130 d72/40 bf16 causal", GRID),
    ("b1 h2 q100 k100 d192/128 bf16", STATIC),
    ("b1 h2 q100 k200 d96 bf16 causal", DYNAMIC),
    ("b2 h2 q100 k100 d160/24 fp16 packed causal", GRID),
    ("b1 h2 q100 k100 d64/128 fp16", STATIC),
    ("b1 h2/1 q70 k100 d256 bf16 causal", "128x32 s2 q1 dynamic"),
    ("b1 h2 q100 k130 d64 bf16 causal scale=-0.1", STATIC),
    ("b1 h2 q100 k130 d64 bf16 scale=0.0", GRID),
    ("b5 h4/2 q330 k330 d64 bf16 packed causal", STATIC),
    ("b5 h2 q330 k400 d64 bf16 packed", DYNAMIC),
    ("b3 h2/1 q300 k300 d64 fp16 packed window(9,7)", GRID),
    ("b4 h2 q500 k200 d64 bf16 packed causal", THREE),
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
    report, suspect = run(problem, testing.operands(problem, kind), GRID)
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

CAUSAL, PACKED = "b1 h3 q200 k330 d64 bf16 causal", "b4 h2 q300 k300 d64 bf16 packed causal"
NARROW, WIDE = "b1 h1 q99 k99 d64 bf16 window(9,9)", "b1 h1 q300 k300 d64 bf16 window(70,9)"
GROUPED, MANY_KEYS, RAGGED = "b1 h4/2 q70 k70 d64 bf16", "b1 h3 q300 k2048 d64 bf16", "b1 h1 q70 k70 d64 bf16"
SPLIT = "b1 h1 q100 k100 d96 bf16 causal"
NAN = "b1 h1 q90 k90 d64 fp16 causal"
NAN_HEADS, NAN_PACKED = "b3 h2 q130 k130 d64 fp16 causal", "b4 h2 q300 k300 d64 fp16 packed causal"
NAN_TILES = "b1 h1 q250 k250 d64 fp16 causal"
EDGES = "(col < full_start) | (col >= full_end)"
WAIT_Q = "        wait_full(q_ring, round, BUILD.Q_STAGES, True, CONSUMER, BUILD.CONSUMERS)\n"
WAIT_S = "    s = warpgroup_mma_wait(1, deps=[s])\n"
WAIT_FIRST_S = "        s = warpgroup_mma_wait(0, deps=[s])\n"
WAIT_ACC = "    acc = warpgroup_mma_wait(0, deps=[acc])\n"
FREE_K, FREE_V = "    release(k_ring, turn, BUILD.STAGES)\n", "    release(v_ring, turn - 1, BUILD.STAGES)\n"
FREE_Q = "        release(q_ring, round, BUILD.Q_STAGES, CONSUMER, BUILD.CONSUMERS)\n"
STORE = "        _store(acc, inverse, lse, m, scale_log2, o_buffer, row, head, b, begin_q, len_q, work, out, sources, BUILD)\n"
TO_FILL = "phase_of(turn, STAGES) ^ 1)\n    if SECOND"

# name -> (text, replacement, problem, tile, kind of operands)
MUTANTS = {
    "wrong phase": (TO_FILL, TO_FILL.replace(" ^ 1", ""), CAUSAL, STATIC),
    "the phase never turns": ("turn // STAGES & 1", "turn * 0", CAUSAL, STATIC),
    # Later K may be released early without harm: the next V is fetched first, and waits for a release after S.
    "the first K released early": (WAIT_FIRST_S + "    " + FREE_K, "    " + FREE_K + WAIT_FIRST_S, CAUSAL, STATIC),
    "V released early": (WAIT_ACC + FREE_V + "    return", FREE_V + WAIT_ACC + "    return", CAUSAL, STATIC),
    "the last V released early": (WAIT_ACC + "    " + FREE_V, FREE_V + "    " + WAIT_ACC, CAUSAL, DYNAMIC),
    "Q released early": (STORE + FREE_Q, FREE_Q + STORE, CAUSAL, STATIC),
    "K never released": (WAIT_S + FREE_K, WAIT_S, CAUSAL, STATIC),
    "V released twice": (WAIT_ACC + FREE_V + "    return", WAIT_ACC + FREE_V * 2 + "    return", CAUSAL, STATIC),
    "the second part from the start": ("[b, row, head, SECOND]", "[b, row, head, 0]", SPLIT, STATIC),
    "no wait for K": ("    wait_full(k_ring, turn + 1, BUILD.STAGES, more)\n", "", CAUSAL, STATIC),
    "no wait for V": ("    wait_full(v_ring, turn - 1, BUILD.STAGES)\n    if BUILD", "    if BUILD", CAUSAL, STATIC),
    "no wait for Q": (WAIT_Q, "", CAUSAL, STATIC),
    "S awaited too late": (WAIT_S, WAIT_S.replace("1", "2"), CAUSAL, STATIC),
    "no empty buffer awaited": ("    mbarrier.wait(empty.index(i), " + TO_FILL, "    if SECOND", CAUSAL, STATIC),
    "nobody has the first turn": ("    if CONSUMER == CONSUMERS - 1:", "    if CONSUMER == CONSUMERS:", CAUSAL, STATIC),
    "a turn given to oneself": ("FIRST_NAME + (CONSUMER + 1) % CONSUMERS", "FIRST_NAME + CONSUMER", CAUSAL, STATIC),
    "no fence": ("    fence_async_shared()\n    tma_store", "    tma_store", CAUSAL, STATIC),
    "too few K/V fetched": ("for j in range(turns):", "for j in range(turns - 1):", CAUSAL, STATIC),
    "too many K/V fetched": ("for j in range(turns):", "for j in range(turns + 1):", CAUSAL, STATIC),
    "a key tile lost": ("start, BUILD.BLOCK_N), 1)", "start, BUILD.BLOCK_N) - 1, 1)", CAUSAL, STATIC),
    "no last number": ("        publish(slots, -1, taken, SLOTS)\n", "", CAUSAL, DYNAMIC),
    "a number kept": ("    release(ring, turn, STAGES)\n    return number", "    return number", CAUSAL, DYNAMIC),
    "a tile skipped": ('sem="relaxed") + gl.num', 'sem="relaxed") + 1 + gl.num', CAUSAL, DYNAMIC),
    "a number overwritten": (TO_FILL.replace("if SECOND", "numbers"), "0)\n    numbers", CAUSAL, DYNAMIC),
    "accumulator not scaled": ("_scale_rows(acc, opaque(alpha))", "acc + 0", CAUSAL, STATIC),
    "a lazy maximum scales all the same": ("gl.where(m_new == m, 1.0, alpha)", "alpha * 0.5", CAUSAL, LAZY),
    "accumulator not scaled at the end": ("        acc = _scale_rows(acc, alpha)\n", "", CAUSAL, STATIC, "shift(-60)"),
    "row sum not scaled": ("l * gl.expand_dims(own, 1) + _thread", "l + _thread", CAUSAL, STATIC),
    "diagonal off by one": ("row + (shift + band.right + 1)", "row + (shift + band.right + 2)", CAUSAL, STATIC, "probe"),
    "window off by one": ("row + (shift - band.left)", "row + (shift - band.left + 1)", NARROW, STATIC),
    "no mask at the left edge": (EDGES, "col >= full_end", WIDE, STATIC),
    "no mask at the right edge": (EDGES, "col < full_start", CAUSAL, STATIC),
    "no end of K": ("cols < tl.minimum(end_key(", "cols < tl.maximum(9 + end_key(", RAGGED, STATIC),
    "heads not grouped": ("k_parts, b, col, head // BUILD.GROUP", "k_parts, b, col, head * 0", GROUPED, STATIC),
    "heads of a small last group": ("gl.minimum(members, every", "gl.maximum(members, 0 * every", MANY_KEYS, DYNAMIC),
    "a store into the next sequence": ("if row + ROWS <= len_q:", "if row < len_q:", PACKED, GRID),
    "K of another sequence": ("begin_k + start + (", "start + (", PACKED, GRID),
    "counter not reset": ("        gl.store(counter, 0, mask", "        (dict)(counter=counter, mask", CAUSAL, DYNAMIC),
    "counter reset by one tile too few": ("mask=tile >= total - 1 +", "mask=tile >= total +", CAUSAL, DYNAMIC),
    "flag of another head": ("number = (b * heads + head) *", "number = (b * heads + head * 0) *", NAN_HEADS, STATIC, "nan(v)"),
    "flag of another batch": ("number = (b * heads + head)", "number = ((b + 1) * heads + head)", NAN_HEADS, STATIC, "nan(v)"),
    "flag of another tile": (" + row // ROWS\n    if BUILD", " + (row // ROWS ^ 1)\n    if BUILD", NAN_TILES, ONE, "nan(v)"),
    "flags of 128 rows": ("+ own + row // ROWS", "+ own + row // 128", NAN_PACKED, STATIC, "nan(v)"),
    "flag of another sequence": (" + sequence_of(begin_q + row, cu_q, batch)", "", NAN_PACKED, STATIC, "nan(v)"),
    "a mark at every row": ("1, mask=bad & inside)", "1, mask=inside)", CAUSAL, STATIC),
    "NaN not noticed": ("gl.where(acc != acc, 1, 0)", "gl.where(acc != acc, 0, 0)", NAN, GRID, "nan(v)"),
    "LSE in base 2": ("gl.log2(l_safe)) * 0.6931471805599453", "gl.log2(l_safe))", CAUSAL, STATIC),
}  # fmt: skip


def fails(mutant, problem, operands, tile) -> bool:
    finite = all(bool(torch.isfinite(t).all()) for t in operands[:3])
    for seed in range(8):
        options = {"seed": seed, "late": seed % 2 == 0, "mutant": mutant, "repair": not finite}
        try:
            report, suspect = run(problem, operands, tile, **options)
        except simulate.Wrong:
            return True
        if not report.ok or (finite and bool((suspect == 1).any())):
            return True
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name):
    text, replacement, spelling, tile, *kind = MUTANTS[name]
    problem = Problem.parse(spelling)
    assert fails((text, replacement), problem, testing.operands(problem, *kind), tile), f"mutant '{name}' lives"
