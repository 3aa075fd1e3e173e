"""Whatever stands in lengths and tables, the kernels over pages read and write inside their tensors.

Those are copied into filled memory (`canaries`): a read outside makes a result depend on the filler, a write outside is seen
directly. Lies may give wrong numbers.
"""

import pytest
import torch

import paged_cases

pytest.importorskip("triton")
import canaries

from rowmax.testing import paged

LENGTHS = [(4, 30), (1, 9), (7, 20)]
TEXT = "b3 h4/2 q12 k32 d16 fp32 causal packed paged8"


@pytest.mark.parametrize(
    ("lies", "parts"), [*((lies, "p4") for lies in paged_cases.LIES), ("everything", "x2"), ("bounds and lengths", "x2")]
)
def test_lies_touch_nothing_outside(lies, parts):
    problem, operands = paged_cases.lying(TEXT, LENGTHS, **paged_cases.LIES[lies])
    plan = f"split_kv[16x16 w4 s2 {parts}]"
    results = [canaries.run_guarded_paged(problem, operands, plan, filler) for filler in (float("nan"), 1e4)]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(nan=7.25), other.nan_to_num(nan=7.25)), "memory outside the tensors was read"


@pytest.mark.parametrize(("parts", "heads_first"), [("x1", True), ("x3", False), ("p4", True)])
def test_neighbours_of_a_good_call_are_left_alone(parts, heads_first):
    """And the results are right, though every slot that no key lies in holds NaN."""
    problem, _ = paged_cases.lying(TEXT, LENGTHS)
    operands, flat, packed = paged.paged_operands(problem, LENGTHS, heads_first=heads_first)
    report = paged.check_forward(flat, packed, *canaries.run_guarded_paged(problem, operands, f"split_kv[16x16 w4 s2 {parts}]"))
    assert report.ok, str(report)
