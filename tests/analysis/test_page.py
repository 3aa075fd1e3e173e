"""The page stands alone, its walks are those of the loops that are counted, and in a browser it works without an error."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from rowmax import Device, Problem
from rowmax.analysis import page, report, tally

H200 = Device.named("H200")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TEXTS = ("b1 h16 q4096 k4096 d128 bf16 causal", "b1 h32/8 q1 k131072 d128 bf16", "b3 h2 q500 k500 d64 bf16 packed causal")


def made(text: str) -> str:
    problem = Problem.parse(text)
    return page.page(problem, H200, report.explain(problem, H200, against=("kv_outer", "q_outer")))


class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.ids += [value for name, value in attributes if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("text", TEXTS)
def test_it_stands_alone(text):
    found = made(text)
    assert not re.search(r"(src|href)=|@import|url\(|fetch\(|https?://", found)
    parser = Balanced()
    parser.feed(found)
    assert not parser.open
    assert len(set(parser.ids)) == len(parser.ids)
    assert {"roofline", "walk", "timeline", "step", "next", "back", "said", "walks"} <= set(parser.ids)
    assert "nan" not in re.sub(r"<script.*?</script>", "", found, flags=re.DOTALL).lower()


@pytest.mark.parametrize("order", page.ORDERS)
@pytest.mark.parametrize("mask", ["", "causal", "window(40,7)"])
def test_walks_read_what_the_loops_read(order, mask):
    """Tiles of equal size in fp32: sums of the walk are bytes of `tally`, but for m, l and what the walk leaves out."""
    import torch

    problem, side = Problem.parse(f"b1 h1 q128 k128 d16 fp32 {mask}"), 16
    rows, columns, seen = page.miniature(problem, side, side)
    assert (rows, columns) == (8, 8)
    steps = page.walk(order, rows, columns, seen)
    _, found = tally.run(problem, *(torch.randn(1, 128, 1, 16) for _ in range(3)), order, side, side)
    tile = side * 16 * 4
    read, written = steps[-1][3], steps[-1][4]
    if order == "q_outer":
        assert (read * tile, written * tile) == (found.loaded, found.stored)
    elif order == "kv_outer":
        state, turns = side * 2 * 4, len(steps)
        hidden = columns - len({j for _, j in seen})
        assert found.loaded == read * tile + turns * state + (rows + 2 * hidden) * tile  # O once more at the end
        assert found.stored == written * tile + turns * state + rows * tile
    else:
        assert (read * tile, written * tile) == (found.loaded, found.stored)


CLICKS = """<script>
const wrong = []; window.addEventListener("error", one => wrong.push(one.message)); const texts = new Set(); let steps = 0;
for (const one of document.querySelectorAll("[data-order]")) {
  one.click();
  for (let i = 0; i <= Number(document.getElementById("step").max); i++) {
    texts.add(one.dataset.order + document.getElementById("said").textContent);
    if (document.querySelectorAll(".cell.now").length !== 1) wrong.push("no cell is marked");
    steps++; document.getElementById("next").click();
  }
  document.getElementById("back").click();
}
document.body.setAttribute("data-result", JSON.stringify({wrong, steps, texts: texts.size}));
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here to open the page with")
def test_clicking_through_the_walk(tmp_path):
    found = made(TEXTS[0])
    path = tmp_path / "page.html"
    path.write_text(found.replace("</body>", CLICKS + "</body>"), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--user-data-dir={tmp_path}", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    result = json.loads(re.search(r'data-result="([^"]*)"', done.stdout)[1].replace("&quot;", '"'))
    steps = sum(map(len, json.loads(re.search(r'id="walks">(.*?)</script>', found, re.DOTALL)[1])["steps"].values()))
    assert result == {"wrong": [], "steps": steps, "texts": steps}
