"""How long a plan takes on a device, and what holds it back, from counts alone: no GPU, no Triton, nothing is run.

A multiprocessor's tensor cores, exponential units and fp32 lanes each do a part of every turn of a kernel's loop. With c_x the
cycles of a part, k blocks at once and w the wait that no block of the same multiprocessor hides:

    pipes  = sqrt(c_tensor^2 + c_other^2)                  what the units take where other blocks or warps fill their gaps
    alone  = c_tensor + c_other + c_rescale + w            one block by itself, one thing after another
    turn   = (pipes^4 + (alone / k)^4)^(1/4)               the larger of the two, rounded where they are alike

A task is its turns and an edge; tasks are scheduled on the multiprocessors (`occupancy.makespan`); memory time (bytes from HBM
and out of the L2 cache over their rates) joins with an exponent of its own; launches add up. The forms follow from the
hardware, the constants from measurements: see `Constants`.

The verdict is found by asking again with one cost taken away: the largest of the gaps names what holds the call back.
"""

from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import NamedTuple, Optional

import torch

from rowmax.analysis import launches_backward, predict_cpu
from rowmax.analysis.cost import sequences
from rowmax.analysis.launches import Launch, Lengths, launches
from rowmax.analysis.occupancy import balanced, makespan
from rowmax.device import EXPONENTIALS, Device, Rates
from rowmax.plan import Direction, Plan
from rowmax.plan import plan as choose
from rowmax.problem import Problem

VERDICTS = ("HBM", "parallelism", "non-matmul", "tensor", "launch")
JOIN = 4.0  # exponent with which two limits join


class Constants(NamedTuple):
    """Cycles unless said otherwise. Fitted by least errors to one half of the H200 forward rows in `benchmarks/results/` (those
    whose spelling has an even checksum; `q_outer` and `hopper`); tests/analysis/test_predict.py says how the other half fits.

    `latency`, `l2_bytes`, `barrier`, and what `split_kv`, `kv_outer`, `dense` and `warp_split` need besides, are guesses: no
    row decides them yet.
    """

    clock: float = 0.985  # of the boost clock, that a short kernel runs at
    throttle: float = 0.13  # the clock falls by this where the tensor cores are busy for long: the card's power limit
    throttle_s: float = 0.52e-3  # seconds: a kernel of this length has half of it
    other_share: float = 0.63  # fp32 operations of a softmax that do not hide behind its exponentials
    mask_ops: float = 4.0  # operations of a masked score, besides
    sync: float = 350.0  # of a turn of a Triton kernel: barriers, and the latency from one product to the next
    hopper: float = 1.03  # turns of the Hopper kernel, of the units' own time
    backward_other: float = 0.43  # as `other_share`, of a backward
    backward_sync: float = 1120.0  # as `sync`: P and dS change places on their way to products
    backward_hopper: float = 1.36  # as `hopper`
    backward_edge: float = 10800.0  # as `edge`: two tiles are loaded and two stored
    backward_hopper_edge: float = 9100.0  # of a block of the Hopper kernels, which are not persistent
    edge: float = 3100.0  # before and behind the loop of a block
    hopper_edge: float = 1500.0  # between two row tiles
    begin: float = 2400.0  # of a persistent block
    barrier: float = 40.0  # of all warps of a block, in a turn of `warp_split`
    bank_bytes: float = 128.0  # in and out of shared memory, a cycle and a multiprocessor
    latency: float = 800.0  # of a load that a turn waits for
    l2_bytes: float = 64.0  # bytes out of the cache, a cycle and a multiprocessor
    memory_join: float = 1.8  # exponent with which memory and compute join: one hides behind the other, but not all of it
    launch_s: float = 6.0e-6  # seconds between events around an empty kernel
    next_s: float = 1.7e-6  # seconds for one more behind it


@dataclass(frozen=True)
class Prediction:
    """Attributes:
    plan: what was predicted.
    seconds: the whole call on the GPU, between two events.
    terms: seconds that each part would take alone, at its own limit: hbm, l2, tensor, non_matmul, launch.
    gaps: verdict -> seconds that the call would be shorter without that cost.
    verdict: the largest of the gaps.
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
    main = max(kernels, key=lambda launch: model.kernel_seconds(launch, inf))
    held = main.at_once * device.sms
    cycles, even = model.cycles(main), model.cycles(main, "parallelism")
    tasks, at_once = model.tasks(main)
    clock = rates.clock_hz * constants.clock
    return Prediction(
        chosen,
        seconds,
        model.terms(kernels),
        gaps,
        max(gaps, key=lambda verdict: gaps[verdict]) if seconds else "launch",
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
    return Prediction(plan, seconds, terms, gaps, verdict, kernels, 1.0, 1.0, predict_cpu.SOURCE, tasks, 1)


class _Model:
    def __init__(self, device: Device, rates: Rates, constants: Constants):
        self._sms, self._rates, self._c = device.sms, rates, constants

    def seconds(self, kernels: list[Launch], without: str = "") -> float:
        total = 0.0
        for number, launch in enumerate(kernels):
            total += self.kernel_seconds(launch, self._clock(launch, without), without)
            if without != "launch":
                total += self._c.next_s if number else self._c.launch_s
        return total

    def kernel_seconds(self, launch: Launch, clock: float, without: str = "") -> float:
        clock = clock if clock < inf else self._clock(launch, "")
        compute, memory = self.cycles(launch, without) / clock, 0.0 if without == "HBM" else sum(self._memory(launch, clock))
        return _join(compute, memory, self._c.memory_join)

    def cycles(self, launch: Launch, without: str = "") -> float:
        """Of the multiprocessor that is done last, as though memory had no limit."""
        if not launch.blocks:
            return 0.0
        tasks, at_once = self.tasks(launch, without)
        slots = self._sms * at_once
        done = balanced(tasks, slots) if without == "parallelism" else makespan(tasks, slots, in_turn=launch.in_turn)
        return done + (self._c.begin if launch.persistent else 0.0)

    def tasks(self, launch: Launch, without: str = "") -> tuple[list[tuple[int, float]], int]:
        """`([(how many, cycles of each)], how many a multiprocessor runs at once)`."""
        c, at_once = self._c, launch.at_once
        if without != "parallelism":
            at_once = min(at_once, max(ceil(launch.blocks / self._sms), 1))
        turn, masked = self._turn(launch, at_once, without)
        edge = c.backward_edge if launch.backward else c.edge
        if launch.persistent:
            edge = c.backward_hopper_edge if launch.backward else c.hopper_edge
        elif at_once > 1:
            edge /= 1.5
        if without == "launch":
            edge = 0.0
        # A block of k at once takes k times as long as it would have the multiprocessor for itself.
        return [(count, (turns * turn + hidden * masked) * at_once + edge) for count, turns, hidden in launch.tasks], at_once

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
            found["launch"] += self._c.next_s if number else self._c.launch_s
        return found

    def _parts(self, launch: Launch, without: str = "") -> tuple[float, float, float]:
        """Cycles of one turn on the tensor cores, on the units of the softmax, and for the accumulator."""
        turn, rates = launch.turn, self._rates
        tensor = 0.0 if without == "tensor" else turn.tensor_flops / rates.tensor_flops
        if without == "non-matmul":
            return tensor, 0.0, 0.0
        share = self._c.backward_other if launch.backward else self._c.other_share
        other = turn.exps / EXPONENTIALS + share * turn.score_ops / rates.lanes
        return tensor, other, turn.rescale_ops / rates.lanes

    def _turn(self, launch: Launch, at_once: int, without: str = "") -> tuple[float, float]:
        """Cycles of a multiprocessor for one turn of one of its blocks, and what a mask adds."""
        c = self._c
        tensor, other, rescale = self._parts(launch, without)
        masked = 0.0 if without == "non-matmul" else c.mask_ops * launch.turn.score_ops / 4.0 / self._rates.lanes
        pipes = (tensor**2 + (other + rescale / 2) ** 2) ** 0.5
        if launch.persistent:
            return pipes * (c.backward_hopper if launch.backward else c.hopper), masked
        wait = (c.backward_sync if launch.backward else c.sync) if (tensor or other) and without != "non-matmul" else 0.0
        if launch.turn.waited_bytes and without != "HBM":
            wait += c.latency + launch.turn.waited_bytes / c.l2_bytes
        if launch.turn.shared_bytes and without != "non-matmul":
            shared = launch.turn.shared_bytes / c.bank_bytes
            pipes, wait = _join(pipes, shared), wait + shared + c.barrier * launch.turn.barriers
        return _join(pipes, (tensor + other + rescale + wait) / at_once), masked

    def _memory(self, launch: Launch, clock: float) -> tuple[float, float]:
        """Seconds for the bytes from HBM, and for those that come out of the cache."""
        rates = self._rates
        hit = max(launch.l2_bytes - launch.hbm_bytes, 0.0)
        return launch.hbm_bytes / (rates.hbm_bytes_per_s * rates.hbm_share), hit / (self._c.l2_bytes * self._sms * clock)

    def _clock(self, launch: Launch, without: str) -> float:
        """The clock falls with the time that the tensor cores are busy."""
        c, fast = self._c, self._rates.clock_hz * self._c.clock
        if self._rates.tensor_flops < 4096:
            return fast
        cycles = max(self.cycles(launch, without), 1.0)
        tensor = self._parts(launch, without)[0] * launch.turns / self._sms
        seconds = cycles / fast
        return fast * (1.0 - c.throttle * min(tensor / cycles, 1.0) * seconds / (seconds + c.throttle_s))


def _join(one: float, other: float, exponent: float = JOIN) -> float:
    largest = max(one, other)
    return largest * ((one / largest) ** exponent + (other / largest) ** exponent) ** (1 / exponent) if largest else 0.0
