"""Arguments, grids and launches of the decode and the combine kernel, for `plan/split_kv.py`, of append and merge.

`calls` is pure, as the functions of `launch.py` are; `Paged` serves `ops_paged`, `launch.Forward` calls over dense keys.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Optional

import torch
import triton

from rowmax.kernels import launch, scratch
from rowmax.kernels.launch import Call, _bounded, _cap, _padded, _strides
from rowmax.kernels.triton.append import append_kernel
from rowmax.kernels.triton.combine import combine_kernel
from rowmax.kernels.triton.decode import decode_kernel
from rowmax.kernels.triton.merge import merge_kernel
from rowmax.numerics import LOG2E
from rowmax.paged import MOST_E4M3, AppendOperands, PagedOperands, PagedProblem
from rowmax.plan import Plan
from rowmax.plan.split_kv import SplitTile, latent, least_turns, most_parts, padded_dims, row_tiles
from rowmax.plan.tile import Tile
from rowmax.problem import Operands, Problem

PIECE = 16  # rows of a combine program, of tiles with more
LARGE_PAGE = 256  # slots; sizes of larger pages are run-time numbers: a contiguous cache is one page a sequence
WIDE = 4096  # of elements that a combine program holds
PARTS_AT_ONCE = 16  # that a combine program loads together


def has_work(problem: Problem) -> bool:
    return min(problem.batch, problem.len_q, problem.heads_q) > 0


def slots_of(problem: Problem, tile: SplitTile) -> int:
    """Partial results that there may be; 0: none, and no combine kernel."""
    if tile.how == "p":  # items with several parts have at most twice as many as there is work for (`parts.shares`)
        return 2 * tile.parts
    parts = parts_of(problem, tile)
    return row_tiles(problem, tile.block_m) * problem.heads_k * parts if parts > 1 else 0


def parts_of(problem: Problem, tile: SplitTile) -> int:
    """Parts of an item at most, each with a program of its own; of all together, if that is what is given."""
    if tile.how == "c":
        return most_parts(problem, tile)
    return 1 if tile.how == "r" else tile.parts


def part_rows(problem: Problem, tile: SplitTile) -> int:
    """Rows of a tile that may be there."""
    return min(tile.block_m, problem.len_q * problem.group)


def part_elements(problem: Problem, tile: SplitTile) -> int:
    """fp32 numbers of all partial results."""
    return slots_of(problem, tile) * part_rows(problem, tile) * (problem.dim_v + 2)


def counters_of(problem: Problem, tile: SplitTile) -> int:
    """int32 numbers of the programs that have ended."""
    return slots_of(problem, tile) if tile.once else 0


def calls(
    problem: Problem,
    operands: PagedOperands,
    tile: SplitTile,
    out,
    lse,
    parts: Optional[torch.Tensor],
    early: bool = False,
    scores: tuple = (),
    ended: Optional[torch.Tensor] = None,
) -> tuple[Call, ...]:
    """The decode kernel and, where row tiles may have several parts that it does not combine itself, the combine kernel.

    Args:
        operands: of a dense problem with None for the block table and the lengths.
        parts: fp32 memory of `part_elements`, or None where that is 0.
        scores: slopes and sink of a problem that is not plain.
        early: the combine kernel may begin before the decode kernel has ended (compute capability 9.0 and newer).
        ended: int32 memory of `counters_of`, all zeros, or None where that is 0.
    """
    q, k, v, table, lengths, cu, k_scale, v_scale = operands
    paged = isinstance(problem, PagedProblem)
    block_d, block_d2, block_dv = padded_dims(problem)
    shared = block_d == block_dv and _first_columns(v, k)
    tile = _fitting(problem, tile, shared)
    if _in_pairs(problem, operands, tile):
        k, v = k.view(torch.int16), v.view(torch.int16)
    tiles = row_tiles(problem, tile.block_m)
    items = tiles * problem.heads_k
    own_tiles = tiles // max(problem.batch, 1)  # of a sequence; of no meaning if packed
    slots = slots_of(problem, tile)
    parts_each = parts_of(problem, tile)
    programs = items + (parts_each // problem.heads_k + 1) * problem.heads_k if tile.how == "p" else items * parts_each
    q_strides, o_strides = _row_strides(q, problem), _row_strides(out, problem)
    several = problem.packed or problem.len_q > 1 or problem.band[0] is not None  # tiles may hold keys that a row does not see
    alike = shared or _strides(k) == _strides(v)  # rows of both lie equally far apart
    pages = k.shape[0] if paged else 0
    page_size = problem.page_size if isinstance(problem, PagedProblem) else 0
    batch_block = triton.next_power_of_2(problem.batch) if tile.how == "p" else 0
    fixed = (tile.parts if tile.how in "cr" else 0, tile.doubles)
    early = early and slots > 0 and not tile.once
    rows = part_rows(problem, tile)
    joined = at_once = 1  # by the decode kernel: rows, and parts that are loaded together
    if tile.once:
        joined = min(triton.next_power_of_2(rows), max(WIDE // block_dv, 1))
        at_once = _at_once(tile, items, parts_each, joined * block_dv, tile.warps)
    sizes = (problem.batch, problem.heads_k, own_tiles, problem.len_q, problem.len_k)
    shape = (problem.group, problem.dim_qk, problem.dim_v, tile.block_m, tile.block_n, block_d, block_d2, block_dv)
    given = scores if ended is None else (*(scores or (None, None)), ended)
    none = (None,) * (3 - len(given))  # a tensor costs the host time on every call, a constant none
    numbers: tuple = (
        *(*none, q_strides, _strides(k), _strides(v), o_strides, _cap(problem)),
        *(problem.heads_q if problem.alibi == "batch" else 0, table.stride(0) if table is not None else 0),
        *(problem.scale * LOG2E, _bounded(problem), *sizes, pages, page_size, parts_each, slots),
        *(rows, *shape),
        *(page_size if page_size <= LARGE_PAGE else -math.gcd(page_size, LARGE_PAGE), shared, alike, several),
        *(least_turns(tile.block_n), batch_block, *fixed, 2 * tile.stages - 1 if paged else tile.stages, early),
        *(_by_page(k_scale, v_scale), joined, at_once),
    )
    # Stages: Triton counts those of the page ids and of the keys, each as far ahead of what needs them as the other.
    tensors: tuple = (q, k, v, out, lse, parts, table, lengths, cu, k_scale, v_scale, *given)
    decode = Call(decode_kernel, programs, tensors, numbers, tile)
    if not slots or tile.once:
        return (decode,)
    piece = 1 if rows <= 16 else min(PIECE, max(WIDE // block_dv, 1))
    pieces = -(-rows // piece)
    warps = max(min(piece * block_dv // 512, 4), 1)
    at_once = _at_once(tile, items, parts_each, piece * block_dv, warps)
    numbers = (
        *(*(None,) * (1 - len(scores[1:])), o_strides, _bounded(problem), *sizes, parts_each, slots, rows, pieces),
        *(problem.group, problem.dim_v, tile.block_m, tile.block_n, block_dv),
        *(piece, least_turns(tile.block_n), batch_block, *fixed, early, at_once),
    )
    tensors = (out, lse, parts, lengths, cu, *scores[1:])
    return decode, Call(combine_kernel, items * pieces, tensors, numbers, Tile(piece, 1, warps, 1), early)


def _at_once(tile: SplitTile, items: int, parts_each: int, numbers: int, warps: int) -> int:
    """Parts whose `numbers` each are loaded together."""
    each = max(numbers // (32 * warps), 1)  # that a thread holds
    likely = -(-tile.parts // items) if tile.how == "p" else parts_each  # parts of an item
    return max(min(triton.next_power_of_2(likely), PARTS_AT_ONCE, 64 // each), 1)


def _row_strides(tensor: torch.Tensor, problem: Problem) -> tuple[int, int, int]:
    """(batch, row, head) of a tensor like q; one without rows, `[B, H, D]`, has one row a sequence."""
    if tensor.dim() == 3 and not problem.packed:
        return tensor.stride(0), 0, tensor.stride(1)
    return _strides(tensor)


def _fitting(problem: Problem, tile: SplitTile, shared: bool) -> SplitTile:
    """The tile; where values lie apart from the keys, of one that counts on their being the keys' first columns what fits then.
    It has no more partial results than there is memory for: as many parts, of half the rows."""
    if shared or not latent(problem) or (tile.block_n, tile.warps, tile.stages) != (64, 8, 2):
        return tile
    return replace(tile, block_m=min(tile.block_m, 32), block_n=32)


def _in_pairs(problem: Problem, operands: PagedOperands, tile: SplitTile) -> bool:
    """Does the kernel read e4m3 two by two (`decode._walk_pairs`)? Where it can: whole pairs, one scale for a tile of keys."""
    q, k, v, *_, v_scale = operands
    if k.dtype != torch.float8_e4m3fn or q.dtype != torch.bfloat16 or padded_dims(problem)[1] or _first_columns(v, k):
        return False
    assert isinstance(problem, PagedProblem)
    odd = (x % 2 for t in (k, v) for x in (t.shape[-1], t.data_ptr(), *t.stride()[:-1]))
    if any(odd) or min(problem.dim_qk, problem.dim_v) <= 16:
        return False
    return not _by_page(v_scale) or problem.page_size % tile.block_n == 0


def _by_page(*scales: Optional[torch.Tensor]) -> bool:
    return any(scale is not None and scale.dim() == 2 for scale in scales)


def _first_columns(v: torch.Tensor, k: torch.Tensor) -> bool:
    """Is v the first columns of k, in the same memory?"""
    return v.data_ptr() == k.data_ptr() and v.stride() == k.stride() and v.shape[-1] <= k.shape[-1] and v.numel() > 0


def dense(problem: Problem, operands: Operands, tile: SplitTile, out, lse) -> Any:
    """One call over dense keys; returns a function of `(q, k, v, out, lse, None, None, *scores)` that makes it again, on the
    current device (None under the interpreter)."""
    elements = part_elements(problem, tile)

    def memory(like):
        return like.new_empty(elements, dtype=torch.float32) if elements else None

    q, k, v = operands[:3]
    scores = () if problem.plain else (operands.slopes, operands.sink)
    again = run(problem, PagedOperands(q, k, v, None, None), tile, out, lse, memory(q), scores)
    if again is None:
        return None

    def once_more(q, k, v, out, lse, _cu_q, _cu_k, *scores):
        parts = memory(q)
        again(*map(launch._address, (q, k, v, out, lse, parts, None, None, None, None, None, *scores[:2])))

    return once_more


class Paged:
    """Calls over a paged cache that differ in nothing but the addresses of their tensors; all else is worked out once."""

    def __init__(self, problem: PagedProblem, plan: Plan, out_shape, lse_shape):
        (tile,) = plan.tiles
        assert isinstance(tile, SplitTile)  # `plan` checked it
        self._problem, self._tile = problem, tile
        self._launch: Any = run
        if plan.algorithm == "latent":
            from rowmax.kernels import latent_launch

            self._launch = latent_launch.run
        self._out_shape, self._lse_shape = out_shape, lse_shape
        self._elements = part_elements(problem, tile)
        self._fill = problem.packed  # rows outside every sequence are written by nobody
        self._has_work = has_work(problem)
        self._like_q = not self._fill and problem.dim_qk == problem.dim_v  # a third faster than from a shape
        self._again: Any = None

    def __call__(self, need_lse: bool, out: Optional[torch.Tensor], tensors: tuple):
        """`(out, lse)`; `out` is made where none is given, lse is None unless it is needed. `tensors`: as `PagedOperands`."""
        q, k, v, table, lengths, cu, k_scale, v_scale = tensors
        if out is None:
            if self._like_q:
                out = torch.empty_like(q, memory_format=torch.contiguous_format)
            else:
                out = q.new_zeros(self._out_shape) if self._fill else q.new_empty(self._out_shape)
        elif self._fill:
            out.zero_()
        lse = q.new_empty(self._lse_shape, dtype=torch.float32) if need_lse else None
        if self._fill and lse is not None:
            lse.fill_(-torch.inf)
        if not self._has_work:
            return out, lse
        parts = q.new_empty(self._elements, dtype=torch.float32) if self._elements else None
        if self._again is None or q.device.index != torch.cuda.current_device():
            self._again = self._launch(self._problem, PagedOperands(*tensors), self._tile, out, lse, parts)
            return out, lse
        self._again(
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), None if lse is None else lse.data_ptr()),
            *(None if parts is None else parts.data_ptr(), table.data_ptr(), lengths.data_ptr()),
            *(None if cu is None else cu.data_ptr(), None if k_scale is None else k_scale.data_ptr()),
            None if v_scale is None else v_scale.data_ptr(),
        )
        return out, lse

    def into(self, operands: PagedOperands, out: torch.Tensor, lse: Optional[torch.Tensor]) -> Callable[[], None]:
        """A function that computes into `out` and `lse` what these tensors then hold; its calls must follow one another."""
        q, k, v, *others = operands
        parts = q.new_empty(self._elements, dtype=torch.float32) if self._elements else None
        addresses = tuple(map(launch._address, (q, k, v, out, lse, parts, *others)))
        index = q.device.index

        def compute():
            if self._fill:
                out.zero_()
                if lse is not None:
                    lse.fill_(-torch.inf)
            if not self._has_work:
                return
            if self._again is None or index != torch.cuda.current_device():
                self._again = self._launch(self._problem, operands, self._tile, out, lse, parts)
            else:
                self._again(*addresses)

        return compute


def run(problem: Problem, operands: PagedOperands, tile: SplitTile, out, lse, parts, scores: tuple = ()) -> Any:
    """Launch both kernels; returns a function of their addresses that does so again (None under the interpreter)."""
    device = operands.q.device
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    counters = counters_of(problem, tile)
    ended = operands.q.new_zeros(counters, dtype=torch.int32) if counters else None
    made = calls(problem, operands, tile, out, lse, parts, early, scores, ended)
    builds = launch.launch_all(device, made)
    if None in builds:
        return None
    return _Again([(build, call.numbers) for build, call in zip(builds, made, strict=True)], out.new_empty(0), counters)


class _Again:
    """The launches of a call, for other addresses, on the device that was current when they were built."""

    def __init__(self, launches: list, like: torch.Tensor, counters: int):
        self.launches = launches
        self._like, self._counters = like, counters
        self._stream = launches[0][0].stream
        self._decode, self._numbers = launches[0][0].enqueue, launches[0][1]
        self._combine: Optional[Callable] = None
        self._more: tuple = ()
        if len(launches) > 1:
            self._combine, self._more = launches[1][0].enqueue, launches[1][1]

    def __call__(self, q, k, v, out, lse, parts, table, lengths, cu, k_scale, v_scale, *scores) -> None:
        stream = self._stream()
        if self._counters:
            key, ended = scratch.take(self._like, self._like.device.index, stream, self._counters, lasting=True)
            scores = (*(scores or (None, None)), ended.data_ptr())
            self._decode(stream, q, k, v, out, lse, parts, table, lengths, cu, k_scale, v_scale, *scores, *self._numbers)
            scratch.give_back(key, ended)
            return
        self._decode(stream, q, k, v, out, lse, parts, table, lengths, cu, k_scale, v_scale, *scores, *self._numbers)
        if self._combine is not None:
            self._combine(stream, out, lse, parts, lengths, cu, *scores[1:], *self._more)


def append_call(operands: AppendOperands, interleaved: bool) -> Call:
    """Validated operands; there are rows, heads and sequences."""
    k_pages, v_pages, k, v, table, lengths, cu, cos, sin, k_scale, v_scale = operands
    packed = cu is not None
    if k.dim() == 3 and not packed:
        k, v = k.unsqueeze(1), None if v is None else v.unsqueeze(1)
    heads, dim = k.shape[-2:]
    dim_v = dim if v is None else v.shape[-1]
    like = k if v is None else v
    pages_like = k_pages if v_pages is None else v_pages
    rows = k.shape[0] if packed else k.shape[0] * k.shape[1]
    numbers = (
        *(_strides(k), _strides(like), _strides(k_pages), _strides(pages_like), table.stride(0)),
        *(*(0 if angle is None else angle.stride(0) for angle in (cos, sin)), lengths.shape[0]),
        *(heads, k.shape[0] if packed else k.shape[1], table.shape[1], k_pages.shape[0], k_pages.shape[1]),
        *(0 if cos is None else cos.shape[0], dim, dim_v, _padded(dim), _padded(dim_v)),
        *(1 if cos is None else cos.shape[1], interleaved, MOST_E4M3, _by_page(k_scale, v_scale)),
    )
    tensors = (k, v, k_pages, v_pages, table, lengths, cu, cos, sin, k_scale, v_scale)
    return Call(append_kernel, rows * heads, tensors, numbers, Tile(1, 1, 1, 1))


def append(operands: AppendOperands, interleaved: bool) -> None:
    if operands.k.numel() and len(operands.seqlens_k):
        launch._launch(operands.k.device, append_call(operands, interleaved))


MERGED = 16  # rows of a merge program


def merge_call(a: torch.Tensor, a_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, len_q: int) -> Call:
    """a and out `[rows, H, Dv]`; see `merge_kernel`."""
    rows, heads, dim_v = out.shape
    numbers = (a.stride()[:2], out.stride()[:2], rows, heads, len_q, dim_v, _padded(dim_v), MERGED)
    return Call(merge_kernel, -(-rows // MERGED) * heads, (a, a_lse, out, lse), numbers, Tile(MERGED, 1, 4, 1))


def merge_into(a: torch.Tensor, a_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, len_q: int) -> None:
    """Attention over the keys of both parts, in the place of the second."""
    if out.numel():
        launch._launch(out.device, merge_call(a, a_lse, out, lse, len_q))
