"""Tiles that `rowmax tune` measured, in a JSON file. They hold for the problems, spelled alike, and the device they were
measured with; `rowmax.plan` takes them before its own tables unless a plan is asked for.

The file is the one named by the environment variable ROWMAX_TUNED, where that is empty none, and where it is not set
`rowmax/tuned.json` in `$XDG_CACHE_HOME`, by default `~/.cache`: it can be deleted at any time. It is read once, at the first
plan for a GPU; what another process writes later is seen at the next start.

    {"rowmax_tuned": 1, "devices": {"NVIDIA H200": {"b1 h16 q16384 k16384 d128 bf16 causal": {"forward": {"tiles": ...}}}}}

A file that cannot be read is left out with a warning. An entry is left out, and the plan says why among its refusals, when it
was measured with another Triton or other kernels than those here (the code it compiles to was neither timed nor checked), or
when its tiles are none that its algorithm can run the problem with. Drivers and versions of torch do not matter.

An entry chooses among kernels that are all exact, but two tiles differ in the last bits. Processes that must agree bit by bit,
as the ranks of one job, need the same file, or ROWMAX_TUNED= in all of them. A `deterministic` problem has a spelling of its
own: tuning the plain one does not change its bits.
"""

import hashlib
import json
import os
import warnings
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional

from rowmax.device import Device
from rowmax.plan.hopper import triton_version
from rowmax.problem import Problem

VARIABLE = "ROWMAX_TUNED"
FORMAT = 1
KERNELS = Path(__file__).parent.parent / "kernels"


@dataclass(frozen=True)
class Entry:
    """Attributes:
    algorithm, tiles: the plan of one direction, spelled.
    tflops: reached with it; over visible pairs.
    table, table_tflops: the plan that the tables had for the problem, in the same run; 0.0 where it was wrong or did not run.
    date: year-month-day.
    triton, kernels: the version and the digest of the sources it was measured with.
    """

    algorithm: str
    tiles: tuple[str, ...]
    tflops: float
    table: str
    table_tflops: float
    date: str
    triton: str
    kernels: str

    def reason(self, device: Device) -> str:
        """As a plan gives it: what was measured, where and when."""
        head = f"tuned on {device.name} {self.date}: {figures(self.tflops)} TFLOP/s, "
        if self.table == f"{self.algorithm}[{', '.join(self.tiles)}]":
            return head + "the table's tile, which nothing tried there exceeds"
        return head + f"the table's {self.table} " + (figures(self.table_tflops) if self.table_tflops else "did not run")

    def stale(self) -> str:
        """Why it does not hold for what is installed here, or ""."""
        here = triton_version()
        if here and here != self.triton:  # without Triton nothing runs, and `rowmax explain` may still ask
            return f"measured with triton {self.triton}, here is {here}: run `rowmax tune` again"
        if self.kernels != kernels_digest():
            return "measured with other kernels than those of this version: run `rowmax tune` again"
        return ""

    @classmethod
    def read(cls, found) -> "Entry":
        """Raises ValueError: what is wrong with it."""
        if not isinstance(found, dict):
            raise ValueError("it is no object")
        kinds: dict = {"tiles": (list, "list"), "tflops": ((int, float), "number"), "table_tflops": ((int, float), "number")}
        values: dict[str, Any] = {field.name: found.get(field.name) for field in fields(cls)}
        for name, value in values.items():
            kind, word = kinds.get(name, (str, "text"))
            if not isinstance(value, kind):
                raise ValueError(f"its '{name}' is {value!r} and no {word}")
        if not all(isinstance(tile, str) for tile in found["tiles"]):
            raise ValueError("its 'tiles' are not all text")
        for name in ("tflops", "table_tflops"):
            if not values[name] < 1e9:
                raise ValueError(f"its '{name}' is no speed of any machine")
        return cls(**{**values, "tiles": tuple(found["tiles"])})


def location() -> Optional[Path]:
    """Where the file is, or would be; None: the user wants none."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rowmax" / "tuned.json"


def find(problem: Problem, device: Device, direction: str) -> tuple[Optional[Entry], str]:
    """`(entry, "")`, or `(None, why the one that is there does not hold)`, or `(None, "")`."""
    if device.kind != "cuda":
        return None, ""
    found = _devices()
    for key in (device.name, str(problem), direction):
        if not isinstance(found, dict) or key not in found:
            return None, ""
        found = found[key]
    try:
        entry = Entry.read(found)
    except ValueError as error:
        return None, f"the entry in {location()} cannot be read: {error}"
    stale = entry.stale()
    return (None, stale) if stale else (entry, "")


def save(path: Path, problem: Problem, device: Device, direction: str, entry: Entry) -> None:
    """Add an entry to the file, or replace the one that is there; readers see the file as it was or as it will be.

    Raises:
        ValueError: the file is there and is no file of tuned tiles. It is left as it is.
        OSError: it cannot be written.
    """
    devices = read(path)
    devices.setdefault(device.name, {}).setdefault(str(problem), {})[direction] = asdict(entry)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps({"rowmax_tuned": FORMAT, "devices": devices}, indent=1) + "\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read(path: Path) -> dict:
    """Device name -> problem -> direction -> what `Entry.read` takes; {} where there is no file.

    Raises:
        ValueError: it is no file of tuned tiles, or of another version.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(found, dict) or "rowmax_tuned" not in found:
        raise ValueError("it has no 'rowmax_tuned' and is no file of tuned tiles")
    if found["rowmax_tuned"] != FORMAT:
        raise ValueError(f"it is in format {found['rowmax_tuned']!r}; this version reads {FORMAT}")
    devices = found.get("devices")
    if not isinstance(devices, dict) or not all(
        isinstance(problems, dict) and all(isinstance(directions, dict) for directions in problems.values())
        for problems in devices.values()
    ):
        raise ValueError("its 'devices' are not name -> problem -> direction -> entry")
    return devices


@lru_cache(maxsize=1)
def _devices() -> dict:
    """The file's content, read once; {} with a warning where it cannot be."""
    path = None
    try:
        path = location()
        return {} if path is None else read(path)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: no home directory
        warnings.warn(f"tuned tiles in {path or 'the home directory'} are left out: {error}", RuntimeWarning, stacklevel=2)
        return {}


def forget() -> None:
    """Read the file again at the next question."""
    _devices.cache_clear()


@lru_cache(maxsize=1)
def kernels_digest() -> str:
    """Of the kernels' sources: an entry holds as long as they do."""
    digest = hashlib.sha256()
    for path in sorted(KERNELS.rglob("*.py")):
        digest.update(path.relative_to(KERNELS).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def figures(number: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
