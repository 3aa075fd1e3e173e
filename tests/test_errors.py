"""Bad input: an error that says what arrived, what is required and the fix, before any work, and no buffer changed."""

import contextlib
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rowmax
from rowmax import ProblemError, Unsupported
from rowmax.ops import FORWARD


def tensor(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


def dense(**changes):
    """`(q, k, v)` and keyword arguments of a good dense call, some replaced."""
    call = {"q": tensor(2, 5, 4, 16), "k": tensor(2, 7, 2, 16), "v": tensor(2, 7, 2, 16)}
    return call | changes


def packed(**changes):
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    call = {"q": tensor(5, 4, 16), "k": tensor(5, 2, 16), "v": tensor(5, 2, 16), "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    return call | changes


def cu(*values, dtype=torch.int32, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


META = {"device": "meta"}
# name -> (call, what the message must say: what arrived, what is required, the fix)
DENSE = {
    "q is no tensor": (dense(q=[[1.0]]), ["q must be a torch.Tensor", "got list"]),
    "v is None": (dense(v=None), ["v must be a torch.Tensor", "got NoneType"]),
    "rank 3": (
        dense(q=tensor(5, 4, 16)),
        ["q must have rank 4", "[B, T, H, D]", "got rank 3, shape [5, 4, 16]", "attention_varlen"],
    ),
    "rank 5": (dense(k=tensor(1, 2, 7, 2, 16)), ["k must have rank 4", "got rank 5", "[1, 2, 7, 2, 16]"]),
    "head dims differ": (dense(k=tensor(2, 7, 2, 8)), ["same head dimension", "16 and 8", "q [2, 5, 4, 16]"]),
    "head dim 257": (
        dense(q=tensor(1, 1, 1, 257), k=tensor(1, 1, 1, 257), v=tensor(1, 1, 1, 257)),
        ["dim_qk must be in 1..256", "257"],
    ),
    "head dim 0": (dense(v=tensor(2, 7, 2, 0)), ["dim_v must be in 1..256", "got 0"]),
    "heads do not divide": (
        dense(k=tensor(2, 7, 3, 16), v=tensor(2, 7, 3, 16)),
        ["multiple of KV heads", "4 and 3", "[B, T, H, D]"],
    ),
    "no KV heads": (dense(k=tensor(2, 7, 0, 16), v=tensor(2, 7, 0, 16)), ["multiple of KV heads", "4 and 0"]),
    "33 heads over 2": (
        dense(q=tensor(1, 5, 33, 16), k=tensor(1, 7, 2, 16), v=tensor(1, 7, 2, 16)),
        ["33 and 2", "multiple"],
    ),
    "k and v lengths": (dense(v=tensor(2, 6, 2, 16)), ["k and v must agree", "k [2, 7, 2, 16]", "v [2, 6, 2, 16]"]),
    "k and v heads": (dense(v=tensor(2, 7, 1, 16)), ["k and v must agree", "v [2, 7, 1, 16]"]),
    "batches differ": (dense(q=tensor(3, 5, 4, 16)), ["same batch", "q [3, 5, 4, 16]", "k [2, 7, 2, 16]"]),
    "dtypes differ": (
        dense(k=tensor(2, 7, 2, 16, dtype=torch.bfloat16)),
        ["one dtype", "torch.float32, torch.bfloat16, torch.float32", "autocast"],
    ),
    "integers": (
        {name: tensor(2, 7, 2, 16, dtype=torch.int32) for name in "qkv"},
        ["q has dtype torch.int32", "torch.bfloat16", "Convert"],
    ),
    "complex": ({name: tensor(2, 7, 2, 16, dtype=torch.complex64) for name in "qkv"}, ["q has dtype torch.complex64"]),
    "fp8": (
        {name: tensor(2, 7, 2, 16).to(torch.float8_e4m3fn) for name in "qkv"},
        ["q has dtype torch.float8_e4m3fn", "required"],
    ),
    "devices differ": (dense(k=tensor(2, 7, 2, 16, **META)), ["one device", "cpu, meta, cpu", ".to(device)"]),
    "last stride": (
        dense(q=tensor(2, 5, 16, 4).transpose(2, 3)),
        ["q must have stride 1 in its last dimension", "strides (320, 64, 1, 4)", "q.contiguous()"],
    ),
    "heads first": (
        dense(q=tensor(2, 8, 100, 16), k=tensor(2, 2, 120, 16), v=tensor(2, 2, 120, 16)),
        ["[B, T, H, D]", "100 and 120 heads", "look like [B, H, T, D]", "q.transpose(1, 2)"],
    ),
    "heads first, equal lengths": (
        dense(q=tensor(1, 8, 512, 64), k=tensor(1, 2, 512, 64), v=tensor(1, 2, 512, 64), causal=True),
        ["look like [B, H, T, D]", "q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)"],
    ),
    "negative window": (dense(window=(-1, 0)), ["window (left side)", "at least 0", "got -1", "window=(w - 1, 0)"]),
    "negative right window": (dense(window=(5, -3)), ["window (right side)", "got -3"]),
    "negative right window, causal": (dense(window=(5, -3), causal=True), ["window", "at least 0", "(5, -3)"]),
    "window of one number": (dense(window=4), ["window must be a pair (left, right)", "got 4"]),
    "window of three": (dense(window=(1, 2, 3)), ["window must be a pair", "(1, 2, 3)"]),
    "window of floats": (dense(window=(1.5, 0)), ["window must be a pair (left, right) of integers", "(1.5, 0)"]),
    "window of booleans": (dense(window=(True, False)), ["window must be a pair (left, right) of integers"]),
    "scale NaN": (dense(scale=math.nan), ["scale must be a finite number", "got nan", "1/sqrt(dim_qk)"]),
    "scale inf": (dense(scale=math.inf), ["scale must be a finite number", "got inf"]),
    "scale is a tensor": (dense(scale=torch.tensor(0.5)), ["scale must be a Python number", "got Tensor", ".item()"]),
    "scale is text": (dense(scale="0.5"), ["scale must be a Python number", "got str"]),
    "scale is a boolean": (dense(scale=True), ["scale must be a Python number", "got bool"]),
}
PACKED = {
    "dense tensors": (packed(q=tensor(1, 5, 4, 16)), ["q must have rank 3", "[T, H, D]", "got rank 4", "call attention."]),
    "cu_seqlens is a list": (
        packed(cu_seqlens_q=[0, 2, 5]),
        ["cu_seqlens_q must be an int32 tensor of shape [B + 1]", "got list"],
    ),
    "cu_seqlens_k is None": (packed(cu_seqlens_k=None), ["cu_seqlens_k must be", "got NoneType"]),
    "float cu_seqlens": (
        packed(cu_seqlens_q=torch.tensor([0.0, 5.0])),
        ["cu_seqlens_q must be int32 or int64", "float32", ".to("],
    ),
    "boolean cu_seqlens": (packed(cu_seqlens_k=torch.tensor([True, False])), ["cu_seqlens_k must be int32 or int64", "bool"]),
    "rank 2": (packed(cu_seqlens_q=cu(0, 5).view(1, 2)), ["cu_seqlens_q must have shape [B + 1]", "got [1, 2]"]),
    "rank 0": (packed(cu_seqlens_q=torch.tensor(5)), ["cu_seqlens_q must have shape [B + 1]", "got []"]),
    "empty": (packed(cu_seqlens_q=cu()), ["cu_seqlens_q must have shape [B + 1]", "got [0]"]),
    "numbers of sequences differ": (packed(cu_seqlens_k=cu(0, 5)), ["same number of sequences", "[3] and [2]"]),
    "wrong device": (packed(cu_seqlens_q=cu(0, 2, 5, **META)), ["cu_seqlens_q is on meta and q on cpu", ".to(q.device)"]),
    "does not start at 0": (packed(cu_seqlens_q=cu(1, 2, 5)), ["cu_seqlens_q must start at 0", "got [1, 2, 5]"]),
    "decreases": (packed(cu_seqlens_k=cu(0, 4, 3)), ["cu_seqlens_k must start at 0, never decrease", "got [0, 4, 3]"]),
    "beyond the tensor": (packed(cu_seqlens_k=cu(0, 2, 6)), ["end at most at 5 (the rows that arrived)", "got [0, 2, 6]"]),
    "negative": (packed(cu_seqlens_q=cu(0, -2, 5)), ["never decrease", "got [0, -2, 5]"]),
    "heads do not divide": (packed(k=tensor(5, 3, 16), v=tensor(5, 3, 16)), ["multiple of KV heads", "4 and 3", "[T, H, D]"]),
    "k and v lengths": (packed(v=tensor(4, 2, 16)), ["k and v must agree", "v [4, 2, 16]"]),
    "negative hint": (packed(max_seqlen_q=-1), ["max_seqlen_q must be at least 0", "got -1"]),
    "hint is a tensor": (
        packed(max_seqlen_q=torch.tensor(3)),
        ["max_seqlen_q must be an integer or None", "got Tensor", ".item()"],
    ),
    "hint is text": (packed(max_seqlen_k="7"), ["max_seqlen_k must be an integer or None", "got str '7'"]),
}


def run(function, call):
    here = {name: value for name, value in call.items() if isinstance(value, torch.Tensor) and value.device.type == "cpu"}
    before = {name: value.clone() for name, value in here.items()}
    with pytest.raises(ProblemError) as caught:
        function(**call)
    for name, value in here.items():
        assert value.tolist() == before[name].tolist(), f"{name} changed"
    return str(caught.value)


@pytest.mark.parametrize(("call", "parts"), DENSE.values(), ids=DENSE)
def test_dense(call, parts):
    text = run(rowmax.attention, call)
    for part in parts:
        assert part in text


def test_heads_that_do_not_divide_are_not_taken_for_another_layout():
    """As many queries as keys would divide, were they heads; but then keys would be fewer than heads."""
    text = run(rowmax.attention, dense(q=tensor(1, 100, 5, 16), k=tensor(1, 100, 8, 16), v=tensor(1, 100, 8, 16)))
    assert "5 and 8 heads" in text
    assert "look like" not in text


@pytest.mark.parametrize(("call", "parts"), PACKED.values(), ids=PACKED)
def test_packed(call, parts):
    text = run(rowmax.attention_varlen, call)
    for part in parts:
        assert part in text


def test_the_good_calls_are_good():
    assert rowmax.attention(**dense()).shape == (2, 5, 4, 16)
    assert rowmax.attention_varlen(**packed()).shape == (5, 4, 16)


@pytest.mark.parametrize("name", [n for n, (call, _) in DENSE.items() if all(isinstance(call[x], torch.Tensor) for x in "qkv")])
def test_the_operator_itself_validates(name):
    """A direct caller of the operator is checked like a caller of `attention`, where its schema can carry the call."""
    call = DENSE[name][0]
    if "window" in name or "scale" in name:
        pytest.skip("the schema or the public function checks this")
    arguments = (True, call["q"], call["k"], call["v"], None, None, None, None, None, None, 0 if call.get("causal") else None)
    with pytest.raises((ProblemError, NotImplementedError)):
        FORWARD(*arguments, False, "")


def test_a_preferred_plan_that_cannot_run_lists_the_reasons():
    with pytest.raises(Unsupported, match="top left"):
        rowmax.attention(**dense(causal=True, plan="aten"))
    with pytest.raises(Unsupported, match="no algorithm 'fastest'; known are"):
        rowmax.attention(**dense(plan="fastest"))
    with pytest.raises(ValueError, match="is no plan; an example"):
        rowmax.attention(**dense(plan="q_outer[128"))


MERGE = {
    "nothing": (([], []), ["at least one", "0 and 0"]),
    "counts differ": (([tensor(1, 5, 2, 8)], []), ["as many outputs as LSEs", "1 and 0"]),
    "lse shape": (([tensor(1, 5, 2, 8)], [tensor(1, 5, 2)]), ["[B, H, T]", "LSE [1, 5, 2]"]),
    "output shapes": (
        ([tensor(1, 5, 2, 8), tensor(1, 4, 2, 8)], [tensor(1, 2, 5), tensor(1, 2, 4)]),
        ["of one shape", "[1, 4, 2, 8] beside [1, 5, 2, 8]"],
    ),
    "rank": (([tensor(5, 8)], [tensor(5)]), ["[T, H, D]", "out [5, 8]"]),
    "one part for many": (
        (tensor(2, 5, 3, 8), tensor(2, 3, 5)),
        ["outs as a sequence", "one tensor [2, 5, 3, 8]", "[part, ...]", "outs.unbind(0)"],
    ),
    "one LSE for many": (([tensor(1, 5, 2, 8)], tensor(1, 2, 5)), ["lses as a sequence", "one tensor [1, 2, 5]"]),
    "no sequence": ((None, None), ["outs as a sequence", "got NoneType"]),
    "other things": (([tensor(1, 5, 2, 8), 1], [tensor(1, 2, 5)] * 2), ["floating point tensors", "got int in outs"]),
    "integers": (([tensor(1, 5, 2, 8)], [tensor(1, 2, 5, dtype=torch.int64)]), ["floating point", "torch.int64 in lses"]),
    "dtypes": (([tensor(1, 5, 2, 8), tensor(1, 5, 2, 8).half()], [tensor(1, 2, 5)] * 2), ["one dtype", "torch.float16 beside"]),
    "devices": (([tensor(1, 5, 2, 8, **META)], [tensor(1, 2, 5)]), ["on one device", "meta, cpu"]),
}


def test_merge_takes_stacked_parts():
    outs, lses = torch.randn(3, 1, 5, 2, 8), torch.randn(3, 1, 2, 5)
    for got, want in zip(rowmax.merge(outs, lses), rowmax.merge(list(outs), lses.unbind(0)), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("call", "parts"), MERGE.values(), ids=MERGE)
def test_merge(call, parts):
    with pytest.raises(ProblemError) as caught:
        rowmax.merge(*call)
    for part in parts:
        assert part in str(caught.value)


HONEST = {
    "causal": ({}, {"causal": True}),
    "window left": ({}, {"window": (1, None)}),
    "window right": ({}, {"window": (None, 1)}),
    "scale": ({}, {"scale": 0.5}),
    "bias": ({}, {"bias": torch.arange(7.0).view(1, 1, 1, 7)}),
    "mask": ({}, {"mask": torch.arange(7).view(1, 1, 1, 7) > 0}),
    "seqlens_k": ({}, {"seqlens_k": torch.tensor([7, 3])}),
    "leftpad_k": ({}, {"leftpad_k": torch.tensor([0, 3])}),
    "seqlens_q": ({}, {"seqlens_q": torch.tensor([5, 3])}),
    "dropout_p": ({}, {"dropout_p": 0.5}),
    "seed": ({"dropout_p": 0.5, "seed": 1}, {"dropout_p": 0.5, "seed": 2}),
}


@pytest.mark.parametrize(("one", "other"), HONEST.values(), ids=HONEST)
def test_every_argument_has_an_effect(one, other):
    """A flag that is accepted and ignored is worse than one that is refused."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 16)
    assert not torch.allclose(rowmax.attention(q, k, v, **one), rowmax.attention(q, k, v, **other))


ANYTHING = st.one_of(
    st.none(), st.integers(-5, 5), st.floats(), st.text(max_size=3), st.booleans(), st.tuples(st.integers(-2, 4))
)
SIZES = st.lists(st.integers(0, 5), min_size=0, max_size=5)
TENSORS = st.builds(
    lambda shape, dtype, device: torch.ones(shape, dtype=dtype, device=device),
    SIZES,
    st.sampled_from([torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool]),
    st.sampled_from(["cpu", "cpu", "cpu", "meta"]),
)
MAYBE_TENSORS = st.one_of(TENSORS, TENSORS, TENSORS, ANYTHING)
CU = st.one_of(st.lists(st.integers(-3, 8), max_size=4).map(lambda x: torch.tensor(x, dtype=torch.int32)), MAYBE_TENSORS)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "causal": st.booleans(),
        "window": st.one_of(ANYTHING, st.tuples(ANYTHING, ANYTHING)),
        "scale": ANYTHING,
        "return_lse": st.booleans(),
        "deterministic": st.booleans(),
        "plan": st.one_of(st.none(), st.sampled_from(["aten", "tiled", "fast", "", "tiled[8x8]"])),
    },
)
PAIRS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("bias", "mask", "seqlens_q", "seqlens_k", "leftpad_k", "seed"), MAYBE_TENSORS),
        "dropout_p": ANYTHING,
    },
)


@st.composite
def nearly_right(draw):
    """Shapes that agree, but for one size in some of the draws."""
    batch, len_q, len_k, heads, group, dim, dim_v = (draw(st.integers(0, 3)) for _ in range(7))
    shapes = [[batch, len_q, heads * group, dim], [batch, len_k, heads, dim], [batch, len_k, heads, dim_v]]
    if draw(st.booleans()):
        shapes[draw(st.integers(0, 2))][draw(st.integers(0, 3))] += 1
    return [torch.ones(shape) for shape in shapes]


def survives(function, *arguments, **options):
    """Success, or one of the errors that a caller may expect."""
    with contextlib.suppress(ProblemError, Unsupported, ValueError, TypeError):
        function(*arguments, **options)


@settings(max_examples=400, deadline=None)
@given(MAYBE_TENSORS, MAYBE_TENSORS, MAYBE_TENSORS, OPTIONS)
def test_fuzz_attention(q, k, v, options):
    survives(rowmax.attention, q, k, v, **options)


@settings(max_examples=400, deadline=None)
@given(nearly_right(), OPTIONS)
def test_fuzz_nearly_right_attention(tensors, options):
    survives(rowmax.attention, *tensors, **options)


@settings(max_examples=200, deadline=None)
@given(nearly_right(), PAIRS)
def test_fuzz_what_is_given_beside(tensors, options):
    survives(rowmax.attention, *tensors, **options)


@settings(max_examples=400, deadline=None)
@given(nearly_right(), CU, CU, OPTIONS, ANYTHING)
def test_fuzz_attention_varlen(tensors, cu_q, cu_k, options, hint):
    flat = [t.flatten(0, 1) for t in tensors]
    survives(rowmax.attention_varlen, *flat, cu_q, cu_k, max_seqlen_q=hint, **options)


@settings(max_examples=200, deadline=None)
@given(st.lists(MAYBE_TENSORS, max_size=3), st.lists(MAYBE_TENSORS, max_size=3))
def test_fuzz_merge(outs, lses):
    survives(rowmax.merge, outs, lses)


def test_messages_are_not_assertions():
    """No `assert` guards an argument: under `python -O` it would vanish."""
    for path in Path(rowmax.__file__).parent.rglob("*.py"):
        if "kernels" not in path.parts:
            assert not re.search(r"^\s*assert ", path.read_text(), re.MULTILINE), f"{path.name} asserts"
