"""`rowmax explain`: the plan of each direction, what was refused and why, and the least work the problem can be.

FLOPs: 2 x visible (query, key) pairs x (dim_qk + dim_v) forward, x (3 dim_qk + 2 dim_v) backward.
Bytes: each input read once and each output written once.
"""

import json
from itertools import pairwise
from typing import Optional

import torch
from rich.console import Console
from rich.markup import escape

from rowmax import Device, Plan, Problem, Unsupported, plan
from rowmax.errors import ProblemError
from rowmax.mask import end_key, first_key, visible_pairs

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
        "visible_pairs": _visible_pairs(problem),
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


def _sequences(problem: Problem) -> list[tuple[int, int]]:
    """`(len_q, len_k)` of each sequence. Packed lengths are data, so that equal ones (up to one token) stand for them."""
    if not problem.packed:
        return [(problem.len_q, problem.len_k)] * problem.batch
    cuts = ([total * i // max(problem.batch, 1) for i in range(problem.batch + 1)] for total in (problem.len_q, problem.len_k))
    lengths = ([end - start for start, end in pairwise(cut)] for cut in cuts)
    return list(zip(*lengths, strict=True))


def _visible_pairs(problem: Problem) -> int:
    """(query, key) pairs of all sequences and query heads."""
    return problem.heads_q * sum(visible_pairs(len_q, len_k, problem.band) for len_q, len_k in _sequences(problem))


def flops_of(problem: Problem, direction: str) -> int:
    """Matrix-product FLOPs over visible pairs only; the backward computes the scores again."""
    times_qk, times_v = (1, 1) if direction == "forward" else (3, 2)
    return 2 * _visible_pairs(problem) * (times_qk * problem.dim_qk + times_v * problem.dim_v)


def bytes_of(problem: Problem, direction: str) -> int:
    """Bytes that any algorithm must move: tensors once; of keys and values, those that some query sees."""
    element = torch.finfo(problem.dtype).bits // 8
    rows = problem.heads_q * sum(len_q for len_q, _ in _sequences(problem))
    keys = problem.heads_k * sum(_keys_seen(len_q, len_k, problem.band) for len_q, len_k in _sequences(problem))
    q, out = rows * problem.dim_qk * element, rows * problem.dim_v * element
    k, v = keys * problem.dim_qk * element, keys * problem.dim_v * element
    if direction == "forward":
        return q + k + v + out
    lse = rows * torch.finfo(problem.lse_dtype).bits // 8
    return (q + k + v) * 2 + out * 2 + lse  # read q k v, write dq dk dv; read out, dout, lse


def _keys_seen(len_q: int, len_k: int, band) -> int:
    if len_q == 0:
        return 0
    shift = len_k - len_q
    start = min(max(first_key(0, shift, band), 0), len_k)
    return max(min(max(end_key(len_q - 1, shift, len_k, band), 0), len_k) - start, 0)


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
