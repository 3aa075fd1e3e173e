"""When two loss curves agree; the training itself takes a compiler a minute and runs by hand."""

import pytest

import training


@pytest.mark.parametrize(
    ("curves", "agree"),
    [
        ({"rowmax": [3.0, 2.0], "cudnn": [3.0, 2.1], "fa2": [3.0, 2.2]}, True),
        ({"rowmax": [3.0, 1.8], "cudnn": [3.0, 2.1], "fa2": [3.0, 2.2]}, False),
        ({"rowmax": [3.0, float("nan")], "sdpa": [3.0, 2.0]}, False),
        ({"rowmax": [3.0, 1.0], "sdpa": [3.0, 2.0]}, True),  # nothing to measure it by
        ({"cudnn": [3.0, 1.0], "fa2": [3.0, 2.0]}, True),
    ],
)
def test_curves_agree_within_what_peers_differ(curves, agree):
    assert (training.disagreement(curves) == "") == agree
