"""`rowmax tune` with a measurer that needs no GPU: what it prints, what it writes, and that plans and `explain` follow."""

import json

import pytest
import torch

from rowmax import Device, Problem, ops, plan
from rowmax.analysis.measure import Timed
from rowmax.plan import by_table, forget, tuned

pytest.importorskip("typer")
from typer.testing import CliRunner

from rowmax.cli import tune
from rowmax.cli.app import app

H200 = Device.named("H200")
TEXT = "b1 h16 q16384 k16384 d128 bf16 causal"
PROBLEM = Problem.parse(TEXT)
BEST = "q_outer[128x64 w8 s3 tma]"


class Fake:
    """The given plan takes 8 ms, others 10."""

    def __init__(self, best: str = BEST, wrong: str = "", useless: bool = False):
        self.best, self.wrong, self.useless = best, wrong, useless

    def check(self, problem, direction, plans, *, kinds=("normal",), seconds):
        self.seconds = seconds
        return {p: "WRONG: out: too far off (seed 1)" if p == self.wrong else "no room" * self.useless for p in plans}

    def time(self, problem, direction, plans, *, seconds=0.0, limit):
        return {p: Timed(8.0 if p == self.best else 10.0, "") for p in plans}


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    path = tmp_path / "tuned.json"
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    forget()
    yield path
    monkeypatch.undo()
    forget()


@pytest.fixture
def measurer(monkeypatch):
    fake = Fake()
    monkeypatch.setattr(tune, "_gpu", lambda: (H200, fake))
    return fake


def invoke(*arguments: str):
    return CliRunner().invoke(app, arguments)


def test_the_best_is_kept_and_planned_and_explained(file, measurer):
    assert str(plan(PROBLEM, H200)) != BEST
    ops._launches["a call"] = None
    result = invoke("tune", TEXT, "--seconds", "100")
    assert result.exit_code == 0, result.output
    assert f"{TEXT} forward on NVIDIA H200" in result.stdout
    flops = 16 * (16384 * 16385 // 2) * 2 * 256
    assert f"8.0000 ms {flops / 8e9:>6.0f} TFLOP/s  {BEST}" in result.stdout
    assert f"{by_table(PROBLEM, H200)}  the table's" in result.stdout
    assert "were right and timed" in result.stdout
    assert f"in {file}\n" in result.stdout
    assert measurer.seconds < 100
    entry = json.loads(file.read_text())["devices"]["NVIDIA H200"][TEXT]["forward"]
    assert entry["tiles"] == ["128x64 w8 s3 tma"]
    assert entry["tflops"] == pytest.approx(flops / 8e9, rel=1e-3)
    assert entry["table_tflops"] == pytest.approx(flops / 10e9, rel=1e-3)
    assert str(plan(PROBLEM, H200)) == BEST, "the plan of this process is stale"
    assert not ops._launches, "launches of this process are stale"
    said = f"forward: {BEST}, tuned on NVIDIA H200 {entry['date']}: {flops / 8e9:.0f} TFLOP/s, the table's"
    assert said in invoke("explain", TEXT, "--gpu", "H200").stdout
    found = json.loads(invoke("explain", TEXT, "--gpu", "H200", "--json").stdout)["directions"]["forward"]
    assert found["plan"] == BEST
    assert found["reason"] == plan(PROBLEM, H200).reason


def test_explain_says_why_an_entry_is_left_out(file, measurer):
    invoke("tune", TEXT)
    file.write_text(file.read_text().replace(tuned.triton_version(), "1.0.0"))
    forget()
    assert "not tuned: measured with triton 1.0.0, here is" in invoke("explain", TEXT, "--gpu", "H200").stdout


def test_several_problems_and_the_backward(file, measurer):
    other = "b2 h8/2 q4096 k4096 d64 fp16"
    assert invoke("tune", TEXT, other, "--pass", "backward").exit_code == 0
    found = tuned.read(file)["NVIDIA H200"]
    assert {text: list(directions) for text, directions in found.items()} == {TEXT: ["backward"], other: ["backward"]}
    chosen = plan(PROBLEM, H200, direction="backward")
    assert "the table's tile, which nothing tried there exceeds" in chosen.reason
    assert chosen.tiles == by_table(PROBLEM, H200, direction="backward").tiles


def test_another_file_is_written_and_not_read(file, measurer, tmp_path):
    other = tmp_path / "deep" / "mine.json"
    result = invoke("tune", TEXT, "--out", str(other))
    assert result.exit_code == 0
    assert f"in {other}, which is read where {tuned.VARIABLE} names it" in result.stdout
    assert not file.exists()
    assert TEXT in tuned.read(other)["NVIDIA H200"]
    assert plan(PROBLEM, H200) == by_table(PROBLEM, H200)


def test_a_wrong_result_is_loud(file, measurer):
    measurer.wrong = BEST
    result = invoke("tune", TEXT)
    assert result.exit_code == 1
    assert f"WRONG: out: too far off (seed 1): {BEST}" in result.stdout
    assert "please report it" in result.stdout
    assert tuned.read(file)["NVIDIA H200"][TEXT]["forward"]["tiles"] != ["128x64 w8 s3 tma"]


def test_nothing_that_runs_keeps_nothing(file, measurer):
    measurer.useless = True
    result = invoke("tune", TEXT)
    assert result.exit_code == 1
    assert "nothing ran here and was right" in result.stdout
    assert str(file) not in result.stdout
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("b2 h3 qq",), "'qq' is not part"),
        (("b1 h1 q8 d8 fp64",), "fp64 runs on the CPU only"),
        ((TEXT, "--pass", "sideways"), "sideways"),
        ((TEXT, "--seconds", "5"), "--seconds"),
        ((), "PROBLEM"),
    ],
)
def test_errors_teach(measurer, arguments, says):
    result = invoke("tune", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_a_foreign_file_is_refused_before_anything_is_measured(file, monkeypatch):
    monkeypatch.setattr(tune, "_gpu", lambda: pytest.fail("measured"))
    file.write_text("[]")
    result = invoke("tune", TEXT)
    assert result.exit_code == 2
    assert f"{file} would be overwritten, but it has no 'rowmax_tuned'" in result.stderr
    assert file.read_text() == "[]"


def test_without_a_file_to_write_it_asks_for_one(monkeypatch):
    monkeypatch.setenv(tuned.VARIABLE, "")
    result = invoke("tune", TEXT)
    assert result.exit_code == 2
    assert "say with --out where to write" in result.stderr


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = invoke("tune", TEXT)
    assert result.exit_code == 2
    assert "this PyTorch sees none" in result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_on_this_gpu(file, direction):
    """The real measurer; afterwards the tuned plan runs, and is right."""
    from rowmax import testing

    text = "b2 h4/2 q600 k600 d64 bf16 causal"
    result = invoke("tune", text, "--pass", direction, "--seconds", "60")
    assert result.exit_code == 0, result.output
    assert "tuned on" in plan(Problem.parse(text), Device.of(torch.device("cuda")), direction=direction).reason
    assert testing.check(Problem.parse(text), device="cuda").ok
