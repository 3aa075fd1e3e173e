"""What a backward launches, as counts: `launches.py` for the gradients.

q_outer   rows (delta), dQ as the forward walks, dK and dV of key tiles: queries of all heads of the group pass by
hopper    rows and an empty dQ in fp32; all five products of a key tile, dQ added up in memory; dQ in its own type
wide      rows; dK and dV with four products a turn, dQ with three; a kernel that looks at marks

a task  = a row tile or a key tile,   a turn  = one tile of scores
"""

from collections.abc import Sequence

from rowmax.analysis.launches import (
    Launch,
    Lengths,
    Turn,
    _by_heads,
    _counted,
    _element,
    _kv_from_hbm,
    _padded,
    _portable_block,
    _seen_width,
    _streams,
    row_tasks,
)
from rowmax.analysis.occupancy import blocks_at_once
from rowmax.device import Device, Rates
from rowmax.mask import AnyBand, early_keys, end_query, first_query
from rowmax.plan import Plan, hopper_backward, hopper_wide
from rowmax.plan.hopper_backward import HopperBackwardTile
from rowmax.plan.hopper_wide import HopperWideTile
from rowmax.plan.tile import Tile
from rowmax.problem import Problem

SCORE_OPS = 6.0  # of a score: its exponent, dP - delta, times P, and two conversions; the forward has 4


def launches(problem: Problem, device: Device, rates: Rates, plan: Plan, lengths: Lengths) -> list[Launch]:
    """The kernels of all three gradients, in order.

    Raises:
        KeyError: no model of the plan's algorithm.
    """
    first = plan.tiles[0] if plan.tiles else None
    if isinstance(first, HopperWideTile):
        return _wide(problem, device, rates, first, lengths)
    if isinstance(first, HopperBackwardTile):
        return _hopper(problem, device, rates, first, lengths)
    if plan.algorithm != "q_outer":
        raise KeyError(f"no model of the backward of {plan.algorithm}")
    return _portable(problem, device, rates, plan.tiles, lengths)


def key_tasks(
    lengths: Lengths, heads: int, block_n: int, block_m: int, band: AnyBand, group: int
) -> list[tuple[int, int, int]]:
    """`(heads, turns, masked turns)` of each key tile, the last of a sequence first; `heads` are those of K and V."""
    found: list[tuple[int, int, int]] = []
    known: dict = {}
    for length in lengths:
        if length not in known:
            known[length] = [_query_tiles(col, block_n, block_m, *length, band) for col in range(0, length[1], block_n)]
        found += [(heads, group * turns, group * masked) for turns, masked in reversed(known[length])]
    return found


def _query_tiles(col: int, block_n: int, block_m: int, len_q: int, len_k: int, band: AnyBand) -> tuple[int, int]:
    """Query tiles that see one of the keys `[col, col + block_n)`, and those of which not every row sees all."""
    shift, last = len_k - len_q, min(col + block_n, len_k) - 1
    start = min(max(first_query(col, shift, band), 0), len_q) // block_m * block_m
    most = max(end_query(key, shift, len_q, band) for key in (col, last))
    end = max(min(max(most, 0), len_q), start)
    turns = -(-(end - start) // block_m)
    full_start = -(-min(max(first_query(last, shift, band), 0), len_q) // block_m)
    fewest = max(col, min(last, early_keys(band)))  # early keys are seen to the end
    full_end = min(max(end_query(fewest, shift, len_q, band), 0), len_q) // block_m
    return turns, turns - min(max(full_end - full_start, 0), turns)


def _rows(problem: Problem, lengths: Lengths, bytes_of_row: float, name: str) -> Launch:
    """A kernel bound by memory: so many bytes of every row of a head."""
    moved = sum(queries for queries, _ in lengths) * problem.heads_q * bytes_of_row
    return Launch(name, ((1, 0, 0),), Turn(0, 0, 0, 0), 1, moved, moved)


def _step(block_m: int, block_n: int, width: float, *, exps: bool = True) -> Turn:
    """`width`: dims of all products of a turn together."""
    scores = float(block_m * block_n)
    return Turn(2.0 * scores * width, scores * exps, SCORE_OPS * scores, 0.0)


def _tiles_of_head(lengths: Lengths, side: int, block: int) -> float:
    return sum(-(-length[side] // block) for length in lengths) / max(len(lengths), 1)


def _keys(problem: Problem, lengths: Lengths) -> float:
    """Bytes of K and V, or of dK and dV."""
    return float(sum(keys for _, keys in lengths) * problem.heads_k * _seen_width(problem))


def _queries_from_hbm(problem: Problem, lengths: Lengths, rates: Rates, slots: int, tiles_of_head: float) -> float:
    """Bytes of Q and dO, as `launches._kv_from_hbm` has K and V: all heads of a group pass by the key tiles of one."""
    queries = sum(queries for queries, _ in lengths) / max(len(lengths), 1)
    head = queries * (_seen_width(problem) + 8.0) * problem.group
    together = max(slots / max(tiles_of_head, 1.0), 1.0) * head
    rounds = 1.0 if together <= 0.7 * rates.l2_bytes else max(tiles_of_head / slots, 1.0)
    return head * len(lengths) * problem.heads_k * rounds


def _portable(problem: Problem, device: Device, rates: Rates, tiles: Sequence[Tile], lengths: Lengths) -> list[Launch]:
    dim, dim_v = _padded(problem.dim_qk), max(_padded(problem.dim_v), min(_padded(problem.dim_qk), 64))
    query_tile, *key_tiles = tiles
    found = [_rows(problem, lengths, 2.0 * problem.dim_v * _element(problem) + 12.0, "row")]

    block = _portable_block(problem, device, "dq", query_tile)
    at_once = max(blocks_at_once(block, rates), 1)
    tasks = _by_heads(problem, lengths, query_tile)
    slots = min(at_once * device.sms, max(sum(count for count, _, _ in tasks), 1))
    rows, _ = _streams(problem, lengths)
    own = rows * 1.5 + 4.0 * sum(queries for queries, _ in lengths) * problem.heads_q  # Q, dO, dQ; two numbers
    tiles_of_head = _tiles_of_head(lengths, 0, query_tile.block_m)
    turns = sum(count * turns for count, turns, _ in tasks)
    hbm = own + _kv_from_hbm(problem, lengths, rates, slots, tiles_of_head)
    step = _step(query_tile.block_m, query_tile.block_n, 2 * dim + dim_v)
    found.append(
        Launch("query", tuple(tasks), step, at_once, hbm, own + turns * query_tile.block_n * _seen_width(problem),
               query_tile.stages, shared_bytes=block.shared_bytes, registers=block.registers, threads=block.threads,
               backward=True)
    )  # fmt: skip

    alone = len(key_tiles) > 1
    kinds = (("key", "dk", 2 * dim + dim_v), ("value", "dv", dim + dim_v)) if alone else (("key", "dkdv", 2 * (dim + dim_v)),)
    for (name, kernel, width), tile in zip(kinds, key_tiles, strict=True):
        block = _portable_block(problem, device, kernel, tile)
        at_once = max(blocks_at_once(block, rates), 1)
        tasks = _by_kv_heads(problem, lengths, tile)
        slots = min(at_once * device.sms, max(sum(count for count, _, _ in tasks), 1))
        keys, turns = _keys(problem, lengths), sum(count * turns for count, turns, _ in tasks)
        hbm = 2 * keys + _queries_from_hbm(problem, lengths, rates, slots, _tiles_of_head(lengths, 1, tile.block_n))
        l2 = 2 * keys + turns * tile.block_m * (_seen_width(problem) + 8.0)
        found.append(
            Launch(name, tuple(tasks), _step(tile.block_m, tile.block_n, width), at_once, hbm, l2, tile.stages,
                   shared_bytes=block.shared_bytes, registers=block.registers, threads=block.threads, backward=True)
        )  # fmt: skip
    return found


def _by_kv_heads(problem: Problem, lengths: Lengths, tile: Tile) -> list[tuple[int, int, int]]:
    """Key tiles in the order of `address.locate`: the tiles of one head side by side."""
    tasks: list = []
    for sequence, count in _counted(lengths):
        one = key_tasks([sequence], 1, tile.block_n, tile.block_m, problem.band, problem.group)
        heads = problem.heads_k * count
        if len({turns for _, turns, _ in one}) == 1:
            tasks.append((heads * len(one), one[0][1], max(masked for _, _, masked in one)))
        elif heads * len(one) > 20_000:
            tasks += [(heads, turns, masked) for _, turns, masked in one]
        else:
            tasks += one * heads
    return tasks


def _hopper(problem: Problem, device: Device, rates: Rates, tile: HopperBackwardTile, lengths: Lengths) -> list[Launch]:
    dim, dim_v = hopper_backward.padded_dims(problem)
    element, rows = _element(problem), sum(queries for queries, _ in lengths) * problem.heads_q
    prepare = _rows(problem, lengths, 2.0 * problem.dim_v * element + 12.0 + 4.0 * problem.dim_qk, "prepare")
    finish = _rows(problem, lengths, (4.0 + element) * problem.dim_qk, "finish")
    tasks: list = []
    lines, group = problem.heads_k * tile.parts, problem.group // tile.parts
    for sequence, count in sorted(_counted(lengths), reverse=True):
        one = key_tasks([sequence], lines * count, tile.block_n, tile.block_m, problem.band, group)
        tasks += sorted(one, key=lambda task: -task[1])  # the longest of a head first
    turns, keys = sum(count * turns for count, turns, _ in tasks), _keys(problem, lengths)
    sums = 4.0 * rows * problem.dim_qk
    hbm = 2 * keys + 2 * sums
    if tile.parts > 1:  # dK and dV of each part in fp32, added up by the last kernel
        partial = keys * tile.parts * 4.0 / element
        hbm += partial - keys
        finish = finish._replace(hbm_bytes=finish.hbm_bytes + partial + keys, l2_bytes=finish.l2_bytes + partial + keys)
    hbm += _queries_from_hbm(problem, lengths, rates, device.sms, _tiles_of_head(lengths, 1, tile.block_n))
    l2 = hbm + turns * tile.block_m * (_seen_width(problem) + 8.0 + 4.0 * problem.dim_qk)
    shared = hopper_backward.shared_bytes(problem, tile)
    main = Launch(
        "backward", tuple(tasks), _step(tile.block_m, tile.block_n, 3 * dim + 2 * dim_v), 1, hbm, l2, tile.stages, True,
        shared_bytes=shared, registers=tile.registers()[0], threads=384, backward=True,
    )  # fmt: skip
    return [prepare, main, finish]


def _wide(problem: Problem, device: Device, rates: Rates, tile: HopperWideTile, lengths: Lengths) -> list[Launch]:
    dim, dim_v = hopper_wide.padded_dims(problem)
    element = _element(problem)
    prepare = _rows(problem, lengths, 2.0 * problem.dim_v * element + 12.0, "prepare")
    shared, own = hopper_wide.shared_bytes(problem, tile)
    tasks: list = []
    for sequence, count in sorted(_counted(lengths), reverse=True):
        one = key_tasks([sequence], problem.heads_k * count, hopper_wide.KEYS, hopper_wide.QUERIES, problem.band, problem.group)
        tasks += sorted(one, key=lambda task: -task[1])
    turns, kv = sum(count * turns for count, turns, _ in tasks), _keys(problem, lengths)
    hbm = 2 * kv + _queries_from_hbm(problem, lengths, rates, device.sms, _tiles_of_head(lengths, 1, hopper_wide.KEYS))
    keys = Launch(
        "keys", tuple(tasks), _step(hopper_wide.QUERIES, hopper_wide.KEYS, 2 * (dim + dim_v)), 1, hbm,
        hbm + turns * hopper_wide.QUERIES * (_seen_width(problem) + 8.0), tile.stages, True, shared_bytes=shared,
        registers=tile.registers()[0], threads=384, backward=True,
    )  # fmt: skip
    tasks = []
    for sequence, count in sorted(_counted(lengths), reverse=True):
        tasks += row_tasks([sequence], problem.heads_q * count, tile.block_m, tile.block_n, problem.band)
    turns = sum(count * turns for count, turns, _ in tasks)
    rows, _ = _streams(problem, lengths)
    hbm = rows * 1.5 + _kv_from_hbm(problem, lengths, rates, device.sms, _tiles_of_head(lengths, 0, tile.block_m))
    queries = Launch(
        "queries", tuple(tasks), _step(tile.block_m, tile.block_n, 2 * dim + dim_v), 1, hbm,
        hbm + turns * tile.block_n * _seen_width(problem), tile.stages, True, shared_bytes=own,
        registers=tile.registers()[0], threads=384, backward=True,
    )  # fmt: skip
    return [prepare, keys, queries, Launch("repair", ((1, 0, 0),), Turn(0, 0, 0, 0), 1, 0.0, 0.0)]
