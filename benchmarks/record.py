"""Result rows: what a row holds, the facts of the machine it came from, and the file they go to.

A results file is a JSON list of flat objects, one a measurement; `broken` says what is wrong with one. Every script here
writes through `append`, which refuses a row that does not fit.
"""

import datetime
import json
import os
import platform
import secrets
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import rowmax
from rowmax.errors import ProblemError
from rowmax.problem import Problem

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OWN = ("rowmax", "prepared")  # prepared: by `rowmax.prepare`
PEERS = ("cudnn", "fa2", "fa3", "fa4", "flex", "sdpa")

_COMMON = {
    "run": str,  # rows timed side by side share it
    "problem": str,  # `str(Problem)`
    "pass": str,
    "who": str,
    "plan": (str, type(None)),  # ours only
    "checked": bool,
    "gpu": (str, type(None)),  # None: timed on the CPU
    "cpu": str,
    "threads": int,
    "date": str,  # UTC, ISO 8601
    "versions": dict,
    "commit": str,
}
_SPEED = {"ms": float, "ms_min": float, "samples": int, "tflops": float, "gb_per_s": float}  # ms: median
_BY_PASS = {
    "forward": _SPEED,
    "backward": _SPEED,
    "forward+backward": _SPEED,
    "decode": _SPEED,
    "training": {"ms": float, "ms_min": float, "samples": int, "tokens_per_s": float, "losses": list},  # of one step
    "memory": {"extra_peak_bytes": int, "dense_scores_bytes": int, "counted_by": str},
    "host": {"us": float, "us_min": float, "samples": int},  # us: median
}


def broken(row: dict) -> list[str]:
    """What keeps `row` from being a result; an empty list if nothing does."""
    if not isinstance(row, dict) or row.get("pass") not in _BY_PASS:
        return [f"'pass' must be one of {', '.join(_BY_PASS)}"]
    schema = {**_COMMON, **_BY_PASS[row["pass"]]}
    found = [f"'{key}' is missing" for key in schema if key not in row]
    found += [f"'{key}' is not part of a row" for key in row if key not in schema]
    if found:
        return found
    found = [f"'{key}' is {row[key]!r}" for key, kind in schema.items() if not isinstance(row[key], kind)]
    found += [f"'{key}' is {row[key]!r}, not a measurement" for key in schema if schema[key] is float and not row[key] > 0]
    if row["who"] not in (*OWN, *PEERS):
        found.append(f"'who' is {row['who']!r}")
    if (row["plan"] is not None) != (row["who"] in OWN):
        found.append("'plan' belongs to rowmax's rows, and to all of them")
    if row["checked"] is not True:
        found.append("'checked' must be true: a result that fails its check is not written")
    try:
        if str(Problem.parse(row["problem"])) != row["problem"]:
            found.append(f"'problem' is not in the one spelling, '{Problem.parse(row['problem'])}'")
    except ProblemError as error:
        found.append(f"'problem': {error}")
    return found


def figures(value: float) -> float:
    """As many digits as a timing has."""
    return float(f"{value:.6g}")


def append(path: Path, rows: list[dict]) -> None:
    """Adds rows to the list in `path`; the file is whole at every moment."""
    for row in rows:
        if wrong := broken(row):
            raise ValueError(f"not a result row: {'; '.join(wrong)}. Row: {row}")
    old = json.loads(path.read_text()) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".partial")
    scratch.write_text("[\n" + ",\n".join(json.dumps(row) for row in [*old, *rows]) + "\n]\n")
    scratch.replace(path)


def default_path(facts: dict) -> Path:
    """`results/<device>-<date>.json`."""
    device = facts["gpu"] or facts["cpu"]
    name = "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())
    return RESULTS / f"{name}-{facts['date'][:10]}.json"


def machine(device: torch.device) -> dict:
    """The facts every row of this process shares, `run` among them."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "run": f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}",
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "date": now.isoformat(timespec="seconds"),
        "versions": _versions(),
        "commit": _commit(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _versions() -> dict:
    found = {"rowmax": rowmax.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    for package, name in (("triton", "triton"), ("fa3-fwd", "fa3"), ("flash-attn-3", "fa3"), ("flash-attn-4", "fa4")):
        try:
            found[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """Of the sources that are timed, with `+changes` if they differ from it. $ROWMAX_COMMIT where there is no repository."""
    if commit := os.environ.get("ROWMAX_COMMIT"):
        return commit
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain", "--", "src") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()
