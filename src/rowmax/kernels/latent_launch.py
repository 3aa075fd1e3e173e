"""Arguments and launches of latent attention on Hopper, for `plan/latent.py`; called by `decode_launch.Paged`.

Three launches: what each program has to do (`triton/work.py`), the parts (`gluon/latent.py`), and what joins them (`work.py`).
"""

from typing import Any, Optional

import torch
import triton

from rowmax.kernels import decode_launch, launch
from rowmax.kernels.hopper_forward import _descriptor
from rowmax.kernels.launch import Call, _bounded
from rowmax.kernels.triton.work import join_kernel, work_kernel
from rowmax.numerics import LOG2E
from rowmax.paged import PagedOperands, PagedProblem
from rowmax.plan.latent import KEYS, ROWS
from rowmax.plan.split_kv import SplitTile, least_turns, row_tiles
from rowmax.plan.tile import Tile

FIELDS = 16  # numbers that a program is told
ROPE = 64  # columns of Q and K that are none of V


def programs_of(problem: PagedProblem, tile: SplitTile) -> int:
    """With "p" as many as any lengths may need."""
    items, parts = row_tiles(problem, ROWS), decode_launch.parts_of(problem, tile)
    return items + parts + 1 if tile.how == "p" else items * parts


def calls(
    problem: PagedProblem, operands: PagedOperands, tile: SplitTile, out, lse, parts: Optional[torch.Tensor], work: torch.Tensor
) -> tuple[Call, ...]:
    """As `decode_launch.calls`, with values that are the first columns of the keys. `work`: int64, `FIELDS` for each of
    `programs_of`. The last call is there only where items may have several parts."""
    from rowmax.kernels.gluon.latent import WIDTH, latent_kernel

    q, k, _, table, lengths, cu, *_ = operands
    heads_first = q.transpose(0, 1) if problem.packed else (q.unsqueeze(1) if q.dim() == 3 else q).transpose(1, 2)
    programs, slots = programs_of(problem, tile), decode_launch.slots_of(problem, tile)
    tiles = row_tiles(problem, ROWS) // max(problem.batch, 1)  # of a sequence; of no meaning if packed
    batch_block = triton.next_power_of_2(problem.batch) if tile.how == "p" else 0
    numbers: tuple = (
        *(decode_launch._row_strides(out, problem), _bounded(problem), problem.batch, tiles, problem.len_q, problem.len_k),
        *(decode_launch.parts_of(problem, tile), slots, problem.group, problem.dim_v, ROWS, KEYS),
        *(least_turns(KEYS), batch_block),
    )
    # Which part a program has is found by looking through all sequences, work for more than a warp.
    first = Call(work_kernel, programs, (work, lengths, cu), numbers, Tile(ROWS, KEYS, 4 if batch_block else 1, 1))
    sources = (
        *(_descriptor(heads_first, ROWS, WIDTH.value), _descriptor(heads_first, ROWS, ROPE)),
        *(_descriptor(k, KEYS, WIDTH.value), _descriptor(k, KEYS, ROPE)),
    )
    # Where every item has one part nobody writes to the memory of partial results, whose place some other takes.
    tensors = (*sources, out, lse, table if parts is None else parts, table, work)
    numbers = (table.stride(0), problem.scale * LOG2E, k.shape[0], problem.page_size // KEYS, lse is not None)
    attend = Call(latent_kernel, programs, tensors, numbers, tile)
    if not slots:
        return first, attend
    each, warps = decode_launch.WIDE // problem.dim_v, 4  # rows of a program
    at_once = decode_launch._at_once(
        tile, row_tiles(problem, ROWS), decode_launch.parts_of(problem, tile), each * problem.dim_v, warps
    )
    numbers = (
        *(decode_launch._row_strides(out, problem), problem.len_q, slots, ROWS // each),
        *(problem.packed, problem.group, problem.dim_v, ROWS, each, at_once),
    )
    join = Call(join_kernel, programs * (ROWS // each), (out, lse, parts, work), numbers, Tile(each, 1, warps, 1))
    return first, attend, join


def run(problem: PagedProblem, operands: PagedOperands, tile: SplitTile, out, lse, parts) -> "_Again":
    """Launch all; returns a function of their addresses that does so again."""
    device = operands.q.device
    work = operands.q.new_empty(programs_of(problem, tile) * FIELDS, dtype=torch.int64)
    made = calls(problem, operands, tile, out, lse, parts, work)
    return _Again(launch.launch_all(device, made), made, out.new_empty(0), len(work))


class _Again:
    """The launches of a call, for other addresses, on the device that was current when they were built."""

    def __init__(self, builds: list, made: tuple[Call, ...], like: torch.Tensor, size: int):
        self._builds, self._numbers = builds, [call.numbers for call in made]
        self._sources = builds[1].descriptors(made[1].tensors[:4])
        self._like, self._size = like, size

    def __call__(self, *addresses) -> None:
        stream = self._builds[0].stream()
        work = self._like.new_empty(self._size, dtype=torch.int64)
        for build, given in self.arguments(work.data_ptr(), *addresses):
            build.enqueue(stream, *given)

    def arguments(self, work, q, k, v, out, lse, parts, table, lengths, cu, *_: Any) -> list[tuple[Any, tuple]]:
        """Each launcher, and what it is called with."""
        q_wide, q_rope, k_wide, k_rope = self._sources
        places = (out, lse, table if parts is None else parts, table, work)
        each = (
            (work, lengths, cu),
            (*q_wide[q], *q_rope[q], *k_wide[k], *k_rope[k], *places),
            (out, lse, parts, work),
        )
        return [(build, (*own, *more)) for build, own, more in zip(self._builds, each, self._numbers, strict=False)]
