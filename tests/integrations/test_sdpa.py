"""`rowmax.sdpa` beside torch's own function, and torch's operators of flash attention served by rowmax."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import rowmax
from rowmax import ProblemError

SHAPES = {
    "square": ((2, 4, 9, 16), (2, 4, 9, 16), 16),
    "more keys": ((2, 4, 5, 16), (2, 4, 12, 16), 8),
    "fewer keys": ((2, 4, 12, 16), (2, 4, 5, 16), 16),
    "heads alone": ((3, 9, 16), (3, 11, 16), 16),
    "one head": ((9, 16), (11, 16), 16),
    "five dimensions": ((2, 3, 4, 9, 16), (2, 3, 4, 9, 16), 16),
    "a batch of one key": ((3, 4, 9, 16), (1, 4, 9, 16), 16),
    "one query": ((2, 4, 1, 16), (2, 4, 12, 16), 16),
}


def inputs(shape_q, shape_k, dim_v):
    generator = torch.Generator().manual_seed(0)
    shapes = (shape_q, shape_k, (*shape_k[:-1], dim_v))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "scale": 0.3}], ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_it_is_what_torch_computes(shapes, options):
    """B72: causal masks begin at the top left, as there."""
    leaves = inputs(*shapes)
    results = []
    for attend in (rowmax.sdpa, F.scaled_dot_product_attention):
        out = attend(*leaves, **options)
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    for one, other in zip(*results, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_grouped_heads_and_strides():
    q, k, v = inputs((2, 4, 9, 16), (2, 2, 9, 16), 16)
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(rowmax.sdpa(q, k, v, enable_gqa=True), want, rtol=1e-10, atol=1e-12)
    turned = q.transpose(-1, -2).contiguous().transpose(-1, -2)  # stride 9 in the last dimension
    torch.testing.assert_close(rowmax.sdpa(turned, k, v, enable_gqa=True), want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("bias", "causal_of"), [(causal_lower_right, "right"), (causal_upper_left, "left")])
def test_causal_biases_of_torch(bias, causal_of):
    q, k, v = inputs((2, 4, 5, 16), (2, 4, 12, 16), 16)
    shift = 12 - 5 if causal_of == "right" else 0
    seen = torch.ones(5, 12, dtype=torch.bool).tril(shift)
    want = F.scaled_dot_product_attention(q, k, v, seen)
    torch.testing.assert_close(rowmax.sdpa(q, k, v, bias(5, 12)), want, rtol=1e-10, atol=1e-12)


MASKS = {
    "a matrix": (SHAPES["more keys"], (5, 12)),
    "a row of keys": (SHAPES["more keys"], (1, 12)),
    "padding": (SHAPES["more keys"], (2, 1, 1, 12)),
    "every head": (SHAPES["fewer keys"], (4, 12, 5)),
    "everything": (SHAPES["square"], (2, 4, 9, 9)),
    "heads alone": (SHAPES["heads alone"], (3, 9, 11)),
    "one head": (SHAPES["one head"], (9, 11)),
    "five dimensions": (SHAPES["five dimensions"], (2, 1, 4, 9, 16)),
    "five dimensions, one size": (SHAPES["five dimensions"], (1, 1, 1, 9, 16)),
    "a batch of one key": (SHAPES["a batch of one key"], (3, 1, 9, 9)),
}


@pytest.mark.parametrize("boolean", [True, False], ids=["bool", "float"])
@pytest.mark.parametrize(("shapes", "shape"), MASKS.values(), ids=MASKS)
def test_masks_are_what_torch_takes(shapes, shape, boolean):
    """Both kinds, with a row that sees nothing in the boolean one; a float one has its gradient."""
    (shape_q, shape_k, dim_v), generator = shapes, torch.Generator().manual_seed(1)
    leaves = inputs(shape_q, (*shape_k[:-2], shape[-1], shape_k[-1]), dim_v)
    mask = torch.randn(shape, generator=generator, dtype=torch.float64)
    if boolean:
        mask = mask > -0.5
        mask[(..., 0, slice(None)) if shape[-2] > 1 else (..., 0)] = False
    else:
        leaves.append(mask.requires_grad_())
    results = []
    for attend in (rowmax.sdpa, F.scaled_dot_product_attention):
        out = attend(*leaves[:3], mask)
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    for one, other in zip(*results, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_dropout_is_on_average_what_it_drops_from():
    torch.manual_seed(0)
    q, k, v = (t.detach() for t in inputs((1, 2, 9, 16), (1, 2, 9, 16), 16))
    many = torch.stack([rowmax.sdpa(q, k, v, dropout_p=0.3, is_causal=True) for _ in range(400)])
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert bool(((many.mean(0) - want).abs() < 5 * many.std(0) / 20).all())
    assert float(many.std(0).max()) > 0


def test_what_is_refused():
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ProblemError, match="not both"):
        rowmax.sdpa(q, q, q, torch.ones(5, 5, dtype=torch.bool), is_causal=True)
    with pytest.raises(ProblemError, match=r"must broadcast to \[1, 2, 5, 5\]"):
        rowmax.sdpa(q, q, q, torch.ones(5, 4, dtype=torch.bool))
    with pytest.raises(ProblemError, match=r"dropout_p must be at least 0 and below 1; got 1\.5"):
        rowmax.sdpa(q, q, q, dropout_p=1.5)
    with pytest.raises(ProblemError, match="enable_gqa=True"):
        rowmax.sdpa(torch.randn(1, 4, 5, 8), q, q)
    with pytest.raises(ProblemError, match="one rank"):
        rowmax.sdpa(q[0], q, q)


def test_operators_of_torch_are_served_and_given_back():
    """On the CPU, where torch has none of its own: dense with gradients, and packed as `varlen_attn` calls it."""
    code = """
import rowmax
import torch
from rowmax import reference
from rowmax.integrations import sdpa

def served():
    try:
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)
    except NotImplementedError:
        return False
    return True

q, k, v = (torch.randn(2, 4, 9, 16, requires_grad=True) for _ in range(3))
assert not served()
override = sdpa.Override("CPU")
out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
grads = torch.autograd.grad(out.sin().sum(), (q, k, v))
want, want_lse = reference.attention(*(t.transpose(1, 2) for t in (q, k, v)), right=0)
torch.testing.assert_close(out, want.transpose(1, 2))
torch.testing.assert_close(lse, want_lse)
for one, other in zip(grads, torch.autograd.grad(want.sin().sum(), (q, k, v))):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
dropped = []
for attend in (lambda *x: torch.ops.aten._scaled_dot_product_flash_attention(*x, 0.3, True)[0],
               lambda *x: rowmax.sdpa(*x, None, 0.3, True)):
    torch.manual_seed(1)
    out = attend(q, k, v)
    dropped.append((out, *torch.autograd.grad(out.sin().sum(), (q, k, v))))
for one, other in zip(*dropped):
    torch.testing.assert_close(one, other)
cu = torch.tensor([0, 7, 18], dtype=torch.int32)
flat = [t.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for t in (q, k, v)]
call = (cu, cu, 11, 11, 0.0, False, False)
out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(*flat, *call, window_size_left=4, window_size_right=0)
want, want_lse = reference.attention_varlen(*flat, cu, cu, left=4, right=0)
torch.testing.assert_close(out, want)
torch.testing.assert_close(lse, want_lse)
grad = torch.randn_like(want)
found = torch.ops.aten._flash_attention_backward(
    grad, *flat, out, lse, cu, cu, 11, 11, 0.0, False, rng, unused, window_size_left=4, window_size_right=0
)
for one, other in zip(found, torch.autograd.grad(want, flat, grad)):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
override.remove()
assert not served()
registry = torch.nn.attention
sdpa.activate()
assert registry.current_flash_attention_impl() == "rowmax"
sdpa.restore()
assert registry.current_flash_attention_impl() is None
print("served")
"""
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        pytest.skip("this torch has no registry of flash attention")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "served"
