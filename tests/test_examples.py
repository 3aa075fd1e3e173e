"""Every example runs, and is right."""

import importlib.util
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "examples"
MOST_LINES = 60


def run(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main()


@pytest.mark.parametrize("name", ["varlen", "merge", "shared_prefix", "score_mod"])
def test_equal(name):
    torch.testing.assert_close(torch.tensor(run(name)), torch.tensor(0.0))


def test_train_step_learns_to_copy():
    first, last = run("train_step")
    assert last < first / 10


def test_mean_flow_learns_to_sample_in_one_step():
    before, after = run("mean_flow")
    assert after < 0.75 * before


def test_transformers_generate():
    pytest.importorskip("transformers")
    assert run("transformers_generate")


def test_all_are_tested_and_short():
    files = {path.stem: path.read_text().count("\n") for path in FOLDER.glob("*.py")}
    assert set(files) == {"varlen", "merge", "shared_prefix", "score_mod", "train_step", "transformers_generate", "mean_flow"}
    assert max(files.values()) < MOST_LINES
