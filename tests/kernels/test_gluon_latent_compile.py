"""Latent attention on Hopper compiled without a GPU, and its machine code read.

Run as a program, with problems and their tiles in turn, it prints a JSON line for each pair.
"""

import collections
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton.experimental.gluon")
from machine_code import TOOLS, compiled, inner_loops, instructions

if not (TOOLS / "cuobjdump").is_file():
    pytest.skip("this Triton comes without cuobjdump", allow_module_level=True)

BUILDS = (
    ("b128 h128/1 q1 k8192 d576/512 bf16 causal paged64", "64x64 w4 s8 p132"),
    ("b2 h64/1 q3 k8192 d576/512 fp16 causal paged128", "64x64 w4 s8 x1"),
)


@pytest.mark.slow
def test_machine_code(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, __file__, *(word for build in BUILDS for word in build)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(BUILDS)
    for facts in found:
        assert facts["shared"] <= 232_448, f"more shared memory than a block may take: {facts}"
        assert not facts["uninitialised"], f"registers are read that nobody wrote: {facts}"
        assert facts["stack"] <= 16, f"registers spill: {facts}"  # numbers of a program, outside of its loops
        assert facts["local"] == 0, f"an array in memory: {facts}"
        # Two warpgroups with 2 x 4 products of 128 columns, one with 36 of 64; 176 waits where products are awaited one by one.
        assert facts["WARPGROUP"] <= 20, f"products wait for each other: {facts}"
        assert sorted(loop["HGMMA"] for loop in facts["loops"]) == [8, 8, 36], f"other loops than were written: {facts}"
        assert all(loop["spills"] == 0 for loop in facts["loops"]), f"registers spill in a loop: {facts}"


def read(call) -> dict:
    needs, listing = compiled(call, (9, 0))
    code, labels = instructions(listing)
    counts = collections.Counter(name.split(".")[0] for _, name, _ in code)
    loops = []
    for start, end in inner_loops(code, labels, "HGMMA"):
        inside = collections.Counter(name.split(".")[0] for _, name, _ in code[start : end + 1])
        loops.append({"HGMMA": inside["HGMMA"], "spills": inside["STL"] + inside["LDL"], "barriers": inside["BAR"]})
    return {**needs, "WARPGROUP": counts["WARPGROUP"], "loops": loops}


def main(*builds: str) -> None:
    import torch

    from rowmax import PagedProblem
    from rowmax.kernels import decode_launch, latent_launch
    from rowmax.paged import PagedOperands
    from rowmax.plan.split_kv import SplitTile

    for text, spelled in zip(builds[::2], builds[1::2], strict=True):
        problem, tile = PagedProblem.parse(text), SplitTile.parse(spelled)
        out = torch.empty(problem.outputs()[0], dtype=problem.dtype)
        q = torch.empty(*out.shape[:-1], problem.dim_qk, dtype=problem.dtype)
        k = torch.empty(4, problem.page_size, 1, problem.dim_qk, dtype=problem.dtype)
        table = torch.zeros(problem.batch, problem.len_k // problem.page_size, dtype=torch.int32)
        lengths = torch.zeros(problem.batch, dtype=torch.int32)
        elements = decode_launch.part_elements(problem, tile)
        parts = torch.empty(elements) if elements else None
        work = torch.empty(latent_launch.programs_of(problem, tile) * latent_launch.FIELDS, dtype=torch.int64)
        operands = PagedOperands(q, k, k[..., : problem.dim_v], table, lengths)
        _, call, *_ = latent_launch.calls(problem, operands, tile, out, torch.empty(problem.outputs()[1]), parts, work)
        print(json.dumps({"problem": text, "tile": spelled, **read(call)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
