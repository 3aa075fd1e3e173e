"""`rowmax explain`: the plan of each direction, what was refused and why, and the least work the problem can be."""

import json
from typing import Optional

import torch
from rich.console import Console
from rich.markup import escape

from rowmax import Device, Plan, Problem, Unsupported, plan
from rowmax.analysis.cost import bytes_of, flops_of, pairs_of
from rowmax.errors import ProblemError

DIRECTIONS = ("forward", "backward")


def run(text: str, gpu: Optional[str], as_json: bool) -> None:
    """Print the facts about the problem spelled by `text`."""
    facts = explain(Problem.parse(text), _find_device(gpu))
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts, Console(highlight=False, soft_wrap=True))


def _find_device(name: Optional[str]) -> Device:
    if name is None:
        return Device.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        return Device.named(name)
    except KeyError as error:
        raise ProblemError(f"--gpu: {error.args[0]}") from None


def explain(problem: Problem, device: Device) -> dict:
    """Everything `rowmax explain` says, as plain values; the schema of `--json`."""
    left, right = problem.band
    return {
        "problem": str(problem),
        "fields": {
            "batch": problem.batch,
            "heads_q": problem.heads_q,
            "heads_k": problem.heads_k,
            "len_q": problem.len_q,
            "len_k": problem.len_k,
            "dim_qk": problem.dim_qk,
            "dim_v": problem.dim_v,
            "dtype": problem.dtype_name,
            "left": left,
            "right": right,
            "scale": problem.scale,
            "packed": problem.packed,
        },
        "device": {"name": device.name, "kind": device.kind, "capability": list(device.capability)},
        "visible_pairs": pairs_of(problem),
        "assumes": "sequences of equal length" if problem.packed else None,
        "directions": {direction: _explain(problem, device, direction) for direction in DIRECTIONS},
    }


def _explain(problem: Problem, device: Device, direction) -> dict:
    chosen: Optional[Plan] = None
    try:
        chosen = plan(problem, device, direction=direction)
        refusals = dict(chosen.refusals)
    except Unsupported as error:
        refusals = error.refusals
    flops, size = flops_of(problem, direction), bytes_of(problem, direction)
    return {
        "plan": str(chosen) if chosen else None,
        "algorithm": chosen.algorithm if chosen else None,
        "tiles": [str(tile) for tile in chosen.tiles] if chosen else [],
        "reason": chosen.reason if chosen else None,
        "refusals": refusals,
        "flops": flops,
        "fewest_bytes": size,
        "flops_per_byte": flops / size if size else None,
    }


def _show(facts: dict, console: Console) -> None:
    fields, assumes = facts["fields"], facts["assumes"]
    console.print(f"[bold]{escape(facts['problem'])}[/] on {escape(facts['device']['name'])}")
    console.print(f"  {_in_words(fields)}")
    pairs = f"{facts['visible_pairs']:,} of {_all_pairs(fields):,} pairs of a query and a key are visible"
    console.print(f"  {pairs}" + (f" (for {assumes})" if assumes else ""))
    for direction, found in facts["directions"].items():
        console.print()
        name = f"[green]{escape(found['plan'])}[/]" if found["plan"] else "[red]nothing runs it here[/]"
        console.print(f"[bold]{direction}[/]: {name}" + (f", {escape(found['reason'])}" if found["reason"] else ""))
        for candidate, reason in found["refusals"].items():
            console.print(f"  not {candidate}: {escape(reason)}")
        intensity = f", {found['flops_per_byte']:,.0f} FLOPs a byte" if found["fewest_bytes"] else ""
        work = f"{_si(found['flops'])}FLOP, at least {_si(found['fewest_bytes'])}B moved{intensity}"
        console.print(f"  {work}")


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
