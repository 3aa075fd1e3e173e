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
    )
    assert {*steps, "hopper-forward", "hopper-backward", "index"} == {page.stem for page in PAGES}
    assert all(len(code_of(page)) == 1 for page in PAGES if page.stem in steps)


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
    rows = json.loads((RESULTS / "h200-2026-11-30.json").read_text())
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
