"""Rows of packed tensors outside every sequence are cleared, and no others; all, where `cu_seqlens` lies."""

import math

import pytest
import torch

pytest.importorskip("triton")
from rowmax.kernels import launch

ROWS, HEADS, DIM = 200, 3, 24


@pytest.mark.parametrize(
    ("cu", "held"),
    [
        ([0, 50, 200], range(200)),
        ([0, 50, 130], range(130)),
        ([70, 70, 90, 131], range(70, 131)),
        ([3, 199], range(3, 199)),
        ([0, 0, 0], range(0)),
        ([200, 200], range(0)),
        ([-5, 100, 200], range(0)),  # outside of the tensor: who knows what the forward makes of it
        ([0, 100, 500], range(0)),
        ([0, 150, 20, 60], range(0)),  # rows 60 to 150 are somebody's, but who knows
        (list(range(0, 201, 5)), range(200)),
        ([*range(0, 100), *[100] * 300, 99, 150], range(0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_that_no_sequence_holds(cu, held, dtype):
    x, y = torch.full((ROWS, HEADS, DIM), math.nan).bfloat16(), torch.full((ROWS, 1, 8), math.nan)
    lse = torch.full((HEADS, ROWS), math.nan)
    launch._launch(x.device, launch.outside_call(torch.tensor(cu, dtype=dtype), x, y, lse=lse))
    kept = torch.zeros(ROWS, dtype=torch.bool)
    kept[held.start : held.stop] = True
    for tensor in (x, y):
        assert torch.equal(tensor.isnan().all(-1).all(-1), kept)
        assert bool((tensor[~kept] == 0).all())
    assert torch.equal(lse.isnan(), kept.expand(HEADS, ROWS))
    assert bool((lse[:, ~kept] == -math.inf).all())
