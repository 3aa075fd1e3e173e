"""FLOPs, bytes and lengths of the timed problems, against numbers worked out by hand or by counting a mask."""

import pytest

from rowmax import reference
from rowmax.problem import Problem
from shapes import SETS, bytes_moved, flops, lengths, pairs


@pytest.mark.parametrize(
    ("spelling", "which", "expected"),
    [
        # 4 b h q k d: the papers' example sizes, to the digit
        ("b1 h16 q16384 k16384 d128 bf16", "forward", 2_199_023_255_552),
        ("b1 h16 q16384 k16384 d128 bf16 causal", "forward", 1_099_511_627_776),
        ("b1 h16 q16384 k16384 d128 bf16", "backward", 5_497_558_138_880),
        ("b32 h32 q512 k512 d64 bf16", "forward", 68_719_476_736),
        ("b1 h64/8 q4096 k4096 d128 bf16 causal", "forward", 4 * 64 * 4096 * 4096 * 128 // 2),
        ("b2 h4 q100 k50 d64 bf16", "forward+backward", 3.5 * 4 * 2 * 4 * 100 * 50 * 64),
        ("b1 h1 q10 k10 d24/8 fp32", "forward", 2 * 100 * (24 + 8)),
        ("b1 h1 q10 k10 d24/8 fp32", "backward", 2 * 100 * (3 * 24 + 2 * 8)),
        # one query sees every key: a decode step is not halved
        ("b1 h2 q1 k1000 d64 bf16 causal", "forward", 4 * 2 * 1000 * 64),
    ],
)
def test_flops(spelling, which, expected):
    assert flops(Problem.parse(spelling), which) == expected


@pytest.mark.parametrize(
    "spelling",
    ["b2 h3 q40 k70 d8 fp32 causal", "b1 h2 q70 k40 d8 fp32 causal", "b1 h2 q50 k50 d8 fp32 window(7,3)"],
)
def test_windows_and_rectangles_count_visible_pairs(spelling):
    problem = Problem.parse(spelling)
    seen = reference.visible(problem.len_q, problem.len_k, *problem.band)
    assert pairs(problem) == problem.batch * problem.heads_q * int(seen.sum())


def test_packed_counts_visible_pairs_of_each_sequence():
    problem = Problem.parse("b5 h3 q100 k100 d8 fp32 causal packed maxq60 maxk60")
    seen = sum(int(reference.visible(n, n, None, 0).sum()) for n in lengths(problem))
    assert pairs(problem) == 3 * seen


@pytest.mark.parametrize(
    ("spelling", "which", "expected"),
    [
        ("b1 h4/2 q10 k20 d8 bf16", "forward", 2 * (10 * 4 * 8 + 2 * 20 * 2 * 8 + 10 * 4 * 8)),
        # q k v out dout, dq dk dv, and fp32 LSE
        ("b1 h4/2 q10 k20 d8 bf16", "backward", 2 * (4 * 10 * 4 * 8 + 4 * 20 * 2 * 8) + 4 * 10 * 4),
    ],
)
def test_bytes(spelling, which, expected):
    assert bytes_moved(Problem.parse(spelling), which) == expected


@pytest.mark.parametrize(
    "spelling",
    [
        "b64 h16 q32739 k32739 d128 bf16 causal packed maxq3859 maxk3859",
        "b3 h1 q100 k100 d8 fp32 packed",
        "b4 h1 q100 k60 d8 fp32 packed maxq25 maxk30",  # every sequence is full
        "b1 h1 q9 k9 d8 fp32 packed",
        "b3 h1 q0 k0 d8 fp32 packed",
        "b0 h1 q0 k0 d8 fp32 packed",
    ],
)
def test_packed_lengths(spelling):
    problem = Problem.parse(spelling)
    for side, total, longest in (("q", problem.len_q, problem.max_len_q), ("k", problem.len_k, problem.max_len_k)):
        sizes = lengths(problem, side)
        assert len(sizes) == problem.batch
        assert sum(sizes) == total
        assert all(size >= 0 for size in sizes)
        assert longest is None or max(sizes) == longest
        assert sizes == lengths(problem, side)


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="maxq"):
        lengths(Problem.parse("b3 h1 q100 k100 d8 fp32 packed maxq30 maxk40"))


def test_every_shape_says_where_it_comes_from_and_is_spelled_one_way():
    for name, group in SETS.items():
        assert group.shapes, name
        assert group.passes, name
        for shape in group.shapes:
            assert shape.source
            assert Problem.parse(str(shape.problem)) == shape.problem
