"""Checking and timing plans in child processes, here on the CPU, and whose fault a hang is."""

import pytest

from rowmax import Problem
from rowmax.analysis import measure, workers
from rowmax.analysis.measure import Measurer, Timed

PROBLEM = Problem.parse("b1 h2 q40 k50 d16 fp32 causal")
PACKED = Problem.parse("b3 h2 q50 k50 d16 fp32 packed")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_plans_are_checked_in_child_processes(direction):
    plans = ("tiled[16x32, 16x32]", "tiled[8x64, 8x64]", "hopper")
    found = Measurer("cpu", seed=1).check(PROBLEM, direction, plans, seconds=90)
    assert [found[plans[0]], found[plans[1]]] == ["", ""]
    assert found["hopper"].startswith("Unsupported: ")


def test_a_wrong_result_is_found(monkeypatch):
    """In this process, since a child would not see the fault."""
    import rowmax
    from rowmax import testing

    def wrong(*arguments, **keywords):
        out = rowmax.attention(*arguments, **keywords)
        return (out[0] * 1.01, out[1]) if isinstance(out, tuple) else out * 1.01

    job = {"problem": str(PROBLEM), "plan": "tiled", "kinds": ("normal", "probe"), "seed": 3, "device": "cpu"}
    assert measure.check_plan(direction="forward", **job) == ""
    monkeypatch.setattr(testing, "attention", wrong)
    assert "WRONG: out" in measure.check_plan(direction="forward", **job)
    assert "('normal', seed 3)" in measure.check_plan(direction="forward", **job)
    job = {"problem": str(PROBLEM), "plans": ("tiled",), "seed": 3, "device": "cpu"}
    assert measure.time_plans(direction="forward", seconds=0.0, **job)["tiled"].error == ""
    assert "WRONG after timing: out" in measure.time_plans(direction="forward", seconds=0.01, **job)["tiled"].error


@pytest.mark.parametrize("problem", [PROBLEM, PACKED], ids=str)
def test_a_backward_is_timed_and_checked(problem):
    plans = ("tiled[16x32, 16x32]", "tiled[64x64, 64x64]")
    found = measure.time_plans(str(problem), "backward", plans, seed=5, device="cpu", seconds=0.01)
    assert {plan: timed.error for plan, timed in found.items()} == dict.fromkeys(plans, "")
    assert all(timed.ms > 0 for timed in found.values())


def test_times_come_from_a_child_process():
    found = Measurer("cpu", seed=1).time(PROBLEM, "forward", ["tiled[16x32]", "tiled[8x64]"], seconds=0.01, limit=90)
    assert list(found) == ["tiled[16x32]", "tiled[8x64]"]
    assert all(timed.ms > 0 and not timed.error for timed in found.values())


def fake(monkeypatch, speeds: dict, hang: str = "", clock=lambda: 1.0):
    """Batches answered at once: `speeds` times the clock; a batch with `hang` in it does not come back."""
    batches = []

    def run_all(function, jobs, **limits):
        outcomes = []
        for job in jobs:
            batches.append(job["plans"])
            if hang in job["plans"]:
                outcomes.append(workers.Outcome("took over 120 s", None, 120.0))
            else:
                factor = clock()
                value = {plan: Timed(speeds[plan] * factor, "") for plan in job["plans"]}
                outcomes.append(workers.Outcome("", value, 0.1))
        return outcomes

    monkeypatch.setattr(workers, "run_all", run_all)
    return batches


def test_a_hang_costs_its_own_plan_only(monkeypatch):
    speeds = {f"p{i}": 1.0 + i for i in range(20)}
    batches = fake(monkeypatch, speeds, hang="p5")
    found = Measurer("cpu").time(PROBLEM, "forward", list(speeds), limit=10)
    assert found["p5"] == Timed(0.0, "took over 120 s")
    assert {plan: timed.ms for plan, timed in found.items() if plan != "p5"} == {p: ms for p, ms in speeds.items() if p != "p5"}
    assert all(batch[0] == "p0" for batch in batches)


def test_batches_are_scaled_by_the_plan_they_share(monkeypatch):
    """The device is twice as slow in every batch as in the one before."""
    speeds = {f"p{i}": 1.0 + i for i in range(20)}
    factors = iter([1.0, 2.0, 4.0])
    fake(monkeypatch, speeds, clock=lambda: next(factors))
    found = Measurer("cpu").time(PROBLEM, "forward", list(speeds), limit=10)
    assert {plan: timed.ms for plan, timed in found.items()} == pytest.approx(speeds)


def test_out_of_time_is_not_tried_again(monkeypatch):
    calls = []

    def run_all(function, jobs, **limits):
        calls.append(len(jobs))
        return [workers.Outcome(workers.OUT_OF_TIME, None, 0.0)] * len(jobs)

    monkeypatch.setattr(workers, "run_all", run_all)
    found = Measurer("cpu").time(PROBLEM, "forward", ["a", "b", "c"], limit=1)
    assert {timed.error for timed in found.values()} == {workers.OUT_OF_TIME}
    assert calls == [1, 0]


def test_inputs_differ_from_run_to_run():
    assert len({Measurer("cpu").seed for _ in range(8)}) > 1
