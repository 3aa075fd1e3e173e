"""`rowmax lessons`: dense, FlashAttention-1, -2 and what came after, on one problem, beside each other.

On the CPU the loop orders run in `analysis/tally.py`, which counts what they move and compute; on a GPU the kernels run. Beside
either, what the model says of the kernels on a GPU that need not be here.
"""

import time
from typing import Optional

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rowmax import Device, Problem, Unsupported, reference
from rowmax.analysis import tally
from rowmax.analysis.cost import bytes_of, flops_of, pairs_of
from rowmax.analysis.predict import Prediction, predict
from rowmax.errors import ProblemError
from rowmax.plan.warp_split import SHARES

WARPS = "32x64 w2 s2"  # a tile that fits every chip, whichever way its warps share it
KERNELS = (
    *("dense", "kv_outer", "q_outer"),
    *(f"warp_split[{WARPS} {share}]" for share in SHARES),
    *("hopper", "split_kv"),
)
DEFAULTS = {"cpu": "b1 h2 q512 k512 d64 fp32", "cuda": "b4 h16 q4096 k4096 d64 bf16"}
MOST_SCORES = 2**24  # that the counting loops take a few seconds for


def run(text: Optional[str], device: str, gpu: Device) -> int:
    """Print the tables; 1 if a result was wrong."""
    problem, console = Problem.parse(text or DEFAULTS[device]), wide_console()
    console.print(
        f"[bold]{escape(str(problem))}[/]: {pairs_of(problem):,} pairs, {bytes_of(problem, 'forward'):,} bytes at least"
    )
    wrong = 0
    if device == "cpu":
        wrong = _count(problem, console)
    _model(problem, gpu, device == "cuda", console)
    return 1 if wrong else 0


def wide_console() -> Console:
    """Tables are as wide as they are, in pipes and narrow terminals too."""
    return Console(highlight=False, soft_wrap=True, width=max(Console().width, 160))


def _count(problem: Problem, console: Console) -> int:
    if problem.packed or problem.batch * problem.heads_q * problem.len_q * problem.len_k > MOST_SCORES:
        raise ProblemError(f"the counting loops take dense problems of at most {MOST_SCORES:,} scores; '{problem}' is none")
    draw = torch.Generator().manual_seed(0)
    shapes = [(problem.len_q, problem.heads_q, problem.dim_qk), (problem.len_k, problem.heads_k, problem.dim_qk)]
    shapes.append((problem.len_k, problem.heads_k, problem.dim_v))
    q, k, v = (torch.randn(problem.batch, *shape, generator=draw).to(problem.dtype) for shape in shapes)
    expected, _ = reference.attention(q.double(), k.double(), v.double(), scale=problem.scale, **problem.band._asdict())
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), title="counted, 64 x 64 tiles on the CPU", title_justify="left"
    )
    titles = ("", "ms", "loaded", "stored", "Q read", "extra memory", "exps a pair", "O scaled a pair", "off by")
    for title in titles:
        table.add_column(title, no_wrap=True, justify="left" if not title else "right")
    pairs, wrong = max(pairs_of(problem), 1), 0
    for order in tally.ORDERS:
        start = time.perf_counter()
        out, found = tally.run(problem, q, k, v, order)
        seconds = time.perf_counter() - start
        error = float((out.double() - expected).abs().max()) if out.numel() else 0.0
        wrong += not error < 1e-4
        read = found.q_loaded / max(q.numel() * q.element_size(), 1)
        moved = (_bytes(size) for size in (found.loaded, found.stored))
        shares = (f"{number / pairs:.2f}" for number in (found.exps, found.rescaled))
        table.add_row(order, f"{seconds * 1e3:.0f}", *moved, f"{read:.3g}x", _bytes(found.extra), *shares, f"{error:.1e}")
    console.print(table)
    return wrong


def _model(problem: Problem, gpu: Device, measured: bool, console: Console) -> None:
    predictions: dict[str, Prediction] = {}
    for name in KERNELS:
        try:
            predictions[name] = predict(problem, gpu, name)
        except Unsupported as error:
            algorithm = name.partition("[")[0]
            console.print(f"  not {escape(name)}: {escape(error.refusals.get(algorithm, str(error)))}")
        except KeyError as error:
            raise ProblemError(f"--gpu: {error.args[0]}") from None
    times = _times(problem, predictions) if measured else {}
    counted = _counted(problem, predictions, console) if measured else {}
    title = f"kernels on {gpu.name}: " + ("measured and modelled" if measured else "modelled")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left")
    columns = (
        "",
        *(("ms", "TFLOP/s", "peak memory") if measured else ()),
        "model ms",
        "from HBM",
        *(("counted",) if counted else ()),
        "out of L2",
        "blocks",
        "waves",
    )
    for column in (*columns, "shared a block", "held back by"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("", "held back by") else "right")
    flops = flops_of(problem, "forward")
    for name, found in predictions.items():
        main = max(found.launches, key=lambda launch: launch.turns)
        hbm, l2 = (sum(getattr(launch, which) for launch in found.launches) for which in ("hbm_bytes", "l2_bytes"))
        seen: tuple[str, ...] = ()
        if measured:
            ms, peak, wrong = times[name]
            seen = (wrong, "", "") if wrong else (f"{ms:.4g}", f"{flops / ms / 1e9:.4g}", _bytes(peak))
        table.add_row(
            *(escape(name), *seen, f"{found.seconds * 1e3:.4g}", _bytes(hbm)),
            *([_bytes(counted[name])] if counted else []),
            *(_bytes(l2), f"{main.blocks:,}"),
            *(f"{found.waves:.2f}", _bytes(main.shared_bytes), found.verdict),
        )
    console.print(table)
    console.print(_turns(problem, predictions))


def _turns(problem: Problem, predictions: dict[str, Prediction]) -> Table:
    """What kernels do for a score besides the products: padding and hidden scores of a tile are computed as well."""
    title = "the same, counted by the model"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left")
    for column in ("", "exps a pair", "O scaled a pair", "barriers a turn", "shared memory a turn"):
        table.add_column(column, no_wrap=True, justify="right" if column else "left")
    pairs = max(pairs_of(problem), 1)
    for name, found in predictions.items():
        shares = (sum(getattr(one.turn, what) * one.turns for one in found.launches) for what in ("exps", "rescale_ops"))
        turn = max(found.launches, key=lambda launch: launch.turns).turn
        counted = (str(turn.barriers), _bytes(turn.shared_bytes)) if turn.barriers else ("", "")  # warp_split's alone
        table.add_row(escape(name), *(f"{share / pairs:.2f}" for share in shares), *counted)
    return table


def _times(problem: Problem, predictions: dict[str, Prediction]) -> dict[str, tuple[float, int, str]]:
    """Kernel -> (median ms, peak bytes besides inputs and output, what went wrong or "")."""
    from rowmax import testing
    from rowmax.analysis import measure
    from rowmax.analysis.cost import sequences

    plans = {name: str(prediction.plan) for name, prediction in predictions.items()}
    timed = measure.time_plans(str(problem), "forward", list(plans.values()), seed=0, device="cuda", seconds=1.0)
    operands = testing.operands(problem, device="cuda", lengths=sequences(problem) if problem.packed else None)
    found = {}
    for name, plan in plans.items():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = testing.attend(problem, operands, plan, return_lse=False)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
        found[name] = (timed[plan].ms, peak, timed[plan].error)
    return found


def _counted(problem: Problem, predictions: dict[str, Prediction], console: Console) -> dict[str, float]:
    """Kernel -> bytes from and to HBM by the hardware's own count; none where ncu is not here or may not read counters."""
    from rowmax.analysis import ncu

    plans = {name: str(prediction.plan) for name, prediction in predictions.items()}
    try:
        found = ncu.hbm_bytes(problem, list(plans.values()))
    except (ValueError, OSError) as error:
        console.print(f"  bytes from HBM are the model's alone, not counted: {escape(str(error))}")
        return {}
    return {name: found[plan] for name, plan in plans.items()}


def device_of(gpu: Optional[str], device: str) -> Device:
    """The GPU that the model is asked about: the one named, the one here, or an H200."""
    if gpu is None:
        return Device.of(torch.device("cuda")) if device == "cuda" else Device.named("H200")
    try:
        return Device.named(gpu)
    except KeyError as error:
        raise ProblemError(f"--gpu: {error.args[0]}") from None


def _bytes(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:.3g} {unit}"
        number /= 1000
    raise AssertionError
