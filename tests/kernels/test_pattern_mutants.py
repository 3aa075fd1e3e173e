"""Tests of the tests of sink tokens, prefixes and chunks: one-line faults, each of which must be noticed."""

import pytest
from mutants import CPU_PLAN, KERNEL_PLAN, TILE, interpreted, kill

BIAS, WALK, NONFINITE = "kernels/triton/bias.py", "cpu/blocks.py", "cpu/nonfinite.py"
KERNEL_MUTANTS = {
    "early keys are hidden": (TILE, "near | (cols < early_keys(shift, band))", "near | (cols < 0)", 1),
    "one early key too few": (TILE, "(cols < early_keys(shift, band))", "(cols < early_keys(shift, band) - 1)", 1),
    "one early key too many": (TILE, "(cols < early_keys(shift, band))", "(cols <= early_keys(shift, band))", 1),
    "tiles of early keys left out": (TILE, "edges += tl.cdiv(ranges[4], BLOCK)", "edges += 0", 1),
    "early tiles twice": (TILE, "end, tl.minimum(early_keys(start, band), start)", "end, early_keys(start, band)", 1),
    "early keys are seen as others": (
        TILE,
        "most = tl.maximum(most, end_query(col",
        "most = tl.maximum(most, 0 * end_query(col",
        1,
    ),
    "early keys' neighbours are seen to the end": (
        TILE,
        "fewest = tl.maximum(col, tl.minimum(last",
        "fewest = tl.minimum(col, (last",
        1,
    ),
    "the left side of chunks is not masked": (TILE, "near = cols >= first_key(rows, shift, band)", "near = cols >= 0", 1),
    "early keys have no bias gradient": (BIAS, "near = near | (col < early_keys(col, band))", "near = near & True", 1),
}
CPU_MUTANTS = {
    "tiles of early keys left out": (
        WALK,
        "((0, self.early), (self.start, self.end)) if self.early",
        "((self.start, self.end),) if self.early",
        1,
    ),
    "early columns cut off": (WALK, "first = 0 if early_keys(self.band) else", "first = 0 if False else", 1),
    "columns cut within a chunk": (WALK, "else first // self.band.chunk * self.band.chunk", "else first", 1),
    "early NaN overlooked": (NONFINITE, "    if early_keys(band):", "    if False:", 1),
    "every row reaches early NaN": (NONFINITE, "end.clamp(max=early_keys(band))", "end * 0 + early_keys(band)", 1),
}
# As in `test_mutants`.
CASES = [
    ("b1 h2/1 q20 k40 d16 fp16 window(5,0) sink_tokens=3", "probe", "contiguous", None),
    ("b1 h1 q40 k40 d16 fp32 window(3,0) sink_tokens=18", "v_onehot", "contiguous", None),
    ("b1 h1 q20 k40 d16 fp32 causal chunk=7", "probe", "contiguous", None),
    ("b1 h1 q20 k40 d16 fp16 window(5,0) sink_tokens=3 bias(hqk)", "normal", "contiguous", None),
]
CPU_CASES = [
    *CASES[:3],
    ("b1 h1 q20 k40 d16 fp32 window(5,0) chunk=7", "probe", "contiguous", None),
    ("b1 h1 q20 k40 d16 fp32 window(3,0) sink_tokens=22", "nan(v)", "contiguous", None),
    ("b1 h1 q40 k40 d16 fp32 window(3,0) sink_tokens=30", "nan(v)", "contiguous", None),
]


@interpreted
@pytest.mark.parametrize("name", KERNEL_MUTANTS)
def test_kernel_mutant_is_killed(name, tmp_path):
    kill(KERNEL_MUTANTS, name, tmp_path, (CASES, KERNEL_PLAN))


@pytest.mark.parametrize("name", CPU_MUTANTS)
def test_cpu_mutant_is_killed(name, tmp_path):
    kill(CPU_MUTANTS, name, tmp_path, (CPU_CASES, CPU_PLAN))
