"""The Hopper forward compiled without a GPU for every row of the plan's table and every structure, and its machine code read.

Run as a program, it prints what the builds of one head dimension need, a JSON line each; so does the test, in a process of its
own, because this one interprets Triton:

    python test_gluon_compile.py "b4 h32/8 q1024 k1024 d128 bf16 causal" ["128x128 s2 q2 pingpong dynamic g8"] ...
"""

import collections
import json
import os
import re
import subprocess
import sys
from itertools import pairwise

import pytest

pytest.importorskip("triton.experimental.gluon")
from machine_code import TOOLS, compiled, inner_loops, instructions, uninitialised

if not (TOOLS / "cuobjdump").is_file():
    pytest.skip("this Triton comes without cuobjdump", allow_module_level=True)

LARGE = "b4 h32/8 q1024 k1024"
# Head dimension -> (structure, tile): "" is the plan's own.
BUILDS = {
    "64": [
        *[("d64 bf16", ""), ("d64 bf16 causal", ""), ("d64 fp16 window(256,9)", ""), ("d64 bf16 causal packed", "")],
        ("d64 bf16 packed softcap=30.0 alibi(batch) sink", ""),
        ("d64 bf16 causal bias(hqk)", ""),
        ("d64 fp16 packed window(256,9) dropout=0.1", ""),
    ],
    "128": [
        *[("d128 bf16", ""), ("d128 bf16 causal", ""), ("d128 fp16 window(256,9)", ""), ("d128 bf16 causal packed", "")],
        *[("d96/64 bf16 causal", ""), ("d128 bf16 causal scale=-0.1", ""), ("d128 bf16 causal softcap=50.0", "")],
        *[("d128 bf16 causal alibi", ""), ("d128 bf16 causal bias(hqk)", ""), ("d128 bf16 causal dropout=0.1", "")],
        *[("d128 fp16 mask(bhqk) softcap=20.0 sink", ""), ("d128 bf16 packed window(256,9) sink_tokens=4 chunk=300", "")],
    ],
    "256": [
        *[("d256 bf16", ""), ("d256 bf16 causal", ""), ("d256 fp16 window(256,9)", ""), ("d256 bf16 causal packed", "")],
        *[("d192/128 bf16 causal", ""), ("d192 bf16", ""), ("d192/128 fp16 causal packed", "")],
        *[("d256 bf16 causal bias(hqk)", ""), ("d256 bf16 causal dropout=0.1", "")],
    ],
    "others": [
        *[("d64 bf16 packed", ""), ("d64 fp16 causal scale=-0.1", ""), ("d24/40 bf16 window(9,inf) packed", "")],
        *[("d64 bf16 causal", "128x128 s2 q1 pingpong static"), ("d64 fp16 window(256,0) sink_tokens=64", "")],
        *[("d128 bf16 packed", ""), ("d128 bf16 scale=0.0", ""), ("d128 bf16 causal bias(hqk,fp32)", "")],
        *[("d128 bf16 causal", "128x128 s2 q2 pingpong dynamic g8"), ("d128 fp16 causal", "64x128 s2 q2 lazy static")],
        *[("d128 bf16 causal prefix=200", ""), ("d128 bf16 causal bias(bk,fp32)", "")],
        *[("d192/128 bf16", ""), ("d192/128 bf16 window(256,9) mask(bk)", "")],
        *[("d256 bf16 causal", "128x64 s2 q1 pingpong dynamic g64"), ("d256 bf16 packed window(256,0) sink_tokens=4", "")],
    ],
}
# Bytes of stack, for numbers of a tile that lie there while its inner loop runs; of all others none.
STACK = {
    ("d64 fp16 window(256,9)", ""): 32,
    ("d64 fp16 window(256,0) sink_tokens=64", ""): 16,
    ("d64 bf16 causal packed", ""): 8,
    ("d24/40 bf16 window(9,inf) packed", ""): 8,
    ("d128 bf16 causal softcap=50.0", ""): 16,
    ("d128 fp16 mask(bhqk) softcap=20.0 sink", ""): 16,
    ("d256 bf16", ""): 16,
    ("d256 bf16 causal", ""): 24,
    ("d256 fp16 window(256,9)", ""): 24,
    ("d256 bf16 causal packed", ""): 24,
    ("d256 bf16 causal", "128x64 s2 q1 pingpong dynamic g64"): 32,
    ("d256 bf16 causal dropout=0.1", ""): 72,
    ("d256 bf16 packed window(256,0) sink_tokens=4", ""): 24,
}
SPILLS = {"d256 bf16 causal dropout=0.1": 3, "d256 bf16 causal packed": 2}  # in the loop of one of two consumers
MOST_GROUPS = 13  # WARPGROUP instructions of a consumer: twenty times as many when its products wait for each other


# ---- the test ----------------------------------------------------------------------------------------------------------------


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
    assert len(found) > len(BUILDS[dim])
    for facts in found:
        assert facts["shared"] <= 232_448, f"more shared memory than a block may take: {facts}"
        assert not facts["uninitialised"], f"registers are read that nobody wrote: {facts}"
        if facts["kernel"] == "guard":  # its loop normally does not run, and may spill
            continue
        structure = facts["problem"].removeprefix(LARGE + " ")
        kept = STACK.get((structure, facts["given"]), 0)
        assert facts["stack"] <= kept, f"registers spill: {facts}"
        assert facts["local"] == 0, f"an array in memory: {facts}"
        assert facts["HGMMA"] > 0, f"Hopper's tensor core instruction is missing: {facts}"
        assert facts["WARPGROUP"] <= MOST_GROUPS * facts["consumers"], f"products wait for each other: {facts}"
        assert len(facts["loops"]) == facts["consumers"], f"a loop with two products in flight is missing: {facts}"
        for loop in facts["loops"]:
            assert loop["exponentials"] >= facts["block_n"] // 2, f"P V is awaited before the exponentials: {facts}"
            least = 0 if facts["bounded"] else facts["block_dv"] // 2
            assert loop["scaled"] >= least, f"the accumulator is not scaled between the two products: {facts}"
            if facts["steady"]:
                assert loop["maxima"] <= 4, f"more maxima than those of a quad's sums: {facts}"
            if "softcap" in facts["problem"]:
                assert loop["of three"] >= facts["block_n"] // 8 - 2, f"not three sizes at once are compared: {facts}"
            assert loop["spills"] <= SPILLS.get(structure, 0), f"registers spill in a loop: {facts}"
            unpacked = facts["block_n"] // 4 if re.search(r"bias|mask", facts["problem"]) else 0  # two numbers each
            assert loop["permutes"] <= unpacked, f"P is packed anew: {facts}"
            assert loop["waits"] == 2, f"other than S, then P V is awaited: {facts}"


WARP = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   ULDC UR4, c[0x0][0x20] ;
        /*0020*/              @P0  BRA `(.L_x_1) ;
        /*0030*/                   UMOV UR6, UR4 ;
        /*0040*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0050*/                   UIADD3 UR5, UR4, 0x1, URZ ;
.L_x_2:
        /*0060*/                   IMAD R2, R1, UR6, R1 ;
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24 ;
        /*0080*/                   EXIT ;
"""


def test_a_register_that_one_path_leaves_unwritten_is_found():
    assert uninitialised(WARP) == ["IMAD R2, R1, UR6, R1", "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24"]
    mended = WARP.replace("UIADD3 UR5", "UIADD3 UR6").replace("gdesc[UR4]", "R8")
    assert uninitialised(mended) == []


# ---- reading a listing -------------------------------------------------------------------------------------------------------


def loops(listing: str) -> list[dict]:
    """The innermost loops with products, what lies between their first and last instruction.

    "scaled": multiplications between the two products; "exponentials": before the second is awaited.
    """
    code, labels = instructions(listing)
    return [_loop(code[start : end + 1]) for start, end in inner_loops(code, labels, "HGMMA")]


def _loop(code: list) -> dict:
    names = [name for _, name, _ in code]
    waits = [i for i, name in enumerate(names) if name.startswith("WARPGROUP.DEPBAR")]
    products = [i for i, name in enumerate(names) if name.startswith("HGMMA") and i < waits[0]]
    return {
        "waits": len(waits),
        "scaled": max((names[a:b].count("FMUL") for a, b in pairwise(products)), default=0),
        "exponentials": sum(name.startswith("MUFU.EX2") for name in names[waits[0] : waits[-1]]),
        "spills": sum(name.startswith(("STL", "LDL")) for name in names),
        "permutes": names.count("PRMT"),
        "maxima": names.count("FMNMX"),
        "of three": names.count("VIMNMX3"),
    }


# ---- the program -------------------------------------------------------------------------------------------------------------


def read(call) -> dict:
    needs, listing = compiled(call, (9, 0))
    counts = collections.Counter(name.split(".")[0] for _, name, _ in instructions(listing)[0])
    return {
        **needs,
        "highest": max(map(int, re.findall(r"\bR(\d+)\b", listing))),
        "HGMMA": counts["HGMMA"],
        "WARPGROUP": counts["WARPGROUP"],
        "loops": loops(listing),
    }


def _pairs(problem, spelled: str):
    import torch

    letters, _, wide = spelled.partition(",")
    if not letters:
        return None
    sizes = zip("bhqk", (problem.batch, problem.heads_q, problem.len_q, problem.len_k), strict=True)
    kind = torch.bool if spelled == problem.mask else torch.float32 if wide else problem.dtype
    return torch.empty([size if letter in letters else 1 for letter, size in sizes], dtype=kind)


def main(*builds: str) -> None:
    import torch

    from rowmax import Device, Problem, plan
    from rowmax.kernels import hopper_forward
    from rowmax.plan.hopper import HopperTile, padded_dims
    from rowmax.problem import Operands

    guarded = False
    for text, tile_text in zip(builds[::2], builds[1::2], strict=True):
        problem = Problem.parse(text)
        prefer = f"hopper[{tile_text}]" if tile_text else "hopper"
        (tile,) = plan(problem, Device.named("H200"), prefer=prefer).tiles
        assert isinstance(tile, HopperTile)
        out_shape, lse_shape = problem.outputs()
        lead = (problem.len_k,) if problem.packed else (problem.batch, problem.len_k)
        q = torch.empty(*out_shape[:-1], problem.dim_qk, dtype=problem.dtype)
        k, v = (torch.empty(*lead, problem.heads_k, dim, dtype=problem.dtype) for dim in (problem.dim_qk, problem.dim_v))
        cu = torch.zeros(problem.batch + 1, dtype=torch.int32) if problem.packed else None
        out, lse = torch.empty(out_shape, dtype=problem.dtype), torch.empty(lse_shape)
        slopes = torch.empty((problem.batch, problem.heads_q)[problem.alibi == "head" :]) if problem.alibi else None
        sink = torch.empty(problem.heads_q) if problem.sink else None
        pairs = (_pairs(problem, spelled) for spelled in (problem.bias, problem.mask))
        seed = torch.empty(1, dtype=torch.int64) if problem.dropout else None
        calls = hopper_forward.hopper_calls(problem, Operands(q, k, v, cu, cu, slopes, sink, *pairs, seed), tile, out, lse)
        for name, call in zip(("forward", "guard"), calls[-2:], strict=True):
            if name == "guard" and guarded:  # one is as the other
                continue
            guarded |= name == "guard"
            said = {
                "kernel": name,
                "problem": text,
                "given": tile_text,
                "tile": str(tile),
                "consumers": tile.consumers,
                "block_n": tile.block_n,
            }
            fixed = calls[-2].numbers[-1]
            steady = fixed.STEADY.value and not fixed.BANDED.value and not problem.softcap
            said.update(block_dv=padded_dims(problem)[-1], steady=steady, bounded=fixed.STEADY.value and bool(problem.softcap))
            print(json.dumps({**said, **read(call)}), flush=True)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(*arguments, *[""] * (len(arguments) % 2))
