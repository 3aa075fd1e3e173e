"""How time and peak memory grow with the number of tokens: 1k to 64k, every generation, forward and backward.

    python benchmarks/growth.py                                # on a GPU, about a minute: measures, checks, reports slopes
    python benchmarks/growth.py --report FILE --png growth.png # anywhere: slopes of a results file, and its picture

Peak memory is what a call needs beyond its inputs: output, saved numbers, gradients and workspaces, by torch's caching
allocator. It is a power of the number of tokens; the exponent is the slope of a line through both logarithms. Asked for are 1
for everything but `dense`, and 2 there. `dense` has no backward of its own here: torch's math path, which keeps its weights,
stands in. Results are checked (`check.py`) up to CHECKED tokens, so that the check does not take longer than what it checks.
"""

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import record
from calls import compile_ahead, device_of, make_call, make_operands
from check import Check, poisoned
from rowmax import Device, Unsupported, plan
from rowmax.analysis import workers
from rowmax.plan import Direction
from rowmax.problem import Problem
from shapes import BOTH, FORWARD

HEADS, DIM = 4, 64
TOKENS = tuple(2**i for i in range(10, 17))
CHECKED = 16384
DENSE, MATH = "dense", "torch math"
WHO = {FORWARD: (DENSE, "kv_outer", "q_outer", "hopper"), BOTH: (MATH, "q_outer", "hopper")}
QUADRATIC = (DENSE, MATH)
WANTED = {True: (2.0, 0.05), False: (1.0, 0.03)}  # quadratic or not -> slope of peak memory, and how far off it may be
MOST_BYTES = 110e9  # of scores: more are not tried
COPIES = {DENSE: 6, MATH: 10}  # bytes of a score that are there at once, about
REPEATS_S = 0.25  # of one call
LONGEST_S = 2.5  # a call that took this long at half the tokens is not tried


def problem_of(tokens: int) -> Problem:
    return Problem.parse(f"b1 h{HEADS} q{tokens} k{tokens} d{DIM} bf16")


def slope(points: list[tuple[float, float]]) -> float:
    """Of the line of least squares through the logarithms of `(x, y)`.

    >>> round(slope([(1, 3), (2, 12), (4, 48)]), 6)
    2.0
    """
    return statistics.linear_regression(*([math.log(z) for z in side] for side in zip(*points, strict=True))).slope


def measured(call: Callable, device: torch.device) -> tuple[float, int]:
    """`(median ms, peak bytes beyond what was there before)` of a call that has run before."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    first = _ms(call)
    peak = torch.cuda.max_memory_allocated(device) - before
    repeats = max(min(int(REPEATS_S * 1e3 / max(first, 1e-3)), 50), 1)
    return statistics.median([_ms(call) for _ in range(repeats)]) if repeats > 1 else first, peak


def _ms(call: Callable) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    result = call()
    end.record()
    end.synchronize()
    del result
    return start.elapsed_time(end)


def _math_call(operands, grad_out, which: str) -> Callable:
    """Scores and weights in memory, forward and backward, by torch."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    leaves = [t.detach().transpose(1, 2).requires_grad_() for t in operands[:3]]

    def call():
        with sdpa_kernel(SDPBackend.MATH):
            out = torch.nn.functional.scaled_dot_product_attention(*leaves)
        grads = torch.autograd.grad(out, leaves, grad_out.transpose(1, 2))
        return tuple(grad.transpose(1, 2) for grad in grads)

    return call


def one(who: str, which: str, tokens: int, device: torch.device) -> dict:
    """A row, or one with `why` instead of numbers."""
    problem = problem_of(tokens)
    row = {"problem": str(problem), "tokens": tokens, "pass": which, "who": who}
    if who in QUADRATIC and HEADS * tokens**2 * COPIES[who] > MOST_BYTES:
        return {**row, "why": "does not fit"}
    operands, grad_out = make_operands(problem, device, seed=0)
    try:
        if who == MATH:
            call = _math_call(operands, grad_out, which)
        else:
            row["plan"] = _plans(problem, Device.of(device), who, which)
            call = make_call("rowmax", problem, operands, grad_out, which, plan=who)
        if tokens <= CHECKED:
            check = Check(problem, operands, None if which == FORWARD else grad_out)
            with poisoned(problem, device):
                results = call()
            if wrong := check.broken(results, peer=who == MATH):
                return {**row, "why": f"WRONG: {'; '.join(wrong)}"}
            del results, check
        else:
            call()
        row["ms"], row["peak_bytes"] = measured(call, device)
    except (Unsupported, torch.cuda.OutOfMemoryError) as error:
        return {**row, "why": str(error).split("\n")[0]}
    row["ms"] = record.figures(row["ms"])
    return {**row, "checked": tokens <= CHECKED}


def builds(here: Device, device: str) -> list[dict]:
    """Calls to compile ahead: the shortest of each plan, which changes with the number of tokens."""
    found: dict = {}
    for tokens in TOKENS:
        for which, names in WHO.items():
            for who in names:
                if who != MATH and (plans := _plans(problem_of(tokens), here, who, which)):
                    job = {"problem": str(problem_of(tokens)), "who": "rowmax", "which": which, "plan": who, "device": device}
                    found.setdefault((who, which, plans), job)
    return list(found.values())


def _plans(problem: Problem, here: Device, who: str, which: str) -> str:
    """Spelled as a row has it; "" where the problem is refused."""
    directions: tuple[Direction, ...] = ("forward",) if which == FORWARD else ("forward", "backward")
    try:
        return " + ".join(str(plan(problem, here, direction=direction, prefer=who)) for direction in directions)
    except Unsupported:
        return ""


def slopes(rows: list[dict]) -> list[dict]:
    """Of memory over all tokens, and of time over the last four lengths, where starting a kernel counts no more."""
    found = []
    for which, names in WHO.items():
        for who in names:
            mine = [row for row in rows if row["pass"] == which and row["who"] == who and "ms" in row]
            if len(mine) < 3:
                continue
            memory = slope([(row["tokens"], row["peak_bytes"]) for row in mine])
            wanted, off = WANTED[who in QUADRATIC]
            late = [(row["tokens"], row["ms"]) for row in mine[-4:]]
            found.append(
                {
                    **{"pass": which, "who": who, "lengths": len(mine), "memory": round(memory, 4)},
                    **{"wanted": wanted, "within": off, "holds": abs(memory - wanted) <= off, "time": round(slope(late), 3)},
                }
            )
    return found


def report(rows: list[dict]) -> bool:
    """Print rows and slopes; whether every slope of memory is as it should be."""
    for row in rows:
        said = row.get("why") or f"{row['ms']:>10.4f} ms {row['peak_bytes'] / 2**20:>10.2f} MiB"
        print(f"{row['tokens']:>6} {row['pass']:<17} {row['who']:<11} {said}")
    found = slopes(rows)
    for one in found:
        verdict = "as it should be" if one["holds"] else f"WRONG, wanted {one['wanted']} +- {one['within']}"
        name = f"{one['who']} {one['pass']} over {one['lengths']} lengths"
        print(f"{name:<46} memory ~ N^{one['memory']:.3f}, {verdict}; time ~ N^{one['time']:.2f}")
    return bool(found) and all(one["holds"] for one in found)


def picture(rows: list[dict], title: str, path: Path) -> None:
    """Two panels over tokens, both axes logarithmic: peak memory and time. Dashed: forward and backward.

    Raises:
        ImportError: matplotlib is not here (`pip install 'rowmax[plot]'`).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    colors = dict(zip((*WHO[FORWARD], MATH), ("#b5524a", "#c98a2b", "#4a7ab5", "#5a9a5a", "#b5524a"), strict=True))
    for which, names in WHO.items():
        for who in names:
            mine = [row for row in rows if row["pass"] == which and row["who"] == who and "ms" in row]
            style = {"color": colors[who], "linestyle": "-" if which == FORWARD else "--", "marker": "o", "markersize": 3}
            label = f"{who}, {which}"
            axes[0].plot([row["tokens"] for row in mine], [row["peak_bytes"] / 2**20 for row in mine], label=label, **style)
            axes[1].plot([row["tokens"] for row in mine], [row["ms"] for row in mine], label=label, **style)
    for axis, what in zip(axes, ("peak memory beyond the inputs, MiB", "ms"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=what)
        axis.set_xticks(TOKENS, [f"{tokens // 1024}k" for tokens in TOKENS], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def main(arguments: "list[str] | None" = None) -> int:
    options = _parser().parse_args(arguments)
    if options.report:
        document = json.loads(options.report.read_text())
        good = report(document["rows"])
        if options.png:
            picture(document["rows"], _title(document), options.png)
        return 0 if good else 1
    device = device_of()
    if device.type != "cuda":
        print("no CUDA GPU here; --report FILE reads what was measured", file=sys.stderr)
        return 1
    started = time.monotonic()
    document = {"what": "benchmarks/growth.py", **record.machine(device), "rows": []}
    out = options.out or record.RESULTS / "growth" / record.default_path(document).name
    wanted = builds(Device.of(device), str(device))
    workers.run_all(compile_ahead, wanted, workers=min(len(wanted), 16), job_seconds=60, total_seconds=0.6 * options.time_limit)
    print(f"compiled ahead in {time.monotonic() - started:.0f} s", file=sys.stderr)
    rows, gone = document["rows"], set()
    for tokens in TOKENS:
        for which, names in WHO.items():
            for who in names:
                if time.monotonic() - started > options.time_limit:
                    rows.append({"tokens": tokens, "pass": which, "who": who, "why": "time limit"})
                    continue
                last = next((row for row in reversed(rows) if (row["who"], row["pass"]) == (who, which)), {})
                if (who, which) in gone or last.get("ms", 0.0) > LONGEST_S * 1e3:
                    continue
                rows.append(one(who, which, tokens, device))
                gc.collect()
                torch.cuda.empty_cache()
                if "why" in rows[-1]:
                    gone.add((who, which))
    document["slopes"] = slopes(rows)
    document["seconds"] = round(time.monotonic() - started, 1)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")
    good = report(rows)
    if options.png:
        picture(rows, _title(document), options.png)
    print(f"{len(rows)} rows in {out}, {document['seconds']:.0f} s")
    return 0 if good and not any("WRONG" in row.get("why", "") for row in rows) else 1


def _title(document: dict) -> str:
    return f"{HEADS} heads of {DIM}, bf16, no mask, on {document['gpu']}, {document['date'][:10]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="S", help="start nothing after this long")
    parser.add_argument("--out", type=Path, help="default: results/growth/<device>-<date>.json")
    parser.add_argument("--report", type=Path, metavar="FILE", help="measure nothing; read this file")
    parser.add_argument("--png", type=Path, help="draw it; needs rowmax[plot]")
    return parser


if __name__ == "__main__":
    sys.exit(main())
