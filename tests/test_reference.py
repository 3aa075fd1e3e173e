"""The oracle against a second one, written row by row in Python floats, and against finite differences."""

import math
import random

import pytest
import torch

from rowmax import reference

CASES = [
    (1, 1, None, None),
    (5, 5, None, 0),
    (3, 9, None, 0),
    (9, 3, None, 0),
    (6, 8, 2, 1),
    (8, 6, 0, 0),
    (7, 7, None, 3),
    (7, 5, 3, None),
    (4, 0, None, None),
    (0, 4, None, 0),
]


def one_row_at_a_time(q, k, v, left, right, scale, softcap=0.0, slopes=None, sink=None):
    """`(out, lse)` as nested lists, from the definition: no tensor operation, no mask matrix. `slopes`, `sink`: lists."""
    batch, len_q, heads, dim = q.shape
    len_k, heads_k, dim_v = k.shape[1], k.shape[2], v.shape[3]
    q, k, v = q.tolist(), k.tolist(), v.tolist()
    out = [[[[0.0] * dim_v for _ in range(heads)] for _ in range(len_q)] for _ in range(batch)]
    lse = [[[-math.inf] * len_q for _ in range(heads)] for _ in range(batch)]
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // heads_k)
            for i in range(len_q):
                visible = []
                for j in range(len_k):
                    ahead = (len_q - 1 - i) - (len_k - 1 - j)  # how far key j lies after the key aligned with query i
                    if (left is None or ahead >= -left) and (right is None or ahead <= right):
                        score = scale * math.fsum(q[b][i][h][d] * k[b][j][g][d] for d in range(dim))
                        score = softcap * math.tanh(score / softcap) if softcap else score
                        visible.append((j, score - (slopes[h] * abs(ahead) if slopes else 0.0)))
                logits = [s for _, s in visible] + ([sink[h]] if sink else [])
                if not logits or max(logits) == -math.inf:
                    continue
                peak = max(logits)
                total = math.fsum(math.exp(s - peak) for s in logits)
                lse[b][h][i] = peak + math.log(total)
                for d in range(dim_v):
                    out[b][i][h][d] = math.fsum(math.exp(s - peak) / total * v[b][j][g][d] for j, s in visible)
    return out, lse


def random_operands(len_q, len_k, heads_q=4, heads_k=2, dim=3, dim_v=2, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, len_q, heads_q, dim), (batch, len_k, heads_k, dim), (batch, len_k, heads_k, dim_v))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(("len_q", "len_k", "left", "right"), CASES)
def test_two_independent_oracles_agree(len_q, len_k, left, right):
    q, k, v = random_operands(len_q, len_k)
    out, lse = reference.attention(q, k, v, left=left, right=right, scale=0.7)
    want_out, want_lse = one_row_at_a_time(q, k, v, left, right, 0.7)
    torch.testing.assert_close(out, torch.tensor(want_out, dtype=torch.float64).view_as(out), rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, torch.tensor(want_lse, dtype=torch.float64).view_as(lse), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("len_q", "len_k", "left", "right"), [case for case in CASES if min(case[:2]) > 0])
def test_gradients_agree_with_finite_differences(len_q, len_k, left, right):
    """Through the output and, where a row sees a key, the LSE; to second order."""
    q, k, v = (t.requires_grad_() for t in random_operands(len_q, len_k, heads_q=2, heads_k=1, dim=2, batch=1))

    def call(q, k, v):
        out, lse = reference.attention(q, k, v, left=left, right=right)
        return out, torch.where(torch.isneginf(lse), 0.0, lse)

    assert torch.autograd.gradcheck(call, (q, k, v))
    assert torch.autograd.gradgradcheck(lambda *x: call(*x)[0], (q, k, v))


def test_the_default_scale_is_that_of_dim_qk():
    q, k, v = random_operands(3, 4, dim=16)
    torch.testing.assert_close(reference.attention(q, k, v)[0], reference.attention(q, k, v, scale=0.25)[0], rtol=0, atol=0)


def test_packed_is_a_loop_over_sequences():
    q, k, v = (t[0] for t in random_operands(12, 15, batch=1))
    cu_q, cu_k = torch.tensor([0, 3, 3, 10]), torch.tensor([0, 4, 6, 12])
    out, lse = reference.attention_varlen(q, k, v, cu_q, cu_k, right=0)
    for (q0, q1), (k0, k1) in (((0, 3), (0, 4)), ((3, 10), (6, 12))):
        want, want_lse = reference.attention(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], right=0)
        torch.testing.assert_close(out[q0:q1], want[0], rtol=0, atol=0)
        torch.testing.assert_close(lse[:, q0:q1], want_lse[0], rtol=0, atol=0)
    assert bool((out[10:] == 0).all())
    assert bool(torch.isneginf(lse[:, 10:]).all())


def test_rows_of_visible_are_rows_of_the_whole():
    rows = torch.tensor([4, 0, 2])
    whole = reference.visible(5, 7, 2, 1)
    assert torch.equal(reference.visible(5, 7, 2, 1, rows=rows), whole[rows])


def test_a_value_reaches_exactly_the_rows_that_see_it():
    q, k, v = random_operands(6, 6, heads_q=2, heads_k=2)
    v[0, 3, 1, 0] = math.nan
    out, _ = reference.attention(q, k, v, right=0)
    assert torch.isnan(out).nonzero().tolist() == [[0, i, 1, 0] for i in (3, 4, 5)]


def test_it_needs_none_of_the_package():
    """Independence is what makes it an oracle: it imports torch and nothing else."""
    names = {name for name, value in vars(reference).items() if not name.startswith("_") and hasattr(value, "__file__")}
    assert names == {"torch"}


def test_random_cases_agree_with_the_second_oracle():
    rnd = random.Random(0)
    for seed in range(30):
        len_q, len_k = rnd.randint(1, 9), rnd.randint(1, 12)
        left, right = rnd.choice([None, 0, 1, 4, 20]), rnd.choice([None, 0, 1, 4, 20])
        q, k, v = random_operands(len_q, len_k, batch=1, seed=seed)
        out, lse = reference.attention(q * 4, k, v, left=left, right=right, scale=-0.3)
        want_out, want_lse = one_row_at_a_time(q * 4, k, v, left, right, -0.3)
        torch.testing.assert_close(out, torch.tensor(want_out, dtype=torch.float64), rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, torch.tensor(want_lse, dtype=torch.float64), rtol=0, atol=1e-12)


SCORES = {
    "softcap": {"softcap": 1.5},
    "alibi": {"slopes": [0.5, 0.25, 1.0, 0.0]},
    "sink": {"sink": [0.0, -20.0, 20.0, -math.inf]},
    "all": {"softcap": 2.0, "slopes": [0.5, 0.25, -1.0, 0.1], "sink": [1.0, 2.0, -3.0, 0.5]},
}


def tensors(scores):
    return {name: torch.tensor(x, dtype=torch.float64) if isinstance(x, list) else x for name, x in scores.items()}


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize(("len_q", "len_k", "left", "right"), CASES)
def test_two_independent_oracles_agree_on_scores(len_q, len_k, left, right, scores):
    q, k, v = random_operands(len_q, len_k)
    out, lse = reference.attention(q * 3, k, v, left=left, right=right, scale=0.7, **tensors(scores))
    want_out, want_lse = one_row_at_a_time(q * 3, k, v, left, right, 0.7, **scores)
    torch.testing.assert_close(out, torch.tensor(want_out, dtype=torch.float64).view_as(out), rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, torch.tensor(want_lse, dtype=torch.float64).view_as(lse), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_gradients_of_scores_agree_with_finite_differences(scores):
    q, k, v = (t.requires_grad_() for t in random_operands(4, 3, heads_q=4, heads_k=2, dim=2, batch=1))
    given = tensors(scores)
    sink = given.pop("sink", torch.full((4,), -1.0, dtype=torch.float64)).clamp(min=-5.0).requires_grad_()

    def call(q, k, v, sink):
        return reference.attention(q, k, v, right=0, sink=sink, **given)

    assert torch.autograd.gradcheck(call, (q, k, v, sink))


def test_slopes_of_a_batch_and_a_bias_are_the_slopes_of_each_sequence():
    q, k, v = random_operands(5, 7)
    slopes = torch.tensor([[0.5, 0.25, 1.0, 0.0], [0.1, 2.0, 0.0, 0.3]], dtype=torch.float64)
    whole = reference.attention(q, k, v, slopes=slopes)
    by_bias = reference.attention(q, k, v, bias=reference.alibi(slopes, 5, 7))
    packed = reference.attention_varlen(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), torch.tensor([0, 5, 10]), torch.tensor([0, 7, 14]), slopes=slopes
    )
    for b in range(2):
        alone = reference.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], slopes=slopes[b])
        for i in range(2):
            torch.testing.assert_close(whole[i][b], alone[i][0], rtol=0, atol=1e-14)
            torch.testing.assert_close(by_bias[i][b], alone[i][0], rtol=0, atol=1e-14)
        torch.testing.assert_close(packed[0][5 * b : 5 * b + 5], alone[0][0], rtol=0, atol=1e-14)
        torch.testing.assert_close(packed[1][:, 5 * b : 5 * b + 5], alone[1][0], rtol=0, atol=1e-14)


def test_a_bias_of_minus_infinity_is_a_mask():
    q, k, v = random_operands(5, 7)
    seen = torch.rand(2, 4, 5, 7, generator=torch.Generator().manual_seed(1)) > 0.6
    bias = torch.where(seen, 0.0, -torch.inf).double()
    for one, other in zip(reference.attention(q, k, v, bias=bias), reference.attention(q, k, v, seen=seen), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
