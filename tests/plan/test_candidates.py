"""The tiles that are tried: legal, each once, spelled so that they come back, the table's own first and the near ones next."""

import pytest

from rowmax import Device, Plan, Problem
from rowmax.plan import by_table
from rowmax.plan.candidates import candidates
from rowmax.plan.resources import misfit

PROBLEMS = (
    "b1 h16 q16384 k16384 d128 bf16 causal",
    "b1 h32 q16384 d64 fp16",
    "b1 h8 q16384 d256 bf16 causal",
    "b4 h8 q1 k4096 d128 bf16",
    "b1 h4 q4096 d72 bf16",
    "b1 h4 q4096 d192/128 bf16 packed causal",
    "b1 h4 q4096 d64 fp32",
)


@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.parametrize("name", ["A100", "L4", "H200", "B200"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_candidates_are_legal_and_unique(text, name, direction):
    problem, device = Problem.parse(text), Device.named(name)
    start = by_table(problem, device, direction=direction)
    for position in range(len(start.tiles)):
        found = candidates(problem, device, start, position)
        assert found[0] is start
        own = (start.algorithm, direction) == ("hopper", "backward")  # dimensions leave it one size
        assert (4 if own else 10) <= len(found) <= 240
        assert len(set(map(str, found))) == len(found)
        for plan in found:
            again = Plan.parse(str(plan))
            if plan.algorithm == "hopper" or direction == "forward":
                assert (again.algorithm, again.tiles) == (plan.algorithm, plan.tiles)
            assert misfit(problem, device, direction, plan.algorithm, plan.tiles) is None
            others = [tile for i, tile in enumerate(plan.tiles) if i != position]
            if direction == "backward":
                assert others == [tile for i, tile in enumerate(start.tiles) if i != position]


def test_hopper_offers_both_algorithms_by_turns():
    problem, device = Problem.parse(PROBLEMS[0]), Device.named("H200")
    first = [plan.algorithm for plan in candidates(problem, device, by_table(problem, device), 0)[:9]]
    assert {first.count("hopper"), first.count("q_outer")} == {4, 5}
    others = candidates(problem, Device.named("A100"), by_table(problem, Device.named("A100")), 0)
    assert {plan.algorithm for plan in others} == {"q_outer"}


def test_the_search_covers_what_was_found_by_hand():
    """The best tiles of the prototype are within reach of their neighbours in the table."""
    problem, device = Problem.parse("b1 h8 q16384 d256 bf16"), Device.named("H200")
    found = set(map(str, candidates(problem, device, by_table(problem, device), 0)))
    assert {"hopper[128x64 s2 q1 static]", "hopper[128x64 s2 q1 dynamic]", "q_outer[128x32 w8 s3 tma]"} <= found
    assert "q_outer[128x64 w8 s2]" in found


def test_near_tiles_come_first_and_large_ones():
    problem, device = Problem.parse("b1 h32 q16384 d64 bf16"), Device.named("A100")
    found = [str(plan.tiles[0]) for plan in candidates(problem, device, by_table(problem, device), 0)]
    assert found[:2] == ["128x64 w4 s3", "128x128 w4 s3"], "of equally near ones the larger comes first"
    assert set(found[1:4]) <= {"128x128 w4 s3", "128x64 w8 s3", "64x64 w4 s3", "128x32 w4 s3", "128x64 w4 s2", "128x64 w4 s4"}


def test_rows_of_no_use_are_not_tried_for_decoding():
    problem, device = Problem.parse("b64 h8 q1 k4096 d128 bf16"), Device.named("A100")
    rows = {plan.tiles[0].block_m for plan in candidates(problem, device, by_table(problem, device), 0)}
    assert rows == {16, 32, 64}
