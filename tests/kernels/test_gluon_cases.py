"""The list of cases on the simulated Hopper forward, with the plan's own tiles: what the kernel takes, and is small."""

import os

import pytest

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the second kernel runs in Triton's interpreter", allow_module_level=True)

import simulate

import cases
from rowmax import Device, plan, testing

H200 = Device.named("H200")


def taken(case) -> bool:
    problem = case.problem
    work = min(problem.batch, problem.len_q, problem.len_k, problem.heads_q) > 0
    # The interpreter compares NaN in bf16 wrongly.
    compared = problem.dtype_name == "bf16" and ("nan" in case.kind or "inf" in case.kind)
    return work and not case.large and not compared and not cases.may_refuse(case, "hopper")


@pytest.mark.parametrize(("number", "case"), list(enumerate(filter(taken, cases.CASES))), ids=lambda x: getattr(x, "id", None))
def test_a_simulated_case(number, case):
    """Loads arrive early in every second one, and late in the others."""
    operands = testing.operands(case.problem, case.kind, layout=case.layout, lengths=case.lengths)
    (tile,) = plan(case.problem, H200, prefer="hopper", pairs_aligned=True).tiles
    out, lse, _ = simulate.forward(case.problem, operands, tile, late=number % 2 == 1)
    report = testing.check_forward(case.problem, operands, out, lse)
    assert report.ok, str(report)
