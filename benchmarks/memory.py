"""Peak memory that a forward and backward need beyond the inputs, the output and the gradients.

    python benchmarks/memory.py                      # 64k tokens, causal: dense scores alone would take 128 GiB
    python benchmarks/memory.py --problem "b1 h8 q4096 k4096 d64 bf16" --who rowmax,fa2

Counted from q, k, v and grad_out in place to the three gradients in hand: peak bytes minus those before, minus out, dq, dk and
dv. The log-sum-exp, dQ accumulators, workspaces and copies are therefore "extra". On a GPU the bytes are those of torch's
caching allocator; on a CPU those of the process's resident memory (Linux), which also counts what the C library keeps. The
gradients are checked before the row is written.
"""

import argparse
import contextlib
import ctypes
import gc
import sys
from pathlib import Path

import torch

import baselines
import record
from calls import device_of, make_call, make_operands, plan_of
from check import Check
from rowmax.analysis import workers
from rowmax.problem import Problem
from shapes import BOTH, LONG_CONTEXT

GIB = 2**30


def main(arguments: "list[str] | None" = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problem", default=str(LONG_CONTEXT))
    parser.add_argument("--who", default="rowmax,fa2")
    parser.add_argument("--plan", default="", help="force rowmax's plan")
    parser.add_argument("--device", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    device, problem = device_of(options.device), Problem.parse(options.problem)
    facts = record.machine(device)
    operands, grad_out = make_operands(problem, device, options.seed)
    check = Check(problem, operands, grad_out, seed=options.seed)
    dense = dense_scores_bytes(problem)
    print(f"'{problem}' forward+backward; the scores of a dense computation alone take {dense / GIB:.3g} GiB")
    failures = 0
    for name in options.who.split(","):
        try:
            call = make_call(name, problem, operands, grad_out, BOTH, plan=options.plan if name == "rowmax" else "")
            wrong = check.broken(call(), peer=name != "rowmax")  # also compiles, so that no compiler's buffer is counted
            extra, how = extra_peak_bytes(call, problem, device)
        except baselines.Refused as refused:
            print(f"  {name} not measured: {refused}", file=sys.stderr)
            continue
        except Exception as error:  # whatever a peer raises, out of memory among them
            print(f"  {name} raised {workers.brief(error)}", file=sys.stderr)
            failures += name == "rowmax"
            continue
        if wrong:
            failures += 1
            print(f"  {name} WRONG: {'; '.join(wrong)}", file=sys.stderr)
            continue
        plan = plan_of(problem, device, BOTH, options.plan) if name == "rowmax" else None
        row = {"problem": str(problem), "pass": "memory", "who": name, "plan": plan, "checked": True}
        row |= {"extra_peak_bytes": extra, "dense_scores_bytes": dense, "counted_by": how}
        record.append(options.out or record.default_path(facts), [{**row, **facts}])
        print(f"  {name:<7} {extra / GIB:.4g} GiB beyond inputs, output and gradients ({how})")
    return 1 if failures else 0


def dense_scores_bytes(problem: Problem) -> int:
    """One number per (query, key, head) in the inputs' type: what a dense computation keeps for its backward, at least."""
    return problem.batch * problem.heads_q * problem.len_q * problem.len_k * problem.dtype.itemsize


def extra_peak_bytes(call, problem: Problem, device: torch.device) -> tuple[int, str]:
    """`(bytes, what counted them)` of one `call`, which returns the gradients."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = call()
        torch.cuda.synchronize()
        peak, how = torch.cuda.max_memory_allocated(), "torch.cuda.max_memory_allocated"
    else:
        _reset_resident_peak()
        before = _resident("VmRSS")
        results = call()
        peak, how = _resident("VmHWM"), "resident memory"
    out_elements = torch.Size(problem.outputs()[0]).numel()
    results_bytes = sum(t.nbytes for t in results) + out_elements * problem.dtype.itemsize
    return max(0, peak - before - results_bytes), how


def _reset_resident_peak() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed goes back to the system, not into the next call for free
        Path("/proc/self/clear_refs").write_text("5")


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


if __name__ == "__main__":
    sys.exit(main())
