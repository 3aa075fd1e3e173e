"""The model's times against the measured ones in the results files, its bytes and verdicts against counters, and its verdicts
where there can be no doubt.

Constants were fitted to two thirds of the rows of `benchmarks/fit.py`; what is reported is the other third. The draw that is
asked for, of another seed, is reported by `benchmarks/generations.py`, and no row of it is read here.
"""

import functools
import importlib
import json
import sys
from pathlib import Path

import pytest

from rowmax import Device, PagedProblem, Plan, Problem, Unsupported
from rowmax.analysis import report
from rowmax.analysis.predict import Constants, predict
from rowmax.analysis.verdict import UNITS, VERDICTS, nearly, verdict_of
from rowmax.device import Rates

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
H200 = Device.named("H200")


def benchmark(name: str):
    """A module of `benchmarks/`, which import each other by name."""
    if str(ROOT / "benchmarks") not in sys.path:
        sys.path.append(str(ROOT / "benchmarks"))
    return importlib.import_module(name)


@functools.cache
def errors() -> list:
    """(row, predicted over measured time minus 1)"""
    fit = benchmark("fit")
    return [(row, fit.error(row, Constants(), H200, Rates.of(H200))) for row in fit.rows_of()]


def share(kinds: tuple[str, ...], held_out: bool, most: float, *, alone: bool = False) -> float:
    chosen = [error for row, error in errors() if row.kind in kinds and row.held_out == held_out and row.alone == alone]
    assert len(chosen) > 10
    return sum(abs(error) <= most for error in chosen) / len(chosen)


NOW, BEFORE = ("q_outer", "hopper", "split_kv"), ("kv_outer", "dense")
OLDER = ("q_outer older", "hopper older")  # rows of run.py


def test_rows_that_were_held_out():
    """Asked for, of another draw, are 90% within 15% and 99% within 30%; of the older generations 90% within 25%."""
    assert share(NOW, True, 0.15) >= 0.96
    assert share(NOW, True, 0.30) == 1.0
    assert share(BEFORE, True, 0.25) == 1.0
    assert share(BEFORE, True, 0.15) < 1.0, "better than what is documented"


def test_rows_the_constants_were_fitted_to():
    assert share(NOW, False, 0.15) >= 0.99
    assert share(NOW, False, 0.30) == 1.0
    assert share(BEFORE, False, 0.25) >= 0.98


def test_rows_that_were_timed_while_the_card_was_warmer():
    for held_out in (False, True):
        assert share(OLDER, held_out, 0.15) >= 0.94
        assert share(OLDER, held_out, 0.25) == 1.0


def test_kernels_by_themselves():
    """As ncu times them. The worst of the older ones are the last kernel of `dense` at 256 dimensions, and the softmax of rows
    of 2k."""
    for held_out, least in ((True, 0.92), (False, 1.0)):
        assert share(BEFORE, held_out, 0.23, alone=True) == 1.0
        assert share(NOW, held_out, 0.15, alone=True) >= least
        assert share(NOW, held_out, 0.21, alone=True) == 1.0


def replayed(begin: str = "", end: str = "") -> dict[str, list[tuple[str, float]]]:
    """Cache -> (tile, how far off)"""
    fit = benchmark("fit")
    rates, found = Rates.of(H200), {"dense": [], "pages": [], "8 bits": []}
    for cache, tile, row in fit.replays(H200, rates, begin, end or fit.LATEST):
        kind = cache if cache == "dense" else "8 bits" if cache.startswith("8 bits") else "pages"
        found[kind].append((tile, abs(fit.error(row, Constants(), H200, rates))))
    return found


def test_decoding_as_graphs_are_replayed():
    """Eight shapes. Constants were fitted to 39 of the dense rows, nothing to pages; those in 8 bits are of kernels before."""
    found = replayed()
    dense, pages = ([error for _, error in found[kind]] for kind in ("dense", "pages"))
    assert (len(dense), len(pages)) == (129, 144)
    assert max(dense) <= 0.15
    assert sum(error <= 0.10 for error in dense) >= 0.95 * len(dense)
    assert sum(error <= 0.15 for error in pages) >= 0.88 * len(pages)
    assert sum(error <= 0.25 for error in pages) >= 0.97 * len(pages)


def test_decoding_as_it_was_measured_later():
    """The tiles of today, at the same shapes, timed after the constants had been fitted. In 8 bits two warps, as plans have."""
    found = replayed(benchmark("fit").LATEST, "2026-11-30T14")
    dense, pages = ([error for _, error in found[kind]] for kind in ("dense", "pages"))
    assert (len(dense), len(pages)) == (25, 42)
    assert max(dense) <= 0.10
    assert sum(error <= 0.10 for error in pages) >= 0.95 * len(pages)
    assert max(pages) <= 0.15
    narrow = [error for tile, error in found["8 bits"] if tile.startswith("16x64 w2")]
    assert len(narrow) == 4
    assert max(narrow) <= 0.05


def test_bytes_and_verdicts_are_those_of_the_hardware():
    """Bytes of 12 shapes, each by three algorithms; verdicts of these and of what was drawn, of which 38 of 40 are asked for.
    What the first file has beside the 12 shapes was drawn as what is reported, and is left out."""
    counters = benchmark("counters")

    def counted(name: str, kinds: tuple[bool, ...]) -> dict:
        rows = json.loads((RESULTS / "counters" / name).read_text())["rows"]
        rows = [row for row in rows if row["bytes_asked"] in kinds]
        jobs = [counters.Job(row["problem"], row["plan"], row["bytes_asked"]) for row in rows]
        return counters.report(counters.compared(jobs, [row["kernels"] for row in rows], H200))

    first, second = counted("h200-2026-11-30.json", (True,)), counted("h200-2026-11-30-second.json", (True, False))
    for found in (first, second):
        assert (found["bytes_near"], found["bytes_of"]) == (36, 36)
    assert (first["verdicts_agree"], first["verdicts_of"]) == (36, 36)
    assert (second["verdicts_agree"], second["verdicts_nearly"], second["verdicts_of"]) == (70, 71, 71)
    assert (second["drawn_agree"], second["drawn_nearly"], second["drawn_of"]) == (34, 35, 35)


def test_shares_are_those_of_the_hardware():
    """Of the kernels that were drawn with seeds 5 and 6, which the model was refined with."""
    off: dict[str, list[float]] = {name: [] for name in VERDICTS}
    for file in ("h200-2026-11-30-second.json", "h200-2026-11-30-seed6.json"):
        rows = json.loads((RESULTS / "counters" / file).read_text())["rows"]
        for row in rows:
            if not row["bytes_asked"]:
                said = predict(Problem.parse(row["problem"]), H200, Plan.parse(row["plan"])).shares
                for name in VERDICTS:
                    off[name].append(abs(said[name] - row["shares"][name]))
    assert len(off["HBM"]) == 75
    assert max(off["tensor"] + off["non-matmul"] + off["launch"]) <= 0.06
    assert max(off["HBM"] + off["parallelism"]) <= 0.12
    assert all(sum(found) / len(found) <= 0.02 for found in off.values())


def test_drawn_rows_that_were_measured_for_the_model_before():
    """Seed 7, of which no constant was fitted, and seed 6: its verdicts are in view now. As the model of before was judged, at
    commit 5aa1df8: 37 of 40 verdicts; 93.1% of 203 within 15%, all within 30%; 97.4% of 194 within 25%."""
    counters, generations = benchmark("counters"), benchmark("generations")
    document = json.loads((RESULTS / "counters" / "h200-2026-11-30-seed6.json").read_text())
    assert (document["seed"], document["commit"][:7], document["verdicts_agree"]) == (6, "5aa1df8", 37)
    assert (document["verdicts_nearly"], document["verdicts_of"]) == (40, 40)
    jobs = [counters.Job(row["problem"], row["plan"], False) for row in document["rows"]]
    found = counters.report(counters.compared(jobs, [row["kernels"] for row in document["rows"]], H200))
    assert (found["verdicts_agree"], found["verdicts_nearly"], found["verdicts_of"]) == (38, 40, 40)
    rows = json.loads((RESULTS / "generations" / "h200-2026-11-30-seed7.json").read_text())
    assert {row["commit"][:7] for row in rows} == {"5aa1df8"}
    off: dict[bool, list[float]] = {True: [], False: []}
    asked = {str(problem) for problem, _ in generations.generation_jobs(H200)}
    for row, one in generations.compared([row for row in rows if row["problem"] not in asked]):
        if one.plan.algorithm in NOW + BEFORE:
            off[one.plan.algorithm in NOW].append(abs(one.seconds * 1e3 / row["ms"] - 1))
    assert (len(off[True]), len(off[False])) == (203, 194)
    assert sum(error <= 0.15 for error in off[True]) >= 0.93 * 203
    assert max(off[True]) <= 0.30
    assert sum(error <= 0.25 for error in off[False]) >= 0.97 * 194


def test_verdicts_of_a_draw_that_nobody_had_seen():
    """Seed 8, counted at a5ed514 after the model had been settled. Asked for are 38 of 40."""
    counters = benchmark("counters")
    document = json.loads((RESULTS / "counters" / "h200-2026-11-30-seed8.json").read_text())
    assert (document["seed"], document["verdicts_agree"], document["verdicts_of"]) == (8, 40, 42)
    jobs = [counters.Job(row["problem"], row["plan"], False) for row in document["rows"]]
    found = counters.compared(jobs, [row["kernels"] for row in document["rows"]], H200)
    assert (counters.report(found)["verdicts_agree"], counters.report(found[:40])["verdicts_agree"]) == (40, 38)


def test_generations_side_by_side():
    """FlashAttention-2 against 1, and rows against columns: asked for is that the model is off by at most 25%."""
    generations = benchmark("generations")
    rows = json.loads((RESULTS / "generations" / "h200-2026-11-30-fit.json").read_text())
    asked = {str(problem) for problem, _ in generations.generation_jobs(H200)}
    times: dict = {}
    for row, found in generations.compared([row for row in rows if row["problem"] in asked]):
        name = row["plan"] if found.plan.algorithm == "warp_split" else found.plan.algorithm
        times.setdefault(row["problem"], {})[name] = (row["ms"], found.seconds * 1e3)
    for slow, fast, least in (("kv_outer", "q_outer", 1.9), (*reversed(generations.WARPS), 2.0)):
        ratios = generations.ratios(times, slow, fast)
        assert len(ratios) == 6
        for one in ratios:
            assert one.measured >= least
            assert abs(one.model / one.measured - 1) <= generations.RATIO_OFF, one


def test_the_rule_of_verdicts():
    shares = dict.fromkeys(VERDICTS, 0.0)
    assert verdict_of(shares) == "non-matmul", "nothing is busy half of the time: waits"
    for name in VERDICTS:
        assert verdict_of({**shares, name: 0.5}) == name
    assert verdict_of({**dict.fromkeys(UNITS, 0.9), "launch": 0.5}) == "launch"
    assert verdict_of({**shares, "HBM": 0.6, "tensor": 0.7}) == "tensor"
    assert nearly({**shares, "HBM": 0.7, "tensor": 0.74}) == {"HBM", "tensor"}
    assert nearly({**shares, "tensor": 0.52}) == {"tensor", "non-matmul"}
    assert nearly({**shares, "parallelism": 0.9, "launch": 0.47}) == {"parallelism", "launch"}
    assert nearly({**shares, "HBM": 0.4}) == {"non-matmul"}


def test_terms_and_gaps_are_times_of_this_call():
    for text in ("b1 h16 q16384 k16384 d128 bf16 causal", "b1 h32/8 q1 k131072 d128 bf16", "b4 h8 q100 k100 d64 fp16"):
        found = predict(Problem.parse(text), H200)
        assert set(found.gaps) == set(VERDICTS)
        assert all(0 <= gap <= found.seconds for gap in found.gaps.values())
        assert all(0 <= term <= found.seconds * 1.01 for term in found.terms.values()), found
        assert set(found.shares) == set(VERDICTS)
        assert all(0 <= share <= 1 for share in found.shares.values())
        assert found.verdict == verdict_of(found.shares)
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


def test_a_call_without_work_is_a_launch():
    for device in ("H200", "cpu"):
        found = report.explain(Problem.parse("b1 h2 q0 k10 d64 bf16"), Device.named(device))
        assert found["verdict"] == "launch"


def test_constants_are_positive():
    assert all(value > 0 for value in Constants())
