"""`kv_outer` and `dense`: the case list in the interpreter, machine code for every GPU, and that nobody gets them unasked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cases
from rowmax import Device, Problem, Unsupported, attention, plan, testing
from rowmax.plan import resources

pytest.importorskip("triton")

NAMES = ("kv_outer", "dense")  # the third that runs by name only is Gluon: `test_warp_split.py`
PAIRS = 2**15  # scores that the interpreter finishes in a second
TOOL = Path(__file__).with_name("compile_only.py")
LARGE = "b4 h32/8 q1024 k1024"
BUILDS = [("A100", "d128 bf16 causal"), ("H200", "d128 bf16 window(256,9)"), ("H200", "d256 bf16 causal")]


def chosen() -> list:
    """Every tenth case, and of those with NaN or infinities every third: all of them take three minutes, and run on a GPU."""
    found = []
    for i, case in enumerate(cases.CASES):
        problem = case.problem
        lines = problem.heads_q * (1 if problem.packed else problem.batch)
        small = not case.large and problem.len_q * problem.len_k * lines <= PAIRS and case.family != "many keys"
        if small and i % (3 if case.family == "non-finite" else 10) == 0:
            found.append(case)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are not interpreted; run_gpu.py --backend runs them")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", chosen(), ids=lambda case: case.id)
def test_forward_case(case, name):
    problem = case.problem
    if problem.dtype == torch.float64 or not (problem.plain and problem.windowed) or (name == "dense" and problem.packed):
        with pytest.raises(Unsupported):
            cases.run(case._replace(backward=False), name, "cpu")
        return
    report = cases.run(case._replace(backward=False), name, "cpu")
    assert report.ok, str(report)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_q_outer(name):
    problem = Problem.parse("b1 h4/2 q40 k56 d64 fp16 causal")
    chosen = plan(problem, Device.named("H200"), direction="backward", prefer=name)
    assert chosen.algorithm == "q_outer"
    assert chosen.reason.startswith(f"{name} has no backward here, its gradients are q_outer's")
    if not torch.cuda.is_available():
        report = testing.check(problem, plan=f"{name}[16x32 w4 s2, 16x32 w4 s2, 32x16 w4 s2]")
        assert report.ok, str(report)


@pytest.mark.parametrize("device", ["A100", "H200", "B200"])
def test_only_for_who_asks(device):
    """Even where nothing else runs."""
    with pytest.raises(Unsupported) as refused:
        plan(Problem.parse("b1 h2 q64 k64 d64 fp64"), Device.named(device))
    assert set(NAMES) <= set(refused.value.refusals)
    problem = Problem.parse("b1 h2 q64 k64 d64 bf16")
    assert plan(problem, Device.named(device)).algorithm not in NAMES
    for name in NAMES:
        assert plan(problem, Device.named(device), prefer=name).algorithm == name


def test_refusals_teach():
    with pytest.raises(Unsupported, match="takes no packed sequences"):
        plan(Problem.parse("b2 h2 q64 k64 d64 bf16 packed"), Device.named("H200"), prefer="dense")
    with pytest.raises(Unsupported, match="fit in no GPU's memory"):
        plan(Problem.parse("b1 h32 q65536 k65536 d64 bf16"), Device.named("H200"), prefer="dense")
    with pytest.raises(Unsupported, match="by pointers"):
        plan(Problem.parse("b1 h2 q64 k64 d64 bf16"), Device.named("H200"), prefer="kv_outer[64x64 w4 s2 tma]")
    q = torch.zeros(1, 4, 2, 16, dtype=torch.float64)
    with pytest.raises(Unsupported, match="fp64 runs on the CPU only"):
        attention(q, q, q, plan="kv_outer")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_spills_and_within_the_chip(name, tmp_path):
    if not (Path(__import__("triton").__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump").is_file():
        pytest.skip("this Triton comes without cuobjdump")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    words = [word for device, structure in BUILDS for word in (device, f"{LARGE} {structure}", "forward", name, "--")]
    command = [sys.executable, str(TOOL), *words[:-1]]
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for number, (device, structure) in enumerate(BUILDS):
        kernels = [kernel for kernel in found if kernel["build"] == number]
        assert len(kernels) == {"kv_outer": 1, "dense": 3}[name]
        gpu, problem = Device.named(device), Problem.parse(f"{LARGE} {structure}")
        for kernel in kernels:
            assert kernel["stack"] == 0, f"registers spill: {kernel}"
            assert gpu.capability[0] != 9 or not kernel["uninitialised"], f"reads registers that were never written: {kernel}"
            assert kernel["shared"] <= gpu.shared_bytes, kernel
        (tile,) = plan(problem, gpu, prefer=name).tiles
        estimate = resources.shared_bytes(problem, gpu, name, tile)
        assert estimate <= max(kernel["shared"] for kernel in kernels), (
            "an estimate that refuses a tile must not exceed the truth"
        )
