"""What a plan launches, as counts: tasks in order, the work of one turn of the loop, bytes from HBM and from the L2 cache.

    a task  = a row tile (q_outer, hopper), a part of the keys (split_kv), a head (kv_outer), a tile of scores (dense)
    a turn  = one tile of scores: Q K^T, softmax, P V

Exact where counting can be: turns come from `plan.tile.key_ranges`, sizes from the padded dims that the kernels launch with.
Called by `predict.py`, which turns counts into time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch

from rowmax.analysis.cost import keys_seen, sequences
from rowmax.analysis.occupancy import MOST_RUNS, MOST_WAVES, Block, blocks_at_once
from rowmax.device import Device, Rates
from rowmax.mask import AnyBand
from rowmax.paged import PagedProblem
from rowmax.plan import Plan, hopper, resources
from rowmax.plan.hopper import HopperTile
from rowmax.plan.tile import Tile, early, key_ranges
from rowmax.problem import Problem

CACHED = 0.7  # of the L2 cache, that K and V used by all blocks at once may take and still be found there
SCORE_OPS = 4.0  # fp32 operations of a plain softmax for each score, beside its exponential
STEADY_OPS = 2.4  # without maxima: 0.95 of the time with d64, 0.93 to 0.95 with d128, 0.98 with d256
Lengths = Sequence[tuple[int, int]]


class Turn(NamedTuple):
    """Work of one turn of one block.

    Attributes:
        tensor_flops: of products, as executed.
        exps: exponentials.
        score_ops, rescale_ops: other fp32 operations on scores, and on the accumulator.
        waited_bytes: read or written while nothing of the block runs beside.
        ahead_bytes: fetched for this turn while earlier ones run, or waited for where the launch has one stage.
        mask_ops: operations that a mask adds.
        lookups: answers of the cache that it waits for, one after another.
        sync: products by mma.sync, as of tiles with fewer than 64 rows.
        shared_bytes, conflict_bytes, barriers: of `warp_split` only: bytes in and out of shared memory, what more would move in
            the time that conflicts of its banks take, and barriers of the block.
    """

    tensor_flops: float
    exps: float
    score_ops: float
    rescale_ops: float
    waited_bytes: float = 0.0
    ahead_bytes: float = 0.0
    mask_ops: float = 0.0
    lookups: int = 0
    sync: bool = False
    shared_bytes: float = 0.0
    conflict_bytes: float = 0.0
    barriers: int = 0


class Launch(NamedTuple):
    """One kernel.

    Attributes:
        name: of the kernel.
        tasks: (how many, turns, of these turns with a mask), in the order in which they begin.
        turn: see `Turn`.
        at_once: blocks that a multiprocessor holds.
        hbm_bytes, l2_bytes: moved from or to memory; out of the cache into multiprocessors.
        stages: tiles in flight.
        persistent: blocks take one task after another, and overlap the end of one with the beginning of the next.
        in_turn: they take every n-th, whatever it takes.
        slower: a turn takes so many times as long, for what was counted in machine code.
        far: share of the bytes of turns that are not in the cache.
        own_bytes: of Q and O, which a block waits for before and behind its turns; `own_far`: share that is not in the cache.
        lookups: answers of memory that it waits for one after another until it knows where its work is.
        descriptors: that it makes for TMA.
        empty: blocks that find no work.
        outer: for each task, what it waits for outside of its turns: answers of memory, those of HBM among them, and bytes.
        light: blocks that look at a few numbers and end.
        streams: blocks read keys and values that no other reads: what they wait for before and behind comes to HBM's time.
        ahead: Q of the next task is fetched while this one is computed.
        shared_bytes, registers, threads: of a block.
        backward: it computes gradients.
        joins: a turn is no product, but joins a partial result to those before it.
        inside: no kernel of its own, but what the last blocks of the one before do.
        written: of `hbm_bytes`, those that are written; the cache keeps some of them after the end.
        together: share of the turns of which keys and values are read at about the same time by all blocks that use them.
        cold: the caches are empty when it begins: such blocks all wait for HBM, though the bytes come once.
    """

    name: str
    tasks: tuple[tuple[int, int, int], ...]
    turn: Turn
    at_once: int
    hbm_bytes: float
    l2_bytes: float
    stages: int = 2
    persistent: bool = False
    in_turn: bool = False
    shared_bytes: int = 0
    registers: int = 0
    threads: int = 0
    backward: bool = False
    slower: float = 1.0
    far: float = 0.0
    own_bytes: float = 0.0
    own_far: float = 1.0
    lookups: int = 0
    descriptors: int = 0
    empty: int = 0
    outer: tuple[tuple[int, int, float], ...] = ()
    light: bool = False
    streams: bool = False
    ahead: bool = False
    joins: bool = False
    inside: bool = False
    written: float = 0.0
    together: float = 0.0
    cold: bool = False

    @property
    def blocks(self) -> int:
        return sum(count for count, _, _ in self.tasks)

    @property
    def asked(self) -> float:
        """Share of the answers that a turn waits for, which are HBM's."""
        return max(self.far, self.together) if self.cold else self.far

    @property
    def turns(self) -> int:
        return sum(count * turns for count, turns, _ in self.tasks)


def launches(problem: Problem, device: Device, rates: Rates, plan: Plan, lengths: Optional[Lengths] = None) -> list[Launch]:
    """The kernels of a forward, in order.

    Args:
        lengths: (queries, keys) of each sequence; default: equal ones.

    Raises:
        KeyError: no model of the plan's algorithm.
    """
    from rowmax.analysis import launches_bent
    from rowmax.analysis import launches_decode as decode
    from rowmax.analysis import launches_older as older

    builders: dict[str, Any] = {
        "q_outer": _q_outer,
        "hopper": _hopper,
        "latent": decode.split_kv_launches,  # the same parts; what its blocks hold is not modelled
        "split_kv": decode.split_kv_launches,
        "kv_outer": older.kv_outer,
        "dense": older.dense,
        "warp_split": older.warp_split,
    }
    known = list(lengths) if lengths is not None else sequences(problem)
    kernels = builders[plan.algorithm](problem, device, rates, plan.tiles[0], known)
    ops = STEADY_OPS if isinstance(plan.tiles[0], HopperTile) and plan.tiles[0].steady else SCORE_OPS
    kernels = [launches_bent.bent(problem, launch, ops) for launch in kernels]
    if not problem.packed or isinstance(problem, PagedProblem):
        return kernels
    size = float(problem.len_q * problem.heads_q * problem.dim_v * _element(problem))  # rows outside every sequence are 0
    hbm = size * missed(size, rates)
    return [Launch("clear", ((1, 0, 0),), Turn(0, 0, 0, 0), 1, hbm, size, light=True), *kernels]


def missed(working_bytes: float, rates: Rates) -> float:
    """Share of data that is no longer in the cache when it is used again, after so many bytes of all blocks' data.

    As counted on an H200 (benchmarks/results/counters): 0.46 of 39 MB, 0.81 of 64 MB and 0.98 of 78 MB, of 50 MB.
    """
    return min(max(0.74 * working_bytes / rates.l2_bytes - 0.1, 0.0), 1.0)


def row_tasks(lengths: Lengths, heads: int, block_m: int, block_n: int, band: AnyBand) -> list[tuple[int, int, int]]:
    """`(heads, turns, masked turns)` of each row tile, the last of a sequence first, equal neighbours together."""
    found: list[tuple[int, int, int]] = []
    known: dict = {}
    for length in lengths:
        if length not in known:
            known[length] = [
                (end - start, full_start - start + end - full_end, -(-early(start, band) // block_n))
                for row in range(0, length[0], block_m)
                for start, full_start, full_end, end in [key_ranges(row, block_m, *length, block_n, band)]
            ]
        for keys, masked, before in reversed(known[length]):
            turns = -(-keys // block_n)
            found.append((heads, turns + before, min(-(-masked // block_n), turns) + before))
    return found


def _output(problem: Problem, lengths: Lengths) -> float:
    """Bytes of O."""
    return float(sum(queries for queries, _ in lengths) * problem.heads_q * problem.dim_v * _element(problem))


def _element(problem: Problem) -> int:
    return torch.finfo(problem.dtype).bits // 8


def _padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _streams(problem: Problem, lengths: Lengths) -> tuple[float, float]:
    """Bytes of Q, O and LSE; and of K and V of one head of the mean sequence, of keys that are seen."""
    rows = sum(queries for queries, _ in lengths) * problem.heads_q
    width = (problem.dim_qk + problem.dim_v) * _element(problem)
    keys = sum(keys_seen(queries, keys, problem.band) * count for (queries, keys), count in _counted(lengths))
    return rows * (width + 4.0), keys * width / max(len(lengths), 1)


def _kv_from_hbm(problem: Problem, lengths: Lengths, rates: Rates, slots: int, tiles_of_head: float) -> float:
    """Bytes of K and V read from memory: once while what is in use at once fits in the cache, otherwise once for every round
    of blocks over one head (blocks of a round walk over the keys side by side)."""
    _, head = _streams(problem, lengths)
    used_together = max(slots / max(tiles_of_head, 1.0) / problem.group, 1.0) * head
    rounds = 1.0 if used_together <= CACHED * rates.l2_bytes else max(tiles_of_head * problem.group / slots, 1.0)
    return head * len(lengths) * problem.heads_k * rounds


def _walked(
    problem: Problem, rates: Rates, tile: Any, lengths: Lengths, tasks: Sequence[tuple[int, int, int]], slots: int
) -> tuple[float, float, float]:
    """Where row tiles walk over keys, `slots` at once: bytes from HBM, those out of the cache, and the share of K and V in the
    latter that HBM sends."""
    own, _ = _streams(problem, lengths)
    tiles_of_head = sum(-(-queries // tile.block_m) for queries, _ in lengths) / max(len(lengths), 1)
    hbm = own + _kv_from_hbm(problem, lengths, rates, slots, tiles_of_head)
    l2 = own + sum(count * turns for count, turns, _ in tasks) * tile.block_n * _seen_width(problem)
    return hbm, l2, min((hbm - own) / max(l2 - own, 1.0), 1.0)


def _seen_width(problem: Problem) -> int:
    return (problem.dim_qk + problem.dim_v) * _element(problem)


def _turn(
    problem: Problem, block_m: int, block_n: int, dim: int, dim_v: int, *, lazy: bool = False, steady: bool = False
) -> Turn:
    """A subtraction with its factor, a maximum unless `steady`, a sum and a conversion for each score; O is scaled in every
    turn unless `lazy`.

    Of a mask: a comparison for each side and for the end, and a choice.
    """
    scores = block_m * block_n
    sides = sum(side is not None for side in problem.band[:2])
    return Turn(
        2.0 * scores * (dim + dim_v), scores + block_m, (STEADY_OPS if steady else SCORE_OPS) * scores,
        0.0 if lazy else float(block_m * dim_v),
        ahead_bytes=float(block_n * (dim + dim_v) * _element(problem)), mask_ops=(2.0 + sides) * scores,
        sync=block_m < 64 and problem.dtype != torch.float32,
    )  # fmt: skip


def _lookups(problem: Problem) -> int:
    """A sequence is found by halving, and its bounds are read (`address.locate`)."""
    return max(problem.batch, 1).bit_length() + 2 if problem.packed else 0


def _empty(problem: Problem, lengths: Lengths, block_m: int) -> int:
    """Blocks that find no rows: with packed sequences, whose lengths the launcher does not know."""
    if not problem.packed:
        return 0
    own = sum(-(-queries // block_m) for queries, _ in lengths)
    return max(problem.len_q // block_m + problem.batch - own, 0) * problem.heads_q


def _q_outer(problem: Problem, device: Device, rates: Rates, tile: Tile, lengths: Lengths) -> list[Launch]:
    dim, dim_v = _padded(problem.dim_qk), max(_padded(problem.dim_v), min(_padded(problem.dim_qk), 64))
    block = _portable_block(problem, device, "forward", tile)
    at_once = max(blocks_at_once(block, rates), 1)
    tasks = _by_heads(problem, lengths, tile)
    slots = min(at_once * device.sms, max(sum(count for count, _, _ in tasks), 1))
    hbm, l2, far = _walked(problem, rates, tile, lengths, tasks, slots)
    turn = _turn(problem, tile.block_m, tile.block_n, dim, dim_v)
    return [
        Launch("forward", tuple(tasks), turn, at_once, hbm, l2, tile.stages, shared_bytes=block.shared_bytes,
               registers=block.registers, threads=block.threads, far=far,
               own_bytes=tile.block_m * (dim + dim_v) * float(_element(problem)), lookups=_lookups(problem),
               descriptors=2 * tile.descriptors, empty=_empty(problem, lengths, tile.block_m),
               written=_output(problem, lengths), together=_together(problem, lengths, tile.block_m, slots))
    ]  # fmt: skip


def _together(problem: Problem, lengths: Lengths, block_m: int, slots: int) -> float:
    tiles_of_head = sum(-(-queries // block_m) for queries, _ in lengths) / max(len(lengths), 1)
    return min(slots / max(tiles_of_head * problem.group, 1.0), 1.0)


def _portable_block(problem: Problem, device: Device, kernel: str, tile: Tile) -> Block:
    more = 48 if tile.descriptors else 64  # as compiled on Hopper: addresses, masks, m and l
    more += 12 * (kernel == "forward" and problem.len_q == 1)
    registers = min(resources.registers(problem, kernel, tile) + more, resources.REGISTERS)
    return Block(32 * tile.warps, registers, resources.shared_bytes(problem, device, kernel, tile))


def _by_heads(problem: Problem, lengths: Lengths, tile: Tile) -> list[tuple[int, int, int]]:
    """Row tiles in the order of `address.locate`: the tiles of one head side by side. Equal sequences are taken together."""
    tasks: list = []
    for sequence, count in _counted(lengths):
        one = row_tasks([sequence], 1, tile.block_m, tile.block_n, problem.band)
        heads = problem.heads_q * count
        if len({turns for _, turns, _ in one}) == 1:
            tasks.append((heads * len(one), one[0][1], max(masked for _, _, masked in one)))
        elif heads * len(one) > 6_400:
            tasks += [(heads, turns, masked) for _, turns, masked in one]
        else:
            tasks += one * heads
    return tasks


def _counted(lengths: Lengths) -> list[tuple[tuple[int, int], int]]:
    counts: dict = {}
    for sequence in lengths:
        counts[sequence] = counts.get(sequence, 0) + 1
    return list(counts.items())


def _hopper(problem: Problem, device: Device, rates: Rates, tile: HopperTile, lengths: Lengths) -> list[Launch]:
    first, second, dim_v = hopper.padded_dims(problem)
    tasks = _by_groups(problem, device, lengths, tile)
    hbm, l2, far = _walked(problem, rates, tile, lengths, tasks, device.sms)
    turn = _turn(problem, tile.block_m, tile.block_n, first + second, dim_v, lazy=tile.lazy, steady=tile.steady)
    consumer = tile.registers()[0]
    shared = hopper.shared_bytes(problem, tile)
    # With three consumers a branch for the mask makes the compiler finish one row before the next: 2720 cycles for 2330.
    left, right = problem.band[:2]
    aligned = not problem.packed and (problem.len_k - problem.len_q) % hopper.ROWS == 0  # `hopper_forward` then needs none
    branches = not problem.windowed or left is not None or (right is not None and not (aligned and right == 0))
    main = Launch(
        "forward", tuple(tasks), turn, 1, hbm, l2, tile.stages, True, tile.schedule == "static", shared, consumer,
        128 * (tile.consumers + 1), slower=2720 / 2330 if branches and tile.consumers == 3 else 1.0,
        lookups=3 + problem.batch // 128 if problem.packed else 0, far=far,
        own_bytes=tile.block_m * (first + second + dim_v) * float(_element(problem)), ahead=tile.q_stages > 1,
        written=_output(problem, lengths),
    )  # fmt: skip
    flags = problem.len_q // hopper.ROWS + problem.batch if problem.packed else -(-problem.len_q // hopper.ROWS) * problem.batch
    flags *= problem.heads_q
    guards = min(2 * device.sms, flags)
    guard = Launch("guard", ((guards, 0, 0),), Turn(0, 0, 0, 0), 2, 4.0 * flags, 4.0 * flags, light=True)
    order = [Launch("order", ((1, 0, 0),), Turn(0, 0, 0, 0), 1, 0.0, 0.0, lookups=2)] if problem.packed else []
    return [*order, main, guard]


def _by_groups(problem: Problem, device: Device, lengths: Lengths, tile: HopperTile) -> list[tuple[int, int, int]]:
    """Row tiles in the order of the kernel: of a group of heads, the last tile of every head first. Where there are so many
    that they are taken by their mean, as though all heads were one group; sooner where blocks take what comes than in turn."""
    if problem.packed:
        ordered = sorted(lengths, key=lambda length: length[1], reverse=True)
        heads, longest = problem.heads_q, max((keys for _, keys in lengths), default=0)
    else:
        ordered, heads, longest = list(lengths[:1]), problem.heads_q * len(lengths), problem.len_k
    one = row_tasks(ordered, 1, tile.block_m, tile.block_n, problem.band)
    size = max(longest, 1) * (problem.dim_qk + problem.dim_v) * _element(problem)
    group = min(max((tile.group_mb << 20) // size, 1) * problem.group, heads)
    many = MOST_RUNS * group if tile.schedule == "static" else MOST_WAVES * device.sms
    if len(set(one)) <= 1 or heads * len(one) > many:
        group = max(heads, 1)
    cuts = [min(group, heads - first) for first in range(0, heads, group)]
    return [(count, turns, masked) for count in cuts for _, turns, masked in one]
