"""The decode and combine kernels compiled for every GPU generation, without one: no spills, within the chip, keys in flight."""

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

TOOL = Path(__file__).with_name("compile_decode.py")
ONE, MANY = "b16 h32/8 q1 k8192", "b16 h32/8 q2048 k8192"
BUILDS = [f"H200: {ONE} d{dim} bf16 causal paged16" for dim in (64, 128, 256)]
BUILDS += [f"{gpu}: {ONE} d128 bf16 causal paged16" for gpu in ("A100", "B200")]
BUILDS += [f"{gpu}: {MANY} d128 bf16 causal packed paged16" for gpu in ("A100", "L4", "H200", "B200")]
BUILDS += [
    f"H200: {text}"
    for text in (
        "b1 h32/8 q1 k8192 d128 bf16",
        "b1 h32/8 q4 k8192 d128 bf16 causal",
        f"{ONE} d128 fp16 window(300,5) paged64",
        f"{MANY} d128 bf16 window(300,5) packed paged64",
        f"{MANY} d64 bf16 causal packed paged1",
        f"{MANY} d256 bf16 causal packed paged16",
        "b16 h128/1 q1 k8192 d576/512 bf16 causal paged64",
        "b16 h128/1 q4 k8192 d576/512 bf16 causal paged16",
        "b1 h32/8 q1 k8192 d128 bf16 softcap=50.0 sink",
        "b1 h32/8 q4 k8192 d128 bf16 causal alibi",
        f"{ONE} d128 bf16 causal paged16 e4m3",
        f"{ONE} d128 bf16 causal paged64 e4m3",
        "b16 h32/8 q4 k8192 d128 bf16 causal paged64 e4m3",
        "b1 h32/8 q1 k8192 d128 bf16 once",
        f"{ONE} d128 bf16 causal paged64 once",
    )
]
INVARIANT = [f"H200: {text} d128 bf16 causal {words} invariant" for text, words in ((ONE, "paged16"), (MANY, "packed paged16"))]
AT_ONCE = 8  # builds of one process
GROUPS = [BUILDS[i : i + AT_ONCE] for i in range(0, len(BUILDS), AT_ONCE)]
# Bytes that may spill. Latent attention in tiles of 64 rows: it takes 1285 us where tiles of 32, which spill nothing, take
# 2022. A batch-invariant prompt in tiles of 32: ten words, where tiles of 16 would read their keys twice as often.
SPILLED = {
    "H200: b16 h128/1 q1 k8192 d576/512 bf16 causal paged64": 256,
    f"H200: {MANY} d128 bf16 causal packed paged16 invariant": 40,
}


def binaries_of(builds: list[str], cache: Path) -> list[dict]:
    """No spills, within the chip, and keys in flight."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run([sys.executable, str(TOOL), *builds], capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    binaries = [json.loads(line) for line in done.stdout.splitlines()]
    for build in builds:
        gpu = Device.named(build.split(":")[0])
        found = [binary for binary in binaries if binary["build"] == build]
        decode = found[0]
        assert decode["kernel"] == "decode_kernel"
        for kernel in found:
            assert kernel["stack"] <= SPILLED.get(build, 0), f"registers spill: {kernel}"
            assert kernel["shared"] <= gpu.shared_bytes, f"more shared memory than a block may take: {kernel}"
            unwritten = gpu.capability[0] == 9 and kernel["uninitialised"]
            assert not unwritten, f"ptxas reads registers that were never written: {kernel}"
        assert decode["HMMA"] + decode["HGMMA"] + decode["UTCHMMA"] > 0, f"no tensor core instruction: {decode}"
        # Groups of asynchronous copies: those of a turn, and before the loop those of the turns that it is ahead.
        assert decode["LDGDEPBAR"] >= 4, f"the loop loads what it needs at once: {decode}"
    return binaries


@pytest.mark.slow
@pytest.mark.parametrize("builds", GROUPS, ids=lambda builds: builds[0])
def test_no_spills_and_keys_in_flight(builds, tmp_path):
    binaries_of(builds, tmp_path)


@pytest.mark.slow
def test_a_row_meets_its_keys_in_one_order_whatever_the_tile(tmp_path):
    """Of batch-invariant calls a token takes tiles of 16 rows and a prompt of 32: the same product, and warps side by side."""
    # The decode kernels:
    found = {binary["build"]: binary for binary in reversed(binaries_of(INVARIANT, tmp_path))}
    assert {build: binary["tile"].split("x")[0] for build, binary in found.items()} == dict(
        zip(INVARIANT, ("16", "32"), strict=True)
    )
    spreads = {tuple(binary["warps"]) for binary in found.values()}
    assert len(spreads) == 1, f"products differ: {spreads}"
    (spread,) = spreads
    assert len(spread) == 1, f"a kernel has more than one kind of product: {spread}"
    for text in ("versionMajor = 2,", "warpsPerCTA = [1, 4]", "instrShape = [16, 8]"):
        assert text in spread[0]
