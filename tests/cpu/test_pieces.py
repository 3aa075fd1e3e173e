"""Windows cut into pieces: every pair once, in views of what was given, and the results of whole sequences."""

import pytest
import torch

from rowmax import Problem, testing
from rowmax.cpu import blocks, half_scores, pieces
from rowmax.mask import end_key, first_key
from rowmax.plan.tile import Tile

TILE = Tile(256, 8192)
WINDOWS = ["q900 k900 d8 fp32 window(100,0)", "q900 k1100 d8 fp32 window(64,30)", "q900 k700 d8 fp32 window(10,90)"]


def cut(problem):
    """The pieces of a problem whose rows and keys are their own numbers."""
    rows, keys = (torch.arange(n).view(1, -1, 1, 1).expand(1, -1, problem.heads_q, 1) for n in (problem.len_q, problem.len_k))
    geometry = blocks.Geometry(problem.len_q, problem.len_k, problem.band)
    return list(pieces.pieces(pieces.is_cut(problem, TILE, geometry), problem.band, 0, [rows], [keys, keys]))


@pytest.mark.parametrize("text", WINDOWS)
def test_every_visible_pair_is_in_one_piece(text):
    problem = Problem.parse(f"b1 h8 {text}")
    found = torch.zeros(problem.len_q, problem.len_k, dtype=torch.int)
    # Of k700 the first rows see nothing: `blocks.sequences` cuts them off before.
    first = max(problem.len_q - problem.len_k - problem.band.right, 0)
    live = Problem.parse(f"b1 h8 q{problem.len_q - first} {text.split(' ', 1)[1]}")
    for piece in cut(live):
        len_q, len_k, band = piece.geometry
        shift = len_k - len_q
        i, j = torch.arange(len_q).unsqueeze(1), torch.arange(len_k)
        seen = (j >= first_key(i, shift, band)) & (j < end_key(i, shift, len_k, band))
        for own_rows, own_keys in zip(piece.rows[0][:, :, 0, 0], piece.cols[0][:, :, 0, 0], strict=True):
            found[first + own_rows.unsqueeze(1), own_keys] += seen.int()
    i, j = torch.arange(problem.len_q).unsqueeze(1), torch.arange(problem.len_k)
    shift = problem.len_k - problem.len_q
    expected = (j >= first_key(i, shift, problem.band)) & (j < end_key(i, shift, problem.len_k, problem.band))
    assert len(cut(live)) > 1
    assert torch.equal(found, expected.int())


@pytest.mark.parametrize(
    "text",
    [
        "b1 h8 q300 k300 d8 fp32 window(100,0)",  # few rows
        "b1 h8 q900 k900 d8 fp32 causal",
        "b1 h8 q900 k900 d8 fp32 window(100,0) alibi",  # distances count from the diagonal
        "b1 h8 q900 k900 d8 fp32 window(100,0) dropout=0.1",
        "b1 h8 q900 k900 d8 fp32 window(100,0) mask(k)",
    ],
)
def test_what_stays_whole(text):
    assert len(cut(Problem.parse(text))) == 1


@pytest.mark.parametrize("kind", ["normal", "v_onehot"])
@pytest.mark.parametrize(
    "text", ["b2 h4/2 q500 k520 d16 bf16 window(200,20)", "b1 h4 q500 k500 d8 fp32 softcap=9.0 window(200,0) sink"]
)
def test_results(text, kind):
    problem = Problem.parse(text)
    operands = testing.operands(problem, kind)
    for want in (True, False):
        with torch.no_grad(), testing.poisoned():
            results = testing.attend(problem, operands, return_lse=want)
        report = testing.check_forward(problem, operands, *(results if want else (results,)))
        assert report.ok, str(report)


@pytest.mark.parametrize(
    "text", ["b2 h4/2 q500 k520 d16 fp32 window(200,20)", "b1 h4/4 q500 k500 d8/5 fp32 softcap=9.0 window(200,0) sink"]
)
def test_gradients_are_sums_over_pieces(text):
    problem = Problem.parse(text)
    assert len(cut(problem)) > 1
    report = testing.check(problem)
    assert report.ok, str(report)
    operands = testing.operands(problem)
    leaves = [t.clone().requires_grad_() for t in operands[:3]]
    out, lse = testing.attend(problem, operands._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
    every = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
    for leaf, expected in zip(leaves, every, strict=True):
        given = [one if one is leaf else one.detach() for one in leaves]
        out, lse = testing.attend(problem, operands._replace(q=given[0], k=given[1], v=given[2]))
        (alone,) = torch.autograd.grad((out, lse), leaf, (torch.ones_like(out), torch.ones_like(lse)))
        assert torch.equal(alone, expected)


def test_bits_do_not_depend_on_how_operands_lie():
    """Products read fp32 operands where they lie, if they are contiguous and aligned, and a copy of any others."""
    problem = Problem.parse("b1 h4/2 q500 k500 d8 fp32 window(200,0)")
    operands = testing.operands(problem)
    grad_out = torch.randn(problem.outputs()[0])

    def run(place):
        leaves = [place(t).requires_grad_() for t in operands[:3]]
        out, lse = testing.attend(problem, operands._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
        return out, lse, *torch.autograd.grad(out, leaves, place(grad_out))

    def off_by_one(t):
        return torch.empty(t.numel() + 1)[1:].view(t.shape).copy_(t)

    def heads_first(t):
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    for place in (off_by_one, heads_first):
        for one, other in zip(run(place), run(torch.clone), strict=True):
            assert torch.equal(one, other), place.__name__


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_nan_reaches_exactly_the_rows_that_see_it(where):
    """In the head, a block and the tail; without it every other row is the same bit for bit."""
    problem = Problem.parse("b1 h4 q500 k500 d8 fp32 window(200,0)")
    operands = testing.operands(problem)
    clean, clean_lse = testing.attend(problem, operands)
    for at in (20, 300, 495):
        given = getattr(operands, where).clone()
        given[0, at, 1, 3] = torch.nan
        out, lse = testing.attend(problem, operands._replace(**{where: given}))
        reached = torch.zeros(500, dtype=torch.bool)
        reached[at : at + 1 if where == "q" else min(at + 201, 500)] = True
        assert torch.equal(out[0, ~reached, 1], clean[0, ~reached, 1])
        assert torch.equal(lse[0, 1, ~reached], clean_lse[0, 1, ~reached])
        assert bool(out[0, reached, 1].isnan().any(-1).all())
        assert torch.equal(out[:, :, (0, 2, 3)], clean[:, :, (0, 2, 3)])


def test_rounded_scores_are_decided_for_the_whole(monkeypatch):
    problem = Problem.parse("b1 h2 q1500 k1500 d64 bf16 window(256,0)")
    monkeypatch.setattr(half_scores, "_LEAST_SCORES", 0)
    monkeypatch.delitem(blocks.MATMUL, torch.bfloat16, raising=False)  # as on a CPU that multiplies bf16
    asked, tried = [], []
    for name, found in (("fit_forward", asked), ("forward_block", tried)):
        original = getattr(half_scores, name)
        monkeypatch.setattr(half_scores, name, lambda *given, of=original, found=found: found.append(of(*given)) or found[-1])
    with torch.no_grad():
        testing.attend(problem, testing.operands(problem), return_lse=False)
    assert asked == [True]
    assert tried
    assert all(t is not None for t in tried)
