"""`rowmax.flash_attn_3`: the signatures of `flash_attn_interface`, what it computes, and what is refused."""

import inspect
import math
import subprocess
import sys

import pytest
import torch

import rowmax
from rowmax import ProblemError, Unsupported, flash_attn, flash_attn_3, reference
from rowmax.flash_attn_3 import interface

DESCALES = "q_descale=None k_descale=None v_descale=None"
SIGNATURES = {
    "flash_attn_func": f"q k v softmax_scale=None causal=False qv=None {DESCALES} window_size=(-1,-1) attention_chunk=0 "
    "softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False",
    "flash_attn_qkvpacked_func": f"qkv softmax_scale=None causal=False {DESCALES} window_size=(-1,-1) attention_chunk=0 "
    "softcap=0.0 deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None seqused_k=None "
    f"softmax_scale=None causal=False qv=None {DESCALES} window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 "
    "pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False",
    "flash_attn_combine": "out_partial lse_partial out=None out_dtype=None",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None "
    f"rotary_seqlens=None {DESCALES} softmax_scale=None causal=False window_size=(-1,-1) attention_chunk=0 softcap=0.0 "
    "rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 return_softmax_lse=False",
    "get_scheduler_metadata": "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens "
    "qkv_dtype=torch.bfloat16 headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None cache_leftpad=None page_size=None "
    "max_seqlen_k_new=0 causal=False window_size=(-1,-1) attention_chunk=0 has_softcap=False num_splits=0 pack_gqa=None "
    "sm_margin=0",
    "_flash_attn_forward": "q k v k_new=None v_new=None qv=None out_=None cu_seqlens_q=None cu_seqlens_k=None "
    "cu_seqlens_k_new=None seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None page_table=None "
    f"kv_batch_idx=None leftpad_k=None rotary_cos=None rotary_sin=None seqlens_rotary=None {DESCALES} softmax_scale=None "
    "causal=False window_size_left=-1 window_size_right=-1 attention_chunk=0 softcap=0.0 rotary_interleaved=True "
    "scheduler_metadata=None num_splits=1 pack_gqa=None sm_margin=0",
    "_flash_attn_backward": "dout q k v out softmax_lse cu_seqlens_q=None cu_seqlens_k=None sequed_q=None sequed_k=None "
    "max_seqlen_q=None max_seqlen_k=None dq=None dk=None dv=None softmax_scale=None is_causal=False window_size_left=-1 "
    "window_size_right=-1 softcap=0.0 deterministic=False sm_margin=0",
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def cu(*bounds):
    return torch.tensor(bounds, dtype=torch.int32)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_their_order_and_defaults(name):
    words = []
    for parameter in inspect.signature(getattr(interface, name)).parameters.values():
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default}".replace(" ", "")
        words.append(parameter.name + default)
    assert words == SIGNATURES[name].split()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 1)}, {"softcap": 2.0, "causal": True}])
def test_dense_calls_are_those_of_version_2_in_another_order(options):
    q, k, v = torch.randn(2, 7, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 8)
    out, lse = flash_attn_3.flash_attn_func(q, k, v, 0.3, **options, return_attn_probs=True)
    want, want_lse, _ = flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, **options, return_attn_probs=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, torch.where(torch.isposinf(want_lse), -math.inf, want_lse)), "-inf, as in that module"
    assert torch.equal(flash_attn_3.flash_attn_func(q, k, v, 0.3, **options), want)


def test_rows_that_see_nothing_have_an_lse_of_minus_infinity():
    q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 3, 2, 8)
    out, lse = flash_attn_3.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert bool(torch.isneginf(lse[..., :2]).all())
    assert not bool(out[:, :2].any())


def test_packed_tensors_of_both_shapes():
    qkv = torch.randn(2, 6, 3, 2, 8)
    want = flash_attn_3.flash_attn_func(*qkv.unbind(2), causal=True)
    assert torch.equal(flash_attn_3.flash_attn_qkvpacked_func(qkv, causal=True), want)
    grouped = torch.randn(2, 6, 8, 8)  # 4 query heads, 2 KV heads
    want = rowmax.attention(*grouped.split([4, 2, 2], 2))
    assert torch.equal(flash_attn_3.flash_attn_qkvpacked_func(grouped, num_heads_q=4), want)


def test_qv_is_more_of_the_scores_and_gets_its_gradient():
    q, k, v, qv = (torch.randn(1, n, h, d).requires_grad_() for n, h, d in ((5, 4, 8), (7, 2, 8), (7, 2, 12), (5, 4, 12)))
    out = flash_attn_3.flash_attn_func(q, k, v, None, True, qv)
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v, qv)]
    both = [torch.cat(pair, -1) for pair in ((leaves[0], leaves[3]), (leaves[1], leaves[2]))]
    want, _ = reference.attention(*both, leaves[2], right=0, scale=20**-0.5)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    grads, wanted = torch.autograd.grad(out.sum(), (q, k, v, qv)), torch.autograd.grad(want.sum(), leaves)
    for got, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got.double(), other, rtol=1e-4, atol=1e-5)


def test_rows_in_use_of_packed_sequences():
    """`seqused_q`, `seqused_k`: NaN in keys that do not count, outputs of 0 for queries that do not; gradients too."""
    q, k, v = torch.randn(9, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    k[3:5], v[3:5] = math.nan, math.nan
    bounds, used = (cu(0, 4, 9), cu(0, 5, 12)), (cu(3, 5), cu(3, 99))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = flash_attn_3.flash_attn_varlen_func(*leaves, *bounds, 5, 7, *used, causal=True, return_attn_probs=True)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    live_q, live = [0, 1, 2, 4, 5, 6, 7, 8], [0, 1, 2, 5, 6, 7, 8, 9, 10, 11]
    want, want_lse = reference.attention_varlen(
        exact[0][live_q], exact[1][live], exact[2][live], cu(0, 3, 8), cu(0, 3, 10), right=0
    )
    torch.testing.assert_close(out[live_q].double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[:, live_q].double(), want_lse, rtol=1e-5, atol=1e-5)
    assert not bool(out[3].any())
    assert bool(torch.isneginf(lse[:, 3]).all())
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(want, exact, dout[live_q].double())
    grads = torch.autograd.grad(out, leaves, dout)
    filled = [torch.full_like(t, math.nan) for t in leaves]
    interface._flash_attn_backward(dout, *leaves, out, lse, *bounds, *used, 5, 7, *filled, is_causal=True)
    for some in (grads, filled):
        for got, other in zip(some, wanted, strict=True):
            torch.testing.assert_close(got.double(), other, rtol=1e-4, atol=1e-5)


def test_a_cache_is_that_of_version_2_and_takes_packed_tokens():
    """Appended, rotated, in pages; dense, and packed with uneven lengths."""
    cache, angles = [torch.randn(6, 8, 2, 16) for _ in range(2)], torch.rand(40, 4) * 6
    table, before = torch.tensor([[4, 0], [2, 5]], dtype=torch.int32), cu(3, 6)
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 16)
    turned = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": True, "return_softmax_lse": True}
    ours, theirs = [t.clone() for t in cache], [t.clone() for t in cache]
    out, lse, *parts = flash_attn_3.flash_attn_with_kvcache(q, *ours, k, v, cache_seqlens=before, page_table=table, **turned)
    want, want_lse = flash_attn.flash_attn_with_kvcache(q, *theirs, k, v, cache_seqlens=before, block_table=table, **turned)
    assert [t.numel() for t in parts] == [0, 0]
    torch.testing.assert_close((out, lse, *ours), (want, want_lse, *theirs), rtol=0, atol=0)
    rows, bounds = [0, 1, 2, 5], cu(0, 3, 4)  # all three tokens of one sequence, one of the other
    packed = [torch.cat([t[0], t[1, :1]]) for t in (q, k, v)]
    ours = [t.clone() for t in cache]
    got, got_lse, *_ = flash_attn_3.flash_attn_with_kvcache(
        packed[0], *ours, *packed[1:], cache_seqlens=before, page_table=table, cu_seqlens_q=bounds, cu_seqlens_k_new=bounds,
        max_seqlen_q=3, **turned,
    )  # fmt: skip
    torch.testing.assert_close(got[:3], want[0], rtol=1e-5, atol=1e-5)
    alone, alone_lse = flash_attn.flash_attn_with_kvcache(
        q[1:, :1], *(t.clone() for t in cache), k[1:, :1], v[1:, :1], cache_seqlens=6, block_table=table[1:], **turned
    )
    torch.testing.assert_close(got[3:], alone[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_lse[:, 3:], alone_lse[0], rtol=1e-5, atol=1e-5)
    assert len(rows) == got.shape[0]


def test_rotary_seqlens_are_positions_of_their_own():
    cache, angles = [torch.randn(1, 8, 1, 8) for _ in range(2)], torch.rand(40, 4) * 6
    q, k, v = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "cache_seqlens": 3, "rotary_interleaved": False}
    one, other = [t.clone() for t in cache], [t.clone() for t in cache]
    out = flash_attn_3.flash_attn_with_kvcache(q, *one, k, v, **tables, rotary_seqlens=cu(17))
    shifted = {**tables, "rotary_cos": angles.cos()[14:], "rotary_sin": angles.sin()[14:]}
    torch.testing.assert_close(out, flash_attn_3.flash_attn_with_kvcache(q, *other, k, v, **shifted))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("packed", [False, True])
def test_partial_results_are_combined(packed):
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 9, 4, 8), torch.randn(2, 9, 4, 8)
    want, want_lse = rowmax.attention(q, k, v, return_lse=True)
    parts = [rowmax.attention(q, k[:, cut], v[:, cut], return_lse=True) for cut in (slice(0, 4), slice(4, 9), slice(9, 9))]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    if packed:
        outs, lses, want, want_lse = outs[:, 0], lses[:, 0], want[0], want_lse[0]
    target = torch.empty_like(want)
    out, lse = flash_attn_3.flash_attn_combine(outs, lses, target)
    assert out is target
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse.transpose(-1, -2))
    assert flash_attn_3.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_the_private_functions_are_both_passes():
    """Of dense and of packed tensors, and over a cache; into the caller's memory."""
    q, k, v, dout = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 5, 4, 8)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    want, want_lse = rowmax.attention(*leaves, window=(2, 1), softcap=3.0, return_lse=True)
    wanted = torch.autograd.grad(want, leaves, dout)
    target = torch.empty_like(q)
    sides = {"window_size_left": 2, "window_size_right": 1, "softcap": 3.0}
    out, lse, *parts = interface._flash_attn_forward(q, k, v, out_=target, **sides)
    assert out is target
    assert [t.numel() for t in parts] == [0, 0]
    torch.testing.assert_close((out, lse), (want.detach(), want_lse.detach()))
    grads = [torch.full_like(t, math.nan) for t in (q, k, v)]
    delta = interface._flash_attn_backward(dout, q, k, v, out, lse, dq=grads[0], dk=grads[1], dv=grads[2], **sides)
    torch.testing.assert_close(tuple(grads), wanted)
    torch.testing.assert_close(delta, (dout * out).sum(-1).transpose(1, 2))
    bounds = {"cu_seqlens_q": cu(0, 5, 10), "cu_seqlens_k": cu(0, 7, 14), "max_seqlen_q": 5, "max_seqlen_k": 7}
    packed, *_ = interface._flash_attn_forward(*(t.flatten(0, 1) for t in (q, k, v)), **bounds, **sides)
    torch.testing.assert_close(packed, out.flatten(0, 1))
    cached, *_ = interface._flash_attn_forward(q, k, v, seqused_k=cu(7, 4), causal=True)
    torch.testing.assert_close(cached[0], rowmax.attention(q[:1], k[:1], v[:1], causal=True)[0])
    torch.testing.assert_close(cached[1], rowmax.attention(q[1:], k[1:, :4], v[1:, :4], causal=True)[0])


def test_hints_change_nothing_and_metadata_is_not_needed():
    q, lengths = torch.randn(2, 1, 4, 16), cu(5, 9)
    cache = torch.randn(2, 9, 2, 16)
    metadata = flash_attn_3.get_scheduler_metadata(2, 1, 9, 4, 2, 16, lengths, num_splits=4)
    want = flash_attn_3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths)
    for hints in ({"scheduler_metadata": metadata}, {"pack_gqa": True, "sm_margin": 8}, {"num_splits": 3}):
        torch.testing.assert_close(flash_attn_3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, **hints), want)
    assert torch.equal(
        flash_attn_3.flash_attn_func(q, q, q, num_splits=2, pack_gqa=False, sm_margin=3), flash_attn_3.flash_attn_func(q, q, q)
    )


def test_what_is_not_there_says_so():
    q = torch.randn(1, 4, 2, 16)
    for options, error, words in (
        ({"attention_chunk": 4}, Unsupported, "attention_chunk=4"),
        ({"q_descale": torch.ones(1, 2)}, ProblemError, "q_descale belongs to"),
        ({"num_splits": -1}, ProblemError, "num_splits"),
        ({"window_size": (-2, 0)}, ProblemError, "window_size must be a pair"),
        ({"qv": torch.randn(1, 4, 2, 8)}, ProblemError, "qv must have"),
    ):
        with pytest.raises(error, match=words):
            flash_attn_3.flash_attn_func(q, q, q, **options)
    eight = q.to(torch.float8_e4m3fn)
    with pytest.raises(Unsupported, match="does not multiply in 8 bits"):
        flash_attn_3.flash_attn_func(eight, eight, eight)
    with pytest.raises(Unsupported, match="qv over a cache"):
        flash_attn_3.flash_attn_with_kvcache(q, q, q, qv=q)
    with pytest.raises(ProblemError, match="do not fit in a cache of 4"):
        flash_attn_3.flash_attn_with_kvcache(q, q, q, q, q, cache_seqlens=1)
    with pytest.raises(ProblemError, match="one of them is missing"):
        flash_attn_3.flash_attn_with_kvcache(
            q[0], q, q, q[0], cache_seqlens=1, cu_seqlens_q=cu(0, 4), cu_seqlens_k_new=cu(0, 4)
        )
    with pytest.raises(ProblemError, match="num_heads_q=None"):
        flash_attn_3.flash_attn_qkvpacked_func(q)
    with pytest.raises(ProblemError, match="out_partial must be"):
        flash_attn_3.flash_attn_combine(q, q)


def test_install_serves_code_that_imports_flash_attn_interface():
    code = """
import sys, rowmax.flash_attn_3
rowmax.flash_attn_3.install(); rowmax.flash_attn_3.install()
import torch
from flash_attn_interface import _flash_attn_backward, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn_3.flash_attn_interface import flash_attn_func as again
q = torch.randn(1, 5, 2, 8)
assert flash_attn_func is again is rowmax.flash_attn_3.flash_attn_func
assert flash_attn_func(q, q, q).shape == q.shape
rowmax.flash_attn_3.uninstall()
assert "flash_attn_interface" not in sys.modules and "flash_attn_3" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
