"""Dense calls by the split-KV kernels, interpreted: cases of the one suite, forward, with parts of which some are empty."""

import pytest
import torch

import cases
import rowmax
from rowmax import testing

pytest.importorskip("triton")
if "q_outer" not in cases.backends("cpu"):
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

PLAN = "split_kv[32x32 w4 s2 x3]"
FAMILIES = ("heads", "layouts", "non-finite", "empty", "extreme")


def chosen() -> list[cases.Case]:
    few = [case for case in cases.CASES if case.family in FAMILIES and not cases.may_refuse(case, "split_kv")]
    few = [case for case in few if not case.large]
    sizes = [case.problem.batch * case.problem.heads_q * case.problem.len_q * case.problem.len_k for case in few]
    small = [case for case, size in zip(few, sizes, strict=True) if size <= 2**14]
    return [case for case in small if case.family != "extreme"] + [case for case in small if case.family == "extreme"][::3]


@pytest.mark.parametrize("case", chosen(), ids=lambda case: case.id)
def test_case(case):
    report = testing.check(case.problem, case.kind, layout=case.layout, plan=PLAN, backward=False)
    assert report.ok, str(report)


SCORES = (
    "b2 h4/2 q1 k48 d16 fp32 causal softcap=2.0 sink",
    "b2 h4/2 q3 k45 d16 fp16 causal alibi sink",
    "b2 h4/2 q3 k45 d16 fp32 window(9,1) softcap=1.5 alibi(batch)",
    "b1 h2 q2 k0 d16 fp32 sink",
    "b1 h2 q5 k3 d16 fp32 causal sink",  # queries that see no key
)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("text", SCORES)
def test_bent_scores(text, parts):
    """A sink counts once, however many parts there are."""
    report = testing.check(rowmax.Problem.parse(text), plan=f"split_kv[16x16 w4 s1 x{parts}]", backward=False)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("text", "tile"),
    [
        ("b2 h4/2 q1 k45 d16 fp16 causal", "16x16 w4 s1 x3"),
        ("b1 h10/2 q5 k60 d16 fp16 causal softcap=1.5 sink", "16x16 w4 s1 x2"),  # two row tiles, the second not full
        ("b1 h2 q1 k5 d16 fp32 causal", "16x16 w4 s1 x2"),  # a part without keys
    ],
)
def test_the_program_that_ends_last_combines_with_the_bits_of_the_second_kernel(text, tile):
    problem = rowmax.Problem.parse(text)
    given = testing.operands(problem, seed=3)
    one, other = (testing.attend(problem, given, f"split_kv[{tile}{once}]") for once in (" once", ""))
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)
    assert testing.check(problem, plan=f"split_kv[{tile} once]", backward=False).ok


def test_gradients_are_those_of_the_portable_kernels():
    problem = rowmax.Problem.parse("b1 h4/2 q3 k40 d16 fp32 causal")
    assert testing.check(problem, plan="split_kv[16x16 w4 s2 x2]").ok


def test_a_prepared_call_gives_the_same():
    q, k = torch.randn(1, 2, 4, 16), torch.randn(1, 40, 2, 16)
    plan = "split_kv[16x16 w4 s2 x2]"
    out, lse = rowmax.prepare(q, k, k, causal=True, return_lse=True, plan=plan)()
    for one, other in zip((out, lse), rowmax.attention(q, k, k, causal=True, return_lse=True, plan=plan), strict=True):
        assert torch.equal(one, other)


def test_a_nan_before_the_window_stays_there():
    """The tile of keys that the window begins in holds keys that its one query does not see."""
    q, k = torch.randn(1, 1, 2, 16), torch.randn(1, 40, 2, 16)
    v = k.clone()
    v[0, 33] = float("nan")
    assert not rowmax.attention(q, k, v, window=(5, 0), plan="split_kv[16x16 w4 s1 x1]").isnan().any()
    assert not rowmax.attention(q, k, v, window=(6, 0), plan="split_kv[16x16 w4 s1 x1]").isfinite().any()
