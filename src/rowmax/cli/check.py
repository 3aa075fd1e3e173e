"""`rowmax check`: is attention right on this machine? A handful of problems against the definition in fp64."""

from rich.console import Console
from rich.markup import escape

from rowmax import Device, Problem, Unsupported, plan, testing

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


def run(device: str, problems: tuple[str, ...] = PROBLEMS) -> int:
    """Check each problem with each kind of input, print a line for each, and return the exit code: 1 if any is wrong."""
    console = Console(highlight=False, soft_wrap=True)
    here = Device.of(testing.operands(Problem.parse(problems[0]), device=device).q)
    console.print(f"attention and its gradients on {escape(here.name)}; error over the bound that fp64 allows, right up to 1")
    wrong = 0
    for problem in map(Problem.parse, problems):
        plans = f"{_plan(problem, here, 'forward')} / {_plan(problem, here, 'backward')}"
        reports = [testing.check(problem, kind, device=device) for kind in KINDS]
        worst = max(reports, key=lambda report: (not report.ok, report.worst))
        wrong += not worst.ok
        verdict = "[green]right[/]" if worst.ok else "[bold red]WRONG[/]"
        console.print(f"  {verdict}  {worst.worst:4.2f}  {escape(str(problem))}  [dim]{escape(plans)}[/]")
        for reason in worst.broken:
            console.print(f"         {escape(reason)}")
    console.print(f"[bold red]{wrong} of {len(problems)} problems are wrong[/]" if wrong else f"all {len(problems)} are right")
    return 1 if wrong else 0


def _plan(problem: Problem, device: Device, direction) -> str:
    try:
        return str(plan(problem, device, direction=direction))
    except Unsupported:
        return "nothing"
