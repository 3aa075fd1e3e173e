"""Latent attention on Hopper simulated on the CPU: right by the acceptance rule, no deadlock, no race, and mutants fail."""

import os

import pytest

from rowmax import PagedProblem, testing
from rowmax.plan.split_kv import SplitTile
from rowmax.testing import paged

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the other kernels run in Triton's interpreter", allow_module_level=True)

import simulate
import simulate_latent

ONE, RAGGED = "b1 h64/1 q1 k384 d576/512 bf16 causal paged64", "b3 h64/1 q1 k320 d576/512 bf16 causal paged64"
CASES = [
    (ONE, [(1, 384)], "s5 x1"),  # as long as the block table
    (ONE, [(1, 310)], "s4 x2"),
    (RAGGED, [(1, 300), (1, 0), (1, 64)], "s5 p4"),
    ("b2 h128/1 q1 k128 d576/512 fp16 paged64", [(1, 1), (1, 65)], "s5 x3"),  # empty parts
    ("b2 h64/1 q3 k256 d576/512 bf16 causal paged128", [(3, 194), (3, 2)], "s5 p6"),  # a query that sees nothing
    ("b3 h64/1 q5 k256 d576/512 bf16 causal packed paged64", [(2, 200), (0, 66), (1, 129)], "s4 p6"),
]


def run(text, lengths, parts, kind="normal", need_lse=True, **options):
    problem = PagedProblem.parse(text)
    given, flat, packed = paged.paged_operands(problem, lengths, kind, shared=True)
    out, lse = simulate_latent.attend(problem, given, SplitTile.parse(f"64x64 w4 {parts}"), need_lse=need_lse, **options)
    if lse is None:
        return testing.check_forward(flat, packed, out.flatten(0, 1))
    return testing.check_forward(flat, packed, *paged.as_packed(problem, out, lse))


@pytest.mark.parametrize(("text", "lengths", "parts"), CASES)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_simulated_kernel_is_right(text, lengths, parts, late):
    report = run(text, lengths, parts, late=late)
    assert report.ok, str(report)


@pytest.mark.parametrize(("stages", "case", "late"), [("s8", 1, False), ("s8", 5, True), ("s9", 3, True)])
def test_scores_ahead_of_their_weights(stages, case, late):
    text, lengths, parts = CASES[case]
    report = run(text, lengths, f"{stages} {parts.split()[1]}", late=late)
    assert report.ok, str(report)


@pytest.mark.parametrize("kind", ["spiky", "shift(-30000)", "constant(133120)", "nan(k)"])
def test_operands_that_show_one_mistake(kind):
    report = run(ONE, [(1, 130)], "s5 x1", kind, late=True)
    assert report.ok, str(report)


def test_without_an_lse():
    assert run(ONE, [(1, 70)], "s5 x1", need_lse=False).ok


# ---- mutants -----------------------------------------------------------------------------------------------------------

WEIGHTS, EMPTY = "        wait_full(weight_ring, j, 1)\n", "    wait_empty(weight_ring, j, 1)\n"
PRODUCTS = "            left, right = warpgroup_mma_wait(0, deps=[left, right])\n"
FREE = "            release(piece_ring, turn, BUILD.PIECES)\n"
FREE_WEIGHTS = "        release(weight_ring, j, 1)\n"
SCORES = "                s = warpgroup_mma_wait(0, deps=[_scores(q, j, True, buffers, rings, BUILD)])\n"
FREE_ROPE = "                release(rope_ring, j + BUILD.HELD_ROPE, BUILD.ROPES)\n"
HELD = "        release_read(piece_ring, turn, BUILD.PIECES)\n        return q\n"
CLEAR = "        for c in gl.static_range(BUILD.EACH):\n            _clear("
EACH_K = "        wait_full(piece_ring, turn, BUILD.PIECES, wanted)\n"
AHEAD = "            left = warpgroup_mma_wait(1, deps=[left])\n"
FREE_AHEAD = "            release(piece_ring, turn, BUILD.PIECES)\n            right ="
BEHIND = "            right = warpgroup_mma_wait(0, deps=[right])\n"
FREE_BEHIND = "            release(piece_ring, turn + 2, BUILD.PIECES)\n"
# What -> (replacements, operands); of 310 keys unless they say otherwise.
MUTANTS = {
    "weights not awaited": ([(WEIGHTS, "")], ""),
    "weights written over": ([(EMPTY, "")], ""),
    "weights given back early": ([(FREE_WEIGHTS, ""), (WEIGHTS, WEIGHTS + FREE_WEIGHTS)], ""),
    "weights never given back": ([(FREE_WEIGHTS, "")], ""),
    "V given back early": ([(PRODUCTS + FREE, FREE + PRODUCTS)], ""),
    "V never given back": ([(PRODUCTS + FREE, PRODUCTS)], ""),
    "the last columns given back early": ([(SCORES + FREE_ROPE, FREE_ROPE + SCORES)], ""),
    "the last columns never given back": ([(FREE_ROPE, "")], ""),
    "Q never given back": ([(HELD, "        return q\n")], ""),
    "the last columns not awaited": ([("    wait_full(rope_ring, turn, BUILD.ROPES, wanted)\n", "")], ""),
    "K not awaited": ([(EACH_K, "")], ""),
    "Q not awaited": ([("        wait_full(q_rope_ring, zero, 1)\n", "")], "64"),
    "the left columns twice": ([("place = (page, slot, 0, column_of(c, BUILD.WIDTH))", "place = (page, slot, 0, 0)")], ""),
    "halves exchanged": ([("turn = _turn(j, WHICH, BUILD)", "turn = _turn(j, 1 - WHICH, BUILD)")], ""),
    "one page": ([("            page = following\n", "")], ""),
    "the page behind the last": ([("gl.minimum(j + 1, turns - 1)", "(j + 1)")], "384"),
    "a key too many": ([("cols < behind", "cols <= behind")], ""),
    "the left of V not cleared": ([(CLEAR, CLEAR.replace("range(", "range(1, "))], ""),
    "the right of V not cleared": ([(CLEAR, CLEAR.replace("EACH", "EACH - 1"))], ""),
    "no fence": ([("    fence_async_shared()\n\n\n@gluon.jit\ndef _last", "\n\n@gluon.jit\ndef _last")], ""),
    "left sums not scaled": ([("        left = _scaled(left, alpha)\n", "")], "spiky"),
    "right sums not scaled": ([("        right = _scaled(right, alpha)\n", "")], "spiky"),
    "not divided": ([("alphas.index(0).store(inverse)", "alphas.index(0).store(inverse * 0 + 1)")], ""),
}
# As above, of quarters and scores ahead of their weights.
AHEAD_MUTANTS = {
    "the first half given back early": (
        [(AHEAD + FREE_AHEAD, FREE_AHEAD.replace("            right =", AHEAD + "            right ="))],
        "",
    ),
    "the second half given back early": ([(BEHIND + FREE_BEHIND, FREE_BEHIND + BEHIND)], ""),
    "one that is not finished": ([(AHEAD, AHEAD.replace("(1,", "(2,"))], ""),
    "the next scores": (
        [
            (
                "_give_weights(s, m, l, j, keys - j * KEYS, scale_log2, buffers, rings, BUILD)\n                s =",
                "_give_weights(following, m, l, j, keys - j * KEYS, scale_log2, buffers, rings, BUILD)\n                s =",
            )
        ],
        "",
    ),
}


def fails(name: str, replacements, operands: str, tile: str = "s5 x1") -> bool:
    keys = int(operands) if operands.isdigit() else 310
    for seed in range(16):
        try:
            kind = operands if operands and not operands.isdigit() else "normal"
            report = run(ONE, [(1, keys)], tile, kind, seed=seed, late=seed % 2 == 0, mutants=replacements)
        except simulate.Wrong:
            return True
        if not report.ok:
            return True
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name):
    assert fails(name, *MUTANTS[name]), f"mutant '{name}' lives"


@pytest.mark.parametrize("name", AHEAD_MUTANTS)
def test_a_mutant_of_quarters_fails(name):
    assert fails(name, *AHEAD_MUTANTS[name], "s8 x1"), f"mutant '{name}' lives"
