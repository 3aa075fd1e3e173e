"""`rowmax.flash_attn`: a seeded sample of that library's test grid under its criterion, its signatures, and what is refused.

The criterion: the largest error at most twice that of the same computation in the inputs' own type, for gradients three times,
both against fp64. It misses faults, and rejects right gradients where the other computation is exact by luck, as of few visible
keys: what it rejects must pass the rule of `rowmax.testing`, and must be rare.
"""

import inspect
import math
import random
import subprocess
import sys

import pytest
import torch

import rowmax
from rowmax import Problem, ProblemError, Unsupported, flash_attn, reference, testing
from rowmax.flash_attn import bert_padding, interface
from rowmax.flash_attn.layers.rotary import apply_rotary_emb
from rowmax.problem import Operands

DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
LENGTHS = (
    (113, 203),
    (128, 217),
    (108, 256),
    (256, 512),
    (1, 147),
    (64, 128),
    (97, 97),
    (200, 200),
    (3, 799),
    (127, 512),
    (339, 128),
)
SAMPLES, A_TEST = 300, 25


def draw(seed: int) -> dict:
    rnd = random.Random(seed)
    lengths = rnd.choice(LENGTHS) if rnd.random() < 0.93 else rnd.choice(((512, 256), (799, 1024), (1, 2048)))
    heads_k = rnd.choice((1, 2, 3))
    return {
        "dtype": rnd.choice((torch.float16, torch.bfloat16)),
        "dim": rnd.choice(DIMS if max(lengths) < 500 else DIMS[:4]),
        "lengths": lengths,
        "heads": (heads_k * rnd.choice((1, 2)), heads_k),
        "batch": rnd.choice((1, 2)),
        "causal": rnd.random() < 0.5,
        "local": rnd.random() < 0.3,
        "alibi": rnd.choice(("", "", "head", "batch")),
        "softcap": rnd.choice((0.0, 0.0, 15.0, 50.0)),
        "deterministic": rnd.random() < 0.5,
        "form": rnd.choice(("func", "kvpacked", "qkvpacked", "varlen", "varlen_kvpacked", "varlen_qkvpacked")),
        "seed": seed,
    }


def attend(case: dict, q, k, v, slopes):
    """`(out, lse, lengths of each sequence)` by the public function that the case names; q, k, v are dense."""
    rnd, form = random.Random(case["seed"] + 1), case["form"]
    tail = {"causal": case["causal"], "window_size": case["window"], "softcap": case["softcap"], "alibi_slopes": slopes}
    tail |= {"deterministic": case["deterministic"], "return_attn_probs": True}
    batch, len_q, len_k = q.shape[0], q.shape[1], k.shape[1]
    if "varlen" not in form:
        if form == "func":
            out, lse, probs = flash_attn.flash_attn_func(q, k, v, **tail)
        elif form == "kvpacked":
            out, lse, probs = flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **tail)
        else:
            out, lse, probs = flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **tail)
        assert probs.numel() == 0
        return out, lse, [(len_q, len_k)] * batch
    own = [(rnd.randint(0, len_q), rnd.randint(0, len_k)) for _ in range(batch)]
    if form.endswith("qkvpacked"):
        own = [(a, a) for a, _ in own]
    cu = [torch.tensor([0, *torch.tensor(column).cumsum(0).tolist()], dtype=torch.int32) for column in zip(*own, strict=True)]
    packed = [torch.cat([t[b, : own[b][which]] for b in range(batch)]) for t, which in ((q, 0), (k, 1), (v, 1))]
    if form == "varlen":
        found = flash_attn.flash_attn_varlen_func(*packed, *cu, len_q, len_k, **tail)
    elif form == "varlen_kvpacked":
        found = flash_attn.flash_attn_varlen_kvpacked_func(packed[0], torch.stack(packed[1:], 1), *cu, len_q, len_k, **tail)
    else:
        found = flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack(packed, 1), cu[0], len_q, **tail)
    return found[0], found[1], own


def definition(case, q, k, v, slopes, own, packed: bool):
    left, right = (None if side < 0 else side for side in case["window"])
    outs, lses = [], []
    for b, (len_q, len_k) in enumerate(own):
        bent = None if slopes is None else (slopes if slopes.dim() == 1 else slopes[b]).to(q.dtype)
        given = {"left": left, "right": 0 if case["causal"] else right, "softcap": case["softcap"], "slopes": bent}
        out, lse = reference.attention(q[b : b + 1, :len_q], k[b : b + 1, :len_k], v[b : b + 1, :len_k], **given)
        outs, lses = [*outs, out[0]], [*lses, lse[0]]
    if packed:
        return torch.cat(outs), torch.cat(lses, 1)
    return torch.stack(outs), torch.stack(lses)


def check(case: dict) -> bool:
    """Does the criterion hold? If not, the stricter rule does."""
    (len_q, len_k), (heads_q, heads_k), dim = case["lengths"], case["heads"], case["dim"]
    if case["form"].endswith("qkvpacked"):
        len_k, heads_k = len_q, heads_q
    generator = torch.Generator().manual_seed(case["seed"])
    case["window"] = (-1, -1)
    if case["local"]:
        case["window"] = tuple(int(x) for x in torch.randint(0, len_k, (2,), generator=generator))
    shapes = ((case["batch"], len_q, heads_q, dim), *((case["batch"], len_k, heads_k, dim),) * 2)
    leaves = [torch.randn(shape, generator=generator).to(case["dtype"]).requires_grad_() for shape in shapes]
    slopes = None
    if case["alibi"]:
        shape = (heads_q,) if case["alibi"] == "head" else (case["batch"], heads_q)
        slopes = torch.rand(shape, generator=generator) * 0.3
    out, lse, own = attend(case, *leaves, slopes)
    grad = torch.randn(out.shape, generator=generator).to(out.dtype)
    results = [(out, *torch.autograd.grad(out, leaves, grad))]
    for dtype in (torch.float64, case["dtype"]):
        inputs = [t.detach().to(dtype).requires_grad_() for t in leaves]
        want, want_lse = definition(case, *inputs, slopes, own, "varlen" in case["form"])
        grads = torch.autograd.grad(want, inputs, grad.to(dtype), materialize_grads=True, allow_unused=True)
        results.append((want, *grads))
        if dtype == torch.float64:
            expected = torch.where(torch.isneginf(want_lse), math.inf, want_lse)
            torch.testing.assert_close(lse.double(), expected.detach(), rtol=1e-5, atol=1e-3)
    for name, factor, mine, exact, same in zip(("out", "dq", "dk", "dv"), (2, 3, 3, 3), *results, strict=True):
        error, allowed = (float((x.double() - exact).abs().max()) if x.numel() else 0.0 for x in (mine, same))
        if error > factor * allowed + 1e-5:
            assert name != "out", f"{error:.3g} > {factor} x {allowed:.3g}: {case}"
            report = by_the_rule(case, leaves, slopes, own, results[0][1:], grad)
            assert report.ok, f"{name}: {error:.3g} > {factor} x {allowed:.3g}: {case}: {report}"
            return False
    return True


def by_the_rule(case, leaves, slopes, own, grads, grad) -> testing.Report:
    def pack(dense):
        return [torch.cat([t.detach()[b, : n[i]] for b, n in enumerate(own)]) for t, i in zip(dense, (0, 1, 1), strict=True)]

    cu = (torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in zip(*own, strict=True))
    operands = Operands(*pack(leaves), *cu, slopes)
    left, right = (None if side < 0 else side for side in case["window"])
    problem = Problem.describe(operands, left=left, right=0 if case["causal"] else right, softcap=case["softcap"])
    return testing.check_backward(problem, operands, pack(grads), grad if grad.dim() == 3 else grad.flatten(0, 1))


@pytest.mark.parametrize("first", range(0, SAMPLES, A_TEST))
def test_a_sample_of_the_grid(first):
    held = sum(check(draw(seed)) for seed in range(first, first + A_TEST))
    assert held >= A_TEST - 3


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


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_what_is_not_there_says_so():
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(Unsupported, match=r"dropout_p=0\.1"):
        flash_attn.flash_attn_func(q, q, q, 0.1)
    with pytest.raises(ProblemError, match="window_size must be a pair"):
        flash_attn.flash_attn_func(q, q, q, window_size=(-2, 0))
    with pytest.raises(ProblemError, match="dropout_p"):
        flash_attn.flash_attn_func(q, q, q, 1.5)
    pages, table, cu = torch.randn(2, 4, 2, 16), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(Unsupported, match="softcap over pages"):
        flash_attn.flash_attn_varlen_func(q[0], pages, pages, cu, cu, 4, 4, softcap=2.0, block_table=table)


def test_a_softcap_of_0_or_less_and_windows_beyond_the_keys_are_none():
    q, k = torch.randn(1, 4, 2, 16), torch.randn(1, 9, 2, 16)
    want = rowmax.attention(q, k, k)
    for given in ({"softcap": -1.0}, {"window_size": (9, 20)}, {"window_size": (-1, 9)}):
        assert torch.equal(flash_attn.flash_attn_func(q, k, k, **given), want)
    torch.testing.assert_close(
        flash_attn.flash_attn_func(q, k, k, window_size=(2, -1)), rowmax.attention(q, k, k, window=(2, None))
    )


def test_pages_of_a_varlen_call_are_the_packed_keys():
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, 16), torch.randn(17, 2, 16), torch.randn(17, 2, 16)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 2, 5], [0, 10, 17]))
    pages = [torch.full((6, 4, 2, 16), math.nan) for _ in range(2)]
    table = torch.tensor([[5, 0, 3], [1, 4, 99]], dtype=torch.int32)
    for b, (begin, end) in enumerate(((0, 10), (10, 17))):
        for i in range(end - begin):
            for page, source in zip(pages, (k, v), strict=True):
                page[table[b, i // 4], i % 4] = source[begin + i]
    want = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 10, causal=True, return_attn_probs=True)
    got = flash_attn.flash_attn_varlen_func(
        q, *pages, cu_q, cu_k, 3, 10, causal=True, return_attn_probs=True, block_table=table
    )
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
