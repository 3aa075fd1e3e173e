"""Host time of one eager attention call on a GPU: from the call to its return, the kernel only enqueued.

    python benchmarks/host_time.py

The tensors are small and need no gradients, so that the host is the cost. Calls come in batches, candidates in turn; the device
is waited for between batches, never inside one, and a batch is far shorter than the launch queue (1024 on CUDA), so that no
call waits for room. What is timed is the bare public call on tensors in the layout it wants: no transposes, no contexts.
On a CPU the call's whole time is shown, which says little: there the work is the cost.
"""

import argparse
import functools
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import baselines
import record
import rowmax
from calls import device_of, make_operands, plan_of
from check import Check, poisoned
from rowmax.analysis import workers
from rowmax.mask import Band
from rowmax.problem import Operands, Problem
from shapes import CAUSAL, FORWARD, SMALL

BATCH = 50  # calls between two waits


def main(arguments: "list[str] | None" = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problem", action="append", help="may be repeated; default: " + ", ".join(map(str, SMALL)))
    parser.add_argument("--who", default="", help="default: rowmax, prepared (the same by rowmax.prepare), sdpa, fa3, fa4")
    parser.add_argument("--calls", type=int, default=2000, help="per candidate")
    parser.add_argument("--device", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    device = device_of(options.device)
    facts = record.machine(device)
    others = [name for name in baselines.installed(device) if name in ("fa3", "fa4")]
    names = options.who.split(",") if options.who else [*record.OWN, "sdpa", *others]
    failures = 0
    for problem in [Problem.parse(text) for text in options.problem or ()] or SMALL:
        rows, failed = time_host(problem, names, device, options.calls, facts)
        failures += failed
        record.append(options.out or record.default_path(facts), rows)
        sdpa = next((row["us"] for row in rows if row["who"] == "sdpa"), None)
        for row in rows:
            beside = f"  {row['us'] / sdpa:.2f} x torch SDPA" if sdpa else ""
            print(f"{problem!s:<36} host {row['who']:<8} {row['us']:>8.2f} us (best {row['us_min']:.2f}){beside}")
    return 1 if failures else 0


def time_host(problem: Problem, names: list[str], device: torch.device, count: int, facts: dict) -> tuple[list[dict], int]:
    """`(rows, failures)`: the candidates' calls side by side."""
    operands, _ = make_operands(problem, device, seed=0)
    check = Check(problem, operands)
    calls, failures = {}, 0
    for name in names:
        try:
            call = bare_call(name, problem, operands)
            with torch.no_grad(), poisoned(problem, device):
                out = call()
            out = out[0] if isinstance(out, tuple) else out
            wrong = check.broken((out.transpose(1, 2) if name == "sdpa" else out,), peer=name not in record.OWN)
        except baselines.Refused as refused:
            print(f"  {name} not timed: {refused}", file=sys.stderr)
            continue
        except Exception as error:  # whatever a peer raises
            print(f"  {name} raised {workers.brief(error)}", file=sys.stderr)
            failures += name in record.OWN
            continue
        if wrong:
            print(f"  {name} WRONG on '{problem}': {'; '.join(wrong)}", file=sys.stderr)
            failures += 1
            continue
        calls[name] = call
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for batch in range(max(2, count // BATCH) + 1):
            for name, call in calls.items():
                _wait(device)
                taken = []
                for _ in range(BATCH):
                    start = time.perf_counter_ns()
                    call()
                    taken.append((time.perf_counter_ns() - start) / 1e3)
                if batch:  # the first batch warms up
                    times[name] += taken
    _wait(device)
    rows = []
    for name in calls:
        plan = plan_of(problem, device, FORWARD) if name in record.OWN else None
        row = {"problem": str(problem), "pass": "host", "who": name, "plan": plan, "checked": True, "samples": len(times[name])}
        row |= {"us": record.figures(statistics.median(times[name])), "us_min": record.figures(min(times[name]))}
        rows.append({**row, **facts})
    return rows, failures


def bare_call(name: str, problem: Problem, operands: Operands):
    """The public call and nothing around it. SDPA gets views of the same storage in its own layout."""
    causal = problem.band == CAUSAL
    special = (
        problem.packed or not problem.plain or problem.band not in (Band(), CAUSAL) or problem.scale != problem.dim_qk**-0.5
    )
    if special or (causal and problem.len_q != problem.len_k):
        raise baselines.Refused("host time is for dense calls, full or square causal: what every peer takes as it is")
    q, k, v = operands[:3]
    if name == "rowmax":
        return functools.partial(rowmax.attention, q, k, v, causal=causal)
    if name == "prepared":
        return rowmax.prepare(q, k, v, causal=causal)
    if name == "sdpa":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        grouped = problem.heads_q != problem.heads_k
        return functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=grouped)
    return functools.partial(baselines.build(name, problem, operands), q, k, v)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
