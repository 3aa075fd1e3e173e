"""Padded batches by lengths: `seqlens_q`, `seqlens_k` and `leftpad_k` of `rowmax.attention`."""

import math

import pytest
import torch
import torch._dynamo.testing

import rowmax
from rowmax import ProblemError, Unsupported, reference

CALLS = {
    "keys behind": ({"seqlens_k": [12, 0, 5]}, {}),
    "keys before": ({"leftpad_k": [0, 3, 12]}, {"causal": True}),
    "both ends": ({"seqlens_k": [9, 12, 4], "leftpad_k": [2, 0, 4]}, {"window": (4, 1)}),
    "queries too": ({"seqlens_q": [7, 0, 3], "seqlens_k": [7, 12, 3]}, {"causal": True, "softcap": 2.0}),
    "slopes and a sink": ({"seqlens_k": [7, 12, 1], "leftpad_k": [1, 0, 1]}, {"causal": True, "slopes": True, "sink": True}),
}


def tensors(dtype=torch.float64, device="cpu", lengths=(9, 12)):
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, lengths[0], 4, 16), *((3, lengths[1], 2, 16),) * 2)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device) for shape in shapes]


def expected(q, k, v, lengths, causal=False, window=(None, None), slopes=None, sink=None, softcap=0.0):
    """One row of the batch after the other, from what counts of it alone."""
    out, lse = torch.zeros_like(q), q.new_full((3, 4, q.shape[1]), -math.inf)
    if sink is not None:
        lse = sink[:, None].expand_as(lse)
    outs, lses = [], []
    for b in range(3):
        rows = lengths.get("seqlens_q", [q.shape[1]] * 3)[b]
        keys = slice(lengths.get("leftpad_k", [0] * 3)[b], lengths.get("seqlens_k", [k.shape[1]] * 3)[b])
        own = None if slopes is None else slopes[b]
        right = 0 if causal else window[1]
        o, m = reference.attention(
            *(q[b : b + 1, :rows], k[b : b + 1, keys], v[b : b + 1, keys]),
            left=window[0], right=right, slopes=own, sink=sink, softcap=softcap,
        )  # fmt: skip
        outs.append(torch.cat([o, out[b : b + 1, rows:]], 1))
        lses.append(torch.cat([m, lse[b : b + 1, :, rows:]], 2))
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize(("lengths", "options"), CALLS.values(), ids=CALLS)
def test_padding_does_not_exist(lengths, options):
    """Outputs, LSE and gradients are those of what counts, and of the rest 0, though it be NaN."""
    q, k, v = tensors()
    generator = torch.Generator().manual_seed(1)
    given = dict(options)
    if given.pop("slopes", False):
        given["slopes"] = torch.rand(3, 4, generator=generator, dtype=torch.float64)
    if given.get("sink"):
        given["sink"] = torch.randn(4, generator=generator, dtype=torch.float64)
    results = []
    for pad in (0.0, math.nan):
        leaves = [q.clone(), k.clone(), v.clone()]
        for b in range(3):
            leaves[0][b, lengths.get("seqlens_q", [9] * 3)[b] :] = pad
            for t in leaves[1:]:
                t[b, lengths.get("seqlens_k", [12] * 3)[b] :] = pad
                t[b, : lengths.get("leftpad_k", [0] * 3)[b]] = pad
        leaves = [t.requires_grad_() for t in leaves]
        if pad == 0.0:
            out, lse = expected(*leaves, lengths, **given)
        else:
            call = {("alibi_slopes" if name == "slopes" else name): value for name, value in given.items()}
            call |= {name: torch.tensor(values, dtype=torch.int32) for name, values in lengths.items()}
            out, lse = rowmax.attention(*leaves, return_lse=True, **call)
            assert torch.equal(out, rowmax.attention(*leaves, **call))
            assert out.shape == (3, 9, 4, 16)
            assert lse.is_contiguous()
        loss = out.sin().sum() + torch.where(torch.isneginf(lse), 0.0, lse).cos().sum()
        results.append((out, lse, *torch.autograd.grad(loss, leaves)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_on_every_backend(backend, device):
    q, k, v = tensors(torch.float32, device, lengths=(20, 24))
    seqlens_k, leftpad_k = torch.tensor([24, 11, 0], device=device), torch.tensor([5, 0, 0], device=device)
    j = torch.arange(24, device=device)
    seen = (j >= leftpad_k[:, None]) & (j < seqlens_k[:, None])
    try:
        out = rowmax.attention(q, k, v, seqlens_k=seqlens_k, leftpad_k=leftpad_k, plan=backend)
    except Unsupported as refused:
        pytest.skip(str(refused))
    want, _ = reference.attention(q, k, v, seen=seen[:, None, None].expand(3, 4, 20, 24))
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_any_strides():
    """A cache `[B, H, T, D]`, seen as `[B, T, H, D]`, and a part of a longer one, which are copied."""
    q, k, v = tensors()
    lengths = torch.tensor([12, 4, 7])
    want = rowmax.attention(q, k, v, seqlens_k=lengths)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    v = torch.cat([v, v], 1)[:, :12]
    assert torch.equal(rowmax.attention(q, k, v, seqlens_k=lengths), want)


def test_compile_makes_one_graph_for_many_lengths():
    def step(q, k, v, seqlens):
        return rowmax.attention(q * 2, k, v, causal=True, seqlens_k=seqlens, seqlens_q=seqlens).sin().sum()

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    torch._dynamo.reset()
    for length in (5, 8, 13):
        inputs = [t.requires_grad_() for t in tensors(torch.float32, lengths=(length, length))]
        seqlens = torch.tensor([length, 1, length // 2])
        for one, other in zip(*(torch.autograd.grad(f(*inputs, seqlens), inputs) for f in (compiled, step)), strict=True):
            torch.testing.assert_close(one, other)
    assert counter.frame_count <= 2


WRONG = {
    r"seqlens_k must be an int32 or int64 tensor \[B\]": {"seqlens_k": [3, 4, 5]},
    "got torch.float32": {"leftpad_k": torch.zeros(3)},
    r"seqlens_q must have shape \[B\], here \[3\]; got \[4\]": {"seqlens_q": torch.zeros(4, dtype=torch.int32)},
    "seqlens_k is on meta": {"seqlens_k": torch.zeros(3, dtype=torch.int32, device="meta")},
    r"seqlens_k must be from 0 to 12 .*got \[13, 1, 2\]": {"seqlens_k": torch.tensor([13, 1, 2])},
    "leftpad_k must be from 0 to seqlens_k": {"leftpad_k": torch.tensor([3, 1, 2]), "seqlens_k": torch.tensor([2, 3, 4])},
    "without a bias or a mask": {"seqlens_k": torch.tensor([3, 1, 2]), "mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)},
}


@pytest.mark.parametrize(("words", "options"), WRONG.items(), ids=WRONG)
def test_a_wrong_call_says_what_is_wrong(words, options):
    with pytest.raises(ProblemError, match=words):
        rowmax.attention(*tensors(), **options)


def test_tensors_are_checked_as_dense_ones():
    q, k, v = tensors()
    with pytest.raises(ProblemError, match=r"q must have rank 4, layout \[B, T, H, D\]"):
        rowmax.attention(q[0], k, v, seqlens_k=torch.tensor([1, 2, 3]))
