"""Times rowmax beside every peer installed, each result checked first: `python benchmarks/run.py [--shapes anchors-forward]`.

For each problem and pass: the same random operands for all; every candidate's result checked against an fp64 oracle
(`check.py`); the candidates timed in turn (`timing.py`); the last timed results checked again; medians printed and appended
to a results file (`record.py`). A candidate that fails its check, or claims more than the device can do, prints no speed and
makes the exit code 1. A peer that is absent or has no kernel for a problem is named on stderr.

A problem that bends scores is timed beside rowmax on the same tensors without, in the same rounds, and what it costs is printed
as times that: `--shapes scores`.
"""

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

import torch

import baselines
import record
import timing
from calls import compile_ahead, device_of, make_call, make_operands, plan_of
from check import Check, poisoned
from rowmax import Device
from rowmax.analysis import workers
from rowmax.device import Rates
from rowmax.problem import Problem
from shapes import AT_MOST, FORWARD, PASSES, SETS, Shape, bytes_moved, flops, given_bytes, unbent

COMPILED = ("rowmax", "flex", "fa4")  # who compiles a kernel before its first result


DEFAULT_SETS = {"cuda": "anchors-forward,anchors-backward,gqa,packed", "cpu": "cpu"}
SECONDS = {"cuda": 0.5, "cpu": 3.0}  # enough for 20 rounds of the longest problems with four candidates


class ContextLost(RuntimeError):
    """The GPU's context is gone; nothing more can be timed in this process."""


def main(arguments: "list[str] | None" = None) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options.device)
    if device.type == "cpu":
        torch.set_num_threads(options.threads)
    jobs = _jobs(options, device)
    deadline = time.monotonic() + options.time_limit
    facts = record.machine(device)
    out = options.out or record.default_path(facts)
    if facts["commit"] == "unknown":
        print("note: commit unknown (no repository here); set ROWMAX_COMMIT to record it", file=sys.stderr)
    _compile_ahead(options, device, jobs, deadline)
    peaks: dict[torch.dtype, float] = {}
    failures, costs = 0, []
    for done, (problem, which, who) in enumerate(jobs):
        if time.monotonic() > deadline:
            print(f"time limit: {len(jobs) - done} of {len(jobs)} groups not timed", file=sys.stderr)
            break
        if problem.dtype not in peaks:
            peaks[problem.dtype] = timing.peak_tflops(problem.dtype, device)
            print(f"peak {problem.dtype_name} matmul {peaks[problem.dtype]:.3g} TFLOP/s on {facts['gpu'] or facts['cpu']}")
        most = timing.most_tflops(problem.dtype, device, peaks[problem.dtype])
        try:
            rows, failed = time_group(problem, which, who, device, options, facts, most)
        except ContextLost as lost:
            print(f"stopping: {lost}", file=sys.stderr)
            failures += 1
            break
        failures += failed
        record.append(out, rows)  # after every group, so that a run cut short keeps what it has
        _print_group(problem, rows)
        costs += _costs(problem, which, rows, device)
    print("\n".join(costs))
    print(f"results in {out}" if failures == 0 else f"{failures} failed; the rest in {out}")
    return 1 if failures else 0


def time_group(problem: Problem, which: str, who: list[str], device, options, facts: dict, most: float, *, spin: bool = False):
    """`(rows, failures)` of one problem and pass, all candidates side by side; first rowmax's on the problem without what bends
    its scores, if anything does. These rows have a `run` of their own. `spin`: as `timing.samples_ms` takes it."""
    operands, grad_out = make_operands(problem, device, options.seed)
    given = {unbent(problem): operands._replace(slopes=None, sink=None, bias=None, mask=None, seed=None), problem: operands}
    if not problem.plain:
        more = [word for word in str(problem).split() if word not in str(unbent(problem)).split()]
        facts = {**facts, "run": " ".join([facts["run"], *more])}
    checks = {p: Check(p, own, None if which == FORWARD else grad_out, seed=options.seed) for p, own in given.items()}
    calls, failures = {}, 0
    for asked, name, plan in _candidates(problem, who, options.plan):
        try:
            call = make_call(name, asked, given[asked], grad_out, which, plan=plan)
            with poisoned(asked, device):
                results = call()
            wrong = checks[asked].broken(results, peer=name != "rowmax")
        except baselines.Refused as refused:
            print(f"  {name} not timed on '{asked}' {which}: {refused}", file=sys.stderr)
            continue
        except Exception as error:  # whatever a peer raises; ours counts as a failure
            said = workers.brief(error)
            if workers.context_lost(said):
                raise ContextLost(f"{name} on '{asked}' {which}: {said}") from error
            print(f"  {name} raised on '{asked}' {which}: {said}", file=sys.stderr)
            failures += name == "rowmax"
            continue
        if wrong:
            failures += 1
            print(f"  {name} WRONG on '{asked}' {which}: {'; '.join(wrong)}", file=sys.stderr)
            continue
        calls[asked, name, plan] = call
        del results
    if not calls:
        return [], failures
    times, last = timing.samples_ms(calls, device, options.seconds or SECONDS[device.type], spin=spin)
    rows = []
    for candidate in calls:
        asked, name, plan = candidate
        row = _row(asked, which, name, plan, times[candidate], device, facts)
        wrong = checks[asked].broken(last[candidate], peer=name != "rowmax")
        if row["tflops"] > most:
            wrong.append(f"{row['tflops']:.4g} TFLOP/s is above the {most:.4g} that the device can do: the timing is wrong")
        if wrong:
            failures += 1
            print(f"  {name} WRONG after timing '{asked}' {which}: {'; '.join(wrong)}", file=sys.stderr)
        else:
            rows.append(row)
    del calls, last, checks, operands, given
    gc.collect()
    return rows, failures


def _candidates(problem: Problem, who: list[str], plans: list[str]) -> list[tuple[Problem, str, str]]:
    """`(problem, who, plan)`: rowmax once for each plan that is asked for."""
    beside = [] if problem.plain or "rowmax" not in who else [(unbent(problem), "rowmax", "")]
    return beside + [(problem, name, plan) for name in who for plan in (plans if plans and name == "rowmax" else [""])]


def _row(problem: Problem, which: str, name: str, plan: str, times: list[float], device, facts: dict) -> dict:
    median = statistics.median(times)
    return {
        "run": facts["run"],
        "problem": str(problem),
        "pass": which,
        "who": name,
        "plan": plan_of(problem, device, which, plan) if name == "rowmax" else None,
        "ms": record.figures(median),
        "ms_min": record.figures(min(times)),
        "samples": len(times),
        "tflops": record.figures(flops(problem, which) / median / 1e9),
        "gb_per_s": record.figures(bytes_moved(problem, which) / median / 1e6),
        "checked": True,
        **facts,
    }


def _jobs(options, device: torch.device) -> list[tuple[Problem, str, list[str]]]:
    """`(problem, pass, who)` in the order they are timed."""
    found = []
    shapes: list[tuple[Shape, tuple[str, ...]]] = [
        (Shape(Problem.parse(text), "as asked"), (FORWARD,)) for text in options.problem
    ]
    sets = options.shapes or ("" if shapes else DEFAULT_SETS[device.type])
    for name in sets.split(",") if sets else ():
        if name not in SETS:
            raise SystemExit(f"--shapes: no set '{name}'; known are {', '.join(SETS)}")
        shapes += [(shape, SETS[name].passes) for shape in SETS[name].shapes]
    everyone = baselines.installed(device)
    for shape, passes in shapes:
        more = [name for name, fits in (("sdpa", shape.problem.pairs), ("flex", shape.flex)) if fits and device.type == "cuda"]
        who = options.who.split(",") if options.who else everyone + more
        for which in options.passes.split(",") if options.passes else shape.passes or passes:
            if which not in PASSES:
                raise SystemExit(f"--pass: no pass '{which}'; known are {', '.join(PASSES)}")
            found.append((shape.problem, which, who))
    return found


def _compile_ahead(options, device: torch.device, jobs, deadline: float) -> None:
    """Fill the compilers' caches on disk from several processes at once, so that the timed process finds them warm."""
    if device.type != "cuda" or options.workers == 0:
        return
    calls = [
        (str(asked), name, which, plan)
        for problem, which, who in jobs
        for asked, name, plan in _candidates(problem, who, options.plan)
        if name in COMPILED
    ]
    names = ("problem", "who", "which", "plan")
    wanted = [{**dict(zip(names, call, strict=True)), "device": str(device)} for call in dict.fromkeys(calls)]
    # Those that take the longest first.
    wanted.sort(key=lambda job: job["who"] == "rowmax")
    started = time.monotonic()
    budget = max(0.0, min(deadline - started, 0.6 * options.time_limit))
    outcomes = workers.run_all(compile_ahead, wanted, workers=options.workers, job_seconds=120, total_seconds=budget)
    for job, outcome in zip(wanted, outcomes, strict=True):
        if outcome.error:
            print(f"  compiling {job['who']} ahead for '{job['problem']}' {job['which']}: {outcome.error}", file=sys.stderr)
    print(f"compiled ahead for {len(wanted)} calls in {time.monotonic() - started:.0f} s", file=sys.stderr)


def _costs(problem: Problem, which: str, rows: list[dict], device: torch.device) -> list[str]:
    """In words, what bending the scores costs rowmax: times without it, and of tensors as large as the scores also times the
    longer of that and of reading them once."""
    ms = {row["problem"]: row["ms"] for row in reversed(rows) if row["who"] == "rowmax"}
    plain = str(unbent(problem))
    if problem.plain or not {plain, str(problem)} <= ms.keys():
        return []
    asked = f" (asked: at most {AT_MOST[problem]})" if which == FORWARD and problem in AT_MOST else ""
    text = f"{problem!s:<56} {which:<16} {ms[str(problem)] / ms[plain]:.3f} times its time without"
    if not problem.pairs or device.type == "cpu":
        return [text + asked]
    rates, size = Rates.of(Device.of(device)), given_bytes(problem)
    reading = size / (rates.hbm_bytes_per_s * rates.hbm_share) * 1e3
    times = ms[str(problem)] / max(ms[plain], reading)
    return [f"{text}, {times:.3f} times the longer of that and the {reading:.3f} ms of reading {size / 1e9:.3g} GB{asked}"]


def _print_group(problem: Problem, rows: list[dict]) -> None:
    ours = next((row for row in rows if row["who"] == "rowmax" and row["problem"] == str(problem)), None)
    for row in rows:
        line = f"{row['problem']:<56} {row['pass']:<16} {row['who']:<7} {row['ms']:>10.4f} ms {row['tflops']:>8.4g} TFLOP/s"
        if ours is None or row["who"] == "rowmax":
            line += f"  {row['plan'] or ''}"
        else:
            ratios = (row[key] / ours[key] for key in ("ms", "ms_min"))
            line += "  rowmax is {:.2f}x as fast (best times {:.2f}x)".format(*ratios)
        print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="", metavar="SET[,SET]", help=f"of {', '.join(SETS)}; default: {DEFAULT_SETS}")
    parser.add_argument("--problem", action="append", default=[], metavar="SPELLING", help="one more problem; may be repeated")
    parser.add_argument(
        "--pass", dest="passes", default="", metavar="PASS[,PASS]", help=f"of {', '.join(PASSES)}; default: the set's"
    )
    parser.add_argument("--who", default="", metavar="NAME[,NAME]", help="default: everyone installed, flex on its shapes only")
    parser.add_argument(
        "--plan",
        action="append",
        default=[],
        help="force rowmax's plan, for example 'q_outer[128x64 w8 s3]'; repeated: several plans side by side",
    )
    parser.add_argument("--device", default="", help="cuda or cpu; default: the GPU where there is one")
    parser.add_argument("--out", type=Path, help="results file to append to; default: results/<device>-<date>.json")
    parser.add_argument("--time-limit", type=float, default=3600.0, metavar="S", help="start no further group after this long")
    parser.add_argument("--seconds", type=float, metavar="S", help="timing of one group; default: 0.5 on a GPU, 3 on a CPU")
    parser.add_argument("--workers", type=int, default=16, metavar="N", help="processes that compile ahead on a GPU; 0: none")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of a CPU")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
