"""The command line: what it prints, its exit codes, and what it must not import."""

import json
import subprocess
import sys

import pytest

import rowmax
from rowmax import Problem
from rowmax.mask import Band, visible_pairs

pytest.importorskip("typer")
from typer.testing import CliRunner

from rowmax.analysis import cost
from rowmax.cli import check
from rowmax.cli.app import app

PROBLEM = "b2 h32/8 q4096 k4096 d128 bf16 causal"


def invoke(*arguments: str):
    return CliRunner().invoke(app, arguments)


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run `code` in a fresh interpreter, outside Triton's interpreter mode."""
    import os

    keep = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**keep, **environment}, check=False)


def hide(*names: str) -> str:
    """Code that makes the modules look as if they were not installed."""
    return (
        "import sys\n"
        "class Hide:\n"
        "    def __init__(self, finder):\n"
        "        self.finder = finder\n"
        "    def find_spec(self, name, *rest):\n"
        f"        return None if name.partition('.')[0] in {names!r} else self.finder.find_spec(name, *rest)\n"
        "sys.meta_path[:] = map(Hide, sys.meta_path)\n"
    )


# ---- imports -------------------------------------------------------------------------------------------------------


def test_import_is_light():
    code = "import rowmax; print(sorted({'typer', 'rich', 'transformers'} & set(sys.modules)))"
    result = python(hide("triton") + code)  # torch.utils.flop_counter imports Triton where it is installed
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_dependencies(missing):
    result = python(hide(missing) + "from rowmax.__main__ import main; sys.exit(main())")
    assert result.returncode == 1
    assert result.stderr.splitlines() == [f"rowmax: the command line needs {missing}: pip install 'rowmax[cli]'"]


def test_explain_without_triton():
    code = f"from rowmax.__main__ import main; sys.argv = ['rowmax', 'explain', {PROBLEM!r}, '--gpu', 'H200']; main()"
    result = python(hide("triton") + code)
    assert result.returncode == 0, result.stderr
    assert "274.9 GFLOP" in result.stdout


def test_module_and_script_are_one():
    module = subprocess.run([sys.executable, "-m", "rowmax", "--help"], capture_output=True, text=True, timeout=120, check=True)
    assert module.stdout == invoke("--help").stdout or all(name in module.stdout for name in ("demo", "explain", "check"))
    assert "Usage: rowmax" in module.stdout


# ---- explain -------------------------------------------------------------------------------------------------------


def test_explain_text():
    result = invoke("explain", PROBLEM, "--gpu", "cpu")
    assert result.exit_code == 0
    assert f"{PROBLEM} on cpu" in result.stdout
    assert "forward: tiled" in result.stdout
    assert "not aten: row blocks" in result.stdout
    assert "not q_outer" not in result.stdout or "asked for" not in result.stdout


def test_explain_json():
    facts = json.loads(invoke("explain", PROBLEM, "--gpu", "cpu", "--json").stdout)
    pairs = 2 * 32 * visible_pairs(4096, 4096, Band(None, 0))
    forward, backward = facts["directions"]["forward"], facts["directions"]["backward"]
    assert Problem.parse(facts["problem"]) == Problem.parse(PROBLEM)
    assert facts["visible_pairs"] == pairs
    assert forward["plan"] == str(rowmax.plan(Problem.parse(PROBLEM), rowmax.Device.named("cpu")))
    assert forward["flops"] == 2 * pairs * 256
    assert backward["flops"] == 2.5 * forward["flops"]
    q = out = 2 * 4096 * 32 * 128 * 2
    assert forward["fewest_bytes"] == q + out + 2 * (q // 4)
    assert backward["fewest_bytes"] == 2 * (q + out + 2 * (q // 4)) + 2 * 4096 * 32 * 4


KEYS = {"problem", "device", "plan", "terms", "verdict", "predicted_ms", "measured_ms", "advice"}


def test_explain_json_keys():
    """Those that others may rely on, in every case: `docs/explain.md` names all of them."""
    from pathlib import Path

    documented = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
    for gpu in ("H200", "A100", "V100", "cpu"):
        found = json.loads(
            invoke("explain", PROBLEM, "--gpu", gpu, "--json", "--against", "kv_outer,dense[64x64 w4 s1]").stdout
        )
        assert set(found) >= KEYS
        assert all(f"`{key}`" in documented for key in found), [key for key in found if f"`{key}`" not in documented]
        assert set(found["against"]) == (set() if found["predicted_ms"] is None else {"kv_outer", "dense[64x64 w4 s1]"})
        for entry in [*found["against"].values(), *found["advice"], *found["what_if"], *found["launches"]]:
            assert all(f"`{key}`" in documented for key in entry)
        assert (found["predicted_ms"] is None) == bool(found["no_model"]) == (gpu == "V100")


def test_explain_says_what_holds_a_decode_back():
    pages = invoke("explain", "b4 h32/8 q1 k8192 d128 bf16 causal paged16", "--gpu", "H200").stdout
    assert "held back by HBM" in pages
    assert "backward: nothing runs it here" in pages
    on_cpu = invoke("explain", "b1 h8 q2048 k2048 d64 bf16 causal", "--gpu", "cpu").stdout
    assert "AMD EPYC" in on_cpu
    assert on_cpu.count("held back by") == 2
    assert "SM" not in on_cpu.split("forward")[1]
    printed = invoke("explain", "b1 h32/8 q1 k131072 d128 bf16", "--gpu", "H200", "--against", "q_outer,kv_outer").stdout
    assert "held back by HBM" in printed
    assert "one query over 131,072 keys makes 8 blocks for 132 SMs: keys split" in printed
    assert "against q_outer[" in printed
    assert "held back by parallelism" in printed


def test_explain_writes_a_page(tmp_path):
    path = tmp_path / "page.html"
    assert invoke("explain", PROBLEM, "--gpu", "H200", "--html", str(path)).exit_code == 0
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    for gpu, where, says in (
        ("V100", path, "nothing to draw"),
        ("cpu", path, "--gpu"),
        ("H200", tmp_path / "no" / "page.html", "cannot be written"),
    ):
        refused = invoke("explain", PROBLEM, "--gpu", gpu, "--html", str(where))
        assert refused.exit_code == 2
        assert says in refused.stderr


def test_explain_measures_here():
    found = json.loads(invoke("explain", "b1 h2 q64 k64 d16 fp32", "--json", "--measure").stdout)
    assert found["measured_ms"] > 0
    wrong = invoke("explain", PROBLEM, "--gpu", "L4", "--measure")
    assert wrong.exit_code == 2
    assert "leave --gpu out" in wrong.stderr


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_explain_of_a_model(phase):
    found = json.loads(invoke("explain", "--model", "meta-llama-3-8b", "--phase", phase, "--gpu", "H200", "--json").stdout)
    assert (
        found["problem"]
        == {"prefill": "b1 h32/8 q8192 k8192 d128 bf16 causal", "decode": "b8 h32/8 q1 k8192 d128 bf16 causal"}[phase]
    )
    assert found["verdict"] == {"prefill": "tensor", "decode": "HBM"}[phase]


def test_every_model_has_both_phases():
    from rowmax.analysis.models import MODELS, PHASES, problem
    from rowmax.analysis.predict import predict

    assert len(MODELS) >= 12
    for name in MODELS:
        for phase in PHASES:
            assert predict(problem(name, phase), rowmax.Device.named("H200")).seconds > 0
    assert invoke("explain", "--model", "gpt-9").exit_code == 2
    assert invoke("explain").exit_code == 2


def test_explain_in_python_is_that_of_the_shell():
    import torch

    q = torch.empty(2, 4096, 32, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 4096, 8, 128, dtype=torch.bfloat16, device="meta")
    found = rowmax.explain(q, k, k, causal=True, gpu="H200", against=["q_outer"])
    assert found == json.loads(invoke("explain", PROBLEM, "--gpu", "H200", "--json", "--against", "q_outer").stdout)
    with pytest.raises(rowmax.ProblemError, match="no device 'Z1'"):
        rowmax.explain(q, k, k, gpu="Z1")
    cu = torch.tensor([0, 90, 100], dtype=torch.int32)
    packed = torch.zeros(100, 4, 64, dtype=torch.float16)
    uneven = rowmax.explain(packed, packed, packed, cu, cu, causal=True, gpu="A100")
    assert [launch["turns"] for launch in uneven["launches"]] == [0, 4 * (2 + 1)]  # rows outside every sequence are 0


@pytest.mark.parametrize(
    "text",
    [
        "b3 h4/2 q100 k300 d64/32 fp32 window(10,0)",
        "b1 h2 q7 k5 d8 fp16 causal",
        "b4 h2 q10 k10 d8 fp64",
        "b0 h1 q3 k3 d4 fp32",
    ],
)
def test_work_is_that_of_a_count(text):
    """FLOPs and bytes from counting the visible pairs one by one."""
    from rowmax.reference import visible

    problem = Problem.parse(text)
    seen = visible(problem.len_q, problem.len_k, *problem.band)
    pairs = problem.batch * problem.heads_q * int(seen.sum())
    dims = problem.dim_qk + problem.dim_v
    assert cost.flops_of(problem, "forward") == 2 * pairs * dims
    element = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}[problem.dtype_name]
    keys, rows = problem.heads_k * int(seen.any(0).sum()), problem.heads_q * problem.len_q
    assert cost.bytes_of(problem, "forward") == problem.batch * element * dims * (keys + rows)


def test_explain_packed_says_what_it_assumes():
    facts = json.loads(invoke("explain", "b3 h1 q10 k10 d8 fp32 packed causal", "--gpu", "cpu", "--json").stdout)
    assert facts["assumes"] == "sequences of equal length"
    assert facts["visible_pairs"] == sum(n * (n + 1) // 2 for n in (3, 3, 4))


def test_explain_what_nothing_runs():
    result = invoke("explain", "b1 h1 q8 k8 d8 fp64", "--gpu", "H200")
    assert result.exit_code == 0
    assert "nothing runs it here" in result.stdout
    assert "not q_outer: fp64 runs on the CPU only" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("b2 h3 qq",), "'qq' is not part"), (("h3 q4 d4",), "lacks <dtype>"), ((PROBLEM, "--gpu", "Z1"), "no device 'Z1'")],
    ids=["word", "missing", "gpu"],
)
def test_explain_errors(arguments, says):
    result = invoke("explain", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output


# ---- lessons -------------------------------------------------------------------------------------------------------


def test_lessons_on_the_cpu():
    result = invoke("lessons", "b1 h2 q128 k128 d64 bf16 causal", "--device", "cpu", "--gpu", "H200")
    assert result.exit_code == 0, result.output
    printed = result.stdout.splitlines()
    counted = {
        line.split()[0]: line for line in printed[printed.index(next(one for one in printed if "counted" in one)) :] if line
    }
    assert set(counted) >= {"dense", "kv_outer", "q_outer", "hopper", "split_kv"}
    turns = {line.split()[3]: line.split()[6] for line in printed if line.startswith("warp_split[32x64 w2 s2")}
    assert (turns["rows]"], turns["columns]"], turns["late]"]) == ("2", "7", "4"), "barriers of a turn"
    assert any(line.startswith("kv_outer") and " 1.5x " in line for line in printed)  # Q: 3 tiles of 4 are seen, of 2 row tiles
    assert any(line.startswith("q_outer") and " 1x " in line for line in printed)


def test_lessons_refuse_what_they_cannot_count():
    result = invoke("lessons", "b1 h64 q8192 k8192 d64 bf16", "--device", "cpu")
    assert result.exit_code == 2
    assert "scores" in result.stderr
    assert invoke("lessons", "--gpu", "Z1", "--device", "cpu").exit_code == 2


# ---- check ---------------------------------------------------------------------------------------------------------

SMALL = ("b1 h2/1 q20 k20 d16 fp32 causal", "b2 h2 q30 k30 d8 bf16 packed")


def test_check_passes(capsys):
    assert check.run("cpu", SMALL) == 0
    printed = capsys.readouterr().out
    assert printed.count("right ") >= 2
    assert "all 2 are right" in printed


def test_check_of_a_problem():
    result = invoke("check", "b3 h2 q7 d8 bf16 packed causal sink", "b3 h4/2 q2 k29 d16 fp32 paged8", "--device", "cpu")
    assert result.exit_code == 0, result.stdout
    assert "b3 h2 q7 k7 d8 bf16 causal packed sink  tiled[" in result.stdout
    assert "normal: out 0." in result.stdout
    assert "dsink 0." in result.stdout
    assert "paged8  gathered[" in result.stdout
    assert "all 2 are right" in result.stdout
    refused = invoke("check", SMALL[1], "--plan", "hopper", "--device", "cpu")
    assert refused.exit_code == 2
    assert "hopper was asked for" in refused.stderr
    assert invoke("check", "b1 h1 q4 d8 bf16 causl").exit_code == 2


def test_check_fails(monkeypatch, capsys):
    """A wrong attention is found, named and exits 1."""
    from rowmax import testing

    def wrong(*arguments, **keywords):
        result = rowmax.attention(*arguments, **keywords)
        return (result[0] * 1.01, result[1]) if isinstance(result, tuple) else result * 1.01

    monkeypatch.setattr(testing, "attention", wrong)
    assert check.run("cpu", SMALL[:1]) == 1
    printed = capsys.readouterr().out
    assert "WRONG" in printed
    assert "1 of 1 problems are wrong" in printed


def test_no_gpu_is_said(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = invoke("check", "--device", "cuda")
    assert result.exit_code == 2
    assert "sees no CUDA GPU" in result.stderr
