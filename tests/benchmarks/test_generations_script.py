"""The draw is the same for everyone and holds every kind of problem; the report reads rows of results files."""

import json

import generations
import record
from rowmax import Device, plan

H200 = Device.named("H200")


def test_the_draw_is_decided_by_its_seed():
    first, again = (generations.draw(generations.REPORTED, 25, H200) for _ in range(2))
    assert first == again
    assert [problem for problem, _ in generations.draw(2, 25, H200)] != [problem for problem, _ in first]
    problems = [problem for problem, _ in first]
    assert any(problem.packed for problem in problems)
    assert any(problem.len_q == 1 for problem in problems)
    assert any(problem.band.left is not None for problem in problems)
    assert {problem.dim_qk for problem in problems} == {64, 128, 256}
    assert all(problem.batch * problem.heads_q <= 512 or problem.packed for problem in problems)


def test_one_small_problem_of_each_build():
    jobs = [*generations.generation_jobs(H200), *generations.draw(generations.REPORTED, 25, H200)]
    ahead = generations._builds(jobs, H200)
    assert len(ahead) < sum(len(plans) for _, plans in jobs)
    wanted, built = (
        {(problem.dim_qk, str(plan(problem, H200, prefer=name))) for problem, plans in some for name in plans}
        for some in (jobs, ahead)
    )
    assert wanted == built


def test_report_of_the_committed_rows(capsys):
    rows = json.loads((record.RESULTS / "h200-2026-11-30.json").read_text())
    generations.report(rows)
    printed = capsys.readouterr().out.splitlines()
    number = sum(row["pass"] == "forward" and row["who"] == "rowmax" for row in rows)
    assert sum(int(line.split()[1]) for line in printed if line.startswith(("hopper", "q_outer"))) == number


def test_ratios_of_the_generations(capsys):
    times = {
        "b1 h128 q4096 k4096 d64 bf16": {"kv_outer": (10.0, 9.0), "q_outer": (5.0, 4.0)},
        "b1 h1 q4096 k4096 d64 bf16": {"kv_outer": (3.0, 3.0), "q_outer": (0.2, 0.1), "dense": (1.0, 1.0)},
        "b1 h8 q4096 k4096 d64 bf16": {"q_outer": (0.2, 0.1)},
    }
    found = generations.ratios(times, "kv_outer", "q_outer")
    assert [(one.problem.heads_q, round(one.measured, 6), one.model) for one in found] == [(128, 2.0, 2.25), (1, 15.0, 30.0)]
    generations.print_ratios(found, "2 against 1", generations.ASKED)
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("asked 1.9: holds")
    assert second.endswith("asked 20: FAILS  the model is more than 25% off")


def test_generations_are_those_that_a_device_runs():
    by_device = {name: generations.generation_jobs(Device.named(name)) for name in ("H200", "A100")}
    assert len(by_device["H200"]) == len(by_device["A100"]) == 6
    for (_, here), (_, there) in zip(*by_device.values(), strict=True):
        assert set(here) - set(there) == {"hopper"}
        assert {"kv_outer", "q_outer", *generations.WARPS} <= set(there)


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert generations.main([]) == 1
    assert "no CUDA GPU" in capsys.readouterr().err
