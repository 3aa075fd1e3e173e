"""The model of `rowmax explain` against the hardware's own counters, read by Nsight Compute (`ncu`).

    python benchmarks/counters.py --time-limit 60              # on a GPU where ncu may read counters
    python benchmarks/counters.py --only drawn --seed 8 --draw 50                     # verdicts alone, of another draw
    python benchmarks/counters.py --csv FILE --jobs FILE       # anywhere: what ncu printed, once more
    python benchmarks/counters.py --report FILE                # anywhere: the model of today beside counters in a results file

Two lists. HBM bytes of `kv_outer`, `q_outer` and `dense` at shapes whose tensors are much larger than the L2 cache: modelled
within 10% of dram__bytes is asked for. And problems drawn as in `generations.py` by the plan that runs: the model's verdict
beside the one that counters give, by the same rule (`rowmax.analysis.verdict`), which is to agree for 38 of 40. Agreement is
counted twice: of verdicts as they are, and with those that counters would give if a share were 0.05 larger or smaller.

ncu replays each kernel a few times with caches flushed and clocks as they are. One process runs all jobs, with a marker kernel
in front of each. Where ncu is missing or may not read counters (ERR_NVGPUCTRPERM), this says so and measures nothing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

import generations
import record
from calls import compile_ahead, device_of, make_call, make_operands
from rowmax import Device, Plan, Unsupported
from rowmax.analysis import workers
from rowmax.analysis.cost import bytes_of
from rowmax.analysis.ncu import PLACES, by_job, command_of, find_ncu, kernels_of, known_metrics, once
from rowmax.analysis.predict import Constants, predict
from rowmax.analysis.verdict import EMPTY_S, nearly, verdict_of
from rowmax.device import Rates
from rowmax.problem import Problem
from shapes import FORWARD

BYTES_OFF = 0.10
DENSE_BYTES = 7e9  # of scores and weights
DRAWN = 28  # with the list of bytes' own plans 40 problems


class Job(NamedTuple):
    problem: str
    plan: str
    bytes_asked: bool  # of the list whose bytes are compared


def byte_jobs() -> list[Job]:
    """Tensors of 130 MB and more each: what stays in a cache of 50 MB at the end is little beside it. `dense` takes fewer
    sequences, since ncu saves what a kernel writes, to run it again."""
    texts = (
        *("b16 h16 q4096 k4096 d64 bf16", "b16 h16 q4096 k4096 d64 bf16 causal", "b8 h16 q8192 k8192 d64 fp16 causal"),
        *("b16 h8 q4096 k4096 d128 bf16", "b8 h16 q4096 k4096 d128 bf16 causal", "b4 h16 q8192 k8192 d128 fp16"),
        *(
            "b16 h32/8 q2048 k2048 d128 bf16",
            "b8 h32/8 q4096 k4096 d128 bf16 causal",
            "b16 h16 q4096 k4096 d64 bf16 window(511,0)",
        ),
        *("b8 h8 q4096 k4096 d256 bf16", "b16 h16 q2048 k4096 d128 bf16 causal", "b32 h16 q2048 k2048 d64 bf16"),
    )
    found = []
    for problem in map(Problem.parse, texts):
        most = int(DENSE_BYTES // (6 * problem.heads_q * problem.len_q * problem.len_k))
        fewer = problem.with_(batch=max(min(problem.batch, most), 1))
        found += [Job(str(problem), name, True) for name in ("q_outer", "kv_outer")]
        found += [Job(str(fewer), "dense", True)]
    return found


def verdict_jobs(device: Device, number: int, seed: int) -> list[Job]:
    drawn = generations.draw(seed, number, device)
    return [Job(str(problem), plans[0], False) for problem, plans in drawn if not problem.packed]


# ---- what it means -----------------------------------------------------------------------------------------------------


def shares_of(kernels: list[dict], rates: Rates) -> dict[str, float]:
    """Shares of the time as `rowmax.analysis.verdict` has them, of the longest kernel. `launch` is of the call between events;
    the time around kernels, which ncu does not see, is the model's."""
    main = max(kernels, key=lambda kernel: kernel.get("seconds", 0.0))
    seconds = max(main.get("seconds", 0.0), 1e-9)
    constants, ours = Constants(), [kernel for kernel in kernels if "native" not in kernel["kernel"]]
    started = constants.launch_s + (len(ours) - 1) * constants.next_s
    working = sum(max(kernel.get("seconds", 0.0) - EMPTY_S, 0.0) for kernel in ours)
    moved = main.get("read", 0.0) + main.get("written", 0.0)
    return {
        "HBM": moved / seconds / (rates.hbm_bytes_per_s * rates.hbm_share),
        "parallelism": 1.0 - main.get("sms_busy", 1.0),
        "non-matmul": main.get("exps", 0.0),
        "tensor": main.get("tensor", 0.0),
        "launch": started / (started + working),
    }


def compared(jobs: list[Job], measured: list[list[dict]], device: Device) -> list[dict]:
    """A row for each job that ncu saw."""
    rows = []
    for job, kernels in zip(jobs, measured, strict=False):
        if not kernels:
            continue
        problem = Problem.parse(job.problem)
        prediction = predict(problem, device, Plan.parse(job.plan) if "[" in job.plan else job.plan)
        dram = sum(kernel.get("read", 0.0) + kernel.get("written", 0.0) for kernel in kernels)
        model = sum(launch.hbm_bytes for launch in prediction.launches)
        shares = shares_of(kernels, Rates.of(device))
        rows.append(
            {
                **{"problem": job.problem, "plan": str(prediction.plan), "bytes_asked": job.bytes_asked},
                **{"dram_bytes": round(dram), "model_bytes": round(model), "off": model / dram - 1 if dram else None},
                **{"least_bytes": bytes_of(problem, "forward"), "waves": prediction.waves},
                **{"verdict": verdict_of(shares), "nearly": sorted(nearly(shares)), "model_verdict": prediction.verdict},
                **{"shares": shares, "model_shares": prediction.shares},
                **{"gpu_ms": sum(kernel.get("seconds", 0.0) for kernel in kernels) * 1e3, "kernels": kernels},
            }
        )
    return rows


def report(rows: list[dict]) -> dict[str, int]:
    """Print the comparison; the counts."""
    for row in rows:
        shares = ", ".join(f"{name} {row['shares'][name]:.0%}/{row['model_shares'][name]:.0%}" for name in row["shares"])
        off = "" if row["off"] is None else f"{row['off']:+.0%}"
        agree = row["verdict"] if row["verdict"] == row["model_verdict"] else f"{row['verdict']}, model {row['model_verdict']}"
        agree += " (nearly)" * (row["verdict"] != row["model_verdict"] and row["model_verdict"] in row["nearly"])
        moved = f"{row['dram_bytes'] / 1e6:9.1f} MB, model {row['model_bytes'] / 1e6:9.1f} {off:>5}"
        print(f"{row['problem']:<48} {row['plan'].split('[')[0]:<9} {moved}  {agree}: {shares}")
    sized = [row for row in rows if row["bytes_asked"] and row["off"] is not None]
    drawn = [row for row in rows if not row["bytes_asked"]]
    counts = {
        **{"bytes_near": sum(abs(row["off"]) <= BYTES_OFF for row in sized), "bytes_of": len(sized)},
        **{"verdicts_agree": sum(row["verdict"] == row["model_verdict"] for row in rows)},
        **{"verdicts_nearly": sum(row["model_verdict"] in row["nearly"] for row in rows), "verdicts_of": len(rows)},
        **{"drawn_agree": sum(row["verdict"] == row["model_verdict"] for row in drawn)},
        **{"drawn_nearly": sum(row["model_verdict"] in row["nearly"] for row in drawn), "drawn_of": len(drawn)},
    }
    print(f"HBM bytes within {BYTES_OFF:.0%}: {counts['bytes_near']} of {counts['bytes_of']}")
    for words, name in (("verdicts", "verdicts"), ("of these, of drawn problems", "drawn")):
        agree, near, number = (counts[f"{name}_{word}"] for word in ("agree", "nearly", "of"))
        print(f"{words}: {agree} of {number} agree, {near} with those that a share 0.05 off would give")
    return counts


# ---- measuring -----------------------------------------------------------------------------------------------------------


def child(path: Path, seconds: float) -> None:
    """Under ncu: every job once, a marker in front."""
    started, device = time.monotonic(), device_of()
    for job in (Job(*fields) for fields in json.loads(path.read_text())):
        if time.monotonic() - started > seconds:
            print("time limit", file=sys.stderr)
            break
        problem = Problem.parse(job.problem)
        operands, grad_out = make_operands(problem, device, seed=0)
        call = make_call("rowmax", problem, operands, grad_out, FORWARD, plan=job.plan)
        call()  # compiled and loaded; not profiled
        once(call)
        del operands, grad_out, call
        torch.cuda.empty_cache()


def profile(ncu: str, jobs: list[Job], seconds: float) -> str:
    """What ncu prints for the jobs, within about so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.json"
        path.write_text(json.dumps(jobs))
        command = [*command_of(ncu, known_metrics(ncu)), sys.executable, str(Path(__file__).resolve())]
        command += ["--child", str(path), "--time-limit", str(0.75 * seconds)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 20) + 30)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    return done.stdout


def main(arguments: "list[str] | None" = None) -> int:
    options = _parser().parse_args(arguments)
    if options.child:
        child(options.child, options.time_limit)
        return 0
    if options.report:
        known = json.loads(options.report.read_text())["rows"]
        jobs = [Job(row["problem"], row["plan"], row["bytes_asked"]) for row in known]
        report(compared(jobs, [row["kernels"] for row in known], Device.named(options.gpu)))
        return 0
    if options.csv:
        jobs = [Job(*fields) for fields in json.loads(options.jobs.read_text())]
        report(compared(jobs, by_job(kernels_of(options.csv.read_text())), Device.named(options.gpu)))
        return 0
    device, ncu = device_of(), find_ncu()
    if device.type != "cuda":
        print("no CUDA GPU here; --csv FILE --jobs FILE reads what ncu printed elsewhere", file=sys.stderr)
        return 1
    if ncu is None:
        print(f"no ncu on the path or at {', '.join(PLACES)}: Nsight Compute comes with the CUDA toolkit", file=sys.stderr)
        return 1
    started, here = time.monotonic(), Device.of(device)
    if options.problem:
        jobs = [Job(text, plan, True) for text in options.problem for plan in options.plan or [""]]
    else:
        jobs = verdict_jobs(here, options.draw, options.seed) if options.only != "bytes" else []
        jobs += byte_jobs() if options.only != "drawn" else []  # behind: time may end
    jobs = [job for job in jobs if _runs(job, here)]
    facts = record.machine(device)
    wanted = [
        {"problem": str(problem), "who": "rowmax", "which": FORWARD, "plan": plan, "device": str(device)}
        for problem, plans in generations._builds([(Problem.parse(job.problem), [job.plan]) for job in jobs], here)
        for plan in plans
    ]
    workers.run_all(compile_ahead, wanted, workers=16, job_seconds=60, total_seconds=0.4 * options.time_limit)
    print(f"compiled ahead in {time.monotonic() - started:.0f} s", file=sys.stderr)
    printed = profile(ncu, jobs, options.time_limit - (time.monotonic() - started))
    try:
        rows = compared(jobs, by_job(kernels_of(printed)), here)
    except ValueError as error:
        print(f"ncu measured nothing: {error}", file=sys.stderr)
        return 1
    counts = report(rows)
    out = options.out or record.RESULTS / "counters" / record.default_path(facts).name
    out.parent.mkdir(parents=True, exist_ok=True)
    found = {"what": "benchmarks/counters.py", "seed": options.seed, **facts, **counts, "rows": rows}
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(rows)} of {len(jobs)} jobs in {out}, {time.monotonic() - started:.0f} s")
    return 0


def _runs(job: Job, device: Device) -> bool:
    try:
        predict(Problem.parse(job.problem), device, job.plan)
    except (Unsupported, KeyError) as error:
        print(f"  not {job.plan} of '{job.problem}': {str(error).splitlines()[0]}", file=sys.stderr)
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--problem", action="append", default=[], metavar="SPELLING", help="instead of the two lists; repeatable"
    )
    parser.add_argument("--plan", action="append", default=[], help="with --problem, repeatable; default: the plan that runs")
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="S", help="start no job after about this long")
    parser.add_argument("--out", type=Path, help="default: results/counters/<device>-<date>.json")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="measure nothing; what ncu printed")
    parser.add_argument(
        "--jobs", type=Path, metavar="FILE", help="with --csv: [[problem, plan, whether bytes are compared], ...]"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="measure nothing; the model beside these counters")
    parser.add_argument("--gpu", default="H200", help="with --csv and --report: where it was measured")
    parser.add_argument("--seed", type=int, default=generations.REPORTED, help="of the draw")
    parser.add_argument("--only", choices=("drawn", "bytes"), help="one of the two lists")
    parser.add_argument("--draw", type=int, default=DRAWN, metavar="N", help="problems drawn; packed ones are left out")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
