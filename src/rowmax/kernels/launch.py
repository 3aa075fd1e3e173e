"""Plan and operands to arguments, grid and launch: the only place that launches a kernel.

`*_call` functions are pure: they give a `Call` from tensors of any device, so that tests compile exactly what is launched, for
any GPU, without one.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, Optional

import torch
import triton

from rowmax.kernels import kept
from rowmax.kernels.direct import Launcher
from rowmax.mask import AnyBand
from rowmax.numerics import LOG2E
from rowmax.plan import Plan
from rowmax.plan.generations import BY_NAME
from rowmax.plan.hopper import HopperTile
from rowmax.plan.hopper_backward import bias_tile
from rowmax.plan.split_kv import SplitTile
from rowmax.plan.tile import Tile
from rowmax.problem import Operands, Problem

# Kernels are imported where they are launched: Triton reads their sources again, 1 ms for each function.
MAX_BUILDS = 4096  # keys hold lengths, so that a server may meet any number of them
OUTSIDE_ROWS = 64  # of a program that clears rows
ROW_ELEMENTS = 4096  # of the output, for a program of the row kernel: bound by memory, any size without spills does


class Call(NamedTuple):
    """A kernel, how many programs, its leading arguments (tensors or None), the others (all hashable), and warps and stages.

    `early`: it may start before the launch in front of it has come to its end, for which it waits by itself.
    """

    kernel: Any
    programs: int
    tensors: tuple[Any, ...]  # for a Gluon kernel also descriptors
    numbers: tuple
    tile: Tile
    early: bool = False


class Forward:
    """The forward of calls that differ in nothing but the addresses of their tensors; all else is worked out once."""

    def __init__(self, problem: Problem, plan: Plan, need_lse: bool):
        self._problem, self._tile, self._algorithm = problem, plan.tiles[0], plan.algorithm
        self._out_shape, self._lse_shape = problem.outputs()
        self._need_lse, self._plain = need_lse, problem.plain
        self._has_work = _has_work(problem)
        self._clear = problem.packed or not self._has_work  # there may be rows that the forward does not write
        self._again: dict[bool, Any] = {}  # have queries and keys one `cu_seqlens`? -> launches of calls after the first
        self._clear_again: Any = None
        self._like_q = not self._clear and problem.dim_qk == problem.dim_v  # a third faster than from a shape

    def __call__(
        self, q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, *scores: Optional[torch.Tensor]
    ) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
        """`(out, lse)`; lse is None unless it is needed. `scores`: the other operands, of which plain problems have none."""
        if self._like_q:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        else:
            out = q.new_empty(self._out_shape)
        lse = q.new_empty(self._lse_shape, dtype=torch.float32) if self._need_lse else None
        if self._clear:
            self._clear_rows(out, lse, cu_seqlens_q, scores)
        if self._has_work:
            self._run(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *(() if self._plain else scores))
        return out, lse

    def _clear_rows(self, out, lse, cu_seqlens_q, scores) -> None:
        """Rows that the forward does not write: those outside every sequence, or all."""
        if not self._has_work:
            out.zero_()
            if lse is not None:
                lse.fill_(-torch.inf)
                if self._problem.sink:
                    _scored().rows_of_sinks(lse, scores[1], cu_seqlens_q)
        elif self._clear_again is not None and out.device.index == torch.cuda.current_device():
            self._clear_again(out, lse, cu_seqlens_q)
        else:
            call = outside_call(cu_seqlens_q, out, lse=lse)
            build, numbers = _launch(out.device, call), call.numbers
            if build is not None:
                self._clear_again = lambda out, lse, cu: build(*map(_address, (out, None, lse, cu)), *numbers)

    def _run(self, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *scores) -> None:
        device, tile = q.device, self._tile
        alike = cu_seqlens_q is cu_seqlens_k
        again = self._again.get(alike)
        if again is not None and device.index == torch.cuda.current_device():
            again(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *scores)
            return
        operands = Operands(q, k, v, cu_seqlens_q, cu_seqlens_k, *scores)
        if isinstance(tile, SplitTile):
            from rowmax.kernels import decode_launch

            self._again[alike] = decode_launch.dense(self._problem, operands, tile, out, lse)
        elif isinstance(tile, HopperTile):
            from rowmax.kernels import hopper_forward

            self._again[alike] = hopper_forward.run(self._problem, operands, tile, out, lse)
        elif self._algorithm in BY_NAME:
            from rowmax.kernels.generations import calls as calls_by_name

            for call in calls_by_name(self._algorithm, self._problem, operands, tile, out, lse):
                _launch(device, call)
        else:
            call = forward_call(self._problem, operands, tile, out, lse)
            build, numbers = _launch(device, call), call.numbers
            if build is not None:
                self._again[alike] = lambda *tensors: _run(build, tile, *map(_address, tensors), *numbers)

    def into(self, operands: Operands, out: torch.Tensor, lse: Optional[torch.Tensor]) -> Callable[[], None]:
        """A function that computes into `out` and `lse` what these tensors then hold; its calls must follow one another."""
        q, k, v, cu_seqlens_q, cu_seqlens_k = operands[:5]
        tensors = (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *(() if self._plain else operands[5:]))
        device = q.device
        bound: list = []

        def run():
            if self._clear:
                self._clear_rows(out, lse, cu_seqlens_q, operands[5:])
            if not self._has_work:
                return
            # Memory made under capture would belong to the graph.
            again = self._again.get(cu_seqlens_q is cu_seqlens_k)
            if not bound and hasattr(again, "bind") and not torch.cuda.is_current_stream_capturing():
                bound.append(again.bind(*tensors))
            if bound and device.index == torch.cuda.current_device():
                bound[0]()
            else:
                self._run(*tensors)

        return run


def backward(problem: Problem, operands: Operands, out, lse, grad_out, grad_lse, needs, plan: Plan) -> tuple[torch.Tensor, ...]:
    """`(dq, dk, dv)`, and with a fourth and a fifth of `needs` the sink's and the bias's; a gradient that is not needed is an
    empty tensor, and no kernel runs for nothing."""
    make = torch.empty if _has_work(problem) else torch.zeros
    need_q, need_k, need_v = needs[:3]
    more = [lse.new_empty(0) for _ in needs[3:]]
    q, k, v, cu_seqlens_q, cu_seqlens_k = operands[:5]
    device = q.device
    dq, dk, dv = (
        make(t.shape if need else (0,), dtype=t.dtype, device=device) for t, need in zip((q, k, v), needs[:3], strict=True)
    )
    if not _has_work(problem):
        return dq, dk, dv, *(_scored().idle_gradients(operands, needs[3:], lse, grad_lse) if more else ())
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        for cu_seqlens, *grads in ((cu_seqlens_q, dq), (cu_seqlens_k, dk, dv)):
            if wanted := [grad for grad in grads if grad.numel()]:
                _launch(device, outside_call(cu_seqlens, *wanted))
    if plan.algorithm == "hopper":  # all three at once
        from rowmax.kernels import hopper_backward

        whole = (t if need else make(like.shape, dtype=like.dtype, device=device)
                 for t, need, like in zip((dq, dk, dv), needs[:3], (q, k, v), strict=True))  # fmt: skip
        given = torch.zeros_like(out) if grad_out is None else grad_out
        rows = hopper_backward.run(problem, operands, plan.tiles[0], out, lse, given, grad_lse, *whole)
        if more:
            more = _scored().gradients(problem, operands, needs[3:], bias_tile(problem), given, *rows)
        return dq, dk, dv, *more
    lse_log2, delta = torch.empty_like(lse), torch.empty_like(lse)
    _launch(device, row_call(problem, out, grad_out, lse, grad_lse, lse_log2, delta))
    query_tile, *key_tiles = plan.tiles
    if need_q:
        _launch(device, query_call(problem, operands, query_tile, grad_out, lse_log2, delta, dq))
    if need_k and need_v and len(key_tiles) == 1:
        _launch(device, key_call(problem, operands, key_tiles[0], grad_out, lse_log2, delta, dk, dv))
    else:
        if need_k:
            _launch(device, key_call(problem, operands, key_tiles[0], grad_out, lse_log2, delta, dk, None))
        if need_v:
            _launch(device, key_call(problem, operands, key_tiles[-1], grad_out, lse_log2, delta, None, dv))
    if more:
        more = _scored().gradients(problem, operands, needs[3:], query_tile, grad_out, lse_log2, delta)
    return dq, dk, dv, *more


def _scored():
    """What only bent scores need."""
    from rowmax.kernels import scored_launch

    return scored_launch


def forward_call(problem: Problem, operands: Operands, tile: Tile, out, lse) -> Call:
    from rowmax.kernels.triton.forward import forward_kernel

    q, k, v, cu_seqlens_q, cu_seqlens_k = operands[:5]
    tiles = _row_tiles(problem, problem.len_q, tile.block_m)
    # What a plain problem has not is among the numbers: a tensor costs the host time on every call.
    given = _given(problem, operands)
    extra = (operands.slopes, operands.sink, *given[:3], operands.numbers)
    scores, none = ((), (None,) * len(extra)) if problem.plain else (extra, ())
    tensors = (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *scores)
    function, _, count = _functions(problem)
    numbers = (
        *(*none, _strides(q), _strides(k), _strides(v), _strides(out), *given[3:]),
        *(problem.scale * LOG2E, _cap(problem)),
        *(_bounded(problem), problem.batch, problem.heads_q, tiles, problem.len_q, problem.len_k),
        *(*_constants(problem, tile), _prescaled(problem), tile.stages, tile.descriptors, problem.alibi == "batch"),
        *(function, count),
    )
    return Call(forward_kernel, _programs(problem, tiles, problem.heads_q), tensors, numbers, tile)


def outside_call(cu_seqlens: torch.Tensor, x: torch.Tensor, y: Optional[torch.Tensor] = None, *, lse=None) -> Call:
    """Clears the rows of contiguous x and y, `[T, H, D]`, and of lse, `[H, T]`, that no sequence holds."""
    from rowmax.kernels.triton.outside import outside_kernel

    rows, heads, _ = x.shape
    widths = (x[0].numel(), x[0].numel() if y is None else y[0].numel())
    numbers = (cu_seqlens.numel() - 1, rows, *widths, heads, OUTSIDE_ROWS, 1024)
    return Call(outside_kernel, -(-rows // OUTSIDE_ROWS), (x, y, lse, cu_seqlens), numbers, Tile(OUTSIDE_ROWS, 1, 4, 1))


def row_call(problem: Problem, out, grad_out, lse, grad_lse, lse_log2, delta) -> Call:
    from rowmax.kernels.triton.backward import row_kernel

    rows = min(64, ROW_ELEMENTS // _padded(problem.dim_v))
    tiles = -(-problem.len_q // rows)
    tensors = (out, grad_out, lse, None if grad_lse is None else grad_lse.contiguous(), lse_log2, delta)
    numbers = (
        *(_strides(out), _strides(out if grad_out is None else grad_out)),
        *(problem.heads_q, tiles, problem.len_q, problem.dim_v, rows, _padded(problem.dim_v)),
    )
    return Call(row_kernel, _programs(problem, tiles, problem.heads_q), tensors, numbers, Tile(rows, 1, 4, 1))


def query_call(problem: Problem, operands: Operands, tile: Tile, grad_out, lse_log2, delta, dq) -> Call:
    from rowmax.kernels.triton.backward import query_kernel

    q, k, v, cu_seqlens_q, cu_seqlens_k = operands[:5]
    tiles = _row_tiles(problem, problem.len_q, tile.block_m)
    tensors = (q, k, v, grad_out, dq, lse_log2, delta, cu_seqlens_q, cu_seqlens_k, operands.slopes)
    tensors = (*tensors, *_given(problem, operands)[:3], operands.numbers)
    numbers = (
        *(_strides(t) for t in (q, k, v, q if grad_out is None else grad_out, dq)),
        *_given(problem, operands)[3:],
        *(problem.scale, _cap(problem), _bounded(problem), problem.batch, problem.heads_q, tiles, problem.len_q, problem.len_k),
        *(*_constants(problem, tile), tile.stages, tile.descriptors, problem.alibi == "batch", *_functions(problem)),
    )
    return Call(query_kernel, _programs(problem, tiles, problem.heads_q), tensors, numbers, tile)


def key_call(problem: Problem, operands: Operands, tile: Tile, grad_out, lse_log2, delta, dk, dv) -> Call:
    """dK and dV; one of them may be None."""
    from rowmax.kernels.triton.backward import key_kernel, one_query_key_kernel

    q, k, v, cu_seqlens_q, cu_seqlens_k = operands[:5]
    tiles = _row_tiles(problem, problem.len_k, tile.block_n)
    tensors = (q, k, v, grad_out, dk, dv, lse_log2, delta, cu_seqlens_q, cu_seqlens_k, operands.slopes)
    tensors = (*tensors, *_given(problem, operands)[:3], operands.numbers)
    do, dk_like, dv_like = (like if t is None else t for t, like in ((grad_out, q), (dk, k), (dv, v)))
    numbers = (
        *(_strides(t) for t in (q, k, v, do, dk_like, dv_like)),
        *_given(problem, operands)[3:],
        *(problem.scale, _cap(problem), _bounded(problem), problem.batch, problem.heads_q, tiles, problem.len_q, problem.len_k),
        *(*_constants(problem, tile), dk is not None, dv is not None, tile.stages, tile.descriptors, problem.alibi == "batch"),
        *_functions(problem),
    )
    kernel = one_query_key_kernel if problem.len_q == 1 else key_kernel
    return Call(kernel, _programs(problem, tiles, problem.heads_k), tensors, numbers, tile)


def _given(problem: Problem, operands: Operands) -> tuple:
    """Bias, mask and seed; the strides of the first two and dropout's odds."""
    if problem.plain:
        return (None,) * 6
    return *_scored().given(operands), *_scored().given_numbers(problem, operands)


def _functions(problem: Problem) -> tuple:
    """Those of a `ScoreMod`, forward and derivative, and how many numbers they take."""
    return _scored().functions(problem) if problem.score_mod else (None, None, 0)


def _bounded(problem: Problem) -> AnyBand:
    """The band, with sides that the kernels' 32-bit sums cannot carry over their range."""
    most = problem.len_q + problem.len_k
    return type(problem.band)(*(side if side is None else min(side, most) for side in problem.band))


def _cap(problem: Problem) -> Optional[tuple[float, float]]:
    """As `tile_ops.bend` takes it."""
    return (problem.scale / problem.softcap, problem.softcap * LOG2E) if problem.softcap else None


def _prescaled(problem: Problem) -> bool:
    """For `PRESCALE` of `triton/forward.py`."""
    return problem.scale <= 0 or problem.softcap > 0 or bool(problem.alibi or problem.bias or problem.score_mod)


def _has_work(problem: Problem) -> bool:
    return min(problem.batch, problem.len_q, problem.len_k, problem.heads_q) > 0


def _row_tiles(problem: Problem, length: int, block: int) -> int:
    """Row tiles of one head: of one sequence, or of all packed sequences together (`address.find_sequence`)."""
    return length // block + problem.batch if problem.packed else -(-length // block)


def _programs(problem: Problem, tiles: int, heads: int) -> int:
    """All in the first grid dimension: the others end at 65,535."""
    return tiles * heads * (1 if problem.packed else problem.batch)


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(batch, row, head); a packed tensor has no batch."""
    *outer, row, head, _ = tensor.stride()
    return (outer[0] if outer else 0), row, head


def _padded(dim: int) -> int:
    """Block sizes are powers of two, and the tensor cores take at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


@lru_cache(maxsize=4096)
def _constants(problem: Problem, tile: Tile) -> tuple[int, ...]:
    block_d = _padded(problem.dim_qk)
    # ptxas 12.8 miscompiles some Hopper forwards with block_d 64 and more beside block_dv 32 (`test_compile` finds such code).
    block_dv = max(_padded(problem.dim_v), min(block_d, 64))
    return (problem.group, problem.dim_qk, problem.dim_v, tile.block_m, tile.block_n, block_d, block_dv)


def launch_all(device: torch.device, calls: Sequence[Call]) -> list:
    """Run them one after another; the launchers of the compiled kernels (None under the interpreter)."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch_all(device, calls)
    _build_together(device, calls)
    return [_launch_here(device, call) for call in calls]


def _launch(device: torch.device, call: Call) -> Any:
    """Run it; returns the launcher of the compiled kernel (None under the interpreter)."""
    return launch_all(device, (call,))[0]


# What a build depends on -> the launcher of a compiled kernel. Triton's own lookup inspects every argument on every call: 21 us
# for the forward on an H200 host, about half of an eager call; so does passing tensors instead of their addresses.
_builds: dict = {}


def _build_key(device: torch.device, call: Call) -> tuple:
    kinds = [_kind(t) for t in call.tensors]
    return (call.kernel.fn, device.index, call.programs, call.tile.warps, call.numbers, *kinds)


def _options(call: Call) -> dict:
    return {"num_warps": call.tile.warps, "num_stages": call.tile.stages, **({"launch_pdl": True} if call.early else {})}


def _build_together(device: torch.device, calls: Sequence[Call]) -> None:
    """Compile and load what is new side by side: a kernel takes seconds, most of them in LLVM and ptxas, beside Python."""
    if triton.knobs.runtime.interpret or len(calls) < 2:
        return
    new = [call for call in calls if _build_key(device, call) not in _builds]
    if len(new) < 2:
        return

    def build(call: Call) -> None:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # that of a thread
            compiled = call.kernel.warmup(*call.tensors, *call.numbers, grid=(call.programs,), **_options(call))
            if compiled is not None:  # a hook may have left it out
                compiled.run  # noqa: B018, Triton makes what launches it, and loads it

    for call in new:
        kept.find(call.kernel)
    with ThreadPoolExecutor(len(new)) as pool:  # the first is traced first: of a forward and its guard the longer one
        list(pool.map(build, new))


def _launch_here(device: torch.device, call: Call) -> Any:
    key = _build_key(device, call)
    build = _builds.get(key)
    if build is not None:
        _run(build, call.tile, *map(_address, call.tensors), *call.numbers)
        return build
    kept.find(call.kernel)
    compiled = _run(call.kernel[(call.programs,)], call.tile, *call.tensors, *call.numbers, **_options(call))
    if compiled is None:  # the interpreter
        return None
    if len(_builds) >= MAX_BUILDS:
        _builds.clear()
    _builds[key] = build = Launcher(compiled, call.programs)
    return build


def _address(argument: Any) -> Any:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def _kind(argument: Any) -> Any:
    """What a build depends on of a tensor, a descriptor (whose strides are run-time numbers) or None."""
    if argument is None:
        return None
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    return argument.base.dtype, tuple(argument.block_shape)


def _run(launch, tile: Tile, *arguments, **options) -> Any:
    if tile.descriptors:
        triton.set_allocator(_scratch)  # it holds for one thread
    return launch(*arguments, **options)


def _scratch(size: int, alignment: int, stream: "int | None") -> torch.Tensor:
    """Memory for descriptors that kernels make on the device."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
