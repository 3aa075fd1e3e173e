"""Faults of one line put into the real sources, each of which the suite must notice: what the tests of mutants share.

A copy of a room of the package (`kernels` or `cpu`) gets the patch and is imported in place of the room; the cases then run as
for anyone else. A patch that no longer applies fails, and so does a mutant that lives.

A patch is (file, old, new, how often old occurs); a mutant is one, or a list of them. A case is (spelling, kind of operands,
layout, lengths), as `rowmax.testing.check` takes them.
"""

import contextlib
import importlib
import os
import shutil
import sys
from pathlib import Path

import canaries
import pytest

import rowmax
from rowmax import Problem, ops, testing
from rowmax.plan import plan as choose

PACKAGE = Path(rowmax.__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the kernels are mutated in the interpreter")

# Small tiles, so that short lengths have several.
KERNEL_PLAN, CPU_PLAN = "q_outer[16x16 w4 s2, 16x16 w4 s2, 16x16 w4 s2]", "tiled[8x16, 8x16, 8x16]"

FORWARD, BACKWARD = "kernels/triton/forward.py", "kernels/triton/backward.py"
TILE, ADDRESS, LAUNCH = "kernels/tile_ops.py", "kernels/address.py", "kernels/launch.py"
CPU_FORWARD, CPU_BACKWARD = "cpu/forward.py", "cpu/backward.py"


def kill(mutants: dict, name: str, directory: Path, *trials) -> None:
    """The room of the mutant's files is replaced, and one of the trials, `(cases, plan)`, must notice."""
    patches = mutants[name] if isinstance(mutants[name], list) else [mutants[name]]
    with replaced(patches[0][0].split("/")[0], patches, directory):
        assert any(killed_by(cases, plan) for cases, plan in trials), f"the mutant '{name}' lives"


def live(*trials) -> None:
    """What is not mutated is content with every case."""
    for cases, plan in trials:
        assert killed_by(cases, plan) is None


@contextlib.contextmanager
def replaced(room: str, patches, directory: Path):
    """Inside, `rowmax.<room>` is a copy of itself with `patches`, a list of (file, old, new, count), applied."""
    shutil.copytree(PACKAGE / room, directory / room, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new, count in patches:
        path = directory / file
        text = path.read_text()
        assert text.count(old) == count, f"the patch of {file} no longer applies: {old!r} occurs {text.count(old)} times"
        path.write_text(text.replace(old, new))
    name = f"rowmax.{room}"
    original = {key: sys.modules.pop(key) for key in list(sys.modules) if key == name or key.startswith(name + ".")}
    attribute, cpu = getattr(rowmax, room, None), ops.cpu
    rowmax.__path__.insert(0, str(directory))
    importlib.invalidate_caches()
    ops.forget()
    try:
        copy = importlib.import_module(name)
        assert str(directory) in copy.__file__
        if room == "cpu":
            ops.cpu = copy
        else:  # a faulty kernel must not take this process down with it
            launch = importlib.import_module(f"{name}.launch")
            launch._launch = canaries.guarded(launch)
        yield
    finally:
        rowmax.__path__.remove(str(directory))
        for key in [key for key in sys.modules if key == name or key.startswith(name + ".")]:
            del sys.modules[key]
        sys.modules.update(original)
        ops.cpu = cpu
        if attribute is not None:
            setattr(rowmax, room, attribute)
        choose.cache_clear()
        ops.forget()  # launches of the copy


def killed_by(cases, plan):
    """The first case that notices, and how; None if all are content."""
    for text, kind, layout, lengths in cases:
        try:
            report = testing.check(Problem.parse(text), kind, layout=layout, lengths=lengths, plan=plan)
        except Exception as error:
            return f"'{text}' {kind}: {type(error).__name__}"
        if not report.ok:
            return str(report)
    return None
