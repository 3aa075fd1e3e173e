"""What only a GPU can show, as plain functions: `test_gpu.py` runs them under pytest, `run_gpu.py` without.

Each raises an AssertionError that says what is wrong.
"""

import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

import rowmax
from rowmax import Device, Problem, merge, ops, reference, testing
from rowmax.problem import Operands

sys.path.insert(0, str(Path(__file__).parent / "kernels"))
import canaries

import gpu_faults
import gpu_masks
import gpu_second
import gpu_serving
import gpu_torch

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def differentiate(problem, operands, grad_out, grad_lse):
    """`(out, lse, dq, dk, dv)`."""
    leaves = [t.detach().requires_grad_() for t in operands[:3]]
    out, lse = testing.attend(problem, operands._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
    return (out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse)))


def identical(one, other, message):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), one, other, strict=True):
        assert torch.equal(a.nan_to_num(nan=7.25), b.nan_to_num(nan=7.25)), f"{message}: {name} differs"


def prepared(text, **options):
    problem = Problem.parse(text)
    operands = testing.operands(problem, device="cuda", **options)
    return problem, operands, testing.cotangents(problem, device="cuda")


@check
def repeats_are_bitwise_equal():
    """Fifty runs, forward and backward, while another stream keeps the memory busy: a race would show."""
    noise, other = torch.empty(2**26, device="cuda"), torch.cuda.Stream()
    for text in (
        "b4 h16/4 q1024 k1024 d64 bf16 causal deterministic",
        "b8 h8 q6000 k6000 d128 bf16 packed causal deterministic",
        "b3 h32/8 q2000 k2000 d128 bf16 causal deterministic",
        "b2 h8 q700 k900 d64 fp16 deterministic",
        "b2 h8/4 q900 k1000 d64 bf16 causal softcap=20.0 deterministic",
        "b2 h8/2 q1000 k900 d256 bf16 causal deterministic",
        "b2 h4 q600 k700 d96 bf16 causal deterministic",
        "b2 h4 q600 k700 d192/128 bf16 deterministic",
    ):
        problem, operands, given = prepared(text)
        if torch.cuda.get_device_capability() == (9, 0) and problem.dim_qk <= 128:
            (tile, *_) = rowmax.plan(problem, Device.of(operands.q), direction="backward").tiles
            assert str(tile).endswith(" ordered"), f"'{text}' takes {tile}"
        first = differentiate(problem, operands, *given)
        for _ in range(50):
            with torch.cuda.stream(other):
                noise.add_(1.0)
            identical(differentiate(problem, operands, *given), first, f"a repeat of '{text}'")


@check
def without_determinism_only_the_order_of_sums_is_free():
    """The Hopper backward adds up dQ in any order; each dQ is right, and all else repeats bit by bit."""
    for text in (
        "b4 h16/4 q1024 k1024 d64 bf16 causal",
        "b8 h8 q6000 k6000 d128 bf16 packed causal",
        "b2 h8 q700 k900 d64 fp16",
    ):
        problem, operands, given = prepared(text)
        first = differentiate(problem, operands, *given)
        for turn in range(10):
            again = differentiate(problem, operands, *given)
            for name, i in (("out", 0), ("lse", 1), ("dk", 3), ("dv", 4)):
                assert torch.equal(again[i], first[i]), f"repeat {turn} of '{text}': {name} differs"
            if turn < 2:
                report = testing.check_backward(problem, operands, again[2:], *given, first[0])
                assert report.ok, str(report)


@check
def layouts_change_nothing():
    """Bit for bit, with NaN in every gap."""
    for text in ("b2 h4/2 q100 k100 d64 fp16 causal", "b3 h4/2 q100 k100 d80 bf16 packed causal"):
        for layout in ("heads_first", "gaps", "odd", "fused", "broadcast"):
            problem, operands, (grad_out, grad_lse) = prepared(text, layout=layout)
            plain = operands._replace(**{name: getattr(operands, name).contiguous() for name in "qkv"})
            placed = testing.memory.place_one(grad_out, layout)
            results = differentiate(problem, operands, placed, grad_lse)
            identical(results, differentiate(problem, plain, grad_out, grad_lse), f"'{text}' {layout}")


@check
def values_that_nobody_sees_have_no_effect():
    """NaN and infinities in keys outside every window and in queries that see nothing: the rule holds."""
    for text in ("b1 h2 q100 k300 d64 fp16 window(40,3)", "b2 h4/2 q300 k100 d64 bf16 causal"):
        problem, operands, given = prepared(text)
        seen = reference.visible(problem.len_q, problem.len_k, *problem.band, device="cuda")
        for value in (float("nan"), float("inf")):
            q, k, v = (t.clone() for t in operands[:3])
            q[:, ~seen.any(1)], k[:, ~seen.any(0)], v[:, ~seen.any(0)] = value, value, value
            out, lse, *grads = differentiate(problem, Operands(q, k, v), *given)
            report = testing.check_forward(problem, operands, out, lse)
            report = report.merged(testing.check_backward(problem, operands, grads, *given))
            assert report.ok, str(report)


@check
def errors_do_not_grow_with_the_number_of_keys():
    """In units of their own bound: at 32 thousand keys at most twice the errors at one thousand."""
    few = testing.check(Problem.parse("b1 h2 q64 k1024 d128 bf16"), device="cuda")
    many = testing.check(Problem.parse("b1 h2 q64 k32768 d128 bf16"), device="cuda")
    assert few.ok, str(few)
    assert many.ok, str(many)
    for name, ratio in many.ratios.items():
        assert ratio <= 2 * max(few.ratios[name], 0.1), f"{name}: {ratio} with 32,768 keys, {few.ratios[name]} with 1,024"


@check
def no_call_waits_for_the_device():
    """No public call reads device memory back: synchronisation is an error inside."""
    for text in (
        *("b2 h4/2 q100 k130 d64 bf16 causal", "b3 h4/2 q100 k100 d64 bf16 packed window(9,0)"),
        *("b3 h4/2 q1500 k1500 d64 bf16 packed causal", "b1 h2 q500 k500 d256 bf16"),
    ):
        problem, operands, given = prepared(text)
        differentiate(problem, operands, *given)  # builds kernels, which may wait
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out, lse, *_ = differentiate(problem, operands, *given)
            merge([out, out], [lse, lse])
        finally:
            torch.cuda.set_sync_debug_mode("default")


@check
def a_captured_graph_replays_with_new_data_and_new_lengths():
    """Lengths are read on the device: changing `cu_seqlens` in place changes what a replay computes, gradients too."""
    for tokens, dim in ((200, 64), (2000, 64), (2000, 256)):
        problem, operands, given = prepared(f"b4 h4/2 q{tokens} k{tokens} d{dim} bf16 packed causal")
        differentiate(problem, operands, *given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = differentiate(problem, operands, *given)
        for seed in (1, 2):
            fresh = testing.operands(problem, seed=seed, device="cuda")
            for target, source in zip(operands[:5], fresh[:5], strict=True):
                target.copy_(source)
            graph.replay()
            eager = differentiate(problem, fresh, *given)
            for name, i in (("out", 0), ("lse", 1), ("dk", 3), ("dv", 4)):
                assert torch.equal(captured[i], eager[i]), f"{name} of a replay differs from an eager call: '{problem}'"
            report = testing.check_backward(problem, fresh, captured[2:], *given, eager[0])
            assert report.ok, str(report)


@check
def two_streams_do_not_share_memory():
    """The same shapes with different data on two streams, interleaved 200 times."""
    problem, one, given = prepared("b2 h4 q500 k500 d64 bf16 causal deterministic")
    two = testing.operands(problem, seed=1, device="cuda")
    want = [differentiate(problem, operands, *given) for operands in (one, two)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for turn in range(200):
        with torch.cuda.stream(streams[turn % 2]):
            results.append(differentiate(problem, (one, two)[turn % 2], *given))
    torch.cuda.synchronize()
    for turn, result in enumerate(results):
        identical(result, want[turn % 2], f"turn {turn}")


@check
def lies_in_cu_seqlens_touch_nothing_outside():
    for name, values in canaries.HOSTILE.items():
        for side in ("queries", "keys", "both"):
            for text in ("b3 h2/1 q40 k40 d64 bf16 packed causal", "b3 h2/1 q40 k40 d64 bf16 packed window(3,2)"):
                problem = Problem.parse(text)
                operands = canaries.lying(testing.operands(problem, device="cuda"), values, side)
                out, lse, *_ = canaries.run_guarded(problem, operands, "q_outer")
                assert not bool(torch.isnan(out).any() | torch.isnan(lse).any()), f"{name}, {side}: memory outside was read"


@check
def sums_in_order_come_to_an_end_whatever_cu_seqlens_say():
    """Nobody waits for key tiles that no sequence has."""
    if torch.cuda.get_device_capability() != (9, 0):
        return
    for text in ("b3 h1 q40 k400 d64 bf16 packed deterministic", "b3 h2 q400 k400 d128 bf16 packed causal deterministic"):
        problem = Problem.parse(text)
        backward = rowmax.plan(problem, Device.named("H200"), direction="backward", prefer="hopper")
        for name, values in {**canaries.HOSTILE, "a key tile too few": [0, 35, 10, 40]}.items():
            values = [value if abs(value) > 1000 else 10 * value for value in values]
            for side in ("keys", "both"):
                operands = testing.operands(problem, device="cuda")
                out, lse = testing.attend(problem, operands)
                given = testing.cotangents(problem, device="cuda")
                lies = canaries.lying(operands, values, side)
                ops.kernels().backward(problem, lies, out, lse, *given, (True,) * 3, backward)
                torch.cuda.synchronize()
                assert str(backward.tiles[0]).endswith(" ordered"), f"{name}: {backward}"


@check
def neighbours_of_good_calls_are_left_alone():
    for text in (
        "b2 h4/2 q130 k257 d72 fp16 causal",
        "b1 h2 q257 k130 d64/96 bf16 window(60,2)",
        "b3 h2 q300 k290 d64 bf16 packed",
    ):
        for layout in ("contiguous", "gaps", "odd"):
            problem, operands, given = prepared(text, layout=layout)
            out, lse, *grads = canaries.run_guarded(problem, operands, "q_outer")
            report = testing.check_forward(problem, operands, out, lse)
            report = report.merged(testing.check_backward(problem, operands, grads, *given))
            assert report.ok, f"{layout}: {report}"


@check
def subsets_of_gradients_are_those_of_all():
    problem, operands, given = prepared("b2 h4/2 q100 k130 d64 bf16 causal")
    every = differentiate(problem, operands, *given)[2:]
    for needed in ((0,), (1,), (2,), (0, 1), (1, 2)):
        leaves = [t.detach().requires_grad_(i in needed) for i, t in enumerate(operands[:3])]
        results = testing.attend(problem, operands._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
        torch.autograd.backward(results, given)
        for i, leaf in enumerate(leaves):
            report = (
                None
                if i not in needed
                else testing.check_backward(problem, operands, [leaf.grad if j == i else None for j in range(3)], *given)
            )
            assert (leaf.grad is None) == (i not in needed), f"input {i} of {needed}"
            assert report is None or report.ok, str(report)
        assert 0 not in needed or torch.equal(leaves[0].grad, every[0]), f"dq differs when {needed} need gradients"


@check
def the_result_does_not_depend_on_the_length_hints():
    problem, operands, given = prepared("b4 h4/2 q300 k300 d64 bf16 packed causal")
    want = differentiate(problem, operands, *given)
    for hints in ((1, 1), (300, 300), (10_000, None)):
        other = problem.with_(max_len_q=hints[0], max_len_k=hints[1])
        report = testing.check_forward(other, operands, *differentiate(other, operands, *given)[:2])
        assert report.ok, str(report)
    assert testing.check_forward(problem, operands, *want[:2]).ok


@check
def kept_launches_give_what_new_ones_give():
    """Calls of the operator, and those without gradients that go past it; other data, layouts and streams, bit for bit."""
    for text, layouts in (
        ("b2 h4/2 q100 k130 d64 bf16 causal", ("contiguous", "heads_first", "odd", "broadcast")),
        ("b1 h2 q600 k600 d128 fp16", ("contiguous", "gaps")),
        ("b3 h4/2 q100 k100 d80 bf16 packed causal", ("contiguous", "fused")),
    ):
        for layout in layouts:
            for seed in range(3):
                problem, operands, _ = prepared(text, layout=layout, seed=seed)
                left, right = problem.band
                numbers = (problem.max_len_q, problem.max_len_k, None, left, right, False, "")
                described, _, plan = ops.plan_forward(*operands[:5], *numbers)
                want = ops.kernels().Forward(described, plan, True)(*operands)
                results = [torch.ops.rowmax.forward(True, *operands[:5], *numbers)]
                with torch.cuda.stream(torch.cuda.Stream()):
                    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                    results.append(testing.attend(problem, operands))
                torch.cuda.synchronize()
                for got in results:
                    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), f"'{text}' {layout} seed {seed}"


@check
def one_cu_seqlens_and_two_take_launches_of_their_own():
    """One tensor for queries and keys, and two of other lengths and the same form, in either order: a Hopper forward leaves out
    masks for the one. Behind the last sequence lies NaN. A prepared call follows lengths that change in place."""
    lengths = [(n, n) for n in (1, 0, 64, 300, 257)]
    for dim in (64, 128, 256):
        problem, two, _ = prepared(f"b5 h4/2 q700 k700 d{dim} bf16 packed causal", lengths=lengths)
        two.k[622:], two.v[622:] = float("nan"), float("nan")
        one = two._replace(cu_seqlens_k=two.cu_seqlens_q)
        two = two._replace(cu_seqlens_k=two.cu_seqlens_k.new_tensor([0, 100, 130, 150, 400, 622]))
        for order in ((one, two, one, two), (two, one, two, one)):
            ops.forget()
            for operands in order:
                with testing.poisoned():
                    out, lse = testing.attend(problem, operands)
                report = testing.check_forward(problem, operands, out, lse)
                assert report.ok, f"{problem}, {'one' if operands is one else 'two'} cu_seqlens: {report}"
        q, k, v, cu = one[:4]
        attend = rowmax.prepare(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, return_lse=True)
        for ends in ([0, 1, 1, 65, 365, 622], [0, 200, 201, 201, 500, 610], [0, 0, 0, 0, 0, 0]):
            cu.copy_(cu.new_tensor(ends))
            for _ in range(2):
                out, lse = attend()
                report = testing.check_forward(problem, one, out, lse)
                assert report.ok, f"{problem}, prepared, {ends}: {report}"


def forward_plans():
    """The plan's own, and those of the Hopper forward where it runs, with each way of handing out tiles."""
    hopper = [f"hopper[128x64 s2 q1 {schedule}]" for schedule in ("static", "dynamic")]
    return ["", *(hopper if torch.cuda.get_device_capability() == (9, 0) else [])]


@check
def rowmax_prepare_gives_what_attention_gives():
    """Bit for bit: also after the tensors were overwritten in place, on another stream, and when a graph replays it."""
    for plan in forward_plans():
        texts = ("b2 h4/2 q300 k330 d64 bf16 causal", "b3 h4/2 q300 k300 d128 fp16 packed causal")
        bent = ("b2 h4/2 q300 k330 d128 bf16 causal softcap=20.0 alibi sink", "b2 h4/2 q300 k330 d64 fp32 causal alibi sink")
        for text in (*texts, *(() if plan else bent)):
            problem, operands, _ = prepared(text)
            q, k, v, cu_q, cu_k, slopes, sink = operands[:7]
            options = {"causal": True, "return_lse": True, "plan": plan or None, "softcap": problem.softcap}
            options |= {"alibi_slopes": slopes, "sink": sink}
            attend = rowmax.prepare(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
            graph = torch.cuda.CUDAGraph()
            for seed in range(1, 6):
                for target, source in zip(operands, testing.operands(problem, seed=seed, device="cuda"), strict=True):
                    if target is not None:
                        target.copy_(source)
                torch.cuda.synchronize()
                with torch.cuda.stream(torch.cuda.Stream() if seed == 2 else torch.cuda.default_stream()):
                    results = attend()
                torch.cuda.synchronize()
                for a, b in zip(results, testing.attend(problem, operands, plan=plan), strict=True):
                    assert torch.equal(a, b), f"'{text}' plan '{plan}': call {seed} differs"
            with torch.cuda.graph(graph):
                attend()
            q.mul_(-1)
            graph.replay()
            for a, b in zip(results, testing.attend(problem, operands, plan=plan), strict=True):
                assert torch.equal(a, b), f"'{text}' plan '{plan}': a replay differs"


@check
def calls_in_a_row_share_a_counter_and_flags_without_harm():
    """Of the Hopper forward: many calls of different sizes in a row, on streams and threads side by side, beside graphs that
    are replayed, and after calls with a NaN, whose flags must be gone."""
    texts = ("b2 h4 q300 k330 d64 bf16 causal", "b1 h8/2 q1100 k1100 d64 bf16", "b3 h4 q500 k500 d64 bf16 packed causal")
    for plan in forward_plans():
        cases = [prepared(text, seed=seed)[:2] for text in texts for seed in (0, 1)]
        broken = prepared(texts[0], kind="nan(v)")[:2]
        want = [testing.attend(*case, plan=plan) for case in cases]
        graph = torch.cuda.CUDAGraph()
        testing.attend(*cases[0], plan=plan)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = testing.attend(*cases[0], plan=plan)

        def go(number, plan=plan, cases=cases, broken=broken, want=want):
            with torch.cuda.stream(torch.cuda.default_stream() if number % 2 else torch.cuda.Stream()):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                results = []
                for turn in range(30):
                    if turn % 7 == number:
                        testing.attend(*broken, plan=plan)
                    results.append(testing.attend(*cases[turn % len(cases)], plan=plan))
                torch.cuda.current_stream().synchronize()
            return all(
                torch.equal(a, b) for turn, got in enumerate(results) for a, b in zip(got, want[turn % len(cases)], strict=True)
            )

        torch.cuda.synchronize()
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(go, number) for number in range(4)]
            for _ in range(20):
                graph.replay()
            assert all(future.result() for future in waiting), f"plan '{plan}': a result differs"
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, want[0], strict=True)), f"plan '{plan}': a replay differs"
        for case in (broken, cases[0]):
            report = testing.check_forward(*case, *testing.attend(*case, plan=plan))
            assert report.ok, f"plan '{plan}': {report}"


@check
def fp32_means_fp32():
    """IEEE products, also where matmuls of the rest of the program may use TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        problem, operands, given = prepared("b1 h1 q128 k128 d32 fp32 causal")
        out, lse, *grads = differentiate(problem, operands, *given)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    report = testing.check_forward(problem, operands, out, lse)
    report = report.merged(testing.check_backward(problem, operands, grads, *given))
    assert report.ok, str(report)


@check
def memory_does_not_grow_over_calls():
    """A hundred calls of ever new lengths: what is allocated afterwards is what was before."""

    def call(length):
        problem, operands, given = prepared(f"b2 h4/2 q{length} k{length} d64 bf16 causal")
        differentiate(problem, operands, *given)

    for length in range(64, 74):
        call(length)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for length in range(64, 164):
        call(length)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before, f"{torch.cuda.memory_allocated() - before} bytes were kept"


CHECKS |= gpu_serving.CHECKS | gpu_faults.CHECKS | gpu_masks.CHECKS | gpu_second.CHECKS | gpu_torch.CHECKS


def run_one(name: str) -> tuple[str, str, float]:
    """`(name, what is wrong, or nothing, seconds)` of a check."""
    start, error = time.perf_counter(), ""
    try:
        CHECKS[name]()
        torch.cuda.synchronize()
    except Exception:
        error = traceback.format_exc(limit=6)
    return name, error, time.perf_counter() - start


def run_all(words: tuple[str, ...] = (), workers: int = 8) -> Iterator[tuple[str, str, float]]:
    """`run_one` of every check whose name has one of the words, as they end, `workers` at once.

    Each has a process of its own: its kernels are built beside others', and what it does to the GPU's state ends with it.
    """
    chosen = [name for name in CHECKS if not words or any(word in name for word in words)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        jobs = {pool.submit(run_one, name): name for name in chosen}
        for job in as_completed(jobs):
            try:
                yield job.result()
            except BrokenProcessPool as broken:  # a process died, and the pool with it
                yield jobs[job], f"its process, or another, died: {broken}", 0.0
