"""What `split_kv` launches, as counts: a task is a part of the keys of a row tile, and a second kernel combines the parts.

    p264   `shared_out` gives each sequence its parts as the kernels do on the device (`kernels/triton/parts.py`, `shares`)
    x8     each row tile has 8; c8d24 and r8d24: parts of 8 tiles of keys, twice as many after every 24 parts
           (`plan/fixed_parts.py`), a program each or one after another

Called by `launches.launches`. Which tiles a plan takes, and why, is in `plan/split_kv.py`.
"""

from collections import Counter

from rowmax.analysis.cost import keys_seen
from rowmax.analysis.launches import Launch, Lengths, Turn, _counted, _element, _output, _seen_width, _streams, _turn
from rowmax.analysis.occupancy import Block, blocks_at_once
from rowmax.device import Device, Rates
from rowmax.paged import PagedProblem
from rowmax.plan import fixed_parts, resources, split_kv
from rowmax.plan.split_kv import TURNS_TO_BEGIN, SplitTile
from rowmax.problem import Problem

SIZES = 16  # of parts that are weighed, up to twice the least
PIECE, WIDE, PARTS_AT_ONCE = 16, 4096, 16  # as `kernels/decode_launch.py`: rows, elements, parts loaded together
COMBINE_REGISTERS = 64
SUMS = 5  # answers in whose time a program adds up the parts of all sequences: sums of a block, one after another
WIDENED = 1.0  # fp32 operations for a number of 8 bits: of four, one sorts their bytes and two widen them


def split_kv_launches(problem: Problem, device: Device, rates: Rates, tile: SplitTile, lengths: Lengths) -> list[Launch]:
    """Rows are the queries of a group of heads; each row tile has parts, which a second kernel combines, or the same."""
    first, second, dim_v = split_kv.padded_dims(problem)
    dim = first + second
    item = _element(problem)
    paged = isinstance(problem, PagedProblem)
    stored = 1 if isinstance(problem, PagedProblem) and problem.eight_bits else item
    registers = min((tile.block_m * (dim_v + tile.block_n)) // (32 * tile.warps) + 72, resources.REGISTERS)
    shared = tile.block_m * dim * item + max(tile.stages - 1, 1) * tile.block_n * (dim + dim_v) * stored
    block = Block(32 * tile.warps, registers, shared)
    at_once = max(blocks_at_once(block, rates), 1)
    tasks, row_tiles, parts, all_turns = _tasks(problem, tile, lengths)
    idle = parts - sum(count for count, _, _ in tasks) + _surplus(problem, tile, parts)
    own, head = _streams(problem, lengths)
    real = min(tile.block_m, problem.len_q * problem.group)  # rows of a tile that are there
    partial = parts * real * (problem.dim_v + 2) * 4.0 if parts > row_tiles else 0.0
    width = _cache_width(problem)
    head *= width / _seen_width(problem)
    kv = all_turns * tile.block_n * width
    turn = _turn(problem, tile.block_m, tile.block_n, dim, dim_v)
    if stored < item:
        turn = turn._replace(score_ops=turn.score_ops + WIDENED * tile.block_n * (dim + dim_v))
    turn = turn._replace(ahead_bytes=float(tile.block_n * width), lookups=int(paged))  # where a page is, is read before it
    decode = Launch(
        "decode", tuple(tasks), turn, at_once, own + head * len(lengths) * problem.heads_k + partial, kv + partial, tile.stages,
        shared_bytes=shared, registers=registers, threads=block.threads, far=1.0, streams=True,
        own_bytes=real * (dim + dim_v) * float(item), lookups=_lookups(problem, tile), empty=idle,
        written=partial or _output(problem, lengths),
    )  # fmt: skip
    if not partial:
        return [decode]
    return [decode, _combine(problem, rates, tile, real, parts, row_tiles, partial, dim_v)]


def shared_out(problem: Problem, tile: SplitTile, lengths: Lengths) -> list[int]:
    """Parts of each row tile, for every sequence: of all together about `tile.parts`. `parts.shares` once more."""
    group, (left, right) = problem.group, problem.band[:2]
    turns, tiles = [], []
    for queries, keys in lengths:
        seen = keys
        if left is not None and right is not None:
            seen = min(keys, left + right + 1 + min(queries, (tile.block_m + group - 1) // group))
        turns.append(-(-seen // tile.block_n))
        tiles.append(-(-queries * group // tile.block_m))
    work = sum(a * b for a, b in zip(tiles, turns, strict=True)) * problem.heads_k
    least = max(min(-(-work // tile.parts), max(turns, default=0)), split_kv.least_turns(tile.block_n))

    def time(size: int) -> int:
        count = sum(a * max(-(-b // size), 1) for a, b in zip(tiles, turns, strict=True)) * problem.heads_k
        waits = 0 if count <= tile.parts else -(-(work + TURNS_TO_BEGIN * count) // tile.parts)
        return waits + size + TURNS_TO_BEGIN

    best = min((least + least * i // SIZES for i in range(SIZES)), key=time)
    return [max(-(-own // best), 1) for own in turns]


def _tasks(problem: Problem, tile: SplitTile, lengths: Lengths) -> tuple[list[tuple[int, int, int]], int, int, int]:
    """`(tasks, row tiles, parts, turns)`; every turn has a mask. Of the parts of a row tile the last that has turns is the
    shorter one, unless all are fixed; those that have none are no tasks, though the second kernel joins them too."""
    tasks: list[tuple[int, int, int]] = []
    row_tiles = all_parts = all_turns = 0
    counted = _counted(lengths)
    shares = shared_out(problem, tile, lengths) if tile.together else []
    parts_of = dict(zip(lengths, shares, strict=True)) if tile.together else {}
    for sequence, count in counted:
        queries, keys = sequence
        seen = keys_seen(min(queries, -(-tile.block_m // problem.group)), keys, problem.band) if queries else 0
        turns = -(-seen // tile.block_n)
        number = -(-queries * problem.group // tile.block_m) * problem.heads_k * count
        row_tiles, all_turns = row_tiles + number, all_turns + number * turns
        if tile.fixed == "r":
            tasks.append((number, turns, turns))
            all_parts += number
            continue
        if tile.fixed:
            sizes = _fixed_sizes(tile, max(keys - seen, 0) // tile.block_n, turns)
            all_parts += number * max(len(sizes), 1)
            tasks += [(number * many, own, own) for own, many in Counter(sizes).items()]
            continue
        parts = max(parts_of.get(sequence, tile.parts), 1)
        each = max(-(-turns // parts), 1)
        all_parts += number * parts
        full, rest = divmod(turns, each)
        tasks += [(many, own, own) for many, own in ((number * full, each), (number, rest)) if many and own]
    return tasks, row_tiles, all_parts, all_turns


def _fixed_sizes(tile: SplitTile, begin: int, turns: int) -> list[int]:
    """Tiles of keys of each part that tiles `[begin, begin + turns)` lie in, as they are launched: the last part first."""
    size, doubles, end = tile.parts, tile.doubles, begin + turns
    last = fixed_parts.part_of(end - 1, size, doubles) if turns else -1
    first = fixed_parts.part_of(begin, size, doubles)
    edges = [
        (fixed_parts.first_tile(n, size, doubles), fixed_parts.first_tile(n + 1, size, doubles)) for n in range(first, last + 1)
    ]
    return [min(after, end) - max(before, begin) for before, after in reversed(edges)]


def _lookups(problem: Problem, tile: SplitTile) -> int:
    """Answers that a program waits for until it knows its part: its sequence's length; of parts shared out together before it
    all lengths, of packed queries also their bounds."""
    if not isinstance(problem, PagedProblem):
        return 0
    return 1 + tile.together * (SUMS + problem.packed)


def _surplus(problem: Problem, tile: SplitTile, parts: int) -> int:
    """Programs without a part, of a grid that is as large as any lengths may need."""
    if not tile.together:
        return 0
    items = split_kv.row_tiles(problem, tile.block_m) * problem.heads_k
    return max(items + (tile.parts // problem.heads_k + 1) * problem.heads_k - parts, 0)


def _combine(
    problem: Problem, rates: Rates, tile: SplitTile, real: int, parts: int, row_tiles: int, partial: float, dim_v: int
) -> Launch:
    """A program a row, or a few. Parts are joined one after another; some are loaded together, from the cache. Where a tile
    says `once` it is no kernel, but what the last program of a row tile does: counted as such, not measured."""
    once = tile.once
    rows = 1 if real <= 16 and not once else min(1 << (real - 1).bit_length() if once else PIECE, max(WIDE // dim_v, 1))
    warps = tile.warps if once else max(min(rows * dim_v // 512, 4), 1)
    each = -(-parts // max(row_tiles, 1))
    together = max(min(1 << (each - 1).bit_length(), PARTS_AT_ONCE, 64 // max(rows * dim_v // (32 * warps), 1)), 1)
    joined = Turn(0.0, rows, 2.0 * rows * dim_v, 0.0)
    tasks = ((row_tiles * -(-real // rows), each, 0),)
    loads = ((-(-each // together), 0, 4.0 * each * rows * dim_v),)
    at_once = blocks_at_once(Block(32 * warps, COMBINE_REGISTERS, 0), rates)
    return Launch(
        "combine", tasks, joined, at_once, 0.0, partial, 1, threads=32 * warps, registers=COMBINE_REGISTERS, outer=loads,
        lookups=1 if once else _lookups(problem, tile), joins=True, inside=once,
    )  # fmt: skip


def _cache_width(problem: Problem) -> int:
    """Bytes of a key and its value; in latent attention (576 and 512) values are the first columns of keys."""
    paged = isinstance(problem, PagedProblem)
    element = 1 if isinstance(problem, PagedProblem) and problem.eight_bits else _element(problem)
    shared = paged and (problem.dim_qk, problem.dim_v) == (576, 512)
    return (problem.dim_qk + (0 if shared else problem.dim_v)) * element
