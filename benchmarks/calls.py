"""From a problem and a name to the call that is timed, its operands and the facts of its plan.

Used by `run.py`, `memory.py` and `host_time.py`, and by the processes that compile ahead of them.
"""

from collections.abc import Callable
from typing import Optional

import torch

import baselines
import rowmax
from rowmax.problem import Operands, Problem
from scores import draw as draw_scores
from scores import uncheckable
from shapes import BACKWARD, FORWARD, lengths, unbent

Results = tuple[Optional[torch.Tensor], ...]


def device_of(text: str = "") -> torch.device:
    """The device named, or the GPU where there is one."""
    return torch.device(text or ("cuda" if torch.cuda.is_available() else "cpu"))


def make_operands(problem: Problem, device: torch.device, seed: int) -> tuple[Operands, torch.Tensor]:
    """`(operands, grad_out)`: independent standard normal numbers, contiguous, drawn on the device. Never zeros: they hide
    rows that nobody wrote and run faster than data. What bends scores is drawn by `scores.draw`."""
    draw = torch.Generator(device).manual_seed(seed)
    lead = () if problem.packed else (problem.batch,)
    shapes = (
        (*lead, problem.len_q, problem.heads_q, problem.dim_qk),
        (*lead, problem.len_k, problem.heads_k, problem.dim_qk),
        (*lead, problem.len_k, problem.heads_k, problem.dim_v),
        problem.outputs()[0],
    )
    q, k, v, grad_out = (torch.randn(shape, generator=draw, device=device).to(problem.dtype) for shape in shapes)
    bounds = (None, None)
    if problem.packed:
        sizes = (torch.tensor([0, *lengths(problem, side)], dtype=torch.int32) for side in "qk")
        bounds = tuple(size.cumsum(0, dtype=torch.int32).to(device) for size in sizes)
    return Operands(q, k, v, *bounds, *draw_scores(problem, draw, device)), grad_out


def make_call(
    who: str, problem: Problem, operands: Operands, grad_out: torch.Tensor, which: str, *, plan: str = ""
) -> Callable[[], Results]:
    """The timed call. It returns `(out,)` for the forward and `(dq, dk, dv)` for the other passes, behind them the gradients of
    a sink and of a bias where there are: `check.names`.

    The backward is a whole `torch.autograd.grad` over one saved graph, as training runs it.

    Raises:
        baselines.Refused: `who` does not run this problem here, or its gradients are none that the check can sample.
    """
    if len(problem.band) > 2 or not unbent(problem).plain:
        raise baselines.Refused(f"operands, peers and check know windows and what `scores.py` draws, not all of '{problem}'")
    if which != FORWARD and (why := uncheckable(problem)):
        raise baselines.Refused(why)
    operands = baselines.as_taken(who, problem, operands)
    if which == FORWARD:
        forward = baselines.build(who, problem, operands, plan=plan)

        def call():
            with torch.no_grad():
                return (forward(*operands[:3]),)

        return call
    names = ("q", "k", "v", *["sink"] * problem.sink, *["bias"] * bool(problem.bias))
    leaves = {name: getattr(operands, name).detach().requires_grad_() for name in names}
    operands = operands._replace(**leaves)
    forward = baselines.build(who, problem, operands, plan=plan)
    if which == BACKWARD:
        out = forward(*operands[:3])
        if not out.requires_grad:
            raise baselines.Refused(f"{who} here has no backward")
        return lambda: torch.autograd.grad(out, tuple(leaves.values()), grad_out, retain_graph=True)
    return lambda: torch.autograd.grad(forward(*operands[:3]), tuple(leaves.values()), grad_out)


def plan_of(problem: Problem, device: torch.device, which: str, prefer: str = "") -> str:
    """What rowmax runs, as a row's `plan`: one plan, or for forward and backward together both, joined by ` + `."""
    directions = {FORWARD: ("forward",), BACKWARD: ("backward",)}.get(which, ("forward", "backward"))
    facts = rowmax.Device.of(device)
    return " + ".join(str(rowmax.plan(problem, facts, direction=direction, prefer=prefer)) for direction in directions)


def compile_ahead(problem: str, who: str, which: str, plan: str, device: str) -> None:
    """Run a call once, for the sake of what it compiles into the caches on disk. The result is thrown away."""
    on = device_of(device)
    parsed = Problem.parse(problem)
    operands, grad_out = make_operands(parsed, on, seed=0)
    try:
        make_call(who, parsed, operands, grad_out, which, plan=plan)()
    except baselines.Refused:
        return
    if on.type == "cuda":
        torch.cuda.synchronize()
