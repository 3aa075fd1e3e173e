"""Decoding, one token a sequence over a long cache, beside the peers: GPU time of a graph's replay, host time of an eager call.

    python benchmarks/decode.py                        the eight shapes and their paged forms; then lengths that differ, latent
                                                       attention, pages in 8 bits, and a prefix that all sequences share
    python benchmarks/decode.py --sweep                tiles of the split-KV kernel, rowmax alone: `decode_sweep.py`;
                                                       --sweep --short: few of them
    python benchmarks/decode.py --only 0,3 --json decode.json; --rest: without the eight shapes
    python benchmarks/decode.py --clean                over an L2 whose lines need not be written back: `timing.samples_ms`

Every result is checked against the definition before it is timed, and nothing is printed for one that is wrong. Bytes are those
that must be read and written: q, keys and values of the sequences' lengths, output.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import baselines
import record
import timing
from calls import make_operands
from rowmax import Device, PagedProblem, Problem, attention, attention_paged, attention_shared, plan, prepare_paged
from rowmax.plan import latent
from rowmax.problem import Operands
from rowmax.testing import check_forward, paged

SHAPES = (
    "b1 h32/8 q1 k8192 d128 bf16",
    "b1 h32/8 q1 k131072 d128 bf16",
    "b16 h32/8 q1 k8192 d128 bf16",
    "b128 h32/8 q1 k4096 d128 bf16",
    "b16 h32/32 q1 k8192 d128 bf16",
    "b64 h64/8 q1 k8192 d64 bf16",
    "b8 h32/8 q1 k1024 d128 bf16",
    "b1 h64/8 q1 k32768 d128 bf16",
)
PAGES = (16, 64)
UNEVEN = "b64 h32/8 q1 k131072 d128 bf16"  # lengths below; its even twin has as many keys in all
LATENT = "b128 h128/1 q1 k8192 d576/512 bf16"
EIGHT_BITS = "b32 h32/8 q1 k8192 d128 bf16 causal paged64"  # 1 GiB of keys and values in 16 bits
SHARED, SHARED_KEYS = "b64 h32/8 q1 k8704 d128 bf16 causal paged64", 8192


def main() -> int:
    options = _parser().parse_args()
    device = torch.device("cuda")
    rows: list[dict] = []
    shapes = [SHAPES[int(i)] for i in options.only.split(",")] if options.only else () if options.rest else SHAPES
    begin = time.monotonic()
    if options.sweep or options.build:
        import decode_sweep

        return decode_sweep.run(shapes, device, options)
    for text in shapes:
        if time.monotonic() - begin > options.time_limit:
            print("time limit: the rest was not timed", file=sys.stderr)
            break
        problem = Problem.parse(text)
        operands, _ = make_operands(problem, device, 0)
        calls, wrong = _candidates(problem, operands)
        rows += time_rows(text, calls, bytes_moved(problem, problem.batch * problem.len_k), device, options)
        for line in wrong:
            print(f"  {line}", file=sys.stderr)
        del operands, calls
        torch.cuda.empty_cache()
    if not options.only:
        for text, lengths in ((UNEVEN, zipf(64, 131072)), (LATENT, [8192] * 128)):
            if time.monotonic() - begin > options.time_limit:
                break
            rows += _paged_rows(text, lengths, device, options)
        if time.monotonic() - begin <= options.time_limit:
            rows += _eight_bits(device, options)
        if time.monotonic() - begin <= options.time_limit:
            rows += _shared_rows(device, options)
    write(rows, device, options)
    return 0


def write(rows: list[dict], device: torch.device, options) -> None:
    if options.json:
        options.json.write_text(json.dumps({**record.machine(device), "rows": rows}, indent=1) + "\n")


def zipf(batch: int, longest: int) -> list[int]:
    """Lengths of an uneven batch: the n-th longest has one n-th of the longest, at least 128, in random order."""
    lengths = [max(longest // (i + 1), 128) for i in range(batch)]
    random.Random(0).shuffle(lengths)
    return lengths


def bytes_moved(problem: Problem, keys: int) -> int:
    """`keys` of all sequences together."""
    rows = problem.batch * problem.len_q * problem.heads_q
    values = 0 if problem.dim_qk == 576 else problem.dim_v  # of latent attention they are the first columns of the keys
    return problem.dtype.itemsize * (
        rows * (problem.dim_qk + problem.dim_v) + keys * problem.heads_k * (problem.dim_qk + values)
    )


def _candidates(problem: Problem, operands) -> tuple[dict[str, Callable], list[str]]:
    """Name -> a call that was found right; and what was wrong or refused."""
    q, k, v = operands[:3]
    calls: dict[str, Callable] = {"rowmax": lambda: attention(q, k, v)}
    calls |= {f"rowmax paged{size}": paged_call(q, in_pages(k, v, size)) for size in PAGES}
    calls["rowmax paged16 prepared"] = prepare_paged(q, *in_pages(k, v, 16))
    calls["rowmax paged16 invariant"] = paged_call(q, in_pages(k, v, 16), batch_invariant=True)
    wrong = []
    transposed = [t.transpose(1, 2) for t in (q, k, v)]
    calls["sdpa"] = lambda: scaled_dot_product_attention(*transposed, enable_gqa=True).transpose(1, 2)
    for who in ("cudnn", "fa2", "fa3"):
        try:
            forward = baselines.build(who, problem, operands)
            calls[who] = lambda forward=forward: forward(q, k, v)
        except baselines.Refused as refused:
            wrong.append(f"{who}: {refused}")
    return right(problem, operands, calls, wrong)


def right(problem: Problem, operands, calls, wrong) -> tuple[dict[str, Callable], list[str]]:
    """The calls that are right, as far as the first sequences show, which `problem` and `operands` describe."""
    kept = {}
    for name, call in calls.items():
        try:
            with torch.no_grad():
                out = call()[: problem.batch]
                report = check_forward(problem, operands, out.flatten(0, 1) if problem.packed else out)
        except Exception as error:
            wrong.append(f"{name} raised: {str(error).splitlines()[0][:200]}")
            continue
        if report.ok:
            kept[name] = call
        else:
            wrong.append(f"{name} WRONG: {report}")
    return kept, wrong


def in_pages(k, v, size: int) -> tuple[torch.Tensor, ...]:
    """The same keys and values in shuffled pages, their table and lengths."""
    batch, length = k.shape[:2]
    count = batch * length // size
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(k.device)
    pages = [torch.empty(count, size, *t.shape[2:], dtype=t.dtype, device=t.device) for t in (k, v)]
    for memory, t in zip(pages, (k, v), strict=True):
        memory[order] = t.reshape(count, size, *t.shape[2:])
    table = order.view(batch, length // size).to(torch.int32)
    return *pages, table, torch.full((batch,), length, dtype=torch.int32, device=k.device)


def paged_call(q, cache, spelled: "str | None" = None, **options) -> Callable:
    return lambda: attention_paged(q, *cache, plan=spelled, **options)


def _paged_rows(text: str, lengths: list[int], device: torch.device, options) -> list[dict]:
    """A batch over pages of 64, and for uneven lengths its even twin."""
    rows = []
    even = [sum(lengths) // len(lengths)] * len(lengths)
    for name, keys in (("given lengths", lengths), ("even lengths", even)):
        if name == "even lengths" and lengths == even:
            continue
        problem = PagedProblem.parse(f"{text} causal paged64")
        problem = problem.with_(len_k=-(-max(keys) // 64) * 64)
        used = sum(-(-n // 64) for n in keys)
        k = torch.randn(used, 64, problem.heads_k, problem.dim_qk, device=device, dtype=problem.dtype)
        shared = problem.dim_qk == 576
        v = k[..., : problem.dim_v] if shared else torch.randn(*k.shape[:3], problem.dim_v, device=device, dtype=problem.dtype)
        order, first = torch.randperm(used, device=device).to(torch.int32), 0
        table = torch.full((problem.batch, problem.len_k // 64), -1, dtype=torch.int32, device=device)
        for b, n in enumerate(keys):
            count = -(-n // 64)
            table[b, :count] = order[first : first + count]
            first += count
        seqlens = torch.tensor(keys, dtype=torch.int32, device=device)
        q = torch.randn(problem.batch, 1, problem.heads_q, problem.dim_qk, device=device, dtype=problem.dtype)

        plans = {"rowmax": str(plan(problem, Device.of(device)))}
        if shared and not latent.refuses(problem, Device.of(device), "forward"):
            plans["rowmax split_kv"] = str(plan(problem, Device.of(device), prefer="split_kv"))
        small = [min(n, 700) for n in keys[:8]]  # the same kernel on fewer keys, against the definition
        few, lengths_of_few = problem.with_(batch=8, len_k=704), [(1, n) for n in small]
        calls = {}
        for who, spelled in plans.items():
            report = paged.check_paged(few, lengths_of_few, device=device, plan=spelled, shared=shared)
            if report.ok:
                calls[who] = paged_call(q, (k, v, table, seqlens), spelled)
                calls[who]()
            else:
                print(f"  WRONG {who} {report}", file=sys.stderr)
        if calls:
            rows += time_rows(f"{problem} {name}", calls, bytes_moved(problem, sum(keys)), device, options)
        del k, v
        torch.cuda.empty_cache()
    return rows


def _eight_bits(device: torch.device, options) -> list[dict]:
    """Pages in 8 bits beside the same in 16, each with scales of its own."""
    problem = PagedProblem.parse(EIGHT_BITS)
    count = problem.batch * problem.len_k // problem.page_size
    shape = (count, problem.page_size, problem.heads_k, problem.dim_qk)
    k, v = (torch.randn(shape, device=device, dtype=problem.dtype) for _ in "kv")
    table = torch.randperm(count, device=device).to(torch.int32).view(problem.batch, -1)
    lengths = torch.full((problem.batch,), problem.len_k, dtype=torch.int32, device=device)
    q = torch.randn(problem.batch, 1, problem.heads_q, problem.dim_qk, device=device, dtype=problem.dtype)
    scale = torch.full((count, problem.heads_k), 2.0**-5, device=device)
    small = tuple((t.float() / 2.0**-5).clamp(-448, 448).to(torch.float8_e4m3fn) for t in (k, v))
    few = problem.with_(batch=4, len_k=704, eight_bits=True)
    report = paged.check_paged(few, [(1, 700), (1, 64), (1, 65), (1, 3)], device=device, page_scales=True)
    if not report.ok:
        print(f"  WRONG {report}", file=sys.stderr)
        return []
    scales = {"k_scale": scale, "v_scale": scale}
    heads = {"k_scale": scale[0].clone(), "v_scale": scale[0].clone()}
    calls = {
        "rowmax 16 bits": paged_call(q, (k, v, table, lengths)),
        "rowmax 8 bits": paged_call(q, (*small, table, lengths), **heads),
        "rowmax 8 bits, scales of pages": paged_call(q, (*small, table, lengths), **scales),
    }
    for call in calls.values():
        call()
    moved = bytes_moved(problem, problem.batch * problem.len_k)
    rows = time_rows(f"{problem} and in 8 bits", calls, moved, device, options)
    for row in rows[1:]:  # half the bytes of keys and values
        row["bytes"] = moved - problem.batch * problem.len_k * problem.heads_k * (problem.dim_qk + problem.dim_v)
        row["gb_per_s"] = round(row["bytes"] / row["replay_us"] / 1e3)
    return rows


def _shared_rows(device: torch.device, options) -> list[dict]:
    """Sequences that begin with the same pages: read for each, or once."""
    problem, shared, own = PagedProblem.parse(SHARED), SHARED_KEYS, 512
    size = problem.page_size
    count = (shared + problem.batch * own) // size
    k, v = (torch.randn(count, size, problem.heads_k, problem.dim_qk, device=device, dtype=problem.dtype) for _ in "kv")
    order = torch.randperm(count, device=device).to(torch.int32)
    first, rest = order[: shared // size], order[shared // size :].view(problem.batch, -1)
    table = torch.cat([first.expand(problem.batch, -1), rest], 1).contiguous()
    lengths = torch.full((problem.batch,), shared + own, dtype=torch.int32, device=device)
    q = torch.randn(problem.batch, 1, problem.heads_q, problem.dim_qk, device=device, dtype=problem.dtype)
    calls = {
        "rowmax": paged_call(q, (k, v, table, lengths)),
        "rowmax shared": lambda: attention_shared(q, k, v, table, lengths, shared // size),
    }
    plain, once = (call().float() for call in calls.values())
    operands = Operands(q, *(t[table.long()].flatten(1, 2) for t in (k, v)))
    few = Problem.parse(f"b2 h{problem.heads_q}/{problem.heads_k} q1 k{shared + own} d{problem.dim_qk} bf16")
    two = operands._replace(q=q[:2], k=operands.k[:2], v=operands.v[:2])
    wrong = [str(report) for out in (plain, once) if not (report := check_forward(few, two, out[:2].to(q.dtype))).ok]
    if wrong:
        print(f"  WRONG {wrong[0]}", file=sys.stderr)
        return []
    read = shared + problem.batch * own
    rows = time_rows(f"{problem}, {shared} keys shared by all", calls, bytes_moved(problem, read), device, options)
    rows[0]["bytes"] = bytes_moved(problem, problem.batch * (shared + own))
    rows[0]["gb_per_s"] = round(rows[0]["bytes"] / rows[0]["replay_us"] / 1e3)
    print(
        f"  {rows[0]['replay_us'] / rows[1]['replay_us']:.2f} times as fast; bytes: {rows[0]['bytes'] / rows[1]['bytes']:.2f}"
    )
    return rows


def time_rows(text: str, calls: dict[str, Callable], moved: int, device: torch.device, options) -> list[dict]:
    """Rows of one shape: replays side by side, then the host's part of eager calls."""
    graphs = {}
    for name, call in calls.items():
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            call()
        graphs[name] = graph
    times, _ = timing.samples_ms(
        {name: graph.replay for name, graph in graphs.items()}, device, options.seconds, clean=options.clean
    )
    rows: list[dict] = []
    shown: dict[str, int] = {}
    print(text)
    for name in sorted(calls, key=lambda name: statistics.median(times[name]) if options.sweep else 0):
        microseconds = statistics.median(times[name]) * 1e3
        host = None if options.sweep else _host_us(calls[name])
        row = {"problem": text, "who": name, "replay_us": round(microseconds, 2), "gb_per_s": round(moved / microseconds / 1e3)}
        row |= {"host_us": None if host is None else round(host, 1), "bytes": moved}
        row |= {"l2": "clean"} if options.clean else {}
        rows.append(row)
        kind = name.partition("[")[0]
        shown[kind] = shown.get(kind, 0) + 1
        if not options.sweep or shown[kind] <= options.top:
            host_text = "" if host is None else f"   host {host:5.1f} us"
            print(f"  {name:44} {microseconds:8.1f} us {row['gb_per_s']:6} GB/s{host_text}")
    sys.stdout.flush()
    return rows


def _host_us(call: Callable, turns: int = 200) -> float:
    """Time to enqueue one eager call, while the device is behind."""
    with torch.no_grad():
        for _ in range(10):
            call()
        torch.cuda.synchronize()
        samples = []
        for _ in range(5):
            torch.cuda._sleep(20_000_000)
            start = time.perf_counter()
            for _ in range(turns // 5):
                call()
            samples.append((time.perf_counter() - start) / (turns // 5) * 1e6)
            torch.cuda.synchronize()
    return min(samples)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Decoding beside the peers.")
    parser.add_argument("--only", default="", help="numbers of shapes, from 0: '0,3'")
    parser.add_argument("--rest", action="store_true", help="what comes behind the eight shapes, alone")
    parser.add_argument("--sweep", action="store_true", help="tiles of the split-KV kernel instead of peers")
    parser.add_argument("--short", action="store_true", help="of a sweep, tiles that may be better than the plan's, alone")
    parser.add_argument("--build", default="", help="used by --sweep: '3/12' compiles one of twelve shares of its kernels")
    parser.add_argument("--top", type=int, default=4, help="how many tiles of each kind a sweep prints; --json has all")
    parser.add_argument("--seconds", type=float, default=0.5, help="for the replays of one shape")
    parser.add_argument("--clean", action="store_true", help="time over an L2 cache whose lines need not be written back")
    parser.add_argument("--time-limit", type=float, default=80.0, help="begin no shape after this many seconds")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    return parser


if __name__ == "__main__":
    sys.exit(main())
