"""What bends or hides scores, in the model: times over a plain call's against those measured side by side, bytes, and words."""

import json
from pathlib import Path

import pytest

from rowmax import Device, Plan, Problem
from rowmax.analysis import report
from rowmax.analysis.launches import launches
from rowmax.analysis.predict import predict
from rowmax.device import Rates

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "scores"
H200 = Device.named("H200")
PLAIN = "b1 h16 q16384 k16384 d128 bf16 causal"


def rounds() -> dict[str, tuple[str, float, float]]:
    """What is bent -> its plan, ms, and ms of the plain call in the same rounds."""
    rows = json.loads((RESULTS / "h200-2026-11-30.json").read_text())
    plain = {row["run"]: row["ms"] for row in rows if row["problem"] == PLAIN}
    bent = [row for row in rows if row["problem"] != PLAIN and "dropout" not in row["problem"]]
    return {row["problem"].removeprefix(PLAIN).strip(): (row["plan"], row["ms"], plain[row["run"]]) for row in bent}


@pytest.mark.parametrize("word", ["softcap=50.0", "alibi", "sink"])
def test_what_it_costs_is_what_was_measured(word):
    """Each constant was set by one of these rows: they hold what is said, and predict nothing."""
    plan, ms, plain_ms = rounds()[word]
    bent = predict(Problem.parse(f"{PLAIN} {word}"), H200, Plan.parse(plan)).seconds
    plain = predict(Problem.parse(PLAIN), H200).seconds
    assert bent / plain == pytest.approx(ms / plain_ms, rel=0.05)


@pytest.mark.parametrize("run", ["d128 causal", "d128 full", "portable"])
def test_what_dropout_costs_is_what_was_measured(run):
    """With 128 dimensions, of the draws that are made now; the row without a mask set no constant."""
    rows = json.loads((RESULTS / "dropout-h200-2026-11-30.json").read_text())
    rows = [row for row in rows if row["run"].endswith(f", {run}") and "dropout" in row["problem"]]
    (row,) = (row for row in rows if run == "portable" or ("before" in row["draws"] and "pingpong" in row["plan"]))
    problem = Problem.parse(row["problem"])
    plain = predict(problem.with_(dropout=0.0), H200).seconds
    bent = predict(problem, H200, Plan.parse(row["plan"])).seconds
    assert bent / plain == pytest.approx(row["over_plain"], rel=0.05)


def test_a_bias_is_read_once_from_memory_and_by_every_tile():
    def main(words):
        problem = Problem.parse(f"b2 h8 q4096 k4096 d64 bf16 {words}")
        return launches(problem, H200, Rates.of(H200), Plan.parse("q_outer[128x64 w4 s4 tma]"))[0]

    plain, own, shared, wide, row = map(main, ("", "bias(bhqk)", "bias(qk)", "bias(qk,fp32)", "bias(k)"))
    assert own.hbm_bytes - plain.hbm_bytes == 2 * 8 * 4096**2 * 2
    assert shared.hbm_bytes - plain.hbm_bytes == 4096**2 * 2
    assert wide.hbm_bytes - plain.hbm_bytes == 4096**2 * 4
    assert row.hbm_bytes == plain.hbm_bytes
    assert own.l2_bytes == shared.l2_bytes == plain.l2_bytes + 2 * 8 * 4096**2 * 2


def test_what_is_not_counted_is_said():
    def said(words, device="H200"):
        return report.explain(Problem.parse(f"b1 h4 q512 k512 d64 bf16 {words}"), Device.named(device))["not_counted"]

    assert said("causal") is None
    assert said("softcap=30.0") == "what bends or hides scores, in the backward"
    assert "on a CPU" in said("alibi", "cpu")
    assert "three times as long" in said("mask(qk)", "A100")
