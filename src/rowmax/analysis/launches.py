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
from rowmax.analysis.occupancy import Block, blocks_at_once
from rowmax.device import Device, Rates
from rowmax.mask import AnyBand, end_query, first_query
from rowmax.paged import PagedProblem
from rowmax.plan import Plan, hopper, resources, split_kv
from rowmax.plan.generations import SOFTMAX_TILE, score_columns
from rowmax.plan.hopper import HopperTile
from rowmax.plan.split_kv import SplitTile
from rowmax.plan.tile import Tile, early, key_ranges
from rowmax.plan.warp_split import WarpTile
from rowmax.problem import Problem

SYNC_FLOPS = 2540  # of mma.sync, a clock and a multiprocessor of Hopper: 0.62 of what its own instruction does
CACHED = 0.7  # of the L2 cache, that data used by all blocks at once may take and still be found there
Lengths = Sequence[tuple[int, int]]


class Turn(NamedTuple):
    """Work of one turn of one block: FLOPs of products as executed, exponentials, other fp32 operations on scores, those on the
    accumulator, and bytes that it waits for (0 where they were fetched ahead). Counted for `warp_split` only, 0 elsewhere:
    bytes read from and written to shared memory, and barriers of the block."""

    tensor_flops: float
    exps: float
    score_ops: float
    rescale_ops: float
    waited_bytes: float = 0.0
    shared_bytes: float = 0.0
    barriers: int = 0


class Launch(NamedTuple):
    """One kernel.

    Attributes:
        name: of the kernel.
        tasks: (how many, turns, of these turns with a mask), in the order in which they begin.
        turn: see `Turn`.
        at_once: blocks that a multiprocessor holds.
        persistent: blocks take one task after another, and overlap the end of one with the beginning of the next.
        in_turn: they take every n-th, whatever it takes.
        stages: tiles in flight.
        hbm_bytes, l2_bytes: moved from or to memory; out of the cache into multiprocessors.
        shared_bytes, registers, threads: of a block.
        backward: it computes gradients.
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

    @property
    def blocks(self) -> int:
        return sum(count for count, _, _ in self.tasks)

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
    builders: dict[str, Any] = {
        "q_outer": _q_outer,
        "hopper": _hopper,
        "split_kv": _split_kv,
        "kv_outer": _kv_outer,
        "dense": _dense,
        "warp_split": _warp_split,
    }
    known = list(lengths) if lengths is not None else sequences(problem)
    return builders[plan.algorithm](problem, device, rates, plan.tiles[0], known)


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


def _seen_width(problem: Problem) -> int:
    return (problem.dim_qk + problem.dim_v) * _element(problem)


def _turn(problem: Problem, block_m: int, block_n: int, dim: int, dim_v: int, *, lazy: bool = False) -> Turn:
    """A subtraction with its factor, a maximum, a sum and a conversion for each score; O is scaled in every turn."""
    scores = block_m * block_n
    return Turn(2.0 * scores * (dim + dim_v), scores + block_m, 4.0 * scores, 0.0 if lazy else float(block_m * dim_v))


def _q_outer(problem: Problem, device: Device, rates: Rates, tile: Tile, lengths: Lengths) -> list[Launch]:
    dim, dim_v = _padded(problem.dim_qk), max(_padded(problem.dim_v), min(_padded(problem.dim_qk), 64))
    block = _portable_block(problem, device, "forward", tile)
    at_once = max(blocks_at_once(block, rates), 1)
    tasks = _by_heads(problem, lengths, tile)
    slots = min(at_once * device.sms, max(sum(count for count, _, _ in tasks), 1))
    own, _ = _streams(problem, lengths)
    tiles_of_head = sum(-(-queries // tile.block_m) for queries, _ in lengths) / max(len(lengths), 1)
    turns = sum(count * turns for count, turns, _ in tasks)
    hbm = own + _kv_from_hbm(problem, lengths, rates, slots, tiles_of_head)
    l2 = own + turns * tile.block_n * _seen_width(problem)
    turn = _turn(problem, tile.block_m, tile.block_n, dim, dim_v)
    return [
        Launch("forward", tuple(tasks), turn, at_once, hbm, l2, tile.stages, shared_bytes=block.shared_bytes,
               registers=block.registers, threads=block.threads)
    ]  # fmt: skip


def _portable_block(problem: Problem, device: Device, kernel: str, tile: Tile) -> Block:
    more = 48 if tile.descriptors else 64  # as compiled on Hopper: addresses, masks, m and l
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
        elif heads * len(one) > 20_000:
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
    tasks = []
    for sequence, count in sorted(_counted(lengths), reverse=True):
        tasks += row_tasks([sequence], problem.heads_q * count, tile.block_m, tile.block_n, problem.band)
    own, _ = _streams(problem, lengths)
    tiles_of_head = sum(-(-queries // tile.block_m) for queries, _ in lengths) / max(len(lengths), 1)
    turns = sum(count * turns for count, turns, _ in tasks)
    hbm = own + _kv_from_hbm(problem, lengths, rates, device.sms, tiles_of_head)
    l2 = own + turns * tile.block_n * _seen_width(problem)
    turn = _turn(problem, tile.block_m, tile.block_n, first + second, dim_v, lazy=tile.lazy)
    consumer = tile.registers()[0]
    shared = hopper.shared_bytes(problem, tile)
    main = Launch(
        "forward", tuple(tasks), turn, 1, hbm, l2, tile.stages, True, tile.schedule == "static", shared, consumer,
        128 * (tile.consumers + 1),
    )  # fmt: skip
    flags = own / max(problem.dim_qk + problem.dim_v, 1) / 64
    guard = Launch("guard", ((1, 0, 0),), Turn(0, 0, 0, 0), 1, flags, flags)
    order = [Launch("order", ((1, 0, 0),), Turn(0, 0, 0, 0), 1, 0.0, 0.0)] if problem.packed else []
    return [*order, main, guard]


def _split_kv(problem: Problem, device: Device, rates: Rates, tile: SplitTile, lengths: Lengths) -> list[Launch]:
    """Rows are the queries of a group of heads; each row tile has parts, and a second kernel combines them."""
    first, second, dim_v = split_kv.padded_dims(problem)
    dim = first + second
    element = _element(problem)
    registers = min((tile.block_m * (dim_v + tile.block_n)) // (32 * tile.warps) + 72, resources.REGISTERS)
    shared = (tile.block_m * dim + max(tile.stages - 1, 1) * tile.block_n * (dim + dim_v)) * element
    block = Block(32 * tile.warps, registers, shared)
    at_once = max(blocks_at_once(block, rates), 1)
    items: list[tuple[int, int]] = []  # (how many row tiles, turns)
    for (queries, keys), count in _counted(lengths):
        seen = keys_seen(min(queries, tile.block_m), keys, problem.band) if queries else 0
        number = -(-queries * problem.group // tile.block_m) * problem.heads_k * count
        items.append((number, -(-seen // tile.block_n)))
    all_turns = sum(number * turns for number, turns in items)
    tasks: list[tuple[int, int, int]] = []
    if tile.fixed:
        for number, turns in items:  # parts of so many tiles, a program each or one after another
            count, each = (-(-turns // tile.parts), min(turns, tile.parts)) if tile.fixed == "c" else (1, turns)
            tasks.append((number * count, each, 1))
        parts = sum(count for count, _, _ in tasks)
    elif tile.together:
        share = max(-(-all_turns // tile.parts), split_kv.least_turns(tile.block_n))
        parts = -(-all_turns // max(share, 1))
        tasks.append((parts, share, 1))
    else:
        for number, turns in items:
            each = -(-turns // tile.parts)
            tasks.append((number * -(-turns // max(each, 1)), each, 1))
        parts = sum(count for count, _, _ in tasks)
    own, head = _streams(problem, lengths)
    row_tiles = max(sum(number for number, _ in items), 1)
    partial = parts * tile.block_m * (problem.dim_v + 1) * 4.0 if parts > row_tiles else 0.0
    width = _cache_width(problem)
    head *= width / _seen_width(problem)
    kv = all_turns * tile.block_n * width
    turn = _turn(problem, tile.block_m, tile.block_n, dim, dim_v)
    if isinstance(problem, PagedProblem):  # where a page is, is read before the page
        turn = turn._replace(waited_bytes=4.0 * -(-tile.block_n // problem.page_size))
    decode = Launch(
        "decode", tuple(tasks), turn, at_once, own + head * len(lengths) * problem.heads_k + partial, kv + partial, tile.stages,
        shared_bytes=shared, registers=registers, threads=block.threads,
    )  # fmt: skip
    if not partial:
        return [decode]
    # The parts of a row are joined one after another, each read when it is its turn.
    joined = Turn(0.0, tile.block_m, 2.0 * tile.block_m * dim_v, 0.0)
    tasks = [(row_tiles, -(-parts // row_tiles), 0)]
    return [decode, Launch("combine", tuple(tasks), joined, rates.threads // 128, 0.0, partial, threads=128, registers=64)]


def _cache_width(problem: Problem) -> int:
    """Bytes of a key and its value; in latent attention (576 and 512) values are the first columns of keys."""
    paged = isinstance(problem, PagedProblem)
    element = 1 if isinstance(problem, PagedProblem) and problem.eight_bits else _element(problem)
    shared = paged and (problem.dim_qk, problem.dim_v) == (576, 512)
    return (problem.dim_qk + (0 if shared else problem.dim_v)) * element


def _kv_outer(problem: Problem, device: Device, rates: Rates, tile: Tile, lengths: Lengths) -> list[Launch]:
    """A block a head; Q once, O twice, m and l twice across the bus in every turn, out of the cache if it holds all heads'."""
    dim, dim_v = _padded(problem.dim_qk), max(_padded(problem.dim_v), min(_padded(problem.dim_qk), 64))
    block = _portable_block(problem, device, "kv_outer", tile)
    at_once = max(blocks_at_once(block, rates), 1)
    tasks = []
    for sequence, count in _counted(lengths):
        turns, masked = _query_turns(*sequence, tile, problem.band)
        tasks.append((problem.heads_q * count, turns, masked))
    element = _element(problem)
    q_bytes, state_bytes = dim * element, dim_v * 4 + 8  # of a row
    turn = _turn(problem, tile.block_m, tile.block_n, dim, dim_v)
    waited = tile.block_m * (q_bytes * (tile.stages == 1) + 2.0 * state_bytes)
    turn = turn._replace(rescale_ops=3.0 * tile.block_m * dim_v, waited_bytes=waited)
    own, head = _streams(problem, lengths)
    rows = sum(queries for queries, _ in lengths) * problem.heads_q
    turns = sum(count * turns for count, turns, _ in tasks)
    again = turns * tile.block_m * (q_bytes + 2.0 * state_bytes)
    running = min(sum(count for count, _, _ in tasks), at_once * device.sms)
    working = running * rows / max(problem.heads_q * len(lengths), 1) * (q_bytes + state_bytes)
    missed = min(max((working / rates.l2_bytes - CACHED) / CACHED, 0.0), 1.0)
    kv = head * len(lengths) * problem.heads_q
    hbm = own + head * len(lengths) * problem.heads_k + rows * (2.0 * state_bytes) * (missed > 0) + again * missed
    return [
        Launch("kv_outer", tuple(tasks), turn, at_once, hbm, own + kv + again, tile.stages, shared_bytes=block.shared_bytes,
               registers=block.registers, threads=block.threads)
    ]  # fmt: skip


def _query_turns(len_q: int, len_k: int, tile: Tile, band: AnyBand) -> tuple[int, int]:
    """Turns of FlashAttention-1 over one head, and those with a mask."""
    turns = masked = 0
    shift = len_k - len_q
    for col in range(0, len_k, tile.block_n):
        last = min(col + tile.block_n, len_k) - 1
        start = min(max(first_query(col, shift, band), 0), len_q) // tile.block_m * tile.block_m
        end = max(min(max(end_query(last, shift, len_q, band), 0), len_q), start)
        here = -(-(end - start) // tile.block_m)
        full_start = min(max(first_query(last, shift, band), 0), len_q)
        full_end = min(max(end_query(col, shift, len_q, band), 0), len_q) // tile.block_m
        full = max(full_end - -(-full_start // tile.block_m), 0) if col + tile.block_n <= len_k else 0
        turns += here
        masked += here - min(full, here)
    return turns, masked


def _dense(problem: Problem, device: Device, rates: Rates, tile: Tile, lengths: Lengths) -> list[Launch]:
    """Three kernels; S is written once and read twice, of which once out of the cache, P written and read once."""
    dim, dim_v = _padded(problem.dim_qk), _padded(problem.dim_v)
    block = _portable_block(problem, device, "dense", tile)
    at_once = max(blocks_at_once(block, rates), 1)
    columns, heads, element = score_columns(problem, tile), problem.batch * problem.heads_q, _element(problem)
    row_tiles, col_tiles = -(-problem.len_q // tile.block_m), columns // tile.block_n
    scores = float(heads * problem.len_q * columns)
    rows, keys = heads * problem.len_q, problem.batch * problem.heads_k * problem.len_k
    tile_scores = tile.block_m * tile.block_n
    tiles = heads * row_tiles * col_tiles
    q_bytes, v_bytes = problem.dim_qk * element, problem.dim_v * element
    first = Launch(
        "scores", ((tiles, 1, 1),), Turn(2.0 * tile_scores * dim, 0, 4.0 * tile_scores, 0), at_once,
        scores * 4 + rows * q_bytes + keys * q_bytes, scores * 4 + tiles * (tile.block_m + tile.block_n) * q_bytes, 1,
        shared_bytes=block.shared_bytes, registers=block.registers, threads=block.threads,
    )  # fmt: skip
    softmax_tile = SOFTMAX_TILE.block_m * SOFTMAX_TILE.block_n
    steps = 2 * -(-columns // SOFTMAX_TILE.block_n)
    second = Launch(
        "softmax", ((-(-rows // SOFTMAX_TILE.block_m), steps, 0),), Turn(0, softmax_tile, 5.0 * softmax_tile, 0),
        rates.threads // 128, scores * (4 + element), scores * (8 + element), 4, threads=128, registers=64,
    )  # fmt: skip
    third = Launch(
        "output", ((heads * row_tiles, col_tiles, 0),), Turn(2.0 * tile_scores * dim_v, 0, 0, 0), at_once,
        scores * element + keys * v_bytes + rows * v_bytes, scores * element + tiles * tile.block_n * v_bytes, tile.stages,
        shared_bytes=block.shared_bytes, registers=block.registers, threads=block.threads,
    )  # fmt: skip
    return [first, second, third]


def _warp_split(problem: Problem, device: Device, rates: Rates, tile: WarpTile, lengths: Lengths) -> list[Launch]:
    """As `q_outer`, with mma.sync; and what a turn reads and writes in shared memory, by who needs what (`kernels/gluon`)."""
    dim, dim_v = _padded(problem.dim_qk), max(_padded(problem.dim_v), min(_padded(problem.dim_qk), 64))
    shared = resources.shared_bytes(problem, device, "warp_split", tile)
    registers = min(resources.registers(problem, "warp_split", tile) + 64, resources.REGISTERS)
    block = Block(32 * tile.warps, registers, shared)
    at_once = max(blocks_at_once(block, rates), 1)
    tasks = _by_heads(problem, lengths, tile)
    slots = min(at_once * device.sms, max(sum(count for count, _, _ in tasks), 1))
    own, _ = _streams(problem, lengths)
    tiles_of_head = sum(-(-queries // tile.block_m) for queries, _ in lengths) / max(len(lengths), 1)
    turns = sum(count * turns for count, turns, _ in tasks)
    hbm = own + _kv_from_hbm(problem, lengths, rates, slots, tiles_of_head)
    turn = _turn(problem, tile.block_m, tile.block_n, dim, dim_v)
    moved, barriers = _in_shared(tile, dim, dim_v)
    slower = max(rates.tensor_flops / SYNC_FLOPS, 1.0)  # in products of the device's own kind
    turn = turn._replace(tensor_flops=turn.tensor_flops * slower, shared_bytes=moved, barriers=barriers)
    main = Launch(
        "warp_split", tuple(tasks), turn, at_once, hbm, own + turns * tile.block_n * _seen_width(problem), tile.stages,
        shared_bytes=shared, registers=registers, threads=block.threads,
    )  # fmt: skip
    return [main, Launch("guard", ((1, 0, 0),), Turn(0, 0, 0, 0), 1, 4.0 * main.blocks, 4.0 * main.blocks)]


def _in_shared(tile: WarpTile, dim: int, dim_v: int) -> tuple[float, int]:
    """`(bytes, barriers)` of a turn of all warps; `test_warp_split.py` counts both in machine code."""
    q, kv = 2.0 * tile.block_m * dim, 2.0 * tile.block_n * (dim + dim_v)
    if tile.share == "rows":  # every warp needs all of K and V
        return q + (tile.warps + 1) * kv, 2
    maxima = 4.0 * tile.block_m * (9 * tile.groups + 4)  # to find and share the maximum of each row
    if tile.share == "late":
        return tile.warps * q + 2 * kv + maxima, 4
    exchange = 2 * 4.0 * tile.groups * tile.block_m * dim_v
    return tile.warps * q + 2 * kv + exchange + 2 * maxima, 7
