"""Masks, biases and dropout on a GPU beside the CPU, as checks of `gpu_checks.py`."""

import itertools

import torch

import rowmax
from rowmax import Problem, reference, testing

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


@check
def dropout_keeps_the_same_weights_on_a_gpu():
    """Equal scores and values that are unit vectors: the output shows which weights are kept; dense, and by sequence packed.

    With 300 queries by the portable kernel, with 500 on Hopper by its own, which compares draws as fp16: 0.003 is less than
    its normal numbers, 0.97 more than it takes.
    """
    k, v = torch.zeros(2, 256, 2, 64, dtype=torch.bfloat16, device="cuda"), torch.eye(256, dtype=torch.bfloat16, device="cuda")
    v = v[None, :, None].expand(2, -1, 2, -1).contiguous()
    for rows, p, seed in itertools.product((300, 500), (0.3, 0.003, 0.96, 0.97), (7, -(2**40) - 3)):
        q = torch.zeros(2, rows, 4, 64, dtype=torch.bfloat16, device="cuda")
        want = reference.dropout(seed, p, range(2), 4, rows, 256)
        out = rowmax.attention(q, k, v, dropout_p=p, seed=seed)
        assert torch.equal(out.transpose(1, 2).cpu() > 0, want), f"dense, {rows} queries, {p}, {seed}"
        cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32, device="cuda") for n in (rows, 256))
        flat = (t.flatten(0, 1) for t in (q, k, v))
        out = rowmax.attention_varlen(*flat, cu_q, cu_k, dropout_p=p, seed=seed)
        assert torch.equal(out.unflatten(0, (2, rows)).transpose(1, 2).cpu() > 0, want), f"packed, {rows} queries, {p}, {seed}"


@check
def a_captured_graph_takes_a_new_seed():
    """The seed is a tensor: written in place between replays, it changes what is dropped, forward and backward."""
    q, k, v = (torch.randn(2, 200, 4, 64, dtype=torch.bfloat16, device="cuda").requires_grad_() for _ in range(3))
    seed, grad = torch.tensor([1], device="cuda"), torch.randn(2, 200, 4, 64, dtype=torch.bfloat16, device="cuda")

    def step(seed):
        out = rowmax.attention(q, k, v, causal=True, dropout_p=0.2, seed=seed)
        return (out, *torch.autograd.grad(out, (q, k, v), grad))

    step(seed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(seed)
    for value in (1, 5):
        seed.fill_(value)
        graph.replay()
        for one, other in zip(results, step(value), strict=True):
            assert torch.equal(one, other), f"seed {value}"


@check
def gradients_of_biases_and_behind_dropout_repeat_bitwise():
    """Ten runs; a bias's gradient is summed over what it is broadcast in, in a fixed order."""
    for letters in ("bhqk", "qk", "bk", "hq", "1"):
        problem = Problem.parse(f"b4 h8/2 q500 k600 d128 bf16 causal bias({letters}) mask(bqk) dropout=0.1")
        operands = testing.operands(problem, device="cuda")
        given = testing.cotangents(problem, device="cuda")

        def run(problem=problem, operands=operands, given=given):
            leaves = [t.detach().clone().requires_grad_() for t in (*operands[:3], operands.bias)]
            tensors = operands._replace(**dict(zip(("q", "k", "v", "bias"), leaves, strict=True)))
            results = testing.attend(problem, tensors)
            return (*(t.detach() for t in results), *torch.autograd.grad(results, leaves, given))

        first = run()
        for _ in range(10):
            for one, other in zip(first, run(), strict=True):
                assert torch.equal(one.nan_to_num(nan=7.25), other.nan_to_num(nan=7.25)), f"bias({letters})"


@check
def hopper_takes_biases_and_masks():
    """An odd number of keys in rows with gaps, other tensors in the same launch, broadcasts by stride 0; ten runs are equal."""
    if torch.cuda.get_device_capability() != (9, 0):
        return

    def with_gaps(t):
        rows = t.new_ones((*t.shape[:3], -(-t.shape[3] // 16) * 16))[..., : t.shape[3]]
        return rows.copy_(t)

    for words in ("causal bias(bhqk)", "bias(hqk,fp32)", "mask(bhqk)", "causal bias(bk)", "window(99,20) mask(qk)"):
        problem = Problem.parse(f"b2 h8/2 q701 k1001 d128 bf16 {words}")
        for seed in range(3):
            operands = testing.operands(problem, seed=seed, device="cuda")
            name = "bias" if problem.bias else "mask"
            given = with_gaps(getattr(operands, name))
            for pairs in (given, given[:1, :1].expand(given.shape)):
                operands = operands._replace(**{name: pairs})
                out, lse = testing.attend(problem, operands, plan="hopper")
                report = testing.check_forward(problem, operands, out, lse)
                assert report.ok, f"{words}, {list(pairs.stride())}: {report}"
        for _ in range(10):
            for one, other in zip((out, lse), testing.attend(problem, operands, plan="hopper"), strict=True):
                assert torch.equal(one, other), words


@check
def the_lowest_bias_is_a_number_in_the_hopper_forward():
    """Rows of nothing else are ties of what -inf does not hide, and the LSE is that of the portable kernel, by bits."""
    if torch.cuda.get_device_capability() != (9, 0):
        return
    for words in ("causal bias(hqk)", "bias(bqk,fp32)", "bias(bk)"):
        problem = Problem.parse(f"b2 h4/2 q500 k512 d128 bf16 {words}")
        operands = testing.operands(problem, device="cuda")
        operands.bias.fill_(torch.finfo(operands.bias.dtype).min)[..., ::3] = -torch.inf
        (out, lse), (want, want_lse) = (testing.attend(problem, operands, plan=name) for name in ("hopper", "q_outer"))
        assert torch.equal(lse, want_lse), words
        torch.testing.assert_close(out, want, rtol=2**-7, atol=2**-8)
        operands.bias.fill_(-torch.inf)
        out, lse = testing.attend(problem, operands, plan="hopper")
        assert not bool(out.any()), words
        assert bool((lse == -torch.inf).all()), words


@check
def a_prepared_call_reads_what_its_bias_holds():
    """Written in place, a bias or mask counts in the next call, and in a replayed graph."""
    for words in ("bias(hqk)", "mask(bqk)"):
        problem = Problem.parse(f"b2 h8/2 q512 k512 d128 bf16 causal {words}")
        operands = testing.operands(problem, device="cuda")
        name = "bias" if problem.bias else "mask"
        pairs = getattr(operands, name).contiguous()
        operands = operands._replace(**{name: pairs})

        def step(operands=operands, name=name):
            return rowmax.attention(*operands[:3], causal=True, **{name: getattr(operands, name)})

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for seed in (1, 2):
            pairs.copy_(getattr(testing.operands(problem, seed=seed), name))
            graph.replay()
            assert torch.equal(out, step()), words
            report = testing.check_forward(problem, operands, out, None)
            assert report.ok, f"{words}: {report}"


@check
def padding_by_lengths_on_a_gpu():
    """Both sides, against one row of the batch after the other; and what is hostile is clamped."""
    q, k, v = (torch.randn(3, 333, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2))
    ends, begins = torch.tensor([333, 100, 0], device="cuda"), torch.tensor([40, 0, 0], device="cuda")
    out, lse = rowmax.attention(q, k, v, causal=True, seqlens_k=ends, leftpad_k=begins, return_lse=True)
    for b, (begin, end) in enumerate(((40, 333), (0, 100), (0, 0))):
        want, want_lse = reference.attention(
            *(t.double() for t in (q[b : b + 1], k[b : b + 1, begin:end], v[b : b + 1, begin:end])), right=0
        )
        torch.testing.assert_close(out[b].double(), want[0], rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(lse[b].double(), want_lse[0], rtol=1e-4, atol=1e-3)
    hostile = torch.tensor([2**31 - 1, -5, 400], device="cuda", dtype=torch.int32)
    assert bool(torch.isfinite(rowmax.attention(q, k, v, seqlens_k=hostile, leftpad_k=hostile)).all())


@check
def prefixes_of_sequences_change_in_a_captured_graph():
    """A number for each sequence, forward and backward, read by the kernels alone: another one counts when it is replayed."""
    whole = Problem.parse("b3 h8/2 q700 k800 d128 bf16 causal")
    operands, (d_out, d_lse) = testing.operands(whole, device="cuda"), testing.cotangents(whole, device="cuda")
    leaves = [t.detach().clone().requires_grad_() for t in operands[:3]]
    prefix = torch.tensor([100, 0, 300], device="cuda")

    def step():
        results = rowmax.attention(*leaves, causal=True, prefix=prefix, return_lse=True)
        return (*(t.detach() for t in results), *torch.autograd.grad(results, leaves, (d_out, d_lse)))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, *grads = step()
    for values in ((100, 0, 300), (0, 799, 2000)):
        prefix.copy_(torch.tensor(values))
        graph.replay()
        for b, value in enumerate(values):
            one = Problem.parse(f"b1 h8/2 q700 k800 d128 bf16 causal prefix={value}")
            own = operands._replace(**{name: getattr(operands, name)[b : b + 1] for name in ("q", "k", "v")})
            report = testing.check_forward(one, own, out[b : b + 1], lse[b : b + 1])
            assert report.ok, str(report)
            report = testing.check_backward(one, own, [t[b : b + 1] for t in grads], d_out[b : b + 1], d_lse[b : b + 1])
            assert report.ok, str(report)


@check
def what_is_hidden_by_chunks_and_beside_sinks_is_not_computed():
    """16k tokens, the same kernels: of a causal mask's pairs 1/16 and 1/8 remain, and less than half of its time, whatever else
    the GPU does meanwhile. Sink tokens: the forward alone, as in the backward one program walks over all queries of their keys,
    and takes longer than all others do (0.73 of the causal time)."""
    q, k, v = (torch.randn(1, 16384, heads, 128, dtype=torch.bfloat16, device="cuda").requires_grad_() for heads in (16, 4, 4))

    def milliseconds(backward, **options):
        times = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            out = rowmax.attention(q, k, v, plan="q_outer", **options)
            if backward:
                torch.autograd.grad(out, (q, k, v), out.detach())
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return min(times[1:])

    for backward, options in ((True, {"causal": True, "chunk": 1024}), (False, {"window": (1023, 0), "sink_tokens": 4})):
        causal, found = milliseconds(backward, causal=True), milliseconds(backward, **options)
        assert found <= causal / 2, f"{options}: {found:.2f} ms, causal {causal:.2f} ms"


@check
def pages_have_sink_tokens_on_a_gpu():
    """One new token of each sequence, whose length changes in a captured graph; against dense attention of its own keys."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(*shape, 128, generator=generator, device="cuda").bfloat16() for shape in ((3, 8), *((96, 16, 2),) * 2)
    )
    table = torch.randperm(96, generator=generator, device="cuda").view(3, 32).int()
    lengths = torch.tensor([512, 300, 40], dtype=torch.int32, device="cuda")

    def step():
        return rowmax.attention_paged(q, k, v, table, lengths, window=(99, 0), sink_tokens=20, return_lse=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for values in ((512, 300, 40), (105, 0, 511)):
        lengths.copy_(torch.tensor(values))
        graph.replay()
        for b, n in enumerate(values):
            if n:
                own = (t[table[b].long()].flatten(0, 1)[None, :n] for t in (k, v))
                operands = testing.operands(Problem.parse(f"b1 h8/2 q1 k{n} d128 bf16"), device="cuda")
                operands = operands._replace(**dict(zip("qkv", (q[b : b + 1, None], *own), strict=True)))
                problem = Problem.parse(f"b1 h8/2 q1 k{n} d128 bf16 window(99,0) sink_tokens=20")
                report = testing.check_forward(problem, operands, out[b : b + 1, None], lse[b : b + 1, :, None])
                assert report.ok, str(report)
        assert not out[1].any() or values[1]
