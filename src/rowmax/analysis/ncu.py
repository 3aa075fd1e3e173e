"""What Nsight Compute (`ncu`) counts of plans, where it is and may read counters: for `rowmax lessons` and the benchmarks.

    python -m rowmax.analysis.ncu "PROBLEM" PLAN...     what ncu runs: each plan once, a marker kernel in front of each

ncu replays each kernel a few times with caches flushed and clocks as they are. Where it is missing, or may not read counters
(ERR_NVGPUCTRPERM), that is what is said.
"""

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Optional

import torch

from rowmax.analysis.cost import sequences
from rowmax.problem import Problem

MARKER = "spin_kernel"  # of torch.cuda._sleep: no kernel of ours is called so
PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu", "/usr/local/NVIDIA-Nsight-Compute*/ncu")
SECONDS = 120.0  # for all plans of a problem
# What is asked of ncu; of alternatives, whose names differ between chips, the first that it knows.
METRICS = {
    "seconds": ("gpu__time_duration.sum",),
    "read": ("dram__bytes_read.sum",),
    "written": ("dram__bytes_write.sum",),
    "l2_bytes": ("lts__t_bytes.sum",),
    "sms_busy": ("sm__cycles_active.avg.pct_of_peak_sustained_elapsed",),
    "tensor": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
    ),
    "exps": (
        "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_xu_cycles_active.avg.pct_of_peak_sustained_elapsed",
    ),
    "issue": ("sm__inst_issued.avg.pct_of_peak_sustained_elapsed", "sm__issue_active.avg.pct_of_peak_sustained_elapsed"),
    "waves": ("launch__waves_per_multiprocessor",),
}


def hbm_bytes(problem: Problem, plans: Sequence[str]) -> dict[str, float]:
    """Plan -> bytes that its kernels read from and wrote to HBM.

    Raises:
        ValueError: nothing was counted, and why: no ncu, no permission, or what ncu said.
    """
    ncu = find_ncu()
    if ncu is None:
        raise ValueError(f"no ncu on the path or at {', '.join(PLACES)}: Nsight Compute comes with the CUDA toolkit")
    wanted = known_metrics(ncu, ("read", "written"))
    command = [*command_of(ncu, wanted), sys.executable, "-m", "rowmax.analysis.ncu", str(problem), *plans]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise ValueError(f"ncu took over {SECONDS:.0f} s") from None
    found = by_job(kernels_of(done.stdout))
    if len(found) < len(plans):
        raise ValueError(f"ncu counted {len(found)} of {len(plans)} plans: {done.stderr.strip()[-200:]}")
    return {
        plan: sum(kernel.get("read", 0.0) + kernel.get("written", 0.0) for kernel in kernels)
        for plan, kernels in zip(plans, found, strict=False)
    }


def command_of(ncu: str, metrics: Sequence[str]) -> list[str]:
    """Its options; behind them comes what is run."""
    return [
        *(ncu, "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"),
        *("--clock-control", "none", "--cache-control", "all", "--target-processes", "application-only"),
        *("--metrics", ",".join(metrics)),
    ]


def once(call) -> None:
    """Under ncu: a call that was made before, behind a marker."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    torch.cuda._sleep(1000)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def find_ncu() -> Optional[str]:
    found = shutil.which("ncu") or shutil.which("nv-nsight-cu-cli")
    for pattern in () if found else PLACES:
        found = found or next(iter(sorted(map(str, Path("/").glob(pattern[1:])), reverse=True)), None)
    return found


def known_metrics(ncu: str, kinds: Iterable[str] = tuple(METRICS)) -> list[str]:
    """Of each kind in `METRICS` the first name that this chip has; those of launches need no counter."""
    listed = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, timeout=60).stdout
    names = {line.split()[0] for line in listed.splitlines() if line.strip()}
    chosen = []
    for alternatives in map(METRICS.__getitem__, kinds):
        own = (one for one in alternatives if not names or one.split(".")[0] in names or one.startswith("launch__"))
        chosen += [next(own, "")]
    return [one for one in chosen if one]


def kernels_of(text: str) -> list[dict]:
    """The rows of `ncu --csv --page raw --print-units base`: kernel name and numbers by the names of `METRICS`.

    Raises:
        ValueError: there is no table; what ncu said instead.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        said = [line for line in lines if line.startswith("==ERROR==") or "NVGPUCTRPERM" in line]
        raise ValueError(" ".join(said) or "ncu printed no table")
    table = csv.reader(line for line in lines[start:] if line.startswith('"'))
    head, units, *rows = table
    found = []
    for row in rows:
        values = dict(zip(head, row, strict=False))
        kernel: dict = {"kernel": values["Kernel Name"]}
        for name, alternatives in METRICS.items():
            metric = next((metric for metric in alternatives if metric in values), None)
            if metric is None:
                continue
            number = _number(values[metric])
            if number is not None:
                kernel[name] = number * _SCALE.get(units[head.index(metric)], 1.0)
        found.append(kernel)
    return found


_SCALE = {"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3, "%": 0.01} | {
    f"{prefix}byte": size for prefix, size in (("K", 1e3), ("M", 1e6), ("G", 1e9))
}


def _number(text: str) -> Optional[float]:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None  # "n/a"


def by_job(kernels: Iterable[dict]) -> list[list[dict]]:
    """Kernels behind each marker."""
    found: list[list[dict]] = []
    for kernel in kernels:
        if MARKER in kernel["kernel"]:
            found.append([])
        elif found:
            found[-1].append(kernel)
    return found


def main(text: str, plans: Sequence[str]) -> None:
    """Under ncu."""
    from rowmax import testing

    problem = Problem.parse(text)
    operands = testing.operands(problem, device="cuda", lengths=sequences(problem) if problem.packed else None)
    for plan in plans:

        def call(plan=plan):
            return testing.attend(problem, operands, plan, return_lse=False)

        call()  # compiled and loaded; not profiled
        once(call)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
