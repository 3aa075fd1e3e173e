"""Blocks at once and the makespan, against what can be counted by hand or by brute force."""

import pytest

from rowmax.analysis.occupancy import Block, balanced, blocks_at_once, makespan, occupied
from rowmax.device import Device, Rates

H200 = Rates.of(Device.named("H200"))


@pytest.mark.parametrize(
    ("block", "count"),
    [
        (Block(128, 168, 115_712), 2),  # 64x64 w4 s3 tma at d128: shared memory
        (Block(256, 233, 196_640), 1),
        (Block(128, 255, 0), 2),  # 65536 registers: 255 are counted as 256
        (Block(128, 32, 0), 16),  # 2048 threads
        (Block(32, 32, 0), 32),  # blocks
        (Block(128, 32, 300_000), 0),
    ],
)
def test_blocks_at_once(block, count):
    assert blocks_at_once(block, H200) == count


def test_makespan_by_hand():
    assert makespan([(4, 1.0)], 4) == 1.0
    assert makespan([(5, 1.0)], 4) == 2.0
    assert makespan([], 4) == 0.0
    assert makespan([(1, 5.0), (4, 1.0)], 2) == 5.0
    assert makespan([(4, 1.0), (1, 5.0)], 2) == 7.0  # the longest last
    assert makespan([(1, 5.0), (3, 1.0)], 2, in_turn=True) == 6.0
    assert balanced([(1, 5.0), (4, 1.0)], 2) == 4.5


def test_how_long_a_multiprocessor_has_a_task():
    assert occupied([(3, 1.0)], 4, 2) == 0.75
    assert occupied([(4, 1.0), (2, 3.0)], 4, 2) == (3 + 3 + 1 + 1) / 4  # the second of a multiprocessor beside the first
    assert occupied([(5, 1.0)], 4, 1) == 1.25
    assert occupied([], 4, 2) == 0.0
    assert occupied([(4 * 100, 1.0)], 4, 1) == 100.0


def test_many_tasks_are_an_average_of_the_schedule():
    tasks = [(19_000, 1.0), (900, 3.0)]
    exact = makespan(tasks, 132)
    more = makespan([(19_000 * 2, 1.0), (900 * 2, 3.0)], 132)
    assert abs(more - 2 * exact) < 4.0
