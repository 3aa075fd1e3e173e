"""`rowmax explain --png`: a picture is written for every kind of plan, and what is missing is said."""

import builtins

import pytest

from rowmax import Device, PagedProblem, Problem
from rowmax.analysis import report

H200 = Device.named("H200")
PNG = b"\x89PNG\r\n"


@pytest.mark.parametrize(
    "text",
    ["b1 h16 q4096 k4096 d128 bf16 causal", "b1 h32/8 q1 k131072 d128 bf16", "b64 h32/8 q1 k8192 d128 bf16 causal paged16"],
)
def test_a_picture_is_written(text, tmp_path):
    pytest.importorskip("matplotlib")
    from rowmax.analysis.picture import draw

    problem = (PagedProblem if "paged" in text else Problem).parse(text)
    against = () if "paged" in text else ("kv_outer", "dense")
    draw(problem, H200, report.explain(problem, H200, against=against), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(PNG)


def test_what_it_needs_is_said(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from rowmax.cli.app import app

    importing = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return importing(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    path = str(tmp_path / "picture.png")
    asked = CliRunner().invoke(app, ["explain", "b1 h16 q4096 k4096 d128 bf16", "--gpu", "H200", "--png", path])
    assert asked.exit_code == 2
    assert "pip install 'rowmax[plot]'" in asked.stderr
