"""Small calls of every kernel under NVIDIA's compute-sanitizer: memory that is not ours, and races in shared memory.

    python tests/gpu_sanitizer.py [--tool memcheck --tool racecheck] [--job WORD] [--json FILE] [--time-limit 120]

A process first builds the kernels without the tool, several side by side; then each tool watches one process that runs all
calls with the caching allocator off, so that what lies beside a tensor belongs to nobody. Every call is also checked against
fp64. racecheck does not follow copies that the TMA unit makes behind mbarriers: what it says of the Gluon kernels is printed,
and read with that in mind. Exit status 1 for any error of memcheck or a wrong result.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent / "benchmarks")]

TOOLS = ("memcheck", "racecheck")
# (problem, the plan's algorithm): odd lengths, groups, both masks' sides, packed and empty sequences, all three kinds of dims.
CALLS = (
    ("b1 h2/1 q200 k313 d64 bf16 causal", "q_outer"),
    ("b3 h2 q150 k190 d40/24 fp16 packed causal", "q_outer"),
    ("b1 h2/1 q450 k513 d64 bf16 causal", "hopper"),
    ("b1 h2 q400 k390 d128 bf16 window(100,17)", "hopper"),
    ("b3 h4/2 q1300 k1250 d128 fp16 packed causal", "hopper"),
    ("b1 h2 q400 k411 d256 bf16 causal", "hopper"),
    ("b1 h2/1 q400 k410 d128 bf16 causal bias(hqk)", "hopper"),
    ("b2 h2 q400 k410 d64 fp16 mask(bk)", "hopper"),
    ("b2 h8/2 q1 k777 d128 bf16 causal", "split_kv"),
    ("b1 h1 q70 k90 d64 bf16 causal", "kv_outer"),
    ("b1 h1 q70 k90 d64 bf16", "dense"),
    ("b1 h1 q70 k90 d64 bf16 causal", "warp_split"),
)
CHECKS = ("lies_of_paged_calls_touch_nothing_outside", "lies_in_cu_seqlens_touch_nothing_outside")


def attend(text: str, algorithm: str) -> str:
    """One call, and its gradients where the plan has them; what is wrong, or nothing."""
    from rowmax import Device, Problem, Unsupported, plan, testing

    problem = Problem.parse(text)
    operands, given = testing.operands(problem, device="cuda"), testing.cotangents(problem, device="cuda")
    leaves = [tensor.detach().requires_grad_() for tensor in operands[:3]]
    out, lse = testing.attend(problem, operands._replace(q=leaves[0], k=leaves[1], v=leaves[2]), plan=algorithm)
    report = testing.check_forward(problem, operands, out.detach(), lse.detach())
    try:
        plan(problem, Device.of(operands.q.device), direction="backward", prefer=algorithm)
    except Unsupported:
        return "" if report.ok else str(report)
    import torch

    report = report.merged(testing.check_backward(problem, operands, torch.autograd.grad((out, lse), leaves, given), *given))
    return "" if report.ok else str(report)


def job(number: int) -> str:
    """Call or check `number` of both lists."""
    import torch

    if number < len(CALLS):
        said = attend(*CALLS[number])
    else:
        import gpu_checks

        said = gpu_checks.run_one(CHECKS[number - len(CALLS)])[1]
    torch.cuda.synchronize()
    return said


def name_of(number: int) -> str:
    return " ".join(CALLS[number]) if number < len(CALLS) else CHECKS[number - len(CALLS)]


def watched(tool: str, words: list[str], seconds: float) -> dict:
    """The jobs with one of `words` in their name, or all, in one process under the tool."""
    command = [find(), "--tool", tool, "--print-limit", "8", sys.executable, str(Path(__file__).resolve()), "--child"]
    command += [part for word in words for part in ("--job", word)]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
        printed, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        printed, status = "".join(part.decode() for part in (late.stdout, late.stderr) if part), -1
    lines = printed.splitlines()
    found = {
        "tool": tool,
        "status": status,
        "seconds": round(time.monotonic() - started, 1),
        "finished": [line.split(" ", 1)[1] for line in lines if line.startswith("finished ")],
        "wrong": [line for line in lines if line.startswith("wrong ")],
        "summary": [line.strip("= ") for line in lines if "SUMMARY" in line],
        "kinds": sorted({re.sub(r"0x[0-9a-f]+|\d+", "#", line.strip("= "))[:160] for line in lines if _is_kind(line)})[:40],
    }
    print(f"{tool}: {len(found['finished'])} jobs, {found['summary']}, {found['seconds']} s")
    for line in (*found["wrong"], *found["kinds"]):
        print("  " + line)
    return found


def _is_kind(line: str) -> bool:
    return line.startswith("=========") and any(word in line for word in ("Invalid", "Error:", "hazard", "Warning:", "kernel"))


def find() -> str:
    return shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", action="append", choices=(*TOOLS, "synccheck", "initcheck"), help="repeatable; default: both")
    parser.add_argument("--job", action="append", default=[], metavar="WORD", help="jobs with it in their name; repeatable")
    parser.add_argument("--json", type=Path, help="write what was found")
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="S", help="of each tool")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    numbers = [n for n in range(len(CALLS) + len(CHECKS)) if not options.job or any(word in name_of(n) for word in options.job)]
    if options.child:
        for number in numbers:
            said = job(number)
            print(f"wrong {name_of(number)}: {said}" if said else f"finished {name_of(number)}", flush=True)
        return 0
    import record
    from rowmax.analysis import workers

    ahead = workers.run_all(job, [{"number": n} for n in numbers], workers=12, job_seconds=90, total_seconds=100)
    for number, outcome in enumerate(ahead):
        if outcome.error or outcome.value:
            print(f"without a tool, job {number}: {outcome.error or outcome.value}")
    found = [watched(tool, options.job, options.time_limit) for tool in options.tool or TOOLS]
    if options.json:
        import torch

        facts = record.machine(torch.device("cuda"))
        options.json.write_text(json.dumps({"what": "tests/gpu_sanitizer.py", **facts, "tools": found}, indent=1) + "\n")
    return 1 if any(map(failed, found)) else 0


def failed(found: dict) -> bool:
    """Is a result wrong, or was something found in memory that is not ours, or not all looked at?"""
    if found["tool"] != "memcheck":
        return bool(found["wrong"])
    return bool(found["wrong"]) or found["status"] != 0 or "ERROR SUMMARY: 0 errors" not in " ".join(found["summary"])


if __name__ == "__main__":
    sys.exit(main())
