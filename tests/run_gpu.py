"""Every case and every check of the GPU tier, without pytest: worst error over bound for each family, as a table and as JSON.

    python tests/run_gpu.py [--json results.json] [--workers 12] [--family NAME ...] [--backend hopper] [--forward-only]

Builds of kernels take most of the time, on the CPU, so that small cases run in several processes that share the GPU. Exit
status 1 if anything is wrong. `test_cases.py` and `test_gpu.py` show the same results to pytest.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

DEVICE = "cuda"
LARGE = 3  # of the large cases at once, for their memory


class Result(NamedTuple):
    """One case: `error` is empty when it is right; `refused` when a plan may refuse it and does."""

    index: int
    family: str
    id: str
    ratios: dict
    error: str
    refused: bool
    seconds: float


def run_case(job: tuple[int, str, bool]) -> Result:
    """Case number, the algorithm that runs it, and whether its backward runs too."""
    import cases
    from rowmax import Unsupported

    index, backend, backward = job
    case, start = cases.CASES[index], time.perf_counter()
    case = case._replace(backward=case.backward and backward)
    ratios, error, refused = {}, "", False
    try:
        report = cases.run(case, backend, DEVICE)
        ratios, error = report.ratios, "" if report.ok else str(report)
    except Unsupported as refusal:
        refused = cases.may_refuse(case, backend)
        error = "" if refused else str(refusal)
    except Exception:
        error = traceback.format_exc(limit=8)
    return Result(index, case.family, case.id, ratios, error, refused, time.perf_counter() - start)


def run_cases(
    workers: int = 0, families: tuple[str, ...] = (), backend: str = "q_outer", backward: bool = True
) -> Iterator[Result]:
    """Small cases in `workers` processes (0: one for each CPU core, up to 14), large ones meanwhile in LARGE others."""
    import cases

    workers = workers or min(os.cpu_count() or 1, 14)
    chosen = [i for i, case in enumerate(cases.CASES) if not families or case.family in families]
    context = multiprocessing.get_context("spawn")
    # Neighbours in the list share builds of kernels; handing out in turn spreads the builds over the processes.
    with ProcessPoolExecutor(workers, context) as small, ProcessPoolExecutor(LARGE, context) as large:
        pools = {True: large, False: small}
        jobs = [pools[cases.CASES[i].large].submit(run_case, (i, backend, backward)) for i in chosen]
        try:
            yield from (job.result() for job in as_completed(jobs))
        finally:  # what has not begun does not begin
            for pool in pools.values():
                pool.shutdown(wait=False, cancel_futures=True)


def summary(results: list[Result]) -> dict:
    """Family -> number of cases, and the worst ratio of each part of the rule with the case that gave it."""
    families: dict = {}
    for result in results:
        entry = families.setdefault(result.family, {"cases": 0, "refused": 0, "wrong": 0, "worst": {}})
        entry["cases"] += 1
        entry["refused"] += result.refused
        entry["wrong"] += bool(result.error)
        for part, ratio in result.ratios.items():
            if ratio >= entry["worst"].get(part, {"ratio": -1.0})["ratio"]:
                entry["worst"][part] = {"ratio": ratio, "case": result.id}
    return families


def table(families: dict) -> str:
    parts = ("out", "out rms", "lse", "dq", "dq rms", "dk", "dk rms", "dv", "dv rms")
    lines = ["family".ljust(12) + "cases refused wrong " + " ".join(part.rjust(7) for part in parts)]
    for name, entry in families.items():
        worst = (f"{entry['worst'][part]['ratio']:7.3f}" if part in entry["worst"] else " " * 7 for part in parts)
        lines.append(f"{name:12s}{entry['cases']:5d} {entry['refused']:7d} {entry['wrong']:5d} " + " ".join(worst))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--family", nargs="*", default=())
    parser.add_argument("--backend", default="q_outer", help="the algorithm; the checks are of the default plan")
    parser.add_argument("--forward-only", action="store_true", help="no gradients, which are another algorithm's for some")
    parser.add_argument("--checks-only", action="store_true", help="no cases")
    parser.add_argument("--checks", nargs="*", default=(), metavar="WORD", help="checks with one of these in their name")
    parser.add_argument("--time-limit", type=float, default=3600.0, metavar="S", help="begin nothing after this long")
    arguments = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        print("GPU tier: this PyTorch sees no CUDA GPU", file=sys.stderr)
        return 1
    import triton

    import gpu_checks

    start = time.perf_counter()
    results = []
    chosen = (arguments.workers, tuple(arguments.family), arguments.backend, not arguments.forward_only)
    for result in () if arguments.checks_only else run_cases(*chosen):
        results.append(result)
        if time.perf_counter() - start > arguments.time_limit:
            break
    families = summary(sorted(results))
    seconds = time.perf_counter() - start
    late = seconds > arguments.time_limit
    wrong = [result for result in results if result.error]
    for result in wrong:
        print(f"WRONG {result.family}: {result.id}\n{result.error}\n")
    print(table(families))
    slowest = sorted(results, key=lambda result: -result.seconds)[:5]
    print("slowest: " + ", ".join(f"{result.id} {result.seconds:.0f} s" for result in slowest))
    if late:
        print(f"stopped after {seconds:.0f} s: some cases and the checks did not run")
    print(f"{len(results)} cases in {seconds:.0f} s on {torch.cuda.get_device_name()}: {len(wrong)} wrong", flush=True)
    document: dict = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("ROWMAX_COMMIT", "unknown"),
        "backend": arguments.backend,
        "passes": "forward" if arguments.forward_only else "forward, backward",
        "cases": len(results),
        "seconds": round(seconds, 1),
        "families": families,
        "wrong": [result._asdict() for result in wrong],
        "checks": {},
    }

    def save():
        if arguments.json:
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")

    save()  # a check that takes the GPU down with it must not take the rest
    wanted = not (arguments.family or late or arguments.backend != "q_outer")
    for name, error, took in gpu_checks.run_all(tuple(arguments.checks)) if wanted else ():
        print(f"{'WRONG' if error else 'right'} check: {name} {took:.0f} s" + (f"\n{error}\n" if error else ""), flush=True)
        document["checks"][name] = error
        save()
    failed = len(wrong) + sum(bool(error) for error in document["checks"].values())
    print(f"{len(document['checks'])} checks; {failed} wrong in all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
