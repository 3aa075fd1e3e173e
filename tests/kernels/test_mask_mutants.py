"""Tests of the tests of masks, biases, dropout and functions of scores: one-line faults, each of which must be noticed."""

import pytest
from mutants import (
    BACKWARD,
    CPU_BACKWARD,
    CPU_FORWARD,
    CPU_PLAN,
    FORWARD,
    INTERPRETED,
    KERNEL_PLAN,
    TILE,
    interpreted,
    kill,
    live,
)

GIVEN, BIAS, LAUNCH = "kernels/triton/given.py", "kernels/triton/bias.py", "kernels/scored_launch.py"
DROPOUT = "kernels/triton/dropout.py"
SCORES, NONFINITE = "cpu/scores.py", "cpu/nonfinite.py"
KERNEL_MUTANTS = {
    "mask of the first sequence": (GIVEN, "tl.cast(b, tl.int64) * strides[0]", "0 * tl.cast(b, tl.int64)", 1),
    "bias of the first head in dK": (BACKWARD, "bias + tl.cast(member, tl.int64) * bias_strides[1]", "bias + 0 * member", 1),
    "bias in base e": (GIVEN, "added = added * LOG2E", "added = added * 1.0", 1),
    "mask ignored": (GIVEN, "shown = shown & (_load(mask", "shown = shown | (_load(mask", 1),
    "bias's gradient with the soft-cap's factor": (
        BIAS,
        "score_gradient(p, dp, delta[:, None]), 0.0)",
        "score_gradient(p, dp, delta[:, None]) * _gain, 0.0)",
        1,
    ),
    "bias's gradient without the last row tile": (BIAS, "turns_q = 1 if OWN_Q else row_tiles", "turns_q = 1", 1),
    "a broadcast bias with strides": (LAUNCH, "0 if size == 1 else stride for", "stride for", 1),
}
DROPOUT_MUTANTS = {
    "words of a draw in the wrong order": (DROPOUT, "tl.join(a, b), tl.join(c, d)", "tl.join(b, a), tl.join(d, c)", 1),
    "rows of every tile are as the first": (DROPOUT, "rows = row // 16 * 8", "rows = row // 16 * 0", 1),
    "keys in the order of the calls": (DROPOUT, "(0, 4, 1, 2, 5, 3, 6)", "(0, 4, 1, 2, 3, 5, 6)", 1),
    "halves of a word in the wrong order": (DROPOUT, "tl.join(low, high), [BLOCK_M", "tl.join(high, low), [BLOCK_M", 1),
    "every head drops the same": (BACKWARD, "kept(drop, first_head + member, row", "kept(drop, first_head, row", 1),
    "dropped weights left out of the sum": (
        FORWARD,
        "p = tl.where(kept(drop, head, row, col, BLOCK_M, BLOCK_N, False), p, 0.0)",
        "p = tl.where(kept(drop, head, row, col, BLOCK_M, BLOCK_N, False), p, 0.0); l = l * 0.0 + tl.sum(p, 1)",
        1,
    ),
    "dropout's factor left out of dV": (BACKWARD, "tl.where(keep, p * drop[3], 0.0)", "tl.where(keep, p, 0.0)", 1),
}
MOD = "kernels/triton/score_mod.py"
MOD_MUTANTS = {
    "every sequence is the first": (MOD, "sequence = tl.cast(mod[5], tl.int32)", "sequence = 0 * tl.cast(mod[5], tl.int32)", 1),
    "numbers of the first head": (MOD, "n * mod[4] + head", "n * mod[4]", 1),
    "rows counted from the first query": (MOD, "rows = rows + shift", "rows = rows + 0 * shift", 1),
    "head of the group's first in dK": (BACKWARD, "None if mod is None else first_head + member", "first_head", 1),
    "soft-cap's derivative forgotten": (TILE, "gain = slope if cap is None else gain * slope", "gain = slope", 1),
}
MOD_CASES = [("b2 h2/1 q16 k18 d16 fp32 softcap=2.0 mod(everything)", "spiky", "contiguous", None)]
CPU_MUTANTS = {
    "a mod's derivative forgotten": (SCORES, "slope if gain is None else gain.mul_(slope)", "gain", 1),
    "a mod's columns from the first kept": (SCORES, "+ self.first_col\n", "\n", 1),
    "mask ignored": (SCORES, "masked_fill_(~of_tile", "masked_fill_(0 * of_tile", 1),
    "bias in base e": (SCORES, "(bias * LOG2E)", "(bias * 1.0)", 1),
    "no finite pivot": (CPU_FORWARD, "        if blind:\n            m.masked", "        if False:\n            m.masked", 1),
    "rows without keys have weights": (CPU_BACKWARD, "== -math.inf, math.inf)", "== -math.inf, -math.inf)", 1),
    "bias's gradient with the soft-cap's factor": (CPU_BACKWARD, "add_bias_gradient(p, ds", "add_bias_gradient(steep, ds", 1),
    "every sequence drops the same": (SCORES, "sequence + torch.arange(rows", "0 * torch.arange(rows", 1),
    "rows cut off are not counted": (SCORES, "length - kept.shape[1]", "0 * kept.shape[1]", 1),
    "delta dropped with dP": (
        CPU_BACKWARD,
        ".sub_(take_rows(block, self.delta))",
        ".sub_(0.9 * take_rows(block, self.delta))",
        1,
    ),
    "bias from the first row": (SCORES, "slice(problem.len_q - rows.shape[1], None)", "slice(0, rows.shape[1])", 1),
    "NaN reaches rows that do not see it": (NONFINITE, "seen = seen & own[", "seen = seen | own[", 1),
}
# As in `test_mutants`.
CASES = [
    ("b2 h2/1 q18 k18 d16 fp32 causal softcap=2.0 bias(hqk) mask(bk)", "spiky", "contiguous", None),
    ("b2 h2/1 q18 k16 d16 fp32 causal bias(k) mask(bqk)", "normal", "contiguous", None),
]
DROPOUT_CASES = [("b1 h2/1 q20 k20 d16 fp32 dropout=0.3", "normal", "contiguous", None)]
CPU_CASES = [
    *CASES,
    ("b2 h2/1 q20 k18 d16 fp32 causal dropout=0.3", "normal", "contiguous", None),
    ("b1 h2 q20 k20 d16 fp16 mask(qk)", "nan(v)", "contiguous", None),
    ("b1 h2 q20 k20 d16 fp32 mask(qk)", "nan(q)", "contiguous", None),
    ("b1 h2 q8 k20 d16 fp32 window(3,0) mod(everything)", "normal", "contiguous", None),
]


@interpreted
@pytest.mark.parametrize("name", KERNEL_MUTANTS)
def test_kernel_mutant_is_killed(name, tmp_path):
    kill(KERNEL_MUTANTS, name, tmp_path, (CASES, KERNEL_PLAN))


@interpreted
@pytest.mark.parametrize("name", DROPOUT_MUTANTS)
def test_dropout_mutant_is_killed(name, tmp_path):
    kill(DROPOUT_MUTANTS, name, tmp_path, (DROPOUT_CASES, KERNEL_PLAN))


@interpreted
@pytest.mark.parametrize("name", MOD_MUTANTS)
def test_mod_mutant_is_killed(name, tmp_path):
    kill(MOD_MUTANTS, name, tmp_path, (MOD_CASES, KERNEL_PLAN))


@pytest.mark.parametrize("name", CPU_MUTANTS)
def test_cpu_mutant_is_killed(name, tmp_path):
    kill(CPU_MUTANTS, name, tmp_path, (CPU_CASES, CPU_PLAN))


def test_what_is_not_mutated_lives():
    live((CPU_CASES, CPU_PLAN), *([(DROPOUT_CASES + MOD_CASES, KERNEL_PLAN)] if INTERPRETED else []))
