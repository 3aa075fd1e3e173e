"""The one suite: every case on every backend present, forward and backward, under the acceptance rule."""

import pytest

import cases
import run_gpu
from rowmax.errors import Unsupported


def pairs(device):
    return [
        pytest.param(case, backend, id=f"{backend}-{case.id}")
        for backend in cases.backends(device) + cases.forward_backends(device)
        for case in cases.CASES
        if not cases.too_slow(case, backend, device)
    ]


@pytest.mark.parametrize(("case", "backend"), pairs("cpu"))
def test_case(case, backend):
    try:
        report = cases.run(case, backend, "cpu")
    except Unsupported as refused:
        if cases.may_refuse(case, backend):
            pytest.skip(refused.refusals.get(backend, str(refused)))
        raise
    assert report.ok, str(report)


@pytest.fixture(scope="module")
def on_the_gpu():
    """Every case, run in several processes that share the GPU: (backend, case index) -> result. Gradients once only."""
    return {
        (backend, result.index): result
        for backend in cases.backends("cuda") + cases.forward_backends("cuda")
        for result in run_gpu.run_cases(backend=backend, backward=backend in cases.backends("cuda"))
    }


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "backend"), pairs("cuda"))
def test_case_on_a_gpu(case, backend, on_the_gpu):
    result = on_the_gpu[backend, cases.CASES.index(case)]
    if result.refused:
        pytest.skip("the plan refuses, as it may")
    assert not result.error, result.error


def test_ids_are_unique():
    ids = [case.id + str(case.lengths) for case in cases.CASES]
    assert len(set(ids)) == len(ids)
