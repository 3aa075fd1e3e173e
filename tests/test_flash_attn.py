"""`rowmax.flash_attn`: a seeded sample of that library's test grid (`flash_grid.py`), its signatures, and what is refused."""

import inspect
import json
import math
import subprocess
import sys

import pytest
import torch

import flash_grid
import gpu_grid
import rowmax
from rowmax import ProblemError, Unsupported, flash_attn, reference
from rowmax.flash_attn import bert_padding, interface
from rowmax.flash_attn.layers.rotary import apply_rotary_emb

SAMPLES, A_TEST = 300, 25


@pytest.mark.parametrize("first", range(0, SAMPLES, A_TEST))
def test_a_sample_of_the_grid(first):
    """Outputs always hold the criterion; gradients that do not are right by the rule, and rare."""
    held = 0
    for number in range(first, first + A_TEST):
        case = flash_grid.draw(number, small=True)
        outcome = flash_grid.check(case, "cpu")
        assert not outcome.error, f"{case}: {outcome.error}"
        assert outcome.ratios["out"] <= 1.0, f"{case}: {outcome.ratios}"
        held += outcome.held
    assert held >= A_TEST - 5


def test_the_grid_has_its_whole_range():
    """Of the 300 cases here: every type, head size, form, option and kind of length."""
    cases = [flash_grid.draw(number, small=True) for number in range(SAMPLES)]
    assert {case.dim for case in cases} == set(flash_grid.DIMS)
    assert {case.form for case in cases} == {*flash_grid.FORMS, *flash_grid.CACHES}
    assert {case.dtype for case in cases} == {"fp16", "bf16"}
    lengths = {length for case in cases for length in case.lengths}
    assert min(lengths) == 1
    assert max(lengths) == flash_grid.LONGEST
    uneven = [case for case in cases if case.lengths[0] != case.lengths[1]]
    assert any(q > k for q, k in (case.lengths for case in uneven))
    assert any(q < k for q, k in (case.lengths for case in uneven))
    for bent in (lambda c: c.causal, lambda c: c.window != (-1, -1), lambda c: c.softcap, lambda c: c.alibi == "batch"):
        for some in (flash_grid.FORMS, flash_grid.CACHES):
            assert any(bent(case) for case in cases if case.form in some)
    assert any(case.deterministic and case.heads[0] > case.heads[1] for case in cases)
    assert any(case.dropout and "varlen" in case.form for case in cases)
    caches = [case for case in cases if case.form in flash_grid.CACHES]
    assert {(bool(case.new), bool(case.pairs), case.interleaved) for case in caches if case.pairs} == {
        (True, True, False),
        (True, True, True),
    }


def test_the_script_for_gpus_runs_the_grid(tmp_path, monkeypatch, capsys):
    found = tmp_path / "grid.json"
    monkeypatch.setattr(sys, "argv", ["gpu_grid.py", "--device", "cpu", "--count", "9", "--workers", "1", "--json", str(found)])
    assert gpu_grid.main() == 0
    assert "9 of 9 cases" in capsys.readouterr().out
    document = json.loads(found.read_text())
    assert sum(form["cases"] for form in document["forms"].values()) == 9
    assert document["wrong"] == []


# ---- names and signatures ------------------------------------------------------------------------------------------

TAIL = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False "
    "return_attn_probs=False"
)
LONG = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q k v {TAIL}",
    "flash_attn_kvpacked_func": f"q kv {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv {TAIL}",
    "flash_attn_varlen_func": f"q k v {LONG} {TAIL} block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q kv {LONG} {TAIL}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {TAIL}",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
    "_flash_attn_forward": "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes "
    "return_softmax",
    "_flash_attn_varlen_forward": f"q k v {LONG} dropout_p softmax_scale causal window_size_left=-1 window_size_right=-1 "
    "softcap=0.0 alibi_slopes=None return_softmax=False block_table=None leftpad_k=None seqused_k=None zero_tensors=False "
    "num_splits=0",
    "_flash_attn_backward": "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size_left "
    "window_size_right softcap alibi_slopes deterministic rng_state=None",
    "_flash_attn_varlen_backward": f"dout q k v out softmax_lse dq dk dv {LONG} dropout_p softmax_scale causal "
    "window_size_left window_size_right softcap alibi_slopes deterministic rng_state=None zero_tensors=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_their_order_and_defaults(name):
    words = []
    for parameter in inspect.signature(getattr(interface, name)).parameters.values():
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default}".replace(" ", "")
        words.append(parameter.name + default)
    assert words == SIGNATURES[name].split()


def test_install_serves_code_that_imports_flash_attn():
    code = """
import sys, rowmax.flash_attn
rowmax.flash_attn.install(); rowmax.flash_attn.install()
import torch
import flash_attn, flash_attn.flash_attn_interface
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import _flash_attn_forward, flash_attn_varlen_func
from flash_attn.layers.rotary import apply_rotary_emb
q = torch.randn(1, 5, 2, 8)
assert torch.equal(flash_attn.flash_attn_func(q, q, q), rowmax.flash_attn.flash_attn_func(q, q, q))
assert flash_attn.flash_attn_interface.flash_attn_func is flash_attn_func
print(flash_attn.__version__)
rowmax.flash_attn.uninstall()
assert "flash_attn" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2.8.4"


# ---- the private functions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bent", [False, True])
def test_a_ring_over_keys_by_the_private_functions(bent):
    """Forwards over shards of the keys, merged; then backwards of each shard with the merged output and LSE."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, n, h, 32) for n, h in ((24, 4), (36, 2), (36, 2), (24, 4)))
    extra = {"softcap": 4.0 if bent else 0.0, "alibi_slopes": None}
    parts = []
    for start in (0, 12, 24):
        shard = (k[:, start : start + 12], v[:, start : start + 12])
        out, lse, _, _ = interface._flash_attn_forward(q, *shard, 0.0, None, False, -1, -1, *extra.values(), False)
        parts.append((out, lse))
    out, lse = rowmax.merge(*zip(*parts, strict=True))
    grads = [torch.zeros_like(t) for t in (q, k, v)]
    for start in (0, 12, 24):
        cut = slice(start, start + 12)
        dq, dk, dv = torch.full_like(q, math.nan), *(torch.full_like(k[:, cut], math.nan) for _ in range(2))
        tail = (dq, dk, dv, 0.0, None, False, -1, -1, *extra.values(), True)
        delta = interface._flash_attn_backward(dout, q, k[:, cut], v[:, cut], out, lse, *tail)
        grads[0] += dq
        grads[1][:, cut], grads[2][:, cut] = dk, dv
        torch.testing.assert_close(delta, (dout * out).sum(-1).transpose(1, 2))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(reference.attention(*leaves, softcap=extra["softcap"])[0], leaves, dout)
    for grad, other in zip(grads, want, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-5)


def test_packed_private_functions_and_rows_that_see_nothing():
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 4, 9], [0, 0, 12]))
    numbers = (cu_q, cu_k, 5, 12, 0.0, None, True)
    out, lse, probs, rng = interface._flash_attn_varlen_forward(q, k, v, *numbers)
    assert probs.numel() == 0
    assert rng.shape == (2,)
    assert bool((out[:4] == 0).all())
    assert bool(torch.isposinf(lse[:, :4]).all()), "+inf, as in that library"
    dout, (dq, dk, dv) = torch.randn_like(q), (torch.full_like(t, math.nan) for t in (q, k, v))
    interface._flash_attn_varlen_backward(dout, q, k, v, out, lse, dq, dk, dv, *numbers, -1, -1, 0.0, None, False)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(reference.attention_varlen(*leaves, cu_q, cu_k, right=0)[0], leaves, dout)
    for grad, other in zip((dq, dk, dv), want, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pages", [False, True])
def test_keys_in_use_and_padding_on_the_left_of_a_packed_forward(pages):
    """`seqused_k` and `leftpad_k`: NaN in what does not count; lengths that leave the tensors are clamped."""
    torch.manual_seed(0)
    q, k, v = torch.randn(7, 4, 16), torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 3, 3, 7], [0, 8, 12, 20]))
    used, pad = torch.tensor([5, 4, 99], dtype=torch.int32), torch.tensor([2, 0, 3], dtype=torch.int32)
    spans = ((2, 5), (8, 12), (15, 20))
    hidden = torch.ones(20, dtype=torch.bool)
    for begin, end in spans:
        hidden[begin:end] = False
    k[hidden], v[hidden] = math.nan, math.nan
    given, table = (k, v), None
    if pages:
        given = [t.view(5, 4, 2, 16) for t in (k, v)]
        table, used = torch.tensor([[0, 1], [2, 77], [3, 4]], dtype=torch.int32), torch.tensor([5, 4, 8], dtype=torch.int32)
    out, lse, *_ = interface._flash_attn_varlen_forward(
        q, *given, cu_q, cu_k, 4, 8, 0.0, None, True, seqused_k=used, leftpad_k=pad, block_table=table
    )
    live = [torch.cat([t[begin:end] for begin, end in spans]) for t in (k, v)]
    want, want_lse = reference.attention_varlen(q, *live, cu_q, torch.tensor([0, 3, 7, 12]), right=0)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, torch.where(torch.isneginf(want_lse), math.inf, want_lse))


# ---- dropout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_dropout_is_what_its_mask_says(packed):
    """S_dmask is the weights, negative where dropped: it makes the output, and through the private functions the gradients."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 7, heads, 16, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    cu = torch.tensor([0, 3, 14], dtype=torch.int32) if packed else None
    q, k, v = (t.flatten(0, 1) if packed else t for t in (q, k, v))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    lengths, numbers = ((cu, cu, 11, 11) if packed else ()), (0.4, None, True)
    function = flash_attn.flash_attn_varlen_func if packed else flash_attn.flash_attn_func
    torch.manual_seed(5)
    out, lse, mask = function(*leaves, *lengths, *numbers, return_attn_probs=True)
    assert mask.shape == (2, 4, *((11, 11) if packed else (7, 7)))
    assert bool((mask < 0).any())
    kept = mask.clamp(min=0.0) * reference.dropout_factor(0.4)
    for b in range(2):
        rows = slice(*cu[b : b + 2].tolist()) if packed else b
        n = 7 if not packed else int(cu[b + 1] - cu[b])
        want = torch.einsum("hij,jhd->ihd", kept[b, :, :n, :n], v[rows].repeat_interleave(2, 1))
        torch.testing.assert_close(out[rows], want)
        torch.testing.assert_close(mask[b].abs().sum(-1)[:, :n], torch.ones(4, n, dtype=mask.dtype))
    d_out = torch.randn(out.shape, dtype=out.dtype, generator=generator)
    wanted = torch.autograd.grad(out, leaves, d_out)
    forward = interface._flash_attn_varlen_forward if packed else interface._flash_attn_forward
    backward = interface._flash_attn_varlen_backward if packed else interface._flash_attn_backward
    torch.manual_seed(5)
    sides = (-1, -1, 0.0, None)
    again, lse, same, rng = forward(*leaves, *lengths, *numbers, *sides, True)
    assert torch.equal(again, out)
    assert torch.equal(same, mask)
    grads = [torch.full_like(t, math.nan) for t in leaves]
    backward(d_out, *leaves, again, lse, *grads, *lengths, *numbers, *sides, False, rng)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(ProblemError, match="needs the rng_state"):
        backward(d_out, *leaves, again, lse, *grads, *lengths, *numbers, *sides, False)


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_what_is_not_there_says_so():
    q = torch.randn(1, 4, 2, 16)
    cu, table = torch.tensor([0, 4], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(Unsupported, match=r"no dropout over pages; got dropout_p=0\.1"):
        flash_attn.flash_attn_varlen_func(q[0], q, q, cu, cu, 4, 4, 0.1, block_table=table)
    with pytest.raises(ProblemError, match="window_size must be a pair"):
        flash_attn.flash_attn_func(q, q, q, window_size=(-2, 0))
    with pytest.raises(ProblemError, match="dropout_p"):
        flash_attn.flash_attn_func(q, q, q, 1.5)


def test_a_softcap_of_0_or_less_and_windows_beyond_the_keys_are_none():
    q, k = torch.randn(1, 4, 2, 16), torch.randn(1, 9, 2, 16)
    want = rowmax.attention(q, k, k)
    for given in ({"softcap": -1.0}, {"window_size": (9, 20)}, {"window_size": (-1, 9)}):
        assert torch.equal(flash_attn.flash_attn_func(q, k, k, **given), want)
    torch.testing.assert_close(
        flash_attn.flash_attn_func(q, k, k, window_size=(2, -1)), rowmax.attention(q, k, k, window=(2, None))
    )


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"alibi_slopes": torch.rand(2, 4)}])
def test_pages_of_a_varlen_call_are_the_packed_keys(options):
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, 16), torch.randn(17, 2, 16), torch.randn(17, 2, 16)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 2, 5], [0, 10, 17]))
    pages = [torch.full((6, 4, 2, 16), math.nan) for _ in range(2)]
    table = torch.tensor([[5, 0, 3], [1, 4, 99]], dtype=torch.int32)
    for b, (begin, end) in enumerate(((0, 10), (10, 17))):
        for i in range(end - begin):
            for page, source in zip(pages, (k, v), strict=True):
                page[table[b, i // 4], i % 4] = source[begin + i]
    options = {"causal": True, "return_attn_probs": True, **options}
    want = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 10, **options)
    got = flash_attn.flash_attn_varlen_func(q, *pages, cu_q, cu_k, 3, 10, block_table=table, **options)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


# ---- padding and rotation ------------------------------------------------------------------------------------------


def test_unpad_and_pad_are_inverses_and_differentiable():
    x = torch.randn(3, 5, 2, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    unused = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    tokens, indices, cu, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert (cu.tolist(), longest, used.tolist(), cu.dtype) == ([0, 4, 4, 9], 5, [3, 0, 5], torch.int32)
    assert torch.equal(tokens, x.flatten(0, 1)[indices])
    back = bert_padding.pad_input(tokens, indices, 3, 5)
    assert torch.equal(back, x * (mask + unused).unsqueeze(-1))
    back.sum().backward()
    assert torch.equal(x.grad, (mask + unused).unsqueeze(-1).expand_as(x).float())


def test_unpad_of_rows_that_hold_several_sequences():
    x = torch.arange(18.0).view(3, 6, 1)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    tokens, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu.tolist() == [0, 2, 5, 8, 10, 16]
    assert longest == 6
    assert indices.tolist() == tokens.flatten().tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_that_of_complex_numbers(interleaved):
    torch.manual_seed(0)
    x, angles = torch.randn(2, 5, 3, 12), torch.rand(20, 4) * 6
    offsets = torch.tensor([0, 7])
    got = apply_rotary_emb(x, angles.cos(), angles.sin(), interleaved, seqlen_offsets=offsets)
    for b in range(2):
        for t in range(5):
            turn = torch.polar(torch.ones(4), angles[t + int(offsets[b])])
            pairs = x[b, t, :, :8].unflatten(-1, (4, 2)) if interleaved else torch.stack(x[b, t, :, :8].chunk(2, -1), -1)
            turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
            want = turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), -1)
            torch.testing.assert_close(got[b, t, :, :8], want)
    assert torch.equal(got[..., 8:], x[..., 8:])
    cu = torch.tensor([0, 5, 10], dtype=torch.int32)
    packed = apply_rotary_emb(x.flatten(0, 1), angles.cos(), angles.sin(), interleaved, True, offsets, cu, 5)
    torch.testing.assert_close(packed, got.flatten(0, 1))
    assert torch.equal(packed, x.flatten(0, 1)), "in place"
