"""Every tile of the plan compiled for every GPU generation, without one: no spills, fits the chip, uses its tensor cores.

Compilation runs in processes of their own, since this one interprets Triton, of several builds each, since a process takes
longer to start than most kernels to compile. Nothing is cached between runs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rowmax import Device

pytest.importorskip("triton")
if not (Path(__import__("triton").__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump").is_file():
    pytest.skip("this Triton comes without cuobjdump", allow_module_level=True)

# Bytes of stack that a kernel may take, and why it is not 0. Grouped heads: one register, set for the descriptors and used
# again by the reduction at the end, is stored before the loops and loaded after them.
# A bias: `_HOPPER_PAIRS` in `plan/portable.py` says what else was tried.
STACK = {
    ("H200", "d128 fp16", "backward", "key"): 8,
    ("H200", "d128 bf16 causal bias(hqk)", "backward", "key"): 24,
}

TOOL = Path(__file__).with_name("compile_only.py")
GPUS, WAYS = ("A100", "L4", "H200", "B200"), ("forward", "backward")
LARGE, SMALL = "b4 h32/8 q1024 k1024", "b1 h2 q64 k1024"
# (device, sizes, structure, direction): every row of the plan's tile tables, and on one GPU every structure.
BUILDS = [(name, LARGE, f"d{dim} bf16 causal", way) for dim in (64, 128, 256) for name in GPUS for way in WAYS]
BUILDS += [(name, SMALL, f"d{dim} bf16 causal", "forward") for dim in (64, 128) for name in GPUS]
BUILDS += [("A100", LARGE, f"d{dim} fp32", "forward") for dim in (64, 256)]
BUILDS += [("A100", LARGE, "d64 fp32", "backward")]  # larger ones take minutes to compile
STRUCTURES = ["d40/24 fp16", "d41/23 bf16 causal", "d128 fp16", "d128 bf16 window(256,9)", "d128 bf16 causal packed"]
STRUCTURES += ["d96/72 bf16 window(256,inf) packed"]
STRUCTURES += ["d128 bf16 causal softcap=30.0", "d128 bf16 causal alibi(batch) sink"]
STRUCTURES += ["d128 bf16 causal bias(hqk)", "d128 bf16 causal packed dropout=0.1", "d128 bf16 causal mod(distance)"]
BUILDS += [("H200", LARGE, structure, way) for structure in STRUCTURES for way in WAYS]
BUILDS += [("H200", LARGE, "d128 bf16 packed window(256,9) sink_tokens=4 prefix=64 chunk=512", "backward")]
BUILDS += [("H200", "b1 h2/1 q1 k100", "d32 fp16 causal alibi", "backward")]  # lengths of 1 as constants: ptxas crashed
OTHERS = [("H200", LARGE, structure, way) for structure in ("d40/24 fp16", "d128 bf16 causal mod(distance)") for way in WAYS]
OTHERS += [("H200", LARGE, structure, "backward") for structure in ("d41/23 bf16 causal", "d128 fp16")]
OTHERS += [(name, SMALL, f"d{dim} bf16 causal", "forward") for dim in (64, 128) for name in ("A100", "L4", "B200")]
OTHERS += [("A100", LARGE, f"d{dim} fp32", "forward") for dim in (128, 256)]
OF_ONE = [
    [build for build in BUILDS if (build[0], build[3]) == (name, way) and build not in OTHERS] for name in GPUS for way in WAYS
]
AT_ONCE = 7  # builds of one process
GROUPS = {
    f"{some[0][0]} {some[0][3]} {i // AT_ONCE}": some[i : i + AT_ONCE] for some in OF_ONE for i in range(0, len(some), AT_ONCE)
}


def compile_only(*arguments, cache: Path) -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, arguments))} does not compile:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("group", [*GROUPS, pytest.param("others", marks=pytest.mark.thorough)])
def test_no_spills_and_within_the_chip(group, tmp_path):
    mine = GROUPS.get(group, OTHERS)
    words = [word for device, sizes, structure, way in mine for word in (device, f"{sizes} {structure}", way, "--")]
    found = compile_only(*words[:-1], cache=tmp_path)
    assert {kernel["build"] for kernel in found} == set(range(len(mine)))
    for kernel in found:
        device, _, structure, direction = build = mine[kernel["build"]]
        gpu = Device.named(device)
        said = f"{build}: {kernel}"
        assert gpu.capability[0] != 9 or not kernel["uninitialised"], f"ptxas reads registers that were never written: {said}"
        assert kernel["shared"] <= gpu.shared_bytes, f"more shared memory than a block may take: {said}"
        if "fp32" in structure:  # IEEE products run on the FMA units, whose operands are registers: every tile spills
            continue
        allowed = STACK.get((device, structure, direction, kernel["kernel"]), 0)
        assert kernel["stack"] <= allowed, f"registers spill: {said}"
        if kernel["kernel"] == "row":
            continue
        if gpu.capability[0] == 9:
            assert kernel["HGMMA"] > 0, f"Hopper's tensor core instruction is missing: {said}"
        if gpu.capability[0] == 8:
            assert kernel["HMMA"] > 0, f"no tensor core instruction: {said}"


def test_numbers_of_a_call_do_not_ask_for_builds(tmp_path):
    """Lengths, batches and windows are run-time numbers; what remains is whether each is 1 or divisible by 16,
    and which of two tiles the plan takes."""
    (found,) = compile_only("builds", cache=tmp_path)
    assert found["problems"] == 200
    for kernel, count in found["builds"].items():
        assert count <= 32, f"{count} builds of {kernel} for 100 problems that differ in numbers alone"
