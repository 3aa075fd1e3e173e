"""The model's times against the measured ones in the results files, and its verdicts where there can be no doubt.

Constants were fitted to the rows of one half; what is reported is the other. Rows: H200, forward, rowmax's own plans, medians
of all runs of a plan and problem.
"""

import functools
import importlib.util
import json
import statistics
import zlib
from pathlib import Path

import pytest

from rowmax import Device, PagedProblem, Plan, Problem, Unsupported
from rowmax.analysis.predict import VERDICTS, Constants, predict

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
H200 = Device.named("H200")
LATEST = "2026-11-30T08"  # later rows change neither what was fitted nor what is documented


def lengths_of(problem: Problem):
    """Of packed sequences, as the benchmark draws them."""
    spec = importlib.util.spec_from_file_location("benchmark_shapes", ROOT / "benchmarks" / "shapes.py")
    shapes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shapes)
    return list(zip(shapes.lengths(problem, "q"), shapes.lengths(problem, "k"), strict=True))


@functools.cache
def errors() -> dict:
    """(problem, plan) -> predicted over measured time, minus 1."""
    measured: dict = {}
    tried: dict = {}
    for name in ("h200-2026-11-29.json", "h200-2026-11-30.json"):
        for row in json.loads((RESULTS / name).read_text()):
            if row["pass"] == "forward" and row["who"] == "rowmax" and row["date"] < LATEST:
                measured.setdefault((row["problem"], row["plan"]), []).append(row["ms"])
    for row in json.loads((RESULTS / "tiles" / "h200-2026-11-29.json").read_text())["rows"]:
        if row["kernel"] == "forward":
            key = (row["problem"], f"q_outer[{row['tile']}]")
            tried.setdefault(key, []).append(row["ms"])
    measured = {**tried, **measured}
    found = {}
    for (text, plan), times in measured.items():
        problem = Problem.parse(text)
        lengths = lengths_of(problem) if problem.packed else None
        prediction = predict(problem, H200, Plan.parse(plan), lengths=lengths)
        found[text, plan] = prediction.seconds * 1e3 / statistics.median(times) - 1
    return found


def share(half: int, most: float) -> float:
    chosen = [error for key, error in errors().items() if zlib.crc32("".join(key).encode()) % 2 == half]
    assert len(chosen) > 30
    return sum(abs(error) <= most for error in chosen) / len(chosen)


def test_rows_the_constants_were_fitted_to():
    assert share(0, 0.15) >= 0.93
    assert share(0, 0.30) == 1.0


def test_the_other_rows():
    """Asked for are 90% within 15% and 99% within 30%: the second holds here, the first does not yet."""
    assert 0.78 <= share(1, 0.15) < 0.90, "better or worse than what is documented"
    assert share(1, 0.30) >= 0.99


def test_terms_and_gaps_are_times_of_this_call():
    for text in ("b1 h16 q16384 k16384 d128 bf16 causal", "b1 h32/8 q1 k131072 d128 bf16", "b4 h8 q100 k100 d64 fp16"):
        found = predict(Problem.parse(text), H200)
        assert set(found.gaps) == set(VERDICTS)
        assert all(0 <= gap <= found.seconds for gap in found.gaps.values())
        assert all(0 <= term <= found.seconds * 1.01 for term in found.terms.values()), found
        assert found.gaps[found.verdict] == max(found.gaps.values())
        assert 0 < found.busy <= 1


@pytest.mark.parametrize(
    ("text", "plan", "verdict"),
    [
        ("b1 h32/8 q1 k131072 d128 bf16", "split_kv", "HBM"),  # the cache is read once, at the speed of memory
        ("b1 h32/8 q1 k131072 d128 bf16", "q_outer", "parallelism"),  # 32 blocks for 132 multiprocessors
        ("b1 h1 q4096 k4096 d64 bf16", "kv_outer", "parallelism"),  # one block
        ("b2 h16 q8192 k8192 d64 bf16", "dense", "HBM"),  # scores in memory
        ("b1 h8 q16384 k16384 d256 bf16", "hopper", "tensor"),
        ("b8 h32 q4096 k4096 d64 bf16", "hopper", "non-matmul"),  # as many exponentials as products
        ("b1 h2 q16 k16 d64 bf16", "q_outer", "launch"),
    ],
)
def test_verdicts_without_doubt(text, plan, verdict):
    assert predict(Problem.parse(text), H200, plan).verdict == verdict


def test_more_work_takes_longer_and_more_machine_less():
    def time(text, device="H200", plan="q_outer"):
        return predict(Problem.parse(text), Device.named(device), plan).seconds

    base = "b4 h16 q4096 k4096 d64 bf16"
    assert time(base + " causal") < time(base) < time("b8 h16 q4096 k4096 d64 bf16") < time("b8 h16 q8192 k8192 d64 bf16")
    assert time(base) < time(base, plan="dense")
    assert time(base, "H200") < time(base, "A100") < time(base, "L4")
    assert time("b8 h32 q1 k65536 d128 bf16", "H200", "split_kv") < time("b8 h32 q1 k65536 d128 bf16", "H100", "split_kv")


def test_flashattention_1_against_2():
    """What is asked of the kernels is what the model expects of them: 1.9x where there are heads enough, 20x where not."""
    for heads, least in ((128, 1.9), (1, 20.0)):
        for tokens in (4096, 16384):
            problem = Problem.parse(f"b1 h{heads} q{tokens} k{tokens} d64 bf16")
            assert predict(problem, H200, "kv_outer").seconds > least * predict(problem, H200, "q_outer").seconds


def test_what_has_no_model_says_so():
    with pytest.raises(KeyError, match="gathered"):
        predict(PagedProblem.parse("b1 h2 q1 k64 d64 bf16 causal paged16"), Device.named("cpu"))
    with pytest.raises(KeyError, match="backward"):
        predict(Problem.parse("b1 h2 q64 k64 d64 bf16"), H200, Plan.parse("hopper[128x128 s2 q1 static]"), direction="backward")
    with pytest.raises(Unsupported):
        predict(Problem.parse("b1 h2 q64 k64 d64 bf16"), Device.named("V100"))


def test_constants_are_positive():
    assert all(value > 0 for value in Constants())
