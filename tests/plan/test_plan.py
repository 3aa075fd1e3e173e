"""The plan: which algorithm, and the reason for each that was passed over. No GPU and no Triton are needed to ask."""

import itertools
import pickle

import pytest
import torch

import rowmax
from rowmax import Device, Plan, Problem, ProblemError, Unsupported, plan
from rowmax.plan.hopper import SCHEDULES, HopperTile
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


def test_every_tile_comes_back_from_its_spelling():
    for sides, warps, stages, tma in itertools.product([(16, 256), (128, 64)], (1, 4, 16), (1, 8), (False, True)):
        tile = Tile(*sides, warps, stages, tma)
        assert Tile.parse(str(tile)) == Tile.parse(f"  {tile} ".replace(" ", "  ")) == tile
    assert Tile.parse("1x16384") == Tile(1, 16384)
    words = itertools.product(
        (64, 192), (16, 256), (2, 8), (1, 2), (False, True), ("", "lazy", "steady"), SCHEDULES, (0, 1, 1024)
    )
    for block_m, block_n, stages, q_stages, pingpong, word, *others in words:
        wide = HopperTile(block_m, block_n, 4, stages, False, q_stages, pingpong, word != "", word == "steady", *others)
        assert HopperTile.parse(str(wide)) == wide
    assert HopperTile.parse("128x64") == HopperTile(128, 64, 4, 2), "words left out have defaults"


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "256", "axb", "x", "64x", "64x64x64", "-64x64", "64x64 w4", "64x64 s3", "64x64 s3 w4", "64x64 w0 s1"),
        *("64x64 tma", "64x64 w4 s3 banana", "64x64 w4 s3 tma w8", "64x64 w4 s3 tma tma", "64x64 w4 w8 s3", "64x64 w s3"),
        *("64x64w4 s3", "64x64 w4 s3 q1", "\u0666\u0664x64 w4 s3", "64x64 w\u00b2 s3", "64x64\nw4 s3", "1234567890x1"),
    ],
)
def test_a_wrong_tile_teaches_its_spelling(text):
    with pytest.raises(ProblemError, match=r"is no tile; examples: '128x64 w4 s3'"):
        Tile.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "128", "axb", "0x128", "128x0", "128x128 w4 s2", "128x128 s2 s3 q1 static", "128x128 s2 q1 static dynamic"),
        *("128x128 s2 s3 q1 static dynamic", "128x128 q1 s2", "128x128 s2 lazy pingpong", "128x128 s2 q1 static banana"),
        *("128x128 s2 q1 tma", "128x128 s q1", "128x128 s2 q1 static g8 g8", "128x128 s2 q1 backward", "128x12345678"),
    ],
)
def test_a_wrong_tile_of_hopper_teaches_its_spelling(text):
    with pytest.raises(ProblemError, match="an example: '128x128 s2 q1 pingpong static g32'"):
        HopperTile.parse(text)


@pytest.mark.parametrize("text", ["", "q_outer[", "q outer", "q_outer]", "q_outer[128x64 w8 s3", "q_outer 128x64 w8 s3"])
def test_a_wrong_plan_teaches_its_spelling(text):
    with pytest.raises(ProblemError, match=r"is no plan; an example: 'q_outer\[128x128 w8 s2\]'"):
        Plan.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        *("q_outer[]", "q_outer[ax3]", "q_outer[64x64 w4 s2,]", "q_outer[,64x64 w4 s2]", "tiled[256]", "hopper[]"),
        *("hopper[64x64 w4 s2]", "hopper[, 64x64 w4 s2, 64x64 w4 s2]", "q_outer[128x128 s2 q1 static]"),
        *("hopper[128x128 s2 q1 static, 128x128 s2 q1 static]", "hopper[128x128 s2 q1 static, 64x64 w4 s2 lazy]"),
    ],
)
def test_a_plan_of_a_wrong_tile_names_the_tile(text):
    """Behind the first tile are those of the backward, which are plain in each algorithm."""
    with pytest.raises(ProblemError, match=r"is no tile.* examples?: "):
        Plan.parse(text)


@pytest.mark.parametrize("name", ["A100", "L4", "H100", "H200", "B200"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_gpu_runs_the_triton_kernels(name, direction):
    chosen = plan(DENSE, Device.named(name), direction=direction)
    assert chosen.algorithm == ("hopper" if name in ("H100", "H200") else "q_outer")
    assert len(chosen.tiles) in ((1,) if direction == "forward" or chosen.algorithm == "hopper" else (2, 3))
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
    own = plan(DENSE, H200, prefer="q_outer", direction="backward").tiles
    assert plan(DENSE, H200, prefer="q_outer[32x64 w4 s2]", direction="backward").tiles == own


@pytest.mark.parametrize(
    ("text", "problem", "device", "direction", "reason"),
    [
        ("q_outer[0x0 w4 s1]", DENSE, H200, "forward", "block sizes are powers of two from 16 to 256"),
        ("q_outer[16x24 w4 s1]", DENSE, H200, "forward", "block sizes are powers of two from 16 to 256"),
        ("q_outer[64x64]", DENSE, H200, "forward", "warps from 1 to 16"),
        ("q_outer[64x64 w3 s1]", DENSE, H200, "forward", "warps from 1 to 16"),
        ("q_outer[64x64 w4 s0]", DENSE, H200, "forward", "stages are 1 to 8"),
        ("q_outer[128x128 w8 s5]", DENSE, H200, "forward", "bytes of shared memory"),
        ("q_outer[128x128 w8 s3]", DENSE, Device.named("L4"), "forward", "101,376"),
        ("q_outer[256x256 w4 s1]", DENSE, H200, "forward", "registers a thread"),
        ("q_outer[64x64 w4 s2, 64x64 w4 s2, 16x8 w4 s1]", DENSE, H200, "backward", "16x8 w4 s1: block sizes"),
        ("hopper[64x64 s2 q1 static, 64x64 w4 s2, 16x8 w4 s1]", DENSE, H200, "backward", "16x8 w4 s1: block sizes"),
        ("hopper[192x256 s8 q2 static]", DENSE, H200, "forward", "a consumer has 160"),
        ("hopper[128x128 s4 q1 static]", DENSE, H200, "forward", "bytes of shared memory"),
        ("hopper[128x64 s9 q1 static]", DENSE, H200, "forward", "stages are 2 to 8"),
        ("hopper[128x64 s2 q1 static g1025]", DENSE, H200, "forward", "groups at most 1024 MB"),
        ("hopper[128x512 s2 q1 static]", DENSE, H200, "forward", "at most 256 columns"),
        ("tiled[256x0]", DENSE, CPU, "forward", "256x0: sides are 1 and more"),
        ("tiled[16x16, 0x16]", DENSE, CPU, "backward", "0x16: sides are 1 and more"),
        ("tiled[16x16 w4 s1]", DENSE, CPU, "forward", "two sides and nothing else"),
        ("aten[0x0]", Problem.parse("b1 h2 q64 k64 d64 fp32"), CPU, "forward", "sides are 1 and more"),
    ],
)
def test_given_tiles_that_cannot_run_are_refused(text, problem, device, direction, reason):
    with pytest.raises(Unsupported) as caught:
        plan(problem, device, direction=direction, prefer=text)
    algorithm = "q_outer" if direction == "backward" and device is H200 else text.split("[")[0]
    assert reason in caught.value.refusals[algorithm]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("algorithm", "first", "other", "device", "right"),
    [
        ("q_outer", "64x64 w4 s2", "64x64 w4 s1", H200, (0, 2, 3)),
        ("hopper", "128x128 s2 q1 static", "64x64 w4 s1", H200, (0, 2, 3)),
        ("tiled", "16x32", "32x16", CPU, (0, 1, 2)),
    ],
)
def test_as_many_tiles_are_given_as_are_used_or_the_forward_refuses_too(algorithm, first, other, device, right, direction):
    for behind in range(5):
        text = f"{algorithm}[{', '.join([first] + [other] * behind)}]"
        if behind in right:
            plan(DENSE, device, direction=direction, prefer=text)
            continue
        with pytest.raises(Unsupported, match="behind the tile of the forward") as caught:
            plan(DENSE, device, direction=direction, prefer=text)
        assert f"not {behind}" in caught.value.refusals[algorithm]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_tile_that_cannot_run_is_refused_in_its_own_direction_only(direction):
    bad = "8x8 w4 s1"
    forward, backward = f"q_outer[{bad}, 64x64 w4 s2, 64x64 w4 s2]", f"q_outer[64x64 w4 s2, {bad}, {bad}]"
    right, wrong = (backward, forward) if direction == "forward" else (forward, backward)
    assert plan(DENSE, H200, direction=direction, prefer=right).algorithm == "q_outer"
    with pytest.raises(Unsupported):
        plan(DENSE, H200, direction=direction, prefer=wrong)


def test_attention_refuses_a_plan_before_it_computes():
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(Unsupported, match="256x0: sides are 1 and more"):
        rowmax.attention(q, q, q, plan="tiled[256x0]")
    with pytest.raises(Unsupported, match="takes 1 or 2 tiles, not 3"):
        rowmax.attention(q, q, q, plan="tiled[4x4, 4x4, 4x4, 4x4]")
    with pytest.raises(ProblemError, match="'4x4 banana' is no tile"):
        rowmax.attention(q, q, q, plan="tiled[4x4 banana]")


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
