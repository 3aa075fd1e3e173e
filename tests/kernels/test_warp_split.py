"""`warp_split`: simulated on the CPU by the acceptance rule, mutants that must fail, refusals, and its machine code counted.

Run as a program, it prints what builds need and what a turn of their loop does, a JSON line each:

    python test_warp_split.py A100 "b4 h16 q4096 k4096 d64 bf16" "64x64 w4 s2 rows" [DEVICE PROBLEM TILE ...]
"""

import collections
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rowmax import Device, Plan, Problem, ProblemError, Unsupported, attention, plan, testing
from rowmax.plan.warp_split import SHARES, WarpTile

H200 = Device.named("H200")
ROWS, COLUMNS, LATE = (f"64x64 w4 s2 {share}" for share in SHARES)
SMALL_COLUMNS, SMALL_LATE = "32x64 w2 s2 columns", "32x64 w2 s3 late"


# ---- the plan --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [ROWS, COLUMNS, SMALL_LATE])
def test_tile_spelling(text):
    assert str(WarpTile.parse(text)) == text
    assert str(Plan.parse(f"warp_split[{text}]")) == f"warp_split[{text}]"
    assert WarpTile.parse("64x64 w4 s2") == WarpTile.parse(ROWS)


@pytest.mark.parametrize("text", ["64x64 w4", "64x64 w4 s2 diagonal", "64x64 w4 s2 tma"])
def test_a_wrong_tile_teaches_its_spelling(text):
    with pytest.raises(ProblemError, match="'64x64 w4 s2 columns'"):
        WarpTile.parse(text)


@pytest.mark.parametrize(
    ("problem", "device", "prefer", "reason"),
    [
        ("b1 h2 q64 k64 d64 bf16", "cpu", "warp_split", "runs on a GPU"),
        ("b1 h2 q64 k64 d64 bf16", "V100", "warp_split", "compute capability 8.0"),
        ("b1 h2 q64 k64 d64 fp32", "A100", "warp_split", "fp16 and bf16, not fp32"),
        ("b1 h2 q64 k64 d136 bf16", "A100", "warp_split", "dims up to 128"),
        ("b1 h2 q64 k64 d60 bf16", "A100", "warp_split", "multiples of 16 bytes"),
        ("b1 h2 q64 k64 d64 bf16 sink", "A100", "warp_split", "no soft-cap, ALiBi, sink, bias, mask or score_mod"),
        ("b1 h2 q64 k64 d64 bf16", "A100", "warp_split[32x64 w4 s2 rows]", "at least 16 rows"),
        ("b1 h2 q64 k64 d64 bf16", "A100", "warp_split[64x32 w4 s2 columns]", "at least 16 columns"),
        ("b1 h2 q64 k64 d64 bf16", "A100", "warp_split[64x64 w4 s1 rows]", "stages are 2 to 4"),
        ("b1 h2 q64 k64 d128 bf16", "A100", f"warp_split[{COLUMNS}]", "registers a thread"),
        ("b1 h2 q64 k64 d64 bf16", "L4", f"warp_split[{COLUMNS}]", "bytes of shared memory"),
    ],
)
def test_a_refusal_says_why(problem, device, prefer, reason):
    with pytest.raises(Unsupported) as caught:
        plan(Problem.parse(problem), Device.named(device), prefer=prefer)
    assert reason in caught.value.refusals["warp_split"]


def test_only_for_who_asks_and_with_aligned_rows():
    problem = Problem.parse("b1 h2 q64 k64 d64 bf16")
    assert all(plan(problem, Device.named(name)).algorithm != "warp_split" for name in ("H200", "A100", "L4", "B200"))
    assert plan(problem, H200, prefer="warp_split").tiles == (WarpTile.parse(ROWS),)
    assert plan(problem, H200, direction="backward", prefer=f"warp_split[{COLUMNS}]").algorithm == "q_outer"
    with pytest.raises(Unsupported, match="multiples of 16 bytes, and no broadcast"):
        plan(problem, H200, prefer="warp_split", aligned=False)
    q = torch.zeros(1, 4, 2, 16)
    with pytest.raises(Unsupported, match="runs on a GPU"):
        attention(q, q, q, plan="warp_split")


# ---- simulated -------------------------------------------------------------------------------------------------------------

pytest.importorskip("triton.experimental.gluon")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
simulated = pytest.mark.skipif(not INTERPRETED, reason="marked tiles are computed once more in Triton's interpreter")
CASES = [
    ("b1 h2/1 q100 k130 d64 bf16 causal", "normal", ROWS),
    ("b1 h2/1 q100 k130 d64 bf16 causal", "probe", COLUMNS),
    ("b2 h2 q70 k200 d64 fp16", "normal", SMALL_LATE),
    ("b1 h2 q200 k200 d64 fp16 window(40,0)", "spiky", SMALL_COLUMNS),
    ("b3 h2 q90 k90 d40/24 fp16 packed window(9,7)", "normal", COLUMNS),
    ("b3 h4/2 q90 k130 d72/128 bf16 packed causal", "v_onehot", "32x64 w2 s2 rows"),
    ("b2 h2 q70 k30 d64 bf16 causal", "normal", COLUMNS),  # rows that see nothing
    ("b1 h2 q1 k1 d16 bf16", "normal", SMALL_LATE),
    ("b1 h2 q70 k70 d64 bf16 causal scale=-0.1", "normal", SMALL_COLUMNS),
    ("b1 h1 q64 k150 d128 bf16", "shift(-245000)", SMALL_COLUMNS),
    ("b1 h2 q90 k140 d64 fp16 causal", "nan(v)", COLUMNS),
    ("b3 h2 q90 k90 d64 fp16 packed window(9,3)", "inf(v)", ROWS),
    ("b1 h2 q90 k90 d32 bf16 causal", "nan(k)", SMALL_LATE),
]


def failure(text: str, kind: str, tile: str, mutants=()) -> str:
    """What is wrong with the simulated kernel, or ""."""
    import simulate
    import simulate_warp_split

    problem = Problem.parse(text)
    operands = testing.operands(problem, kind)
    try:
        marked = kind.startswith(("nan", "inf"))
        chosen = WarpTile.parse(tile)
        out, lse, suspect = simulate_warp_split.forward(problem, operands, chosen, mutants=mutants, repair=marked)
    except simulate.Wrong as wrong:
        return str(wrong)
    if bool(suspect.any()) != marked:
        return "marks of tiles with NaN"
    report = testing.check_forward(problem, operands, out, lse)
    return "" if report.ok else str(report)


@simulated
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case))
def test_a_simulated_kernel_is_right(case):
    assert failure(*case) == ""


@simulated
def test_without_an_lse():
    import simulate_warp_split

    problem = Problem.parse("b1 h2 q70 k70 d64 bf16 causal")
    operands = testing.operands(problem)
    out, lse, _ = simulate_warp_split.forward(problem, operands, WarpTile.parse(SMALL_COLUMNS), need_lse=False)
    assert lse is None
    assert testing.check_forward(problem, operands, out).ok


CAUSAL, FULL = ("b1 h2/1 q100 k130 d64 bf16 causal", "normal"), ("b1 h1 q64 k330 d64 bf16", "spiky")
MUTANTS = {
    "diagonal unmasked": ("(col < full_start) | (col + BLOCK_N > full_end)", "col < full_start", *CAUSAL, ROWS),
    "read before it arrived": ("async_copy.wait_group(STAGES - 2)", "async_copy.wait_group(STAGES - 1)", *FULL, ROWS),
    "fetched over what is read": ("place = ahead % STAGES", "place = turn % STAGES", *FULL, SMALL_LATE),
    "O not scaled": ("mma_v2(p, v, acc * _rows(alpha))", "mma_v2(p, v, acc)", *FULL, ROWS),
    "O not scaled, columns": (
        "acc * _rows(gl.convert_layout(alpha, row_layout(o_layout))) +",
        "acc +",
        *FULL,
        SMALL_COLUMNS,
    ),
    "sums of one group": ("    l = gl.sum(l, 0)", "    l = gl.max(l, 0)", *FULL, SMALL_COLUMNS),
    "O of one group": ("gl.sum(exchange.load(LAYOUT), 0)", "gl.max(exchange.load(LAYOUT), 0)", *FULL, SMALL_LATE),
    "numbers of a group's keys": ("(start + group * (BLOCK_N // GROUPS), 1)", "(start + group * 0, 1)", *CAUSAL, COLUMNS),
    "keys of a group": ("(start + group * (ROWS // GROUPS), 1)", "(start + group * 0, 1)", *FULL, COLUMNS),
    "past the end": ("mask=(rows < length) & (dims < DIM)", "mask=dims < DIM", *FULL, ROWS),
    "LSE without its sum": ("(m + gl.log2(l_safe))", "(m + 0.0 * l_safe)", *FULL, ROWS),
    "marks of another tile": (
        "suspect_ptr + (pid + tiles - 1 - 2 * (pid % tiles))",
        "suspect_ptr + pid",
        *("b1 h1 q300 k100 d64 fp16 window(9,3)", "nan(v)", ROWS),
    ),
}


@simulated
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name):
    old, new, text, kind, tile = MUTANTS[name]
    assert failure(text, kind, tile, ((old, new),)), f"mutant '{name}' lives"


# ---- machine code ----------------------------------------------------------------------------------------------------------

TEXT = "b4 h16 q4096 k4096 d64 bf16"
BUILDS = [
    *(("A100", TEXT, tile) for tile in (ROWS, COLUMNS, LATE)),
    *(("H200", TEXT, tile) for tile in (ROWS, COLUMNS)),
    ("L4", "b4 h32/8 q1024 k1024 d64 fp16 window(256,9)", SMALL_COLUMNS),
    ("H200", "b4 h32/8 q1024 k1024 d128 bf16 causal packed", "32x64 w2 s2 columns"),
    ("A100", "b4 h32/8 q1024 k1024 d128 bf16 causal", "32x64 w2 s2 rows"),
]
SPILLS = {LATE: 56}  # bytes of stack: a copy of O for each warp, beside scores


@functools.cache
def builds() -> list[dict]:
    from machine_code import TOOLS

    if not (TOOLS / "cuobjdump").is_file():
        pytest.skip("this Triton comes without cuobjdump")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, *(word for build in BUILDS for word in build)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("build", BUILDS, ids=" ".join)
def test_machine_code(build):
    found = builds()[BUILDS.index(build)]
    device, _, tile = build
    assert found["stack"] <= SPILLS.get(tile, 0), f"registers spill: {found}"
    assert found["shared"] <= Device.named(device).shared_bytes, found
    assert not found["uninitialised"], found
    assert found["HMMA"] > 0, "no tensor core instruction"
    assert found["HGMMA"] == 0, "another kind of product than on Ampere"
    assert found["LDSM"] > 0, "factors of products are read number by number"
    assert found["barriers"] == {"rows": 2, "columns": 7, "late": 4}[WarpTile.parse(tile).share]


def test_what_a_turn_moves_in_shared_memory_is_what_the_model_says():
    from rowmax.analysis.launches import launches
    from rowmax.device import Rates

    for (device, text, tile), found in zip(BUILDS, builds(), strict=True):
        gpu = Device.named(device)
        *_, launch, _ = launches(Problem.parse(text), gpu, Rates.of(gpu), Plan.parse(f"warp_split[{tile}]"))
        counted = found["read"] + found["written"]
        assert abs(launch.turn.shared_bytes / counted - 1) < 0.1, (device, text, tile, launch.turn.shared_bytes, counted)
        assert launch.turn.barriers == found["barriers"]


def test_split_columns_cost_more_shared_memory_and_barriers():
    rows, columns = builds()[0], builds()[1]
    assert columns["read"] + columns["written"] > 2 * (rows["read"] + rows["written"])
    assert columns["barriers"] > 3 * rows["barriers"]
    assert columns["HMMA"] == rows["HMMA"]


def test_the_table_of_the_lesson():
    page = Path(__file__).parents[2] / "docs" / "lessons" / "split-kv-against-split-q.md"
    text = page.read_text()
    for (device, _, tile), found in zip(BUILDS[:5], builds()[:5], strict=True):
        (row,) = (line for line in text.splitlines() if line.startswith(f"| {device}, `{WarpTile.parse(tile).share}`"))
        moved = (round(found[word] / 1024) for word in ("read", "written"))
        counts = (found[word] for word in ("barriers", "SHFL", "instructions", "registers"))
        assert row.split("|")[2:-1] == [f" {number} " for number in (*moved, *counts)], found


def main(*builds: str) -> None:
    import compile_only
    from machine_code import compiled, inner_loops, instructions, shared_traffic

    for device, text, tile in zip(builds[::3], builds[1::3], builds[2::3], strict=True):
        gpu = Device.named(device)
        (_, call), _ = compile_only.calls(Problem.parse(text), gpu, "forward", f"warp_split[{tile}]")
        needs, listing = compiled(call, gpu.capability)
        code, labels = instructions(listing)
        ((start, end),) = inner_loops(code, labels, "HMMA")
        loop = code[start : end + 1]
        counts = collections.Counter(name.split(".")[0] for _, name, _ in loop)
        read, written = (call.tile.warps * size for size in shared_traffic(loop))
        facts = {"device": device, "problem": text, "tile": tile, **needs, "read": read, "written": written}
        facts |= {word: counts[word] for word in ("HMMA", "HGMMA", "LDSM", "SHFL", "MUFU")} | {"barriers": counts["BAR"]}
        print(json.dumps({**facts, "instructions": len(loop)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
