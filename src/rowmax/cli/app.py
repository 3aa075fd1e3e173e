"""The commands and their arguments. Each command's module is imported when it runs, so that `rowmax --help` is quick."""

from enum import Enum
from pathlib import Path
from typing import Annotated, NoReturn, Optional

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Exact attention for PyTorch: see it run, check it on this machine, ask why, tune it.",
)

QUESTION = "Write a haiku about the sea."


class DeviceKind(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


class Pass(str, Enum):
    forward = "forward"
    backward = "backward"


DeviceOption = Annotated[Optional[DeviceKind], typer.Option(help="Default: the GPU if there is one.")]


@app.command()
def demo(
    question: Annotated[str, typer.Argument(help="What to ask the model.")] = QUESTION,
    device: DeviceOption = None,
    tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 64,
) -> None:
    """A language model (SmolLM2-135M) answers with rowmax attention; then the same with eager attention, to compare."""
    from rowmax.cli import demo

    with _errors_as_messages():
        raise typer.Exit(demo.run(question, _device(device), tokens))


@app.command()
def explain(
    problem: Annotated[str, typer.Argument(help="For example 'b2 h32/8 q4096 k4096 d128 bf16 causal'.")],
    gpu: Annotated[Optional[str], typer.Option(help="Plan for another device: H200, A100, cpu, ...")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """What would run for a problem, why, and how much work it is. Runs nothing; needs no GPU and no Triton."""
    from rowmax.cli import explain

    with _errors_as_messages():
        explain.run(problem, gpu, json)


@app.command()
def check(device: DeviceOption = None) -> None:
    """Run attention, forward and backward, on this machine and compare with the definition in fp64. Exits 1 if wrong."""
    from rowmax.cli import check

    with _errors_as_messages():
        raise typer.Exit(check.run(_device(device)))


@app.command()
def tune(
    problems: Annotated[list[str], typer.Argument(help="Each spelled as for explain, in quotes.", metavar="PROBLEM...")],
    direction: Annotated[Pass, typer.Option("--pass", help="Which kernels.")] = Pass.forward,
    out: Annotated[Optional[Path], typer.Option(help="Default: the file that rowmax reads.", dir_okay=False)] = None,
    seconds: Annotated[float, typer.Option(min=30.0, help="About how long for each problem.")] = 180.0,
) -> None:
    """Measure on this GPU which tiles run a problem fastest, right results only, and keep the best for later calls."""
    from rowmax.cli import tune

    with _errors_as_messages():
        raise typer.Exit(tune.run(problems, direction.value, out, seconds))


def _device(device: Optional[DeviceKind]) -> str:
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device is DeviceKind.cuda and not torch.cuda.is_available():
        _fail("--device cuda: this PyTorch sees no CUDA GPU; leave the option out to run on the CPU.")
    return device.value


class _errors_as_messages:
    """Errors that rowmax raises on purpose explain themselves: print them without a traceback."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> None:
        from rowmax.errors import ProblemError, Unsupported

        if isinstance(error, (ProblemError, Unsupported)):
            _fail(str(error))


def _fail(message: str) -> NoReturn:
    typer.echo(f"rowmax: {message}", err=True)
    raise typer.Exit(2)
