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


class Phase(str, Enum):
    prefill = "prefill"
    decode = "decode"


DeviceOption = Annotated[Optional[DeviceKind], typer.Option(help="Default: the GPU if there is one.")]


@app.command()
def demo(
    question: Annotated[str, typer.Argument(help="What to ask the model.")] = QUESTION,
    device: DeviceOption = None,
    tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 64,
    concurrent: Annotated[
        Optional[int], typer.Option(min=1, help="So many prompts at once, over one paged cache; each is compared.")
    ] = None,
) -> None:
    """A language model (SmolLM2-135M) answers with rowmax attention; then the same with eager attention, to compare."""
    from rowmax.cli import concurrent as at_once
    from rowmax.cli import demo

    with _errors_as_messages():
        if concurrent is not None:
            raise typer.Exit(at_once.run(question, concurrent, _device(device), tokens))
        raise typer.Exit(demo.run(question, _device(device), tokens))


@app.command()
def explain(
    problem: Annotated[str, typer.Argument(help="For example 'b2 h32/8 q4096 k4096 d128 bf16 causal'; or --model.")] = "",
    gpu: Annotated[Optional[str], typer.Option(help="Another device: V100, A100, H200, L4, 4090, B200, cpu, ...")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    plan: Annotated[str, typer.Option(help="An algorithm, or a whole plan, instead of the one that would run.")] = "",
    against: Annotated[str, typer.Option(help="Other plans to compare, with commas between: kv_outer,dense,q_outer.")] = "",
    measure: Annotated[bool, typer.Option("--measure", help="Run it on this machine as well.")] = False,
    html: Annotated[Optional[Path], typer.Option(help="Write a page that needs nothing else.", dir_okay=False)] = None,
    png: Annotated[
        Optional[Path], typer.Option(help="Draw the same as one picture; needs rowmax[plot].", dir_okay=False)
    ] = None,
    model: Annotated[Optional[str], typer.Option(help="The attention of a public model: meta-llama-3-8b, ...")] = None,
    phase: Annotated[Phase, typer.Option(help="With --model.")] = Phase.prefill,
    tokens: Annotated[int, typer.Option(min=1, help="With --model: of the prompt, or in the cache.")] = 8192,
    batch: Annotated[Optional[int], typer.Option(min=1, help="With --model. Default: 1 for prefill, 8 for decode.")] = None,
) -> None:
    """What would run for a problem and why, how long it takes, what holds it back and what would help.

    Runs nothing unless asked to measure; needs no GPU and no Triton.
    """
    from rowmax.cli import explain

    with _errors_as_messages():
        if bool(problem) == (model is not None):
            _fail("explain: give either a problem, 'b2 h32/8 q4096 d128 bf16 causal', or --model NAME.")
        if model is not None:
            from rowmax.analysis import models

            problem = str(models.problem(model, phase.value, tokens=tokens, batch=batch))
        names = tuple(_plans(against))
        explain.run(problem, gpu, json, plan=plan, against=names, measure=measure, html=html, png=png)


@app.command()
def lessons(
    problem: Annotated[Optional[str], typer.Argument(help="Default: a small one on the CPU, a larger one on a GPU.")] = None,
    device: DeviceOption = None,
    gpu: Annotated[
        Optional[str], typer.Option(help="What the model is asked about. Default: the GPU here, or an H200.")
    ] = None,
) -> None:
    """Dense, FlashAttention-1, -2 and later side by side: what each moves and computes. Exits 1 if a result is wrong."""
    from rowmax.cli import lessons

    with _errors_as_messages():
        where = _device(device)
        raise typer.Exit(lessons.run(problem, where, lessons.device_of(gpu, where)))


@app.command()
def check(
    problems: Annotated[
        Optional[list[str]],
        typer.Argument(help="Spelled as for explain, in quotes. Default: a handful.", metavar="[PROBLEM]..."),
    ] = None,
    device: DeviceOption = None,
    plan: Annotated[str, typer.Option(help="An algorithm, or a whole plan, instead of the one that would run.")] = "",
) -> None:
    """Run attention, forward and backward, on this machine and compare with the definition in fp64. Exits 1 if wrong."""
    from rowmax.cli import check

    with _errors_as_messages():
        raise typer.Exit(check.run(_device(device), problems or check.PROBLEMS, plan))


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


def _plans(text: str) -> list[str]:
    """Plans with commas between them; a plan may have commas between its brackets."""
    import re

    return [name.strip() for name in re.split(r",(?![^\[]*\])", text) if name.strip()]


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
