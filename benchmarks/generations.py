"""The generations side by side, and the model of `rowmax explain` against measurements.

    python benchmarks/generations.py                     # on a GPU, about a minute: times, checks, writes rows, reports
    python benchmarks/generations.py --draw 0            # only the generations: FlashAttention-2 against 1, half a minute
    python benchmarks/generations.py --report FILE...    # anywhere: what the model says of the rows in results files

Two lists. At 1, 8 and 128 heads and 4k and 16k tokens FlashAttention-1's loop order (`kv_outer`), scores in memory (`dense`),
FlashAttention-2's (`q_outer`), warps that share rows or columns (`warp_split`), and FlashAttention-3 (`hopper`). Asked for is
that 2 is 1.9 times as fast as 1 with 128 heads and 20 times with one, and that the model predicts both within 25%.

And problems drawn at random from a seed: prefill, decode, packed and windows, head dims 64 to 256, 1 to 512 heads, 128 to 128k
keys, each by the plan that runs and by `q_outer`. Constants of the model may be fitted to the rows of any seed but `REPORTED`,
from which the error is reported. Rows are those of `run.py`, and are checked as there.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Optional

import torch

import record
import run
import timing
from calls import compile_ahead, device_of
from rowmax import Device, Plan, Unsupported, plan
from rowmax.analysis import workers
from rowmax.analysis.cost import flops_of
from rowmax.analysis.predict import Prediction, predict
from rowmax.problem import Problem
from shapes import FORWARD, lengths

REPORTED = 1  # the seed
WARPS = tuple(f"warp_split[64x64 w4 s2 {share}]" for share in ("rows", "columns"))
GENERATIONS = ("kv_outer", "dense", "q_outer", *WARPS, "hopper")
# Algorithms -> (how far off, what share of the rows): asked of drawn problems.
ASKED_OF_TIMES = {
    ("q_outer", "hopper", "split_kv"): ((0.15, 0.90), (0.30, 0.99)),
    ("kv_outer", "dense"): ((0.25, 0.90),),
}
ASKED = {1: 20.0, 128: 1.9}  # heads -> how many times as fast FlashAttention-2 is to be
RATIO_OFF = 0.25  # that the model may be off
DENSE_BYTES = 60e9  # of S and P: more are not tried
# Of a drawn problem: FLOPs and bytes of tensors; scores in memory; and tile products one after another under FlashAttention-1's
# loop order, about 2 us each. The model has no say in what is drawn.
MOST_FLOPS, LARGEST_BYTES, DRAWN_SCORES, MOST_TURNS = 4e12, 4e9, 20e9, 30_000


def generation_jobs(device: Device) -> list[tuple[Problem, list[str]]]:
    """`(problem, plans)`: where the two loop orders are to be compared, by those that run on the device."""
    found = []
    for tokens in (4096, 16384):
        for heads in (1, 8, 128):
            problem = Problem.parse(f"b1 h{heads} q{tokens} k{tokens} d64 bf16")
            scores = 6 * heads * tokens * tokens
            names = [name for name in GENERATIONS if name != "dense" or scores <= DENSE_BYTES]
            found.append((problem, [name for name in names if _runs(problem, device, name)]))
    return found


def _runs(problem: Problem, device: Device, name: str) -> bool:
    try:
        plan(problem, device, prefer=name)
    except Unsupported:
        return False
    return True


def draw(seed: int, number: int, device: Device) -> list[tuple[Problem, list[str]]]:
    """The first `number` problems of a seed that are neither too long nor too large, with the plans to time: the one that runs,
    `q_outer`, and the older generations where they end soon."""
    rnd, found = random.Random(seed), []
    while len(found) < number:
        problem = _one(rnd)
        sequences = 1 if problem.packed else problem.batch
        tokens = sequences * (problem.len_q * 2 * problem.heads_q + problem.len_k * 2 * problem.heads_k)
        if tokens * problem.dim_qk * 2 > LARGEST_BYTES or flops_of(problem, FORWARD) > MOST_FLOPS:
            continue
        older = [name for name in ("kv_outer", "dense") if _soon(problem, name) and _runs(problem, device, name)]
        found.append((problem, list(dict.fromkeys((plan(problem, device).algorithm, "q_outer", *older)))))
    return found


def _soon(problem: Problem, name: str) -> bool:
    heads = problem.batch * problem.heads_q
    if name == "dense":
        return 6 * heads * problem.len_q * problem.len_k <= DRAWN_SCORES
    return -(-problem.len_q // 64) * -(-problem.len_k // 128) * -(-heads // 132) <= MOST_TURNS


def _one(rnd: random.Random) -> Problem:
    kind = rnd.choice(("prefill", "prefill", "decode", "packed", "window"))
    dim = rnd.choice((64, 128, 128, 256))
    group = rnd.choice((1, 1, 4, 8))
    heads_k = rnd.choice((1, 2, 4, 8, 16))
    batch = 2 ** rnd.randint(0, 5)
    while batch * heads_k * group > 512:
        batch //= 2
    tokens = round(2 ** rnd.uniform(7, 17))
    heads = f"h{heads_k * group}/{heads_k} d{dim} {rnd.choice(('bf16', 'fp16'))}"
    if kind == "decode":
        return Problem.parse(f"b{batch} {heads} q1 k{tokens} causal")
    tokens = min(tokens, 32768)
    if kind == "packed":
        count, longest = 2 ** rnd.randint(2, 6), 0
        total = max(tokens, 2 * count)
        longest = max(-(-2 * total // count), 2)
        return Problem.parse(f"b{count} {heads} q{total} k{total} causal packed maxq{longest} maxk{longest}")
    if kind == "window":
        return Problem.parse(f"b{batch} {heads} q{tokens} k{tokens} window({2 ** rnd.randint(6, 12) - 1},0)")
    queries = tokens if rnd.random() < 0.8 else max(tokens // 4, 64)
    return Problem.parse(f"b{batch} {heads} q{queries} k{tokens} {rnd.choice(('', 'causal'))}")


def lengths_of(problem: Problem) -> Optional[list[tuple[int, int]]]:
    """Of packed sequences, as `calls.make_operands` cuts them."""
    return list(zip(lengths(problem, "q"), lengths(problem, "k"), strict=True)) if problem.packed else None


# ---- what the model says ---------------------------------------------------------------------------------------------


def compared(rows: list[dict]) -> Iterator[tuple[dict, Prediction]]:
    """Rows of ours on a GPU that the model knows, with its prediction for the very plan."""
    for row in rows:
        if row.get("pass") != FORWARD or row.get("who") != "rowmax" or not row.get("gpu"):
            continue
        problem, device = Problem.parse(row["problem"]), Device.named(row["gpu"])
        try:
            yield row, predict(problem, device, Plan.parse(row["plan"]), lengths=lengths_of(problem))
        except (KeyError, Unsupported):
            continue


def report(rows: list[dict], *, every: bool = False) -> None:
    """Print how far predictions are off, by algorithm, and the two loop orders beside each other."""
    errors: dict[str, list[float]] = {}
    drawn: dict[str, list[float]] = {}
    side_by_side = {str(problem) for problem, _ in generation_jobs(Device.named("H200"))}
    times: dict[str, dict[str, tuple[float, float]]] = {}
    for row, prediction in compared(rows):
        error = prediction.seconds * 1e3 / row["ms"] - 1
        errors.setdefault(prediction.plan.algorithm, []).append(error)
        if row["problem"] not in side_by_side:
            drawn.setdefault(prediction.plan.algorithm, []).append(error)
        name = str(prediction.plan) if prediction.plan.algorithm == "warp_split" else prediction.plan.algorithm
        times.setdefault(row["problem"], {})[name] = (row["ms"], prediction.seconds * 1e3)
        if every:
            print(f"{error:+7.1%} {row['ms']:10.4f} ms  {prediction.verdict:<12} {row['problem']}  {row['plan']}")
    print(f"{'':<10} {'rows':>5} {'median':>7} {'<=15%':>6} {'<=25%':>6} {'<=30%':>6} {'worst':>7}")
    for name, found in sorted(errors.items()):
        shares = [sum(abs(error) <= most for error in found) / len(found) for most in (0.15, 0.25, 0.30)]
        middle, worst = statistics.median(map(abs, found)), max(found, key=abs)
        print(f"{name:<10} {len(found):>5} {middle:>7.1%} " + " ".join(f"{one:>6.0%}" for one in shares) + f" {worst:>+7.0%}")
    for names, asked in ASKED_OF_TIMES.items():
        found = [error for name in names for error in drawn.get(name, [])]
        for most, least in asked if found else ():
            share = sum(abs(error) <= most for error in found) / len(found)
            said = "holds" if share >= least else "FAILS"
            print(f"of {len(found)} drawn rows by {', '.join(names)}: {share:.1%} within {most:.0%}, asked {least:.0%}: {said}")
    print_ratios(ratios(times, "kv_outer", "q_outer"), "FlashAttention-2 (q_outer) against 1 (kv_outer)", ASKED)
    print_ratios(ratios(times, WARPS[1], WARPS[0]), "split-Q (rows) against split-K/V (columns)", {})


class Ratio(NamedTuple):
    """Times of two plans for one problem, in ms, and what the model makes of them."""

    problem: Problem
    slow_ms: float
    fast_ms: float
    model: float

    @property
    def measured(self) -> float:
        return self.slow_ms / self.fast_ms


def ratios(times: dict[str, dict[str, tuple[float, float]]], slow: str, fast: str) -> list[Ratio]:
    """`times`: problem -> plan -> (measured, predicted) ms."""
    return [
        Ratio(Problem.parse(text), found[slow][0], found[fast][0], found[slow][1] / found[fast][1])
        for text, found in times.items()
        if {slow, fast} <= set(found)
    ]


def print_ratios(found: list[Ratio], title: str, asked: dict[int, float]) -> None:
    """A table, with what was asked for, by heads, and whether it holds."""
    if not found:
        return
    print(
        f"{title}: times as fast\n{'heads':>6} {'tokens':>7} {'slow ms':>9} {'fast ms':>9} {'ratio':>7} {'model':>7} {'off':>5}"
    )
    for one in found:
        off, heads = one.model / one.measured - 1, one.problem.heads_q * one.problem.batch
        least = asked.get(heads)
        said = "" if least is None else f"  asked {least:g}: {'holds' if one.measured >= least else 'FAILS'}"
        said += "" if abs(off) <= RATIO_OFF else f"  the model is more than {RATIO_OFF:.0%} off"
        print(
            f"{heads:>6} {one.problem.len_q:>7} {one.slow_ms:>9.4g} {one.fast_ms:>9.4g} {one.measured:>7.3g}"
            f" {one.model:>7.3g} {off:>+5.0%}{said}"
        )


# ---- timing ----------------------------------------------------------------------------------------------------------


def main(arguments: "list[str] | None" = None) -> int:
    options = _parser().parse_args(arguments)
    if options.report:
        report([row for path in options.report for row in json.loads(path.read_text())], every=options.every)
        return 0
    device = device_of()
    if device.type != "cuda":
        print("no CUDA GPU here; --report FILE compares rows that were measured", file=sys.stderr)
        return 1
    started = time.monotonic()
    facts = record.machine(device)
    out = options.out or record.RESULTS / "generations" / record.default_path(facts).name
    here = Device.of(device)
    jobs = [*generation_jobs(here), *draw(options.seed, options.draw, here)]
    wanted = [
        {"problem": str(problem), "who": "rowmax", "which": FORWARD, "plan": name, "device": str(device)}
        for problem, plans in _builds(jobs, here)
        for name in plans
    ]
    outcomes = workers.run_all(
        compile_ahead, wanted, workers=options.workers, job_seconds=60, total_seconds=0.5 * options.time_limit
    )
    print(f"compiled ahead in {time.monotonic() - started:.0f} s", file=sys.stderr)
    for job, outcome in zip(wanted, outcomes, strict=True):
        if outcome.error:
            print(f"  {job['plan']} of '{job['problem']}': {outcome.error}", file=sys.stderr)
    most = timing.most_tflops(torch.bfloat16, device, timing.peak_tflops(torch.bfloat16, device))
    rows, failures = [], 0
    for problem, plans in jobs:
        if time.monotonic() - started > options.time_limit:
            print(f"time limit: {len(jobs)} problems, timed until '{problem}'", file=sys.stderr)
            break
        group = argparse.Namespace(seed=options.seed, plan=plans, seconds=options.seconds)
        found, failed = run.time_group(problem, FORWARD, ["rowmax"], device, group, facts, most, spin=True)
        rows += found
        failures += failed
        record.append(out, found)
    report(rows, every=options.every)
    print(f"{len(rows)} rows in {out}, {failures} failures, {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


def _builds(jobs: list[tuple[Problem, list[str]]], device: Device) -> list[tuple[Problem, list[str]]]:
    """One small problem of each build. Triton builds a kernel anew for numbers that are 1 and those that 16 divides."""
    found: dict = {}
    for problem, plans in jobs:
        banded = tuple(side is not None for side in problem.band)
        numbers = (problem.batch, problem.heads_k, problem.heads_q, problem.len_q, problem.len_k)
        kinds = tuple((number == 1, number % 16 == 0) for number in numbers)
        form = (problem.dim_qk, problem.dtype, banded, problem.packed, problem.group, kinds)
        for name in plans:
            smallest = found.setdefault((*form, str(plan(problem, device, prefer=name))), [problem, [name]])
            if _size(problem) < _size(smallest[0]):
                smallest[0] = problem
    return [(problem, plans) for problem, plans in found.values()]


def _size(problem: Problem) -> int:
    return problem.heads_q * problem.batch * problem.len_k


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", type=int, default=40, metavar="N", help="problems drawn")
    parser.add_argument("--seed", type=int, default=REPORTED, help=f"of the draw; {REPORTED} is the one reported")
    parser.add_argument("--seconds", type=float, default=0.15, metavar="S", help="timing of one problem")
    parser.add_argument("--time-limit", type=float, default=85.0, metavar="S", help="start nothing after this long")
    parser.add_argument("--workers", type=int, default=16, metavar="N", help="processes that compile ahead")
    parser.add_argument("--out", type=Path, help="default: results/generations/<device>-<date>.json")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="time nothing; compare these rows")
    parser.add_argument("--every", action="store_true", help="print every row")
    return parser


if __name__ == "__main__":
    sys.exit(main())
