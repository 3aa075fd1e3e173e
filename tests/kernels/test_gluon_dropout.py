"""Dropout in the Hopper forward: its PTX run for a warp, the kernel simulated and mutated, and when the plan takes it."""

import os
import random

import numpy as np
import pytest
import torch

from rowmax import Device, Problem, plan, reference, testing

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the second kernel runs in Triton's interpreter", allow_module_level=True)

import simulate
import simulate_warp
from gluon_mutants import DYNAMIC, LAZY, ONE, QUEUE, SKIPS, STATIC, THREE, only
from simulate_scores import NAMES
from test_gluon_simulation import fails

from rowmax.kernels.gluon import philox
from rowmax.plan.hopper import HopperTile

H200 = Device.named("H200")
CASES = [
    ("b2 h4/2 q90 k140 d64 bf16 causal dropout=0.1", LAZY, "normal"),
    ("b2 h2 q200 k200 d64 fp16 causal dropout=0.5", SKIPS, "v_onehot"),
    ("b3 h2/1 q300 k300 d64 fp16 packed window(9,7) dropout=0.3", "128x128 s3 q1 dynamic g1", "v_onehot"),
    ("b1 h2 q100 k130 d128 bf16 softcap=4.0 alibi sink dropout=0.2", LAZY, "normal"),
    ("b1 h2 q70 k100 d192/128 fp16 scale=-0.2 dropout=0.9", ONE, "normal"),
    ("b1 h2/1 q130 k76 d64 bf16 causal dropout=0.01", DYNAMIC, "normal"),  # with rows that see nothing
    ("b1 h2 q90 k140 d64 fp16 causal dropout=0.3", QUEUE, "nan(v)"),
    ("b3 h2 q90 k90 d64 fp16 packed window(9,3) dropout=0.3", THREE, "nan(v)"),
]


@pytest.mark.parametrize(("text", "tile", "kind"), CASES)
def test_a_simulated_kernel_drops_what_the_definition_drops(text, tile, kind):
    problem = Problem.parse(text)
    operands = testing.operands(problem, kind)
    out, lse, suspect = simulate.forward(problem, operands, HopperTile.parse(tile), late=len(text) % 2 == 0)
    report = testing.check_forward(problem, operands, out, lse)
    assert report.ok, str(report)
    assert bool((suspect == 1).any()) == kind.startswith("nan")


# ---- draws -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_n", [16, 32, 64, 128])
def test_its_instructions_keep_what_the_definition_keeps(block_n):
    """A warp's 16 rows, with numbers up to their last bits; and as `simulate.py` has it."""
    rnd = random.Random(block_n)
    lanes = np.arange(32)
    registers = block_n // 4  # of two neighbours each, of both rows of a lane in turn
    code = philox._code([f"${i}" for i in range(registers)], *(f"${2 * registers + i}" for i in range(7)))
    copied = [f"mov.b32 ${i}, ${registers + i};" for i in range(registers)]  # outputs that lie where their inputs do
    for most, p in ((1, 0.1), (2, 1e-9), (2**16, 0.003), (2**16, 0.02), (2**17, 0.5), (2**17, 0.95), (2**17, 0.9687)):
        seed = rnd.randrange(-(2**63), 2**63)
        row, col = 16 * rnd.randrange(most), block_n * rnd.randrange(2 * most)
        head, sequence = rnd.randrange(most), rnd.randrange(most)
        least = 0x10001 * Problem.parse(f"b1 h1 q1 d64 fp16 dropout={p}").drop_below
        numbers = (col // 4, head, sequence, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, least)
        p_given = torch.from_numpy(np.random.default_rng(block_n).integers(1, 2**15, (16, block_n), np.int16))
        rows = (row + torch.arange(16)).view(-1, 1).expand(16, block_n)
        want = torch.where(drawn(seed, p, sequence, head, rows[:, 0], col, block_n), p_given, 0)
        same = NAMES["keep"](p_given, rows, *(torch.tensor(n) for n in numbers), block_n)
        assert torch.equal(want, same)

        places = [(lanes // 4 + 8 * (i % 2), 8 * (i // 2) + 2 * (lanes % 4)) for i in range(registers)]
        halves = p_given.numpy().astype(np.uint32)
        pairs = [halves[line, c] | halves[line, c + 1] << np.uint32(16) for line, c in places]
        given = [*pairs, row + lanes // 4, *numbers]
        found = simulate_warp.run("\n".join([*copied, *code]), given, registers)
        for word, (line, c) in zip(found, places, strict=True):
            assert np.array_equal(word & 0xFFFF, want.numpy()[line, c])
            assert np.array_equal(word >> 16, want.numpy()[line, c + 1])


def drawn(seed: int, p: float, sequence: int, head: int, rows, first: int, count: int) -> torch.Tensor:
    """`[rows, count]` of the reference's, which counts heads and keys from 0, by the CPU's generator where these are large."""
    from rowmax.cpu.dropout import Dropout

    heads, sequences = torch.tensor([head]).view(1, 1, 1, 1, 1), torch.tensor([sequence]).view(1, 1, 1, 1, 1)
    below = Problem.parse(f"b1 h1 q1 d64 fp16 dropout={p}").drop_below
    kept = Dropout(seed, below, 1.0, heads, sequences, int(rows[0]), first).kept(slice(0, len(rows)), slice(0, count))[0, 0, 0]
    if max(sequence, head) < 3 and first < 512:
        whole = reference.dropout(seed, p, [sequence], head + 1, 0, first + count, rows=rows)
        assert torch.equal(kept, whole[0, head, :, first:])
    return kept


def test_a_seed_s_number_of_a_sequence_is_told_packed_too():
    """Equal scores, and values that are unit vectors: the output shows which weights are kept."""
    problem = Problem.parse("b3 h2/1 q330 k330 d64 fp16 packed dropout=0.4")
    operands = testing.operands(problem, lengths=((60, 64), (200, 64), (70, 64)))
    eye = torch.eye(64, dtype=torch.float16).view(64, 1, 64).repeat(6, 1, 1)[:330]
    operands = operands._replace(q=operands.q.zero_(), v=eye.contiguous())
    out, _, _ = simulate.forward(problem, operands, HopperTile.parse(QUEUE))
    starts = (0, 60, 260, 330)
    for b in range(3):
        want = reference.dropout(int(operands.seed), 0.4, [b], 2, starts[b + 1] - starts[b], 64)[0]
        assert torch.equal(out[starts[b] : starts[b + 1]].transpose(0, 1) != 0, want)


# ---- mutants -----------------------------------------------------------------------------------------------------------------

PLAIN, PACKED = "b2 h4/2 q200 k200 d64 fp16 causal dropout=0.5", "b3 h2 q300 k300 d64 fp16 packed causal dropout=0.5"
NARROW = "b1 h2 q200 k200 d64 fp16 window(20,9) dropout=0.5"
# name -> (replacements, problem, tile)
MUTANTS = {
    "nothing is dropped": (
        only("    if not DRAWS_FIRST:\n        p = dropped(p, drop, own, band, CONSUMER, BUILD)\n"),
        PLAIN,
        LAZY,
    ),
    "rows of the other consumer": (only("ROW) + CONSUMER * ROWS\n        call", "ROW)\n        call"), PLAIN, LAZY),
    "keys of the tile behind": (only("(slots, round, turns - j), round", "(slots, round, turns - j + 1), round"), PLAIN, LAZY),
    "draws of the next tile": (only("(slots, round, turns - j), round", "(slots, round, turns - 1 - j), round"), PLAIN, LAZY),
    "keys without the first": (only("call = key_tile_start(key_tile, ", "call = key_tile_start(key_tile, 0 * "), NARROW, LAZY),
    "the last tile of the next rows": (only("(slots, round, 0), round", "(slots, round + 1, 0), round"), PLAIN, STATIC),
    "the last tile counted from the end": (only("(slots, round, 0), round", "(slots, round, turns - 1), round"), PLAIN, STATIC),
    "every sequence alike": (only("slots, round, SLOTS, SEQUENCE)", "slots, round, SLOTS, SEQUENCE) * 0"), PACKED, LAZY),
    "packed sequences alike": (only("own + (b + sequence,)", "own + (b,)"), PACKED, LAZY),
    "sequences alike but when packed": (only("own + (b + sequence,)", "own + (sequence,)"), PLAIN, LAZY),
    "heads of a group alike": (only("SLOTS, HEAD), told", "SLOTS, HEAD) // BUILD.GROUP, told"), PLAIN, LAZY),
    "half of the seed": (only("uniform((seed >> 32).to(gl.int32))", "uniform(seed.to(gl.int32))"), PLAIN, LAZY),
    "half of the odds": (only("below * 0x10001, factor", "(below >> 1) * 0x10001, factor"), PLAIN, LAZY),
    "the factor left out": (only("        inverse = inverse * drop[3]\n", "        pass\n"), PLAIN, LAZY),
    "one field too few": (only("SEQUENCE = gl.constexpr(14)", "SEQUENCE = gl.constexpr(13)"), PACKED, LAZY),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_dropout_fails(name):
    replacements, text, tile = MUTANTS[name]
    problem = Problem.parse(text)
    assert fails(replacements, problem, testing.operands(problem, "v_onehot"), tile, False, 1), f"mutant '{name}' lives"


# ---- plan --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["bf16 causal", "fp16 packed", "bf16 window(99,0) sink", "bf16 causal alibi"])
@pytest.mark.parametrize("dims", ["d64", "d128", "d192/128", "d256"])
def test_the_plan_takes_it_up_to_128_dimensions_in_the_backward(words, dims):
    problem = Problem.parse(f"b2 h8/2 q4096 k4096 {dims} {words} dropout=0.1")
    forward, backward = (plan(problem, H200, direction=direction) for direction in ("forward", "backward"))
    wide = dims in ("d192/128", "d256")
    assert (forward.algorithm, backward.algorithm) == ("hopper", "q_outer" if wide else "hopper")
    if wide:
        assert dict(backward.refusals)["hopper"] == "its backward computes dropout up to 128 dimensions only"


def test_consumers_of_256_dimensions_take_no_turns_where_they_draw():
    problem = Problem.parse("b2 h8/2 q4096 k4096 d256 bf16 causal")
    (plain,), (drawn,) = (plan(p, H200).tiles for p in (problem, problem.with_(dropout=0.1)))
    assert (plain.pingpong, drawn.pingpong) == (True, False)


def test_beside_a_bias_or_a_mask_it_takes_the_backward_alone():
    for words in ("bias(hqk)", "mask(bk)"):
        problem = Problem.parse(f"b2 h8/2 q4096 k4096 d128 bf16 causal {words} dropout=0.1")
        forward, backward = (plan(problem, H200, direction=direction) for direction in ("forward", "backward"))
        assert (forward.algorithm, backward.algorithm) == ("q_outer", "hopper")
        assert dict(forward.refusals)["hopper"] == "computes no dropout beside a bias or a mask"
