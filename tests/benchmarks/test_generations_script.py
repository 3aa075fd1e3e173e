"""The draw is the same for everyone and holds every kind of problem; the report reads rows of results files."""

import json

import generations
import record
from rowmax import Device

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
    jobs = [*generations.generation_jobs(), *generations.draw(generations.REPORTED, 25, H200)]
    ahead = generations._builds(jobs)
    assert len(ahead) < len(jobs)
    assert {name for _, plans in jobs for name in plans} == {name for _, plans in ahead for name in plans}


def test_report_of_the_committed_rows(capsys):
    rows = json.loads((record.RESULTS / "h200-2026-11-30.json").read_text())
    generations.report(rows)
    printed = capsys.readouterr().out.splitlines()
    number = sum(row["pass"] == "forward" and row["who"] == "rowmax" for row in rows)
    assert sum(int(line.split()[1]) for line in printed if line.startswith(("hopper", "q_outer"))) == number


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert generations.main([]) == 1
    assert "no CUDA GPU" in capsys.readouterr().err
