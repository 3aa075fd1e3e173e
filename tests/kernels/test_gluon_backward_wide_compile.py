"""The Hopper backward for head dimensions above 128, compiled without a GPU for every structure, and its machine code read.

Run as a program, it prints what the builds need, a JSON line each; so does the test, in a process of its own, because this one
interprets Triton:

    python test_gluon_backward_wide_compile.py "b4 h32/8 q1024 k1024 d256 bf16 causal" ...
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

LARGE = "b4 h32/8 q1024 k1024"
STRUCTURES = {
    "plain": [
        *["d256 bf16", "d256 bf16 causal", "d256 fp16 window(256,9)", "d256 bf16 causal packed", "d192/128 bf16 causal"],
        *["d136/64 fp16 window(9,inf) packed", "d64/256 bf16", "d256 bf16 packed window(256,0) sink_tokens=4 chunk=300"],
    ],
    "bent": ["d256 bf16 causal softcap=50.0", "d256 bf16 causal bias(hqk)", "d256 bf16 causal alibi"],
    "others": [
        *["d256 bf16 causal scale=-0.1", "d256 bf16 causal prefix=200"],
        *["d256 fp16 window(256,9) packed softcap=9.0", "d192/128 bf16 softcap=50.0"],
        *["d256 bf16 bias(hqk,fp32)", "d192/128 bf16 causal bias(hqk)", "d256 fp16 window(9,3) mask(bk)"],
        *["d256 bf16 alibi", "d256 fp16 window(256,0) packed alibi(batch)"],
    ],
}
WHOLE = {
    "d256 bf16 causal",
    "d192/128 bf16 causal",
    "d136/64 fp16 window(9,inf) packed",
    "d64/256 bf16",
}  # of which all four kernels are compiled
CAP_STACK = 40  # numbers that stay the same, which a turn of 1,600 instructions loads: LSE and delta, and where rows lie
MOST_GROUPS = {"keys": 16, "queries": 22}  # begins of products and waits for them, of both consumers; serialised, some 70 more


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "bent", pytest.param("others", marks=pytest.mark.thorough)])
def test_machine_code(kind, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, __file__, *(f"{LARGE} {structure}" for structure in STRUCTURES[kind])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == sum(4 if structure in WHOLE else 2 for structure in STRUCTURES[kind])
    for facts in found:
        assert not facts["uninitialised"], f"registers are read that nobody wrote: {facts}"
        if facts["kernel"] == "repair":  # normally it does not run, and may spill
            continue
        assert facts["stack"] <= (CAP_STACK if "softcap" in facts["problem"] else 0), f"registers spill: {facts}"
        assert facts["stored"] == 0, f"registers spill in a loop: {facts}"
        assert facts["local"] == 0, f"registers spill: {facts}"
        if facts["kernel"] in MOST_GROUPS:
            assert facts["shared"] <= min(facts["planned"], 232_448), f"more shared memory than planned: {facts}"
            assert facts["HGMMA"] > 0, f"Hopper's tensor core instruction is missing: {facts}"
            assert facts["WARPGROUP"] <= MOST_GROUPS[facts["kernel"]], f"products wait for each other: {facts}"
        if facts["kernel"] == "queries":
            assert facts["overlap"], f"nothing is multiplied during the exponentials: {facts}"


def overlaps(listing: str) -> bool:
    """Whether in every loop with products and exponentials the last wait, for all products, is behind the exponentials."""
    code, labels = instructions(listing)
    loops = [code[start : end + 1] for start, end in inner_loops(code, labels, "HGMMA")]
    loops = [loop for loop in loops if any(name.startswith("MUFU") for _, name, _ in loop)]
    return bool(loops) and all(
        max(i for i, (_, name, _) in enumerate(loop) if name.startswith("MUFU"))
        < max(i for i, (_, name, rest) in enumerate(loop) if name.startswith("WARPGROUP.DEPBAR") and rest.endswith("0x0"))
        for loop in loops
    )


def main(*texts: str) -> None:
    import torch
    from compile_only import made_for

    from rowmax import Device, Problem, testing
    from rowmax.kernels.backward_wide_launch import wide_backward_calls
    from rowmax.plan.hopper_wide import shared_bytes, tiles
    from rowmax.problem import Operands

    for text in texts:
        problem = Problem.parse(text)
        tile = tiles(problem, Device.named("H200"))[0]
        out_shape, lse_shape = problem.outputs()
        lead = (problem.len_k,) if problem.packed else (problem.batch, problem.len_k)
        q = torch.empty(*out_shape[:-1], problem.dim_qk, dtype=problem.dtype)
        k, v = (torch.empty(*lead, problem.heads_k, dim, dtype=problem.dtype) for dim in (problem.dim_qk, problem.dim_v))
        cu = torch.zeros(problem.batch + 1, dtype=torch.int32) if problem.packed else None
        out, lse = torch.empty(out_shape, dtype=problem.dtype), torch.empty(lse_shape)
        slopes = testing.operands(problem.with_(len_q=1, len_k=1)).slopes
        made = (made_for(problem, problem.bias, problem.dtype), made_for(problem, problem.mask, torch.bool))
        calls = wide_backward_calls(problem, Operands(q, k, v, cu, cu, slopes, None, *made), tile, out, lse, out, lse, q, k, v)
        planned = dict(zip(("keys", "queries"), shared_bytes(problem, tile), strict=True))
        for name, call in zip(("prepare", "keys", "queries", "repair"), calls, strict=True):
            if name in ("prepare", "repair") and text.removeprefix(f"{LARGE} ") not in WHOLE:  # small, and differ less
                continue
            facts, listing = compiled(call, (9, 0))
            code, labels = instructions(listing)
            counts = collections.Counter(word.split(".")[0] for _, word, _ in code)
            loops = inner_loops(code, labels, "HGMMA")
            facts["stored"] = sum(word.startswith("STL") for first, last in loops for _, word, _ in code[first : last + 1])
            facts.update({word: counts[word] for word in ("HGMMA", "WARPGROUP")})
            said = {"kernel": name, "problem": text, "planned": planned.get(name, 0)}
            print(json.dumps({**said, **facts, "overlap": name == "queries" and overlaps(listing)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
