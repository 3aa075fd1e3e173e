"""Fits the constants of the model of `rowmax explain` to measured times, and says how well those fit that it did not see.

    python benchmarks/fit.py                            # prints the constants, and errors on both parts of the rows
    python benchmarks/fit.py --free sync edge --rounds 4

Rows: those of `generations.py` drawn with other seeds than the one that is reported, forward rows of `run.py` on an H200,
single kernels as ncu times them (`counters.py`: its list of shapes, and what it drew with another seed), and decoding over a
dense cache with every number of parts (`decode.py --sweep`, the tiles that plans take). Two thirds, by a
checksum of the spelling of problem and plan, are fitted to; the others are held out. What is made small is the sum of log
errors, square near 0 and linear far from it, so that one row that is wrong does not bend the rest. One constant after another
is moved, by a factor that shrinks.

Free are all constants of the forward but three that are set; `--backward` fits those of the backward to the half of its rows
that test_predict_others.py says. Row kinds: "older" are rows of `run.py`, timed without a pause before each call, when the card
is warmer; "kernel" are single ones; "replay" are graphs.
"""

import argparse
import json
import math
import statistics
import sys
import zlib
from typing import NamedTuple

import generations
import record
from rowmax import Device, PagedProblem, Plan, Unsupported
from rowmax.analysis.cost import sequences
from rowmax.analysis.launches import Launch, launches
from rowmax.analysis.launches_backward import launches as launches_backward
from rowmax.analysis.predict import Constants, _Model
from rowmax.device import Rates
from rowmax.problem import Problem
from shapes import BACKWARD, FORWARD

# Errors that are worth the same, by kind; others 0.12.
NEAR = dict.fromkeys(("q_outer", "hopper", "split_kv", "split_kv replay", "backward"), 0.07)
LEAST_MS = 0.05  # of rows of run.py: below, the host was in the way; and of kernels under ncu
HOST_BOUND = 1.3  # as test_predict_others.py
FURTHEST = 3  # steps in a row
FIXED = ("clock", "throttle", "barrier")  # set, the first two by what ncu counts
LATEST, BACKWARD_LATEST = "2026-11-30T12", "2026-11-30T06"  # rows there were; later ones change nothing that is documented


# Of the first file only the list of shapes: what else it has was drawn as what is reported. Of the others what was drawn.
COUNTED = {"h200-2026-11-30.json": True, "h200-2026-11-30-second.json": False, "h200-2026-11-30-seed6.json": False}
REPLAY_S = 2e-6  # more between two events around a graph than around its kernels; a matter of measuring, not of the model
REPLAYED = ("16x64 w4 s3", "16x64 w2 s3")


class Row(NamedTuple):
    key: str
    kind: str
    kernels: list[Launch]
    seconds: float
    alone: bool  # a kernel under ncu

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.key.encode()) % 3 == 0


def rows_of(gpu: str = "H200") -> list[Row]:
    """All rows of the forward."""
    device = Device.named(gpu)
    rates, found = Rates.of(device), {}
    for path in sorted((record.RESULTS / "generations").glob("h200-*-fit.json")):
        for row in json.loads(path.read_text()):
            if row["date"] < LATEST:
                found.setdefault((row["problem"], row["plan"]), []).append(row["ms"])
    older: dict = {}
    for path in sorted(record.RESULTS.glob("h200-*.json")):
        for row in json.loads(path.read_text()):
            if row["pass"] == FORWARD and row["who"] == "rowmax" and row["ms"] >= LEAST_MS and row["date"] < LATEST:
                older.setdefault((row["problem"], row["plan"]), []).append(row["ms"])
    rows = []
    for (text, plan), times in {**older, **found}.items():
        problem = Problem.parse(text)
        kernels = _kernels(problem, device, rates, plan, generations.lengths_of(problem))
        if kernels:
            kind = plan.split("[")[0] + " older" * ((text, plan) not in found)
            rows.append(Row(f"{text} {plan}", kind, kernels, statistics.median(times) / 1e3, False))
    for name, asked in COUNTED.items():
        document = json.loads((record.RESULTS / "counters" / name).read_text())
        for row in document["rows"]:
            if row["bytes_asked"] == asked:
                rows += _single(row, device, rates, LEAST_MS if asked else 0.0)
    dense = (row for cache, tile, row in replays(device, rates) if cache == "dense" and tile.startswith(REPLAYED))
    return [*rows, *dense]


def replays(device: Device, rates: Rates, begin: str = "", end: str = LATEST) -> list[tuple[str, str, Row]]:
    """`(cache, tile, row)` of decoding, dense and over pages: a graph replayed between two events. Of files from between two
    moments."""
    found = []
    for path in sorted((record.RESULTS / "decode").glob("sweep-h200-*.json")):
        document = json.loads(path.read_text())
        for row in document["rows"] if begin <= document["date"] < end else []:
            cache, _, tile = row["who"].partition(" [")
            if cache == "dense":
                problem = Problem.parse(row["problem"])
            elif cache.startswith("paged"):
                problem = PagedProblem.parse(f"{row['problem']} causal {cache}")
            elif cache.startswith("8 bits"):
                problem = PagedProblem.parse(row["problem"].removesuffix(cache))
            else:  # parts of a fixed size, which are chosen for other reasons than time; latent attention
                continue
            plan = f"split_kv[{tile}"
            kernels = _kernels(problem, device, rates, plan, None)
            found.append(
                (cache, tile, Row(f"{row['problem']} {plan}", "split_kv replay", kernels, row["replay_us"] / 1e6, False))
            )
    return found


def _single(row: dict, device: Device, rates: Rates, least_ms: float) -> list[Row]:
    problem, found = Problem.parse(row["problem"]), []
    kernels = _kernels(problem, device, rates, row["plan"], None)
    for launch in kernels:
        names = (f"{launch.name}_kernel",)
        timed = [kernel for kernel in row["kernels"] if kernel["kernel"] in names]
        if launch.name not in ("guard", "combine") and len(timed) == 1 and timed[0]["seconds"] * 1e3 >= least_ms:
            key = f"{row['problem']} {row['plan']}"
            found.append(Row(key, row["plan"].split("[")[0], [launch], timed[0]["seconds"], True))
    return found


def _kernels(problem: Problem, device: Device, rates: Rates, plan: str, lengths) -> list[Launch]:
    try:
        return launches(problem, device, rates, Plan.parse(plan), lengths)
    except (KeyError, Unsupported):
        return []


def backward_rows(gpu: str = "H200") -> list[Row]:
    """Medians of the latest run, of rows until the constants of the backward were fitted first."""
    device = Device.named(gpu)
    rates, found = Rates.of(device), {}
    for path in sorted(record.RESULTS.glob("h200-*.json")):
        for row in json.loads(path.read_text()):
            if row["pass"] != BACKWARD or row["who"] != "rowmax" or row["date"] >= BACKWARD_LATEST:
                continue
            if row["ms"] < HOST_BOUND * row["ms_min"]:
                found.setdefault((row["problem"], row["plan"]), {}).setdefault(row["run"], []).append(row["ms"])
    rows = []
    for (text, plan), runs in found.items():
        problem = Problem.parse(text)
        kernels = launches_backward(problem, device, rates, Plan.parse(plan), sequences(problem))
        key = "".join((text, plan))
        rows.append(Row(key, "backward", kernels, statistics.median(list(runs.values())[-1]) / 1e3, False))
    return rows


def error(row: Row, constants: Constants, device: Device, rates: Rates) -> float:
    """Predicted over measured, minus 1."""
    model = _Model(device, rates, constants)
    seconds = sum(map(model.counted, row.kernels)) if row.alone else model.seconds(row.kernels)
    return (seconds + REPLAY_S * row.kind.endswith("replay")) / row.seconds - 1


def loss(rows: list[Row], constants: Constants, device: Device, rates: Rates) -> list[float]:
    """Of each row."""
    found = []
    for row in rows:
        off = math.log(1 + error(row, constants, device, rates)) / NEAR.get(row.kind, 0.12)
        found.append(math.sqrt(1 + off * off) - 1)
    return found


def concerned(name: str, row: Row) -> bool:
    """Whether a row may change with a constant; the others need not be computed again."""
    persistent = any(launch.persistent for launch in row.kernels)
    if name in ("hopper", "hopper_edge", "hopper_mask", "begin"):
        return persistent
    if name in ("descriptor", "lookup"):
        return any(launch.descriptors if name == "descriptor" else launch.lookups for launch in row.kernels)
    if name in ("sync", "stream", "mask_share"):
        return not persistent
    if name in ("stream_join", "part"):
        return row.kind.startswith("split_kv")
    return name != "barrier" or row.kind == "warp_split"


def fit(rows: list[Row], free: tuple[str, ...], rounds: int, step: float, device: Device, rates: Rates) -> Constants:
    constants = Constants()
    best = loss(rows, constants, device, rates)
    for number in range(rounds):
        moved = False
        for name in free:
            places = [i for i, row in enumerate(rows) if concerned(name, row)]
            mine = [rows[i] for i in places]
            for factor in (step, 1 / step):
                for _ in range(FURTHEST):
                    tried = constants._replace(**{name: getattr(constants, name) * factor})
                    found = loss(mine, tried, device, rates)
                    if sum(found) >= sum(best[i] for i in places) - 1e-4:
                        break
                    constants, moved = tried, True
                    for i, one in zip(places, found, strict=True):
                        best[i] = one
        print({name: float(f"{getattr(constants, name):.4g}") for name in free}, file=sys.stderr)
        print(f"  round {number + 1}: step {step:.3f}, loss {sum(best) / len(best):.4f}", file=sys.stderr, flush=True)
        if not moved:
            step = math.sqrt(step)
            if step < 1.01:
                break
    return constants


def report(title: str, rows: list[Row], constants: Constants, device: Device, rates: Rates) -> None:
    print(f"{title:<12} {'rows':>5} {'median':>7} {'mean':>7} {'<=15%':>6} {'<=25%':>6} {'<=30%':>6} {'worst':>7}")
    kinds = sorted({row.kind + " kernel" * row.alone for row in rows})
    for kind in kinds:
        found = [error(row, constants, device, rates) for row in rows if row.kind + " kernel" * row.alone == kind]
        shares = " ".join(f"{sum(abs(one) <= most for one in found) / len(found):>6.0%}" for most in (0.15, 0.25, 0.30))
        middle = statistics.median(map(abs, found))
        print(
            f"{kind:<15} {len(found):>2} {middle:>7.1%} {statistics.mean(found):>+7.1%} {shares} {max(found, key=abs):>+7.0%}"
        )


def main(arguments: "list[str] | None" = None) -> int:
    options = _parser().parse_args(arguments)
    device = Device.named("H200")
    rates = Rates.of(device)
    rows = backward_rows() if options.backward else rows_of()
    if options.kinds:
        rows = [row for row in rows if row.kind in options.kinds]
    names = [name for name in Constants._fields if name.startswith("backward") == options.backward and name not in FIXED]
    free = tuple(options.free or names)
    half = 2 if options.backward else 3
    held = [row for row in rows if zlib.crc32(row.key.encode()) % half == (1 if options.backward else 0)]
    seen = [row for row in rows if row not in held]
    constants = fit(seen, free, options.rounds, options.step, device, rates) if options.rounds else Constants()
    for name in free:
        print(f"    {name}: float = {getattr(constants, name):.4g}")
    report("fitted to", seen, constants, device, rates)
    report("held out", held, constants, device, rates)
    if options.every:
        for row in sorted(rows, key=lambda row: error(row, constants, device, rates)):
            off = error(row, constants, device, rates)
            print(
                f"{off:+7.1%} {row.seconds * 1e3:9.4f} ms {'held' if row in held else '    '} {'ncu' * row.alone:<3} {row.key}"
            )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--free", nargs="+", metavar="CONSTANT", help="default: all of the direction")
    parser.add_argument("--kinds", nargs="+", metavar="ALGORITHM", help="only rows of these")
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="at most; 0: only report")
    parser.add_argument("--step", type=float, default=1.3, metavar="FACTOR", help="first factor")
    parser.add_argument("--backward", action="store_true", help="the constants of the backward")
    parser.add_argument("--every", action="store_true", help="print every row")
    return parser


if __name__ == "__main__":
    sys.exit(main())
