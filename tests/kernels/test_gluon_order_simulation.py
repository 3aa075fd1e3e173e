"""dQ in a fixed order, simulated with blocks side by side: right, the same bits whatever happens when, and no deadlock."""

import os

import pytest
import torch

from rowmax import Problem, testing

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels before and behind run in Triton's interpreter", allow_module_level=True)

import canaries
import simulate
import simulate_backward
from simulate_order import Together

from rowmax.plan.hopper_backward import HopperBackwardTile

NARROW, WIDE, PARTS = "64x128 s2 backward ordered", "128x128 s2 backward g1 ordered", "128x128 s2 backward p2 ordered"
CASES = [
    ("b1 h1 q130 k300 d128 bf16", NARROW),
    ("b1 h2 q200 k300 d64 bf16 causal", WIDE),
    ("b2 h4/2 q200 k129 d64 bf16 causal", WIDE),  # rows that see nothing
    ("b1 h3 q1000 k200 d64 bf16 causal", WIDE),  # heads in groups of two
    ("b1 h2 q140 k300 d72/40 bf16 causal softcap=3.0", NARROW),
    ("b1 h1 q300 k400 d96 fp16 window(90,0)", NARROW),
    ("b1 h2/1 q100 k700 d64 bf16 window(5,5)", WIDE),  # keys that nobody sees, and whole tiles of them
    ("b1 h1 q400 k150 d64 bf16 window(0,70)", WIDE),
    ("b1 h2 q1 k260 d64 bf16", WIDE),
    ("b1 h2/1 q130 k400 d64 bf16", PARTS),
    ("b5 h2/1 q330 k530 d64 bf16 packed causal", WIDE),
    ("b3 h1 q300 k600 d64 fp16 packed window(9,7)", WIDE),
    ("b1 h2/1 q300 k300 d64 bf16 causal dropout=0.3", WIDE),
    ("b2 h1 q300 k304 d64 bf16 bias(qk)", WIDE),  # dQ of one turn in shared memory
    ("b1 h2 q200 k300 d128 fp16 causal dropout=0.2", NARROW),
    ("b1 h2 q200 k320 d128 fp16 mask(hqk)", NARROW),
    ("b1 h2 q200 k312 d128 bf16 causal bias(hk)", NARROW),  # of two
]


def only(old, new=""):
    return ((old, new),)


def run(problem, operands, tile, **options):
    out, lse = testing.attend(problem, operands)
    given, tile = testing.cotangents(problem), HopperBackwardTile.parse(tile)
    repair = tile.parts > 1  # dK and dV are added up by the last kernel
    grads = simulate_backward.backward(problem, operands, tile, out, lse, *given, repair=repair, **options)
    return grads[:3], testing.check_backward(problem, operands, grads[:3], *given, out)


@pytest.mark.parametrize(("text", "tile"), CASES)
def test_the_order_of_sums_is_that_of_the_keys(text, tile):
    """Two ways in which blocks may run: three side by side in any order, and one by one."""
    problem = Problem.parse(text)
    operands = testing.operands(problem)
    one, report = run(problem, operands, tile, seed=1)
    assert report.ok, str(report)
    other, _ = run(problem, operands, tile, seed=2, late=True, running=1)
    assert all(map(torch.equal, one, other))


# For 40 rows, here of 400: a key tile of the last sequence is nobody's where the others say that they reach further.
LIES = {**canaries.HOSTILE, "a key tile too few": [0, 35, 10, 40]}


def with_lies(name: str, side: str = "keys", **options):
    problem = Problem.parse("b3 h1 q40 k400 d64 bf16 packed" if side == "keys" else "b3 h1 q400 k400 d64 bf16 packed causal")
    operands = testing.operands(problem)
    values = [value if abs(value) > 1000 else 10 * value for value in LIES[name]]
    given = (*testing.attend(problem, operands), *testing.cotangents(problem))
    tile = HopperBackwardTile.parse(WIDE)
    lies = canaries.lying(operands, values, side)
    simulate_backward.backward(problem, lies, tile, *given, repair=False, any_order=True, **options)


@pytest.mark.parametrize("name", LIES)
def test_lies_in_cu_seqlens_make_nobody_wait_for_ever(name):
    """Nor is anything touched outside of a tensor."""
    with_lies(name)
    with_lies(name, "both")


def test_that_sequences_lie_one_behind_the_other_is_not_believed():
    with pytest.raises(simulate.Wrong, match="deadlock"):
        with_lies("a key tile too few", mutants=only("    return 1 - wrong\n", "    return 1\n"))


def test_a_deadlock_between_blocks_is_found():
    def program(number, block):
        block.run([lambda: block.pause(lambda: False, "nothing")])

    with pytest.raises(simulate.Wrong, match="deadlock"):
        Together(0, False, 2).run(3, program)


# ---- mutants ---------------------------------------------------------------------------------------------------------------

PLAIN, CAUSAL, WINDOW = "b1 h1 q130 k400 d64 bf16", "b1 h2 q300 k300 d64 bf16 causal", "b1 h1 q300 k400 d64 bf16 window(20,9)"
PACKED, GIVEN = "b3 h1 q300 k600 d64 fp16 packed", "b1 h1 q300 k400 d64 bf16 bias(qk)"
WAIT = "            wait_count(count_ptr, waits * _turn_of(own_row, notes, band, BUILD))\n"
READ, FREE = "            store_wait(0)\n", "            release(sum_ring, use, BUILD.SLOTS)\n"
ARRIVE, COUNT = "            wait_sums()\n", "            count_up(count_ptr)\n"
LAY = "            lay_down(dq, dq_buffers, sum_ring, turn, CONSUMER, BUILD)\n"
LAY_LAST = "            lay_down(dq, dq_buffers, sum_ring, turns, CONSUMER, BUILD)\n"
GIVE_LAST = "            give(share_ring, turns, SHARES)\n"
EMPTY, FENCE = "    wait_empty(sum_ring, turn, BUILD.SLOTS)\n", ".store(dq)\n    fence_async_shared()\n\n\n@gluon.jit\ndef _one"


MUTANTS = {
    # the counters
    "nobody waits": (only(WAIT), PLAIN),
    "counted before the sum has arrived": (only(ARRIVE), PLAIN),
    "counted before the sum is on its way": (only(ARRIVE + COUNT, ARRIVE) + only(WAIT, WAIT + COUNT), PLAIN),
    "not counted": (only(ARRIVE + COUNT, ARRIVE), PLAIN),
    "counted twice": (only(ARRIVE + COUNT, ARRIVE + COUNT * 2), PLAIN),
    "one key tile is not waited for": (only("// BLOCK_N - first // BLOCK_N", "// BLOCK_N - first // BLOCK_N - 1"), PLAIN),
    "waited for oneself": (only("// BLOCK_N - first // BLOCK_N", "// BLOCK_N - first // BLOCK_N + 1"), PLAIN),
    "key tiles that do not come are waited for": (only("// BLOCK_N - first // BLOCK_N", "// BLOCK_N"), WINDOW),
    "the first key of the tile's last row": (only("first_key(row, len_k", "first_key(row + BUILD.BLOCK_M - 1, len_k"), WINDOW),
    "the last key tile first": (
        only("_note(notes, COL) // BLOCK_N - first", "(len_k - 1 - _note(notes, COL)) // BLOCK_N - first"),
        PLAIN,
    ),
    "blocks in the order of the grid": (
        only("number = draw_number(counts_ptr)", "number += 0 * draw_number(counts_ptr)"),
        PLAIN,
    ),
    "the counter of blocks as the first one of a query tile": (
        only("order = (counts_ptr + 1, 0,", "order = (counts_ptr, 0,"),
        "b1 h1 q100 k700 d64 bf16",
    ),
    "one counter for all heads": (only("own_line.to(gl.int64) * line_counts + ", ""), CAUSAL),
    "one counter for all query tiles": (only(" + own_row // BUILD.BLOCK_M)", ")"), CAUSAL),
    "rows of the tensor as rows of the sequence": (
        only("own_row = row - _note(notes, BEGIN_Q)\n            count", "own_row = row\n            count"),
        "b3 h1 q700 k600 d64 fp16 packed",
    ),
    "counters of the sequence before": (only("begin_q // BLOCK_M + sequence, len_q // BLOCK_M", "0, len_q // BLOCK_M"), PACKED),
    "no sequences are believed": (only("    return 1 - wrong\n", "    return 0\n"), PACKED),
    # dQ on its way
    "dQ of the next turn": (only("place_of(use - 1, line", "place_of(use, line"), CAUSAL),
    "dQ laid over one that is read": (only(EMPTY), PLAIN),
    "dQ given back before it is read": (only(READ + FREE, FREE + READ), CAUSAL),
    "dQ not given back": (only(READ + FREE, READ), CAUSAL),
    "what is there before the first turn is not given back": (
        only("            release(sum_ring, use, BUILD.SLOTS)\n        else", "            pass\n        else"),
        CAUSAL,
    ),
    "the last dQ not given": (only(LAY_LAST + GIVE_LAST, LAY_LAST), CAUSAL),
    "the last dQ given before it is there": (only(LAY_LAST + GIVE_LAST, GIVE_LAST + LAY_LAST), CAUSAL),
    "dQ given before it is there": (
        only(LAY, "            give(share_ring, turn, SHARES)\n" + LAY)
        + only("        give(share_ring, turn, SHARES)\n        s = ", "        s = "),
        CAUSAL,
    ),
    "dQ not fenced": (only(FENCE, FENCE.replace("    fence_async_shared()\n", "")), CAUSAL),
    "dQ not awaited": (only("        wait_full(share_ring, use, ADDERS)\n"), CAUSAL),
    "one buffer for all turns": (only("buffer_of(turn, BUILD.SLOTS) * BUILD.CONSUMERS", "0 * BUILD.CONSUMERS"), CAUSAL),
    "one adder": (only("dq_buffers, sums, 1, BUILD)", "dq_buffers, sums, 0, BUILD)"), CAUSAL),
    "the one buffer laid over": (only(EMPTY), GIVEN),
    "the one buffer given back before it is read": (only(READ + FREE, FREE + READ), GIVEN),
    "the other part": (only("part // ACROSS * SIDE, part % ACROSS * SIDE", "0, part % ACROSS * SIDE"), CAUSAL),
}


def fails(mutants, text) -> bool:
    problem = Problem.parse(text)
    operands = testing.operands(problem)
    for seed in range(6):
        try:
            _, report = run(problem, operands, WIDE, seed=seed, late=seed % 2 == 0, mutants=mutants)
        except simulate.Wrong:
            return True
        if not report.ok:
            return True
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name):
    assert fails(*MUTANTS[name]), f"mutant '{name}' lives"
