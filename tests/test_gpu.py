"""The checks of the GPU tier under pytest; `run_gpu.py` runs them without it."""

import pytest
import torch

pytestmark = pytest.mark.gpu


def names():
    try:
        import gpu_checks
    except ImportError:  # no Triton
        return []
    return list(gpu_checks.CHECKS)


@pytest.mark.parametrize("name", names())
def test_gpu(name):
    import gpu_checks

    assert torch.cuda.is_available(), "the GPU tier needs a CUDA device"
    gpu_checks.CHECKS[name]()
