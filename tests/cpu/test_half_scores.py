"""Scores rounded to bf16: taken where the rounding cannot be seen, left where it can, and never in an LSE."""

import math

import pytest
import torch

from rowmax import Problem, attention, testing
from rowmax.cpu import half_scores
from rowmax.cpu.blocks import MATMUL, Geometry
from rowmax.mask import Band

CAUSAL = Problem.parse("b1 h2 q600 k600 d64 bf16 causal")


@pytest.fixture(autouse=True)
def _short_sequences_too(monkeypatch):
    monkeypatch.setattr(half_scores, "_LEAST_SCORES", 0)
    monkeypatch.setattr(half_scores, "_LEAST_AVERAGE", 0)
    monkeypatch.delitem(MATMUL, torch.bfloat16, raising=False)  # as on a CPU that multiplies bf16


@pytest.fixture
def taken(monkeypatch):
    """The results of every block that tried rounded scores, forward and backward: True if it kept them."""
    results = []

    def watch(owner, name):
        original = getattr(owner, name)

        def watched(*arguments):
            result = original(*arguments)
            results.append(result is not None)
            return result

        monkeypatch.setattr(owner, name, watched)

    watch(half_scores, "forward_block")
    watch(half_scores.BackwardWeights, "block")
    return results


def forward(problem, operands):
    with torch.no_grad():
        return testing.attend(problem, operands, "tiled", return_lse=False)


def backward(problem, operands, grad_out=None):
    leaves = [t.clone().requires_grad_() for t in operands[:3]]
    out, _ = testing.attend(problem, operands._replace(q=leaves[0], k=leaves[1], v=leaves[2]), "tiled")
    grad_out = torch.randn_like(out) if grad_out is None else grad_out
    return grad_out, torch.autograd.grad(out, leaves, grad_out)


def test_normal_operands_take_them_forward_and_backward(taken):
    operands = testing.operands(CAUSAL)
    assert testing.check_forward(CAUSAL, operands, forward(CAUSAL, operands)).ok
    assert taken
    assert all(taken)
    taken.clear()
    grad_out, grads = backward(CAUSAL, operands)
    assert testing.check_backward(CAUSAL, operands, grads, grad_out).ok
    assert taken
    assert all(taken)


def test_few_scores_are_not_worth_the_checks(taken, monkeypatch):
    monkeypatch.undo()
    geometry = Geometry(2048, 2048, Band(None, 0))
    assert half_scores.worth_it(geometry, 8)
    assert not half_scores.worth_it(geometry, 2)
    assert half_scores.worth_it(geometry, 8, "backward")
    window = Geometry(4096, 4096, Band(256, 0))
    assert half_scores.worth_it(window, 8)
    assert not half_scores.worth_it(window, 8, "backward")
    operands = testing.operands(CAUSAL)
    forward(CAUSAL, operands)
    backward(CAUSAL, operands)
    assert not taken


def test_an_lse_never_comes_from_them(taken):
    testing.attend(CAUSAL, testing.operands(CAUSAL), "tiled")
    assert not taken


@pytest.mark.parametrize("text", ["b1 h2 q600 k600 d64 fp32 causal", "b1 h2 q200 k200 d64 bf16 causal"])
def test_other_types_and_short_rows_do_not_take_them(taken, text):
    problem = Problem.parse(text)
    forward(problem, testing.operands(problem)) if problem.dtype == torch.bfloat16 else testing.attend(
        problem, testing.operands(problem), "tiled", return_lse=False
    )
    assert not taken


@pytest.mark.parametrize("kind", ["v_onehot", "spiky", "probe", "shift(-60)", "constant"])
def test_values_and_scores_that_would_show_them_are_within_the_rule(kind):
    """In a one-hot V every weight is a result of its own; a spiky row has one large weight; a shifted one large scores."""
    operands = testing.operands(CAUSAL, kind)
    report = testing.check_forward(CAUSAL, operands, forward(CAUSAL, operands))
    assert report.ok, str(report)


def test_one_hot_values_are_refused(taken):
    forward(CAUSAL, testing.operands(CAUSAL, "v_onehot"))
    assert not taken


def test_a_gradient_of_single_rows_is_refused(taken):
    """dv of a key is then one weight."""
    operands = testing.operands(CAUSAL)
    grad_out = torch.zeros(operands.q.shape, dtype=torch.bfloat16)
    grad_out[:, torch.arange(64) * 9, :, torch.arange(64)] = 1.0
    _, grads = backward(CAUSAL, operands, grad_out)
    assert not taken
    report = testing.check_backward(CAUSAL, operands, grads, grad_out)
    assert report.ok, str(report)


def test_gradients_of_few_rows_do_not_take_them(taken):
    problem = Problem.parse("b1 h2 q8 k1000 d64 bf16")
    operands = testing.operands(problem)
    grad_out, grads = backward(problem, operands)
    assert not taken
    assert testing.check_backward(problem, operands, grads, grad_out).ok


def test_large_scores_of_one_pair_are_refused(taken):
    operands = testing.operands(CAUSAL)
    operands.q[0, 500, 0] = 30 * operands.k[0, 20, 0] / operands.k[0, 20, 0].norm()
    operands.k[0, 20, 0] *= 4
    report = testing.check_forward(CAUSAL, operands, forward(CAUSAL, operands))
    assert not taken
    assert report.ok, str(report)


@pytest.fixture
def again(monkeypatch):
    """What `rows_again` found, block by block."""
    found, original = [], half_scores.rows_again
    monkeypatch.setattr(half_scores, "rows_again", lambda *given: found.append(original(*given)) or found[-1])
    return found


@pytest.mark.parametrize("large", [1, half_scores._MOST_AGAIN + 1])
def test_large_weights_send_their_rows_to_fp32_and_many_their_block(taken, again, large):
    """Within the bound on all scores a pair may still be large: |q| and |k| both near their largest, and parallel."""
    operands = testing.operands(CAUSAL)
    # Of one direction in 300 the sampled rows lie so that rounded scores are refused.
    direction = torch.nn.functional.normalize(torch.randn(64, generator=torch.Generator().manual_seed(0)), dim=0)
    rows = slice(590 - large, 590)
    operands.q[0, rows, 0] = operands.k[0, 20, 0] = (11.0 * direction).bfloat16()
    assert half_scores.bounded(operands.q, operands.k, CAUSAL.scale)
    report = testing.check_forward(CAUSAL, operands, forward(CAUSAL, operands))
    assert taken
    assert (False in taken) == (large > 1)
    assert large > 1 or 1 in map(len, again)
    assert report.ok, str(report)
    again.clear()
    grad_out, grads = backward(CAUSAL, operands)
    assert large > 1 or 1 in map(len, again)
    report = testing.check_backward(CAUSAL, operands, grads, grad_out)
    assert report.ok, str(report)


def test_two_failures_end_the_attempts(taken, monkeypatch):
    monkeypatch.setattr(half_scores, "rows_again", lambda *_: None)
    problem = Problem.parse("b1 h1 q600 k600 d64 bf16")
    operands = testing.operands(problem)
    q, k, v = operands[:3]
    with torch.no_grad():
        out = attention(q, k, v, plan="tiled[32x2048]")
    assert taken == [False] * half_scores.ATTEMPTS
    assert testing.check_forward(problem, operands, out).ok


def test_bounded():
    q, k = (torch.randn(1, 50, 2, 64).bfloat16() for _ in range(2))
    assert half_scores.bounded(q, k, 0.125)
    assert not half_scores.bounded(q, k, 0.0)
    assert not half_scores.bounded(8 * q, k, 0.125)
    assert not half_scores.bounded(q[:, :0], k, 0.125)
    for value in (torch.nan, torch.inf, -torch.inf):  # as if it were not there
        poisoned = k.clone()
        poisoned[0, 3, 1, 5] = value
        assert half_scores.bounded(q, poisoned, 0.125)
    for dtype, huge in ((torch.bfloat16, 3e38), (torch.float32, 3e38), (torch.float16, 6e4)):  # the norm overflows
        assert not half_scores.bounded(torch.full((1, 1, 1, 64), huge, dtype=dtype), k.to(dtype), 0.125)
    wide = torch.full((1, 1, 1, 1024), 1.0)  # 2.5 sqrt(1024) = 80 is too much for exp without a pivot
    assert half_scores.bounded(wide, wide, 39 / 1024)
    assert not half_scores.bounded(wide, wide, 41 / 1024)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([0.1, 0.25, 0.0], []), ([0.1, 0.26, 0.0], [[1, 2]]), ([torch.nan, 0.1], [[1, 2]]), ([0.1, -torch.nan], [[1, 2]])],
)
def test_rows_again(weights, expected):
    p = torch.full((2, 3, len(weights)), 0.2).bfloat16()
    p[1, 2] = torch.tensor(weights)
    assert half_scores.rows_again(p) == expected
    assert half_scores.rows_again(1024 * p, 1024.0) == expected
    assert half_scores.rows_again(torch.ones(1, 100, 4).bfloat16()) is None


def test_values_far_above_the_others_are_noticed_in_any_head():
    values = torch.randn(3, 2, 500, 16).bfloat16()
    assert half_scores.even(values)
    assert half_scores.even(values * torch.tensor([1.0, 1e3, 0.0]).bfloat16().view(3, 1, 1, 1))
    values[1, 0, 7, 3] = 30
    assert not half_scores.even(values)
    values[1, 0, 7, 3] = math.nan
    assert not half_scores.even(values)


@pytest.mark.parametrize("text", ["b1 h4/2 q600 k600 d64 bf16 causal", "b2 h2 q300 k500 d40/24 bf16 window(100,9)"])
def test_a_cpu_without_products_of_bf16_takes_those_of_fp32(monkeypatch, taken, text):
    """There torch multiplies bf16 60 times as slowly."""
    monkeypatch.setitem(MATMUL, torch.bfloat16, torch.float32)
    kinds, original = set(), torch.bmm

    def bmm(a, b, **options):
        kinds.add(a.dtype)
        return original(a, b, **options)

    monkeypatch.setattr(torch, "bmm", bmm)
    report = testing.check(Problem.parse(text))
    assert report.ok, str(report)
    assert kinds == {torch.float32}
    assert not taken
