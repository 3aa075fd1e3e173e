"""Every tile of the plan compiled for every GPU generation, without one: no spills, fits the chip, uses its tensor cores.

Compilation runs in two processes of their own, since this one interprets Triton. Nothing is cached between runs.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rowmax import Device

pytest.importorskip("triton")
if not (Path(__import__("triton").__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump").is_file():
    pytest.skip("this Triton comes without cuobjdump", allow_module_level=True)

# Bytes of stack that a kernel may take, and why it is not 0. dK of d256 on Hopper keeps loop invariants there; the tile that
# needs none (32x128 w8 s2) is 11% slower and misses the speed asked of the backward.
STACK = {("H200", 256, "backward", "key"): 72}

TOOL = Path(__file__).with_name("compile_only.py")
BUILDS = [
    (name, dim, way) for dim in (64, 128, 256) for name in ("A100", "L4", "H200", "B200") for way in ("forward", "backward")
]
PROCESSES = 2


def compile_only(*arguments, cache: Path) -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, arguments))} does not compile:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """(device, dim, direction) of the tests that will run -> facts of its kernels, or the error."""
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    wanted = {given["build"] for given in parameters if "build" in given}
    cache = tmp_path_factory.mktemp("triton")
    with ThreadPoolExecutor(PROCESSES) as pool:
        jobs = {build: pool.submit(compile_only, *build, cache=cache) for build in BUILDS if build in wanted}
    return jobs


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: "-".join(map(str, build)))
def test_no_spills_and_within_the_chip(compiled, build):
    device = Device.named(build[0])
    for kernel in compiled[build].result():
        said = f"{build}: {kernel}"
        assert kernel["stack"] <= STACK.get((*build, kernel["kernel"]), 0), f"registers spill: {said}"
        assert kernel["shared"] <= device.shared_bytes, f"more shared memory than a block may take: {said}"
        if kernel["kernel"] == "delta":
            continue
        if device.capability[0] == 9:
            assert kernel["HGMMA"] > 0, f"Hopper's tensor core instruction is missing: {said}"
        if device.capability[0] == 8:
            assert kernel["HMMA"] > 0, f"no tensor core instruction: {said}"


def test_numbers_of_a_call_do_not_ask_for_builds(tmp_path):
    """Lengths, batches and windows are run-time numbers; what remains is whether each is 1 or divisible by 16,
    and which of two tiles the plan takes."""
    (found,) = compile_only("builds", cache=tmp_path)
    assert found["problems"] == 200
    for kernel, count in found["builds"].items():
        assert count <= 32, f"{count} builds of {kernel} for 100 problems that differ in numbers alone"
