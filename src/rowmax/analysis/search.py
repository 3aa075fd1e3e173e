"""The search of `rowmax tune`: which tiles run one direction of a problem fastest, among those whose results are right.

For each kernel of the direction in turn: check the candidates, time those that are right for a few rounds beside the table's
plan, then the best of them at length. The next kernel is searched with the best found for those before it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Optional

from rowmax.analysis.measure import MORE, Measurer
from rowmax.device import Device
from rowmax.plan import Direction, Plan, by_table
from rowmax.plan.candidates import candidates
from rowmax.problem import Problem

FINALISTS = 5
TIMING_SECONDS = 1.0  # of the finalists
CHECKING = 0.7  # share of the time: it compiles, too
LEAST = 30.0  # seconds for a timing, which starts a process first; a search that found something may take them to finish
NOISE = 1.01  # a plan that gains less on the table's gains nothing


@dataclass
class Found:
    """Attributes:
    table: the plan without tuning.
    best: the fastest that is right, `table` where nothing is faster; None: nothing ran and was right.
    ms: plan, spelled -> time, of the finalists: `table`, if it is right, and the fastest of the others.
    errors: plan, spelled -> why it has no time.
    timed: how many plans were right and timed in all.
    """

    problem: Problem
    direction: Direction
    table: Plan
    best: Optional[Plan] = None
    ms: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    timed: int = 0

    @property
    def wrong(self) -> dict[str, str]:
        """Those that computed something else, which no plan may, whatever its tile."""
        return {plan: error for plan, error in self.errors.items() if error.startswith("WRONG")}


def tune(
    problem: Problem, device: Device, direction: Direction, measurer: Measurer, seconds: float, say: Callable[[str], None]
) -> Found:
    """Search for about `seconds`; `say` gets a line for each step.

    Raises:
        Unsupported: nothing runs the problem on the device.
    """
    found = Found(problem, direction, by_table(problem, device, direction=direction))
    best = found.table
    share = seconds / len(best.tiles)
    for position in range(len(best.tiles)):
        tried = candidates(problem, device, best, position)
        say(f"checking {len(tried)} candidates" + (f" for kernel {position + 1} of {len(best.tiles)}" if position else ""))
        best = _search(found, tried, device, measurer, share, say) or best
    found.best = best if str(best) in found.ms else None
    return found


def _search(found: Found, tried: list[Plan], device: Device, measurer: Measurer, seconds: float, say) -> Optional[Plan]:
    """The best of the plans tried (the first of them is the best so far) and of the table's; None if none is right."""
    problem, direction = found.problem, found.direction
    spelled = {_asked(plan, problem, device, direction): plan for plan in [found.table, *tried]}
    errors = measurer.check(problem, direction, list(spelled), seconds=CHECKING * seconds)
    right = [text for text in spelled if not errors[text]]
    found.errors.update({str(spelled[text]): error for text, error in errors.items() if error})
    say(f"timing the {len(right)} that are right")
    if not right:
        return None
    limit = max((1 - CHECKING) * seconds, LEAST)
    times = _right(found, spelled, measurer.time(problem, direction, right, limit=limit))
    found.timed += len(times)
    start = _asked(tried[0], problem, device, direction)
    order = sorted(times, key=lambda text: times[text])
    finalists = list(dict.fromkeys([right[0], *[start] * (start in times), *order[:FINALISTS]]))  # the table's first
    times = _right(found, spelled, measurer.time(problem, direction, finalists, seconds=TIMING_SECONDS, limit=limit + LEAST))
    if times:
        found.ms = {str(spelled[text]): ms for text, ms in times.items()}
        found.errors = {plan: error for plan, error in found.errors.items() if plan not in found.ms}  # "out of time" before
    ranked, table = sorted(times, key=lambda text: times[text]), _asked(found.table, problem, device, direction)
    if table in times and times[table] < NOISE * times[ranked[0]]:
        ranked.sort(key=lambda text: text != table)
    for text in ranked:
        error = measurer.check(problem, direction, [text], kinds=MORE, seconds=limit + LEAST)[text]
        if not error:
            return spelled[text]
        del found.ms[str(spelled[text])]
        found.errors[str(spelled[text])] = error
    return None


def _right(found: Found, spelled: dict[str, Plan], timed) -> dict[str, float]:
    """The times; what went wrong goes into `found`."""
    found.errors.update({str(spelled[text]): error for text, (_, error) in timed.items() if error})
    return {text: ms for text, (ms, error) in timed.items() if not error}


def _asked(plan: Plan, problem: Problem, device: Device, direction: Direction) -> str:
    """As `attention(plan=...)` takes it: the tiles of a backward come behind one of the forward."""
    if direction == "forward":
        return str(plan)
    forward = by_table(problem, device, prefer=plan.algorithm).tiles
    return str(Plan(plan.algorithm, (*forward, *plan.tiles)))
