"""The acceptance rule itself: it accepts right results, also in parts and by sums, and rejects small faults."""

import math

import pytest
import torch

from rowmax import Problem, testing
from rowmax.testing import pieces

TEXTS = ["b2 h4/2 q113 k203 d64 bf16 causal", "b1 h2 q128 k128 d64 fp16", "b3 h2 q90 k90 d32 bf16 packed causal"]


def good(text, kind="normal"):
    """`(problem, operands, (out, lse), (dq, dk, dv), cotangents)` of the CPU path."""
    problem = Problem.parse(text)
    operands = testing.operands(problem, kind)
    leaves = [t.detach().requires_grad_() for t in operands[:3]]
    results = testing.attend(problem, operands._replace(q=leaves[0], k=leaves[1], v=leaves[2]), "tiled")
    given = testing.cotangents(problem)
    grads = torch.autograd.grad(results, leaves, given)
    return problem, operands, [r.detach() for r in results], list(grads), given


def row_zero(out, lse):
    out[..., 40, 0, :] = 0


def element_off(out, lse):
    out[..., 40, 0, 3] += 0.02


def lse_in_base_two(out, lse):
    lse *= 1.4426950408889634


def lse_of_one_row(out, lse):
    lse[..., 0, 40] += 1e-3


def unwritten_row(out, lse):
    out[..., 40, 1, :] = math.nan


def infinite_lse(out, lse):
    lse[..., 0, 40] = math.inf


def rounded_twice(out, lse):
    out.copy_((out * 1.009).to(torch.float8_e4m3fn).to(out.dtype))


FAULTS = [row_zero, element_off, lse_in_base_two, lse_of_one_row, unwritten_row, infinite_lse, rounded_twice]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_forward_is_noticed(text, fault):
    problem, operands, (out, lse), _, _ = good(text)
    assert testing.check_forward(problem, operands, out, lse).ok
    fault(out, lse)
    report = testing.check_forward(problem, operands, out, lse)
    assert not report.ok
    assert report.worst > 1
    assert text.split()[1] in str(report)


def wrong_problem(problem, operands, change):
    return testing.attend(problem.with_(**change), operands, "tiled")


@pytest.mark.parametrize("kind", ["normal", "sparse_int", "spiky"])
def test_a_scale_off_by_a_hundredth_is_noticed(kind):
    problem, operands, *_ = good(TEXTS[0], kind)
    assert not testing.check_forward(problem, operands, *wrong_problem(problem, operands, {"scale": problem.scale * 1.01})).ok


def test_the_last_key_ignored_is_noticed():
    problem, operands, *_ = good("b1 h2 q64 k200 d64 bf16")
    short = operands._replace(k=operands.k[:, :-1], v=operands.v[:, :-1])
    assert not testing.check_forward(problem, operands, *testing.attend(problem.with_(len_k=199), short)).ok


def test_an_accumulator_of_16_bits_is_noticed():
    """A sum kept in bf16 over 64 key blocks."""
    problem, operands, (_, lse), _, _ = good("b1 h2 q32 k1024 d64 bf16", "v_ones")
    q, k, v = (t.float() for t in operands[:3])
    p = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) * problem.scale, -1)
    acc = torch.zeros(1, 32, 2, 64, dtype=torch.bfloat16)
    for block in range(0, 1024, 16):
        keys = slice(block, block + 16)
        acc = (acc + torch.einsum("bhij,bjhd->bihd", p[..., keys], v[:, keys])).to(torch.bfloat16)
    assert not testing.check_forward(problem, operands, acc, lse).ok


def last_key_of_dk(dq, dk, dv):
    dk[..., -1, :, :] = 0


def block_of_dq(dq, dk, dv):
    dq[..., 64:80, :, :] *= 0.7


def dv_of_one_head(dq, dk, dv):
    dv[..., 0, :] *= 0.5


def dk_without_scale(dq, dk, dv):
    dk *= 8


def dq_unwritten(dq, dk, dv):
    dq[..., 50, 0, :] = math.nan


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("fault", [last_key_of_dk, block_of_dq, dv_of_one_head, dk_without_scale, dq_unwritten])
def test_a_fault_in_the_backward_is_noticed(text, fault):
    problem, operands, _, grads, given = good(text)
    assert testing.check_backward(problem, operands, grads, *given).ok
    fault(*grads)
    assert not testing.check_backward(problem, operands, grads, *given).ok


def test_a_dropped_gradient_of_the_lse_is_noticed():
    problem, operands, _, grads, (grad_out, _) = good(TEXTS[1])
    assert not testing.check_backward(problem, operands, grads, grad_out, None).ok


def test_gradients_not_asked_for_are_not_compared():
    problem, operands, _, (dq, _, _), given = good(TEXTS[0])
    report = testing.check_backward(problem, operands, (dq, None, None), *given)
    assert report.ok
    assert set(report.ratios) == {"dq", "dq rms"}


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_change_no_verdict(text, monkeypatch):
    """The oracle computed a few rows at a time gives the same ratios."""
    problem, operands, results, grads, given = good(text)

    def ratios():
        forward = testing.check_forward(problem, operands, *results)
        return forward.merged(testing.check_backward(problem, operands, grads, *given)).ratios

    whole = ratios()
    monkeypatch.setitem(pieces._PIECE, "cpu", 3000)
    parts = ratios()
    assert whole.keys() == parts.keys()
    for name, ratio in whole.items():
        if name not in ("dk rms", "dv rms"):  # the textbook's own sum over rows is in fp64 when it comes in parts
            assert parts[name] == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize("text", TEXTS)
def test_a_sample_and_sums_stand_for_a_large_problem(text, monkeypatch):
    problem, operands, results, grads, given = good(text)
    monkeypatch.setitem(pieces._EVERY_ROW_UP_TO, "cpu", 0)
    report = testing.check_forward(problem, operands, *results)
    assert report.ok
    assert report.sampled
    report = testing.check_backward(problem, operands, grads, *given, results[0])
    assert report.ok, str(report)
    assert {"sum dk", "sum dv", "<q,dq> = <k,dk>", "<v,dv> = <o,do>"} <= set(report.ratios)
    dv = grads[2].clone()
    dv[..., 16:48, :, :] = 0  # a key block that nobody wrote
    report = testing.check_backward(problem, operands, (grads[0], grads[1], dv), *given, results[0])
    assert not report.ok
    assert any("sum dv" in text for text in report.broken)


def test_a_report_reads_as_one():
    problem, operands, (out, lse), _, _ = good(TEXTS[0])
    out[0, 3, 1, 2] += 1
    text = str(testing.check_forward(problem, operands, out, lse))
    assert text.startswith(f"'{problem}': WRONG; error over bound: out ")
    assert "times its bound off (sequence 0, rows from 0, element [3, 1, 2] of them)" in text


@pytest.mark.parametrize(("flushed", "right"), [(2.0**-126, True), (2.0**-124, False)])
def test_a_weight_may_be_zero_only_where_fp32_has_no_normal_number_for_it(flushed, right):
    """With a soft-cap of 50 weights go down to exp(-100), and of one query a key's gradient is a multiple of one weight."""
    problem = Problem.parse("b1 h1 q1 k2000 d64 bf16 softcap=50.0")
    operands = testing.operands(problem, "spiky(60)")
    q, k, v = (t.double()[0, :, 0] for t in operands[:3])
    bent = torch.tanh(q @ k.T * problem.scale / problem.softcap)
    weights = torch.softmax(problem.softcap * bent, 1)
    assert bool(((weights > 2.0**-132) & (weights < 2.0**-126)).any())
    assert bool(((weights > 2.0**-126) & (weights < 2.0**-124)).any())
    grad_out, grad_lse = testing.cotangents(problem)
    cotangent = grad_out.double()[0, :, 0]
    delta = (weights @ v * cotangent).sum() - grad_lse.double().sum()
    weights = torch.where(weights < flushed, 0.0, weights)
    slopes = weights * (1 - bent**2) * (cotangent @ v.T - delta) * problem.scale
    found = (slopes @ k, slopes.T @ q, weights.T @ cotangent)
    grads = [g.to(problem.dtype).view_as(t) for g, t in zip(found, operands[:3], strict=True)]
    report = testing.check_backward(problem, operands, grads, grad_out, grad_lse)
    assert report.ok == right, str(report)


def test_fp64_is_held_to_its_own_roundoff():
    problem, operands, (out, lse), _, _ = good("b1 h2 q40 k60 d16 fp64 causal")
    assert testing.check_forward(problem, operands, out, lse).ok
    assert not testing.check_forward(problem, operands, out + 1e-12, lse).ok
    assert not testing.check_forward(problem, operands, out, lse + 1e-12).ok


def test_check_runs_a_plan_and_names_what_it_cannot():
    assert testing.check(Problem.parse(TEXTS[0]), plan="tiled").ok
    with pytest.raises(NotImplementedError):
        testing.check(Problem.parse(TEXTS[0]), plan="aten")


@pytest.mark.parametrize("text", ["b300 h2 q3 k3 d16 fp32 causal", "b300 h2 q900 k900 d16 fp32 packed"])
def test_of_many_sequences_some_are_compared_and_all_must_be_finite(text):
    problem, operands, (out, lse), grads, given = good(text)
    report = testing.check_forward(problem, operands, out, lse).merged(
        testing.check_backward(problem, operands, grads, *given, out)
    )
    assert report.ok
    assert report.sampled
    chosen = [lead[0] if lead else rows.start // 3 for lead, rows, _ in pieces.spans(problem, operands)][:256]
    between = next(i for i in range(300) if i not in chosen)
    row = (between, 1) if not problem.packed else (3 * between,)
    out[row] = math.nan
    assert not testing.check_forward(problem, operands, out, lse).ok
    grads[1][row] = math.inf
    assert "dk" in str(testing.check_backward(problem, operands, grads, *given).broken)
