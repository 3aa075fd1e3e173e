"""Whatever stands in lengths and tables, the kernels over pages read and write inside their tensors.

Those are copied into filled memory (`canaries`): a read outside makes a result depend on the filler, a write outside is seen
directly. Lies may give wrong numbers.
"""

import pytest
import torch

import paged_cases

pytest.importorskip("triton")
import canaries

from rowmax.kernels import decode_launch
from rowmax.paged import AppendOperands
from rowmax.testing import paged

LENGTHS = [(4, 30), (1, 9), (7, 20)]
TEXT = "b3 h4/2 q12 k32 d16 fp32 causal packed paged8"
ONE_HEAD = TEXT.replace("h4/2", "h2/1")  # of keys: the interpreter takes a second for every few programs


@pytest.mark.parametrize(
    ("lies", "parts"), [*((lies, "p4") for lies in paged_cases.LIES), ("everything", "x2"), ("bounds and lengths", "x2")]
)
def test_lies_touch_nothing_outside(lies, parts):
    problem, operands = paged_cases.lying(ONE_HEAD, LENGTHS, **paged_cases.LIES[lies])
    plan = f"split_kv[16x16 w4 s2 {parts}]"
    results = [canaries.run_guarded_paged(problem, operands, plan, filler) for filler in (float("nan"), 1e4)]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(nan=7.25), other.nan_to_num(nan=7.25)), "memory outside the tensors was read"


def test_lies_about_pages_in_8_bits_touch_nothing_outside():
    """Each page has scales of its own, which are found by its id, too."""
    problem, operands = paged_cases.lying(ONE_HEAD.replace("fp32", "fp16") + " e4m3", LENGTHS, **paged_cases.LIES["everything"])
    results = [canaries.run_guarded_paged(problem, operands, "split_kv[16x16 w4 s2 p4]", filler) for filler in (400.0, -400.0)]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(nan=7.25), other.nan_to_num(nan=7.25)), "memory outside the tensors was read"


@pytest.mark.parametrize(("parts", "heads_first"), [("x1", True), ("x3", False), ("p4", True)])
def test_neighbours_of_a_good_call_are_left_alone(parts, heads_first):
    """And the results are right, though every slot that no key lies in holds NaN."""
    problem, _ = paged_cases.lying(TEXT, LENGTHS)
    operands, flat, packed = paged.paged_operands(problem, LENGTHS, heads_first=heads_first)
    report = paged.check_forward(flat, packed, *canaries.run_guarded_paged(problem, operands, f"split_kv[16x16 w4 s2 {parts}]"))
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "lies",
    [
        {"block_table": torch.full((2, 2), 99)},
        {"block_table": torch.full((2, 2), -1)},
        {"seqlens_k": torch.tensor([2**31 - 1, 40])},
        {"seqlens_k": torch.tensor([0, -5])},
        {"cu_seqlens": torch.tensor([7, -3, 2**31 - 1])},
        {"cu_seqlens": torch.tensor([-(2**31), 99, 99]), "seqlens_k": torch.tensor([4, 4])},
    ],
)
def test_appended_tokens_without_a_place_are_not_written(lies):
    """Nor read from outside; what has a place is at most what two sequences of three tokens have."""
    given = {
        "k_pages": torch.zeros(3, 4, 1, 2),
        "v_pages": torch.zeros(3, 4, 1, 2),
        "k": torch.ones(6, 1, 2),
        "v": torch.ones(6, 1, 2),
        "block_table": torch.tensor([[0, 2], [1, 1]]),
        "seqlens_k": torch.tensor([3, 3]),
        "cu_seqlens": torch.tensor([0, 3, 6]),
        "cos": torch.ones(2, 1),
        "sin": torch.zeros(2, 1),
    }
    operands = AppendOperands(**{**given, **lies})
    with canaries.active():
        decode_launch.append(operands, False)
    for pages in operands[:2]:
        assert bool(((pages == 0) | (pages == 1)).all()), "memory outside was read"
