"""The plan: which algorithm, and the reason for each that was passed over. No GPU and no Triton are needed to ask."""

import pickle

import pytest
import torch

from rowmax import Device, Plan, Problem, Unsupported, plan
from rowmax.plan.tile import Tile

DENSE = Problem.parse("b2 h8/2 q512 k512 d128 bf16 causal")
LARGE = Problem.parse("b1 h16 q16384 k16384 d128 bf16")
CPU, H200 = Device.named("cpu"), Device.named("H200")


@pytest.mark.parametrize("text", ["128x64 w8 s3", "64x64", "128x128 w8 s2 tma"])
def test_tile_spelling(text):
    assert str(Tile.parse(text)) == text


@pytest.mark.parametrize("text", ["tiled", "q_outer[128x64 w8 s3]", "q_outer[128x64 w8 s3, 64x64 w4 s2, 64x128 w4 s1]"])
def test_plan_spelling(text):
    assert str(Plan.parse(text)) == text


@pytest.mark.parametrize("text", ["", "q_outer[", "q outer", "q_outer[ax3]", "q_outer[128x64 w8 s3"])
def test_a_wrong_plan_spelling_is_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011
        Plan.parse(text)


@pytest.mark.parametrize("name", ["A100", "L4", "H100", "H200", "B200"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_gpu_runs_the_triton_kernels(name, direction):
    chosen = plan(DENSE, Device.named(name), direction=direction)
    assert chosen.algorithm == ("hopper" if name in ("H100", "H200") and direction == "forward" else "q_outer")
    assert len(chosen.tiles) in ((1,) if direction == "forward" else (2, 3))
    assert {"aten", "tiled"} <= dict(chosen.refusals).keys()
    assert all(reason for _, reason in chosen.refusals)


def test_every_problem_has_a_plan_on_the_cpu():
    for text in ("b1 h1 q1 k1 d1 fp64", "b0 h2 q0 k0 d8 bf16", "b3 h4/2 q50 k70 d40/24 fp16 window(3,0) packed", str(DENSE)):
        for direction in ("forward", "backward"):
            assert plan(Problem.parse(text), CPU, direction=direction).algorithm in ("aten", "tiled")


def test_aten_is_taken_where_it_is_right_and_refuses_with_a_reason_elsewhere():
    """Torch's causal mask is aligned to the top left: with len_q != len_k it would be wrong."""
    assert plan(Problem.parse("b1 h2 q64 k64 d64 fp32 causal"), CPU).algorithm == "aten"
    for text in ("b1 h2 q32 k64 d64 fp32 causal", "b1 h2 q64 k64 d64 fp32 window(3,0)", "b1 h2 q64 k64 d64/32 fp32"):
        chosen = plan(Problem.parse(text), CPU)
        assert chosen.algorithm == "tiled"
        assert dict(chosen.refusals)["aten"]


def test_a_preferred_algorithm_is_taken_or_refused_aloud():
    assert plan(DENSE, CPU, prefer="tiled").algorithm == "tiled"
    with pytest.raises(Unsupported) as caught:
        plan(DENSE, H200, prefer="tiled")
    assert str(DENSE) in str(caught.value)
    assert "runs on the CPU" in caught.value.refusals["tiled"]
    assert set(caught.value.refusals) >= {"aten", "tiled", "q_outer"}


def test_fp64_on_a_gpu_lists_every_candidates_reason():
    with pytest.raises(Unsupported) as caught:
        plan(DENSE.with_(dtype=torch.float64), H200)
    assert "fp64" in caught.value.refusals["q_outer"]
    assert isinstance(caught.value, NotImplementedError)


def test_an_unknown_algorithm_names_the_known_ones():
    with pytest.raises(Unsupported, match=r"no algorithm 'fast'; known are .*q_outer"):
        plan(DENSE, H200, prefer="fast")


def test_given_tiles_are_used_as_they_are():
    text = "q_outer[32x64 w4 s2, 16x32 w4 s2, 32x16 w4 s2]"
    assert plan(DENSE, H200, prefer=text).tiles == (Tile(32, 64, 4, 2),)
    assert plan(DENSE, H200, prefer=text, direction="backward").tiles == (Tile(16, 32, 4, 2), Tile(32, 16, 4, 2))
    own = plan(DENSE, H200, direction="backward").tiles
    assert plan(DENSE, H200, prefer="q_outer[32x64 w4 s2]", direction="backward").tiles == own


def test_rows_that_are_not_aligned_take_no_descriptors():
    """TMA needs 16 bytes; the reason says what was given up."""
    for direction in ("forward", "backward"):
        chosen = plan(LARGE, H200, direction=direction, prefer="q_outer")
        other = plan(LARGE, H200, direction=direction, prefer="q_outer", aligned=False)
        assert any(tile.descriptors for tile in chosen.tiles)
        assert not any(tile.descriptors for tile in other.tiles)
        assert "not 16-byte aligned" in other.reason


def test_an_old_gpu_is_refused_by_its_capability():
    with pytest.raises(Unsupported) as caught:
        plan(DENSE, Device("NVIDIA V100", "cuda", (7, 0), 80, 98_304))
    assert "compute capability 8.0" in caught.value.refusals["q_outer"]


def test_plans_are_cached_and_unsupported_can_be_pickled():
    assert plan(DENSE, H200) is plan(DENSE, H200)
    error = Unsupported("nothing runs:", {"a": "reason"})
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.refusals == error.refusals


def test_an_unknown_device_names_the_known_ones():
    with pytest.raises(KeyError, match=r"no device 'tpu'; known are .*h200"):
        Device.named("tpu")
