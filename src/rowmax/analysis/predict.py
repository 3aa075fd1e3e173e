"""How long a plan takes on a device, and what holds it back, from counts alone: no GPU, no Triton, nothing is run.

A multiprocessor's tensor cores, exponential units and fp32 lanes each do a part of every turn of a kernel's loop. With c_x the
cycles of a part, k blocks at once, w the wait that nothing of the same block hides and f the wait for what is fetched ahead:

    pipes  = sqrt(c_tensor^2 + c_other^2)                  what the units take where other blocks or warps fill their gaps
    alone  = join(c_tensor + c_other + c_rescale + w, f)   one block by itself, one thing after another
    turn   = join(pipes, alone / k)                        (a^4 + b^4)^(1/4), the larger of two, rounded where they are alike

    w      = sync + answers of memory that it waits for, one after another, + bytes / stream
    answer = latency, and `far` more if it comes from HBM

A task is its turns, and what a block waits for before and behind them: to know where its work is, to make descriptors, for Q,
for the first K and V, and, of two loops, for those of the second. Tasks are scheduled on the multiprocessors
(`occupancy.makespan`). Bytes out of the L2 cache over its rate join as above; those of HBM with an exponent of their own, as
one hides behind the other but not all of it, except where HBM's answers are what a loop waits for. In decoding, what a block
waits for before and behind its turns comes to HBM's time. Launches add up. The forms follow from the hardware, the constants
from measurements: see `Constants`.

`verdict.py` says what holds the call back. The gaps are found by asking again with one cost taken away.
"""

from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import NamedTuple, Optional

import torch

from rowmax.analysis import launches_backward, predict_cpu
from rowmax.analysis.cost import sequences
from rowmax.analysis.launches import Launch, Lengths, launches
from rowmax.analysis.occupancy import balanced, makespan, occupied
from rowmax.analysis.verdict import COLD_S, EMPTY_S, VERDICTS, verdict_of
from rowmax.device import EXPONENTIALS, Device, Rates
from rowmax.plan import Direction, Plan
from rowmax.plan import plan as choose
from rowmax.problem import Problem

SYNC_FLOPS = 2540  # of mma.sync, a clock and a multiprocessor of Hopper: 0.62 of what its own instruction does
BANK_BYTES = 128.0  # in or out of shared memory, a cycle and a multiprocessor
KEPT = 0.25  # of the L2 cache, that holds what a kernel wrote after its end: 8 to 20 MB of the 50 of an H200, by ncu
UNEVEN = 0.12  # of HBM's time, that blocks which share it unevenly end before the last: by ncu, those drawn with seeds 5 and 6
JOIN = 4.0  # exponent with which two limits join


class Constants(NamedTuple):
    """Cycles unless said otherwise. `benchmarks/fit.py` fits them, but for `clock`, `throttle` and `barrier`, to two thirds of
    the forward rows of an H200, and of a backward to half of its rows; it prints how well the others fit.
    """

    clock: float = 0.91  # of the boost clock, that kernels run at: 1.80 GHz, by ncu's count of cycles
    throttle: float = 0.1  # of it, that is lost to the limit of power where tensor cores are never idle; counted so too
    other_share: float = 0.7808  # of fp32 operations of a softmax that do not hide behind its exponentials
    mask_share: float = 2.833  # as that, of the operations of a mask
    sync: float = 259.8  # of a turn of a Triton kernel: barriers, and the latency from one product to the next
    latency: float = 625.0  # of an answer of the cache, under load
    far: float = 669.6  # more, of an answer of HBM
    stream: float = 30.6  # bytes a cycle behind the first answer, of what one block waits for
    descriptor: float = 2273.0  # until one for TMA is made
    lookup: float = 447.3  # of an answer that a block waits for to know where its work is: mostly of the first-level cache
    l2_bytes: float = 60.0  # a cycle and a multiprocessor, out of the cache, by TMA
    l2_loads: float = 38.25  # the same, by loads of threads instead of TMA
    memory_join: float = 1.625  # exponent with which HBM and the rest join
    stream_join: float = 3.514  # the same, of a loop that waits for HBM itself, as in decoding
    hopper: float = 0.9149  # turns of the Hopper kernel, of `pipes`
    hopper_mask: float = 2.447  # as `mask_share`
    hopper_edge: float = 329.2  # between two row tiles
    begin: float = 13940.0  # of a persistent block, and the end of the last
    part: float = 104.2  # as `sync`, of a part that a combine kernel joins to those before it
    barrier: float = 20.0  # of all warps of a block, in a turn of `warp_split`: too little to be fitted
    backward_other: float = 0.01  # as `other_share`, of a backward: next to nothing
    backward_sync: float = 1120.0  # as `sync`: P and dS change places on their way to products
    backward_hopper: float = 1.36  # as `hopper`
    backward_edge: float = 10800.0  # before and behind the loop of a block: two tiles are loaded and two stored
    backward_hopper_edge: float = 7000.0  # of a block of the Hopper kernels, which are not persistent
    launch_s: float = 6.04e-06  # seconds between events around an empty kernel
    next_s: float = 1.19e-06  # seconds for one more behind it


@dataclass(frozen=True)
class Prediction:
    """Attributes:
    plan: what was predicted.
    seconds: the whole call on the GPU, between two events.
    terms: seconds that each part would take alone, at its own limit: hbm, l2, tensor, non_matmul, launch.
    gaps: verdict -> seconds that the call would be shorter without that cost.
    shares: verdict -> share of the time, as `verdict.py` has them.
    verdict: what holds the call back, by the shares; on a CPU, where nothing overlaps, the largest of the gaps.
    launches: the kernels and their counts.
    waves: blocks over the blocks that all multiprocessors hold at once, of the kernel with the most work.
    busy: share of the multiprocessors' time in which they have a block.
    source: "measured" or "data sheet": where the rates are from; on a CPU "another CPU".
    tasks, slots: of that kernel: (how many, seconds) in order, and how many run at once.
    """

    plan: Plan
    seconds: float
    terms: dict[str, float]
    gaps: dict[str, float]
    shares: dict[str, float]
    verdict: str
    launches: list[Launch]
    waves: float
    busy: float
    source: str = field(default="")
    tasks: tuple[tuple[int, float], ...] = ()
    slots: int = 0


def predict(
    problem: Problem,
    device: Device,
    plan: "Plan | str | None" = None,
    *,
    direction: Direction = "forward",
    lengths: Optional[Lengths] = None,
    constants: Constants = Constants(),  # noqa: B008  a NamedTuple
    rates: Optional[Rates] = None,
) -> Prediction:
    """One direction of `problem` on `device`; a backward is all three gradients.

    Args:
        plan: a plan, its spelling, or None for the one that would run. As `rowmax.plan` takes it: a spelling begins with the
            tile of the forward; a `Plan` is of the direction.
        lengths: (queries, keys) of each sequence of a packed problem; default: equal ones.
        rates: of the device; default those of the table.

    Raises:
        Unsupported: the plan cannot run the problem there.
        KeyError: there is no model of the device or the algorithm.
    """
    if isinstance(plan, Plan) and plan.tiles:
        chosen = plan
    else:
        chosen = choose(problem, device, direction=direction, prefer=str(plan or ""))
    known = list(lengths) if lengths is not None else sequences(problem)
    if device.kind == "cpu":
        return _on_cpu(problem, device, chosen, direction, known)
    rates = rates or Rates.of(device)
    if problem.dtype == torch.float32:  # IEEE products run on the fp32 lanes
        rates = replace(rates, tensor_flops=2 * rates.lanes)
    if direction == "forward":
        kernels = launches(problem, device, rates, chosen, known)
    else:
        kernels = launches_backward.launches(problem, device, rates, chosen, known)
    model = _Model(device, rates, constants)
    seconds = model.seconds(kernels)
    gaps = {verdict: max(seconds - model.seconds(kernels, verdict), 0.0) for verdict in VERDICTS}
    main = max(kernels, key=model.kernel_seconds)
    shares = model.shares(kernels, main)
    held = main.at_once * device.sms
    cycles, even = model.cycles(main), model.cycles(main, "parallelism")
    tasks, at_once = model.tasks(main)
    clock = rates.clock_hz * constants.clock
    return Prediction(
        chosen,
        seconds,
        model.terms(kernels),
        gaps,
        shares,
        verdict_of(shares) if seconds else "launch",
        kernels,
        main.blocks / held,
        min(even / cycles, 1.0) if cycles else 1.0,
        rates.source,
        tuple((count, cost / clock) for count, cost in tasks),
        device.sms * at_once,
    )


def _on_cpu(problem: Problem, device: Device, plan: Plan, direction: Direction, lengths: Lengths) -> Prediction:
    """Nothing overlaps, so that every part is a gap of its own."""
    terms, kernels = predict_cpu.terms(problem, device, plan, direction, lengths)
    seconds = sum(terms.values())
    gaps = dict.fromkeys(VERDICTS, 0.0)
    gaps |= {"tensor": terms["tensor"], "non-matmul": terms["non_matmul"], "launch": terms["launch"]}
    verdict = max(gaps, key=lambda verdict: gaps[verdict]) if seconds else "launch"
    tasks = ((1, seconds),)
    shares = {name: gap / seconds if seconds else 0.0 for name, gap in gaps.items()}
    return Prediction(plan, seconds, terms, gaps, shares, verdict, kernels, 1.0, 1.0, predict_cpu.SOURCE, tasks, 1)


class _Model:
    def __init__(self, device: Device, rates: Rates, constants: Constants):
        self._sms, self._rates, self._c = device.sms, rates, constants

    def seconds(self, kernels: list[Launch], without: str = "") -> float:
        total = 0.0
        for number, launch in enumerate(kernels):
            total += self.kernel_seconds(launch, without)
            if without != "launch" and not launch.inside:
                total += self._c.next_s if number else self._c.launch_s
        return total

    def kernel_seconds(self, launch: Launch, without: str = "") -> float:
        cycles = self.cycles(launch, without)
        clock = self._clock(launch, cycles, without)
        if without == "HBM":
            return cycles / clock
        hbm, l2 = self._memory(launch, clock)
        if launch.streams:  # nothing is asked of HBM while all blocks begin, nor when the last end
            around = self._edges(launch, launch.at_once)[0] if without != "launch" else 0.0
            return _join(_join(max(cycles - around, 0.0) / clock, l2), hbm, self._c.stream_join) + around / clock
        # A loop that waits for HBM itself is no slower for the others that do; that of a persistent block has a warp for it.
        exponent = self._c.memory_join
        if not launch.persistent:
            exponent += launch.far * (JOIN - exponent)
        return _join(_join(cycles / clock, l2), hbm, exponent)

    def counted(self, launch: Launch) -> float:
        """Seconds of a kernel by itself as a profiler times it: the code is fetched first, and the caches are empty, so that
        blocks which walk over the same keys side by side all wait for HBM."""
        seconds = self.kernel_seconds(_cold(launch))
        if launch.inside:
            return seconds
        return seconds + EMPTY_S + (COLD_S / 2 if launch.light else COLD_S)

    def cycles(self, launch: Launch, without: str = "") -> float:
        """Of the multiprocessor that is done last, as though memory had no limit."""
        if not launch.blocks:
            return 0.0
        tasks, at_once = self.tasks(launch, without)
        slots = self._sms * at_once
        done = balanced(tasks, slots) if without == "parallelism" else makespan(tasks, slots, in_turn=launch.in_turn)
        if launch.empty and without != "launch":
            done += launch.empty * launch.lookups * self._c.lookup / slots
        return done + (self._c.begin if launch.persistent else 0.0)

    def tasks(self, launch: Launch, without: str = "", *, held: int = 0) -> tuple[list[tuple[int, float]], int]:
        """`([(how many, cycles of each)], how many a multiprocessor runs at once)`; `held`: at most so many."""
        at_once = held or launch.at_once
        if without != "parallelism":
            at_once = min(at_once, max(ceil(launch.blocks / self._sms), 1))
        turn, masked = self._turn(launch, at_once, without)
        once, again = (0.0, 0.0) if without == "launch" else self._edges(launch, at_once)
        # A block of k at once takes k times as long as it would have the multiprocessor for itself.
        found = []
        for number, (count, turns, hidden) in enumerate(launch.tasks):
            edge = once + (again if 0 < hidden < turns else 0.0)
            if launch.outer:
                answers, far, size = launch.outer[number]
                edge += answers * self._c.latency + far * self._c.far + size / self._c.stream
            found.append((count, (turns * turn + hidden * masked) * at_once + edge))
        return found, at_once

    def _edges(self, launch: Launch, at_once: int) -> tuple[float, float]:
        """Cycles before and behind the turns of a task, and between those without a mask and those with one."""
        c = self._c
        if launch.light:
            return c.latency, 0.0
        found = launch.lookups * c.lookup
        if launch.persistent:
            if launch.backward:
                return c.backward_hopper_edge, 0.0
            waits = 0.0 if launch.ahead else c.latency + c.far
            return found + c.hopper_edge + launch.own_bytes / c.l2_bytes + waits, 0.0
        if launch.backward:
            return c.backward_edge / (1.5 if at_once > 1 else 1.0), 0.0
        found += launch.descriptors * c.descriptor
        if launch.own_bytes:
            found += self._wait(launch, launch.own_bytes, launch.own_far)
        first = self._wait(launch, launch.turn.ahead_bytes) if launch.turn.ahead_bytes and launch.stages > 1 else 0.0
        return found + first, first

    def _wait(self, launch: Launch, size: float, far: Optional[float] = None) -> float:
        """Cycles that a block waits for so many bytes."""
        share = launch.asked if far is None else far
        rate = self._c.l2_bytes if launch.descriptors else self._c.stream
        return self._c.latency + share * self._c.far + size / rate

    def terms(self, kernels: list[Launch]) -> dict[str, float]:
        clock = self._rates.clock_hz * self._c.clock
        found = {"hbm": 0.0, "l2": 0.0, "tensor": 0.0, "non_matmul": 0.0, "launch": 0.0}
        for number, launch in enumerate(kernels):
            hbm, l2 = self._memory(launch, clock)
            tensor, other, _ = self._parts(launch)
            found["hbm"] += hbm
            found["l2"] += l2
            found["tensor"] += tensor * launch.turns / self._sms / clock
            found["non_matmul"] += other * launch.turns / self._sms / clock
            if not launch.inside:
                found["launch"] += self._c.next_s if number else self._c.launch_s
        return found

    def shares(self, kernels: list[Launch], main: Launch) -> dict[str, float]:
        """Of the time, by verdict (`verdict.py`)."""
        main = _cold(main)
        cycles = self.cycles(main)
        if not self.kernel_seconds(main) or not cycles:  # nothing to compute
            return {**dict.fromkeys(VERDICTS, 0.0), "launch": 1.0}
        clock = self._clock(main, cycles, "")
        # As counters time a kernel: while it is launched, no multiprocessor has a block, and then it fetches its code.
        seconds = self.counted(main)
        whole = seconds * clock * self._sms
        # Nor do they see what was written and is still in the cache when the kernel ends.
        seen = 1.0 - min(main.written, KEPT * self._rates.l2_bytes) / max(main.hbm_bytes, 1.0)
        own = [launch for launch in kernels if not launch.inside]
        started = self._c.launch_s + (len(own) - 1) * self._c.next_s
        working = sum(map(self.counted, kernels)) - EMPTY_S * len(own)
        return {
            "HBM": min(seen * self._memory(main, clock)[0] / seconds, 1.0),
            "parallelism": 1.0 - self._occupied(main, cycles, (seconds - EMPTY_S) * clock) * (seconds - EMPTY_S) / seconds,
            "non-matmul": main.turns * main.turn.exps / EXPONENTIALS / whole,
            "tensor": main.turns * self._parts(main)[0] / whole,
            "launch": started / (started + working),
        }

    def _occupied(self, launch: Launch, cycles: float, whole: float) -> float:
        """Share of a kernel's `whole` cycles in which a multiprocessor has a block, the mean of all. A persistent block is
        there while it begins. Of blocks that all run at once, those with fewer beside them on their multiprocessor end earlier,
        also where they wait for HBM: its bandwidth is shared by multiprocessors, whatever they hold."""
        tasks, at_once = self.tasks(launch)
        if launch.persistent:
            busy = balanced(tasks, self._sms) + self._c.begin * min(launch.blocks / self._sms, 1.0)
        else:
            busy = occupied(tasks, self._sms, at_once)
            if at_once > 1 and launch.blocks < self._sms * at_once:
                fuller = launch.blocks - (at_once - 1) * self._sms
                some, _ = self.tasks(launch, held=at_once - 1)
                early = balanced(some, launch.blocks) / (whole if launch.streams else cycles)
                early = min(max(early, 1.0 - 1.0 / at_once), 1.0)
                most = (fuller + (self._sms - fuller) * early) / self._sms
                if launch.streams:
                    return most
                busy = min(busy, most * cycles)
        if launch.own_bytes and not launch.streams:
            busy *= 1.0 - UNEVEN * min(self._memory(launch, 1.0)[0] / self.kernel_seconds(launch), 1.0)
        return min(busy / cycles, 1.0)

    def _parts(self, launch: Launch, without: str = "") -> tuple[float, float, float]:
        """Cycles of one turn on the tensor cores, on the units of the softmax, and for the accumulator."""
        turn, rates = launch.turn, self._rates
        tensor = 0.0 if without == "tensor" else turn.tensor_flops / min(rates.tensor_flops, SYNC_FLOPS if turn.sync else inf)
        if without == "non-matmul":
            return tensor, 0.0, 0.0
        share = self._c.backward_other if launch.backward else self._c.other_share
        other = turn.exps / EXPONENTIALS + share * turn.score_ops / rates.lanes
        return tensor, other, turn.rescale_ops / rates.lanes

    def _turn(self, launch: Launch, at_once: int, without: str = "") -> tuple[float, float]:
        """Cycles of a multiprocessor for one turn of one of its blocks, and what a mask adds."""
        c, turn = self._c, launch.turn
        tensor, other, rescale = self._parts(launch, without)
        if without == "non-matmul":
            masked = 0.0
        elif launch.backward:
            masked = turn.score_ops / self._rates.lanes
        else:
            masked = (c.hopper_mask if launch.persistent else c.mask_share) * turn.mask_ops / self._rates.lanes
        pipes = (tensor**2 + (other + rescale / 2) ** 2) ** 0.5
        if launch.persistent:
            if launch.backward:
                return pipes * c.backward_hopper, masked
            return pipes * c.hopper * launch.slower, masked
        sync = c.backward_sync if launch.backward else c.part if launch.joins else c.sync
        wait = sync if (tensor or other) and without != "non-matmul" else 0.0
        fetched = 0.0
        if without != "HBM":
            wait += turn.lookups * c.latency
            if turn.waited_bytes:
                wait += self._wait(launch, turn.waited_bytes)
            if turn.ahead_bytes and launch.stages > 1:
                rate = c.stream if launch.streams else c.l2_bytes
                answer = c.latency + launch.asked * c.far + turn.ahead_bytes / rate
                fetched = answer / (launch.stages - 1)
            elif turn.ahead_bytes:  # two factors, one after the other
                wait += self._wait(launch, turn.ahead_bytes) + 2 * c.latency
        if turn.shared_bytes and without != "non-matmul":
            shared = (turn.shared_bytes + turn.conflict_bytes) / BANK_BYTES
            pipes, wait = _join(pipes, shared), wait + shared + c.barrier * turn.barriers
        return _join(pipes, _join(tensor + other + rescale + wait, fetched) / at_once), masked

    def _memory(self, launch: Launch, clock: float) -> tuple[float, float]:
        """Seconds for the bytes from HBM, and for those that come out of the cache."""
        rates = self._rates
        rate = self._c.l2_bytes if launch.persistent or launch.descriptors else self._c.l2_loads
        l2 = launch.l2_bytes / (rate * self._sms * clock)
        return launch.hbm_bytes / (rates.hbm_bytes_per_s * rates.hbm_share), l2

    def _clock(self, launch: Launch, cycles: float, without: str) -> float:
        """The clock falls with the share of the time in which the tensor cores are busy: the card's limit of power."""
        c, fast = self._c, self._rates.clock_hz * self._c.clock
        if self._rates.tensor_flops < 4096 or not cycles:
            return fast
        tensor = self._parts(launch, without)[0] * launch.turns / self._sms
        return fast * (1.0 - c.throttle * min(tensor / cycles, 1.0))


def _cold(launch: Launch) -> Launch:
    """The kernel while the caches are empty."""
    return launch._replace(cold=True)


def _join(one: float, other: float, exponent: float = JOIN) -> float:
    largest = max(one, other)
    return largest * ((one / largest) ** exponent + (other / largest) ** exponent) ** (1 / exponent) if largest else 0.0
