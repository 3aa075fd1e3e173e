"""Who may import whom, and that the package works where Triton is missing."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rowmax

PACKAGE = Path(rowmax.__file__).parent

# The first part of a module's name inside the package -> what it may import from the package, at the top of the file.
# A leading "*" stands for everything public: what a user of the package may import.
PUBLIC = {"api", "reference", "device", "errors", "mask", "plan", "problem", "__init__"}
ALLOWED = {
    "mask": set(),
    "numerics": set(),
    "errors": set(),
    "device": set(),
    "reference": set(),
    "problem": {"errors", "mask", "scores", "score_mod"},
    "score_mod": {"errors"},
    "scores": {"errors", "score_mod"},
    "padding": {"errors"},
    "arguments": {"errors", "mask", "score_mod"},
    "family": {"errors"},
    "prefixes": {"arguments", "errors"},
    "paged": {"arguments", "problem", "errors", "mask"},
    "plan": {"plan", "problem", "paged", "mask", "device", "errors", "numerics", "score_mod"},
    "cpu": {"cpu", "plan", "problem", "paged", "mask", "numerics", "errors", "score_mod"},
    "kernels": {"kernels", "plan", "problem", "paged", "mask", "numerics", "errors", "score_mod"},
    "analysis": {"analysis", "plan", "problem", "paged", "mask", "device", "numerics", "errors", "score_mod"},
    "ops": {"cpu", "plan", "problem", "mask", "device", "numerics", "errors"},
    "ops_scored": {"ops", "plan", "problem", "device"},
    "ops_masked": {"ops", "plan", "problem", "mask", "device"},
    "second_order": {"cpu", "plan", "problem", "mask", "numerics", "errors", "score_mod"},
    "ops_second": {"ops", "second_order", "problem", "mask"},
    "eager": {"arguments", "ops"},
    "ops_paged": {"arguments", "ops", "cpu", "plan", "problem", "paged", "device", "errors"},
    "serving": {"api", "arguments", "eager", "family", "ops", "ops_paged", "paged", "plan", "errors"},
    "api": {
        *("arguments", "eager", "family", "ops", "ops_masked", "ops_scored", "padding", "plan", "problem", "errors"),
        "score_mod",
    },
    "testing": {
        *("testing", "paged", "serving", "reference", "numerics", "api", "plan", "problem", "mask", "errors", "device"),
        "score_mod",
    },
    "flash_attn": {"arguments", "flash_attn", "paged", "serving", *PUBLIC},
    "flash_attn_3": {"arguments", "flash_attn", "flash_attn_3", *PUBLIC},
    "distributed": {"distributed", *PUBLIC},
    "integrations": {"integrations", "arguments", "family", "flash_attn", *PUBLIC},
    "cli": {"cli", "analysis", "testing", *PUBLIC},
    "__main__": {"cli"},
    "explain": {"api", "arguments", "family", "plan", "device", "errors", "score_mod"},
    "__init__": {*PUBLIC, "paged", "serving", "cache", "explain", "integrations", "score_mod"},
    "cache": {"serving", "arguments", "problem", "errors", "family"},
}
EXTRA = {"analysis/measure.py": {"testing"}, "analysis/calls.py": {"family"}, "cli/tune.py": {"ops"}}
ONLY_STANDARD_LIBRARY = {"mask", "numerics", "errors"}
ONLY_IN_KERNELS = {"triton"}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        yield str(relative), relative.parts[0].removesuffix(".py"), path


def imported(node) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        if node.module == "rowmax":
            return [f"rowmax.{alias.name}" for alias in node.names]
        return [node.module or ""]
    return []


def top_level(tree) -> list[str]:
    """Names imported when the module is loaded; not those inside functions or under TYPE_CHECKING."""
    names, waiting = [], list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        names += imported(node)
        waiting += list(ast.iter_child_nodes(node))
    return names


def owner(name: str) -> str:
    """The room of `rowmax.<room>...`; a name that is no module is one of the public names."""
    part = name.split(".")[1] if "." in name else "__init__"
    exists = (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()
    return part if exists else "__init__"


@pytest.mark.parametrize(("relative", "room", "path"), [pytest.param(*m, id=m[0]) for m in modules()])
def test_arrows(relative, room, path):
    tree = ast.parse(path.read_text())
    assert room in ALLOWED, f"{relative} belongs to no room of the table above"
    names = top_level(tree)
    inside = {owner(name) for name in names if name.split(".")[0] == "rowmax"}
    assert inside <= ALLOWED[room] | EXTRA.get(relative, set()), f"{relative} may not import {inside - ALLOWED[room]}"
    outside = {name.split(".")[0] for name in names} - {"rowmax"}
    if room in ONLY_STANDARD_LIBRARY:
        assert outside <= set(sys.stdlib_module_names), f"{relative} imports {outside}"
    anywhere = {name.split(".")[0] for node in ast.walk(tree) for name in imported(node)}
    if room != "kernels":
        assert not anywhere & ONLY_IN_KERNELS, f"{relative} imports Triton; only kernels/ may"
    if room == "analysis":
        kernels = [n for node in ast.walk(tree) for n in imported(node) if n.startswith("rowmax.kernels")]
        assert not kernels, f"{relative} imports {kernels}; the analysis launches nothing"


def test_the_table_is_tight():
    """A rule for a room that exists must not allow rooms that do not exist any more."""
    rooms = {room for _, room, _ in modules()} | {"distributed", "__main__", "cli", "analysis"}
    for room, allowed in ALLOWED.items():
        assert allowed <= rooms, f"{room} may import {allowed - rooms}, which is gone"


def fresh(code: str, **environment) -> subprocess.CompletedProcess:
    env = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET",)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**env, **environment})


WITHOUT_TRITON = "import sys; sys.modules['triton'] = None\n"  # importing it fails, and it cannot be found


def test_attention_runs_on_the_cpu_without_triton():
    done = fresh(
        WITHOUT_TRITON
        + """
import torch, rowmax
q = torch.randn(1, 5, 4, 16, requires_grad=True)
k = torch.randn(1, 7, 2, 16)
out, lse = rowmax.attention(q, k, k, causal=True, return_lse=True)
out.sum().backward()
assert out.shape == (1, 5, 4, 16) and q.grad.abs().sum() > 0
print("ran")
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ran"


def test_a_plan_for_a_gpu_needs_no_triton():
    done = fresh(
        WITHOUT_TRITON
        + """
from rowmax import Device, Problem, plan
print(plan(Problem.parse("b1 h8 q128 d64 bf16"), Device.named("H200")))
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("[")[0] in ("q_outer", "hopper"), done.stdout


def test_a_missing_triton_names_the_remedy():
    done = fresh(
        WITHOUT_TRITON
        + """
from rowmax import Unsupported, ops
try:
    ops.kernels()
except Unsupported as error:
    print(error)
"""
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'rowmax[triton]'" in done.stdout


@pytest.mark.skipif(not (PACKAGE / "__main__.py").is_file(), reason="the command line does not exist yet")
def test_explain_runs_without_triton():
    done = fresh(
        WITHOUT_TRITON
        + """
import runpy
sys.argv = ["rowmax", "explain", "b1 h8 q1024 k1024 d64 bf16 causal"]
runpy.run_module("rowmax", run_name="__main__")
"""
    )
    assert done.returncode == 0, done.stderr
    assert "q1024" in done.stdout


def test_importing_rowmax_imports_no_triton_of_its_own():
    """Torch may import Triton by itself; rowmax must not need to."""
    done = fresh("import rowmax, sys; print([m for m in sys.modules if m.startswith('rowmax.kernels')])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_every_module_begins_with_a_docstring():
    for relative, _, path in modules():
        text = path.read_text()
        assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{relative} does not say what it is for"
