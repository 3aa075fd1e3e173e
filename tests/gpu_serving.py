"""What only a GPU can show of calls over a paged cache and of decoding; `gpu_checks.py` has these checks in its list.

Each raises an AssertionError that says what is wrong.
"""

import random
import sys
from pathlib import Path

import torch

import rowmax
from rowmax import PagedProblem, Problem, testing
from rowmax.problem import Operands
from rowmax.testing import paged

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "kernels"))
import canaries

import gpu_invariance
import gpu_models
import paged_cases

CHECKS = {}
MIXED = [(1024, 8000), (1, 5000), (1024, 1024), (1, 1), (14, 700), (0, 9)]


def check(function):
    CHECKS[function.__name__] = function
    return function


SHARES = 8  # of the paged cases, so that processes side by side build their kernels


def _paged_cases(share: int):
    def check_share():
        """Under the plan's own tile, and with two and seven parts of each row tile."""
        wrong = []
        for case in paged_cases.CASES[share::SHARES]:
            for splits in {case.splits or None, None, 2, 7}:
                report = paged.check_paged(
                    *(case.problem, case.lengths, case.kind),
                    **{
                        "num_splits": splits,
                        "heads_first": case.heads_first,
                        "page_scales": case.page_scales,
                        "device": "cuda",
                    },
                )
                wrong += [] if report.ok else [f"splits {splits}: {report}"]
        assert not wrong, "\n".join(wrong)

    return check_share


CHECKS |= {f"paged_cases_are_right_{share + 1}_of_{SHARES}": _paged_cases(share) for share in range(SHARES)}


def zipf(batch: int, longest: int) -> list[int]:
    """Lengths of an uneven batch: the n-th longest has one n-th of the longest, at least 128, in random order."""
    lengths = [max(longest // (i + 1), 128) for i in range(batch)]
    random.Random(0).shuffle(lengths)
    return lengths


@check
def larger_paged_calls_are_right():
    for text, lengths in (
        ("b16 h32/8 q1 k8192 d128 bf16 causal paged16", [(1, 8192 - 97 * i) for i in range(16)]),
        ("b16 h32/8 q1 k8192 d128 bf16 causal paged64", [(1, 8192)] * 16),
        ("b1 h32/8 q1 k32768 d128 fp16 causal paged1", [(1, 32767)]),
        ("b64 h64/8 q1 k2048 d64 bf16 causal paged16", [(1, n) for n in zipf(64, 2048)]),
        ("b8 h16/2 q1 k4096 d256 bf16 causal paged128", [(1, 500 * i) for i in range(8)]),
        ("b8 h32/8 q5 k4096 d128 bf16 causal paged16", [(5, 4096 - 501 * i) for i in range(8)]),
        ("b8 h128/1 q1 k2048 d576/512 bf16 causal paged64", [(1, 2048 - 99 * i) for i in range(8)]),
        ("b4 h128/1 q4 k2048 d576/512 bf16 causal paged16", [(4, 2048 - 99 * i) for i in range(4)]),
        ("b6 h32/8 q2064 k8192 d128 bf16 causal packed paged16", MIXED),
        ("b6 h32/8 q2064 k8192 d128 bf16 window(512,0) packed paged16", MIXED),
        ("b2000 h8 q1 k64 d64 bf16 causal paged16", [(1, i % 64) for i in range(2000)]),
    ):
        report = paged.check_paged(PagedProblem.parse(text), lengths, device="cuda")
        assert report.ok, str(report)


@check
def multi_head_latent_attention_reads_its_memory_once():
    """Values that are the first columns of the keys, in the same memory."""
    for heads, queries in ((16, 2), (16, 1), (128, 1)):
        problem = PagedProblem.parse(f"b4 h{heads}/1 q{queries} k512 d576/512 bf16 causal paged64")
        lengths = [(queries, keys) for keys in (512, 300, 1, 65)]
        given, flat, packed = paged.paged_operands(problem, lengths, device="cuda")
        shared = given._replace(v_pages=given.k_pages[..., :512])
        for splits in (None, 1, 3):
            results = paged.as_packed(problem, *paged.attend_paged(problem, shared, num_splits=splits))
            report = testing.check_forward(flat, packed._replace(v=packed.k[..., :512]), *results)
            assert report.ok, str(report)


LATENT = (
    ("b1 h64/1 q1 k8192 d576/512 bf16 causal paged64", [(1, 8192)]),
    ("b40 h128/1 q1 k4096 d576/512 bf16 causal paged64", [(1, 4096 - 97 * i) for i in range(40)]),
    ("b6 h128/1 q1 k1024 d576/512 fp16 causal paged128", [(1, n) for n in (1000, 0, 65, 1, 640, 64)]),
    ("b2 h64/1 q3 k512 d576/512 fp16 causal paged64", [(3, 449), (3, 2)]),
    ("b2 h192/1 q5 k512 d576/512 bf16 paged64", [(5, 449), (5, 66)]),
    ("b4 h128/1 q9 k2048 d576/512 bf16 causal packed paged64", [(5, 2000), (0, 66), (1, 300), (2, 1)]),
)


@check
def latent_attention_has_a_hopper_kernel():
    """By the definition, and bitwise the same in a replay."""
    if rowmax.Device.of(torch.device("cuda")).capability != (9, 0):
        return
    for text, lengths in LATENT:
        problem = PagedProblem.parse(text)
        for tile in ("64x64 w4 s8 p132", "64x64 w4 s8 x1", "64x64 w4 s8 x3"):
            for kind in ("normal", "spiky", "nan(k)"):
                options = {"plan": f"latent[{tile}]", "device": "cuda", "shared": True}
                report = paged.check_paged(problem, lengths, kind, **options)
                assert report.ok, f"latent[{tile}]: {report}"
    problem = PagedProblem.parse("b64 h128/1 q1 k8192 d576/512 bf16 causal paged64")
    given, flat, packed = paged.paged_operands(problem, [(1, n) for n in zipf(64, 8192)], device="cuda", shared=True)
    results = paged.attend_paged(problem, given, "latent")
    report = testing.check_forward(flat, packed, *paged.as_packed(problem, *results))
    assert report.ok, str(report)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = paged.attend_paged(problem, given, "latent")
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(again, results, strict=True)), "a replay differs"


DECODING = (
    "b1 h32/8 q1 k8192 d128 bf16",
    "b16 h32/8 q1 k4096 d128 fp16",
    "b8 h32/8 q1 k1024 d128 bf16",
    "b4 h64/8 q1 k8191 d64 bf16",
    "b2 h16 q7 k3001 d128 bf16 causal",
    "b2 h16/4 q16 k3001 d80 bf16 causal",
    "b2 h16/4 q9 k1500 d256 fp16 window(700,0)",
    "b2 h8/2 q3 k1000 d64 fp32 causal",
    "b1 h32/8 q1 k8192 d128 bf16 softcap=50.0",
    "b4 h64/8 q1 k4000 d64 bf16 causal sink",
    "b2 h16/4 q3 k3001 d128 fp16 causal alibi",
)


def _dense_decoding(text: str):
    def check_problem():
        """Few queries and many keys of `rowmax.attention`, which the plan gives to the same kernels."""
        problem = Problem.parse(text)
        assert rowmax.plan(problem, rowmax.Device.of(torch.device("cuda"))).algorithm == "split_kv", text
        for layout in ("contiguous", "heads_first", "odd"):
            report = testing.check(problem, layout=layout, device="cuda")
            assert report.ok, str(report)

    return check_problem


CHECKS |= {f"dense_decoding_is_right_{i + 1}_of_{len(DECODING)}": _dense_decoding(text) for i, text in enumerate(DECODING)}


@check
def no_paged_call_waits_for_the_device():
    problem = PagedProblem.parse("b4 h8/2 q20 k512 d64 bf16 causal packed paged16")
    given = paged.paged_operands(problem, [(1, 500), (17, 100), (1, 9), (1, 0)], device="cuda")[0]
    paged.attend_paged(problem, given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        paged.attend_paged(problem, given)
        paged.attend_paged(problem, given, num_splits=3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@check
def one_graph_serves_every_length():
    """Captured once, replayed over 200 growing steps: bitwise what an eager call gives, also when pages are dealt anew."""
    problem = PagedProblem.parse("b4 h32/8 q1 k4096 d128 bf16 causal paged16")
    given = paged.paged_operands(problem, [(1, 4096)] * 4, device="cuda")[0]
    paged.attend_paged(problem, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = paged.attend_paged(problem, given)
    start = torch.tensor([0, 1, 2047, 3890], device="cuda", dtype=torch.int32)
    for step in range(200):
        given.seqlens_k.copy_(start + step)
        given.q.normal_()
        if step % 50 == 49:
            given.block_table.copy_(given.block_table.flip(0).clone())
        graph.replay()
        for one, other in zip(captured, paged.attend_paged(problem, given), strict=True):
            assert torch.equal(one, other), f"step {step}: a replay differs from an eager call"


@check
def one_launch_gives_the_bits_of_two():
    """Called and replayed in turn while lengths shrink: what counts the programs that have ended is 0 again after each call."""
    for text, lengths, tile in (
        ("b1 h32/8 q1 k8192 d128 bf16 causal paged16", [(1, 8000)], "16x64 w4 s3 x16"),
        ("b8 h32/8 q1 k4096 d128 bf16 causal paged64", [(1, n) for n in zipf(8, 4096)], "16x64 w4 s4 p264"),
        ("b3 h8/2 q49 k2048 d64 fp16 causal packed paged16", [(20, 2000), (1, 1500), (28, 99)], "16x64 w4 s3 x3"),
        ("b2 h8/2 q1 k4096 d128 bf16 causal paged16 invariant", [(1, 4000), (1, 600)], "16x64 w4 s4 c8d3"),
    ):
        problem = PagedProblem.parse(text)
        given = paged.paged_operands(problem, lengths, device="cuda")[0]
        once, twice = f"split_kv[{tile} once]", f"split_kv[{tile}]"
        paged.attend_paged(problem, given, once)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = paged.attend_paged(problem, given, once)
        start = given.seqlens_k.clone()
        for step in range(50):
            given.seqlens_k.copy_((start - 13 * step).clamp(min=1))
            given.q.normal_()
            wanted = paged.attend_paged(problem, given, twice)
            graph.replay()
            for results in (captured, paged.attend_paged(problem, given, once)):
                for one, other in zip(results, wanted, strict=True):
                    assert torch.equal(one, other), f"'{text}', step {step}: one launch differs from two"


@check
def paged_repeats_are_bitwise_equal():
    """While another stream keeps the memory busy."""
    noise, other = torch.empty(2**26, device="cuda"), torch.cuda.Stream()
    for text, lengths in (
        ("b8 h32/8 q1 k4096 d128 bf16 causal paged16", [(1, n) for n in zipf(8, 4096)]),
        ("b3 h8/2 q300 k2048 d64 bf16 causal packed paged16", [(200, 2000), (1, 1500), (99, 99)]),
    ):
        problem = PagedProblem.parse(text)
        given = paged.paged_operands(problem, lengths, device="cuda")[0]
        first = paged.attend_paged(problem, given)
        for _ in range(50):
            with torch.cuda.stream(other):
                noise.add_(1.0)
            for one, again in zip(first, paged.attend_paged(problem, given), strict=True):
                assert torch.equal(one, again), f"a repeat of '{text}' differs"


@check
def lies_of_paged_calls_touch_nothing_outside():
    for name, lies in paged_cases.LIES.items():
        problem, operands = paged_cases.lying(
            "b3 h4/2 q12 k96 d64 bf16 causal packed paged8", [(4, 90), (1, 9), (7, 20)], device="cuda", **lies
        )
        for plan in ("split_kv", "split_kv[16x64 w4 s3 p12]", "split_kv[16x16 w4 s2 x3]"):
            out, lse = canaries.run_guarded_paged(problem, operands, plan)
            overlap = "cu_seqlens_q" in lies  # rows of nobody, or of several
            assert overlap or not bool(torch.isnan(out).any() | torch.isnan(lse).any()), f"{name}: memory outside was read"


@check
def debug_names_the_entry_that_is_wrong():
    lengths = [(4, 90), (1, 9), (7, 20)]
    wrong = (({"block_table": 10**6}, "block_table[0, 0] is 1000000"), ({"seqlens_k": [4, -9, 20]}, "seqlens_k[1] is -9"))
    for lies, says in wrong:
        text, said = "b3 h4/2 q12 k96 d64 bf16 causal packed paged8", ""
        *tensors, cu = paged_cases.lying(text, lengths, device="cuda", **lies)[1][:6]
        try:
            rowmax.attention_paged(*tensors, cu_seqlens_q=cu, debug=True)
        except rowmax.ProblemError as error:
            said = str(error)
        assert says in said, f"{lies}: '{said}'"


@check
def pages_beyond_two_to_the_31_elements():
    """Only the last of so many pages are used, and pages past 65,535."""
    problem = PagedProblem.parse("b2 h8/2 q1 k64 d128 bf16 causal paged16")
    pages = 2**31 // (16 * 2 * 128) + 70_000  # 594,288 pages, 4.9 GB each for k and v
    small = paged.paged_operands(problem, [(1, 64), (1, 33)], device="cuda")[0]
    large = [torch.empty(pages, 16, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    count = small.k_pages.shape[0]
    for memory, source in zip(large, (small.k_pages, small.v_pages), strict=True):
        memory[pages - count :] = source
    moved = small._replace(
        k_pages=large[0], v_pages=large[1], block_table=small.block_table.clamp(0, count - 1) + (pages - count)
    )
    for one, other in zip(paged.attend_paged(problem, moved), paged.attend_paged(problem, small), strict=True):
        assert torch.equal(one, other)


@check
def appends_are_those_of_the_cpu():
    """Packed and not, rotated and not, in every type; NaN around them stays where it is."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    lengths, counts = torch.tensor([700, 33, 0, 1024]), torch.tensor([100, 33, 0, 1])
    table = torch.randperm(4 * 64, generator=generator).view(4, 64)
    theta = torch.arange(1024)[:, None] * 10.0 ** -(torch.arange(32) / 8)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for interleaved in (None, False, True):
            pages = [torch.full((256, 16, 2, dim), float("nan"), dtype=dtype) for dim in (128, 80)]
            new = [draw(int(counts.sum()) + 3, 2, dim).to(dtype) for dim in (128, 80)]
            cu = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
            on_gpu = [t.cuda() for t in pages]
            angles = {} if interleaved is None else {"rotary_cos": theta.cos(), "rotary_sin": theta.sin()}
            given = {"cu_seqlens": cu, "interleaved": bool(interleaved), **angles}
            rowmax.append_kv(*pages, *new, table, lengths, **given)
            there = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
            rowmax.append_kv(*on_gpu, *(t.cuda() for t in new), table.cuda(), lengths.cuda(), **there)
            for one, other in zip(on_gpu, pages, strict=True):
                exact = {"rtol": 0, "atol": 0} if interleaved is None else {}
                torch.testing.assert_close(one.cpu(), other, equal_nan=True, **exact)


@check
def a_cache_is_served_without_waiting_for_the_device():
    """1,000 random steps of growing, forking, ending and attending, without one synchronisation: memory does not grow, and what
    a sequence attends to is what its own tokens give."""
    cache = rowmax.PagedKVCache(512, page_size=16, heads=2, dim=64, max_sequences=16, dtype=torch.bfloat16, device="cuda")
    rnd, texts, written = random.Random(0), {}, 0
    memory, results = 0, []
    everything = torch.randn(40_000, 2, 64, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()

    def grow():
        nonlocal written
        chosen = rnd.sample(sorted(texts), rnd.randint(1, len(texts)))
        count = rnd.choice((1, 1, 1, 5, 40))
        try:
            step = cache.extend(chosen, count)
        except rowmax.CacheFull:
            end()
            return
        rows = range(written, written + count * len(chosen))
        written = rows.stop
        new = everything[rows.start : rows.stop].view(len(chosen), count, 2, 64)
        cache.append(step, new, new)
        for i, sequence in enumerate(chosen):
            texts[sequence] = [*texts[sequence], *rows[i * count : (i + 1) * count]]
        out = cache.attend(step, new.repeat(1, 1, 4, 1))
        if turn % 50 == 49:
            results.append((texts[chosen[0]], out[0, -1].clone()))

    def end():
        sequence = rnd.choice(sorted(texts))
        cache.free(sequence)
        del texts[sequence]

    for turn in range(1000):
        if turn == 100:
            torch.cuda.synchronize()
            memory = torch.cuda.memory_allocated()
            torch.cuda.set_sync_debug_mode("error")
        try:
            if not texts or (len(texts) < 16 and rnd.random() < 0.1):
                texts[cache.add()] = []
            elif len(texts) < 16 and rnd.random() < 0.1:
                source = rnd.choice(sorted(texts))
                texts[cache.fork(source)] = texts[source]
            elif rnd.random() < 0.08:
                end()
            elif written < 39_000:
                grow()
        finally:
            if turn == 999:
                torch.cuda.set_sync_debug_mode("default")
        cache.check()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - memory < 2**20, "memory grew"
    for text, got in results:
        keys = everything[torch.tensor(text, device="cuda")][None]
        query = keys[:, -1:].repeat(1, 1, 4, 1)
        problem = Problem.parse(f"b1 h8/2 q1 k{len(text)} d64 bf16")
        report = testing.check_forward(problem, Operands(query, keys, keys), got[None, None])
        assert report.ok, str(report)


@check
def prepared_paged_calls_follow_their_tensors():
    """Bitwise eager calls, eager and captured, without waiting for the device."""
    for text, lengths in (
        ("b8 h32/8 q1 k4096 d128 bf16 causal paged16", [(1, n) for n in zipf(8, 4096)]),
        ("b3 h8/2 q300 k2048 d64 bf16 causal packed paged16", [(200, 2000), (1, 1500), (90, 99)]),
    ):
        given = paged.paged_operands(PagedProblem.parse(text), lengths, device="cuda")[0]
        options = {"cu_seqlens_q": given.cu_seqlens_q, "return_lse": True}
        attend = rowmax.prepare_paged(*given[:5], **options)
        attend()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            attend()
        for step in range(20):
            given.q.normal_()
            given.seqlens_k.sub_(1 if step else 0).clamp_(min=0)
            torch.cuda.set_sync_debug_mode("error")
            want = rowmax.attention_paged(*given[:5], **options)
            results = attend()
            torch.cuda.set_sync_debug_mode("default")
            assert all(torch.equal(*pair) for pair in zip(results, want, strict=True)), f"'{text}' step {step}: another result"
            for result in results:
                result.fill_(7.0)
            graph.replay()
            assert all(torch.equal(*pair) for pair in zip(results, want, strict=True)), (
                f"'{text}' step {step}: a replay differs"
            )


@check
def eight_bits_are_stored_as_on_the_cpu():
    """Rounded, cut off and scaled alike, by head and by page; and what is no number goes where it is seen."""
    generator = torch.Generator().manual_seed(0)
    lengths, table = torch.tensor([70, 33]), torch.randperm(16, generator=generator).view(2, 8)
    cu = torch.tensor([0, 50, 83])
    for dtype in (torch.bfloat16, torch.float16):
        for shape in ((2,), (16, 2)):
            scales = {name: 2 * torch.rand(shape, generator=generator) / 448 + 1e-4 for name in ("k_scale", "v_scale")}
            pages = [torch.zeros(16, 16, 2, dim).to(torch.float8_e4m3fn) for dim in (128, 80)]
            new = [torch.randn(83, 2, dim, generator=generator).to(dtype) for dim in (128, 80)]
            for t in new:
                t[3, 0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
            on_gpu = [t.cuda() for t in pages]
            rowmax.append_kv(*pages, *new, table, lengths, cu_seqlens=cu, **scales)
            there = {name: scale.cuda() for name, scale in scales.items()}
            given = (*on_gpu, *(t.cuda() for t in new), table.cuda(), lengths.cuda())
            rowmax.append_kv(*given, cu_seqlens=cu.cuda(), **there, debug=True)
            for one, other in zip(on_gpu, pages, strict=True):
                torch.testing.assert_close(one.cpu().float(), other.float(), rtol=0, atol=0, equal_nan=True)
    for text in ("d64 fp16 causal paged16", "d64 bf16 causal paged64", "d128/96 bf16 window(40,0) paged16", "d50 bf16 paged5"):
        problem = PagedProblem.parse(f"b2 h4/2 q6 k320 {text} e4m3")
        for by_page in (False, True):
            for kind in ("nan(v)", "nan(k)", "spiky(3)"):
                report = paged.check_paged(problem, [(6, 300), (6, 16)], kind, device="cuda", page_scales=by_page)
                assert report.ok, str(report)


@check
def a_cache_in_eight_bits_is_that_of_the_cpu():
    """The same steps: the same scales and numbers, without waiting for the device."""
    caches = [
        rowmax.PagedKVCache(64, page_size=16, heads=2, dim=64, dtype=torch.float8_e4m3fn, device=device)
        for device in ("cpu", "cuda")
    ]
    generator = torch.Generator().manual_seed(0)
    sequences = [[cache.add() for _ in range(3)] for cache in caches]
    warm = True
    for counts in ([33, 1, 20], [1, 1, 1], [5, 0, 40], 1, 1):
        tokens = 3 * counts if isinstance(counts, int) else sum(counts)
        shape = (3, counts, 2, 64) if isinstance(counts, int) else (tokens, 2, 64)
        new = [torch.randn(shape, generator=generator).bfloat16() for _ in "kv"]
        results = []
        for cache, mine in zip(caches, sequences, strict=True):
            step = cache.extend(mine, counts)
            k, v = (t.to(cache.k_pages.device) for t in new)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("default" if warm else "error")
            cache.append(step, k, v)
            results.append(cache.attend(step, k.repeat_interleave(2, -2)))
            torch.cuda.set_sync_debug_mode("default")
        # Both round weights and output to 16 bits: each is off by at most 2^-8 of the largest value.
        off = (results[1].cpu().float() - results[0].float()).abs().max()
        assert off <= 2.0**-7 * caches[0].v_scale.max() * 448, f"the outputs differ by {off:.3g}"
        warm = False
    for name in ("k_pages", "v_pages", "k_scale", "v_scale"):
        one, other = (getattr(cache, name).cpu().float() for cache in caches)
        assert torch.equal(one, other), f"{name}: other numbers than on the CPU"


@check
def shared_pages_are_read_once():
    """Under the rule, captured, and without waiting for the device."""
    for text, lengths, share in (
        ("b16 h32/8 q1 k4096 d128 bf16 causal paged16", [(1, 3000 + 61 * i) for i in range(16)], 187),
        ("b4 h8/2 q3 k2048 d64 fp16 causal paged64", [(3, 1100 + 200 * i) for i in range(4)], 16),
        ("b3 h8/2 q40 k1024 d128 bf16 causal packed paged16", [(20, 1000), (1, 700), (17, 640)], 30),
    ):
        problem = PagedProblem.parse(text)
        given, flat, packed = paged.paged_operands(problem, lengths, device="cuda")
        given.block_table[:, :share] = given.block_table[:1, :share]
        first = 0
        for _, keys in lengths:
            for t in (packed.k, packed.v):
                t[first : first + share * problem.page_size] = t[: share * problem.page_size]
            first += keys

        def call(given=given, share=share):
            return rowmax.attention_shared(*given[:5], share, cu_seqlens_q=given.cu_seqlens_q, return_lse=True)

        call()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        results = call()
        torch.cuda.set_sync_debug_mode("default")
        report = testing.check_forward(flat, packed, *paged.as_packed(problem, *results))
        assert report.ok, str(report)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(captured, results, strict=True)), f"'{text}': a replay differs"


CHECKS |= gpu_models.CHECKS | gpu_invariance.CHECKS
