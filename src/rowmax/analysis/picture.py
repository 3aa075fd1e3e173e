"""What `rowmax explain --png` draws, with matplotlib: roofline, what the call waits for, and blocks on the multiprocessors.

The same numbers as on the page (`page.py`), as a picture for a report. Called by `cli/explain.py`.
"""

from math import log10
from pathlib import Path
from typing import Any

from rowmax.analysis.page import MOST_SLOTS, placed_blocks, roofs, spots_of
from rowmax.analysis.predict import Prediction, predict
from rowmax.analysis.verdict import VERDICTS
from rowmax.device import Device
from rowmax.problem import Problem

INK, HBM, TENSOR, EXP = "#222222", "#b5524a", "#4a7ab5", "#5a9a5a"


def draw(problem: Problem, device: Device, facts: dict[str, Any], path: Path) -> None:
    """Write a picture of `facts`, those of `report.explain`. The suffix of `path` decides the format: .png, .svg, .pdf.

    Raises:
        ImportError: matplotlib is not here.
        KeyError: there is no model of the device.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    prediction = predict(problem, device, facts["plan"])
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    axes = figure.subplot_mosaic([["roofline", "gaps"], ["blocks", "blocks"]], width_ratios=[3, 2])
    _roofline(axes["roofline"], problem, device, facts, prediction)
    _gaps(axes["gaps"], facts)
    _blocks(axes["blocks"], device, prediction)
    figure.suptitle(f"{problem} on {device.name}: {facts['plan']}", fontsize=11)
    figure.savefig(path, dpi=110)


def _roofline(axis, problem: Problem, device: Device, facts: dict[str, Any], prediction: Prediction) -> None:
    tensor, exps, memory = roofs(problem, device)
    spots = spots_of(problem, facts, prediction)
    right = max([10_000.0, 10 * tensor / memory] + [3 * x for _, x, _ in spots])
    axis.axhline(tensor / 1e12, color=TENSOR, label=f"tensor cores, {tensor / 1e12:,.0f} TFLOP/s")
    axis.axhline(exps / 1e12, color=EXP, label=f"exponentials, {exps / 1e12:,.0f} TFLOP/s")
    axis.plot([0.1, tensor / memory], [0.1 * memory / 1e12, tensor / 1e12], color=HBM, label=f"HBM, {memory / 1e12:.2f} TB/s")
    for name, x, y in spots:
        axis.plot([x], [y / 1e12], "o", color=INK)
        axis.annotate(name.split("[")[0], (x, y / 1e12), textcoords="offset points", xytext=(6, -12), fontsize=8)
    bottom = min([y / 1e12 / 3 for *_, y in spots] + [tensor / 1e15])
    axis.set(xscale="log", yscale="log", xlim=(0.1, right), ylim=(bottom, 10 ** (log10(max(tensor, exps) / 1e12) + 0.4)))
    axis.set(title="roofline", xlabel="FLOPs a byte from HBM", ylabel="TFLOP/s")
    axis.legend(fontsize=8, loc="lower right")


def _gaps(axis, facts: dict[str, Any]) -> None:
    names = sorted(VERDICTS, key=lambda verdict: facts["gaps"][verdict])
    axis.barh(names, [facts["gaps"][name] / facts["predicted_ms"] * 100 for name in names], color=TENSOR)
    measured = "" if facts["measured_ms"] is None else f", measured {facts['measured_ms']:.3g} ms"
    axis.set(title=f"predicted {facts['predicted_ms']:.3g} ms{measured}", xlabel="% shorter without the cost of")


def _blocks(axis, device: Device, prediction: Prediction) -> None:
    placed, left = placed_blocks(prediction)
    main = max(prediction.launches, key=lambda launch: launch.turns)
    end = max((last for *_, last in placed), default=0.0)
    if not end:
        axis.set(title="there is nothing to compute")
        return
    shown = min(prediction.slots, MOST_SLOTS)
    drawn = [(slot, begin * 1e3, (last - begin) * 1e3) for slot, begin, last in placed if slot < shown]
    slots, begins, widths = zip(*drawn, strict=True)
    axis.barh(slots, widths, left=begins, height=0.9, color=TENSOR, edgecolor="white", linewidth=0.2)
    busy = sum(last - begin for _, begin, last in placed) / (prediction.slots * end)
    more = "" if left else f", of which the first {len(placed):,} are drawn"
    title = f"{main.name}: {main.blocks:,} tasks{more}, {prediction.slots // device.sms} at once on each of {device.sms} SMs"
    axis.set(title=f"{title}; {busy:.0%} filled", xlabel="ms", ylabel="slot", ylim=(shown, -1), xlim=(0, end * 1e3))
