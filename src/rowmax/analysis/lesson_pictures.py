"""The pictures in docs/lessons, as SVG made from what the model counts.

    python -m rowmax.analysis.lesson_pictures docs/lessons/pictures

writes them anew; `tests/test_lessons.py` fails where a file says something else than the model.
"""

import re
import sys
from collections.abc import Callable, Sequence
from math import exp, inf
from pathlib import Path

from rowmax.analysis.cost import flops_of
from rowmax.analysis.launches import launches
from rowmax.analysis.page import STYLE, WIDTH, _roofline, _timeline, walk
from rowmax.analysis.predict import predict
from rowmax.analysis.report import explain
from rowmax.device import EXPONENTIALS, Device, Rates
from rowmax.plan import Plan
from rowmax.plan.warp_split import SHARES
from rowmax.problem import Problem

GPU = Device.named("H200")
TILES = 5  # a side of the walks
CELL = 46


def standalone(height: int, parts: Sequence[str]) -> str:
    """Parts as one SVG file, with the style of the page."""
    style = "\n".join(line for line in STYLE.strip().splitlines() if not line.startswith(("body", "h1", "table")))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    back = f'<rect width="{WIDTH}" height="{height}" fill="#f7f7f8"/>'
    return "\n".join([head, f"<style>{style}</style>", back, *parts, "</svg>", ""])


def _inside(svg: str) -> tuple[int, str]:
    """Height and contents of the SVG in a piece of the page."""
    found = re.search(r'<svg [^>]*height="(\d+)"[^>]*>(.*)</svg>', svg, re.DOTALL)
    if found is None:
        raise ValueError(f"no SVG with a height begins this piece of the page: {svg[:80]!r}")
    return int(found[1]), found[2].replace("/><", "/>\n<").replace("</text><", "</text>\n<")


def _stacked(pieces: Sequence[tuple[str, str, float]]) -> str:
    """Pieces of pages below each other, each under a line of text, as wide as this share of the whole."""
    parts, at = [], 0
    for said, svg, share in pieces:
        height, contents = _inside(svg)
        parts.append(f'<text x="10" y="{at + 18}">{said}</text>')
        scaled = "" if share == 1 else f" scale({share:.4f} 1)"
        parts.append(f'<g transform="translate(0 {at + 26}){scaled}">{contents}</g>')
        at += height + 36
    return standalone(at, parts)


def roofline(text: str, plan: str, against: tuple[str, ...]) -> str:
    """Where plans stand below the roofs."""
    problem = Problem.parse(text)
    svg = _roofline(problem, GPU, explain(problem, GPU, plan=plan, against=against), predict(problem, GPU, plan))
    return _stacked([(f"{text} on an H200, by the model", svg, 1.0)])


def timelines(text: str, plans: tuple[str, ...]) -> str:
    """Blocks on the multiprocessors over time, all on one scale."""
    predictions = {plan: predict(Problem.parse(text), GPU, plan) for plan in plans}
    longest = max(found.seconds for found in predictions.values())
    pieces = []
    for plan, found in predictions.items():
        main = max(found.launches, key=lambda launch: launch.turns)
        said = f"{plan.partition('[')[0]}: {main.blocks:,} blocks, {found.seconds * 1e6:,.0f} us, held back by {found.verdict}"
        pieces.append((said, _timeline(GPU, found), found.seconds / longest))
    return _stacked(pieces)


def backwards(text: str, plans: tuple[str, ...]) -> str:
    """Time of a backward by plan, and how many products of a score's size its kernels compute."""
    problem, rows = Problem.parse(text), []
    for plan in plans:
        found = predict(problem, GPU, Plan.parse(plan), direction="backward")
        products = sum(launch.turns * launch.turn.tensor_flops for launch in found.launches) / flops_of(problem, "backward") * 5
        rows.append((plan.partition("[")[0], found.seconds, f"{found.seconds * 1e3:.2f} ms, {products:.0f} products"))
    return _bars(rows)


def walks(orders: tuple[str, ...]) -> str:
    """The order of steps over the tiles of one head, and what crosses the memory bus."""
    everything = [(i, j) for i in range(TILES) for j in range(TILES)]
    parts = []
    for number, order in enumerate(orders):
        left = 20 + number * (WIDTH // len(orders))
        steps = walk(order, TILES, TILES, everything)
        for at, (i, j, *_) in enumerate(steps):
            shade = 235 - round(150 * at / len(steps))
            x, y = left + 34 + j * CELL, 60 + i * CELL
            place = f'x="{x}" y="{y}" width="{CELL - 3}" height="{CELL - 3}"'
            parts.append(f'<rect {place} fill="rgb({shade - 60},{shade - 25},235)"/>')
            place = f'x="{x + CELL / 2 - 2:.0f}" y="{y + CELL / 2 + 3:.0f}" text-anchor="middle"'
            white = ' style="fill:#fff"' if at > len(steps) / 3 else ""
            parts.append(f"<text {place}{white}>{at + 1}</text>")
        parts += [f'<text x="{left + 44 + j * CELL}" y="52">K{j} V{j}</text>' for j in range(TILES)]
        parts += [f'<text x="{left}" y="{64 + i * CELL + CELL // 2}">Q{i}</text>' for i in range(TILES)]
        *_, read, written = steps[-1]
        parts.append(f'<text x="{left}" y="24">{order}: {read} tiles read, {written} written</text>')
    return standalone(80 + TILES * CELL, parts)


def shared(text: str, tile: str) -> str:
    """Bytes through shared memory in a turn of a block, and barriers, by how its warps share the tile."""
    problem = Problem.parse(text)
    turns = {
        share: launches(problem, GPU, Rates.of(GPU), Plan.parse(f"warp_split[{tile} {share}]"))[0].turn for share in SHARES
    }
    return _bars(
        [
            (share, turn.shared_bytes, f"{turn.shared_bytes / 1024:.0f} KB, {turn.barriers} barriers")
            for share, turn in turns.items()
        ]
    )


def chips(names: tuple[str, ...]) -> str:
    """Operations of a 16-bit product that a multiprocessor does for each exponential."""
    found = {name: Rates.of(Device.named(name)).tensor_flops / EXPONENTIALS for name in names}
    return _bars([(name, ratio, f"{ratio:.0f} for each exponential") for name, ratio in found.items()])


def kept(text: str) -> str:
    """What a backward needs besides inputs, output and its gradient: weights of all pairs, or one number a row."""
    problem = Problem.parse(text)
    rows = problem.batch * problem.heads_q * problem.len_q
    sizes = {"weights": 2.0 * rows * problem.len_k, "the LSE": 4.0 * rows}
    return _bars([(name, size, f"{size / 2**20:,.4g} MiB") for name, size in sizes.items()])


def running(scores: Sequence[float]) -> str:
    """Scores of one row as its keys pass by, the running maximum m, and where the sum l has to be scaled."""
    parts, m, l, step = [], -inf, 0.0, 700 / len(scores)
    for at, s in enumerate(scores):
        x, y = 30 + at * step, 190 - 28 * s
        grown, m_new = s > m, max(m, s)
        l = l * exp(m - m_new) + exp(s - m_new)
        if grown and m > -inf:
            parts.append(f'<text x="{x:.0f}" y="{176 - 28 * s:.0f}">l times {exp(m - m_new):.2f}</text>')
        parts.append(f'<rect class="block" x="{x:.0f}" y="{y:.0f}" width="{step - 4:.0f}" height="{28 * s:.0f}"/>')
        parts.append(
            f'<line class="hbm" x1="{x:.0f}" y1="{190 - 28 * m_new:.0f}" x2="{x + step:.0f}" y2="{190 - 28 * m_new:.0f}"/>'
        )
        m = m_new
    parts.append(f'<text x="30" y="216">scores in the order of their keys; line: m, at the end {m:g}, with l = {l:.2f}</text>')
    return standalone(230, parts)


def _bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """`(name, how long, what is said)` of each bar."""
    parts, most = [], max(size for _, size, _ in rows)
    for number, (name, size, said) in enumerate(rows):
        y, width = 20 + 40 * number, round(430 * size / most)
        parts.append(f'<text x="20" y="{y + 17}">{name}</text>')
        parts.append(f'<rect class="block" x="100" y="{y}" width="{width}" height="26"/>')
        parts.append(f'<text x="{108 + width}" y="{y + 17}">{said}</text>')
    return standalone(40 * len(rows) + 20, parts)


# Plans are spelled out, so that another table of tiles asks for no other picture.
PREFILL, HOPPER = "b4 h16 q4096 k4096 d128 bf16", "hopper[128x128 s2 q2 pingpong steady dynamic g8]"
DECODE = "b1 h32/8 q1 k32768 d128 bf16"
SHORT, OUTER = "b1 h16 q2048 k2048 d128 bf16 causal", "q_outer[128x64 w8 s3 tma]"
BACKWARD = "b4 h16 q4096 k4096 d128 bf16"
BACKWARDS = "q_outer[128x64 w8 s3 tma, 64x64 w4 s2 tma]", "hopper[64x128 s2 backward g16]"
SCORES = (1.2, 0.4, 2.1, 1.7, 0.9, 3.0, 2.2, 0.3, 1.1, 2.6, 4.4, 1.9, 0.8, 3.1, 2.0, 1.4)
PICTURES: dict[str, Callable[[], str]] = {
    "online-softmax": lambda: running(SCORES),
    "recomputation": lambda: kept("b1 h16 q16384 k16384 d128 bf16"),
    "tiling-and-hbm": lambda: roofline(PREFILL, HOPPER, ("dense[128x64 w8 s2]", "kv_outer[64x128 w4 s2]")),
    "fa1-against-fa2": lambda: walks(("kv_outer", "q_outer")),
    "split-kv-against-split-q": lambda: shared("b4 h16 q4096 k4096 d64 bf16", "64x64 w4 s2"),
    "prefill-against-decode": lambda: timelines(DECODE, ("q_outer[64x64 w4 s3]", "split_kv[16x64 w4 s3 x32]")),
    "hopper-forward": lambda: timelines(SHORT, (OUTER, HOPPER)),
    "hopper-backward": lambda: backwards(BACKWARD, BACKWARDS),
    "off-tensor-core": lambda: chips(("V100", "A100", "H200", "B200")),
}


def main(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, made in PICTURES.items():
        (Path(folder) / f"{name}.svg").write_text(made(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
