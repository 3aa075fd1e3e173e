"""Faults of `docs/faults.md` that only large tensors show, as checks of `gpu_checks.py`. Up to 25 GB of GPU memory each."""

import torch

import rowmax
from rowmax import Problem, reference, testing
from rowmax.problem import Operands

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


@check
def caches_whose_offsets_pass_32_bits():
    """B42, B48: pages 2^30 elements apart, so that page 2 begins at 2^31 and page 4 at 2^32; appended to, and read."""
    size, heads, dim, apart = 16, 2, 64, 2**30
    caches = []
    for _ in range(2):
        memory = torch.full((4 * apart + size * heads * dim,), torch.nan, dtype=torch.bfloat16, device="cuda")
        caches.append(memory.as_strided((5, size, heads, dim), (apart, heads * dim, dim, 1)))
    table = torch.tensor([[4, 2], [3, 1]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([27, 20], dtype=torch.int32, device="cuda")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 27, n, dim, generator=generator).bfloat16().cuda() for n in (4, heads, heads))
    cu = torch.tensor([0, 27, 47], dtype=torch.int32, device="cuda")
    packed = [torch.cat([t[0], t[1, :20]]) for t in (k, v)]
    rowmax.append_kv(*caches, *packed, table, lengths, cu_seqlens=cu)
    for cache, source in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[4], source[0, :16]), "page 4"
        assert torch.equal(cache[2, :11], source[0, 16:]), "page 2"
        assert torch.equal(cache[1, :4], source[1, 16:20]), "page 1"
        assert bool(torch.isnan(cache[0]).all()), "page 0 belongs to nobody"
    out = rowmax.attention_paged(q[:, -1], *caches, table, lengths, causal=True)
    for b, length in enumerate(lengths.tolist()):
        want, _ = reference.attention(*(t.double() for t in (q[b : b + 1, -1:], k[b : b + 1, :length], v[b : b + 1, :length])))
        error = float((out[b].double() - want[0, 0]).abs().max())
        assert error < 2**-7 * float(v.abs().max()), f"sequence {b}: off by {error}"


@check
def a_bias_with_more_than_2_31_elements():
    """B51, B52: `[1, 1, 65600, 65600]`; the rows at the end, and the gradient of the bias there."""
    length, dim, rows = 65600, 32, 64
    generator = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (torch.randn(1, length, 1, dim, dtype=torch.bfloat16, device="cuda", generator=generator) for _ in range(3))
    bias = torch.randn(1, 1, length, length, dtype=torch.bfloat16, device="cuda", generator=generator).requires_grad_()
    out, lse = rowmax.attention(q, k, v, bias=bias, causal=True, return_lse=True)
    grad = torch.zeros_like(out)
    grad[:, -rows:] = torch.randn(1, rows, 1, dim, dtype=torch.bfloat16, device="cuda", generator=generator)
    (found,) = torch.autograd.grad(out, bias, grad)
    part = bias.detach()[..., -rows:, :].double().requires_grad_()
    seen = reference.visible(length, length, right=0, device="cuda", rows=torch.arange(length - rows, length, device="cuda"))
    want, want_lse = reference.attention(*(t.double() for t in (q[:, -rows:], k, v)), seen=seen, bias=part)
    (wanted,) = torch.autograd.grad(want, part, grad[:, -rows:].double())
    unit = 2.0**-8
    assert float((out[:, -rows:].double() - want).abs().max()) < 2 * unit * float(v.abs().max())
    assert float((lse[..., -rows:].double() - want_lse).abs().max()) < 1e-3
    error = float((found[..., -rows:, :].double() - wanted).abs().max())
    assert error < 4 * unit * float(wanted.abs().max()) + 1e-6, f"gradient of the bias: off by {error}"
    assert not bool(found[..., : length - rows, :].any()), "rows without a gradient"


@check
def a_batch_of_1600_images():
    """B40: 1600 sequences of 729 tokens, 16 heads of 72, forward and backward; the first, one in the middle and the last."""
    problem = Problem.parse("b1600 h16 q729 k729 d72 fp16")
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (1600, 729, 16, 72)
    q, k, v, grad = (torch.randn(shape, dtype=torch.float16, device="cuda", generator=generator) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = rowmax.attention(*leaves, return_lse=True)
    grads = torch.autograd.grad(out, leaves, grad)
    one = problem.with_(batch=1)
    for b in (0, 777, 1599):
        own = slice(b, b + 1)
        operands = Operands(*(t.detach()[own] for t in leaves))
        report = testing.check_forward(one, operands, out.detach()[own], lse.detach()[own])
        mine = [t[own] for t in grads]
        report = report.merged(testing.check_backward(one, operands, mine, grad[own], None, out.detach()[own]))
        assert report.ok, f"sequence {b}: {report}"


@check
def keys_stored_sequence_by_sequence():
    """B45: 24,000 keys of 64 sequences in `[T, B, H, D]` memory, so that a row's stride is that of all sequences together."""
    problem = Problem.parse("b64 h2/1 q130 k24000 d128 bf16 causal")
    generator = torch.Generator(device="cuda").manual_seed(0)

    def stored(length, heads):
        memory = torch.randn(length, 64, heads, 128, dtype=torch.bfloat16, device="cuda", generator=generator)
        return memory.transpose(0, 1)

    q, k, v, grad = stored(130, 2), stored(24000, 1), stored(24000, 1), stored(130, 2)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = rowmax.attention(*leaves, causal=True, return_lse=True)
    grads = torch.autograd.grad(out, leaves, grad)
    one = problem.with_(batch=1)
    for b in (0, 63):
        own = slice(b, b + 1)
        operands = Operands(*(t.detach()[own] for t in leaves))
        report = testing.check_forward(one, operands, out.detach()[own], lse.detach()[own])
        mine = [t[own] for t in grads]
        report = report.merged(testing.check_backward(one, operands, mine, grad[own], None, out.detach()[own]))
        assert report.ok, f"sequence {b}: {report}"
