"""The peers are asked for the same attention as rowmax: same mask, scale, layout and grouping."""

import sys
import types

import pytest
import torch

import baselines
from calls import make_call, make_operands
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
BENT = (
    "b1 h2 q40 k40 d16 fp32 causal softcap=3.0",
    "b2 h4/2 q30 k40 d16 fp32 causal sink",
    "b2 h2 q30 k40 d16 fp32 causal alibi",
    "b2 h2 q40 k40 d16 fp32 window(9,3) softcap=2.0 alibi(batch)",
    "b1 h2 q40 k50 d16 fp32 causal bias(hqk)",
    "b2 h2 q40 k40 d16 bf16 bias(hk)",
    "b2 h2 q40 k40 d16 fp32 window(9,3) mask(bqk)",
    "b2 h2 q40 k40 d16 bf16 causal bias(bk,fp32) mask(hqk)",
    "b2 h4/2 q40 k40 d16 fp32 causal softcap=4.0 alibi sink dropout=0.2",
    "b3 h2 q50 k50 d16 fp32 causal alibi(batch) packed maxq30 maxk30 sink dropout=0.2",
)


def _asked(who, spelling):
    """What `who` makes of a problem, or its reason not to."""
    problem = Problem.parse(spelling)
    operands, grad_out = make_operands(problem, CPU, seed=0)
    call = make_call(who, problem, operands, grad_out, "forward")
    return Check(problem, operands).broken(call())


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

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
        left, right = (None if side == -1 else side for side in window_size)
        right = 0 if causal else right
        return reference.attention(q, k, v, left=left, right=right, scale=softmax_scale, softcap=softcap)

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


@pytest.mark.parametrize("spelling", [*PROBLEMS, BENT[0]])
def test_flash_attention_3_is_asked_for_the_problem(flash3, spelling):
    problem = Problem.parse(spelling)
    operands, _ = make_operands(problem, CPU, seed=0)
    out = baselines.build("fa3", problem, operands)(*operands[:3])
    assert Check(problem, operands).broken((out,)) == []


@pytest.mark.parametrize("spelling", BENT)
def test_bent_scores_are_those_of_the_problem(spelling):
    assert _asked("rowmax", spelling) == []
    if " bias" in spelling or " mask" in spelling:
        if "fp32)" in spelling:
            with pytest.raises(baselines.Refused, match="q's type"):
                _asked("sdpa", spelling)
        else:
            assert _asked("sdpa", spelling) == []
    else:
        with pytest.raises(baselines.Refused, match=r"no soft-cap|no sink|rounds distances|the seed"):
            _asked("sdpa", spelling)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("spelling", [*BENT[:8], PROBLEMS[2]])
def test_flex_attention_is_asked_for_the_problem(spelling):
    """Not compiled, from dense scores: compiled for a CPU it has neither LSE nor backward."""
    problem = Problem.parse(spelling)
    operands, _ = make_operands(problem, CPU, seed=0)
    assert Check(problem, operands).broken((baselines.flex_call(problem, operands)(*operands[:3]),)) == []


def test_who_is_installed():
    assert baselines.installed(CPU) == ["rowmax", "sdpa"]
    assert baselines.installed(torch.device("cuda"))[:3] == ["rowmax", "cudnn", "fa2"]


@pytest.mark.parametrize(
    ("which", "why"), [(1, "no learnable_sink"), (2, "no alibi_slopes"), (4, "no bias and no mask"), (8, "the seed")]
)
def test_flash_attention_3_refuses_what_it_has_not(flash3, which, why):
    with pytest.raises(baselines.Refused, match=why):
        _asked("fa3", BENT[which])


@pytest.mark.parametrize(
    ("who", "spelling", "why"),
    [
        ("nobody", PROBLEMS[0], "known are"),
        ("fa4", PROBLEMS[0], "not installed"),
        ("flex", PROBLEMS[0], "CPU"),
        ("cudnn", PROBLEMS[4], "dense mask"),
        ("fa2", PROBLEMS[2], "dense mask"),
        ("sdpa", "b1 h1 q65536 k65536 d16 fp32 window(1,0)", "dense mask of 65536"),
        ("fa2", BENT[0], "package flash_attn.* is not installed"),
        ("fa2", BENT[4], "no bias and no mask"),
        ("flex", BENT[8], "the seed"),
    ],
)
def test_refusals_say_why(who, spelling, why):
    problem = Problem.parse(spelling)
    operands, _ = make_operands(problem, CPU, seed=0)
    with pytest.raises(baselines.Refused, match=why):
        baselines.build(who, problem, operands)
