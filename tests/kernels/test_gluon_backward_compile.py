"""The Hopper backward compiled without a GPU for every row of the plan's table and every structure, and its machine code read.

Run as a program, it prints what the builds need, a JSON line each; so does the test, in a process of its own, because this one
interprets Triton:

    python test_gluon_backward_compile.py "b4 h32/8 q1024 k1024 d128 bf16 causal" ["64x128 s3 backward"] ...
"""

import collections
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton.experimental.gluon")
from machine_code import TOOLS, compiled, inner_loops, instructions, successors

if not (TOOLS / "cuobjdump").is_file():
    pytest.skip("this Triton comes without cuobjdump", allow_module_level=True)

LARGE = "b4 h32/8 q1024 k1024"
# Head dimension and more -> (structure, tile): "" is the table's own.
BUILDS = {
    "64": [
        *[("d64 bf16", ""), ("d64 bf16 causal", ""), ("d64 fp16 window(256,9)", ""), ("d64 bf16 causal packed", "")],
        *[
            ("d24/40 bf16 window(9,inf) packed", ""),
            ("d64 bf16 causal", "128x128 s2 backward ordered"),
            ("d64 bf16 causal softcap=50.0", ""),
            ("d64 bf16 causal bias(hqk)", ""),
            ("d64 bf16 packed window(256,9) sink_tokens=4 chunk=300", ""),
            ("d64 bf16 causal dropout=0.1", "128x128 s2 backward"),
        ],
    ],
    "128": [
        *[("d128 bf16", ""), ("d128 bf16 causal", ""), ("d128 fp16 window(256,9)", ""), ("d128 bf16 causal packed", "")],
        *[("d96/64 bf16 causal", ""), ("d64/128 bf16 packed", ""), ("d128 bf16 causal scale=-0.1", "")],
        *[("d128 bf16 causal alibi", ""), ("d128 bf16 causal packed softcap=9.0", "64x128 s2 backward g64 ordered")],
        *[("d128 bf16 causal softcap=50.0", ""), ("d128 bf16 causal bias(hqk)", ""), ("d96 fp16 window(9,3) mask(bk)", "")],
        ("d128 bf16 packed window(256,9) sink_tokens=4 chunk=300", ""),
        ("d128 bf16 causal bias(hqk) dropout=0.1", "64x128 s2 backward"),
        ("d96 fp16 window(9,3) dropout=0.1", "64x128 s2 backward ordered"),
    ],
    "others": [
        ("d64 fp16 packed", "128x128 s2 backward"),
        ("d64 bf16 causal chunk=300", "128x128 s2 backward ordered"),
        ("d64 bf16 causal bias(hqk)", "128x128 s2 backward ordered"),
        ("d64 bf16 causal dropout=0.1", "128x128 s2 backward ordered"),
        ("d64 bf16 causal bias(hqk) dropout=0.1", "128x128 s2 backward"),
        *[("d128 bf16 packed", "64x128 s3 backward g8"), ("d128 bf16 causal packed", "64x128 s2 backward p2")],
        *[("d128 bf16 causal prefix=200", ""), ("d128 bf16 window(256,0) sink_tokens=4", "64x128 s2 backward g1024 ordered")],
        ("d128 bf16 causal bias(hqk)", "64x128 s2 backward ordered"),
        ("d128 bf16 causal dropout=0.1", "64x128 s2 backward"),
        ("d128 bf16 packed alibi dropout=0.1", "64x128 s2 backward"),
        ("d128 bf16 causal softcap=50.0 dropout=0.1", "64x128 s2 backward"),
    ],
}
# With 128 queries: numbers used outside loops, and in a turn with hidden keys one or two of each consumer. Without them
# it was slower: what frees the registers is dV multiplied later.
STACK, HIDDEN = 64, 3
# Of other scores, with 64 queries and with 128: the stack, and how often both consumers store to it in turns of some kind. With
# a cap and 128 queries the loop has 3,200 instructions, for turns with small arguments of tanh and with any.
SPARED = {"softcap": ((16, 0), (112, 28)), "alibi": ((8, 0), (STACK, HIDDEN)), "bias": ((8, 0), (STACK, HIDDEN))}
DRAWN = 72, 3  # where weights are dropped: addresses too, of which a turn of 860 instructions and more loads up to ten
KERNELS = ("prepare", "backward", "finish")
WHOLE = {"d64 bf16 causal", "d24/40 bf16 window(9,inf) packed", "d128 bf16 causal packed", "d96/64 bf16 causal"}
WHOLE |= {"d128 fp16 window(256,9)", "d64 fp16 packed", "d128 bf16 packed"}
MOST_GROUPS = 15  # WARPGROUP instructions of a consumer: ten times as many when its products wait for each other


@pytest.mark.slow
@pytest.mark.parametrize("dim", [*list(BUILDS)[:-1], pytest.param("others", marks=pytest.mark.thorough)])
def test_machine_code(dim, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    arguments = [word for structure, tile in BUILDS[dim] for word in (f"{LARGE} {structure}", tile)]
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == sum(len(_kernels(text, tile)) for text, tile in BUILDS[dim])
    for facts in found:
        assert facts["shared"] <= min(facts["planned"], 232_448), f"more shared memory than planned: {facts}"
        assert not facts["uninitialised"], f"registers are read that nobody wrote: {facts}"
        if facts["kernel"] == "finish":  # its last part normally does not run, and may spill
            continue
        ordered, wide = "ordered" in facts["tile"], facts["tile"].startswith("128x")
        kind = next((word for word in SPARED if word in facts["problem"] and facts["kernel"] == "backward"), "")
        most, spared = SPARED[kind][wide] if kind else (STACK * wide, HIDDEN * wide)
        if "dropout" in facts["problem"] and facts["kernel"] == "backward":
            most, spared = map(max, (most, spared), DRAWN)
        assert facts["stack"] <= max(most, 16 * ordered), f"registers spill: {facts}"
        assert facts["stored"] == 0, f"registers spill in every turn: {facts}"
        assert facts["stored_at_times"] <= spared, f"registers spill in turns of some kind: {facts}"
        assert facts["local"] == 0, f"registers spill: {facts}"
        if facts["kernel"] == "backward":
            assert facts["loops"] == 2, f"each consumer has one: {facts}"
            assert facts["HGMMA"] > 0, f"Hopper's tensor core instruction is missing: {facts}"
            assert facts["WARPGROUP"] <= MOST_GROUPS * 2, f"products wait for each other: {facts}"
            assert facts["UTMAREDG"] > 0, f"dQ is not added by TMA: {facts}"
            assert facts["waited"] == ordered, f"a sum counts before it is in memory: {facts}"


def _kernels(text: str, tile: str) -> tuple[str, ...]:
    """Those that are compiled: the other two are small, and differ less."""
    return KERNELS if text.removeprefix(f"{LARGE} ") in WHOLE and "ordered" not in tile else KERNELS[1:2]


def read(call) -> dict:
    needs, listing = compiled(call, (9, 0))
    code, labels = instructions(listing)
    counts = collections.Counter(name.split(".")[0] for _, name, _ in code)
    loops = inner_loops(code, labels, "HGMMA")
    stored = [_left_out(code, labels, first, last) for first, last in loops]
    names = ("HGMMA", "WARPGROUP", "UTMAREDG")
    needs |= {"stored": sum(s.count(False) for s in stored), "stored_at_times": sum(s.count(True) for s in stored)}
    needs |= {"loops": len(loops), "waited": _waited(code)}
    return {**needs, **{name: counts[name] for name in names}}


def _left_out(code, labels, first: int, last: int) -> list[bool]:
    """Of each store to the stack in a loop, whether a jump inside the loop passes over it."""
    jumps = [(i, target) for i in range(first, last) for target in successors(code, labels, i) if i + 1 < target <= last]
    stores = [i for i in range(first, last + 1) if code[i][1].startswith("STL")]
    return [any(start < i < target for start, target in jumps) for i in stores]


def _waited(code) -> bool:
    """Counters are raised, and each behind a wait for sums that is not one for reading alone, and a barrier of memory."""
    counters = [i for i, (_, name, _) in enumerate(code) if name.startswith("REDG")]
    needed = {"DEPBAR.LE", "CCTL.IVALL", "MEMBAR.ALL.GPU"}
    return bool(counters) and all(needed <= {name for _, name, _ in code[i - 14 : i]} for i in counters)


def main(*builds: str) -> None:
    import torch
    from compile_only import made_for

    from rowmax import Device, Problem
    from rowmax.kernels.backward_launch import hopper_backward_calls
    from rowmax.plan.hopper_backward import HopperBackwardTile, shared_bytes, tiles
    from rowmax.problem import Operands

    for text, tile_text in zip(builds[::2], builds[1::2], strict=True):
        problem = Problem.parse(text)
        tile = HopperBackwardTile.parse(tile_text) if tile_text else tiles(problem, Device.named("H200"))[0]
        out_shape, lse_shape = problem.outputs()
        lead = (problem.len_k,) if problem.packed else (problem.batch, problem.len_k)
        q = torch.empty(*out_shape[:-1], problem.dim_qk, dtype=problem.dtype)
        k, v = (torch.empty(*lead, problem.heads_k, dim, dtype=problem.dtype) for dim in (problem.dim_qk, problem.dim_v))
        cu = torch.zeros(problem.batch + 1, dtype=torch.int32) if problem.packed else None
        out, lse = torch.empty(out_shape, dtype=problem.dtype), torch.empty(lse_shape)
        slopes = torch.empty(problem.heads_q) if problem.alibi else None
        pairs = [
            made_for(problem, letters, dtype) for letters, dtype in ((problem.bias, problem.dtype), (problem.mask, torch.bool))
        ]
        seed = torch.empty(1, dtype=torch.int64) if problem.dropout else None
        operands = Operands(q, k, v, cu, cu, slopes, None, *pairs, seed)
        calls = hopper_backward_calls(problem, operands, tile, out, lse, out, lse, q, k, v)
        for name, call in zip(KERNELS, calls, strict=True):
            if name in _kernels(text, str(tile)):
                said = {"kernel": name, "problem": text, "tile": str(tile), "planned": shared_bytes(problem, tile)}
                print(json.dumps({**said, **read(call)}), flush=True)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(*arguments, *[""] * (len(arguments) % 2))
