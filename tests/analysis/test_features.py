"""The table of features in the docs is what the plan says, and what it says is so."""

from pathlib import Path

import pytest
import torch

import rowmax
from rowmax import testing
from rowmax.analysis import features

PAGE = Path(__file__).parents[2] / "docs" / "features.md"


def test_the_page_is_what_the_plan_says():
    assert features.replaced(PAGE.read_text()) == PAGE.read_text(), "python -m rowmax.analysis.features docs/features.md"


@pytest.mark.parametrize("name", features.FEATURES)
def test_the_cpu_runs_what_the_table_says(name):
    """The rows are of the same words as these calls, smaller."""
    words = features.FEATURES[name]
    if "paged" in words:
        pytest.skip("tests of paged calls are elsewhere")
    problem = features.problem_of(words).with_(batch=2, heads_q=2, heads_k=1, len_q=9, len_k=9)
    forward, backward = features.taken(features.problem_of(words), features.DEVICES["CPU"]).split(" / ")
    assert "none" not in (forward, backward)
    assert testing.check(problem).ok


def test_every_gpu_has_a_backend_for_what_has_no_own():
    """What is read for every pair the portable kernels take in both directions, as Hopper's do."""
    for name in [name for name in features.FEATURES if "bias" in name or "mask" in name]:
        problem = features.problem_of(features.FEATURES[name])
        assert features.runs(problem, "hopper") == "F B"
        assert features.taken(problem, features.DEVICES["H200"]) == "hopper / hopper"
        assert features.taken(problem, features.DEVICES["A100"]) == "q_outer / q_outer"


def test_log_of_plans(capsys, monkeypatch):
    from rowmax.plan import log

    q = torch.randn(1, 7, 2, 16)
    monkeypatch.setenv("ROWMAX_LOG", "plan")
    log.wanted.cache_clear()
    try:
        for _ in range(2):
            rowmax.attention(q, q, q, softcap=3.5)
        lines = [line for line in capsys.readouterr().err.splitlines() if "softcap=3.5" in line]
        assert len(lines) == 1, "once for each problem"
        assert lines[0].startswith("rowmax: 'b1 h2 q7 k7 d16 fp32 softcap=3.5' forward on ")
        assert "tiled[" in lines[0]
        assert "not aten: torch's CPU operator takes no soft-cap" in lines[0]
        monkeypatch.setenv("ROWMAX_LOG", "plans")
        log.wanted.cache_clear()
        with pytest.warns(RuntimeWarning, match="ROWMAX_LOG=plans is not known"):
            rowmax.attention(q, q, q, softcap=3.25)
    finally:
        monkeypatch.undo()
        log.wanted.cache_clear()
