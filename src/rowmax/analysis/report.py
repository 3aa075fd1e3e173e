"""What `rowmax explain` says of a call, as plain values: prediction, verdict, advice and what-ifs. Called by
`cli/explain.py` and `rowmax.explain`; runs nothing.

    advice    other plans for the same problem, and what the plan already does, each with the time that the model gives it
    what_if   other problems: the same plan rules at another length, batch, head count, dim, type or window

A gain is a ratio of times for the same problem, or of pairs of a query and a key a second where the problem differs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Optional

import torch

from rowmax.analysis.cost import bytes_of, flops_of, pairs_of
from rowmax.analysis.launches import Lengths
from rowmax.analysis.launches_bent import uncounted
from rowmax.analysis.predict import Prediction, predict
from rowmax.device import Device
from rowmax.errors import ProblemError, Unsupported
from rowmax.mask import Band, Pattern
from rowmax.paged import PagedProblem
from rowmax.plan import Direction, Plan
from rowmax.plan import plan as choose
from rowmax.plan.candidates import candidates
from rowmax.plan.split_kv import SplitTile
from rowmax.problem import Problem

WORTH = 1.03  # of a gain, to be mentioned; tiles, which the model knows less well, TILE_WORTH
PARTS_WORTH = 1.05  # of another number of parts: more fill the chip, but are joined one after another
TILE_WORTH, MOST_TILES = 1.15, 16
OTHERS = ("split_kv", "hopper", "q_outer")


PREDICTED = ("predicted_ms", "terms", "gaps", "shares", "verdict", "waves", "busy", "launches")  # of each direction
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def explain(
    problem: Problem,
    device: Device,
    *,
    plan: str = "",
    against: Sequence[str] = (),
    lengths: Optional[Lengths] = None,
) -> dict:
    """Everything `rowmax explain` says, as plain values; the schema of `--json` (`docs/explain.md`)."""
    left, right = problem.band[:2]
    said = facts(problem, device, plan=plan, against=against, lengths=lengths)
    directions = {direction: _explain(problem, device, direction, plan, lengths) for direction in DIRECTIONS}
    directions["forward"] |= {key: said[key] for key in PREDICTED}
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
            **{name: getattr(problem.band, name, None) for name in Pattern._fields[2:]},
            "scale": problem.scale,
            "packed": problem.packed,
            "page_size": problem.page_size if isinstance(problem, PagedProblem) else None,
        },
        "device": {"name": device.name, "kind": device.kind, "capability": list(device.capability)},
        "visible_pairs": pairs_of(problem),
        "assumes": "sequences of equal length" if problem.packed else None,
        "not_counted": uncounted(problem, directions["forward"]["algorithm"]),
        "directions": directions,
        **said,
    }


def _explain(
    problem: Problem, device: Device, direction: Direction, prefer: str = "", lengths: Optional[Lengths] = None
) -> dict:
    """The plan of one direction; and of a backward what is predicted, of which a forward has more (`facts`)."""
    chosen: Optional[Plan] = None
    try:
        chosen = choose(problem, device, direction=direction, prefer=prefer)
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
        **dict.fromkeys(PREDICTED),
        **(_backward(problem, device, prefer, lengths) if chosen and direction == "backward" else {}),
    }


def _backward(problem: Problem, device: Device, prefer: str, lengths: Optional[Lengths]) -> dict[str, Any]:
    try:
        said = _of(predict(problem, device, prefer, direction="backward", lengths=lengths))
    except (KeyError, Unsupported):
        return {}
    return {key: said[key] for key in PREDICTED}


def facts(
    problem: Problem,
    device: Device,
    *,
    plan: str = "",
    against: Sequence[str] = (),
    lengths: Optional[Lengths] = None,
) -> dict[str, Any]:
    """What is said of the forward; numbers are None where there is no model, and `no_model` says why."""
    found: dict[str, Any] = dict.fromkeys(
        ("plan", "terms", "gaps", "shares", "verdict", "predicted_ms", "measured_ms", "waves", "busy", "rates", "no_model")
    )
    found.update({"advice": [], "what_if": [], "against": {}, "launches": []})
    try:
        found["plan"] = str(choose(problem, device, prefer=plan))
        prediction = predict(problem, device, plan, lengths=lengths)
    except Unsupported as error:
        return {**found, "no_model": str(error).split("\n")[0]}
    except KeyError:
        return {**found, "no_model": f"no model of {found['plan']} on {device.name}"}
    found.update(_of(prediction))
    found["advice"] = advice(problem, device, prediction, lengths)
    found["what_if"] = what_ifs(problem, device, prediction)
    for name in against:
        found["against"][name] = _against(problem, device, name, prediction, lengths)
    return found


def _of(prediction: Prediction) -> dict[str, Any]:
    return {
        "predicted_ms": prediction.seconds * 1e3,
        "terms": {name: seconds * 1e3 for name, seconds in prediction.terms.items()},
        "gaps": {name: seconds * 1e3 for name, seconds in prediction.gaps.items()},
        "shares": prediction.shares,
        "verdict": prediction.verdict,
        "waves": prediction.waves,
        "busy": prediction.busy,
        "rates": prediction.source,
        "launches": [
            {
                "kernel": launch.name,
                "blocks": launch.blocks,
                "turns": launch.turns,
                "blocks_at_once": launch.at_once,
                "hbm_bytes": round(launch.hbm_bytes),
                "l2_bytes": round(launch.l2_bytes),
                "shared_bytes": launch.shared_bytes,
                "registers": launch.registers,
                "threads": launch.threads,
            }
            for launch in prediction.launches
        ],
    }


def _against(problem: Problem, device: Device, name: str, mine: Prediction, lengths: Optional[Lengths]) -> dict[str, Any]:
    try:
        other = predict(problem, device, name, lengths=lengths)
    except Unsupported as error:
        return {"refused": error.refusals.get(Plan.parse(name).algorithm, str(error).split("\n")[0])}
    except KeyError:
        return {"refused": "there is no model of it"}
    return {"plan": str(other.plan), "gain": other.seconds / mine.seconds, **_of(other)}


def advice(problem: Problem, device: Device, mine: Prediction, lengths: Optional[Lengths] = None) -> list[dict[str, Any]]:
    """`{what, plan, predicted_ms, gain, taken}`, best first; `taken`: the plan does so already, and gains that over without."""
    found: list[dict[str, Any]] = []

    def add(what: str, other: Prediction, gain: float, taken: bool = False) -> None:
        found.append({"what": what, "plan": str(other.plan), "predicted_ms": other.seconds * 1e3, "gain": gain, "taken": taken})

    tile = mine.plan.tiles[0]
    if isinstance(tile, SplitTile) and tile.parts > 1 and tile.fixed != "r":
        whole = replace(tile, fixed="r", once=False) if tile.fixed else replace(tile, parts=1, together=False, once=False)
        one = _try(problem, device, Plan(mine.plan.algorithm, (whole,)), lengths)
        if one is not None:
            blocks, parts = one.launches[0].blocks, mine.launches[0].blocks
            ways = f"{parts} parts of keys" if tile.together or tile.fixed else f"keys split {tile.parts} ways"
            what = f"{_few(problem)} makes {blocks} blocks for {device.sms} SMs: {ways}"
            add(what, mine, one.seconds / mine.seconds, taken=True)
    if isinstance(tile, SplitTile) and tile.how == "x":
        tried = {
            number: _try(problem, device, Plan(mine.plan.algorithm, (replace(tile, parts=number),)), lengths)
            for number in (2**i for i in range(8))
        }
        known = {number: one for number, one in tried.items() if one is not None}
        best_number = min(known, key=lambda number: known[number].seconds, default=tile.parts)
        if best_number != tile.parts and mine.seconds >= PARTS_WORTH * known[best_number].seconds:
            what = f"{best_number} parts of the keys instead of {tile.parts}"
            add(what, known[best_number], mine.seconds / known[best_number].seconds)
    for name in OTHERS:
        if name != mine.plan.algorithm and (other := _try(problem, device, name, lengths)) is not None:
            gain = mine.seconds / other.seconds
            if gain >= WORTH:
                what = f"plan='{name}'"
                tile = other.plan.tiles[0]
                if isinstance(tile, SplitTile):
                    blocks = max(mine.launches, key=lambda launch: launch.turns).blocks
                    what += f": {_few(problem)} makes {blocks} blocks for {device.sms} SMs; split the keys {tile.parts} ways"
                add(what, other, gain)
    best = max(_other_tiles(problem, device, mine, lengths), key=lambda pair: pair[1], default=None)
    if best is not None and best[1] >= TILE_WORTH:
        add(f"tile {best[0].plan.tiles[0]}; `rowmax tune` measures it", *best)
    return sorted(found, key=lambda one: (one["taken"], -one["gain"]))


def _few(problem: Problem) -> str:
    queries = "one query" if problem.len_q == 1 else f"{problem.len_q:,} queries"
    return f"{queries} over {problem.len_k:,} keys"


def _other_tiles(problem: Problem, device: Device, mine: Prediction, lengths: Optional[Lengths]):
    if mine.plan.algorithm not in ("q_outer", "hopper") or sum(launch.blocks for launch in mine.launches) > 100_000:
        return
    plans = (plan for plan in candidates(problem, device, mine.plan, 0) if plan.algorithm == mine.plan.algorithm)
    for _, plan in zip(range(MOST_TILES), plans, strict=False):
        if (other := _try(problem, device, plan, lengths)) is not None:
            yield other, mine.seconds / other.seconds


def _try(problem: Problem, device: Device, plan: "str | Plan", lengths: Optional[Lengths] = None) -> Optional[Prediction]:
    try:
        return predict(problem, device, plan, lengths=lengths)
    except (Unsupported, KeyError):
        return None


def what_ifs(problem: Problem, device: Device, mine: Prediction) -> list[dict[str, Any]]:
    """`{what, problem, predicted_ms, times, gain}`: `times` of this call's time, `gain` in pairs a second."""
    found: list[dict[str, Any]] = []
    if not mine.seconds:  # nothing to compute, on a CPU
        return found
    rate = pairs_of(problem) / mine.seconds
    for what, change in _changes(problem):
        try:
            other = problem.with_(**change)
            prediction = predict(other, device)
        except (Unsupported, ProblemError, KeyError):
            continue
        times = prediction.seconds / mine.seconds
        gain = pairs_of(other) / prediction.seconds / rate if rate else None
        entry = {"what": what, "problem": str(other), "plan": str(prediction.plan)}
        found.append({**entry, "predicted_ms": prediction.seconds * 1e3, "times": times, "gain": gain})
    return found


def _changes(problem: Problem) -> list[tuple[str, dict]]:
    found: list[tuple[str, dict]] = []
    if problem.len_q == problem.len_k:
        found.append(("twice the length", {"len_q": 2 * problem.len_q, "len_k": 2 * problem.len_k}))
    else:
        found.append(("twice the keys", {"len_k": 2 * problem.len_k}))
    if not problem.packed:
        found.append(("twice the batch", {"batch": 2 * problem.batch}))
    if problem.heads_k > 1 and problem.heads_k % 2 == 0:
        found.append(("half the KV heads", {"heads_k": problem.heads_k // 2}))
    for dim in (64, 128):
        if problem.dim_qk == problem.dim_v != dim:
            same = problem.heads_q * problem.dim_qk
            heads = {"heads_q": same // dim, "heads_k": problem.heads_k * problem.dim_qk // dim}
            if same % dim == 0 and heads["heads_k"] and heads["heads_q"] % heads["heads_k"] == 0:
                found.append((f"heads of {dim}, as wide in all", {"dim_qk": dim, "dim_v": dim, **heads}))
    if problem.dtype == torch.float32:
        found.append(("bf16", {"dtype": torch.bfloat16}))
    if problem.band.left is None and problem.len_k > 2048:
        found.append(("a window of 1024 keys", {"band": Band(1023, problem.band.right)}))
    return found
