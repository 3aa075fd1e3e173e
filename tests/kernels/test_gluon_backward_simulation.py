"""The Hopper backward simulated on the CPU: right results, no deadlock, no race, and mutants that must fail."""

import functools
import os

import pytest
import torch

from rowmax import Problem, reference, testing

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels before and behind run in Triton's interpreter", allow_module_level=True)

import canaries
import simulate
import simulate_backward

from rowmax.plan.hopper_backward import HopperBackwardTile

PLAIN, TOGETHER, THREE = "64x128 s2 backward", "64x128 s2 backward g1", "64x128 s3 backward"  # for head dims over 64
WIDE, ALONE = "128x128 s2 backward g1", "128x128 s2 backward"

CASES = [
    ("b1 h2 q200 k300 d128 bf16", PLAIN),
    ("b1 h2 q192 k256 d128 bf16", PLAIN),  # no hidden keys
    ("b1 h4/1 q128 k128 d64 fp16", WIDE),
    ("b1 h2 q200 k300 d128 bf16 causal", PLAIN),
    ("b2 h2/1 q130 k257 d128 fp16 causal", TOGETHER),
    ("b1 h2 q200 k200 d64 bf16 causal", WIDE),
    ("b2 h4/2 q200 k129 d64 bf16 causal", WIDE),  # rows that see nothing
    ("b1 h2 q300 k300 d64 fp16 causal", WIDE),
    ("b1 h4/1 q150 k200 d64 bf16", WIDE),
    ("b1 h1 q300 k60 d128 bf16 causal", THREE),
    ("b1 h2 q300 k300 d128 bf16 window(40,0)", PLAIN),
    ("b1 h2 q150 k400 d64 fp16 window(0,70)", WIDE),
    ("b1 h2 q300 k100 d64 bf16 window(9,3)", WIDE),
    ("b1 h2/1 q100 k400 d64 bf16 window(5,5)", WIDE),  # keys that nobody sees, and whole tiles of them
    ("b1 h1 q200 k200 d128 bf16 window(inf,5)", TOGETHER),
    ("b1 h1 q200 k300 d64 bf16 window(0,0)", WIDE),
    ("b1 h2 q1 k1 d64 bf16", WIDE),
    ("b1 h2 q5 k300 d128 bf16 causal", PLAIN),
    ("b1 h2 q129 k130 d72/40 bf16 causal", PLAIN),
    ("b1 h2 q129 k130 d40/72 fp16", TOGETHER),
    ("b1 h2 q100 k200 d96 bf16 causal", PLAIN),
    ("b1 h2 q100 k100 d64/128 fp16", PLAIN),
    ("b1 h2 q70 k130 d64 bf16 causal scale=-0.1", WIDE),
    ("b1 h2 q70 k130 d64 bf16 scale=0.0", WIDE),
    ("b5 h4/2 q330 k330 d64 bf16 packed causal", WIDE),
    ("b5 h2 q330 k400 d128 bf16 packed", PLAIN),
    ("b3 h4/2 q300 k300 d64 fp16 packed window(9,7)", WIDE),
    ("b4 h2 q500 k200 d64 bf16 packed causal", WIDE),
    ("b6 h3 q200 k300 d40/24 fp16 packed causal", WIDE),
    ("b2 h4/2 q200 k129 d64 bf16 causal", f"{WIDE} p2"),
    ("b1 h4/1 q70 k200 d128 fp16", f"{PLAIN} p4"),
    ("b1 h6/1 q130 k140 d40/72 fp16 causal", f"{TOGETHER} p2"),
    ("b5 h4/2 q330 k330 d64 bf16 packed causal", f"{WIDE} p2"),
]


def run(problem, operands, tile, grad_lse=True, **options):
    out, lse = testing.attend(problem, operands)
    d_out, d_lse = testing.cotangents(problem)
    d_lse = d_lse if grad_lse else None
    *grads, suspect = simulate_backward.backward(
        problem, operands, HopperBackwardTile.parse(tile), out, lse, d_out, d_lse, **options
    )
    return testing.check_backward(problem, operands, grads, d_out, d_lse, out), suspect


@pytest.mark.parametrize(("text", "tile"), CASES)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_simulated_kernel_is_right(text, tile, late):
    problem = Problem.parse(text)
    report, suspect = run(problem, testing.operands(problem), tile, late=late, grad_lse=not late)
    assert report.ok, str(report)
    assert not bool((suspect == 1).any()), "finite operands, yet keys are computed once more"


@pytest.mark.parametrize("kind", ["probe", "spiky", "v_outlier", "shift(-120)"])
def test_operands_that_show_one_mistake(kind):
    for text, tile in (
        ("b1 h2/1 q150 k200 d64 bf16 causal", WIDE),
        ("b1 h1 q200 k130 d128 bf16", PLAIN),
        ("b3 h2 q200 k200 d64 bf16 packed window(9,3)", WIDE),
    ):
        problem = Problem.parse(text)
        report, _ = run(problem, testing.operands(problem, kind), tile)
        assert report.ok, str(report)


@pytest.mark.parametrize("layout", ["heads_first", "gaps", "fused"])
def test_strides_are_taken_as_they_are(layout):
    for text in ("b2 h2 q100 k100 d64 bf16", "b2 h2 q100 k100 d64 bf16 packed"):
        problem = Problem.parse(text)
        report, _ = run(problem, testing.operands(problem, layout=layout), WIDE)
        assert report.ok, str(report)


def test_rows_of_a_packed_tensor_outside_every_sequence_stay_as_they_are():
    problem = Problem.parse("b2 h2 q150 k150 d64 bf16 packed causal")
    operands = testing.operands(problem, lengths=((70, 60), (50, 60)))
    out, lse = testing.attend(problem, operands)
    dq, dk, dv, _ = simulate_backward.backward(
        problem, operands, HopperBackwardTile.parse(WIDE), out, lse, *testing.cotangents(problem)
    )
    assert not bool(dq[120:].any() | dk[120:].any() | dv[120:].any())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("text", ["b1 h2 q100 k300 d64 fp16 window(40,3)", "b2 h4/2 q200 k100 d64 fp16 causal"])
def test_values_that_nobody_sees_have_no_effect(text, value):
    problem = Problem.parse(text)
    operands = testing.operands(problem)
    seen = reference.visible(problem.len_q, problem.len_k, *problem.band)
    q, k, v = (t.clone() for t in operands[:3])
    q[:, ~seen.any(1)], k[:, ~seen.any(0)], v[:, ~seen.any(0)] = value, value, value
    out, lse = testing.attend(problem, operands)
    given = testing.cotangents(problem)
    tile = HopperBackwardTile.parse(WIDE)
    *grads, _ = simulate_backward.backward(problem, operands._replace(q=q, k=k, v=v), tile, out, lse, *given)
    report = testing.check_backward(problem, operands, grads, *given)
    assert report.ok, str(report)


@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
@pytest.mark.parametrize(
    ("text", "tile"),
    [
        ("b2 h4/2 q130 k200 d64 fp16 causal", WIDE),
        ("b4 h2 q300 k300 d64 fp16 packed window(9,3)", WIDE),
        ("b2 h4/2 q130 k200 d64 fp16 causal", f"{WIDE} p2"),
    ],
)
def test_a_value_that_is_not_finite_reaches_what_sees_it_and_nothing_else(where, text, tile):
    """As in the portable kernels. Tiles of rows and keys that do not see it hold it as well: these are computed once more."""
    dq_dk_dv, suspect, expected = non_finite(where, text, tile)
    for mine, theirs in zip(dq_dk_dv, expected, strict=True):
        assert torch.equal(mine.isfinite(), theirs.isfinite())
        assert float((mine - theirs)[theirs.isfinite()].abs().max()) < 0.1
    if where in ("q", "do"):
        assert bool((suspect == 1).any())
        assert bool((suspect == 0).any())


def non_finite(where, text, tile=WIDE, **options):
    problem, given, expected = portable_non_finite(where, text)
    *grads, suspect = simulate_backward.backward(problem, given[0], HopperBackwardTile.parse(tile), *given[1:], **options)
    return grads, suspect, expected


@functools.cache
def portable_non_finite(where, text):
    """`(problem, (operands, out, lse, d_out, d_lse), gradients by the portable kernels)` with one NaN in `where`."""
    from rowmax import Device, plan
    from rowmax.kernels import launch

    problem = Problem.parse(text)
    operands = testing.operands(problem)
    d_out, d_lse = testing.cotangents(problem)
    chosen = d_out if where == "do" else getattr(operands, where)
    rows = chosen if problem.packed else chosen[-1]
    rows[rows.shape[0] // 2, -1, 3] = float("nan")
    out, lse = testing.attend(problem, operands)
    portable = plan(problem, Device.named("H200"), direction="backward", prefer="q_outer[64x64 w4 s1,64x64 w4 s1,64x64 w4 s1]")
    expected = launch.backward(problem, operands, out, lse, d_out, d_lse, (True, True, True), portable)
    return problem, (operands, out, lse, d_out, d_lse), expected


@pytest.mark.parametrize("name", canaries.HOSTILE)
def test_lies_in_cu_seqlens_touch_nothing_outside(name):
    """The simulator raises on an access outside a tensor, and a block must come to its end."""
    problem = Problem.parse("b3 h1 q40 k40 d64 bf16 packed causal")
    operands = testing.operands(problem)
    out, lse = testing.attend(problem, operands)
    for side in ("queries", "keys", "both"):
        lies = canaries.lying(operands, canaries.HOSTILE[name], side)
        simulate_backward.backward(problem, lies, HopperBackwardTile.parse(WIDE), out, lse, *testing.cotangents(problem))


# ---- mutants ---------------------------------------------------------------------------------------------------------------

CAUSAL, CAUSAL_64 = "b1 h1 q200 k200 d128 bf16 causal", "b1 h1 q200 k200 d64 bf16 causal"
LONG, LONG_64 = "b1 h1 q400 k100 d128 bf16", "b1 h1 q400 k100 d64 bf16"
GROUPED, PACKED = "b1 h4/2 q130 k130 d64 bf16", "b4 h2 q300 k300 d64 bf16 packed causal"
WINDOW = "b1 h1 q200 k200 d64 bf16 window(20,9)"
GROUPED_64, GROUPED_PACKED = "b2 h4/2 q70 k70 d64 bf16", "b2 h4/2 q150 k150 d64 bf16 packed"
GROUPED_128, BATCHES, RAGGED = "b1 h4/2 q130 k130 d128 bf16", "b2 h3 q70 k70 d64 bf16", "b1 h1 q300 k70 d64 bf16"

FREE_Q = "        release(q_ring, turn, BUILD.STAGES)\n"
GIVE = "        give(share_ring, turn, SHARES)\n"
DK = "        dv, dk = warpgroup_mma_wait(BUILD.CONSUMERS, deps=[dv, dk])\n"
NEXT_S = "        s = _next_scores(k, q_buffers, q_ring, turn, turns, BUILD)\n"
DQ = "        dq = warpgroup_mma_wait(1, deps=[dq])\n"
OTHERS = """        if BUILD.ORDERED:
            lay_down(dq, dq_buffers, sum_ring, turn, CONSUMER, BUILD)
        else:
            last_row, last_line = _place_before(turn, line, ranges, BUILD)
    """
ADD = "        _add(dq, dq_buffers.index(CONSUMER + _nothing(row)), last_line, last_row, dq_source, CONSUMER, BUILD)\n"
LAST_S = "        s = warpgroup_mma_wait(0, deps=[s])\n"
BEFORE = "        wait_full(share_ring, before, SHARES)\n"
PRODUCT = "        dq = _query_gradient(shares, k_buffers, before, CONSUMER, BUILD)\n"
TURN = "        give_turn(CONSUMER, BUILD.CONSUMERS)\n"
STORE = "        shares.index(buffer_of(turn, SHARES) * BUILD.CONSUMERS + CONSUMER).store(ds)\n"
EDGE = "edge = (row < full) | (row >= full_end)"
NEXT_Q = "    wait_full(q_ring, turn + 1, BUILD.STAGES, turn + 1 < turns)\n"
FENCE = "    buffer_of_sum(dq_buffer).store(dq)\n    fence_async_shared()\n"


def only(old, new=""):
    return ((old, new),)


MUTANTS = {
    # who waits for whom
    "no wait for K": (only("        wait_full(k_ring, c, BUILD.CONSUMERS, wanted)\n", "        pass\n"), CAUSAL, PLAIN),
    "no wait for V": (only("    wait_full(v_ring, CONSUMER, BUILD.CONSUMERS, wanted)\n"), CAUSAL, PLAIN),
    "K of no turn awaited": (
        only("    wanted = turns > 0\n", "    wanted = True\n"),
        "b1 h1 q30 k200 d64 bf16 window(3,3)",
        WIDE,
    ),
    "no wait for the first Q": (only("    wait_full(q_ring, first_row * 0, BUILD.STAGES, wanted)\n"), CAUSAL, PLAIN),
    "no wait for the next Q": (only(NEXT_Q), LONG_64, WIDE),
    "Q of no turn awaited": (only(NEXT_Q, NEXT_Q.replace("turn + 1 < turns", "True")), CAUSAL_64, WIDE),
    "no wait for dO": (only("        wait_full(do_ring, turn, BUILD.STAGES)\n"), LONG, PLAIN),
    "no wait for dS": (only(BEFORE + PRODUCT, PRODUCT), LONG, PLAIN),
    "dS laid down before the last one is awaited": (
        only(BEFORE + PRODUCT + TURN + STORE, STORE + BEFORE + PRODUCT + TURN),
        LONG,
        PLAIN,
    ),
    "dS of this turn": (only("before = turn + 3", "before = turn + 2"), LONG, PLAIN),
    "dS of one consumer is enough": (only("count=WRITERS", "count=1"), CAUSAL, PLAIN),
    "dS given before the fence": (only(ADD + GIVE + LAST_S, GIVE + ADD + LAST_S), LONG, PLAIN),
    "dS given before dQ is done": (
        only(DQ + OTHERS + ADD + GIVE + LAST_S, "        fence_async_shared()\n" + GIVE + DQ + OTHERS + ADD + LAST_S),
        LONG,
        PLAIN,
    ),
    "dQ not fenced": (only(FENCE, FENCE.splitlines()[0] + "\n"), LONG_64, WIDE),
    "dQ laid over the one before": (only("    store_wait(0)  # the sum before has left the buffer\n"), LONG, PLAIN),
    "Q released early": (only(DK + FREE_Q, FREE_Q + DK), LONG, PLAIN),
    "Q never released": (only(DK + FREE_Q, DK), LONG, PLAIN),
    "no empty Q awaited": (
        only(
            "line_source = line\n    i = buffer_of(turn, STAGES)\n    mbarrier.wait(empty.index(i), ",
            "line_source = line\n    i = buffer_of(turn, STAGES)\n    max(0, ",
        ),
        LONG,
        PLAIN,
    ),
    "K overwritten while it is read": (only("    meet(BUILD.CONSUMERS)  # nobody", "    pass  # nobody"), CAUSAL, PLAIN),
    "no first turn to issue": (only("    begin_turns(CONSUMER, BUILD.CONSUMERS)\n"), CAUSAL, PLAIN),
    "the turn to issue is kept": (only(TURN), CAUSAL, PLAIN),
    "the first turn twice": (only("if CONSUMER == CONSUMERS - 1:", "if CONSUMER >= 0:"), CAUSAL, PLAIN),
    # products
    "dP awaited too late": (only("dp = warpgroup_mma_wait(1", "dp = warpgroup_mma_wait(2"), CAUSAL, PLAIN),
    "dQ awaited too late": (only(NEXT_S + DQ, NEXT_S + DQ.replace("(1", "(2")), CAUSAL, PLAIN),
    "dK awaited too late": (only(DK, DK.replace("S, d", "S + 1, d")), CAUSAL, PLAIN),
    "S awaited too late": (only(GIVE + LAST_S, GIVE + LAST_S.replace("(0", "(1")), CAUSAL, PLAIN),
    "S of this turn for the next": (
        only("q = q_buffers.index(buffer_of(turn + 1,", "q = q_buffers.index(buffer_of(turn,"),
        LONG,
        PLAIN,
    ),
    "dQ transposed": (only("buffer.reshape([SIDE, SIDE]).permute((1, 0))", "buffer.reshape([SIDE, SIDE])"), CAUSAL, PLAIN),
    "dQ of one consumer's keys": (only("use_acc=c > 0", "use_acc=False"), CAUSAL, PLAIN),
    "dQ of the first part": (only("[line, row + ROW, COLUMN]", "[line, row + ROW, 0]"), CAUSAL, PLAIN),
    "dQ of the first rows": (only("[line, row + ROW, COLUMN]", "[line, row, COLUMN]"), CAUSAL_64, WIDE),
    "the last dQ left out": (
        only(
            "    if turns > 0:\n        wait_full(share_ring, turns - 1",
            "    if turns > 99:\n        wait_full(share_ring, turns - 1",
        ),
        CAUSAL,
        PLAIN,
    ),
    "dQ before the first turn is added": (
        only("gl.where(turn == 0, NOWHERE, row)", "gl.where(turn == 0, row - 64, row)"),
        CAUSAL,
        PLAIN,
    ),
    "dQ before the first turn is added before the first row": (
        only("gl.where(turn == 0, NOWHERE, row)", "gl.where(turn == 0, -BUILD.BLOCK_M, row)"),
        CAUSAL,
        PLAIN,
    ),
    "lines of a packed sequence where its rows are": (only("line_begin(begin_q, sequence) - begin_q", "0"), PACKED, WIDE),
    "dK without the scale": (only("    dk *= scale_log2 * 0.6931471805599453\n", ""), CAUSAL, PLAIN),
    "delta of another buffer": (only("delta = delta_buffers.index(i)", "delta = delta_buffers.index(0)"), LONG, PLAIN),
    "LSE of another buffer": (only("lse = lse_buffers.index(i)", "lse = lse_buffers.index(0)"), LONG, PLAIN),
    # what is hidden
    "nothing hidden": (only("        if edge:", "        if row < 0:"), CAUSAL_64, WIDE),
    "nothing hidden at the begin": (only(EDGE, "edge = row >= full_end"), CAUSAL_64, WIDE),
    "nothing hidden at the end": (only(EDGE, "edge = row < full"), WINDOW, WIDE),
    "keys past the end": (
        only("    if col + BLOCK_N > len_k:", "    if col + BLOCK_N > 99999:"),
        RAGGED,
        WIDE,
        "shift(-1000)",
    ),
    "keys past the end not hidden": (only("gl.where(cols < len_k, end, 0)", "end"), RAGGED, WIDE, "shift(-1000)"),
    "the other consumer's keys hidden": (
        only("            col = _note(notes, COL) + CONSUMER * KEYS\n", "            col = _note(notes, COL)\n"),
        CAUSAL_64,
        WIDE,
    ),
    "one key more": (only("seen = eights < gl.where", "seen = eights <= gl.where"), WINDOW, WIDE, "probe"),
    "one key less": (only("(eights >= first_query", "(eights > first_query"), CAUSAL_64, WIDE, "probe"),
    "rows of the tensor as rows of the sequence": (only("row - _note(notes, BEGIN_Q), col", "row, col"), PACKED, WIDE),
    # where it lies
    "K of another head in parts": (
        only(
            "b, first_key + c * KEYS, head // BUILD.PARTS, c, BUILD.CONSUMERS, 0, 1, 0)\n        for",
            "b, first_key + c * KEYS, head % BUILD.PARTS, c, BUILD.CONSUMERS, 0, 1, 0)\n        for",
        ),
        GROUPED_64,
        f"{WIDE} p2",
    ),
    "parts in one place": (only("(b * heads + head).to(", "(b * heads + head // 2 * 2).to("), GROUPED_64, f"{WIDE} p2"),
    "parts as long as a sequence": (only("* _note(notes, TOTAL_K) +", "* len_k +"), GROUPED_PACKED, f"{WIDE} p2"),
    "K of another head": (
        only(
            "b, first_key + c * KEYS, head // BUILD.PARTS, c, BUILD.CONSUMERS, 0, 1, 0)\n        for",
            "b, first_key + c * KEYS, 0, c, BUILD.CONSUMERS, 0, 1, 0)\n        for",
        ),
        BATCHES,
        WIDE,
    ),
    "keys of the first consumer": (
        only("fill(k_ring, k_parts, b, first_key + c * KEYS", "fill(k_ring, k_parts, b, first_key"),
        CAUSAL_64,
        WIDE,
    ),
    "Q of the first head of a group": (
        only(
            "b, row, member + line, line, row + shift, turn, BUILD.STAGES)\n            if",
            "b, row, head * BUILD.GROUP, line, row + shift, turn, BUILD.STAGES)\n            if",
        ),
        GROUPED,
        WIDE,
    ),
    "LSE of another head": (
        only("lse_parts, b, row, member + line, line, row", "lse_parts, b, row, member + line, member, row"),
        BATCHES,
        WIDE,
        "spiky",
    ),
    "the group's heads not counted": (only("BUILD.BLOCK_M, line + turn % BUILD.GROUP", "BUILD.BLOCK_M, line"), GROUPED, WIDE),
    "one head of a group": (only("BUILD.GROUP * tiles, 0)", "tiles, 0)"), GROUPED, WIDE),
    "rows before the group's last head": (only("row - turn // BUILD.GROUP *", "row - turn *"), GROUPED_128, PLAIN),
    "dQ of a group's next head": (only("place_of(turn - 1, line", "place_of(turn, line"), GROUPED_128, PLAIN),
    "heads of another batch": (only("head % heads, head // heads", "head % heads, head * 0"), BATCHES, WIDE),
    "a group of heads counted twice": (
        only("group = tile // (tiles * members)", "group = tile // (tiles * members) * 0"),
        BATCHES,
        ALONE,
    ),
    "keys of the sequence before": (only("    begin_k = _note(notes, BEGIN_K)\n", "    begin_k = 0\n"), PACKED, WIDE),
    "queries of the sequence before": (
        only("return turns, begin_q + start +", "return turns, start +"),
        PACKED,
        WIDE,
    ),
    "rows of the next sequence": (
        only("    if BUILD.PACKED and col + KEYS > length:", "    if BUILD.PACKED and col + KEYS > length + 64:"),
        PACKED,
        WIDE,
    ),
    "dims of the next head": (
        only("(gl.expand_dims(dims, 0) < DIM)", "(gl.expand_dims(dims, 0) < 64)"),
        "b3 h2 q100 k100 d40 bf16 packed",
        WIDE,
    ),
    "a mark at every key": (only("1, mask=bad & gl", "1, mask=gl"), RAGGED, WIDE),
}


def fails(mutants, problem, operands, tile) -> bool:
    for seed in range(12):
        try:
            report, suspect = run(problem, operands, tile, seed=seed, late=seed % 2 == 0, mutants=mutants, repair=False)
        except simulate.Wrong:
            return True
        if not report.ok or bool((suspect == 1).any()):
            return True
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name):
    replacements, spelling, tile, *kind = MUTANTS[name]
    problem = Problem.parse(spelling)
    assert fails(replacements, problem, testing.operands(problem, *kind), tile), f"mutant '{name}' lives"


FLAG = "flag = (b * heads + head) // BUILD.PARTS * gl.cdiv(len_k, KEYS) + col // KEYS"
FLAG_PACKED = "begin_k // KEYS + sequence + col // KEYS"
MARKS = {
    "NaN not noticed": only("bad = total != total", "bad = total > total"),
    "mark of another head": only(FLAG, FLAG.replace("+ head)", "+ head * 0)")),
    "mark of another batch": only(FLAG, FLAG.replace("(b *", "((b + 1) *")),
    "mark of another tile": only(FLAG, FLAG + " + 1"),
    "mark of the first consumer": only("_note(notes, FLAG) + CONSUMER", "_note(notes, FLAG)"),
}


@pytest.mark.parametrize("name", MARKS)
def test_a_mutant_of_the_marks_fails(name):
    for where in ("q", "do"):
        try:
            grads, _, expected = non_finite(where, "b2 h4/2 q130 k200 d64 fp16 causal", mutants=MARKS[name])
        except simulate.Wrong:
            return
        if not all(torch.equal(a.isfinite(), b.isfinite()) for a, b in zip(grads, expected, strict=True)):
            return
    pytest.fail(f"mutant '{name}' lives")
