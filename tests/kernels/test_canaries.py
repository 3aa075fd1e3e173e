"""Memory around the tensors is neither read nor written, whatever stands in `cu_seqlens`.

The kernels get copies of their tensors in filled memory (`canaries`): a read outside makes a result depend on the filler, a
write outside is seen directly. Lengths that lie may give wrong numbers, never an access outside.
"""

import math

import canaries
import pytest
import torch

from rowmax import Device, Problem, plan, testing

launch = pytest.importorskip("rowmax.kernels.launch")

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
HOSTILE = {
    "decreasing": [0, 30, 10, 40],
    "beyond the end": [0, 20, 41, 999],
    "negative": [-5, -1, 20, 40],
    "starts late": [7, 9, 20, 40],
    "all at the end": [40, 40, 40, 40],
    "smallest and largest": [INT_MIN, INT_MAX, INT_MIN, INT_MAX],
    "largest": [INT_MAX, INT_MAX, INT_MAX, INT_MAX],
    "smallest": [INT_MIN, INT_MIN, INT_MIN, INT_MIN],
    "wraps": [0, INT_MAX, INT_MIN, 40],
    "decreasing by one": [0, 21, 20, 40],
}
TEXT = "b3 h2/1 q40 k40 d16 fp32 packed {}"


ORIGINAL = launch._launch


@pytest.fixture
def guard(monkeypatch, backend):
    """Call it with a filler: launches are then guarded with it."""
    if backend != "q_outer":
        pytest.skip("slices of torch tensors cannot leave them")

    def start(filler=math.nan):
        monkeypatch.setattr(launch, "_launch", ORIGINAL)
        monkeypatch.setattr(launch, "_launch", canaries.guarded(launch, filler))

    start()
    return start


def plans(problem, device):
    """Forward and backward, with small tiles in the interpreter."""
    prefer = "q_outer[16x16 w4 s2, 16x16 w4 s2, 16x16 w4 s2]" if device == "cpu" else "q_outer"
    return [plan(problem, Device.of(torch.device(device)), direction=way, prefer=prefer) for way in ("forward", "backward")]


def run(problem, operands, device):
    """`(out, lse, dq, dk, dv)` below the check of the values of `cu_seqlens`, which exists on the CPU alone."""
    forward, backward = plans(problem, device)
    out, lse = launch.forward(problem, operands, forward, True)
    given = testing.cotangents(problem, device=device)
    return (out, lse, *launch.backward(problem, operands, out, lse, *given, (True, True, True), backward))


def assert_independent_of_memory_outside(guard, problem, operands, device):
    """Sequences that overlap may give NaN gradients: an LSE of one is used with the scores of another. Not so the output."""
    out, lse, *grads = run(problem, operands, device)
    assert not bool(torch.isnan(out).any()), "memory outside the tensors was read"
    assert not bool(torch.isnan(lse).any()), "memory outside the tensors was read"
    if device == "cpu":  # on a GPU programs that overlap write in any order
        guard(1e4)
        for one, other in zip((out, lse, *grads), run(problem, operands, device), strict=True):
            assert torch.equal(one.nan_to_num(nan=7.25), other.nan_to_num(nan=7.25)), "memory outside the tensors was read"
        guard()


@pytest.mark.parametrize("band", ["causal", "window(3,2)"])
@pytest.mark.parametrize("lies", HOSTILE)
@pytest.mark.parametrize("side", ["queries", "keys", "both"])
def test_lies_in_cu_seqlens_touch_nothing_outside(guard, side, lies, band, device):
    problem = Problem.parse(TEXT.format(band))
    operands = testing.operands(problem, device=device)
    cu = torch.tensor(HOSTILE[lies], dtype=torch.int32 if band == "causal" else torch.int64, device=device)
    true = operands.cu_seqlens_q.to(cu.dtype)
    given = operands._replace(cu_seqlens_q=true if side == "keys" else cu, cu_seqlens_k=true if side == "queries" else cu)
    assert_independent_of_memory_outside(guard, problem, given, device)


@pytest.mark.parametrize("values", [[0, 2**40, -(2**40), 40], [0, 2**32, 2**33, 2**34], [2**63 - 1] * 4, [-(2**63)] * 4])
def test_lies_of_64_bits(guard, values, device):
    problem = Problem.parse(TEXT.format("causal"))
    cu = torch.tensor(values, dtype=torch.int64, device=device)
    given = testing.operands(problem, device=device)._replace(cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert_independent_of_memory_outside(guard, problem, given, device)


@pytest.mark.usefixtures("guard")
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
def test_neighbours_of_a_good_call_are_left_alone(text, layout, device):
    """And the results are those of the unguarded call."""
    problem = Problem.parse(text)
    operands = testing.operands(problem, layout=layout, device=device)
    out, lse, *grads = run(problem, operands, device)
    report = testing.check_forward(problem, operands, out, lse)
    report = report.merged(testing.check_backward(problem, operands, grads, *testing.cotangents(problem, device=device)))
    assert report.ok, str(report)


def test_a_guard_notices_a_write_and_a_read(backend, device):
    """The canaries sing: a write before, behind and into a gap is seen, and a read outside gives NaN."""
    if backend != "q_outer":
        pytest.skip("one backend is enough")

    class Launcher:
        @staticmethod
        def _launch(device, call):
            offset, (tensor,) = call[0], call[2]
            flat = tensor.as_strided((1,), (1,), tensor.storage_offset() + offset)
            assert bool(torch.isnan(flat).all())
            flat.zero_()

    for offset, message in ((-1, "before"), (64, "behind"), (9, "gap")):
        strided = torch.full((4, 20), float("nan"), device=device)[:, :4].as_strided((4, 4), (20, 1)).fill_(1.0)
        with pytest.raises(canaries.OutOfBounds, match=message):
            canaries.guarded(Launcher())(device, (offset, 1, (strided,), None))
