"""`rowmax.prepare_paged`, and launches of eager calls kept by their form."""

import os

import pytest
import torch

import rowmax
from rowmax import PagedProblem, ProblemError, ops_paged
from rowmax.testing import paged

PLANS = ["gathered", *(["split_kv[16x16 w4 s1 x2]"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]
DENSE, PACKED = "b2 h4/2 q3 k32 d16/24 fp32 causal paged8", "b3 h2/1 q12 k32 d16 fp16 causal packed paged16"
LENGTHS = {DENSE: [(3, 30), (3, 9)], PACKED: [(4, 30), (0, 5), (7, 20)]}


@pytest.fixture(params=PLANS)
def plan(request):
    return request.param


@pytest.mark.parametrize("text", [DENSE, PACKED])
def test_a_prepared_call_sees_what_was_written_in_place(text, plan):
    problem = PagedProblem.parse(text)
    given = paged.paged_operands(problem, LENGTHS[text])[0]
    for pages in given[1:3]:  # the table will name all of them
        pages.nan_to_num_()
    tensors, cu = given[:5], given.cu_seqlens_q
    options = {"cu_seqlens_q": cu, "return_lse": True, "plan": plan}
    attend = rowmax.prepare_paged(*tensors, **options)
    first = attend()
    for step in range(2):
        given.q.copy_(torch.randn(given.q.shape))
        given.seqlens_k.sub_(1)
        given.block_table.copy_(given.block_table.clamp(0, 2).flip(0))
        if cu is not None:  # rows that leave every sequence are cleared
            cu[3] = 11 - step
        results = attend()
        for one, same, want in zip(results, first, rowmax.attention_paged(*tensors, **options), strict=True):
            assert one is same
            assert torch.equal(one, want)
    assert repr(attend).startswith(f"<prepared '{text}")


def test_a_prepared_call_gives_the_form_of_q_and_no_gradients(plan):
    q, pages = torch.randn(2, 4, 16), torch.randn(3, 8, 2, 16)
    table, lengths = torch.tensor([[1], [2]]), torch.tensor([8, 3])
    attend = rowmax.prepare_paged(q, pages, pages, table, lengths, plan=plan)
    assert torch.equal(attend(), rowmax.attention_paged(q, pages, pages, table, lengths, plan=plan))
    with pytest.raises(ProblemError, match=r"no gradients.*torch\.no_grad"):
        rowmax.prepare_paged(q.clone().requires_grad_(), pages, pages, table, lengths, plan=plan)
    for wrong in ({"causal": 1}, {"scale": True}, {"num_splits": 0}):
        with pytest.raises(ProblemError):
            rowmax.prepare_paged(q, pages, pages, table, lengths, plan=plan, **wrong)
    weight = torch.ones((), requires_grad=True)
    loss = (attend() * weight).sum()
    attend()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- eager calls -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(len(PLANS) == 1, reason="needs Triton's interpreter")
def test_calls_of_one_form_are_planned_once(monkeypatch):
    monkeypatch.setattr(ops_paged, "_launches", {})
    planned, describe = [], ops_paged.plan_paged
    monkeypatch.setattr(ops_paged, "plan_paged", lambda *call: planned.append(1) or describe(*call))
    pages = torch.randn(3, 8, 1, 16)
    table, lengths = torch.tensor([[1], [2]]), torch.tensor([8, 3])

    def call(seed=0, table=table, **options):
        q = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(seed))
        return rowmax.attention_paged(
            q, pages, pages.clone(), table, lengths, **{"plan": "split_kv[16x16 w4 s1 x1]", **options}
        )

    first = call()
    for seed in (1, 0):
        again = call(seed)
    assert len(planned) == 1
    assert torch.equal(again, first)
    others = ({"return_lse": True}, {"scale": 0.5}, {"causal": False}, {"window": (3, 0)}, {"table": table.int()})
    for options in others:
        call(**options)
        call(**options)
    assert len(planned) == 1 + len(others)
    out = torch.empty(2, 2, 16)
    for _ in range(2):
        assert call(out=out) is out
        assert torch.equal(out, first)
    assert len(planned) == 2 + len(others)
    for wrong in ({"causal": 1}, {"window": [3, 0, 1]}, {"out": torch.empty(2, 2, 15)}, {"table": table.float()}):
        with pytest.raises(ProblemError):
            call(**wrong)
