"""Tests of the tests of bent scores: one-line faults in what soft-cap, ALiBi and sinks add, each of which must be noticed."""

import pytest
from mutants import (
    ADDRESS,
    BACKWARD,
    CPU_BACKWARD,
    CPU_FORWARD,
    CPU_PLAN,
    FORWARD,
    INTERPRETED,
    KERNEL_PLAN,
    LAUNCH,
    TILE,
    interpreted,
    kill,
    live,
)

SCORES, SCORED_LAUNCH = "cpu/scores.py", "kernels/scored_launch.py"
KERNEL_MUTANTS = {
    "soft-cap omitted": (TILE, "        x = x * cap[1]", "        x = s * scale_log2", 1),
    "soft-cap's derivative omitted in dQ": (
        BACKWARD,
        "            ds = ds * gain\n        if MASKED:\n            rows",
        "            ds = ds\n        if MASKED:\n            rows",
        1,
    ),
    "soft-cap's derivative omitted in dK": (BACKWARD, "                ds = ds * gain", "                ds = ds", 1),
    "soft-cap's derivative by cancellation": (TILE, "4.0 * e * r * r", "1.0 - far * far", 1),
    "tanh by cancellation": (TILE, "tl.where(tl.abs(x) < 0.25, near,", "tl.where(x != x, near,", 1),
    "slopes of the first sequence for all": (
        ADDRESS,
        "return slopes + b.to(tl.int64) * heads",
        "return slopes + 0 * b.to(tl.int64)",
        1,
    ),
    "slope of the KV head": (BACKWARD, "tl.load(slopes + member) * LOG2E", "tl.load(slopes) * LOG2E", 1),
    "ALiBi from the top left": (TILE, "tl.abs(rows + shift - cols)", "tl.abs(rows - cols)", 1),
    "ALiBi in base e": (FORWARD, "slope_log2 = tl.load(slopes + head) * LOG2E", "slope_log2 = tl.load(slopes + head)", 1),
    "sink omitted": (TILE, "l * alpha + tl.exp2(sink_log2 - pivot)", "l * alpha", 1),
    "output not scaled for the sink": (TILE, "return acc * tl.expand_dims(alpha, 1), m_new,", "return acc, m_new,", 1),
    "sink of another head": (
        FORWARD,
        "m if PRESCALE else m * scale_log2, l, tl.load(sink_ptr + head)",
        "m if PRESCALE else m * scale_log2, l, tl.load(sink_ptr)",
        1,
    ),
    "rows without keys forget the sink": (
        LAUNCH,
        "                _scored().rows_of_sinks(lse",
        "                pass  # (lse",
        1,
    ),
    "rows of no sequence have a sink": (
        SCORED_LAUNCH,
        "torch.where(own, sink.unsqueeze(-1), -torch.inf)",
        "sink.unsqueeze(-1)",
        1,
    ),
    "sink's gradient has the wrong sign": (SCORED_LAUNCH, "return -terms.masked_fill", "return terms.masked_fill", 1),
    "sink's gradient of the first sequence": (
        SCORED_LAUNCH,
        "sum(-1).view(-1, sink.shape[0]).sum(0)",
        "sum(-1).view(-1, sink.shape[0])[0]",
        1,
    ),
}
CPU_MUTANTS = {
    "soft-cap omitted": (SCORES, "t.tanh_().mul_(cap)", "t.mul_(cap)", 1),
    "soft-cap's derivative omitted": (CPU_BACKWARD, "gain.mul_(p).to(self.q.dtype)", "p.to(self.q.dtype)", 1),
    "slopes of the first sequence for all": (SCORES, "t[sequence : sequence + batch]", "t[:1].expand(batch, -1)", 1),
    "ALiBi from the top left": (SCORES, ".unsqueeze(1) + block.geometry.shift", ".unsqueeze(1)", 1),
    "sink omitted": (CPU_FORWARD, "l += (sink - m).exp2_()", "pass", 1),
    "sink counted in every tile": (CPU_FORWARD, "block, cols, None, True)", "block, cols, sink, True)", 1),
    "pivot without the sink": (CPU_FORWARD, "m = torch.maximum(m, sink)", "m = m * 1.0", 1),
    "rows without keys forget the sink": (CPU_FORWARD, "        start_lse(problem, operands, lse)", "        pass", 1),
    "rows of no sequence have a sink": (SCORES, "lse[..., :end] =", "lse[...] =", 1),
    "sink's gradient without that of the LSE": (SCORES, "        delta -= grad_lse", "        pass", 1),
    "scores that are bent may be rounded": [
        (CPU_FORWARD, "bounded = problem.plain and half", "bounded = half", 1),
        (CPU_FORWARD, "eligible(block, chunks.width):", "eligible(block, chunks.width) and True:", 1),
    ],
}
# As in `test_mutants`.
CASES = [
    ("b2 h4/2 q20 k33 d16 fp32 causal softcap=2.0 alibi(batch) sink", "spiky", "contiguous", None),
    ("b2 h2 q5 k0 d16 fp32 packed sink", "normal", "contiguous", ((3, 0), (1, 0))),
    ("b1 h2 q20 k20 d16 fp32 softcap=1e+30", "normal", "contiguous", None),
    ("b1 h2 q16 k16 d64 fp32 softcap=5.0", "shift(-40)", "contiguous", None),
    ("b2 h4/2 q34 k34 d16 fp16 packed causal alibi(batch) sink", "normal", "contiguous", None),
]
CPU_CASES = [
    ("b1 h2 q300 k300 d64 bf16 alibi", "v_onehot", "contiguous", None),
    ("b1 h2 q20 k20 d16 fp32 sink", "shift(-1000)", "contiguous", None),
]


@interpreted
@pytest.mark.parametrize("name", KERNEL_MUTANTS)
def test_kernel_mutant_is_killed(name, tmp_path):
    kill(KERNEL_MUTANTS, name, tmp_path, (CASES, KERNEL_PLAN))


@pytest.mark.parametrize("name", CPU_MUTANTS)
def test_cpu_mutant_is_killed(name, tmp_path):
    kill(CPU_MUTANTS, name, tmp_path, (CASES, CPU_PLAN), (CPU_CASES, "tiled"))


def test_what_is_not_mutated_lives():
    live((CASES, CPU_PLAN), (CPU_CASES, "tiled"), *([(CASES, KERNEL_PLAN)] if INTERPRETED else []))
