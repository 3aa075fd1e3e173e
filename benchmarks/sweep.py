"""Times tiles of rowmax's own kernels, to choose the tables of `rowmax.plan` from.

    python benchmarks/sweep.py --pass forward --problem "b1 h16 q16384 k16384 d128 bf16 causal" \\
        --tiles "64,128x32,64,128 w4,8 s2,3 tma?; 128x128 w8 s2"

`--tiles` takes tiles as plans spell them, separated by `;`. A comma lists alternatives, and `tma?` stands for with and
without: the example is 49 tiles. Each variant is first run once in a child process with a time limit, several at a time: that
fills the compiler's cache on disk, and variants that do not compile, do not fit or hang are listed and left out. The rest are
timed side by side in this process, each result checked first: all of them briefly, then the best eight at length.

Passes: `forward`; `dq` and `dkdv`, the two kernels of the backward, each with the delta kernel that both need. TFLOP/s count
the products that a pass computes: 2 of them, 3 (scores, dP, dQ) and 4 (scores, dP, dV, dK).
"""

import argparse
import itertools
import json
import re
import statistics
import sys
import time
from pathlib import Path

import torch

import record
import rowmax
import timing
from calls import device_of, make_operands
from check import Check, poisoned
from rowmax.analysis import workers
from rowmax.plan import Plan
from rowmax.plan.tile import Tile
from rowmax.problem import Problem
from shapes import SETS, pairs

PASSES = ("forward", "dq", "dkdv")
DEFAULT_TILES = {
    "forward": "64,128x32,64,128 w4,8 s2,3,4 tma?",
    "dq": "64,128x32,64,128 w4,8 s2,3 tma?",
    "dkdv": "32,64,128x64,128 w4,8 s2,3 tma?",
}
FINALISTS = 8


def main(arguments: "list[str] | None" = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problem", action="append", default=[], metavar="SPELLING", help="may be repeated")
    parser.add_argument("--shapes", default="", metavar="SET[,SET]", help=f"named sets: {', '.join(SETS)}")
    parser.add_argument("--pass", dest="passes", default="forward", metavar="PASS[,PASS]", help=f"of {', '.join(PASSES)}")
    parser.add_argument("--tiles", default="", help="tiles separated by ';', with alternatives; default: a grid for the pass")
    parser.add_argument("--algorithm", default="q_outer")
    parser.add_argument("--device", default="")
    parser.add_argument("--workers", type=int, default=16, metavar="N", help="child processes; 0: try each variant in this one")
    parser.add_argument("--job-limit", type=float, default=60.0, metavar="S", help="one variant's compilation and first run")
    parser.add_argument("--time-limit", type=float, default=540.0, metavar="S", help="of the whole sweep")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="timing of the finalists of one problem")
    parser.add_argument("--out", type=Path, help="write every variant's numbers here, as JSON")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    device = device_of(options.device)
    started = time.monotonic()

    problems = [Problem.parse(text) for text in options.problem]
    problems += [shape.problem for name in options.shapes.split(",") if name for shape in SETS[name].shapes]
    if bent := [str(problem) for problem in problems if not problem.plain]:
        raise SystemExit(f"tiles are swept for attention under a band alone, not '{bent[0]}'")
    passes = options.passes.split(",")
    if not problems or not set(passes) <= set(PASSES):
        raise SystemExit(f"give a --problem or a set with --shapes, and --pass of {', '.join(PASSES)}; got '{options.passes}'")
    groups = [(problem, which, expand(options.tiles or DEFAULT_TILES[which])) for problem in problems for which in passes]
    outcomes = _try_all(groups, options, device)

    facts, written, failures = record.machine(device), [], 0
    for (problem, which, _), outcome in zip(groups, outcomes, strict=True):
        left = options.time_limit - (time.monotonic() - started)
        if left < 0:
            outcome = {tile: error or "not timed: out of time" for tile, error in outcome.items()}
        rows, wrong = time_variants(problem, which, outcome, options, device)
        failures += wrong
        written += [{**row, **facts} for row in rows]
        _print_group(problem, which, rows)
        if options.out:
            options.out.write_text(json.dumps(written, indent=1))
    if {"dq", "dkdv"} <= set(passes):
        _print_backward(written)
    return 1 if failures else 0


def expand(text: str) -> list[str]:
    """The tiles that a `--tiles` text stands for, each once, in the order written.

    >>> expand("64,128x32 w4 s2; 128x64 w8 s2 tma?")
    ['64x32 w4 s2', '128x32 w4 s2', '128x64 w8 s2', '128x64 w8 s2 tma']
    """
    found = []
    for part in text.split(";"):
        alternatives = []
        for word in part.split():
            if match := re.fullmatch(r"([\d,]+)x([\d,]+)", word):
                sides = (match[1].split(","), match[2].split(","))
                alternatives.append([f"{m}x{n}" for m, n in itertools.product(*sides)])
            elif match := re.fullmatch(r"([a-z]+)([\d,]+)", word):
                alternatives.append([match[1] + number for number in match[2].split(",")])
            elif match := re.fullmatch(r"([a-z]+)(\??)", word):
                alternatives.append(["", match[1]] if match[2] else [match[1]])
            else:
                raise SystemExit(
                    f"--tiles: '{word}' in '{part.strip()}' is no part of a tile; an example: '64,128x64 w4,8 s2 tma?'"
                )
        found += [" ".join(filter(None, words)) for words in itertools.product(*alternatives) if words]
    return list(dict.fromkeys(str(Tile.parse(tile)) for tile in found))


def run_variant(problem: Problem, which: str, tile: str, algorithm: str, inputs):
    """The call that is timed: our launch, the tile as given. `inputs` from `prepare`."""
    from rowmax.kernels import launch

    operands, grad_out, out, lse = inputs
    plan = Plan(algorithm, (Tile.parse(tile),) * 2)
    if which == "forward":
        return lambda: launch.Forward(problem, plan, False)(*operands)[:1]
    needs = (which == "dq", which == "dkdv", which == "dkdv")

    def call():
        grads = launch.backward(problem, operands, out, lse, grad_out, None, needs, plan)
        return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))

    return call


def prepare(problem: Problem, which: str, device: torch.device, seed: int):
    """`(operands, grad_out, out, lse)`; the last two are what a backward starts from, by the plan's own forward."""
    operands, grad_out = make_operands(problem, device, seed)
    if which == "forward":
        return operands, grad_out, None, None
    common = {"window": tuple(problem.band), "scale": problem.scale, "return_lse": True}
    if problem.packed:
        out, lse = rowmax.attention_varlen(*operands[:5], **common)
    else:
        out, lse = rowmax.attention(*operands[:3], **common)
    return operands, grad_out, out, lse


def try_variant(problem: str, which: str, tile: str, algorithm: str, device: str, seed: int) -> None:
    """Compile a variant and run it once (in a child process)."""
    parsed, on = Problem.parse(problem), device_of(device)
    run_variant(parsed, which, tile, algorithm, prepare(parsed, which, on, seed))()
    if on.type == "cuda":
        torch.cuda.synchronize()


def _try_all(groups, options, device: torch.device) -> list[dict[str, str]]:
    """For each group, tile -> what went wrong in a child process ("" if nothing)."""
    jobs = [
        {"problem": str(problem), "which": which, "tile": tile, "algorithm": options.algorithm}
        | {"device": str(device), "seed": options.seed}
        for problem, which, tiles in groups
        for tile in tiles
    ]
    started = time.monotonic()
    if options.workers:
        limits = {"job_seconds": options.job_limit, "total_seconds": 0.7 * options.time_limit}
        errors = [o.error for o in workers.run_all(try_variant, jobs, workers=options.workers, **limits)]
    else:
        errors = [""] * len(jobs)
    good = sum(not error for error in errors)
    print(f"{good} of {len(jobs)} variants run ({time.monotonic() - started:.0f} s)", file=sys.stderr)
    taken = iter(errors)
    return [{tile: next(taken) for tile in tiles} for _, _, tiles in groups]


def time_variants(problem: Problem, which: str, outcome: dict[str, str], options, device) -> tuple[list[dict], int]:
    """`(rows, wrong results)` of one problem and pass; a row without `ms` says why in `error`."""
    inputs = prepare(problem, which, device, options.seed) if not all(outcome.values()) else None
    check = inputs and Check(problem, inputs[0], None if which == "forward" else inputs[1], seed=options.seed)
    calls, errors, wrong = {}, dict(outcome), 0
    for tile, error in outcome.items():
        if error:
            continue
        try:
            call = run_variant(problem, which, tile, options.algorithm, inputs)
            with poisoned(problem, device):
                results = call()
            if broken := check.broken(results):
                errors[tile], wrong = "WRONG: " + "; ".join(broken), wrong + 1
            else:
                calls[tile] = call
        except Exception as caught:
            errors[tile] = workers.brief(caught)
            if workers.context_lost(errors[tile]):
                raise
    times = timing.samples_ms(calls, device, 0.0)[0] if calls else {}
    best = sorted(times, key=lambda tile: statistics.median(times[tile]))[:FINALISTS]
    if len(best) > 1:
        again, last = timing.samples_ms({tile: calls[tile] for tile in best}, device, options.seconds)
        times |= again
        for tile in best:
            if broken := check.broken(last[tile]):
                errors[tile], wrong = "WRONG after timing: " + "; ".join(broken), wrong + 1
                del times[tile]
    rows = []
    for tile in outcome:
        row = {"problem": str(problem), "pass": which, "tile": tile, "error": errors[tile]}
        if tile in times:
            median = statistics.median(times[tile])
            row |= {"ms": record.figures(median), "ms_min": record.figures(min(times[tile])), "samples": len(times[tile])}
            row["tflops"] = record.figures(_flops(problem, which) / median / 1e9)
        rows.append(row)
    return sorted(rows, key=lambda row: row.get("ms", float("inf"))), wrong


def _flops(problem: Problem, which: str) -> float:
    dims = {"forward": (1, 1), "dq": (2, 1), "dkdv": (2, 2)}[which]
    return 2 * pairs(problem) * (dims[0] * problem.dim_qk + dims[1] * problem.dim_v)


def _print_group(problem: Problem, which: str, rows: list[dict]) -> None:
    print(f"\n{problem} {which}")
    for row in rows:
        if "ms" in row:
            print(f"  {row['ms']:>10.4f} ms {row['tflops']:>7.4g} TFLOP/s  best {row['ms_min']:.4f}  {row['tile']}")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["error"]:
            reasons.setdefault(row["error"], []).append(row["tile"])
    for reason, tiles in reasons.items():
        print(f"  {reason}: {', '.join(tiles[:12])}{f' and {len(tiles) - 12} more' if len(tiles) > 12 else ''}")
    sys.stdout.flush()


def _print_backward(rows: list[dict]) -> None:
    """The backward that the best of each kernel make together, in the convention of `shapes.flops`."""
    print()
    for problem in dict.fromkeys(row["problem"] for row in rows):
        best = {}
        for row in rows:
            if row["problem"] == problem and "ms" in row and row["pass"] in ("dq", "dkdv"):
                best.setdefault(row["pass"], row)  # rows are sorted by time
        if len(best) == 2:
            together = best["dq"]["ms"] + best["dkdv"]["ms"]
            parsed = Problem.parse(problem)
            speed = 2 * pairs(parsed) * (3 * parsed.dim_qk + 2 * parsed.dim_v) / together / 1e9
            tiles = f"{best['dq']['tile']}, {best['dkdv']['tile']}"
            print(f"{problem} backward about {together:.4f} ms, {speed:.4g} TFLOP/s (delta counted twice): [{tiles}]")


if __name__ == "__main__":
    sys.exit(main())
