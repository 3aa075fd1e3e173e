"""The search, with a measurer that knows the answer."""

import pytest

from rowmax import Device, Problem, Unsupported
from rowmax.analysis.measure import MORE, Timed
from rowmax.analysis.search import tune
from rowmax.plan import Plan, by_table

H200 = Device.named("H200")
PROBLEM = Problem.parse("b1 h16 q16384 k16384 d128 bf16 causal")
APART = PROBLEM.with_(dim_qk=124, dim_v=124)  # its backward has two kernels


class Fake:
    """Plans take 10 ms but for those in `ms`; `wrong` at the first check, `brittle` at the second. Remembers what it timed."""

    def __init__(self, ms=None, wrong=(), brittle=(), slow=()):
        self.ms, self.wrong, self.brittle, self.slow = ms or {}, wrong, brittle, slow
        self.timed: list[list[str]] = []

    def check(self, problem, direction, plans, *, kinds=("normal",), seconds):
        assert len(set(plans)) == len(plans)
        bad = self.brittle if kinds == MORE else self.wrong
        return {plan: "WRONG: out" if plan in bad or "all" in bad else "" for plan in plans}

    def time(self, problem, direction, plans, *, seconds=0.0, limit):
        self.timed.append(list(plans))
        return {plan: Timed(self.ms.get(plan, 10.0), "took over 120 s" if plan in self.slow else "") for plan in plans}


def search(fake, direction="forward", problem=None):
    said = []
    problem = problem or (PROBLEM if direction == "forward" else APART)
    found = tune(problem, H200, direction, fake, 60.0, said.append)
    return found, said


TABLE = str(by_table(PROBLEM, H200))
FAST, FASTER = "hopper[128x128 s2 q1 pingpong dynamic g8]", "q_outer[128x64 w8 s3 tma]"


def test_the_fastest_is_found():
    found, said = search(Fake({FAST: 9.0, FASTER: 8.0}))
    assert str(found.best) == FASTER
    assert str(found.table) == TABLE
    assert (found.ms[FASTER], found.ms[FAST], found.ms[TABLE]) == (8.0, 9.0, 10.0)
    assert not found.errors
    assert 5 <= len(found.ms) <= 6 < found.timed
    assert "checking" in said[0]


def test_the_table_is_always_timed_first_and_among_the_finalists():
    fake = Fake({TABLE: 99.0})
    search(fake)
    brief, finals = fake.timed
    assert brief[0] == finals[0] == TABLE
    assert len(finals) == 6 < len(brief)


def test_a_gain_in_the_noise_is_none():
    found, _ = search(Fake({FAST: 9.95}))
    assert found.best is found.table
    found, _ = search(Fake({FAST: 9.8}))
    assert str(found.best) == FAST


def test_a_wrong_plan_is_neither_timed_nor_kept():
    fake = Fake({FAST: 9.0, FASTER: 8.0}, wrong=(FASTER,))
    found, _ = search(fake)
    assert str(found.best) == FAST
    assert found.wrong == {FASTER: "WRONG: out"}
    assert all(FASTER not in plans for plans in fake.timed)


def test_the_best_is_checked_once_more_with_harder_inputs():
    found, _ = search(Fake({FAST: 9.0, FASTER: 8.0}, brittle=(FASTER,)))
    assert str(found.best) == FAST
    assert FASTER in found.wrong
    assert FASTER not in found.ms


def test_a_plan_that_hangs_when_timed_is_not_kept():
    found, _ = search(Fake({FAST: 9.0, FASTER: 8.0}, slow=(FASTER,)))
    assert str(found.best) == FAST
    assert found.errors == {FASTER: "took over 120 s"}
    assert not found.wrong


def test_a_table_that_is_wrong_is_beaten_by_what_is_right():
    found, _ = search(Fake({FAST: 20.0, FASTER: 30.0}, wrong=(TABLE,)))
    assert found.best is not None
    assert str(found.best) != TABLE
    assert TABLE in found.wrong
    found, _ = search(Fake({FAST: 9.95}, brittle=(TABLE,)))  # within the noise, the table would have been kept
    assert str(found.best) == FAST


def test_nothing_right_is_nothing_found():
    for fake in (Fake(wrong=("all",)), Fake(brittle=("all",))):
        found, _ = search(fake)
        assert found.best is None
        assert found.wrong


def test_a_backward_is_searched_kernel_by_kernel():
    table = by_table(APART, H200, direction="backward").tiles
    forward = by_table(PROBLEM, H200, prefer="q_outer").tiles
    first, second = "128x64 w8 s2 tma", "64x64 w4 s3 tma"
    assert [str(tile) for tile in table] == ["128x64 w8 s3 tma", "64x64 w4 s2 tma"]

    def spelled(*tiles):
        return f"q_outer[{', '.join(map(str, (*forward, *tiles)))}]"

    fake = Fake({spelled(first, table[1]): 9.0, spelled(table[0], second): 9.5, spelled(first, second): 8.0})
    found, said = search(fake, "backward")
    assert tuple(map(str, found.best.tiles)) == (first, second)
    assert found.ms[str(found.best)] == 8.0
    assert found.ms[str(found.table)] == 10.0
    assert any("kernel 2 of 2" in line for line in said)
    assert Plan.parse(fake.timed[0][0]).tiles == (*forward, *table)


def backward(*tiles) -> str:
    """As a measurer sees the backward of these tiles."""
    forward = by_table(PROBLEM, H200, prefer="q_outer").tiles
    return f"q_outer[{', '.join(map(str, (*forward, *tiles)))}]"


def test_the_best_of_the_kernels_before_is_a_finalist_though_others_were_quicker_in_a_few_rounds():
    table = by_table(APART, H200, direction="backward").tiles
    best = backward("128x64 w8 s2 tma", table[1])

    class Noisy(Fake):
        def time(self, problem, direction, plans, *, seconds=0.0, limit):
            found = super().time(problem, direction, plans, seconds=seconds, limit=limit)
            lucky = len(self.timed) == 3  # the first rounds of the second kernel
            return {p: Timed(1.0, "") if lucky and p != best else timed for p, timed in found.items()}

    found, _ = search(Noisy({best: 9.0}), "backward")
    assert backward(*found.best.tiles) == best


def test_a_kernel_without_a_right_candidate_keeps_what_was_found_before():
    table = by_table(APART, H200, direction="backward").tiles
    best = backward("128x64 w8 s2 tma", table[1])

    class Ends(Fake):
        def check(self, problem, direction, plans, *, kinds=("normal",), seconds):
            over = len(self.timed) == 2 and kinds != MORE
            return dict.fromkeys(plans, "out of time" if over else "")

    found, _ = search(Ends({best: 9.0}), "backward")
    assert backward(*found.best.tiles) == best


def test_a_plan_that_ran_out_of_time_once_and_was_timed_later_has_no_error():
    table = by_table(APART, H200, direction="backward")

    class Late(Fake):
        def time(self, problem, direction, plans, *, seconds=0.0, limit):
            found = super().time(problem, direction, plans, seconds=seconds, limit=limit)
            return {p: Timed(0.0, "out of time") for p in plans} if len(self.timed) == 1 else found

    found, _ = search(Late(), "backward")
    assert str(found.best) == str(table)
    assert str(table) not in found.errors
    assert len(found.errors) > 10


def test_what_nothing_runs_is_said():
    with pytest.raises(Unsupported):
        search(Fake(), problem=Problem.parse("b1 h1 q8 d8 fp64"))
