"""A seeded sample of FlashAttention's test grid (`flash_grid.py`) on a GPU, as a table and as JSON.

    python tests/gpu_grid.py [--count 3000] [--first 0] [--time-limit 1500] [--workers 12] [--json results.json]
    python tests/gpu_grid.py --case 1234          one case, as a failure's line names it

Builds of kernels take most of the time, on the CPU, so several processes share the GPU. Cases are independent draws: a run that
the time limit ends is a smaller sample. Exit status 1 if anything is wrong, or nothing ran.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

A_JOB = 8  # cases


class Result(NamedTuple):
    number: int
    form: str
    ratios: dict
    held: bool
    error: str


def run(job: tuple[range, str, bool]) -> list[Result]:
    import flash_grid

    numbers, device, small = job
    warnings.filterwarnings("ignore", "(?s).*deterministic")  # poisoning memory turns that mode on
    results = []
    for number in numbers:
        case = flash_grid.draw(number, small)
        try:
            ratios, held, error = flash_grid.check(case, device)
        except Exception:
            ratios, held, error = {}, False, traceback.format_exc(limit=8)
        results.append(Result(number, case.form, ratios, held, error and f"{case}\n{error}"))
    return results


def run_all(jobs: list, workers: int) -> Iterator[list[Result]]:
    """As they are done; one worker is this process."""
    if workers == 1:
        yield from map(run, jobs)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        try:
            yield from (done.result() for done in as_completed([pool.submit(run, job) for job in jobs]))
        finally:  # what has not begun does not begin
            pool.shutdown(wait=False, cancel_futures=True)


def summary(results: list[Result]) -> dict:
    """Form -> number of cases, how many hold the criterion, and the worst ratio of each result with its case."""
    forms: dict = {}
    for result in sorted(results):
        entry = forms.setdefault(result.form, {"cases": 0, "held": 0, "wrong": 0, "worst": {}})
        entry["cases"] += 1
        entry["held"] += result.held
        entry["wrong"] += bool(result.error)
        for name, ratio in result.ratios.items():
            if ratio >= entry["worst"].get(name, {"ratio": -1.0})["ratio"]:
                entry["worst"][name] = {"ratio": ratio, "case": result.number}
    return forms


def table(forms: dict) -> str:
    names = ("out", "dq", "dk", "dv")
    lines = ["form".ljust(18) + "cases  held wrong " + " ".join(name.rjust(8) for name in names)]
    for form, entry in forms.items():
        worst = (f"{entry['worst'][name]['ratio']:8.3f}" if name in entry["worst"] else " " * 8 for name in names)
        lines.append(f"{form:18s}{entry['cases']:5d} {entry['held']:5d} {entry['wrong']:5d} " + " ".join(worst))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--time-limit", type=float, default=3600.0, metavar="S", help="begin nothing after this long")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: one for each CPU core, up to 14")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu, where cases are small")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("FlashAttention's grid: this PyTorch sees no CUDA GPU", file=sys.stderr)
        return 1
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device
    first, count = (arguments.first, arguments.count) if arguments.case is None else (arguments.case, 1)
    numbers = [range(i, min(i + A_JOB, first + count)) for i in range(first, first + count, A_JOB)]
    jobs = [(some, arguments.device, arguments.device != "cuda") for some in numbers]
    start = time.perf_counter()
    results: list[Result] = []
    for done in run_all(jobs, min(arguments.workers or min(os.cpu_count() or 1, 14), len(jobs))):
        results += done
        for result in done:
            if result.error:
                print(f"WRONG {result.error}", flush=True)
        if time.perf_counter() - start > arguments.time_limit:
            break
    forms, seconds, wrong = summary(results), time.perf_counter() - start, [r for r in results if r.error]
    print(table(forms))
    held = sum(result.held for result in results)
    print(f"{len(results)} of {count} cases in {seconds:.0f} s on {name}: {len(wrong)} wrong, {held} hold the criterion, the")
    print("others, where dense attention is exact by luck, the stricter rule")
    if arguments.json:
        document = {
            "device": name,
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
            "commit": os.environ.get("ROWMAX_COMMIT", "unknown"),
            "first": first,
            "asked": count,
            "cases": len(results),
            "held": held,
            "seconds": round(seconds, 1),
            "forms": forms,
            "wrong": [result._asdict() for result in wrong],
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if wrong or not results else 0


if __name__ == "__main__":
    sys.exit(main())
