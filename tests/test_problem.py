"""One spelling for a problem: `parse` and `str` are inverses, and equal problems are one key of a cache."""

import contextlib
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowmax import Problem, ProblemError
from rowmax.mask import pattern
from rowmax.problem import DTYPES, Operands

SIDES = st.one_of(st.none(), st.integers(0, 5000))


@st.composite
def problems(draw):
    heads_k, group = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    packed = draw(st.booleans())
    return Problem(
        batch=draw(st.integers(0, 70000)),
        heads_q=heads_k * group,
        heads_k=heads_k,
        len_q=draw(st.integers(0, 1 << 20)),
        len_k=draw(st.integers(0, 1 << 20)),
        dim_qk=draw(st.integers(1, 256)),
        dim_v=draw(st.integers(1, 256)),
        dtype=draw(st.sampled_from(list(DTYPES.values()))),
        band=pattern(*(draw(SIDES) for _ in range(4)), draw(st.one_of(st.none(), st.integers(1, 5000)))),
        scale=draw(st.one_of(st.just(math.nan), st.floats(-1e38, 1e38))),
        packed=packed,
        max_len_q=draw(st.one_of(st.none(), st.integers(0, 9999))) if packed else None,
        max_len_k=draw(st.one_of(st.none(), st.integers(0, 9999))) if packed else None,
        deterministic=draw(st.booleans()),
        softcap=draw(st.one_of(st.just(0.0), st.floats(1e-30, 1e30))),
        alibi=draw(st.sampled_from(["", "head", "batch"])),
        sink=draw(st.booleans()),
    )


@given(problems())
def test_parse_is_the_inverse_of_str(problem):
    again = Problem.parse(str(problem))
    assert again == problem
    assert hash(again) == hash(problem)
    assert str(again) == str(problem)


@given(problems())
def test_a_problem_can_be_pickled(problem):
    assert pickle.loads(pickle.dumps(problem)) == problem


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("h8 q128 d64 bf16", "b1 h8 q128 k128 d64 bf16"),
        ("bf16 causal d64 q128 h8/2 b3", "b3 h8/2 q128 k128 d64 bf16 causal"),
        ("b1 h8 q1 k9 d192/128 fp16 window(inf,0)", "b1 h8 q1 k9 d192/128 fp16 causal"),
        ("b1 h8 q1 k9 d64/64 fp32 window(inf,inf)", "b1 h8 q1 k9 d64 fp32"),
        ("b1 h8 q1 k9 d64 fp32 scale=0.125", "b1 h8 q1 k9 d64 fp32"),
        ("b4 h2 q9 k9 d64 fp32 packed maxq5 maxk6 window(3,inf) deterministic",) * 2,
    ],
)
def test_words_in_any_order_give_one_spelling(text, canonical):
    words = set(canonical.split())
    assert set(str(Problem.parse(text)).split()) == words


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("b1 h8 q128 d64 bf16 casual", "'casual' is not part of a problem's spelling"),
        ("b1 q128 d64 bf16", "lacks h<heads>"),
        ("b1 h8 d64 bf16", "lacks q<len>"),
        ("b1 h8 q128 bf16", "lacks d<dim>"),
        ("b1 h8 q128 d64", "lacks <dtype>"),
        ("", "lacks h<heads>"),
        ("b1 h8/3 q128 d64 bf16", "multiple of heads_k"),
        ("b1 h8/0 q128 d64 bf16", "multiple of heads_k"),
        ("b1 h8 q128 d257 bf16", "dim_qk must be in 1..256"),
        ("b1 h8 q128 d64/0 bf16", "dim_v must be in 1..256"),
        ("b1 h8 q128 d64 bf16 scale=.", "scale"),
        ("b1 h8 q128 d64 bf16 scale=1e999", "scale"),
        ("b1 h8 q128 d64 bf16 window(-1,0)", "window(-1,0)"),
        ("b1 h8 q128 k-1 d64 bf16", "k-1"),
        ("b1 h8 q128 d64 bf16 softcap=1e31", "softcap must be a positive number, at most 1e+30"),
        ("b1 h8 q128 d64 bf16 softcap=-1.0", "softcap"),
        ("b1 h8 q128 d64 bf16 alibi alibi(batch)", "a second time"),
    ],
)
def test_a_wrong_spelling_says_what_is_wrong(text, complaint):
    with pytest.raises(ProblemError) as caught:
        Problem.parse(text)
    assert complaint in str(caught.value)


@given(st.text(max_size=60))
def test_parse_of_anything_is_a_problem_or_a_problem_error(text):
    with contextlib.suppress(ProblemError):
        Problem.parse(text)


def test_describe_keeps_sizes_and_no_tensor():
    q, k, v = torch.zeros(2, 5, 8, 64), torch.zeros(2, 7, 2, 64), torch.zeros(2, 7, 2, 32)
    problem = Problem.describe(Operands(q, k, v), right=0)
    assert str(problem) == "b2 h8/2 q5 k7 d64/32 fp32 causal"
    assert problem.outputs() == ((2, 5, 8, 32), (2, 8, 5))
    assert problem.group == 4
    assert not any(isinstance(value, torch.Tensor) for value in vars(problem).values())


def test_describe_of_packed_tensors_counts_sequences():
    cu = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    q, k = torch.zeros(5, 4, 16), torch.zeros(5, 2, 16)
    problem = Problem.describe(Operands(q, k, k, cu, cu), max_len_q=3)
    assert str(problem) == "b3 h4/2 q5 k5 d16 fp32 packed maxq3"
    assert problem.outputs() == ((5, 4, 16), (4, 5))


def test_the_default_scale_follows_dim_qk():
    problem = Problem.parse("b1 h1 q1 k1 d64 bf16")
    assert problem.scale == 0.125
    assert problem.with_(dim_qk=16).scale == 0.25
    assert problem.with_(scale=2.0, dim_qk=16).scale == 2.0
    assert problem.with_(scale=2.0).with_(dim_qk=16).scale == 2.0


def test_lse_is_fp32_but_for_fp64():
    assert Problem.parse("h1 q1 d8 bf16").lse_dtype == torch.float32
    assert Problem.parse("h1 q1 d8 fp64").lse_dtype == torch.float64
