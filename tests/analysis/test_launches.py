"""Counts of the model against the loops that the kernels run, counted one by one, and against bytes known by hand."""

import pytest

from rowmax import Device, Plan, Problem, plan
from rowmax.analysis import cost
from rowmax.analysis.launches import launches, row_tasks
from rowmax.device import Rates
from rowmax.plan.tile import key_ranges
from rowmax.reference import visible

H200 = Device.named("H200")
RATES = Rates.of(H200)
MB = 2**20


def launched(text: str, prefer: str, device: Device = H200):
    problem = Problem.parse(text)
    return launches(problem, device, Rates.of(device), plan(problem, device, prefer=prefer))


@pytest.mark.parametrize("mask", ["", "causal", "window(40,7)", "window(0,0)"])
@pytest.mark.parametrize("lengths", [(300, 300), (130, 400), (400, 130), (1, 1000)])
def test_turns_are_those_of_the_loops(mask, lengths):
    problem = Problem.parse(f"b1 h2 q{lengths[0]} k{lengths[1]} d64 bf16 {mask}")
    tasks = row_tasks([lengths], 2, 64, 32, problem.band)
    turns = 0
    for row in range(0, lengths[0], 64):
        start, _, _, end = key_ranges(row, 64, *lengths, 32, problem.band)
        turns += -(-(end - start) // 32)
    assert sum(count * each for count, each, _ in tasks) == 2 * turns
    assert all(masked <= each for _, each, masked in tasks)


@pytest.mark.parametrize(
    "mask", ["causal prefix=150", "window(30,7) sink_tokens=70", "causal chunk=90", "chunk=90 sink_tokens=3"]
)
@pytest.mark.parametrize("lengths", [(300, 300), (130, 400), (400, 130)])
def test_turns_of_hopper_are_tiles_with_something_to_see(mask, lengths):
    """What rows that see nothing take, one turn in which all is hidden, is not counted."""
    problem = Problem.parse(f"b1 h2 q{lengths[0]} k{lengths[1]} d64 bf16 {mask}")
    main, _ = launches(problem, H200, RATES, Plan.parse("hopper[128x32 s2 q1 static]"))
    seen = visible(*lengths, *problem.band)
    rows = [seen[row : row + 128].any(0) for row in range(0, lengths[0], 128)]
    assert main.turns == 2 * sum(bool(row[col : col + 32].any()) for row in rows for col in range(0, lengths[1], 32))


@pytest.mark.parametrize("schedule", ["static", "dynamic g1"])
def test_row_tiles_of_hopper_come_in_the_order_of_the_kernel(schedule):
    """`locate`: heads in groups, here of one or of four times two; the last tile of every head of a group first."""
    problem = Problem.parse("b3 h4/2 q1000 k1000 d64 bf16 causal")
    main, _ = launches(problem, H200, RATES, Plan.parse(f"hopper[128x128 s2 q1 {schedule}]"))
    group = 2 if schedule == "static" else 8  # 1 MB holds K and V of four heads of 250 KB
    turns = [turns for count, turns, _ in main.tasks for _ in range(count)]
    expected = []
    for first in range(0, 12, group):
        expected += [tile + 1 for tile in reversed(range(8)) for _ in range(first, min(first + group, 12))]
    assert turns == expected


@pytest.mark.parametrize("mask", ["", "causal", "window(40,7)"])
@pytest.mark.parametrize("lengths", [(300, 300), (130, 400), (400, 130)])
def test_turns_of_kv_outer_are_tiles_with_something_to_see(mask, lengths):
    problem = Problem.parse(f"b2 h2 q{lengths[0]} k{lengths[1]} d64 bf16 {mask}")
    (launch,) = launches(problem, H200, RATES, Plan.parse("kv_outer[64x32 w4 s1]"))
    seen = visible(*lengths, *problem.band)
    tiles = sum(
        bool(seen[row : row + 64, col : col + 32].any()) for row in range(0, lengths[0], 64) for col in range(0, lengths[1], 32)
    )
    assert launch.turns == 4 * tiles
    assert launch.blocks == 4


def test_q_is_read_once_for_every_key_tile_by_flashattention_1_and_once_by_2():
    text = "b8 h16 q4096 k4096 d64 bf16"  # more than the L2 cache holds
    (one,), (two,) = launched(text, "kv_outer[64x128 w4 s2]"), launched(text, "q_outer")
    q = 8 * 16 * 4096 * 64 * 2
    key_tiles = 4096 // 128
    state = 8 * 16 * 4096 * (64 * 4 + 8)
    once = 4 * q + 8 * 16 * 4096 * 4  # Q, K, V, O and the LSE
    assert two.hbm_bytes == once
    assert one.hbm_bytes == once + 2 * state + key_tiles * (q + 2 * state)


def test_small_states_of_kv_outer_stay_in_the_cache():
    (launch,) = launched("b1 h1 q4096 k4096 d64 bf16", "kv_outer")
    assert launch.hbm_bytes == cost.bytes_of(Problem.parse("b1 h1 q4096 k4096 d64 bf16"), "forward") + 4096 * 4
    assert launch.l2_bytes > 100 * launch.hbm_bytes / 10


def test_dense_writes_its_scores():
    scores, softmax, output = launched("b2 h16 q4096 k4096 d64 bf16", "dense")
    number = 2 * 16 * 4096**2
    assert scores.hbm_bytes - 4 * number == 2 * 2 * 16 * 4096 * 64 * 2
    assert softmax.hbm_bytes == pytest.approx(10 * number, rel=1e-3)  # rows of 16 KB are gone until they are read again
    assert output.hbm_bytes - 2 * number == 2 * 2 * 16 * 4096 * 64 * 2


def test_short_rows_of_scores_are_read_from_memory_once():
    _, long, _ = launched("b2 h16 q4096 k4096 d64 bf16", "dense")
    _, short, _ = launched("b2 h16 q16384 k1024 d64 bf16", "dense")
    assert 6 * 2 * 16 * 4096**2 < short.hbm_bytes < 0.8 * long.hbm_bytes


def test_blocks_without_rows():
    """Packed tiles are counted without the lengths: `len_q // 64 + sequences` for a head."""
    clear, launch = launched("b10 h4 q1000 k1000 d128 bf16 packed", "q_outer[64x64 w4 s3]")
    assert launch.blocks + launch.empty == 4 * (1000 // 64 + 10)
    assert launch.blocks == 4 * 10 * 2
    assert clear.l2_bytes == 1000 * 4 * 128 * 2  # rows outside every sequence are 0
    (dense,) = launched("b10 h4 q100 k100 d128 bf16", "q_outer[64x64 w4 s3]")
    assert (dense.empty, dense.lookups) == (0, 0)


def test_keys_that_nobody_sees_are_not_read():
    (launch,) = launched("b1 h8 q4096 k65536 d128 bf16 window(1023,0)", "q_outer")
    assert launch.hbm_bytes < 8 * (4096 * 2 + (4096 + 1023) * 2) * 128 * 2 * 1.01 + 8 * 4096 * 4


def test_split_keys_are_all_taken():
    text = "b1 h32/8 q1 k131072 d128 bf16"
    for parts in (1, 7, 16):
        decode, *combine = launched(text, f"split_kv[16x64 w4 s3 x{parts}]")
        assert decode.turns >= 8 * 131072 // 64
        assert decode.turns < 8 * (131072 // 64 + parts)
        assert bool(combine) == (parts > 1)


def test_packed_lengths_may_be_given():
    problem = Problem.parse("b3 h2 q600 k600 d64 bf16 packed causal")
    chosen = plan(problem, H200, prefer="q_outer")
    (_, even), (_, uneven) = (
        launches(problem, H200, RATES, chosen, lengths) for lengths in (None, [(500, 500), (50, 50), (50, 50)])
    )
    assert uneven.turns > even.turns
