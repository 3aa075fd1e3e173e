"""Parts that are the same in every call: the closed forms against the parts laid end to end, and how many a plan counts on."""

from pathlib import Path

import pytest

from rowmax import Device, PagedProblem, plan
from rowmax.plan import fixed_parts
from rowmax.plan.fixed_parts import first_tile, part_of
from rowmax.plan.split_kv import SplitTile, most_parts


def misplaced(size, doubles, first_tile=first_tile, part_of=part_of):
    """Numbers of parts, up to tile 4000, that begin elsewhere or have other tiles than those laid end to end."""
    begin, number, wrong = 0, 0, []
    while begin < 4000:
        tiles = size * 2 ** (number // doubles if doubles else 0)
        some = {begin, begin + 1, begin + tiles // 2, begin + tiles - 1} & set(range(begin, begin + tiles))
        if first_tile(number, size, doubles) != begin or {part_of(tile, size, doubles) for tile in some} != {number}:
            wrong.append(number)
        begin, number = begin + tiles, number + 1
    return wrong


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("doubles", [0, 1, 2, 3, 24])
def test_parts_lie_end_to_end_and_double(size, doubles):
    assert not misplaced(size, doubles)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("part * size", "(part + 1) * size"),
        ("part % doubles) <<", "part % doubles + 1) <<"),
        ("<< (part // doubles)) - doubles", "<< (part // doubles))"),
        ("(part // doubles)", "part % doubles"),
        ("return tile // size\n", "return tile // size + 1\n"),
        ("unit = tile // size + doubles", "unit = tile // size"),
        ("unit >= 2 * doubles", "unit >= 3 * doubles"),
        ("exponent += 1", "exponent = 1"),
        ("exponent * doubles + unit - doubles", "exponent * doubles + unit"),
    ],
)
def test_a_slip_in_them_is_noticed(old, new):
    text = Path(fixed_parts.__file__).read_text()
    assert text.count(old) == 1
    slipped: dict = {}
    exec(text.replace(old, new), slipped)
    assert any(misplaced(2, doubles, slipped["first_tile"], slipped["part_of"]) for doubles in (0, 3))


def test_parts_of_the_longest_sequences_are_counted():
    """2^29 keys: numbers of parts and tiles that the kernels compute with stay within 32 bits."""
    last = part_of(2**29 // 16 - 1, 32, 4)
    assert first_tile(last, 32, 4) < 2**25 <= first_tile(last + 1, 32, 4) < 2**31


def tile_of(text: str) -> SplitTile:
    chosen = plan(PagedProblem.parse(f"{text} invariant"), Device.named("H200")).tiles[0]
    assert isinstance(chosen, SplitTile)
    return chosen


def test_what_parts_depend_on():
    """On heads and windows; on nothing that a sequence shares with others, and not on how long it or its table is."""
    for heads, doubles in (("h32/8", 24), ("h8/2", 96), ("h32/32", 6), ("h64/64", 4), ("h128/1", 24)):
        for lengths in ("b1 {} q1 k300", "b1 {} q1 k131072", "b64 {} q1 k8192", "b4 {} q700 k8192"):
            tile = tile_of(f"{lengths.format(heads)} d128 bf16 causal paged16")
            assert (tile.parts, tile.doubles) == (8, doubles)
    for keys in (1024, 131072):
        tile = tile_of(f"b1 h32/8 q1 k{keys} d128 bf16 window(700,0) paged16")
        assert (tile.parts, tile.doubles) == (8, 0)


@pytest.mark.parametrize("tile", ["16x16 w4 s1 c2", "16x16 w4 s1 c1d2", "32x16 w4 s1 c3d1"])
@pytest.mark.parametrize("window", ["causal", "window(40,0)", "window(0,0)", "window(33,7)", "window(40,inf)"])
def test_no_row_tile_has_more_parts_than_are_counted(tile, window):
    chosen = SplitTile.parse(tile)
    for group in (1, 3):
        problem = PagedProblem.parse(f"b1 h{group}/1 q90 k300 d16 fp16 {window} paged4 invariant")
        most = most_parts(problem, chosen)
        left, right = problem.band[:2]
        for keys in (90, 123, 300):
            for row in range(0, 90 * group, chosen.block_m):
                first, last = row // group, (min(row + chosen.block_m, 90 * group) - 1) // group
                start = 0 if left is None else max(first + keys - 90 - left, 0)
                end = keys if right is None else min(last + keys - 90 + right + 1, keys)
                parts = [part_of(j // chosen.block_n, chosen.parts, chosen.doubles) for j in (start, end - 1)]
                assert parts[1] - parts[0] + 1 <= most
