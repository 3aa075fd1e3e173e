"""What a stranger tried and found wrong: each stays right."""

import copy
import pickle
import subprocess
import sys
import weakref

import pytest
import torch

import rowmax
from rowmax import Problem, ProblemError

BACKENDS = pytest.mark.parametrize("backend", ["tiled", "q_outer"])


@BACKENDS
@pytest.mark.parametrize("make", [lambda cu: torch.stack([cu, cu + 7], 1)[:, 0], lambda cu: torch.cat([cu, cu])[: len(cu)]])
def test_lengths_may_lie_anywhere(backend, make):
    x = torch.randn(6, 2, 16, requires_grad=True)
    cu = torch.tensor([0, 2, 6])
    for plan in (backend, "tiled"):
        want = rowmax.attention_varlen(x, x, x, cu, cu, plan=plan)
        got = rowmax.attention_varlen(x, x, x, make(cu), make(cu), plan=plan)
        assert torch.equal(got, want)
        with torch.no_grad():
            assert torch.equal(rowmax.attention_varlen(x, x, x, make(cu), make(cu), plan=plan), want)
        assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (got, want)))


@BACKENDS
def test_an_expanded_length_is_read_as_it_is(backend):
    x, cu = torch.randn(6, 2, 16), torch.zeros(1, dtype=torch.int32).expand(3)
    assert not rowmax.attention_varlen(x, x, x, cu, cu, plan=backend).any()


@BACKENDS
@pytest.mark.parametrize("side", [2**30, 2**31 - 8, 2**31 - 1, 2**62, 2**63 - 1, 2**64, sys.maxsize])
@pytest.mark.parametrize("len_q", [10, 40])
def test_a_window_may_be_as_wide_as_an_integer(backend, side, len_q):
    q, k = torch.randn(1, len_q, 2, 16, requires_grad=True), torch.randn(1, 40, 2, 16, requires_grad=True)
    for window, same in (((side, side), {}), ((side, 0), {"causal": True}), ((side, None), {}), ((None, side), {})):
        outs = [rowmax.attention(q, k, k, plan=backend, **given) for given in ({"window": window}, same)]
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), (q, k)) for out in outs))


@BACKENDS
def test_the_negative_bit_is_read(backend):
    q, k = torch.randn(1, 8, 2, 16), torch.randn(1, 8, 2, 16)
    for _ in range(2):
        rowmax.attention(q, k, k, plan=backend)
    torch.testing.assert_close(
        rowmax.attention(torch._neg_view(q), k, k, plan=backend), rowmax.attention(-q, k, k, plan=backend)
    )
    torch.testing.assert_close(
        rowmax.attention(q, k, torch._neg_view(k), plan=backend), rowmax.attention(q, k, -k, plan=backend)
    )


def test_outputs_and_gradients_are_no_views():
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(1, 8, 2, 16, dtype=dtype, requires_grad=True)
        with torch.no_grad():
            out = rowmax.attention(q, q, q)
        out += torch.nn.Parameter(torch.ones(16, dtype=dtype))
        (grad,) = torch.autograd.grad(rowmax.attention(q, q, q).sum(), q)
        grad += torch.nn.Parameter(torch.ones(16, dtype=dtype))


def test_meta_tensors_have_shapes_with_and_without_gradients():
    q = torch.empty(2, 6, 4, 16, device="meta")
    assert rowmax.attention(q, q, q).shape == q.shape
    assert rowmax.attention(q.requires_grad_(), q, q).shape == q.shape


@pytest.mark.parametrize(
    "options", [{"causal": "no"}, {"return_lse": 1}, {"deterministic": torch.ones(1)}, {"scale": 10**400}, {"scale": 3e38}]
)
def test_arguments_of_the_wrong_kind_are_named(options):
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(ProblemError, match=next(iter(options))):
        rowmax.attention(q, q, q, **options)


def test_lengths_in_a_parameter_are_checked_too():
    x, cu = torch.randn(6, 2, 16), torch.nn.Parameter(torch.tensor([0, 2, 700]), requires_grad=False)
    with pytest.raises(ProblemError, match="cu_seqlens"):
        rowmax.attention_varlen(x, x, x, cu, cu)


def test_both_words_of_a_mask_count_in_either_order():
    both = [Problem.parse(f"b1 h1 q8 k8 d8 fp32 {words}").band for words in ("causal window(3,5)", "window(3,5) causal")]
    assert both == [rowmax.Band(3, 0)] * 2
    with pytest.raises(ProblemError, match="second time"):
        Problem.parse("b1 b2 h1 q8 d8 fp32")


def test_a_pickled_problem_is_found_in_a_set_of_another_process():
    problem = Problem.parse("b1 h1 q8 k8 d8 fp32")
    hash(problem)
    code = f"""import pickle; from rowmax import Problem
p = pickle.loads({pickle.dumps(problem)!r}); print(p in {{Problem.parse('b1 h1 q8 k8 d8 fp32')}})"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "True"


def test_a_prepared_call_is_not_copied():
    """Copied, it would go on to write into the tensors of the original."""
    q = torch.randn(1, 8, 2, 16)
    attend = rowmax.prepare(q, q, q)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="prepare the copies anew"):
            copied(attend)


def test_a_prepared_call_goes_with_its_last_reference():
    attend = rowmax.prepare(*torch.randn(3, 1, 8, 2, 16))
    attend()
    gone = weakref.ref(attend)
    del attend
    assert gone() is None


def test_lengths_of_one_side_alone_are_refused():
    q, cu = torch.randn(1, 8, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ProblemError, match=r"\[T, H, D\]|cu_seqlens_k came without cu_seqlens_q"):
        rowmax.prepare(q, q, q, cu_seqlens_k=cu)
    with pytest.raises(ProblemError, match="cu_seqlens_k came without cu_seqlens_q"):
        rowmax.prepare(q[0], q[0], q[0], cu_seqlens_k=cu)
