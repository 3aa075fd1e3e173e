"""Tiles of the split-KV kernel and numbers of its programs, side by side: `python benchmarks/decode.py --sweep` calls this.

Latent attention and pages in 8 bits; then the eight shapes dense, over pages of 16 and 64, and batch-invariant; with `--short`
of each the tiles that may be better than what the plan takes. All kernels are compiled first, by processes beside each other;
every result is held against the definition on two sequences before it is timed.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from calls import make_operands
from decode import EIGHT_BITS, LATENT, SHAPES, bytes_moved, in_pages, paged_call, right, time_rows, write
from rowmax import Device, PagedProblem, Problem, attention
from rowmax.plan import latent
from rowmax.problem import Operands

BUILDERS = 16  # processes
CHECKED = 2  # sequences

# What `--sweep` times: tiles with their numbers of programs a multiprocessor. The first tile is what the plan takes.
DENSE = {
    "16x64 w4 s3": (1, 2, 3, 4, 6, 8, 12),
    "16x64 w4 s2": (2, 4, 5, 10),
    "16x64 w4 s4": (2, 4),
    "16x128 w4 s2": (2, 3, 6),
    "16x64 w2 s3": (2, 3, 6),
    "16x128 w8 s2": (2, 4),
}
OVER_PAGES = {
    "16x64 w4 s3": (1, 2, 3, 4, 6, 8),
    "16x64 w4 s2": (3, 6),
    "16x64 w4 s4": (2, 4),
    "16x128 w4 s2": (2, 4),
    "16x64 w8 s3": (2, 4),
}
INVARIANT = (
    "32x32 w4 s3 c32",
    "16x64 w4 s3 c4",
    "16x64 w4 s3 c8",
    "16x64 w4 s3 c16",
    "16x64 w4 s3 c8d24",
    "16x64 w4 s3 r16",
    "16x64 w4 s2 c8",
    "32x64 w4 s3 c8",
)
LATENT_TILES = ("32x32 w8 s2", "32x64 w8 s2", "64x32 w8 s2", "64x32 w8 s3", "64x64 w8 s1", "64x64 w8 s2")
LATENT_HOPPER = "64x64 w4 s8"  # of the kernel for Hopper
EIGHT_BITS_TILES = ("16x64 w4 s3", "16x64 w4 s4", "16x64 w4 s5", "16x64 w2 s3", "16x128 w8 s3", "16x64 w8 s3")

# What `--short` times: by number of the shape, tiles with their parts. The first of each is what the plan takes.
SHORT: dict[str, dict[int, tuple[str, ...]]] = {
    "dense": {
        0: ("16x64 w4 s3 x16", "16x64 w2 s3 x16", "16x64 w4 s4 x16", "16x64 w4 s5 x16", "16x64 w8 s4 x16", "16x128 w8 s2 x16"),
        1: ("16x64 w2 s3 x33", "16x64 w2 s4 x33"),
        2: ("16x64 w2 s3 x2", "16x64 w2 s4 x2", "16x64 w4 s5 x1"),
        3: ("16x64 w4 s4 x1", "16x64 w2 s4 x1"),
        4: ("16x64 w4 s4 x1", "16x64 w2 s4 x1", "16x64 w4 s2 x1", "16x64 w2 s2 x1"),
        5: ("16x64 w2 s3 x1", "16x64 w2 s4 x1"),
        6: ("16x64 w4 s3 x2", "16x64 w4 s4 x2", "16x64 w4 s3 x4"),
        7: ("16x64 w4 s3 x16", "16x64 w2 s3 x16", "16x64 w4 s4 x16"),
    },
    "paged16": {
        0: ("16x64 w4 s3 x16", "16x64 w2 s3 x16", "16x64 w4 s4 x16"),
        1: ("16x64 w4 s3 x33", "16x64 w2 s4 x33"),
        **dict.fromkeys((2, 3, 4), ("16x64 w4 s4 p264", "16x128 w4 s2 p264", "16x64 w8 s3 p264", "16x64 w2 s4 p264")),
        5: ("16x64 w4 s3 p528", "16x64 w2 s3 p528"),
        6: ("16x64 w4 s3 p264", "16x64 w4 s4 p264", "16x64 w2 s3 p264"),
        7: ("16x64 w4 s3 x32", "16x64 w4 s4 x32", "16x64 w4 s4 x16"),
    },
    "invariant": {
        0: ("16x64 w4 s4 c8d24", "16x64 w4 s4 c8d24 once"),
        **dict.fromkeys(
            (1, 7),
            (
                *("16x64 w4 s4 c8d24", "16x64 w4 s4 c8d24 once", "16x64 w4 s3 c8d24", "16x64 w4 s4 c8d32", "16x64 w4 s4 c8d16"),
                *("16x64 w4 s4 c8", "16x64 w4 s4 c16"),
            ),
        ),
        2: ("16x64 w4 s4 c8d24", "16x64 w4 s3 c8d24"),
        3: ("16x64 w4 s4 c8d24",),
        4: ("16x64 w4 s4 c8d6", "16x64 w4 s4 c8"),
        5: ("16x64 w4 s3 c8d24",),
        6: ("16x64 w4 s4 c8d24",),
    },
}
SHORT["paged64"] = {number: tiles if number in (2, 3, 4) else tiles[:1] for number, tiles in SHORT["paged16"].items()}
SHORT_LATENT = ("64x64 w8 s2",)
SHORT_EIGHT_BITS = {  # blocks of so many a multiprocessor
    "16x64 w2 s3": (4,),
    "16x64 w2 s4": (4,),
    "16x64 w4 s3": (4,),
    "16x64 w4 s4": (4,),
    "16x64 w4 s5": (3,),
    "16x32 w1 s4": (7,),
}
SHORT_SIXTEEN = {"16x64 w4 s4": (2,), "16x128 w4 s2": (2,)}


class _Cache(NamedTuple):
    """A query token of each sequence over pages of 64 in shuffled order, every sequence as long as the problem's."""

    problem: PagedProblem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor

    def call(self, spelled: str, **scales) -> Callable:
        return paged_call(self.q, (self.k, self.v, self.table, self.lengths), spelled, **scales)


def run(shapes, device: torch.device, options) -> int:
    begin = time.monotonic()
    if options.build:
        _build_some(shapes, device, options)
        return 0
    _build_ahead(options)
    print(f"built after {time.monotonic() - begin:.0f} s", file=sys.stderr)
    rows: list[dict] = []
    jobs: list[Callable] = [lambda text=text: _sweep_shape(text, device, options) for text in shapes]
    if not options.only:
        jobs[:0] = [lambda: _sweep_latent(device, options), lambda: _sweep_eight_bits(device, options)]
    for job in jobs:
        if time.monotonic() - begin > options.time_limit:
            print("time limit: the rest was not timed", file=sys.stderr)
            break
        rows += job()
        torch.cuda.empty_cache()
        write(rows, device, options)
    return 0


def _timed(text: str, problem: Problem, operands, calls: dict[str, Callable], moved: int, device, options) -> list[dict]:
    """`problem`, `operands`: of the first sequences, as a call without pages."""
    kept, wrong = right(problem, operands, calls, [])
    for line in wrong:
        print(f"  {line}", file=sys.stderr)
    return time_rows(text, kept, moved, device, options) if kept else []


def _sweep_shape(text: str, device: torch.device, options) -> list[dict]:
    problem = Problem.parse(text)
    operands, _ = make_operands(problem, device, 0)
    few = min(problem.batch, CHECKED)
    some = operands._replace(**{name: getattr(operands, name)[:few] for name in "qkv"})
    moved = bytes_moved(problem, problem.batch * problem.len_k)
    return _timed(text, problem.with_(batch=few), some, _variants(problem, operands, options.short), moved, device, options)


def _variants(problem: Problem, operands, short: bool, pages_of: Callable = in_pages) -> dict[str, Callable]:
    q, k, v = operands[:3]
    sms, items = Device.of(q).sms, problem.batch * problem.heads_k
    calls: dict[str, Callable] = {}
    if short:
        return _short_variants(problem, operands, pages_of)
    for tile, shares in DENSE.items():
        for parts in {max(round(share * sms / items - 0.3), 1): None for share in shares}:  # not quite so many at a time
            calls[f"dense [{tile} x{parts}]"] = _dense_call(q, k, v, f"split_kv[{tile} x{parts}]")
    for size, tiles in ((16, OVER_PAGES), (64, {"16x64 w4 s3": (2, 3, 4, 8)})):
        pages = pages_of(k, v, size)
        for tile, shares in tiles.items():
            for share in shares:
                parts = f"p{share * sms}" if problem.batch > 1 else f"x{max(share * sms // items, 1)}"
                calls[f"paged{size} [{tile} {parts}]"] = paged_call(q, pages, f"split_kv[{tile} {parts}]")
        if size == 16:
            for tile in INVARIANT:
                calls[f"invariant [{tile}]"] = paged_call(q, pages, f"split_kv[{tile}]", batch_invariant=True)
    return calls


def _short_variants(problem: Problem, operands, pages_of: Callable) -> dict[str, Callable]:
    q, k, v = operands[:3]
    number = [Problem.parse(text) for text in SHAPES].index(problem)
    pages = {size: pages_of(k, v, size) for size in (16, 64)}
    calls: dict[str, Callable] = {}
    for kind, tiles in SHORT.items():
        for tile in tiles[number]:
            spelled = f"split_kv[{tile}]"
            if kind == "dense":
                call = _dense_call(q, k, v, spelled)
            else:
                call = paged_call(q, pages[64 if kind == "paged64" else 16], spelled, batch_invariant=kind == "invariant")
            calls[f"{kind} [{tile}]"] = call
    return calls


def _dense_call(q, k, v, spelled: str) -> Callable:
    return lambda: attention(q, k, v, plan=spelled)


def _build_ahead(options, number: int = BUILDERS) -> None:
    """Every kernel of the sweep, by processes beside each other: compiled one after another they would take minutes."""
    names = ("--only", options.only) if options.only else ("--rest",) if options.rest else ()
    names += ("--short",) * options.short
    commands = [
        [sys.executable, str(Path(__file__).with_name("decode.py")), "--sweep", *names, "--build", f"{i}/{number}"]
        for i in range(number)
    ]
    for process in [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]:
        process.wait()


def _build_some(shapes, device: torch.device, options) -> None:
    """A share of them, on memory that nobody filled. Calls that differ in the number of their parts alone share a build."""
    mine, of = map(int, options.build.split("/"))
    places: dict[tuple, int] = {}  # of what makes a build -> its number
    jobs: list[Callable] = [lambda text=text: _shape_unfilled(Problem.parse(text), device, options.short) for text in shapes]
    if not options.only:
        jobs[:0] = [
            lambda: _unfilled(_latent(device, False), options.short),
            lambda: _eight_bits_unfilled(device, options.short),
        ]
    for job in jobs:
        form, calls = job()
        for name, call in calls.items():
            place = places.setdefault((form, re.sub(r" [xp]\d+", "", name)), len(places))
            if place % of == mine:
                try:
                    call()
                except Exception:  # the process that times it says what was wrong
                    continue
        torch.cuda.synchronize()
        del calls
        torch.cuda.empty_cache()


def _shape_unfilled(problem: Problem, device: torch.device, short: bool) -> tuple:
    k, v = (
        torch.empty(problem.batch, problem.len_k, problem.heads_k, problem.dim_qk, dtype=problem.dtype, device=device)
        for _ in "kv"
    )
    q = torch.empty(problem.batch, 1, problem.heads_q, problem.dim_qk, dtype=problem.dtype, device=device)
    form = (problem.group, problem.heads_k, problem.dim_qk, problem.batch if problem.batch < 16 else problem.batch % 16)
    return form, _variants(problem, (q, k, v), short, pages_of=_in_order)


def _unfilled(cache: _Cache, short: bool) -> tuple:
    return "latent", _latent_variants(cache, short)


def _eight_bits_unfilled(device: torch.device, short: bool) -> tuple:
    return "8 bits", {name: call for _, _, found in _eight_bits_variants(device, short, False) for name, call in found.items()}


def _in_order(k, v, size: int) -> tuple:
    """As `in_pages`, without a copy."""
    count = k.shape[0] * k.shape[1] // size
    table = torch.arange(count, dtype=torch.int32, device=k.device).view(k.shape[0], -1)
    lengths = torch.full(k.shape[:1], k.shape[1], dtype=torch.int32, device=k.device)
    return *(t.view(count, size, *t.shape[2:]) for t in (k, v)), table, lengths


def _cache(problem: PagedProblem, device: torch.device, filled: bool, dtype: torch.dtype) -> _Cache:
    count = problem.batch * problem.len_k // problem.page_size

    def made(*shape, dtype=problem.dtype):
        if not filled:
            return torch.empty(shape, device=device, dtype=dtype)
        memory = torch.randn(shape, device=device, dtype=problem.dtype)
        return memory if dtype == memory.dtype else (memory.float() * 32).clamp(-448, 448).to(dtype)

    k = made(count, problem.page_size, problem.heads_k, problem.dim_qk, dtype=dtype)
    v = k[..., : problem.dim_v] if problem.dim_qk == 576 else made(*k.shape[:3], problem.dim_v, dtype=dtype)
    table = torch.randperm(count, device=device).to(torch.int32).view(problem.batch, -1)
    lengths = torch.full((problem.batch,), problem.len_k, dtype=torch.int32, device=device)
    return _Cache(problem, made(problem.batch, 1, problem.heads_q, problem.dim_qk), k, v, table, lengths)


def _latent(device: torch.device, filled: bool = True) -> _Cache:
    problem = PagedProblem.parse(f"{LATENT} causal paged64")
    return _cache(problem, device, filled, problem.dtype)


def _latent_variants(cache: _Cache, short: bool) -> dict[str, Callable]:
    sms = Device.of(cache.q).sms
    tiles, shares = (SHORT_LATENT, (2,)) if short else (LATENT_TILES, (1, 2, 4))
    found = {f"[{tile} p{n * sms}]": cache.call(f"split_kv[{tile} p{n * sms}]") for tile in tiles for n in shares}
    if not latent.refuses(cache.problem, Device.of(cache.q), "forward"):
        shares = ("x1", *(f"p{n * sms}" for n in ((1,) if short else (1, 2, 3))))
        spelled = [f"[{LATENT_HOPPER} {how}]" for how in shares]
        found |= {f"latent {tile}": cache.call(f"latent{tile}") for tile in spelled}
    return found


def _first(cache: _Cache, scale: float) -> tuple[Problem, Operands]:
    """The first sequences as a packed call, keys and values in 16 bits; `scale`: a power of two."""
    problem = cache.problem
    few, keys = CHECKED, CHECKED * problem.len_k
    packed = problem.with_(packed=True, batch=few, len_q=few, len_k=keys, eight_bits=False)
    k, v = ((t[cache.table[:few].long()].float() * scale).to(problem.dtype) for t in (cache.k, cache.v))
    cu_q, cu_k = (torch.arange(few + 1, dtype=torch.int32, device=k.device) * n for n in (1, problem.len_k))
    return packed, Operands(cache.q[:few].flatten(0, 1), k.flatten(0, 2), v.flatten(0, 2), cu_q, cu_k)


def _sweep_latent(device: torch.device, options) -> list[dict]:
    cache = _latent(device)
    moved = bytes_moved(cache.problem, cache.problem.batch * cache.problem.len_k)
    return _timed(f"{cache.problem}", *_first(cache, 1.0), _latent_variants(cache, options.short), moved, device, options)


def _eight_bits_variants(
    device: torch.device, short: bool, filled: bool = True
) -> list[tuple[str, _Cache, dict[str, Callable]]]:
    """Pages in 16 bits, in 8 with scales of heads, and with scales of pages."""
    problem = PagedProblem.parse(EIGHT_BITS)
    wide = _cache(problem, device, filled, problem.dtype)
    narrow = _cache(problem.with_(eight_bits=True), device, filled, torch.float8_e4m3fn)
    scale = torch.full((narrow.k.shape[0], problem.heads_k), 2.0**-5, device=device)
    sms = Device.of(wide.q).sms
    of_heads = {"k_scale": scale[0].clone(), "v_scale": scale[0].clone()}
    of_pages = {"k_scale": scale, "v_scale": scale}
    found = []
    for name, cache, scales, shares in (
        ("16 bits", wide, {}, (2, 4)),
        ("8 bits", narrow, of_heads, (1, 2, 3, 4, 8)),
        ("8 bits, scales of pages", narrow, of_pages, (2, 4)),
    ):
        tiles: dict[str, tuple[int, ...]] = dict.fromkeys(EIGHT_BITS_TILES, shares)
        if short:
            tiles = SHORT_SIXTEEN if cache is wide else SHORT_EIGHT_BITS
        spelled = [f"{tile} p{n * sms}" for tile, each in tiles.items() for n in each]
        found.append((name, cache, {f"{name} [{one}]": cache.call(f"split_kv[{one}]", **scales) for one in spelled}))
    return found


def _sweep_eight_bits(device: torch.device, options) -> list[dict]:
    rows = []
    for name, cache, calls in _eight_bits_variants(device, options.short):
        first = _first(cache, 1.0 if name == "16 bits" else 2.0**-5)
        stored = sum(t.numel() * t.element_size() for t in (cache.k, cache.v))
        rows += _timed(f"{cache.problem} {name}", *first, calls, bytes_moved(cache.problem, 0) + stored, device, options)
    return rows
