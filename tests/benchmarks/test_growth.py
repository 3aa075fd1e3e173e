"""Slopes and the picture of made-up rows; the measuring itself needs a GPU."""

import json

import pytest

import growth
from shapes import BOTH, FORWARD


def rows(power: float, tokens=growth.TOKENS) -> list[dict]:
    """Everything linear, dense quadratic with a linear part as outputs are, and one that grows with `power`."""
    found = []
    for n in tokens:
        for which, names in growth.WHO.items():
            for who in names:
                grown = 6 * n * n + 128 * n if who in growth.QUADRATIC else 516 * n**power
                found.append({"tokens": n, "pass": which, "who": who, "ms": 1e-6 * n * n, "peak_bytes": round(grown)})
    return found


def test_slopes():
    found = growth.slopes(rows(1.0))
    assert [(one["pass"], one["who"]) for one in found] == [(which, who) for which in growth.WHO for who in growth.WHO[which]]
    assert all(one["holds"] for one in found)
    assert all(one["time"] == 2.0 for one in found)
    assert {one["who"]: one["wanted"] for one in found} == {
        **dict.fromkeys(growth.QUADRATIC, 2.0),
        **dict.fromkeys(("kv_outer", "q_outer", "hopper"), 1.0),
    }


def test_growth_that_is_too_fast_shows(capsys):
    assert growth.report(rows(1.0))
    assert not growth.report(rows(1.1))
    assert "WRONG, wanted 1.0" in capsys.readouterr().out


def test_lengths_that_were_not_run_are_left_out():
    some = [row for row in rows(1.0) if row["who"] != "dense" or row["tokens"] <= 4096]
    some.append({"tokens": 65536, "pass": FORWARD, "who": "dense", "why": "does not fit"})
    (dense,) = (one for one in growth.slopes(some) if one["who"] == "dense")
    assert dense["lengths"] == 3
    assert dense["holds"]


def test_a_report_and_its_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "rows.json", tmp_path / "growth.png"
    path.write_text(json.dumps({"gpu": "NVIDIA H200", "date": "2026-11-30T00:00:00", "rows": rows(1.0)}))
    assert growth.main(["--report", str(path), "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert growth.main([]) == 1
    assert "no CUDA GPU" in capsys.readouterr().err


def test_the_dense_stand_in_is_right():
    """On the CPU, by the same check."""
    import torch

    from calls import make_operands
    from check import Check

    problem = growth.problem_of(128)
    operands, grad_out = make_operands(problem, torch.device("cpu"), seed=0)
    check = Check(problem, operands, grad_out)
    assert not check.broken(growth._math_call(operands, grad_out, BOTH)(), peer=True)
