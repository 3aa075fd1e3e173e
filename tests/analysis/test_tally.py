"""The counting loops compute attention, and count what can be worked out by hand."""

import pytest
import torch

from rowmax import Problem, reference
from rowmax.analysis import tally


def counted(text: str, order: str, rows: int = 32, columns: int = 16):
    problem, draw = Problem.parse(text), torch.Generator().manual_seed(1)
    shapes = ((problem.len_q, problem.heads_q, problem.dim_qk), (problem.len_k, problem.heads_k, problem.dim_qk))
    shapes = (*shapes, (problem.len_k, problem.heads_k, problem.dim_v))
    q, k, v = (torch.randn(problem.batch, *shape, generator=draw) for shape in shapes)
    out, found = tally.run(problem, q, k, v, order, rows, columns)
    expected, _ = reference.attention(q.double(), k.double(), v.double(), scale=problem.scale, **problem.band._asdict())
    return out, expected, found


@pytest.mark.parametrize("order", tally.ORDERS)
@pytest.mark.parametrize(
    "text",
    [
        "b2 h4/2 q70 k70 d16 fp32 causal",
        "b1 h2 q40 k90 d16/8 fp32",
        "b1 h1 q90 k40 d16 fp32 causal",  # rows that see nothing
        "b1 h1 q64 k64 d8 fp32 window(5,3)",
    ],
)
def test_they_are_attention(text, order):
    out, expected, _ = counted(text, order)
    assert float((out - expected).abs().max()) < 1e-5


def test_counts_by_hand():
    n, d, rows, columns = 128, 16, 32, 16
    text = f"b1 h1 q{n} k{n} d{d} fp32"
    row_tiles, key_tiles, matrix = n // rows, n // columns, n * d * 4
    _, _, one = counted(text, "kv_outer", rows, columns)
    _, _, two = counted(text, "q_outer", rows, columns)
    _, _, none = counted(text, "dense", rows, columns)
    assert two.loaded == matrix + row_tiles * 2 * matrix  # Q once, K and V for every row tile
    assert two.stored == matrix
    assert two.extra == 0
    state = matrix + 2 * 4 * n  # O, m and l
    assert one.loaded == 2 * matrix + key_tiles * (matrix + state) + matrix  # K and V once; Q and the state for every key tile
    assert one.stored == key_tiles * state + matrix
    assert one.extra == state
    assert one.q_loaded == key_tiles * matrix
    assert none.extra == 2 * 4 * n * n
    assert none.stored == 2 * 4 * n * n + matrix
    assert one.flops == two.flops == none.flops == 4 * n * n * d
    assert none.exps == n * n
    assert one.exps == two.exps == n * n + n * key_tiles  # and the factor of each row and turn


def test_masked_tiles_are_left_out():
    _, _, full = counted("b1 h1 q128 k128 d16 fp32", "q_outer")
    _, _, causal = counted("b1 h1 q128 k128 d16 fp32 causal", "q_outer")
    assert 0.5 < causal.scores / full.scores < 0.65


def test_refuses_what_it_does_not_do():
    packed = Problem.parse("b2 h1 q8 k8 d8 fp32 packed")
    with pytest.raises(ValueError, match="takes no packed sequences"):
        tally.run(packed, *(torch.zeros(8, 1, 8),) * 3, "q_outer")
