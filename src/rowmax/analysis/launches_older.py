"""What the forwards before `q_outer` and `hopper` launch, as counts: `launches.py` for those that run only when asked for.

kv_outer     a task is a head, a turn a tile of queries that passes by; outside of its turns a block waits for tiles of K and V
dense        scores, softmax, output: a task is a tile of scores, four rows, a row tile
warp_split   as `q_outer`, and what goes through shared memory
"""

from rowmax.analysis.launches import (
    Launch,
    Lengths,
    Turn,
    _by_heads,
    _counted,
    _element,
    _lookups,
    _padded,
    _portable_block,
    _streams,
    _turn,
    _walked,
    missed,
)
from rowmax.analysis.occupancy import Block, blocks_at_once
from rowmax.device import Device, Rates
from rowmax.mask import AnyBand, end_query, first_query
from rowmax.plan import resources
from rowmax.plan.generations import SOFTMAX_TILE, score_columns
from rowmax.plan.tile import Tile
from rowmax.plan.warp_split import WarpTile
from rowmax.problem import Problem


def kv_outer(problem: Problem, device: Device, rates: Rates, tile: Tile, lengths: Lengths) -> list[Launch]:
    """A block a head; Q once, O twice, m and l twice across the bus in every turn, out of the cache as far as it holds them."""
    dim, dim_v = _padded(problem.dim_qk), max(_padded(problem.dim_v), min(_padded(problem.dim_qk), 64))
    element = _element(problem)
    block = _portable_block(problem, device, "kv_outer", tile)
    if tile.stages > 1:  # as compiled: tiles of Q and O on their way, beside K and V
        ways = tile.block_n * (dim + dim_v) * element + tile.stages * tile.block_m * (dim * element + dim_v * 4)
        block = block._replace(shared_bytes=ways)
    at_once = max(blocks_at_once(block, rates), 1)
    # Of a row; tiles of K and V, of Q and O.
    q_bytes, state_bytes = dim * element, dim_v * 4 + 8
    kv_tile, tasks, outer, columns = float(tile.block_n * (dim + dim_v) * element), [], [], 0
    for sequence, count in _counted(lengths):
        turns, masked, loops = _query_turns(*sequence, tile, problem.band)
        tiles, real = -(-sequence[1] // tile.block_n), min(tile.block_m, sequence[0])
        tasks.append((problem.heads_q * count, turns, masked))
        # K and V, and until they are in shared memory; each loop, without a mask or with one, begins by waiting for Q and O.
        begun = loops * (tile.stages > 1)
        outer.append((2 * tiles + begun, tiles, tiles * kv_tile + begun * real * (q_bytes + state_bytes)))
        columns += problem.heads_q * count * tiles
    turn = _turn(problem, tile.block_m, tile.block_n, dim, dim_v)
    real = min(tile.block_m, max((queries for queries, _ in lengths), default=1))  # rows of a tile that are there
    waited, ahead = real * 2.0 * state_bytes, real * float(q_bytes)
    if tile.stages > 1:
        waited, ahead = waited + ahead, 0.0
    turn = turn._replace(rescale_ops=3.0 * tile.block_m * dim_v, waited_bytes=waited, ahead_bytes=ahead)
    own, head = _streams(problem, lengths)
    rows = sum(queries for queries, _ in lengths) * problem.heads_q
    turns = sum(count * turns for count, turns, _ in tasks)
    again = turns * tile.block_m * (q_bytes + 2.0 * state_bytes)
    running = min(sum(count for count, _, _ in tasks), at_once * device.sms)
    passing = min(turns * tile.block_m / max(columns, 1) * problem.heads_q * len(lengths), rows)  # a tile of K and V
    working = running * passing / max(problem.heads_q * len(lengths), 1) * (q_bytes + state_bytes)
    far = missed(working, rates)
    kv = head * len(lengths) * problem.heads_q
    hbm = own + head * len(lengths) * problem.heads_k + rows * (2.0 * state_bytes) * (far > 0) + again * far
    return [
        Launch("kv_outer", tuple(tasks), turn, at_once, hbm, own + kv + again, tile.stages, shared_bytes=block.shared_bytes,
               registers=block.registers, threads=block.threads, far=far, outer=tuple(outer))
    ]  # fmt: skip


def _query_turns(len_q: int, len_k: int, tile: Tile, band: AnyBand) -> tuple[int, int, int]:
    """Turns of FlashAttention-1 over one head, those with a mask, and the loops that they are in."""
    turns = masked = loops = 0
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
        loops += (min(full, here) > 0) + (here > full)
    return turns, masked, loops


def dense(problem: Problem, device: Device, rates: Rates, tile: Tile, lengths: Lengths) -> list[Launch]:
    """Three kernels. S is written once and read twice, P written and read once; what fits in the cache is found there."""
    dim, dim_v = _padded(problem.dim_qk), _padded(problem.dim_v)
    block = _portable_block(problem, device, "dense", tile)
    at_once = max(blocks_at_once(block, rates), 1)
    columns, heads, element = score_columns(problem, tile), problem.batch * problem.heads_q, _element(problem)
    row_tiles, col_tiles = -(-problem.len_q // tile.block_m), columns // tile.block_n
    scores = float(heads * problem.len_q * columns)
    rows, keys = heads * problem.len_q, problem.batch * problem.heads_k * problem.len_k
    tile_scores = tile.block_m * tile.block_n
    real = min(problem.len_q, tile.block_m) * tile.block_n  # scores of a tile that are stored
    tiles = heads * row_tiles * col_tiles
    q_bytes, v_bytes = problem.dim_qk * element, problem.dim_v * element
    sides = sum(side is not None for side in problem.band[:2])  # as compiled
    alone = Block(32 * tile.warps, tile_scores // (32 * tile.warps) + 46 + 8 * sides,
                  max((tile.block_m + tile.block_n) * dim * element, 4 * tile_scores))  # fmt: skip
    s_far, p_far = missed(4 * scores, rates), missed(element * scores, rates)
    first = Launch(
        "scores", ((tiles, 1, 1),),
        Turn(2.0 * tile_scores * dim, 0, 4.0 * tile_scores, 0, mask_ops=(2.0 + sides) * tile_scores),
        max(blocks_at_once(alone, rates), 1), scores * 4 * s_far + rows * q_bytes + keys * q_bytes,
        scores * 4 + tiles * (min(problem.len_q, tile.block_m) + tile.block_n) * q_bytes, 1,
        shared_bytes=alone.shared_bytes, registers=alone.registers, threads=alone.threads,
        own_bytes=(min(problem.len_q, tile.block_m) + tile.block_n) * dim * element + 4.0 * real,
        own_far=min((rows + keys) / max(tiles * (min(problem.len_q, tile.block_m) + tile.block_n), 1), 1.0),
    )  # fmt: skip
    softmax_tile = SOFTMAX_TILE.block_m * SOFTMAX_TILE.block_n
    steps = 2 * -(-columns // SOFTMAX_TILE.block_n)
    softmax_blocks = -(-rows // SOFTMAX_TILE.block_m)
    together = min(softmax_blocks, SOFTMAX_AT_ONCE * device.sms) * SOFTMAX_TILE.block_m * columns * 4.0
    second = Launch(
        "softmax", ((softmax_blocks, steps, 0),), Turn(0, softmax_tile, 5.0 * softmax_tile, 0, waited_bytes=4.0 * softmax_tile),
        SOFTMAX_AT_ONCE, scores * (4 * s_far + 4 * missed(together, rates) + element * p_far), scores * (8 + element), 1,
        threads=128, registers=56, far=s_far,
    )  # fmt: skip
    hbm = scores * element * p_far + keys * v_bytes + rows * v_bytes
    l2 = scores * element + tiles * tile.block_n * v_bytes
    third = Launch(
        "output", ((heads * row_tiles, col_tiles, 0),),
        Turn(2.0 * tile_scores * dim_v, 0, 0, 0, ahead_bytes=float(real + tile.block_n * dim_v) * element), at_once, hbm, l2,
        tile.stages, shared_bytes=block.shared_bytes, registers=block.registers, threads=block.threads, far=min(hbm / l2, 1.0),
        own_bytes=tile.block_m * dim_v * float(element),
    )  # fmt: skip
    return [first, second, third]


SOFTMAX_AT_ONCE = 9  # blocks of a multiprocessor, as compiled


def warp_split(problem: Problem, device: Device, rates: Rates, tile: WarpTile, lengths: Lengths) -> list[Launch]:
    """As `q_outer`, with mma.sync; and what a turn reads and writes in shared memory, by who needs what (`kernels/gluon`)."""
    dim, dim_v = _padded(problem.dim_qk), max(_padded(problem.dim_v), min(_padded(problem.dim_qk), 64))
    shared = resources.shared_bytes(problem, device, "warp_split", tile)
    registers = min(resources.registers(problem, "warp_split", tile) + 78, resources.REGISTERS)  # as compiled
    block = Block(32 * tile.warps, registers, shared)
    at_once = max(blocks_at_once(block, rates), 1)
    tasks = _by_heads(problem, lengths, tile)
    slots = min(at_once * device.sms, max(sum(count for count, _, _ in tasks), 1))
    hbm, l2, far = _walked(problem, rates, tile, lengths, tasks, slots)
    turn = _turn(problem, tile.block_m, tile.block_n, dim, dim_v)
    moved, barriers = _in_shared(tile, dim, dim_v)
    # Partial sums are stored 8 bytes a thread, those of 8 rows at once, which all begin in the same bank: 8 steps instead of 2.
    conflicts = 3 * 4.0 * tile.groups * tile.block_m * dim_v if tile.share == "columns" and dim_v >= 32 else 0.0
    turn = turn._replace(sync=True, shared_bytes=moved, conflict_bytes=conflicts, barriers=barriers)
    main = Launch(
        "warp_split", tuple(tasks), turn, at_once, hbm, l2, tile.stages, shared_bytes=shared, registers=registers,
        threads=block.threads, far=far, lookups=_lookups(problem),
        own_bytes=float(tile.block_m * (dim + dim_v) * _element(problem)),
    )  # fmt: skip
    guard = Launch(
        "guard", ((-(-main.blocks // 16), 0, 0),), Turn(0, 0, 0, 0), 16, 4.0 * main.blocks, 4.0 * main.blocks, light=True
    )
    return [main, guard]


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
