"""Times of several calls taken side by side, so that clocks, heat and neighbours touch all of them alike.

Each round times every call once, starting one further along the list than the round before. On a GPU a call is what lies
between two events on the stream, after the L2 cache was overwritten; on a CPU it is timed by `torch.utils.benchmark`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.benchmark import Timer

Calls = Mapping[Any, Callable[[], Any]]
FLUSH_BYTES = 256 * 2**20  # several times the largest L2 (50 to 126 MB)
HEAD_START = 32  # flushes, about 2 ms, queued ahead so that the host stays in front of the device
SPIN_CYCLES = 500_000  # about 300 us: the host needs up to 100 for a call that was not made before
MIN_ROUNDS, MAX_ROUNDS = 5, 100


def samples_ms(
    calls: Calls, device: torch.device, seconds: float, *, spin: bool = False, clean: bool = False
) -> tuple[dict[Any, list[float]], dict[Any, Any]]:
    """`(times of each call in ms, what each call returned last)`, within about `seconds` for all together.

    Args:
        spin: let a GPU spin before each call for so long that the host has queued all of it: the time is the GPU's alone, also
            where the host takes longer to launch than the kernels to run.
        clean: behind what overwrites a GPU's L2 also read as much. Without it a call evicts lines that have to be written back
            first: for each byte that it reads another moves, until it has read as much as the L2 holds.
    """
    return _cuda(calls, seconds, device, spin, clean) if device.type == "cuda" else _cpu(calls, seconds)


def _cuda(calls: Calls, seconds: float, device: torch.device, spin: bool, clean: bool):
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def once(call):
        # While the flush runs (60 us and more) the host queues the call behind it: no launch gap is timed.
        flush.zero_()
        if clean:
            flush.amax()
        if spin:
            torch.cuda._sleep(SPIN_CYCLES)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = call()
        end.record()
        return start, end, result

    def one_round(first: int):
        events = {}
        names = list(calls)
        for name in names[first:] + names[:first]:
            start, end, last[name] = once(calls[name])
            events[name] = (start, end)
        return events

    last: dict[str, Any] = {}
    one_round(0)  # warm-up: modules, heuristics, the allocator
    torch.cuda.synchronize()
    begin, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    one_round(0)
    done.record()
    torch.cuda.synchronize()
    rounds = _rounds(seconds, begin.elapsed_time(done) / 1e3)
    for _ in range(HEAD_START):
        flush.zero_()
    recorded = [one_round(i % len(calls)) for i in range(rounds)]
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in (events[name] for events in recorded)] for name in calls}, last


def _cpu(calls: Calls, seconds: float):
    last: dict[str, Any] = {}

    def keep(name, call):
        last[name] = call()

    threads = torch.get_num_threads()  # Timer's own default is one
    timers = {
        name: Timer("keep(name, call)", globals={"keep": keep, "name": name, "call": call}, num_threads=threads)
        for name, call in calls.items()
    }
    estimates = {name: timer.blocked_autorange(min_run_time=0.01) for name, timer in timers.items()}
    # Short calls are repeated inside a sample, so that the clock's own cost does not show.
    repeats = {name: max(1, int(0.002 / estimate.median)) for name, estimate in estimates.items()}
    rounds = _rounds(seconds, sum(estimates[name].median * repeats[name] for name in calls))
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timers[name].timeit(repeats[name]).median * 1e3)
    return times, last


def _rounds(seconds: float, per_round: float) -> int:
    return max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / max(per_round, 1e-6))))
