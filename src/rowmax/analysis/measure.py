"""Plans checked and timed where a wrong kernel costs only itself: in child processes with time limits.

The only module of the analysis that runs anything. A plan is spelled as `rowmax.attention` takes it; the calls are those of the
public API, a backward the whole `torch.autograd.grad`.
"""

import os
import statistics
from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch

from rowmax import testing
from rowmax.analysis import timing, workers
from rowmax.analysis.cost import sequences
from rowmax.problem import Problem

FIRST, MORE = ("normal",), ("spiky(6)", "probe")  # kinds of input for every plan, and besides for the one that is kept
JOB_SECONDS = 120.0  # to compile, run and check a plan, or to time a batch: beyond it is a hang
BATCH = 8  # plans whose results and graphs are in memory together
PROCESSES = 8
ORACLE_PAIRS, ORACLE_BYTES, PROCESS_BYTES = 2**27, 80, 1.5e9  # pairs in a piece of the fp64 oracle, bytes for each; the rest


class Timed(NamedTuple):
    """`error` is "" when nothing went wrong, and after a long timing the result was right still."""

    ms: float
    error: str


class Measurer:
    """Checks and times on one device, with random inputs of its own."""

    def __init__(self, device: "str | torch.device", seed: Optional[int] = None):
        self.device = torch.device(device)
        self.seed = int.from_bytes(os.urandom(3), "little") if seed is None else seed

    def check(
        self, problem: Problem, direction: str, plans: Sequence[str], *, kinds: Sequence[str] = FIRST, seconds: float
    ) -> dict[str, str]:
        """Plan -> what is wrong with it, "" if nothing; compiled and run several at a time, within `seconds` for all."""
        common = {"problem": str(problem), "direction": direction, "kinds": tuple(kinds), **self._common()}
        jobs = [{"plan": plan, **common} for plan in plans]
        limits = {"job_seconds": JOB_SECONDS, "total_seconds": seconds}
        outcomes = workers.run_all(check_plan, jobs, workers=self._processes(problem), **limits)
        return {plan: outcome.error or outcome.value for plan, outcome in zip(plans, outcomes, strict=True)}

    def time(
        self, problem: Problem, direction: str, plans: Sequence[str], *, seconds: float = 0.0, limit: float
    ) -> dict[str, Timed]:
        """Plan -> its median, or what went wrong; the first is timed beside all others, whose times are scaled by it.

        Args:
            seconds: timing of each batch, whose last results are then checked; 0: a few rounds, unchecked.
            limit: seconds for all; plans that had no turn have the error "out of time".
        """
        first, others = plans[0], plans[1:]
        batches = [(first, *others[i : i + BATCH]) for i in range(0, len(others), BATCH)] or [(first,)]
        found: dict[str, Timed] = {}
        alone: list[tuple[str, ...]] = []
        for batch, outcome in zip(batches, self._time(problem, direction, batches, seconds, limit), strict=True):
            if isinstance(outcome, str) and len(batch) > 2 and outcome != workers.OUT_OF_TIME:
                alone += [(first, plan) for plan in batch[1:]]  # one of them hangs or ends the process: which?
            else:
                _add(found, batch, outcome)
        for batch, outcome in zip(alone, self._time(problem, direction, alone, seconds, limit), strict=True):
            _add(found, batch, outcome)
        return found

    def _time(self, problem: Problem, direction: str, batches, seconds: float, limit: float) -> list:
        """For each batch what `time_plans` returned, or what went wrong with it. One process, started again after a hang."""
        common = {"problem": str(problem), "direction": direction, "seconds": seconds, **self._common()}
        jobs = [{"plans": batch, **common} for batch in batches]
        outcomes = workers.run_all(time_plans, jobs, workers=1, job_seconds=JOB_SECONDS + seconds, total_seconds=limit)
        return [outcome.error or outcome.value for outcome in outcomes]

    def _common(self) -> dict:
        return {"seed": self.seed, "device": str(self.device)}

    def _processes(self, problem: Problem) -> int:
        """As many as there are cores, and as have room on the GPU beside each other with their oracles."""
        most = min(PROCESSES, os.cpu_count() or 1)
        if self.device.type != "cuda":
            return most
        pairs = min(ORACLE_PAIRS, problem.heads_q * problem.len_q * problem.len_k)
        free, _ = torch.cuda.mem_get_info(self.device)
        return max(1, min(most, int(free / (PROCESS_BYTES + ORACLE_BYTES * pairs))))


def _add(found: dict[str, Timed], batch: Sequence[str], outcome: "str | dict[str, Timed]") -> None:
    first = batch[0]
    if isinstance(outcome, str):
        found.update({plan: Timed(0.0, outcome) for plan in batch if plan not in found})
        return
    if first not in found or found[first].error:
        found[first] = outcome[first]
    scale = found[first].ms / outcome[first].ms if outcome[first].ms else 1.0
    found.update({plan: Timed(outcome[plan].ms * scale, outcome[plan].error) for plan in batch[1:]})


def check_plan(problem: str, direction: str, plan: str, kinds: Sequence[str], seed: int, device: str) -> str:
    """What is wrong with the plan's results, "" if nothing (in a child process)."""
    parsed = Problem.parse(problem)
    for number, kind in enumerate(kinds):
        backward = direction == "backward"
        report = testing.check(parsed, kind, seed=seed + number, device=device, plan=plan, backward=backward)
        if not report.ok:
            return f"WRONG: {'; '.join(report.broken)} ('{kind}', seed {seed + number})"
    return ""


def time_plans(problem: str, direction: str, plans: Sequence[str], seed: int, device: str, seconds: float) -> dict[str, Timed]:
    """Times of plans side by side, and what is wrong with their last results (in a child process)."""
    parsed, on = Problem.parse(problem), torch.device(device)
    operands = testing.operands(parsed, seed=seed, device=on, lengths=sequences(parsed) if parsed.packed else None)
    backward = direction == "backward"
    grad_out, _ = testing.cotangents(parsed, seed=seed, device=on)
    leaves = tuple(t.detach().requires_grad_(backward) for t in operands[:3])

    def prepare(plan: str):
        call = operands._replace(q=leaves[0], k=leaves[1], v=leaves[2])
        if not backward:
            return lambda: testing.attend(parsed, call, plan, return_lse=False)
        out = testing.attend(parsed, call, plan, return_lse=False)
        return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    times, last = timing.samples_ms({plan: prepare(plan) for plan in plans}, on, seconds)
    found = {plan: Timed(statistics.median(times[plan]), "") for plan in plans}
    for plan in plans if seconds else ():
        if backward:
            report = testing.check_backward(parsed, operands, last[plan], grad_out)
        else:
            report = testing.check_forward(parsed, operands, last[plan])
        if not report.ok:
            found[plan] = found[plan]._replace(error=f"WRONG after timing: {'; '.join(report.broken)} (seed {seed})")
    return found
