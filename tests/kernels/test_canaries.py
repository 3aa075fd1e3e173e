"""Memory around the tensors is neither read nor written, whatever stands in `cu_seqlens`.

The kernels get copies of their tensors in filled memory (`canaries`): a read outside makes a result depend on the filler, a
write outside is seen directly. Lengths that lie may give wrong numbers, never an access outside.
"""

import pytest
import torch

from rowmax import Problem, testing

pytest.importorskip("triton")
import canaries

from rowmax.kernels.launch import Call

TEXT = "b3 h2/1 q40 k40 d16 fp32 packed {}"
SMALL = "q_outer[16x16 w4 s2, 16x16 w4 s2, 16x16 w4 s2]"


@pytest.fixture
def plan(backend, device):
    if backend != "q_outer":
        pytest.skip("slices of torch tensors cannot leave them")
    return SMALL if device == "cpu" else backend


def assert_independent_of_memory_outside(problem, operands, plan):
    """Sequences that overlap may give NaN gradients: an LSE of one is used with the scores of another. Not so the output."""
    results = canaries.run_guarded(problem, operands, plan)
    for tensor in results[:2]:
        assert not bool(torch.isnan(tensor).any()), "memory outside the tensors was read"
    if operands.q.device.type == "cpu":  # on a GPU programs that overlap write in any order
        for one, other in zip(results, canaries.run_guarded(problem, operands, plan, filler=1e4), strict=True):
            assert torch.equal(one.nan_to_num(nan=7.25), other.nan_to_num(nan=7.25)), "memory outside the tensors was read"


@pytest.mark.parametrize("lies", canaries.HOSTILE)
@pytest.mark.parametrize(("side", "band"), [("queries", "window(3,2)"), ("keys", "causal"), ("both", "causal"), ("both", "")])
def test_lies_in_cu_seqlens_touch_nothing_outside(plan, side, lies, band, device):
    problem = Problem.parse(TEXT.format(band))
    dtype = torch.int32 if side == "both" else torch.int64
    operands = canaries.lying(testing.operands(problem, device=device), canaries.HOSTILE[lies], side, dtype)
    assert_independent_of_memory_outside(problem, operands, plan)


@pytest.mark.parametrize("values", [[0, 2**40, -(2**40), 40], [0, 2**32, 2**33, 2**34], [2**63 - 1] * 4, [-(2**63)] * 4])
def test_lies_of_64_bits(plan, values, device):
    problem = Problem.parse(TEXT.format("causal"))
    operands = canaries.lying(testing.operands(problem, device=device), values, "both", torch.int64)
    assert_independent_of_memory_outside(problem, operands, plan)


@pytest.mark.parametrize("layout", ["contiguous", "heads_first", "gaps", "odd", "broadcast"])
@pytest.mark.parametrize(
    "text",
    [
        "b2 h4/2 q19 k37 d24 fp16 causal",
        "b1 h2 q37 k19 d8/40 fp32 window(6,2)",
        "b3 h2 q40 k33 d16 fp16 packed",
        "b2 h2 q20 k20 d16 fp32",
    ],
)
def test_neighbours_of_a_good_call_are_left_alone(plan, text, layout, device):
    """And the results are right."""
    problem = Problem.parse(text)
    operands = testing.operands(problem, layout=layout, device=device)
    out, lse, *grads = canaries.run_guarded(problem, operands, plan)
    report = testing.check_forward(problem, operands, out, lse)
    report = report.merged(testing.check_backward(problem, operands, grads, *testing.cotangents(problem, device=device)))
    assert report.ok, str(report)


@pytest.mark.parametrize(("offset", "where"), [(-1, "before"), (64, "behind"), (9, "gap")])
def test_the_canaries_sing(offset, where):
    """A write before, behind and between the rows of a tensor is noticed."""

    class Launcher:
        @staticmethod
        def _launch(device, call):
            (tensor,) = call.tensors
            tensor.as_strided((1,), (1,), tensor.storage_offset() + offset).zero_()

    tensor = torch.full((4, 20), float("nan")).as_strided((4, 4), (20, 1)).fill_(1.0)
    with pytest.raises(canaries.OutOfBounds, match=where):
        canaries.guarded(Launcher())(tensor.device, Call(None, 1, (tensor,), (), None))
