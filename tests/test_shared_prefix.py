"""Pages that sequences begin with, read once: the same as reading them for each, under the acceptance rule."""

import os

import pytest
import torch

import rowmax
from rowmax import PagedKVCache, PagedProblem, ProblemError, attention_shared
from rowmax.testing import check_forward, paged

PLANS = ["gathered", *(["split_kv[16x16 w4 s1 x2]"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]
CASES = {  # queries and keys of each sequence, pages that they share
    "b3 h4/2 q1 k64 d16/24 bf16 causal paged8": ([(1, 50), (1, 33), (1, 64)], 4),
    "b2 h4 q3 k48 d16 fp16 causal paged8": ([(3, 40), (3, 19)], 2),
    "b3 h4/2 q12 k48 d16 fp32 causal packed paged8": ([(5, 40), (0, 16), (4, 21)], 2),
    "b2 h4/2 q2 k48 d16 bf16 causal paged8 e4m3": ([(2, 40), (2, 18)], 2),
}


def shared(text: str, share: int, lengths):
    """Operands of which every sequence begins with the pages of the first, and what they mean as a packed call."""
    problem = PagedProblem.parse(text)
    given, flat, packed = paged.paged_operands(problem, lengths, page_scales=True)
    first, size = 0, problem.page_size
    for b, (_, keys) in enumerate(lengths):
        given.block_table[b, :share] = given.block_table[0, :share]
        for t in (packed.k, packed.v):
            t[first : first + share * size] = t[: share * size]
        first += keys
    return problem, given, flat, packed


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("text", CASES)
def test_equal_to_each_sequence_alone(text, plan):
    lengths, share = CASES[text]
    problem, given, flat, packed = shared(text, share, lengths)
    *tensors, cu, k_scale, v_scale = given
    options = {"cu_seqlens_q": cu, "k_scale": k_scale, "v_scale": v_scale, "plan": plan}
    out, lse = attention_shared(*tensors, share, return_lse=True, **options)
    report = check_forward(flat, packed, *paged.as_packed(problem, out, lse))
    assert report.ok, str(report)
    assert torch.equal(attention_shared(*tensors, share, **options), out)
    if problem.len_q == 1:
        squeezed, squeezed_lse = attention_shared(tensors[0][:, 0], *tensors[1:], share, return_lse=True, **options)
        assert torch.equal(squeezed, out[:, 0])
        assert torch.equal(squeezed_lse, lse[:, :, 0])


@pytest.mark.skipif(len(PLANS) == 1, reason="needs Triton's interpreter")
@pytest.mark.parametrize("len_q", [1, 3])
def test_the_kernel_merges_as_merge_does(len_q):
    from rowmax.kernels.decode_launch import merge_into

    batch, heads, dim = 3, 2, 24
    rows = batch * len_q
    a, b = torch.randn(2, rows, heads, dim).bfloat16()
    a_lse, lse = 3 * torch.randn(heads, rows), 3 * torch.randn(batch, heads, len_q)
    a_lse[0, 0], lse[0, 0, 0], a_lse[1, 1], lse[0, 1, 0] = (-torch.inf,) * 4
    if len_q == 1:
        lse[1, 1, 0] = -torch.inf  # with row 1 of a: a row that saw nothing in either part
    a[a_lse.T.isneginf()] = 0
    b.view(batch, len_q, heads, dim)[lse.transpose(1, 2).isneginf()] = 0
    own = lse.transpose(0, 1).reshape(heads, rows)
    want, want_lse = rowmax.merge((a, b), (a_lse, own))
    merge_into(a, a_lse, b, lse, len_q)
    torch.testing.assert_close(b, want)
    torch.testing.assert_close(lse.transpose(0, 1).reshape(heads, rows), want_lse)


def test_a_cache_knows_what_is_shared():
    cache = PagedKVCache(40, page_size=4, heads=2, dim=16, dtype=torch.float32)
    prompt = cache.add()
    k, v = torch.randn(1, 18, 2, 16), torch.randn(1, 18, 2, 16)
    cache.append(cache.extend([prompt], 18), k, v)
    answers = [cache.fork(prompt) for _ in range(3)]
    for count in (1, 6):
        step = cache.extend(answers, count)
        new = torch.randn(2, 3, count, 2, 16)
        cache.append(step, *new)
        q = torch.randn(3, count, 4, 16)
        assert cache.shared_pages(answers) == 18 // 4
        torch.testing.assert_close(cache.attend_shared(step, q, 4), cache.attend(step, q))
    assert cache.shared_pages([answers[0]]) == 0
    assert cache.shared_pages([answers[0], cache.add()]) == 0


def test_what_is_not_shared_is_named():
    _, given, *_ = shared("b2 h4 q3 k48 d16 fp16 causal paged8", 2, [(3, 40), (3, 19)])
    tensors = list(given[:5])
    assert attention_shared(*tensors, 0).shape == tensors[0].shape
    for pages, says in ((3, r"block_table\[1, 2\] is"), (-1, "from 0 to 6"), (7, "from 0 to 6"), (1.0, "from 0 to 6")):
        with pytest.raises(ProblemError, match=says):
            attention_shared(*tensors, pages)
    tensors[4] = torch.tensor([40, 18])
    with pytest.raises(ProblemError, match=r"seqlens_k\[1\] is 18, 3 of them new; 2 shared pages hold 16 keys"):
        attention_shared(*tensors, 2)
