"""The one suite: every case on every backend present, forward and backward, under the acceptance rule."""

import pytest

import cases
from rowmax.errors import Unsupported


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.id)
def test_case(case, backend, device):
    if cases.too_slow(case, backend, device):
        pytest.skip("too large here; runs on the GPU")
    try:
        report = cases.run(case, backend, device)
    except Unsupported as refused:
        if cases.may_refuse(case, backend):
            pytest.skip(refused.refusals.get(backend, str(refused)))
        raise
    assert report.ok, str(report)


def test_ids_are_unique():
    ids = [case.id + str(case.lengths) for case in cases.CASES]
    assert len(set(ids)) == len(ids)
