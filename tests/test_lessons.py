"""The code in docs/lessons runs as it is printed, is short, and the figures beside it are those of the results files."""

import json
import re
from pathlib import Path

import pytest

from rowmax.analysis import lesson_pictures

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "lessons").glob("*.md"))
RESULTS = ROOT / "benchmarks" / "results"


def code_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if code_of(page)], ids=lambda page: page.stem)
def test_code_runs(page, capsys):
    for code in code_of(page):
        assert len(code.splitlines()) <= 40
        assert "assert" in code, "it shows something, and checks it"
        exec(compile(code, str(page), "exec"), {})


def test_there_is_a_page_for_each_step():
    steps = (
        "online-softmax",
        "tiling-and-hbm",
        "fa1-against-fa2",
        "recomputation",
        "prefill-against-decode",
        "off-tensor-core",
        "split-kv-against-split-q",
        "hopper-forward",
        "hopper-backward",
    )
    assert {*steps, "index"} == {page.stem for page in PAGES}
    for page in PAGES:
        if page.stem in steps:
            assert (len(code_of(page)), page.read_text().count("![")) == (1, 1), "code that runs, and a picture of the model's"
            assert "|---" in page.read_text(), "a table of what was measured"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs" / "explain.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("name", lesson_pictures.PICTURES)
def test_pictures_are_what_the_model_says(name):
    """`python -m rowmax.analysis.lesson_pictures docs/lessons/pictures` writes them."""
    assert (ROOT / "docs" / "lessons" / "pictures" / f"{name}.svg").read_text() == lesson_pictures.PICTURES[name]()
    assert f"](pictures/{name}.svg)" in (ROOT / "docs" / "lessons" / f"{name}.md").read_text()


def test_figures_are_those_of_the_results():
    rows = json.loads((RESULTS / "h200-2026-11-30-second.json").read_text())
    table = dict(re.findall(r"\| (64|128|256) \| (\d+) \|", (ROOT / "docs" / "lessons" / "off-tensor-core.md").read_text()))
    for dim, heads in (("64", 32), ("128", 16), ("256", 8)):
        problem = f"b1 h{heads} q16384 k16384 d{dim} bf16"
        latest = [row for row in rows if row["problem"] == problem and row["who"] == "rowmax" and row["pass"] == "forward"][-1]
        assert round(latest["tflops"]) == int(table[dim])
    memory = [row for row in json.loads((RESULTS / "h200-2026-11-29.json").read_text()) if row["pass"] == "memory"]
    text = (ROOT / "docs" / "lessons" / "recomputation.md").read_text()
    ours = [row for row in memory if row["who"] == "rowmax"][-1]
    assert f"{ours['extra_peak_bytes']:,}" in text
    assert f"{ours['dense_scores_bytes']:,}" in text


@pytest.mark.parametrize(
    ("page", "slow", "fast"),
    [
        ("fa1-against-fa2", "kv_outer[64x128 w4 s2]", "q_outer["),
        ("split-kv-against-split-q", "warp_split[64x64 w4 s2 columns]", "warp_split[64x64 w4 s2 rows]"),
    ],
)
def test_times_side_by_side_are_those_of_the_results(page, slow, fast):
    """Of each problem the latest row; and what the model says of the very plans."""
    from rowmax import Device, Plan, Problem
    from rowmax.analysis.predict import predict

    gpu, times = Device.named("H200"), {}
    for row in json.loads((RESULTS / "generations" / "h200-2026-11-30-fit.json").read_text()):
        times[row["problem"], row["plan"]] = row["ms"]
    text = (ROOT / "docs" / "lessons" / f"{page}.md").read_text()
    table = re.findall(r"\| (1|8|128) \| (4096|16384) \| (.*) \| (.*) \| (.*) \| (.*) \|", text)
    assert len(table) == 6
    for heads, tokens, *figures in table:
        problem = f"b1 h{heads} q{tokens} k{tokens} d64 bf16"
        plans = [next(plan for text, plan in times if text == problem and plan.startswith(name)) for name in (slow, fast)]
        one, two = (times[problem, plan] for plan in plans)
        model = [predict(Problem.parse(problem), gpu, Plan.parse(plan)).seconds for plan in plans]
        assert figures == [f"{one:.4g}", f"{two:.4g}", f"{one / two:.3g}", f"{model[0] / model[1]:.3g}"], problem


def table_of(page: str, columns: int) -> list[list[str]]:
    """Rows of a page's tables that have so many columns, without heads."""
    lines = (ROOT / "docs" / "lessons" / f"{page}.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    at = next(i for i, row in enumerate(rows) if len(row) == columns and set(row) == {"---"})
    return rows[at + 1 :]


def test_scores_in_memory_against_none():
    times = {}
    for row in json.loads((RESULTS / "generations" / "h200-2026-11-30-fit.json").read_text()):
        times[row["problem"], row["plan"].partition("[")[0]] = row["ms"]
    for heads, tokens, slow, fast, ratio in table_of("online-softmax", 5):
        dense, online = (times[f"b1 h{heads} q{tokens} k{tokens} d64 bf16", name] for name in ("dense", "q_outer"))
        assert [slow, fast, ratio] == [f"{dense:.4g}", f"{online:.4g}", f"{dense / online:.3g}"]


def test_memory_of_a_backward_is_what_was_measured():
    found = json.loads((RESULTS / "growth" / "h200-2026-11-30.json").read_text())
    whole = [row for row in found["rows"] if row["pass"] == "forward+backward"]
    peaks = {(str(row["tokens"]), row["who"]): row.get("peak_bytes") for row in whole}
    slopes = {one["who"]: one["memory"] for one in found["slopes"] if one["pass"] == "forward+backward"}
    *rows, last = table_of("recomputation", 4)
    names = ("torch math", "q_outer", "hopper")
    for tokens, *said in rows:
        sizes = [peaks[tokens, name] for name in names]
        assert said == [f"{size / 2**20:,.1f}" if size else "no room" for size in sizes]
    assert last == ["slope", *(f"{slopes[name]:.2f}" for name in names)]
    assert abs(slopes["torch math"] - 2) <= 0.05
    assert max(abs(slopes[name] - 1) for name in names[1:]) <= 0.03


def test_parts_of_one_query():
    rows = json.loads((RESULTS / "decode" / "sweep-h200-2026-11-30.json").read_text())["rows"]
    problem = "b1 h32/8 q1 k131072 d128 bf16"
    found = {row["who"]: row for row in rows if row["problem"] == problem}
    for parts, blocks, us, speed in table_of("prefill-against-decode", 4):
        row = found[f"dense [16x64 w4 s3 x{parts}]"]
        assert [blocks, us, speed] == [f"{8 * int(parts):,}", f"{row['replay_us']:.1f}", f"{row['gb_per_s'] / 1e3:.2f}"]


def test_bytes_are_those_of_the_counters():
    rows = json.loads((RESULTS / "counters" / "h200-2026-11-30.json").read_text())["rows"]
    moved = {(row["problem"], row["plan"].split("[")[0]): row["dram_bytes"] for row in rows}
    text = (ROOT / "docs" / "lessons" / "fa1-against-fa2.md").read_text()
    for name in ("kv_outer", "q_outer"):
        assert f"{moved['b16 h16 q4096 k4096 d64 bf16', name] / 1e6:,.0f} MB" in text
    text = (ROOT / "docs" / "lessons" / "tiling-and-hbm.md").read_text()
    for problem, scores in (
        ("b4 h16 q4096 k4096 d64 bf16", 4 * 16 * 4096**2),
        ("b8 h32/8 q2048 k2048 d128 bf16", 8 * 32 * 2048**2),
    ):
        assert f"{moved[problem, 'dense'] / scores:.1f}" in text
    times = {(row["problem"], row["plan"].split("[")[0]): row["gpu_ms"] for row in rows}
    for name, sequences, size, each, ms in table_of("tiling-and-hbm", 5):
        key = f"b{sequences} h8 q4096 k4096 d128 bf16", name.strip("`")
        scores = int(sequences) * 8 * 4096**2
        assert [size, each, ms] == [f"{moved[key] / 1e6:,.0f}", f"{moved[key] / scores:.2f}", f"{times[key]:.3g}"]
