"""`rowmax check`: is attention right on this machine? A handful of problems, or those given, against the definition in fp64."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from rowmax import Device, PagedProblem, Problem, Unsupported, plan, testing
from rowmax.plan import Direction
from rowmax.testing.paged import check_paged

# One of each kind of path: dense and packed, with and without a mask, grouped heads, uneven sizes, one query, each dtype.
PROBLEMS = (
    "b2 h4/2 q200 k200 d64 fp32 causal",
    "b1 h3 q77 k301 d40 fp32",
    "b1 h4/2 q300 k300 d64 bf16 causal",
    "b1 h4/1 q129 k257 d64/32 bf16 window(40,0)",
    "b3 h4/2 q300 k300 d64 fp16 packed causal",
    "b2 h8/2 q1 k500 d128 fp16 causal",
)
KINDS = ("normal", "spiky(6)", "probe")


def run(device: str, problems: Sequence[str] = PROBLEMS, prefer: str = "") -> int:
    """Check each problem with each kind of input, print a line for each, and return the exit code: 1 if any is wrong.

    Args:
        prefer: an algorithm, or a whole plan, of the forward instead of the one that would run.
    """
    parsed = [(PagedProblem if "paged" in text else Problem).parse(text) for text in problems]
    console = Console(highlight=False, soft_wrap=True)
    here = Device.of(testing.operands(Problem.parse(PROBLEMS[0]), device=device).q)
    console.print(f"attention and its gradients on {escape(here.name)}; error over the bound that fp64 allows, right up to 1")
    wrong = 0
    for problem in parsed:
        plans = " / ".join(_plan(problem, here, way, prefer) for way in directions_of(problem))
        reports = [checked(problem, kind, device, prefer) for kind in KINDS]
        worst = max(reports, key=lambda report: (not report.ok, report.worst))
        wrong += not worst.ok
        verdict = "[green]right[/]" if worst.ok else "[bold red]WRONG[/]"
        sample = " [dim](a sample of rows, and sums)[/]" if worst.sampled else ""
        console.print(f"  {verdict}  {worst.worst:4.2f}  {escape(str(problem))}  [dim]{escape(plans)}[/]{sample}")
        if problems is not PROBLEMS:
            for kind, report in zip(KINDS, reports, strict=True):
                ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in report.ratios.items())
                console.print(f"         [dim]{escape(f'{kind}: {ratios}')}[/]")
        for reason in worst.broken:
            console.print(f"         {escape(reason)}")
    count = f"all {len(parsed)} are right" if len(parsed) > 1 else "it is right"
    console.print(f"[bold red]{wrong} of {len(parsed)} problems are wrong[/]" if wrong else count)
    return 1 if wrong else 0


def checked(problem: Problem, kind: str, device: str, prefer: str) -> testing.Report:
    if isinstance(problem, PagedProblem):
        return check_paged(problem, uneven(problem), kind, device=device, plan=prefer or None)
    return testing.check(problem, kind, device=device, plan=prefer or None)


def directions_of(problem: Problem) -> tuple[Direction, ...]:
    return ("forward",) if isinstance(problem, PagedProblem) else ("forward", "backward")


def uneven(problem: PagedProblem) -> list[tuple[int, int]]:
    """Queries and keys of each sequence: the last has all the keys that there is room for, those before it fewer."""
    batch = problem.batch
    queries = [problem.len_q] * batch
    if problem.packed:
        queries = [problem.len_q * (b + 1) // batch - problem.len_q * b // batch for b in range(batch)]
    return [(n, min(max(problem.len_k * (b + 1) // batch, n), problem.len_k)) for b, n in enumerate(queries)]


def _plan(problem: Problem, device: Device, direction: Direction, prefer: str) -> str:
    try:
        return str(plan(problem, device, direction=direction, prefer=prefer))
    except Unsupported:
        return "nothing"
