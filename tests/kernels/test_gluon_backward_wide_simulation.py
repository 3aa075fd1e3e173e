"""The Hopper backward for head dimensions above 128, simulated on the CPU: right results, no deadlock, no race, and mutants."""

import os
from dataclasses import replace

import pytest
import torch

from rowmax import Device, Problem, reference, testing

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels before and behind run in Triton's interpreter", allow_module_level=True)

import canaries
import simulate
import simulate_backward_wide

from rowmax.plan.hopper_wide import tiles

DOWN, ACROSS = ("key_kernel",), ("query_kernel",)

CASES = [
    "b1 h2 q200 k300 d256 bf16",
    "b2 h2/1 q130 k257 d256 fp16 causal",
    "b2 h4/2 q200 k129 d256 bf16 causal",  # rows that see nothing
    "b1 h2 q300 k300 d192/128 bf16 window(40,0)",
    "b1 h2 q150 k400 d256 fp16 window(0,70)",
    "b1 h1 q300 k100 d144/256 bf16 window(9,3)",
    "b1 h2/1 q100 k400 d256 bf16 window(5,5)",  # keys that nobody sees, and whole tiles of them
    "b1 h1 q200 k200 d136/200 bf16 window(inf,5)",
    "b1 h2 q1 k1 d256 bf16",
    "b1 h2 q5 k300 d256 bf16 causal",
    "b1 h1 q100 k100 d64/256 fp16",
    "b1 h2 q70 k130 d256 bf16 causal scale=-0.1",
    "b1 h2 q70 k130 d256 bf16 scale=0.0",
    "b5 h4/2 q330 k330 d256 bf16 packed causal",
    "b4 h2 q500 k200 d200/136 bf16 packed causal",
    "b3 h4/2 q300 k300 d256 fp16 packed window(9,7)",
]


def tile_of(problem, group_mb=1):
    return replace(tiles(problem, Device.named("H200"))[0], group_mb=group_mb)


def run(problem, operands, grad_lse=True, kernels=DOWN + ACROSS, group_mb=1, **options):
    out, lse = testing.attend(problem, operands)
    d_out, d_lse = testing.cotangents(problem)
    d_lse = d_lse if grad_lse else None
    options["kernels"] = kernels
    dq, dk, dv, *marks = simulate_backward_wide.backward(
        problem, operands, tile_of(problem, group_mb), out, lse, d_out, d_lse, **options
    )
    down, across = (dk, dv) if DOWN[0] in kernels else (None, None), dq if ACROSS[0] in kernels else None
    return testing.check_backward(problem, operands, (across, *down), d_out, d_lse, out), torch.cat(marks)


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_simulated_kernel_is_right(text, late):
    problem = Problem.parse(text)
    report, marks = run(problem, testing.operands(problem), late=late, grad_lse=not late)
    assert report.ok, str(report)
    assert not bool((marks == 1).any()), "finite operands, yet something is computed once more"


@pytest.mark.parametrize("kind", ["probe", "spiky", "v_outlier", "shift(-120)"])
def test_operands_that_show_one_mistake(kind):
    for text in ("b1 h2/1 q150 k200 d256 bf16 causal", "b3 h2 q200 k200 d144 bf16 packed window(9,3)"):
        problem = Problem.parse(text)
        report, _ = run(problem, testing.operands(problem, kind))
        assert report.ok, str(report)


@pytest.mark.parametrize("layout", ["heads_first", "gaps", "fused"])
def test_strides_are_taken_as_they_are(layout):
    for text in ("b2 h2 q100 k100 d256 bf16", "b2 h2 q100 k100 d136 bf16 packed"):
        problem = Problem.parse(text)
        report, _ = run(problem, testing.operands(problem, layout=layout))
        assert report.ok, str(report)


def test_rows_of_a_packed_tensor_outside_every_sequence_stay_as_they_are():
    problem = Problem.parse("b2 h2 q150 k150 d256 bf16 packed causal")
    operands = testing.operands(problem, lengths=((70, 60), (50, 60)))
    out, lse = testing.attend(problem, operands)
    dq, dk, dv, *_ = simulate_backward_wide.backward(
        problem, operands, tile_of(problem), out, lse, *testing.cotangents(problem)
    )
    assert not bool(dq[120:].any() | dk[120:].any() | dv[120:].any())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("text", ["b1 h1 q70 k200 d136 fp16 window(40,3)", "b1 h2/1 q130 k70 d136 fp16 causal"])
def test_values_that_nobody_sees_have_no_effect(text, value):
    problem = Problem.parse(text)
    operands = testing.operands(problem)
    seen = reference.visible(problem.len_q, problem.len_k, *problem.band)
    q, k, v = (t.clone() for t in operands[:3])
    q[:, ~seen.any(1)], k[:, ~seen.any(0)], v[:, ~seen.any(0)] = value, value, value
    out, lse = testing.attend(problem, operands)
    given = testing.cotangents(problem)
    dq, dk, dv, *_ = simulate_backward_wide.backward(
        problem, operands._replace(q=q, k=k, v=v), tile_of(problem), out, lse, *given
    )
    report = testing.check_backward(problem, operands, (dq, dk, dv), *given)
    assert report.ok, str(report)


@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
@pytest.mark.parametrize("text", ["b2 h2/1 q70 k140 d136 fp16 causal", "b3 h1 q150 k150 d144 fp16 packed window(9,3)"])
def test_a_value_that_is_not_finite_reaches_what_sees_it_and_nothing_else(where, text):
    """As in the portable kernels. Tiles of rows and keys that do not see it hold it as well: these are computed once more."""
    grads, (key_marks, row_marks), expected = non_finite(where, text)
    for mine, theirs in zip(grads, expected, strict=True):
        assert torch.equal(mine.isfinite(), theirs.isfinite())
        assert float((mine - theirs)[theirs.isfinite()].abs().max()) < 0.1
    marks = row_marks if where in ("k", "v") else key_marks  # whose own sums pass over what is not finite
    assert bool((marks == 1).any())
    assert bool((marks == 0).any())


def non_finite(where, text, **options):
    from rowmax import plan
    from rowmax.kernels import launch

    problem = Problem.parse(text)
    operands = testing.operands(problem)
    d_out, d_lse = testing.cotangents(problem)
    chosen = d_out if where == "do" else getattr(operands, where)
    rows = chosen if problem.packed else chosen[-1]
    rows[rows.shape[0] // 2, -1, 3] = float("nan")
    out, lse = testing.attend(problem, operands)
    portable = plan(problem, Device.named("H200"), direction="backward", prefer="q_outer[16x16 w4 s1,32x32 w4 s1,32x32 w4 s1]")
    expected = launch.backward(problem, operands, out, lse, d_out, d_lse, (True, True, True), portable)
    dq, dk, dv, *marks = simulate_backward_wide.backward(problem, operands, tile_of(problem), out, lse, d_out, d_lse, **options)
    return (dq, dk, dv), marks, expected


@pytest.mark.parametrize("name", canaries.HOSTILE)
def test_lies_in_cu_seqlens_touch_nothing_outside(name):
    """The simulator raises on an access outside a tensor, and a block must come to its end."""
    problem = Problem.parse("b3 h1 q40 k40 d136 bf16 packed causal")
    operands = testing.operands(problem)
    out, lse = testing.attend(problem, operands)
    for side in ("queries", "keys", "both"):
        lies = canaries.lying(operands, canaries.HOSTILE[name], side)
        simulate_backward_wide.backward(problem, lies, tile_of(problem), out, lse, *testing.cotangents(problem))


# ---- mutants ---------------------------------------------------------------------------------------------------------------

PLAIN, CAUSAL, LONG = "b1 h1 q100 k100 d136 bf16", "b1 h1 q200 k200 d136 bf16 causal", "b1 h1 q400 k70 d136 bf16"
WIDE, GROUPED, BATCHES = "b1 h1 q70 k400 d136 bf16", "b1 h4/2 q130 k130 d136 bf16", "b2 h3 q70 k70 d136 bf16"
PACKED, WINDOW, RAGGED = "b4 h2 q300 k300 d136 bf16 packed causal", "b1 h1 q200 k200 d136 bf16 window(20,9)", PLAIN
SHIFTED = "b1 h1 q200 k230 d136 bf16 causal"


def only(old, new=""):
    return ((old, new),)


# Of the keys' kernel.
VALUES, KEYS = "dv = warpgroup_mma_wait(1, deps=[dv])\n", "dk = warpgroup_mma_wait(1, deps=[dk])\n"
FREE_DO, FREE_Q = "            release(do_ring, turn, BUILD.STAGES)\n", "            release(q_ring, turn, BUILD.STAGES)\n"
GIVE = "    give(share_ring, turn, BUILD.SHARES)\n"
LAID = "    shares.index(buffer_of(turn, BUILD.SHARES)).store(_to_own(p))\n"
FILL_Q = (
    "            fill_with_line(q_ring, q_parts, lse_parts, b, row, member + line, line, row + shift, turn, BUILD.STAGES)\n"
)
FILL_DO = (
    "            fill_with_line(do_ring, do_parts, delta_parts, b, row, member + line, line, row + shift, turn, BUILD.STAGES)\n"
)
NEXT_Q = "            wait_full(q_ring, turn + 1, BUILD.STAGES)\n"
NEXT_DO = "            wait_full(do_ring, turn + 1, BUILD.STAGES)\n"
# Of the queries' kernel.
FIRST_Q, FIRST_DO = "        wait_full(q_ring, CONSUMER, CONSUMERS)\n", "        wait_full(do_ring, CONSUMER, CONSUMERS)\n"
FIRST_K, FIRST_V = "        wait_full(k_ring, zero, BUILD.STAGES)\n", "        wait_full(v_ring, zero, BUILD.V_STAGES)\n"
NEXT_K = "            wait_full(k_ring, turn + 1, BUILD.STAGES)\n"
NEXT_V = "            wait_full(v_ring, turn + 1, BUILD.V_STAGES)\n"
ONCE_MORE = NEXT_V[:-1] + "  # once more: it keeps the wait for dP below the exponentials\n"
SUM, FREE_K = "            dq = warpgroup_mma_wait(1, deps=[dq])\n", "            release(k_ring, turn, BUILD.STAGES)\n"
FREE_V = "            release(v_ring, turn, BUILD.V_STAGES)\n"
LAST_V = "        release(v_ring, turns - 1, BUILD.V_STAGES)  # the other consumer may have one more\n"
GROUP, PLACE = "    group = tile // (tiles * members)\n", "    place = tile % (tiles * members)\n"
EDGES = "not BUILD.CAP and (col < full) | (col >= full_end)"

# name -> (replacements, problem, kernel, kind of operands)
MUTANTS = {
    # who waits for whom: keys
    "no wait for K": (only("        wait_full(k_ring, row * 0, 1)\n"), PLAIN, DOWN),
    "no wait for V": (only("        wait_full(v_ring, row * 0, 1)\n"), PLAIN, DOWN),
    "no wait for the first Q": (only("        wait_full(q_ring, row * 0, BUILD.STAGES)\n"), PLAIN, DOWN),
    "no wait for the first dO": (only("        wait_full(do_ring, row * 0, BUILD.STAGES)\n"), PLAIN, DOWN),
    "no wait for the next Q": (only(NEXT_Q), LONG, DOWN),
    "no wait for the next dO": (only(NEXT_DO), LONG, DOWN),
    "no wait for dO where dV is multiplied": (only("    wait_full(do_ring, turn, BUILD.STAGES)\n"), LONG, DOWN),
    "no wait for P": (only("    wait_full(share_ring, turn, BUILD.SHARES)\n"), PLAIN, DOWN),
    "P given before it is there": (only(LAID + GIVE, GIVE + LAID), PLAIN, DOWN),
    "P never given": (only(GIVE), PLAIN, DOWN),
    "Q never released": (only(FREE_Q), LONG, DOWN),
    "dO never released": (only(FREE_DO), LONG, DOWN),
    "dO before Q": (((FILL_Q, ""), (FILL_DO, FILL_DO + FILL_Q)), LONG, DOWN),
    "Q released early": (only(KEYS + FREE_Q, KEYS.replace("(1", "(2") + FREE_Q), LONG, DOWN),
    "dO released early": (only(VALUES + FREE_DO, VALUES.replace("(1", "(2") + FREE_DO), LONG, DOWN),
    "V overwritten while it is read": (only("    meet(2)  # nobody reads V", "    pass  # nobody reads V"), LONG, DOWN),
    "dP awaited too late, queries": (
        only(
            "dp = warpgroup_mma_wait(0, deps=[dp])\n        release", "dp = warpgroup_mma_wait(1, deps=[dp])\n        release"
        ),
        WIDE,
        ACROSS,
    ),
    "S awaited too late": (only("s = warpgroup_mma_wait(0, deps=[s])\n", "s = warpgroup_mma_wait(1, deps=[s])\n"), PLAIN, DOWN),
    "dP awaited too late": (
        only("dp = warpgroup_mma_wait(0, deps=[dp])\n", "dp = warpgroup_mma_wait(1, deps=[dp])\n"),
        PLAIN,
        DOWN,
    ),
    # and queries
    "no wait for Q, queries": (only(FIRST_Q), PLAIN, ACROSS),
    "no wait for dO, queries": (only(FIRST_DO), PLAIN, ACROSS),
    "no wait for the first K, queries": (only(FIRST_K), PLAIN, ACROSS),
    "no wait for the first V, queries": (only(FIRST_V), PLAIN, ACROSS),
    "no wait for the next K": (only(NEXT_K), WIDE, ACROSS),
    "no wait for the next V": (((NEXT_V + "            dp", "            dp"), (ONCE_MORE, "")), WIDE, ACROSS),
    "K released early": (only(SUM + FREE_K, FREE_K + SUM), WIDE, ACROSS),
    "K never released": (only(FREE_K), WIDE, ACROSS),
    "V never released": (only(FREE_V), WIDE, ACROSS),
    "the last V not released": (only(LAST_V), CAUSAL, ACROSS),
    "dQ awaited too late": (only(SUM, SUM.replace("(1", "(2")), WIDE, ACROSS),
    "S awaited too late, queries": (
        only("s = warpgroup_mma_wait(1, deps=[s])", "s = warpgroup_mma_wait(2, deps=[s])"),
        PLAIN,
        ACROSS,
    ),
    "one consumer frees K": (
        only("k_ring = open_ring(BUILD.STAGES, CONSUMERS)", "k_ring = open_ring(BUILD.STAGES, 1)"),
        WIDE,
        ACROSS,
    ),
    # products and numbers
    "P as if S were the next one's": (
        only("_scores_of(k_buffers, q_buffers, turn, turn + 1,", "_scores_of(k_buffers, q_buffers, turn, turn,"),
        LONG,
        DOWN,
    ),
    "dP of this turn for the next": (
        only("_scores_of(v_buffers, do_buffers, turn, turn + 1,", "_scores_of(v_buffers, do_buffers, turn, turn,"),
        LONG,
        DOWN,
    ),
    "dK without the scale": (only("dk = (dk * (scale_log2 * 0.6931471805599453))", "dk = (dk * 1.0)"), PLAIN, DOWN),
    "dQ without the scale": (only("dq = (dq * (scale_log2 * 0.6931471805599453))", "dq = (dq * 1.0)"), PLAIN, ACROSS),
    "the exchange in another order": (only("permute(1, 4, 2, 0, 3, 5)", "permute(1, 5, 2, 0, 3, 4)"), PLAIN, DOWN),
    "LSE of another buffer": (only("buffers[4].index(buffer_of(turn, BUILD.STAGES))", "buffers[4].index(0)"), LONG, DOWN),
    "delta of another buffer": (only("delta = delta_buffers.index(i)", "delta = delta_buffers.index(0)"), LONG, DOWN),
    "S of this turn for the next": (only("k_buffers, col, turn + 1,", "k_buffers, col, turn,"), WIDE, ACROSS),
    "V of this turn for the next": (
        only("do_buffers, v_buffers, col, turn + 1,", "do_buffers, v_buffers, col, turn,"),
        "b1 h1 q70 k400 d136/64 bf16",
        ACROSS,
    ),
    "K of the next turn for dQ": (
        only("k = k_buffers.index(buffer_of(turn, BUILD.STAGES))", "k = k_buffers.index(buffer_of(turn + 1, BUILD.STAGES))"),
        WIDE,
        ACROSS,
    ),
    "the first consumer's Q": (only("a = rows.index(CONSUMER + ", "a = rows.index(0 + "), LONG, ACROSS),
    # what is hidden: from keys by `backward_scores.py`, whose mutants are in `test_gluon_backward_simulation.py`
    "a key tile too few": (
        only("gl.maximum(early + gl.cdiv(seen, BUILD.BLOCK_N), 1)", "gl.maximum(early + gl.cdiv(seen, BUILD.BLOCK_N) - 1, 1)"),
        PLAIN,
        ACROSS,
    ),
    "keys of the first row": (
        only("    last = gl.minimum(row + ROWS, own_q) - 1\n", "    last = row\n"),
        SHIFTED,
        ACROSS,
    ),
    "nothing hidden from rows": (only(EDGES, "col < 0"), CAUSAL, ACROSS),
    "nothing hidden at the begin": (only(EDGES, "col >= full_end"), WINDOW, ACROSS),
    "nothing hidden at the end": (only(EDGES, "col < full"), WINDOW, ACROSS),
    "the other consumer's rows hidden": (
        only("row = _note(notes, COL) + CONSUMER * ROWS\n        len_q", "row = _note(notes, COL)\n        len_q"),
        CAUSAL,
        ACROSS,
    ),
    "one key more": (
        only("seen = eights < gl.minimum(end_key", "seen = eights <= gl.minimum(end_key"),
        WINDOW,
        ACROSS,
        "probe",
    ),
    "one key less": (only("(eights >= first_key(", "(eights > first_key("), WINDOW, ACROSS, "probe"),
    # where it lies
    "K of another head": (only("head // BUILD.GROUP, turn, BUILD.STAGES", "head * 0, turn, BUILD.STAGES"), BATCHES, ACROSS),
    "V of another head": (only("head // BUILD.GROUP, turn, BUILD.V_STAGES", "head, turn, BUILD.V_STAGES"), GROUPED, ACROSS),
    "K of another head, keys": (
        only("first_key, head, 0, 1, 0, 1, 0)\n        for", "first_key, 0, 0, 1, 0, 1, 0)\n        for"),
        BATCHES,
        DOWN,
    ),
    "the rows of the first consumer": (
        only("fill(q_ring, q_parts, b, row + c * ROWS,", "fill(q_ring, q_parts, b, row,"),
        LONG,
        ACROSS,
    ),
    "dO of the first consumer": (
        only("fill(do_ring, do_parts, b, row + c * ROWS,", "fill(do_ring, do_parts, b, row,"),
        LONG,
        ACROSS,
    ),
    "LSE of another head": (
        only("line = (b * heads + head).to(gl.int64)", "line = (b * heads + head * 0).to(gl.int64)"),
        BATCHES,
        ACROSS,
        "spiky",
    ),
    "heads of another batch": (
        only("row_tile * BLOCK, head % heads, head // heads,", "row_tile * BLOCK, head % heads, head * 0,"),
        BATCHES,
        ACROSS,
    ),
    "keys of the sequence before": (only("    begin = _note(notes, BEGIN_K)\n", "    begin = 0\n"), PACKED, ACROSS),
    "rows of the sequence before": (
        only("    row = _note(notes, BEGIN_Q) + _note(notes, COL)\n", "    row = _note(notes, COL)\n"),
        PACKED,
        ACROSS,
    ),
    "numbers of the sequence before": (only("        line += line_begin(begin_q, sequence)\n"), PACKED, ACROSS, "spiky"),
    "numbers of the sequence before, keys": (only("zero + line_begin(begin_q, sequence) - begin_q", "zero"), PACKED, DOWN),
    "the first group of heads": (only(GROUP + PLACE, "    group = tile * 0\n" + PLACE), BATCHES, ACROSS),
}


def fails(mutants, problem, operands, kernels) -> bool:
    for seed in range(12):
        try:
            options = {"seed": seed, "late": seed % 2 == 0, "mutants": mutants, "kernels": kernels, "group_mb": 0}
            report, marks = run(problem, operands, repair=False, **options)
        except simulate.Wrong:
            return True
        if not report.ok or bool((marks == 1).any()):
            return True
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name):
    replacements, spelling, kernels, *kind = MUTANTS[name]
    problem = Problem.parse(spelling)
    assert fails(replacements, problem, testing.operands(problem, *kind), kernels), f"mutant '{name}' lives"


ROW_FLAG, KEY_FLAG = "(b * heads + head) * gl.cdiv(len_q, ROWS)", "(b * heads + head) * gl.cdiv(len_k, KEYS)"
NAN, NAN_PACKED = "b2 h2 q70 k130 d136 fp16 causal", "b3 h1 q150 k150 d144 fp16 packed window(9,3)"
# name -> (replacements, what holds a NaN, problem, kernel)
MARKS = {
    "NaN of dQ not noticed": (only("_mark(dq, row, len_q,", "_mark(dq, row, row,"), "k", NAN, ACROSS),
    "mark of another head's rows": (only(ROW_FLAG, ROW_FLAG.replace("+ head", "+ head * 0")), "k", NAN, ACROSS),
    "mark of the first consumer": (only("_note(notes, FLAG) + CONSUMER", "_note(notes, FLAG)"), "k", NAN_PACKED, ACROSS),
    "mark of the sequence before": (only("begin_q // ROWS + sequence", "begin_q // ROWS"), "k", NAN_PACKED, ACROSS),
    "mark of another head's keys": (only(KEY_FLAG, KEY_FLAG.replace("+ head", "+ head * 0")), "q", NAN, DOWN),
    "mark of the sequence before, keys": (only("begin_k // KEYS + sequence", "begin_k // KEYS"), "q", NAN_PACKED, DOWN),
}


@pytest.mark.parametrize("name", MARKS)
def test_a_mutant_of_the_marks_fails(name):
    replacements, where, text, kernels = MARKS[name]
    (dq, dk, dv), _, expected = non_finite(where, text, mutants=replacements, kernels=kernels)
    pairs = zip((dq,) if kernels == ACROSS else (dk, dv), expected[:1] if kernels == ACROSS else expected[1:], strict=True)
    assert not all(torch.equal(mine.isfinite(), theirs.isfinite()) for mine, theirs in pairs), f"mutant '{name}' lives"
