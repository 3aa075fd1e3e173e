"""The page that `rowmax explain --html` writes: one file that needs nothing else, no network and no library.

Three pictures: a roofline with the roofs of HBM, tensor cores and exponentials; the walk of a loop order over tiles, step by
step, with what crosses the memory bus; and the blocks on the multiprocessors over time. Everything is drawn here as SVG; the
script at the end only marks steps. Called by `cli/explain.py`.
"""

import json
from html import escape
from itertools import count
from math import log10
from typing import Any

from rowmax.analysis.cost import flops_of
from rowmax.analysis.occupancy import schedule
from rowmax.analysis.predict import Prediction, predict
from rowmax.analysis.verdict import VERDICTS
from rowmax.device import EXPONENTIALS, Device, Rates
from rowmax.plan.tile import early, key_ranges
from rowmax.problem import Problem

WIDTH, HEIGHT = 760, 380
MOST_TILES = 8  # a side of the walk; larger problems are walked in miniature
MOST_BLOCKS, MOST_SLOTS = 4000, 264  # drawn; of more, those that begin first
ORDERS = {
    "q_outer": "Q outside (FlashAttention-2 and later)",
    "kv_outer": "K/V outside (FlashAttention-1)",
    "dense": "scores in memory",
}


def page(problem: Problem, device: Device, facts: dict[str, Any]) -> str:
    """The whole page as text. `facts` are those of `report.explain`.

    Raises:
        KeyError: there is no model of the device.
    """
    prediction = predict(problem, device, facts["plan"])
    title = escape(f"{problem} on {device.name}")
    parts = [
        f"<h1>{title}</h1>",
        _summary(facts),
        "<h2>Roofline</h2>",
        _roofline(problem, device, facts, prediction),
        "<h2>The walk over tiles</h2>",
        _walks(problem, prediction),
        "<h2>Blocks on the multiprocessors</h2>",
        _timeline(device, prediction),
        _advice(facts),
    ]
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}\n<script>{SCRIPT}</script></body></html>\n'


def _summary(facts: dict[str, Any]) -> str:
    rows = []
    for name in sorted(VERDICTS, key=lambda verdict: -facts["gaps"][verdict]):
        share = facts["gaps"][name] / facts["predicted_ms"]
        bar = f'<span class="bar" style="width:{share * 300:.0f}px"></span>'
        rows.append(f"<tr><td>{name}</td><td>{_ms(facts['gaps'][name])}</td><td>{bar} {share:.0%}</td></tr>")
    measured = "" if facts["measured_ms"] is None else f" Measured: {_ms(facts['measured_ms'])}."
    predicted = f"predicted {_ms(facts['predicted_ms'])}, held back by <b>{facts['verdict']}</b>"
    said = f"<b>{escape(facts['plan'])}</b>: {predicted}.{measured}"
    head = "<tr><th>without the cost of</th><th>shorter by</th><th>of the time</th></tr>"
    return f"<p>{said}</p><table>{head}{''.join(rows)}</table>"


def _advice(facts: dict[str, Any]) -> str:
    items = []
    for one in facts["advice"]:
        head, speed = "In the plan" if one["taken"] else "Try", f"{one['gain']:.1f}x, {_ms(one['predicted_ms'])}"
        items.append(f"<li>{head}: {escape(one['what'])}: {speed}</li>")
    items += [
        f"<li>With {escape(one['what'])}: {_ms(one['predicted_ms'])}, {one['times']:.2f} times as long</li>"
        for one in facts["what_if"]
    ]
    return f"<h2>What would help</h2><ul>{''.join(items)}</ul>" if items else ""


def _ms(ms: float) -> str:
    return f"{ms:.3g} ms" if ms >= 1 else f"{ms * 1e3:.3g} us"


# ---- roofline ----------------------------------------------------------------------------------------------------------


def roofs(problem: Problem, device: Device) -> tuple[float, float, float]:
    """FLOP/s of the tensor cores, FLOP/s with which the exponentials keep up, and bytes a second of HBM."""
    rates = Rates.of(device)
    cycles = device.sms * rates.clock_hz
    exps = EXPONENTIALS * cycles * 2 * (problem.dim_qk + problem.dim_v)
    return rates.tensor_flops * cycles, exps, rates.hbm_bytes_per_s * rates.hbm_share


def spots_of(problem: Problem, facts: dict[str, Any], prediction: Prediction) -> list[tuple[str, float, float]]:
    """`(plan, FLOPs a byte from HBM, FLOP/s)` of the plan and of those it was compared with."""
    flops = flops_of(problem, "forward")
    points = [(str(prediction.plan), sum(launch.hbm_bytes for launch in prediction.launches), prediction.seconds)]
    for name, other in facts["against"].items():
        if "refused" not in other:
            moved = sum(launch["hbm_bytes"] for launch in other["launches"])
            points.append((name, moved, other["predicted_ms"] / 1e3))
    return [(name, flops / max(moved, 1.0), flops / seconds) for name, moved, seconds in points if flops and seconds]


def _roofline(problem: Problem, device: Device, facts: dict[str, Any], prediction: Prediction) -> str:
    """FLOP/s over FLOPs a byte from HBM, both on logarithmic scales. Sloped: memory. Level: tensor cores, and the exponentials
    that come with that many operations."""
    tensor, exps, memory = roofs(problem, device)
    spots = spots_of(problem, facts, prediction)
    left, right = -1.0, max(4.0, *(log10(x) + 0.5 for _, x, _ in spots), log10(tensor / memory) + 1)
    top = log10(max(tensor, exps)) + 0.3
    bottom = min([log10(y) - 0.5 for *_, y in spots] + [top - 3])

    def at(x: float, y: float) -> tuple[float, float]:
        across = 60 + (log10(x) - left) / (right - left) * (WIDTH - 80)
        return across, 20 + (top - log10(y)) / (top - bottom) * (HEIGHT - 60)

    lines = []
    for label, roof, kind in (("tensor cores", tensor, "tensor"), ("exponentials", exps, "exp")):
        (x0, y0), (x1, _) = at(10**left, roof), at(10**right, roof)
        lines.append(f'<line class="{kind}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y0:.1f}"/>')
        x, anchor = (x0 + 6, "start") if kind == "tensor" else (x1 - 6, "end")  # at d64 both roofs are one
        said = f"{label}: {roof / 1e12:,.0f} TFLOP/s"
        lines.append(f'<text x="{x:.1f}" y="{y0 - 5:.1f}" text-anchor="{anchor}">{said}</text>')
    lowest = max(10**left, 10**bottom / memory)
    (x0, y0), (x1, y1) = at(lowest, lowest * memory), at(10**top / memory, 10**top)
    lines.append(f'<line class="hbm" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>')
    lines.append(f'<text x="{x0 + 12:.1f}" y="{y0 - 4:.1f}">HBM: {memory / 1e12:.2f} TB/s</text>')
    for number, (name, x, y) in enumerate(sorted(spots, key=lambda spot: spot[2])):
        px, py = at(x, y)
        py_text = py + 16 if number % 2 == 0 else py - 8  # neighbours do not write over each other
        lines.append(f'<circle class="spot" cx="{px:.1f}" cy="{py:.1f}" r="5"><title>{escape(name)}</title></circle>')
        anchor = "end" if px > WIDTH - 250 else "start"
        said = f"{escape(name.split('[')[0])}: {y / 1e12:,.3g} TFLOP/s, {x:,.3g} a byte"
        lines.append(
            f'<text x="{px + (8 if anchor == "start" else -8):.1f}" y="{py_text:.1f}" text-anchor="{anchor}">{said}</text>'
        )
    lines.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">FLOPs a byte from HBM</text>')
    return _svg("roofline", HEIGHT, lines)


# ---- the walk ----------------------------------------------------------------------------------------------------------


def miniature(problem: Problem, block_m: int, block_n: int) -> tuple[int, int, list[tuple[int, int]]]:
    """`(row tiles, key tiles, those with something to see)` of the problem, or of one in proportion with fewer tiles."""
    sequences = max(problem.batch, 1) if problem.packed else 1
    len_q, len_k = problem.len_q // sequences, problem.len_k // sequences
    scale = max(-(-len_q // (block_m * MOST_TILES)), -(-len_k // (block_n * MOST_TILES)), 1)
    rows, columns = block_m * scale, block_n * scale
    seen = []
    for i, row in enumerate(range(0, len_q, rows)):
        start, _, _, end = key_ranges(row, rows, len_q, len_k, columns, problem.band)
        seen += [(i, j) for j in range(-(-early(start, problem.band) // columns))]
        seen += [(i, j) for j in range(start // columns, -(-end // columns))]
    return -(-len_q // rows), -(-len_k // columns), seen


def walk(order: str, row_tiles: int, key_tiles: int, seen: list[tuple[int, int]]) -> list[tuple[int, int, str, int, int]]:
    """`(row tile, key tile, what crosses the bus, tiles read, tiles written)` of every step; sums run from the begin. A tile is
    one of Q, K, V, O or of scores."""
    visible, found, read, written = set(seen), [], 0, 0

    def add(i: int, j: int, said: list[str], more_read: int, more_written: int) -> None:
        nonlocal read, written
        read, written = read + more_read, written + more_written
        found.append((i, j, "; ".join(said), read, written))

    if order == "q_outer":
        for i in range(row_tiles):
            turns = [j for j in range(key_tiles) if (i, j) in visible]
            for j in turns:
                said, first, last = [f"read K{j} and V{j}"], j == turns[0], j == turns[-1]
                if first:
                    said.insert(0, f"read Q{i}")
                if last:
                    said.append(f"write O{i}")
                add(i, j, said, 2 + first, int(last))
    elif order == "kv_outer":
        for j in range(key_tiles):
            turns = [i for i in range(row_tiles) if (i, j) in visible]
            for i in turns:
                said = [f"read Q{i}, O{i} with its m and l", f"write O{i}, m and l back"]
                if i == turns[0]:
                    said.insert(0, f"read K{j} and V{j}, which stay")
                add(i, j, said, 2 + 2 * (i == turns[0]), 1)
    else:
        everything = [(i, j) for i in range(row_tiles) for j in range(key_tiles)]
        for i, j in everything:
            add(i, j, [f"read Q{i} and K{j}", f"write scores {i},{j}"], 2, 1)
        for i, j in everything:
            add(i, j, [f"read scores {i},{j} for the softmax", f"write weights {i},{j}"], 1, 1)
        for i, j in everything:
            last = j == key_tiles - 1
            add(i, j, [f"read weights {i},{j} and V{j}", *[f"write O{i}"] * last], 2, int(last))
    return found


def _walks(problem: Problem, prediction: Prediction) -> str:
    tile = prediction.plan.tiles[0]
    row_tiles, key_tiles, seen = miniature(problem, tile.block_m, tile.block_n)
    if not row_tiles or not key_tiles:
        return "<p>There is nothing to walk over.</p>"
    size = min(36, 560 // key_tiles)
    steps = {order: walk(order, row_tiles, key_tiles, seen) for order in ORDERS}
    numbers = count()
    cells = []
    for i in range(row_tiles):
        for j in range(key_tiles):
            hidden = "" if (i, j) in set(seen) else " hidden"
            place = f'x="{60 + j * size}" y="{30 + i * size}" width="{size - 2}" height="{size - 2}"'
            cells.append(f'<rect class="cell{hidden}" id="cell{next(numbers)}" {place}/>')
    cells += [f'<text x="{64 + j * size}" y="22">K{j}</text>' for j in range(key_tiles)]
    cells += [f'<text x="24" y="{34 + i * size + size / 2:.0f}">Q{i}</text>' for i in range(row_tiles)]
    buttons = "".join(f'<button type="button" data-order="{order}">{label}</button>' for order, label in ORDERS.items())
    controls = (
        '<button type="button" id="back">back</button><button type="button" id="next">next</button>'
        '<input type="range" id="step" min="0" value="0" aria-label="step">'
    )
    said = "One head, in tiles as wide as needed for a small picture; a step is one tile of scores, as one block walks them."
    data = json.dumps({"columns": key_tiles, "steps": steps}).replace("</", "<\\/")
    return (
        f'<p>{said}</p><p class="orders">{buttons}</p>{_svg("walk", 40 + row_tiles * size, cells)}'
        f'<p>{controls} <output id="said"></output></p><script type="application/json" id="walks">{data}</script>'
    )


# ---- blocks over time --------------------------------------------------------------------------------------------------


def placed_blocks(prediction: Prediction) -> tuple[list[tuple[int, float, float]], int]:
    """`(slot, begin, end)` of the blocks that are drawn, and how many more there would be room for."""
    tasks, left = [], MOST_BLOCKS
    for number, seconds in prediction.tasks:
        tasks.append((min(number, left), seconds))
        left -= tasks[-1][0]
        if not left:
            break
    main = max(prediction.launches, key=lambda launch: launch.turns)
    return schedule(tasks, prediction.slots, in_turn=main.in_turn), left


def _timeline(device: Device, prediction: Prediction) -> str:
    slots = prediction.slots
    main = max(prediction.launches, key=lambda launch: launch.turns)
    placed, left = placed_blocks(prediction)
    end = max((last for *_, last in placed), default=0.0)
    if not end:
        return "<p>There is nothing to compute.</p>"
    shown = min(slots, MOST_SLOTS)
    height = max(2.0, 360 / shown)
    lines = []
    for slot, begin, last in placed:
        if slot < shown:
            x, width = 10 + begin / end * (WIDTH - 20), (last - begin) / end * (WIDTH - 20)
            place = f'x="{x:.1f}" y="{slot * height:.1f}" width="{max(width - 0.4, 0.3):.2f}" height="{height:.2f}"'
            lines.append(f'<rect class="block" {place}/>')
    busy = sum(last - begin for _, begin, last in placed) / (slots * end)
    more = "" if left else f" The first {MOST_BLOCKS:,} of {main.blocks:,} are drawn."
    each = f"{main.name}: {main.blocks:,} tasks over {device.sms} multiprocessors, up to {slots // device.sms} at once on each;"
    said = f"{each} a line is one of {shown} slots, the width is {_ms(end * 1e3)}, {busy:.0%} of it filled.{more}"
    return f"<p>{said}</p>{_svg('timeline', round(shown * height) + 4, lines)}"


def _svg(name: str, height: int, lines: list[str]) -> str:
    return (
        f'<svg id="{name}" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">{"".join(lines)}</svg>'
    )


STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:800px;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.3rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse}td,th{padding:.1rem 1rem .1rem 0;text-align:left}
svg{max-width:100%;height:auto;background:#f7f7f8}text{font:12px system-ui,sans-serif;fill:#333}
.bar{display:inline-block;height:.8em;background:#4a7ab5}.hbm{stroke:#b5524a;stroke-width:2}.tensor{stroke:#4a7ab5;stroke-width:2}
.exp{stroke:#5a9a5a;stroke-width:2}.spot{fill:#222}.block{fill:#4a7ab5}.cell{fill:#d8dde6}.cell.hidden{fill:#eee}
.cell.done{fill:#8fb0d8}.cell.now{fill:#e08a3c}button{margin-right:.5rem}button.on{font-weight:bold}
"""
SCRIPT = """
"use strict";
const walks = document.getElementById("walks");
if (walks) {
  const data = JSON.parse(walks.textContent), slider = document.getElementById("step"), said = document.getElementById("said");
  let order = "q_outer";
  const show = () => {
    const steps = data.steps[order], at = Math.min(Number(slider.value), steps.length - 1);
    slider.max = Math.max(steps.length - 1, 0);
    document.querySelectorAll(".cell").forEach(cell => cell.classList.remove("done", "now"));
    steps.slice(0, at + 1).forEach(([i, j], n) =>
      document.getElementById("cell" + (i * data.columns + j)).classList.add(n === at ? "now" : "done"));
    document.querySelectorAll("[data-order]").forEach(one => one.classList.toggle("on", one.dataset.order === order));
    said.textContent = steps.length
      ? `step ${at + 1} of ${steps.length}: ${steps[at][2]}. So far ${steps[at][3]} tiles read, ${steps[at][4]} written.`
      : "nothing to see";
  };
  document.querySelectorAll("[data-order]").forEach(one =>
    one.addEventListener("click", () => { order = one.dataset.order; slider.value = 0; show(); }));
  slider.addEventListener("input", show);
  const move = by => { slider.value = Number(slider.value) + by; show(); };
  document.getElementById("next").addEventListener("click", () => move(1));
  document.getElementById("back").addEventListener("click", () => move(-1));
  show();
}
"""
