"""The Hopper forward of a plan: its launches, and these once more for other tensors. Called by `launch.Forward`.

What puts packed sequences in order, the forward, and the guard behind it that computes suspect rows once more.
"""

from collections.abc import Callable
from typing import Any, Optional

import torch
import triton

from rowmax.kernels import scratch
from rowmax.kernels.launch import (
    Call,
    _bounded,
    _cap,
    _constants,
    _given,
    _prescaled,
    _programs,
    _row_tiles,
    _strides,
    launch_all,
)
from rowmax.mask import Band
from rowmax.numerics import LOG2E
from rowmax.plan.hopper import ROWS as CONSUMER_ROWS
from rowmax.plan.hopper import HopperTile, cap_factor, given_stages, out_columns, padded_dims, steady_for
from rowmax.plan.hopper_backward import number_bytes
from rowmax.plan.tile import Tile
from rowmax.problem import Operands, Problem

GUARDED_FLAGS = 16  # of 64 rows each that a program of a guard looks at together: it computes suspect ones after one another
EARLY = not triton.knobs.runtime.interpret  # the guard kernel is launched while the forward runs, and waits for it
GIVEN_AT = 15  # of the forward's tensors
ALIGNED = 16  # elements, of any type a multiple of 16 bytes
TMA_BYTES = 128  # of shared memory: it writes to multiples of this
SHORT_CAP = 30.0  # from here on most scores are below 0.2 caps: up to 6 where normal ones of variance 1 reach 4 to 5
SMS = 132  # of an H100 or H200, where no device is at hand to ask


def run(problem: Problem, operands: Operands, tile: HopperTile, out, lse) -> "Optional[Again]":
    """Computes into out and lse; returns what does so for other tensors of this form (None under the interpreter)."""
    calls = hopper_calls(problem, operands, tile, out, lse)
    builds = launch_all(out.device, calls)
    return None if None in builds else Again(calls, builds, out.device.index)


class Again:
    """The launches for other addresses, on the device that was current when they were built."""

    def __init__(self, calls: tuple[Call, ...], builds: list, device_index: int):
        *_, forward, _ = calls
        *self._order, self._forward, self._guard = builds  # the first is there for packed sequences only
        sources = (*forward.tensors[:6], forward.tensors[GIVEN_AT])
        self._sources = self._forward.descriptors(tuple(source for source in sources if source is not None))
        self._is_given = forward.tensors[GIVEN_AT] is not None
        self._dynamic = forward.tensors[9] is not None
        self._size = scratch.FLAGS_AT + forward.tensors[8].numel()
        self._numbers = [call.numbers for call in calls]
        self._device_index = device_index

    def __call__(self, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *scores) -> None:
        stream = self._forward.stream()
        key, memory = scratch.take(q, self._device_index, stream, self._size)
        launches, _order = self._launches(memory, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *scores)
        for launcher, arguments in launches:
            launcher.enqueue(stream, *arguments)
        scratch.give_back(key, memory)

    def bind(self, *tensors) -> Callable[[], None]:
        """The same for tensors that stay, with memory of its own. The caller keeps the tensors."""
        memory = tensors[0].new_zeros(self._size, dtype=torch.int32)
        launches, order = self._launches(memory, *tensors)

        def run(memory=(memory, order)):
            stream = self._forward.stream()
            for launcher, arguments in launches:
                launcher.enqueue(stream, *arguments)

        return run

    def _launches(
        self, memory, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, slopes=None, sink=None, bias=None, mask=None, seed=None, *_
    ) -> tuple[list, Optional[torch.Tensor]]:
        """Launchers with their arguments, and memory that lasts until they have run."""
        slopes, sink, bias, mask, seed = (None if t is None else t.data_ptr() for t in (slopes, sink, bias, mask, seed))
        counter, order, order_address = memory.data_ptr(), None, None
        if self._order:
            order = q.new_empty(2 * cu_seqlens_q.numel() - 1, dtype=torch.int32)
            cu_seqlens_q, cu_seqlens_k, order_address = cu_seqlens_q.data_ptr(), cu_seqlens_k.data_ptr(), order.data_ptr()
        q, k, v, out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        lse = None if lse is None else lse.data_ptr()
        flags = counter + 4 * scratch.FLAGS_AT
        *sources, given_source = self._sources if self._is_given else (*self._sources, None)
        rest = (None, None) if len(sources) == 4 else (*sources[4][q], *sources[5][k])
        given = (None,) if given_source is None else given_source[mask if bias is None else bias]
        *first, numbers, guard_numbers = self._numbers
        forward = (
            *(*sources[0][q], *sources[1][k], *sources[2][v], *sources[3][out], *rest, out if self._order else None),
            *(lse, flags, counter if self._dynamic else None, cu_seqlens_q, cu_seqlens_k, order_address),
            *(slopes, sink, *given, seed, *numbers),
        )
        guard = (q, k, v, out, lse, flags, cu_seqlens_q, cu_seqlens_k, slopes, sink, bias, mask, seed, *guard_numbers)
        launches = [(self._forward, forward), (self._guard, guard)]
        if self._order:
            launches.insert(0, (self._order[0], (cu_seqlens_q, cu_seqlens_k, order_address, *first[0])))
        return launches, order


def hopper_calls(problem: Problem, operands: Operands, tile: HopperTile, out, lse) -> tuple[Call, ...]:
    """What puts packed sequences in order, the Hopper forward, and the kernel that computes suspect rows once more."""
    from rowmax.kernels.gluon.build import Build
    from rowmax.kernels.gluon.forward import forward_kernel as hopper_kernel
    from rowmax.kernels.gluon.guard import guard_kernel
    from rowmax.kernels.gluon.order import MOST, order_kernel

    q, k, v, cu_seqlens_q, cu_seqlens_k = operands[:5]
    block_d, block_d2, block_dv = padded_dims(problem)
    block_o = out_columns(problem, tile)
    flags, flag_tiles = hopper_flags(problem)
    memory = q.new_zeros(scratch.FLAGS_AT + flags, dtype=torch.int32)
    suspect, counter = memory[scratch.FLAGS_AT :], memory[:1] if tile.schedule == "dynamic" else None
    sources = (
        *(_descriptor(q, CONSUMER_ROWS, block_d), _descriptor(k, tile.block_n, block_d)),
        *(_descriptor(v, tile.block_n, block_dv), _descriptor(out, CONSUMER_ROWS, block_o)),
        *((_descriptor(q, CONSUMER_ROWS, block_d2), _descriptor(k, tile.block_n, block_d2)) if block_d2 else (None, None)),
    )
    order: Optional[torch.Tensor] = None
    first: tuple[Call, ...] = ()
    numbers: tuple
    if problem.packed:
        order = q.new_empty(2 * problem.batch + 1, dtype=torch.int32)
        sort = problem.batch <= MOST
        numbers = (problem.batch, problem.len_q, problem.len_k, tile.block_m, triton.next_power_of_2(problem.batch), sort)
        first = (Call(order_kernel, 1, (cu_seqlens_q, cu_seqlens_k, order), numbers, Tile(1, 1, 4, 1)),)
    tiles = _row_tiles(problem, problem.len_q, tile.block_m)
    total = _programs(problem, tiles, problem.heads_q)
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else SMS
    banded, skips = _hidden(problem, tile, problem.packed and cu_seqlens_q is cu_seqlens_k)
    prescale, cap = _scored(problem)
    kind, rows, own_b, own_h, stages, apart = given_of(
        problem, operands, CONSUMER_ROWS, tile.block_n, given_stages(problem, tile)
    )
    build = Build(
        *(problem.packed, lse is not None, problem.group, problem.dim_v, tile.block_n, block_d, block_d2, block_dv, block_o),
        *(banded, skips, prescale, cap is not None, problem.softcap >= SHORT_CAP, tile.steady and steady_for(problem, banded)),
        *(alibi_of(problem), problem.sink, problem.alibi == "batch"),
        kind,
        *(rows, own_b, own_h, stages, apart),
        problem.dropout > 0,
        *(tile.stages, tile.q_stages, tile.consumers),
        *(tile.pingpong, tile.lazy),
        tile.schedule,
        *tile.registers(),
    )
    scores, pairs = (operands.slopes, operands.sink), _given(problem, operands)
    numbers = (
        *(problem.scale * LOG2E, cap, pairs[5], _bounded(problem), problem.batch, problem.heads_q, tiles),
        *(_heads_together(problem, tile), total),
        *(problem.len_q, problem.len_k, build),
    )
    tensors: tuple = (*sources, out if problem.packed else None, lse, suspect, counter, cu_seqlens_q, cu_seqlens_k, order)
    tensors = (*tensors, *scores, given_descriptor(problem, operands, CONSUMER_ROWS, tile.block_n), pairs[2])
    forward = Call(hopper_kernel, min(sms, total), tensors, numbers, tile)

    again = guard_tile(problem, CONSUMER_ROWS)
    numbers = (
        *(_strides(q), _strides(k), _strides(v), _strides(out), *pairs[3:]),
        *(problem.scale * LOG2E, _cap(problem)),
        *(_bounded(problem), problem.batch, problem.heads_q, flag_tiles, flags, problem.len_q, problem.len_k),
        *(*_constants(problem, again), _prescaled(problem), again.stages, GUARDED_FLAGS, EARLY, problem.alibi == "batch"),
    )
    tensors = (q, k, v, out, lse, suspect, cu_seqlens_q, cu_seqlens_k, *scores, *pairs[:3])
    guard = Call(guard_kernel, min(2 * sms, flags), tensors, numbers, again, EARLY)
    return *first, forward, guard


def guard_tile(problem: Problem, rows: int) -> Tile:
    """With which the guard kernel computes so many rows once more."""
    return Tile(rows, 64 if max(problem.dim_qk, problem.dim_v) <= 128 else 32, 4, 2)


def _scored(problem: Problem) -> tuple[bool, Optional[float]]:
    """Whether scores are scaled before anything else, and the factor of a soft-cap's argument (`gluon/scores.py`), or None.

    A scale behind the maximum must be positive; slopes are divided by it, and powers of the factor must not overflow. A bias
    is added in units of log2.
    """
    if not problem.softcap:
        return problem.scale <= 0 or problem.bias != "" or (problem.alibi != "" and problem.scale < 1e-6), None
    return cap_factor(problem)


def alibi_of(problem: Problem) -> str:
    """For a kernel's `ALIBI`."""
    ahead = problem.band.right != 0 or getattr(problem.band, "prefix", None) is not None
    return "" if not problem.alibi else "around" if ahead else "behind"


def hopper_flags(problem: Problem) -> tuple[int, int]:
    """How many flags the Hopper forward leaves for its guard, and of them for each head."""
    tiles = _row_tiles(problem, problem.len_q, CONSUMER_ROWS)
    return _programs(problem, tiles, problem.heads_q), tiles


def _hidden(problem: Problem, tile: HopperTile, alike: bool) -> tuple[bool, bool]:
    """Whether, behind the first key tile that a consumer takes, some may be hidden from some rows, and whether it skips some.

    With a causal mask the diagonal of 64 rows lies within one key tile if both start at multiples of 64: then a consumer that
    leaves out the key tiles behind it has to mask its first one only. `alike`: packed sequences have as many keys as queries.
    What a packed consumer would skip is not known.
    """
    if problem.band == Band():
        return False, False
    shift = 0 if alike else problem.len_k - problem.len_q
    if (problem.packed and not alike) or problem.band != Band(None, 0) or shift % CONSUMER_ROWS or tile.block_n % CONSUMER_ROWS:
        return True, False
    starts = [(i * tile.block_m + shift) % tile.block_n for i in range(tile.block_n // CONSUMER_ROWS)]
    most = max((start + tile.block_m - 1) // tile.block_n - (start + CONSUMER_ROWS - 1) // tile.block_n for start in starts)
    # What is given for pairs is fetched for every key tile: none is skipped.
    return (False, most > 0) if most < (1 if problem.pairs or alike else tile.stages) else (True, False)


def _descriptor(tensor: torch.Tensor, rows: int, columns: int) -> Any:
    """TMA's view of `[B, T, H, D]` (B = 1 if packed): boxes of one head, zero-filled past every end."""
    from triton.experimental.gluon.language import bfloat16, float16
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from rowmax.kernels.gluon.layouts import tile_layout

    shape, strides = tuple(tensor.shape), tensor.stride()
    if tensor.dim() == 3:
        shape, strides = (1, *shape), (tensor.shape[0] * strides[0], *strides)
    layout = tile_layout(rows, columns, bfloat16 if tensor.dtype == torch.bfloat16 else float16)
    return TensorDescriptor(tensor, shape, strides, [1, rows, 1, columns], layout)


def given_of(problem: Problem, operands: Operands, rows: int, keys: int, stages: int) -> tuple:
    """For a `Build`: bias or mask, rows of a tile, what has its own, tiles in flight, and those from one buffer to the next.

    A dimension of stride 0 is taken as one of size 1.
    """
    name, own_b, own_h, own_q = "", False, False, False
    if problem.pairs:
        name, tensor = ("bias", operands.bias) if problem.bias else ("mask", operands.mask)
        own_b, own_h, own_q, _ = _own(tensor)
    rows = rows if own_q else 1
    return name, rows, int(own_b), int(own_h), stages, max(TMA_BYTES // (rows * keys * number_bytes(problem)), 1)


def _own(tensor) -> list[bool]:
    return [size > 1 and stride > 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def given_descriptor(problem: Problem, operands: Operands, rows: int, columns: int, turned: bool = False) -> Any:
    """TMA's view of a bias or of a mask `[B|1, H|1, Q|1, K]`: boxes of so many rows, or of one where queries share it.

    turned: scores are transposed.
    """
    if not problem.pairs:
        return None
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from rowmax.kernels.gluon.layouts import given_layout

    bias, mask = _given(problem, operands)[:2]
    tensor = mask if bias is None else bias
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32, torch.uint8: gl.uint8}
    own = _own(tensor)
    shape = [size if has else 1 for size, has in zip(tensor.shape, own, strict=True)]
    # Where the size is 1 a stride is not added to anything, but it has to be one that TMA takes.
    strides = [stride if has else ALIGNED for stride, has in zip(tensor.stride(), own, strict=True)]
    rows = rows if own[2] else 1
    layout = given_layout(rows, columns, kinds[tensor.dtype], turned)
    return TensorDescriptor(tensor, (*shape[:3], tensor.shape[3]), (*strides[:3], 1), [1, 1, rows, columns], layout)


def _heads_together(problem: Problem, tile: HopperTile) -> int:
    """Query heads whose K/V take `group_mb` of L2 together; at least those that share a KV head."""
    keys = problem.len_k
    if problem.packed:
        keys = problem.max_len_k or -(-problem.len_k // max(problem.batch, 1))
    head_bytes = max(keys, 1) * (problem.dim_qk + problem.dim_v) * 2
    heads = max((tile.group_mb << 20) // head_bytes, 1) * problem.group
    return min(heads, problem.heads_q * (1 if problem.packed else problem.batch))
