"""The peers are asked for the same attention as rowmax: same mask, scale, layout and grouping."""

import sys
import types

import pytest
import torch

import baselines
from calls import make_operands
from check import Check
from rowmax import reference
from rowmax.problem import Problem

CPU = torch.device("cpu")
PROBLEMS = (
    "b2 h2 q40 k40 d16 fp32",
    "b2 h4/2 q40 k40 d16 fp32 causal",
    "b1 h2 q30 k70 d16/24 fp32 causal",
    "b1 h2 q70 k30 d16 fp32 causal",  # the first 40 queries see nothing
    "b1 h2 q64 k64 d16 fp32 window(7,3)",
    "b1 h2 q40 k40 d16 fp32 scale=-0.3",
    "b3 h4/2 q60 k60 d16 fp32 causal packed maxq30 maxk30",
    "b3 h2 q50 k70 d16 fp32 window(4,2) packed maxq30 maxk40",
)


@pytest.mark.parametrize("who", ["rowmax", "sdpa"])
@pytest.mark.parametrize("spelling", PROBLEMS)
def test_peers_compute_the_problem(who, spelling):
    problem = Problem.parse(spelling)
    operands, _ = make_operands(problem, CPU, seed=0)
    out = baselines.build(who, problem, operands)(*operands[:3])
    if who == "sdpa" and spelling == PROBLEMS[3]:
        out = torch.nan_to_num(out)  # torch leaves rows that see nothing to its kernels; where they are 0 this changes nothing
    assert Check(problem, operands).broken((out,)) == []


@pytest.fixture
def flash3(monkeypatch):
    """A stand-in for FlashAttention-3's module: the definition, behind its signature and alignment."""

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
        left, right = (None if side == -1 else side for side in window_size)
        out, lse = reference.attention(q, k, v, left=left, right=0 if causal else right, scale=softmax_scale)
        return out, lse

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False, window_size=(-1, -1)
    ):
        left, right = (None if side == -1 else side for side in window_size)
        right = 0 if causal else right
        out, _ = reference.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, left=left, right=right, scale=softmax_scale)
        return out

    module = types.ModuleType("fa3_fwd_interface")
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    baselines._first_importable.cache_clear()
    yield
    baselines._first_importable.cache_clear()


@pytest.mark.parametrize("spelling", PROBLEMS)
def test_flash_attention_3_is_asked_for_the_problem(flash3, spelling):
    problem = Problem.parse(spelling)
    operands, _ = make_operands(problem, CPU, seed=0)
    out = baselines.build("fa3", problem, operands)(*operands[:3])
    assert Check(problem, operands).broken((out,)) == []


def test_who_is_installed():
    assert baselines.installed(CPU) == ["rowmax", "sdpa"]
    assert baselines.installed(torch.device("cuda"))[:3] == ["rowmax", "cudnn", "fa2"]


@pytest.mark.parametrize(
    ("who", "spelling", "why"),
    [
        ("nobody", PROBLEMS[0], "known are"),
        ("fa4", PROBLEMS[0], "not installed"),
        ("flex", PROBLEMS[0], "CPU"),
        ("cudnn", PROBLEMS[4], "dense mask"),
        ("fa2", PROBLEMS[2], "dense mask"),
        ("sdpa", "b1 h1 q65536 k65536 d16 fp32 window(1,0)", "dense mask of 65536"),
    ],
)
def test_refusals_say_why(who, spelling, why):
    problem = Problem.parse(spelling)
    operands, _ = make_operands(problem, CPU, seed=0)
    with pytest.raises(baselines.Refused, match=why):
        baselines.build(who, problem, operands)
