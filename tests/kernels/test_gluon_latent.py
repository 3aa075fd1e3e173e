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
    (ONE, [(1, 384)], "x1"),  # as long as the block table
    (ONE, [(1, 310)], "x2"),
    (RAGGED, [(1, 300), (1, 0), (1, 64)], "p4"),
    ("b2 h128/1 q1 k128 d576/512 fp16 paged64", [(1, 1), (1, 65)], "x3"),  # empty parts
    ("b2 h64/1 q3 k256 d576/512 bf16 causal paged128", [(3, 194), (3, 2)], "p6"),  # a query that sees nothing
    ("b3 h64/1 q5 k256 d576/512 bf16 causal packed paged64", [(2, 200), (0, 66), (1, 129)], "p6"),
]


def run(text, lengths, parts, kind="normal", need_lse=True, **options):
    problem = PagedProblem.parse(text)
    given, flat, packed = paged.paged_operands(problem, lengths, kind, shared=True)
    out, lse = simulate_latent.attend(problem, given, SplitTile.parse(f"64x64 w4 s8 {parts}"), need_lse=need_lse, **options)
    if lse is None:
        return testing.check_forward(flat, packed, out.flatten(0, 1))
    return testing.check_forward(flat, packed, *paged.as_packed(problem, out, lse))


@pytest.mark.parametrize(("text", "lengths", "parts"), CASES)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_simulated_kernel_is_right(text, lengths, parts, late):
    report = run(text, lengths, parts, late=late)
    assert report.ok, str(report)


@pytest.mark.parametrize("kind", ["spiky", "shift(-30000)", "constant(133120)", "nan(k)"])
def test_operands_that_show_one_mistake(kind):
    report = run(ONE, [(1, 130)], "x1", kind, late=True)
    assert report.ok, str(report)


def test_without_an_lse():
    assert run(ONE, [(1, 70)], "x1", need_lse=False).ok


# ---- mutants -----------------------------------------------------------------------------------------------------------

WEIGHTS, EMPTY = "        wait_full(weight_ring, j, 1)\n", "    wait_empty(weight_ring, j, 1)\n"
LEFT = "        left = warpgroup_mma_wait(1, deps=[left])\n"
FREE_LEFT = "        release(piece_ring, turn, PIECES)\n"
RIGHT = "        right = warpgroup_mma_wait(0, deps=[right])\n"
FREE_RIGHT = "        release(piece_ring, turn + 2, PIECES)\n"
FREE_WEIGHTS = "        release(weight_ring, j, 1)\n"
SCORES = "            s = warpgroup_mma_wait(0, deps=[_scores(q, j, buffers, rings)])\n"
FREE_ROPE = "            release(rope_ring, j, ROPES)\n"
CLEAR = "        for c in gl.static_range(EACH):\n            _clear("
LEFT_K = "        wait_full(piece_ring, turn, PIECES)\n        s ="
# What -> (replacements, operands); of 310 keys unless they say otherwise.
MUTANTS = {
    "weights not awaited": ([(WEIGHTS, "")], ""),
    "weights written over": ([(EMPTY, "")], ""),
    "weights given back early": ([(FREE_WEIGHTS, ""), (WEIGHTS, WEIGHTS + FREE_WEIGHTS)], ""),
    "weights never given back": ([(FREE_WEIGHTS, "")], ""),
    "the left of V given back early": ([(LEFT + FREE_LEFT, FREE_LEFT + LEFT)], ""),
    "the right of V given back early": ([(RIGHT + FREE_RIGHT, FREE_RIGHT + RIGHT)], ""),
    "a product that is not finished": ([(LEFT, LEFT.replace("(1,", "(2,"))], ""),
    "the left of V never given back": ([(LEFT + FREE_LEFT, LEFT)], ""),
    "the right of V never given back": ([(FREE_RIGHT, "")], ""),
    "the last columns given back early": ([(SCORES + FREE_ROPE, FREE_ROPE + SCORES)], ""),
    "the last columns never given back": ([(FREE_ROPE, "")], ""),
    "the last columns not awaited": ([("    wait_full(rope_ring, j, ROPES)\n", "")], ""),
    "K not awaited": ([(LEFT_K, "        s =")], ""),
    "Q not awaited": ([("            wait_full(q_ring, zero + c, EACH)\n", "")], "64"),
    "the last columns of Q not awaited": ([("        wait_full(q_rope_ring, zero, 1)\n", "")], "64"),
    "the left columns twice": ([("place = (page, slot, 0, column_of(c))", "place = (page, slot, 0, 0)")], ""),
    "halves exchanged": ([("turn = EACH * j + WHICH", "turn = EACH * j + 1 - WHICH")], ""),
    "one page": ([("            page = following\n", "")], ""),
    "the page behind the last": ([("gl.minimum(j + 1, turns - 1)", "(j + 1)")], "384"),
    "a key too many": ([("cols < behind", "cols <= behind")], ""),
    "the left of V not cleared": ([(CLEAR, CLEAR.replace("range(", "range(1, "))], ""),
    "the right of V not cleared": ([(CLEAR, CLEAR.replace("EACH", "EACH - 1"))], ""),
    "no fence": ([("    fence_async_shared()\n\n\n@gluon.jit\ndef _scores", "\n\n@gluon.jit\ndef _scores")], ""),
    "left sums not scaled": ([("        left = _scaled(left, alpha)\n", "")], "spiky"),
    "right sums not scaled": ([("        right = _scaled(right, alpha)\n", "")], "spiky"),
    "not divided": ([("alphas.index(0).store(inverse)", "alphas.index(0).store(inverse * 0 + 1)")], ""),
}


def fails(name: str, replacements, operands: str) -> bool:
    keys = int(operands) if operands.isdigit() else 310
    for seed in range(16):
        try:
            kind = operands if operands and not operands.isdigit() else "normal"
            report = run(ONE, [(1, keys)], "x1", kind, seed=seed, late=seed % 2 == 0, mutants=replacements)
        except simulate.Wrong:
            return True
        if not report.ok:
            return True
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name):
    assert fails(name, *MUTANTS[name]), f"mutant '{name}' lives"
