"""`rowmax tune`: measure the tiles that this GPU could run a problem with, and keep the best for `rowmax.plan` to take."""

import datetime
from pathlib import Path
from typing import Optional

import torch
from rich.console import Console
from rich.markup import escape

from rowmax import Device, Plan, Problem, ProblemError, ops
from rowmax.analysis.cost import flops_of
from rowmax.analysis.measure import Measurer
from rowmax.analysis.search import Found, tune
from rowmax.plan import Direction, forget, tuned


def run(problems: list[str], direction: Direction, out: Optional[Path], seconds: float) -> int:
    """Tune each problem in turn and write what was found at once; the exit code is 1 if a plan was wrong or none was right."""
    console = Console(highlight=False, soft_wrap=True)
    parsed = [Problem.parse(text) for text in problems]
    path, device, measurer = _path(out), *_gpu()
    failed = kept = False
    for problem in parsed:
        console.print(f"[bold]{escape(str(problem))}[/] {direction} on {escape(device.name)}")
        found = tune(problem, device, direction, measurer, seconds, lambda line: console.print(f"  {line}"))
        _show(found, console)
        failed |= bool(found.wrong) or found.best is None
        if found.best is None:
            continue
        entry = entry_of(found, found.best)
        try:
            tuned.save(path, problem, device, direction, entry)
        except (OSError, ValueError) as error:
            raise ProblemError(f"{path} cannot be written: {error}") from None
        kept = True
        console.print(f"  [green]{escape(str(found.best))}[/], {escape(entry.reason(device))}")
    forget()
    ops.forget()  # launches that were planned before
    if kept:
        elsewhere = "" if path == tuned.location() else f", which is read where {tuned.VARIABLE} names it"
        console.print(f"in {escape(str(path))}{elsewhere}")
    return 1 if failed else 0


def entry_of(found: Found, best: Plan) -> tuned.Entry:
    """What the file keeps of a search."""
    rate = {plan: flops_of(found.problem, found.direction) / ms / 1e9 for plan, ms in found.ms.items()}
    return tuned.Entry(
        algorithm=best.algorithm,
        tiles=tuple(map(str, best.tiles)),
        tflops=_rounded(rate[str(best)]),
        table=str(found.table),
        table_tflops=_rounded(rate.get(str(found.table), 0.0)),
        date=datetime.date.today().isoformat(),
        triton=tuned.triton_version(),
        kernels=tuned.kernels_digest(),
    )


def _rounded(number: float) -> float:
    """As many digits as a timing has."""
    return float(f"{number:.4g}")


def _path(out: Optional[Path]) -> Path:
    path = out or tuned.location()
    if path is None:
        raise ProblemError(f"{tuned.VARIABLE} is empty, so that no file is read: say with --out where to write, or unset it.")
    try:
        tuned.read(path)
    except (OSError, ValueError) as error:
        raise ProblemError(f"{path} would be overwritten, but {error}. Move it away, or name another with --out.") from None
    return path


def _gpu() -> tuple[Device, Measurer]:
    if not torch.cuda.is_available():
        raise ProblemError("rowmax tune measures on a CUDA GPU, and this PyTorch sees none. On a CPU there is nothing to tune.")
    here = torch.device("cuda", torch.cuda.current_device())
    return Device.of(here), Measurer(here)


def _show(found: Found, console: Console) -> None:
    flops = flops_of(found.problem, found.direction)
    for plan, ms in sorted(found.ms.items(), key=lambda item: item[1]):
        line = f"  {ms:>10.4f} ms {tuned.figures(flops / ms / 1e9):>6} TFLOP/s  {escape(plan)}"
        console.print(line + ("  [dim]the table's[/]" if plan == str(found.table) else ""))
    console.print(f"  [dim]{found.timed} were right and timed[/]")
    reasons: dict[str, list[str]] = {}
    for plan, error in found.errors.items():
        reasons.setdefault(error, []).append(plan)
    for error, plans in reasons.items():
        style = "bold red" if error.startswith("WRONG") else "dim"
        more = f" and {len(plans) - 3} more" if len(plans) > 3 else ""
        console.print(f"  [{style}]{escape(error)}[/]: {escape(', '.join(plans[:3]))}{more}")
    if found.wrong:
        console.print("  [bold red]A wrong result is a fault of rowmax or of the compiler: please report it.[/]")
    if found.best is None:
        console.print("  [bold red]nothing ran here and was right: nothing is kept[/]")
