"""What tiles need, beside what was compiled: shared memory in bytes by Triton 3.6.0 for `b1 h2 q1024 k1024 ... causal`."""

import pytest

from rowmax import Device, Problem, Unsupported
from rowmax.plan import by_table
from rowmax.plan.hopper import HopperTile
from rowmax.plan.resources import KERNELS, misfit, shared_bytes
from rowmax.plan.tile import Tile

H200 = Device.named("H200")

# dims and dtype, tile, compiled
HOPPER = [
    ("d128 bf16", "128x128 s2 q1 pingpong static", 197_256),
    ("d64 bf16", "192x64 s3 q2 dynamic", 123_668),
    ("d128/64 bf16", "64x64 s2 q1 static", 74_316),
    ("d256 bf16", "128x64 s2 q1 lazy static", 230_024),
    # O in two halves, because of its dimensions or for want of room
    ("d256 bf16", "64x64 s2 q1 static", 180_812),
    ("d192/128 bf16", "128x128 s2 q1 dynamic", 230_104),
    ("d64/128 bf16", "128x64 s3 q2 static", 140_000),
    ("d128 bf16", "128x128 s2 q2 lazy dynamic", 230_072),
]
# dims and dtype, kernel, tile, compiled for an H200
PORTABLE_H200 = [
    ("d64 bf16", "forward", "128x64 w4 s1", 24_576),
    ("d64 bf16", "forward", "128x64 w4 s2", 49_152),
    ("d64 bf16", "forward", "128x64 w4 s3 tma", 66_560),
    ("d128 bf16", "forward", "64x64 w4 s2", 81_920),
    ("d128/64 bf16", "forward", "64x32 w4 s3", 53_248),
    ("d64 fp32", "forward", "32x32 w4 s1", 20_480),
    ("d64 fp32", "forward", "32x32 w4 s2", 28_800),
    ("d64 bf16", "dq", "64x64 w4 s1", 32_768),
    ("d64 bf16", "dq", "64x64 w4 s2 tma", 50_176),
    ("d64 bf16", "dq", "32x64 w4 s3", 45_056),
    ("d64 bf16", "dkdv", "64x64 w4 s1", 32_768),
    ("d64 bf16", "dkdv", "64x64 w4 s2 tma", 49_696),
    ("d64 bf16", "dkdv", "32x64 w4 s3", 41_472),
    ("d64 bf16", "dk", "64x64 w4 s2 tma", 49_696),
    ("d64 bf16", "dv", "64x64 w4 s1", 16_384),
    ("d64 bf16", "dv", "64x64 w4 s2 tma", 41_248),
    ("d64 bf16", "dv", "32x64 w4 s3", 33_024),
]
PORTABLE_A100 = [
    ("d64 bf16", "forward", "128x64 w4 s1", 24_576),
    ("d64 bf16", "forward", "128x64 w4 s2", 32_768),
    ("d64 bf16", "forward", "128x64 w4 s3", 49_152),
    ("d128 bf16", "forward", "64x64 w4 s2", 57_344),
    ("d128/64 bf16", "forward", "64x32 w4 s3", 40_960),
    ("d64 fp32", "forward", "32x32 w4 s2", 28_800),
    ("d64 bf16", "dq", "64x64 w4 s1", 26_624),
    ("d64 bf16", "dq", "64x64 w4 s2", 32_768),
    ("d64 bf16", "dq", "32x64 w4 s3", 45_056),
    ("d64 bf16", "dkdv", "64x64 w4 s2", 33_280),
    ("d64 bf16", "dkdv", "32x64 w4 s3", 33_280),
    ("d64 bf16", "dk", "64x64 w4 s2", 33_280),
    ("d64 bf16", "dv", "64x64 w4 s1", 16_384),
    ("d64 bf16", "dv", "32x64 w4 s3", 24_832),
]


def of(words: str) -> Problem:
    return Problem.parse(f"b1 h2 q1024 {words} causal")


@pytest.mark.parametrize(("words", "tile", "compiled"), HOPPER)
def test_hopper_needs_what_is_said_and_its_barriers(words, tile, compiled):
    assert compiled <= shared_bytes(of(words), H200, "forward", HopperTile.parse(tile)) <= compiled + 1024


@pytest.mark.parametrize(
    ("device", "words", "kernel", "tile", "compiled"),
    [("H200", *row) for row in PORTABLE_H200] + [("A100", *row) for row in PORTABLE_A100],
)
def test_q_outer_needs_at_least_what_is_said_and_not_much_more(device, words, kernel, tile, compiled):
    estimate = shared_bytes(of(words), Device.named(device), kernel, Tile.parse(tile))
    assert 0.75 * compiled <= estimate <= compiled


@pytest.mark.parametrize("device", ["A100", "L4", "H200", "B200"])
@pytest.mark.parametrize("dims", ["16", "64", "72", "96", "128", "192/128", "192", "64/256", "256"])
@pytest.mark.parametrize("words", ["bf16", "bf16 causal packed", "fp32"])
def test_every_tile_of_the_tables_fits(device, dims, words):
    problem, here = Problem.parse(f"b2 h4/2 q4096 d{dims} {words}"), Device.named(device)
    seen = 0
    for direction in ("forward", "backward"):
        for algorithm in ("q_outer", "hopper"):
            try:
                chosen = by_table(problem, here, direction=direction, prefer=algorithm)
            except Unsupported:
                continue
            seen += 1
            assert (direction, len(chosen.tiles)) in KERNELS or chosen.algorithm == "hopper"
            assert misfit(problem, here, direction, chosen.algorithm, chosen.tiles) is None
    assert seen >= 2


def test_tiles_of_the_tests_run_in_tritons_interpreter():
    """It has neither shared memory nor registers; what the kernels cannot be built with is refused there too."""
    problem, here = of("d256 fp32"), Device.named("cpu")
    for text in ("16x16 w4 s1", "16x32 w4 s2", "64x32 w4 s2"):
        assert misfit(problem, here, "forward", "q_outer", (Tile.parse(text),)) is None
        assert misfit(problem, here, "backward", "q_outer", (Tile.parse(text),) * 2) is None
    assert "powers of two" in misfit(problem, here, "forward", "q_outer", (Tile(8, 8, 4, 1),))


def test_tiles_of_another_algorithm_are_none_of_this_one():
    plain, wide = Tile(64, 64, 4, 2), HopperTile.parse("128x128 s2 q1 static")
    problem = of("d128 bf16")
    assert "is no tile of hopper" in misfit(problem, H200, "forward", "hopper", (plain,))
    assert "is no tile of q_outer" in misfit(problem, H200, "forward", "q_outer", (wide,))
    for tile in (plain, wide):
        assert "two sides and nothing else" in misfit(problem, Device.named("cpu"), "forward", "tiled", (tile,))


def test_a_smaller_chip_refuses_what_a_larger_one_takes():
    problem, tiles = of("d128 bf16"), (Tile.parse("128x128 w8 s3"),)
    assert misfit(problem, H200, "forward", "q_outer", tiles) is None
    assert "101,376" in misfit(problem, Device.named("L4"), "forward", "q_outer", tiles)
