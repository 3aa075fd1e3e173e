"""The benchmark end to end on the CPU: what it writes, and that it writes nothing for a result that is wrong."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import baselines
import calls
import host_time
import memory
import record
import run
import timing
from rowmax import Device, Problem
from shapes import SETS
from sweep import expand

TINY = "b1 h2 q40 k40 d16 bf16 causal"
BENCHMARKS = Path(run.__file__).parent


def _script(name, *arguments, **environment):
    """Runs a script as its user does, from elsewhere."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


def _rows(path):
    rows = json.loads(path.read_text())
    assert [record.broken(row) for row in rows] == [[]] * len(rows)
    return rows


def test_smoke_set_writes_checked_rows(tmp_path):
    out = tmp_path / "results.json"
    code, stdout, stderr = _script(
        "run.py", "--shapes", "smoke", "--pass", "forward,backward", "--device", "cpu", "--threads", 1, "--seconds", 0.02,
        "--out", out, ROWMAX_COMMIT="of the test",
    )  # fmt: skip
    assert code == 0, stdout + stderr
    rows = _rows(out)
    assert {(row["who"], row["pass"]) for row in rows} == {
        (who, which) for who in ("rowmax", "sdpa") for which in ("forward", "backward")
    }
    assert len(rows) == 20, stderr  # five problems, two passes, two candidates: nobody was left out
    assert len({row["run"] for row in rows}) == 1
    assert {row["commit"] for row in rows} == {"of the test"}
    assert all(row["gpu"] is None and row["ms_min"] <= row["ms"] for row in rows)


def test_results_in_the_repository_fit_the_schema():
    for path in sorted(record.RESULTS.glob("*.json")):
        rows = json.loads(path.read_text())
        assert isinstance(rows, list), path
        for row in rows:
            assert record.broken(row) == [], f"{path.name}: {row}"
            assert row["commit"] != "unknown", f"{path.name}: a result must name the sources it came from; got {row}"


@pytest.fixture
def main(monkeypatch, tmp_path):
    """`run.main` on a tiny problem, in this process; returns the exit code and the rows written."""
    monkeypatch.setattr(timing, "peak_tflops", lambda dtype, device: 1000.0)  # measuring it takes longer than all the rest
    out = tmp_path / "results.json"
    common = ["--problem", TINY, "--device", "cpu", "--threads", "1", "--seconds", "0.02", "--out", str(out)]

    def start(*arguments):
        return run.main([*common, *arguments]), _rows(out) if out.exists() else []

    return start


@pytest.mark.parametrize("which", ["forward", "backward", "forward+backward"])
def test_a_wrong_result_prints_no_speed(main, monkeypatch, capsys, which):
    right = baselines._rowmax

    def wrong(problem, operands, plan):  # one percent more scale: an error that a loose tolerance lets pass
        return right(problem.with_(scale=problem.scale * 1.01), operands, plan)

    monkeypatch.setattr(baselines, "_rowmax", wrong)
    code, rows = main("--pass", which)
    printed = capsys.readouterr()
    assert code == 1
    assert {row["who"] for row in rows} == {"sdpa"}
    assert "rowmax WRONG" in printed.err
    assert "rowmax " not in "".join(line for line in printed.out.splitlines() if "TFLOP/s " in line and "sdpa" not in line)


def test_a_result_that_spoils_while_timed_prints_no_speed(main, monkeypatch, capsys):
    right = baselines._rowmax

    def spoiling(problem, operands, plan):
        forward, calls = right(problem, operands, plan), []

        def later_wrong(q, k, v):
            calls.append(1)
            return forward(q, k, v) * (1.0 if len(calls) == 1 else 1.02)

        return later_wrong

    monkeypatch.setattr(baselines, "_rowmax", spoiling)
    code, rows = main()
    assert code == 1
    assert {row["who"] for row in rows} == {"sdpa"}
    assert "after timing" in capsys.readouterr().err


def test_a_speed_above_the_matmul_peak_is_refused(main, monkeypatch, capsys):
    monkeypatch.setattr(timing, "peak_tflops", lambda dtype, device: 1e-12)
    code, rows = main()
    assert (code, rows) == (1, [])
    assert "above the" in capsys.readouterr().err


def test_on_a_gpu_the_bound_is_what_its_tensor_cores_can_do(monkeypatch):
    """Not a product's speed: the limit of power lowers that below attention's with 256 dimensions."""
    for name, sms, least, most in (("NVIDIA H200", 132, 989, 1075), ("NVIDIA A100-SXM4-80GB", 108, 311, 315)):
        facts = SimpleNamespace(clock_rate=1_980_000 if "H200" in name else 1_410_000)
        monkeypatch.setattr(timing.Device, "of", lambda device, name=name, sms=sms: Device(name, "cuda", (9, 0), sms))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, facts=facts: facts)
        bound = timing.most_tflops(torch.bfloat16, torch.device("cuda"), 783.3 if "H200" in name else 250.0)
        assert least < bound < most
        assert timing.most_tflops(torch.float32, torch.device("cuda"), 1.0) == bound / 2
    assert timing.most_tflops(torch.bfloat16, torch.device("cuda"), 2000.0) == 2000.0, "more than the table knows of"
    assert timing.most_tflops(torch.bfloat16, torch.device("cpu"), 1.5) == 1.5


def test_an_absent_peer_is_named_and_not_a_failure(main, capsys):
    code, rows = main("--who", "rowmax,fa3")
    assert (code, [row["who"] for row in rows]) == (0, ["rowmax"])
    assert "FlashAttention-3" in capsys.readouterr().err


def test_a_forced_plan_is_the_one_that_is_recorded(main):
    code, rows = main("--who", "rowmax", "--plan", "tiled[16x4096]")
    assert (code, [row["plan"] for row in rows]) == (0, ["tiled[16x4096]"])


def test_time_limit_keeps_what_was_timed(main, capsys):
    code, rows = main("--problem", TINY + " scale=0.5", "--time-limit", "0")
    assert (code, rows) == (0, [])
    assert "2 of 2 groups not timed" in capsys.readouterr().err


def test_results_are_appended(main):
    main("--who", "sdpa")
    code, rows = main("--who", "sdpa")
    assert (code, len(rows)) == (0, 2)
    assert len({row["run"] for row in rows}) == 2


def test_unknown_names_say_what_is_known():
    wrong_pass = ["--problem", TINY, "--pass", "x"]
    for arguments, names in ((["--shapes", "none"], "anchors-forward"), (wrong_pass, "backward")):
        with pytest.raises(SystemExit, match=names):
            run.main(["--device", "cpu", *arguments])


def test_memory_row(tmp_path):
    out = tmp_path / "results.json"
    problem = "b1 h2 q512 k512 d16 fp32 causal"
    assert memory.main(["--problem", problem, "--who", "rowmax,sdpa", "--device", "cpu", "--out", str(out)]) == 0
    rows = _rows(out)
    assert [(row["who"], row["pass"], row["dense_scores_bytes"]) for row in rows] == [
        ("rowmax", "memory", 2 * 512 * 512 * 4),
        ("sdpa", "memory", 2 * 512 * 512 * 4),
    ]


def test_memory_counts_what_a_call_takes():
    problem = memory.Problem.parse("b1 h1 q8 k8 d8 fp32")
    size = 256 * 2**20

    def call():
        torch.ones(size // 4)
        return (torch.zeros(0),)

    extra, _ = memory.extra_peak_bytes(call, problem, torch.device("cpu"))
    assert 0.9 * size <= extra <= 1.5 * size


def test_host_row(tmp_path):
    out = tmp_path / "results.json"
    assert host_time.main(["--problem", TINY, "--calls", "100", "--device", "cpu", "--out", str(out)]) == 0
    expected = [(who, "host", 100) for who in ("rowmax", "prepared", "sdpa")]
    assert [(row["who"], row["pass"], row["samples"]) for row in _rows(out)] == expected


def test_without_arguments_the_device_chooses_the_sets():
    options = run._parser().parse_args([])
    timed = run._jobs(options, torch.device("cpu"))
    assert [problem for problem, which, _ in timed if which == "forward"] == [shape.problem for shape in SETS["cpu"].shapes]
    timed = run._jobs(options, torch.device("cuda"))
    assert len(timed) == 24 + 24 + 10 + 1
    assert sum("flex" in who for _, _, who in timed) == 16  # eight shapes, forward and backward


@pytest.mark.skipif(find_spec("triton") is None, reason="sweeps Triton kernels, here in Triton's interpreter")
def test_sweep_in_the_interpreter(tmp_path):
    out = tmp_path / "sweep.json"
    code, stdout, stderr = _script(
        "sweep.py", "--pass", "forward,dq,dkdv", "--problem", "b1 h1 q32 k32 d16 fp32 causal", "--device", "cpu",
        "--tiles", "32x16 w4 s1; 24x16 w4 s1", "--workers", 1, "--seconds", 0.02, "--out", out, TRITON_INTERPRET="1",
    )  # fmt: skip
    assert code == 0, stdout + stderr
    rows = json.loads(out.read_text())
    assert [(row["pass"], row["tile"], "ms" in row) for row in rows if not row["error"]] == [
        (which, "32x16 w4 s1", True) for which in ("forward", "dq", "dkdv")
    ]
    # 24 is no power of two: the variant is listed with its error and stops nothing.
    assert [row["tile"] for row in rows if row["error"]] == ["24x16 w4 s1"] * 3
    assert "backward about" in stdout


def _row(**changes):
    row = {"problem": TINY, "pass": "host", "who": "sdpa", "plan": None, "checked": True}
    row |= {"samples": 1, "us": 1.0, "us_min": 1.0}
    return {**row, **record.machine(torch.device("cpu")), **changes}


def test_rows_that_are_no_results_are_refused(tmp_path):
    assert record.broken(_row()) == []
    for changes, word in (
        ({"checked": False}, "checked"),
        ({"us": 0.0}, "not a measurement"),
        ({"us": float("nan")}, "not a measurement"),
        ({"who": "me"}, "who"),
        ({"plan": "tiled"}, "plan"),
        ({"who": "rowmax"}, "plan"),
        ({"pass": "sideways"}, "pass"),
        ({"problem": "h2 b1 q40 k40 d16 bf16 causal"}, "spelling"),
        ({"note": "hello"}, "note"),
    ):
        assert any(word in wrong for wrong in record.broken(_row(**changes))), changes
        with pytest.raises(ValueError, match="not a result row"):
            record.append(tmp_path / "x.json", [_row(**changes)])
    assert not (tmp_path / "x.json").exists()


def test_tiles_expand():
    assert expand("64,128x32 w4 s2; 128x64 w8 s2 tma?") == ["64x32 w4 s2", "128x32 w4 s2", "128x64 w8 s2", "128x64 w8 s2 tma"]
    assert expand("16x16 w1,2 s1; 16x16 w2 s1") == ["16x16 w1 s1", "16x16 w2 s1"]


def test_what_bends_scores_is_timed_beside_the_same_without(main, monkeypatch, capsys):
    problem = Problem.parse(f"{TINY} softcap=5.0 bias(hqk)")
    monkeypatch.setitem(run.AT_MOST, problem, 1.15)
    code, rows = main("--problem", str(problem), "--who", "rowmax", "--pass", "forward,backward")
    assert code == 0
    beside = [(row["problem"], row["pass"]) for row in rows if row["run"].endswith(" softcap=5.0 bias(hqk)")]
    assert beside == [(text, which) for which in ("forward", "backward") for text in (TINY, str(problem))]
    assert len({row["run"] for row in rows}) == 2
    costs = [line for line in capsys.readouterr().out.splitlines() if "times its time without" in line]
    assert [line.startswith(str(problem)) for line in costs] == [True, True]
    assert ["(asked: at most 1.15)" in line for line in costs] == [True, False]


def test_the_set_of_scores_asks_everyone_who_can():
    timed = run._jobs(run._parser().parse_args(["--shapes", "scores"]), torch.device("cuda"))
    assert len(timed) == 11  # six problems, both passes but for dropout
    assert {problem for problem, _, _ in timed} - {run.unbent(problem) for problem, _, _ in timed} == set(run.AT_MOST)
    assert all(("flex" in who) == (problem.dropout == 0) and ("sdpa" in who) == problem.pairs for problem, _, who in timed)


@pytest.mark.parametrize("more", ["sink", "bias(hk)", "b2 bias(hqk)"])
def test_gradients_that_a_sample_cannot_check_are_not_timed(more):
    more = more if more.startswith("b2") else f"{'b2' if more == 'sink' else 'b1'} {more}"
    problem = Problem.parse(f"h2 q16 k16 d16 fp32 causal {more}")
    with pytest.raises(baselines.Refused, match="is a sum over"):
        calls.make_call("rowmax", problem, *calls.make_operands(problem, torch.device("cpu"), 0), "backward")
