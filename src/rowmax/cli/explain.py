"""`rowmax explain`: the plan of each direction, what was refused and why, how long the forward takes, what holds it back, and
what would help. Runs nothing unless it is asked to measure. `docs/explain.md` documents the keys of `--json`.
"""

import json
from pathlib import Path
from typing import Optional

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rowmax import Device, PagedProblem, Problem
from rowmax.analysis.report import explain
from rowmax.errors import ProblemError


def run(
    text: str,
    gpu: Optional[str],
    as_json: bool,
    *,
    plan: str = "",
    against: tuple[str, ...] = (),
    measure: bool = False,
    html: Optional[Path] = None,
    png: Optional[Path] = None,
) -> None:
    """Print the facts about the problem spelled by `text`."""
    problem, device = parsed(text), find_device(gpu)
    facts = explain(problem, device, plan=plan, against=against)
    if measure:
        facts["measured_ms"] = measured_ms(problem, device, facts["plan"])
    if html is not None:
        _drawable("--html", device, facts)
        from rowmax.analysis.page import page

        try:
            html.write_text(page(problem, device, facts), encoding="utf-8")
        except OSError as error:
            raise ProblemError(f"--html: {html} cannot be written: {error.strerror}") from None
    if png is not None:
        _drawable("--png", device, facts)
        from rowmax.analysis.picture import draw

        try:
            draw(problem, device, facts, png)
        except ImportError:
            raise ProblemError("--png needs matplotlib: pip install 'rowmax[plot]'; --html needs nothing.") from None
        except OSError as error:
            raise ProblemError(f"--png: {png} cannot be written: {error.strerror}") from None
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts, Console(highlight=False, soft_wrap=True, width=max(Console().width, 160)))


def parsed(text: str) -> Problem:
    """A problem, dense, packed or over pages: the word paged16 makes it one of `attention_paged`."""
    return (PagedProblem if "paged" in text else Problem).parse(text)


def _drawable(option: str, device: Device, facts: dict) -> None:
    if facts["predicted_ms"] is None:
        raise ProblemError(f"{option}: there is nothing to draw: {facts['no_model']}")
    if device.kind != "cuda":
        raise ProblemError(f"{option}: what is drawn are the multiprocessors of a GPU; name one with --gpu, such as H200.")


def measured_ms(problem: Problem, device: Device, plan: Optional[str]) -> float:
    """The median of one call on this machine; its last result is checked.

    Raises:
        ProblemError: the plan is for another device than the one here, or its result is wrong.
    """
    if isinstance(problem, PagedProblem):
        raise ProblemError("--measure: calls over pages are timed by benchmarks/decode.py; leave the option out.")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    here = Device.of(torch.device(kind))
    if (here.kind, here.capability, here.sms if kind == "cuda" else 0) != (
        *(device.kind, device.capability, device.sms if device.kind == "cuda" else 0),
    ):
        raise ProblemError(f"--measure: here is {here.name}, not {device.name}; leave --gpu out to measure on this machine.")
    if plan is None:
        raise ProblemError(f"--measure: nothing here runs '{problem}'.")
    from rowmax.analysis import measure as measuring

    timed = measuring.time_plans(str(problem), "forward", [plan], seed=0, device=kind, seconds=1.0)[plan]
    if timed.error:
        raise ProblemError(f"--measure: {plan}: {timed.error}")
    return timed.ms


def find_device(name: Optional[str]) -> Device:
    if name is None:
        return Device.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        return Device.named(name)
    except KeyError as error:
        raise ProblemError(f"--gpu: {error.args[0]}") from None


def _show(facts: dict, console: Console) -> None:
    fields, assumes = facts["fields"], facts["assumes"]
    console.print(f"[bold]{escape(facts['problem'])}[/] on {escape(facts['device']['name'])}")
    console.print(f"  {_in_words(fields)}")
    pairs = f"{facts['visible_pairs']:,} of {_all_pairs(fields):,} pairs of a query and a key are visible"
    console.print(f"  {pairs}" + (f" (for {assumes})" if assumes else ""))
    if facts["not_counted"]:
        console.print(f"  not counted: {escape(facts['not_counted'])}")
    for direction, found in facts["directions"].items():
        console.print()
        name = f"[green]{escape(found['plan'])}[/]" if found["plan"] else "[red]nothing runs it here[/]"
        console.print(f"[bold]{direction}[/]: {name}" + (f", {escape(found['reason'])}" if found["reason"] else ""))
        for candidate, reason in found["refusals"].items():
            console.print(f"  not {candidate}: {escape(reason)}")
        intensity = f", {found['flops_per_byte']:,.0f} FLOPs a byte" if found["fewest_bytes"] else ""
        work = f"{_si(found['flops'])}FLOP, at least {_si(found['fewest_bytes'])}B moved{intensity}"
        console.print(f"  {work}")
        if direction == "forward":
            _show_prediction(facts, console)
        elif found["predicted_ms"] is not None:
            _show_backward(found, console)


BASES = {
    "measured": "constants fitted to an H200",
    "data sheet": "an H200's constants on this chip's data sheet",
    "another CPU": "rates of two cores of an AMD EPYC, scaled by the number of threads",
}
GAPS = {
    "HBM": "memory: HBM and the L2 cache",
    "parallelism": "blocks: idle or half-filled multiprocessors",
    "non-matmul": "softmax, scaling and waiting between products",
    "tensor": "tensor cores",
    "launch": "launches, and the begin and end of tiles",
}


SHARES = {
    "HBM": "HBM busy",
    "parallelism": "multiprocessors without a block",
    "non-matmul": "exponentials",
    "tensor": "tensor cores",
    "launch": "launching",
}


CPU_GAPS = {
    "non-matmul": "softmax and masks",
    "tensor": "matrix products",
    "launch": "operators started for each tile",
}


def _show_prediction(facts: dict, console: Console) -> None:
    if facts["predicted_ms"] is None:
        console.print(f"  no prediction: {escape(facts['no_model'] or 'nothing runs it')}")
        if facts["measured_ms"] is not None:
            console.print(f"  measured {_ms(facts['measured_ms'])}")
        return
    flops = facts["directions"]["forward"]["flops"]
    rate = _rate(flops, facts["predicted_ms"])
    console.print(f"  predicted [bold]{_ms(facts['predicted_ms'])}[/]{rate}; held back by [bold]{facts['verdict']}[/]")
    if facts["measured_ms"] is not None:
        off = facts["predicted_ms"] / facts["measured_ms"] - 1
        console.print(f"  measured {_ms(facts['measured_ms'])}: the prediction is {off:+.0%} off")
    on_gpu = facts["device"]["kind"] == "cuda"
    for launch in facts["launches"] if on_gpu else ():
        if launch["turns"]:
            size = f", {launch['shared_bytes'] / 1024:.0f} KB shared, about {launch['registers']} registers" * bool(
                launch["threads"]
            )
            where = f"{launch['blocks']:,} tasks of {launch['turns'] / max(launch['blocks'], 1):,.4g} turns"
            console.print(f"  {launch['kernel']}: {where}, {launch['blocks_at_once']} blocks an SM{size}")
    shares = f"{facts['waves']:.2f} waves, multiprocessors busy {facts['busy']:.0%}"
    if on_gpu:
        console.print(f"  {shares}; {_si(sum(one['hbm_bytes'] for one in facts['launches']))}B from HBM")
        units = ", ".join(f"{SHARES[name]} {share:.0%}" for name, share in facts["shares"].items())
        console.print(f"  share of the time: {units}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("  what it waits for", "would save", "of the time"):
        table.add_column(title, no_wrap=True)
    for name, gap in sorted(facts["gaps"].items(), key=lambda pair: -pair[1]):
        if gap or on_gpu:
            table.add_row(f"  {name}: {(GAPS if on_gpu else CPU_GAPS)[name]}", _ms(gap), f"{gap / facts['predicted_ms']:.0%}")
    console.print(table)
    for one in facts["advice"]:
        head = "in the plan" if one["taken"] else "try"
        console.print(
            f"  {head}: {escape(one['what'])}: {one['gain']:.1f}x, {_ms(one['predicted_ms'])} ({escape(one['plan'])})"
        )
    for name, other in facts["against"].items():
        if "refused" in other:
            console.print(f"  against {name}: {escape(other['refused'])}")
            continue
        moved = _si(sum(one["hbm_bytes"] for one in other["launches"]))
        speed = f"{_ms(other['predicted_ms'])}, {other['gain']:.2f} times this"
        console.print(f"  against {escape(other['plan'])}: {speed}, {moved}B from HBM, held back by {other['verdict']}")
    for one in facts["what_if"]:
        gain = "" if one["gain"] is None else f", {one['gain']:.2f}x the pairs a second"
        console.print(f"  with {escape(one['what'])}: {_ms(one['predicted_ms'])}, {one['times']:.2f}x the time{gain}")
    basis = BASES[facts["rates"]]
    console.print(f"  [dim]a model: {basis}; `--measure` checks it here[/]")


def _rate(flops: float, ms: float) -> str:
    """TFLOP/s, of which a CPU has less than one."""
    tera = flops / ms / 1e9 if ms else 0.0
    return "" if not ms else f", {tera:,.0f} TFLOP/s" if tera >= 10 else f", {tera:.2g} TFLOP/s"


def _show_backward(found: dict, console: Console) -> None:
    rate = _rate(found["flops"], found["predicted_ms"])
    shares = sorted(found["gaps"].items(), key=lambda pair: -pair[1])
    gaps = ", ".join(f"{name} {gap / found['predicted_ms']:.0%}" for name, gap in shares if gap)
    said = f"predicted [bold]{_ms(found['predicted_ms'])}[/]{rate}; held back by [bold]{found['verdict']}[/]"
    console.print(f"  {said} (would save: {gaps})")
    kernels = ", ".join(f"{one['kernel']}: {one['blocks']:,} tasks" for one in found["launches"] if one["threads"])
    moved = sum(one["hbm_bytes"] for one in found["launches"])
    if moved:
        console.print(f"  {kernels}; {_si(moved)}B from HBM")


def _ms(ms: float) -> str:
    return f"{ms:.3g} ms" if ms >= 1 else f"{ms * 1e3:.3g} us"


def _in_words(fields: dict) -> str:
    heads = f"{fields['heads_q']} query heads"
    if fields["heads_q"] != fields["heads_k"]:
        heads += f" over {fields['heads_k']} KV heads"
    dims = f"dimension {fields['dim_qk']}" + (f" (values {fields['dim_v']})" if fields["dim_v"] != fields["dim_qk"] else "")
    lengths = f"{fields['len_q']} queries and {fields['len_k']} keys" + (" in all" if fields["packed"] else " each")
    return f"batch {fields['batch']}, {lengths}; {heads} of {dims}, {fields['dtype']}; scale {fields['scale']:.6g}"


def _all_pairs(fields: dict) -> int:
    batch = fields["batch"]
    if not fields["packed"]:
        return batch * fields["heads_q"] * fields["len_q"] * fields["len_k"]
    return fields["heads_q"] * fields["len_q"] * fields["len_k"] // max(batch, 1)


def _si(number: float) -> str:
    """Three or four digits and a decimal prefix: 137.4 G."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 1000 or prefix == "P":
            return f"{number:.4g} {prefix}"
        number /= 1000
    raise AssertionError
