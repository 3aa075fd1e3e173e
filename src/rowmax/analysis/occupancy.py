"""How many blocks a multiprocessor holds at once, and when the last of them is done.

    blocks at once = min over threads, registers, shared memory of (what the multiprocessor has) // (what a block takes)
    makespan       = time until a list of blocks, begun in order as slots become free, has ended

Called by `predict.py`. Limits are those of the CUDA programming guide (`device.Rates`).
"""

import heapq
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from rowmax.device import REGISTERS, Rates

MOST_WAVES = 24  # scheduled one by one; of more, the end is a matter of averages
MOST_RUNS = 10_000  # of equal tasks: of more, too, those that are taken in turn are told apart no longer


class Block(NamedTuple):
    """What a block takes: threads, registers of a thread, bytes of shared memory."""

    threads: int
    registers: int
    shared_bytes: int


def blocks_at_once(block: Block, rates: Rates) -> int:
    """Of one multiprocessor; 0 if it cannot hold even one."""
    by_registers = REGISTERS // (-(-block.registers // 8) * 8 * block.threads)
    by_shared = rates.shared_bytes // (block.shared_bytes + 1024)  # the driver keeps 1 KB of each
    return min(rates.blocks, rates.threads // block.threads, by_registers, by_shared)


def makespan(tasks: Sequence[tuple[int, float]], slots: int, *, in_turn: bool = False) -> float:
    """When the last task ends.

    Args:
        tasks: (how many, how long) in the order in which they begin.
        slots: tasks that run at once.
        in_turn: slot i takes tasks i, i + slots, ... whatever they take; otherwise the next free slot takes the next task.
    """
    number = sum(count for count, _ in tasks)
    if number == 0:
        return 0.0
    if in_turn and len(tasks) <= MOST_RUNS:
        return max(_in_turn(tasks, min(slots, number)))
    if number > MOST_WAVES * slots:
        last = tasks[-1][1]
        return sum(count * cost for count, cost in tasks) / slots + last / 2
    if len({cost for _, cost in tasks}) == 1:
        return -(-number // slots) * tasks[0][1]
    free = [0.0] * min(slots, number)
    for count, cost in tasks:
        for _ in range(count):
            heapq.heapreplace(free, free[0] + cost)
    return max(free)


def _in_turn(tasks: Sequence[tuple[int, float]], slots: int) -> list[float]:
    """When each slot is done: a run of equal tasks is the same for all slots, but for as many as do not fill them evenly."""
    steps, every, first = [0.0] * (slots + 1), 0.0, 0  # `steps`: by how much a slot has more than the one before it
    for count, cost in tasks:
        rounds, more = divmod(count, slots)
        every += rounds * cost
        end = first + more
        steps[first] += cost
        steps[min(end, slots)] -= cost
        if end > slots:
            steps[0] += cost
            steps[end - slots] -= cost
        first = end % slots
    return [every + more for more in accumulate(steps[:slots])]


def schedule(tasks: Sequence[tuple[int, float]], slots: int, *, in_turn: bool = False) -> list[tuple[int, float, float]]:
    """`(slot, begin, end)` of every task, in the order of `tasks`; the last end is the makespan."""
    free, found = [(0.0, slot) for slot in range(slots)], []
    ends = [0.0] * slots
    for number, cost in enumerate(cost for count, cost in tasks for _ in range(count)):
        slot = number % slots if in_turn else heapq.heappop(free)[1]
        found.append((slot, ends[slot], ends[slot] + cost))
        ends[slot] += cost
        if not in_turn:
            heapq.heappush(free, (ends[slot], slot))
    return found


def occupied(tasks: Sequence[tuple[int, float]], sms: int, at_once: int) -> float:
    """How long a multiprocessor has a task, the mean of all: each until the last of its own ends. Slots are filled one on every
    multiprocessor before a second on any."""
    number = sum(count for count, _ in tasks)
    if number > MOST_WAVES * sms * at_once:
        return balanced(tasks, sms * at_once)
    ends = [0.0] * sms
    for slot, _, end in schedule(tasks, sms * at_once):
        ends[slot % sms] = max(ends[slot % sms], end)
    return sum(ends) / sms


def balanced(tasks: Sequence[tuple[int, float]], slots: int) -> float:
    """The makespan if tasks could be divided at will."""
    return sum(count * cost for count, cost in tasks) / slots
