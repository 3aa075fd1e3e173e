"""Which algorithm and which tiles run a problem on a device, and why not the others.

The plan decides and the kernels obey: they hold no heuristics and read no environment. Nothing here needs a GPU or Triton, and
nothing here reads the environment but `tuned.py`, to find its file, `log.py`, and `portable.py`, for Triton's interpreter.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Optional

from rowmax.device import Device
from rowmax.errors import ProblemError, Unsupported
from rowmax.paged import PagedProblem
from rowmax.plan import cpu, generations, hopper, latent, log, portable, resources, split_kv, tuned, warp_split
from rowmax.plan.tile import Tile
from rowmax.problem import Problem

Direction = Literal["forward", "backward"]

# Name -> the module that decides for it, in order of preference.
CANDIDATES: dict[str, Any] = {
    **{"aten": cpu.ATEN, "tiled": cpu.TILED, "gathered": cpu.GATHERED},
    **{"latent": latent, "split_kv": split_kv, "hopper": hopper},
    **{"q_outer": portable, "kv_outer": generations.KV_OUTER, "dense": generations.DENSE, "warp_split": warp_split.WARP_SPLIT},
}
BACKWARD_OF = dict.fromkeys(("latent", "split_kv", *generations.BY_NAME), "q_outer")  # forward asked for -> backward that runs
PAGED = ("gathered", "latent", "split_kv")  # those that read pages


@dataclass(frozen=True)
class Plan:
    """Attributes:
    algorithm: a name in `CANDIDATES`.
    tiles: forward: one; backward: of `hopper` one, of `q_outer` the tile of the dQ kernel, then that of the dK/dV kernel, or
        one for dK and one for dV, which then run apart (CPU: one, for all).
    reason: why this candidate and these tiles, with the measurement where there is one.
    refusals: `(candidate, reason)` for each candidate that was passed over.
    """

    algorithm: str
    tiles: tuple[Tile, ...] = ()
    reason: str = ""
    refusals: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.algorithm + (f"[{', '.join(map(str, self.tiles))}]" if self.tiles else "")

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """`q_outer` (tiles chosen by the plan) or `q_outer[128x128 w8 s2 tma]` (as given).

        Raises:
            ProblemError: it is spelled otherwise. Whether the tiles can run only `plan` can tell.
        """
        match = re.fullmatch(r"(\w+)(?:\[(.*)\])?", str(text).strip())
        if match is None:
            raise ProblemError(f"'{text}' is no plan; an example: 'q_outer[128x128 w8 s2]'")
        if match[2] is None:
            return cls(match[1])
        first, *others = match[2].split(",")
        parse: Any = {
            "hopper": hopper.HopperTile.parse,
            "latent": split_kv.SplitTile.parse,
            "split_kv": split_kv.SplitTile.parse,
            "warp_split": warp_split.WarpTile.parse,
        }
        parse = parse.get(match[1], Tile.parse)
        kinds = zip((parse, *[Tile.parse] * len(others)), (first, *others), strict=True)
        return cls(match[1], tuple((_marked(text) or parse)(text) for parse, text in kinds))


def _marked(text: str) -> Optional[Callable[[str], Tile]]:
    """What reads a tile that says itself what it is for."""
    return next((kind.parse for mark, kind in hopper.BACKWARD_TILES.items() if mark in text.split()), None)


class _Wanted(NamedTuple):
    algorithm: str
    tiles: tuple[Tile, ...]  # empty: its own
    reason: str
    by: str  # completes "<algorithm> ..." where the others are refused


@lru_cache(maxsize=4096)
def plan(
    problem: Problem,
    device: Device,
    *,
    direction: Direction = "forward",
    prefer: str = "",
    aligned: bool = True,
    pairs_aligned: Optional[bool] = None,
) -> Plan:
    """The plan for one direction of `problem` on `device`: the tuned one if there is one (`tuned.py`), or by the tables.

    Args:
        prefer: "" for the best candidate; an algorithm's name; or a whole plan's spelling, whose tiles are then used as they
            are, or refused: the first for the forward, the others, where there are any, for the backward (see `Plan.tiles`).
            With either nothing tuned is taken.
        aligned: rows of every tensor start at multiples of 16 bytes, as TMA descriptors require; in latent attention over
            pages the values are the first columns of the keys, too.
        pairs_aligned: so do those of a bias and a mask; None: as those of contiguous ones would.

    Raises:
        ProblemError: `prefer` is no spelling of a plan, or another argument of another kind.
        Unsupported: no candidate, or not the preferred one, or not with its tiles, can run it; lists every candidate's reason.
    """
    if not isinstance(problem, Problem) or not isinstance(device, Device):
        kinds = f"{type(problem).__name__} and {type(device).__name__}"
        raise ProblemError(f"plan takes a Problem and a Device, Problem.parse('...') and Device.named('H200'); got {kinds}.")
    if direction not in ("forward", "backward"):
        raise ProblemError(f"direction must be 'forward' or 'backward'; got {direction!r}.")
    entry, why_not = (None, "") if prefer else tuned.find(problem, device, direction)
    if entry is not None:
        try:
            tiles = Plan.parse(f"{entry.algorithm}[{', '.join(entry.tiles)}]").tiles
            wanted = _Wanted(entry.algorithm, tiles, entry.reason(device), "was tuned for this problem")
            return log.told(problem, device, direction, _choose(problem, device, direction, (aligned, pairs_aligned), wanted))
        except ValueError as error:
            why_not = str(error)
        except Unsupported as error:
            why_not = error.refusals.get(entry.algorithm, str(error))
    given = {"aligned": aligned, "pairs_aligned": pairs_aligned}
    chosen = by_table(problem, device, direction=direction, prefer=prefer, **given)  # type: ignore[arg-type]
    chosen = replace(chosen, refusals=(*chosen.refusals, ("tuned", why_not))) if why_not else chosen
    return log.told(problem, device, direction, chosen)


def by_table(
    problem: Problem,
    device: Device,
    *,
    direction: Direction = "forward",
    prefer: str = "",
    aligned: bool = True,
    pairs_aligned: Optional[bool] = None,
) -> Plan:
    """As `plan`, though nothing were tuned."""
    rows = aligned, pairs_aligned
    if not prefer:
        return _choose(problem, device, direction, rows)
    wanted = Plan.parse(prefer)
    forward = direction == "forward"
    backward = _backward_of(wanted, problem, device, aligned)
    algorithm = wanted.algorithm if forward else backward
    tiles, behind = wanted.tiles[:1] if forward else wanted.tiles[1:], len(wanted.tiles[1:])
    if behind and (reason := resources.miscount("backward", backward, behind)):  # in the forward, before it is too late
        raise Unsupported(f"'{prefer}': behind the tile of the forward are those of the backward", {wanted.algorithm: reason})
    chosen = _choose(problem, device, direction, rows, _Wanted(algorithm, tiles, "tiles as asked for", "was asked for"))
    if algorithm != wanted.algorithm:
        reason = f"{wanted.algorithm} has no backward here, its gradients are {algorithm}'s; {chosen.reason}"
        chosen = replace(chosen, reason=reason)
    return chosen


def _backward_of(wanted: Plan, problem: Problem, device: Device, aligned: bool) -> str:
    """Whose backward runs behind a forward that was asked for: the one whose tiles are given, or its own where it has one."""
    if wanted.algorithm != "hopper":
        return BACKWARD_OF.get(wanted.algorithm, wanted.algorithm)
    if wanted.tiles[1:]:
        return "hopper" if isinstance(wanted.tiles[1], tuple(hopper.BACKWARD_TILES.values())) else "q_outer"
    return "hopper" if aligned and not hopper.refuses(problem, device, "backward") else "q_outer"


def forget() -> None:
    """Plan anew, and read the file of tuned tiles anew, as a new process would."""
    tuned.forget()
    plan.cache_clear()


def _choose(
    problem: Problem, device: Device, direction: Direction, rows: tuple[bool, Optional[bool]], wanted: Optional[_Wanted] = None
) -> Plan:
    """The wanted algorithm, or the best; with the wanted tiles, or its own where none are. `rows`: aligned, pairs_aligned."""
    aligned, pairs_aligned = rows
    if wanted and wanted.algorithm not in CANDIDATES:
        raise Unsupported(f"no algorithm '{wanted.algorithm}'; known are {', '.join(CANDIDATES)}")
    refusals = {}
    for name, candidate in CANDIDATES.items():
        reason = candidate.refuses(problem, device, direction)
        if isinstance(problem, PagedProblem) and name not in PAGED:
            reason = "reads no pages"
        if wanted and not reason and name != wanted.algorithm:
            reason = f"{wanted.algorithm} {wanted.by}"
        if not reason and not wanted:
            reason = generations.BY_NAME.get(name)
        if not reason and name == "hopper":
            reason = hopper.UNALIGNED if not aligned else hopper.unaligned_pairs(problem, pairs_aligned)
            reason = reason or (None if wanted else hopper.passes_over(problem))
        if not reason and name == "warp_split" and not aligned:
            reason = "cp.async takes rows that start at multiples of 16 bytes, and no broadcast tensors"
        if not reason and name == "latent":
            reason = None if aligned else latent.NOT_SHARED
        if not reason and name == "split_kv" and not wanted:
            reason = split_kv.passes_over(problem)
        if not reason and wanted and wanted.tiles:
            reason = resources.misfit(problem, device, direction, name, wanted.tiles)
        if reason:
            refusals[name] = reason
            continue
        tiles, why = (wanted.tiles, wanted.reason) if wanted and wanted.tiles else candidate.tiles(problem, device, direction)
        if not aligned and any(tile.descriptors for tile in tiles):
            tiles = tuple(replace(tile, descriptors=False) for tile in tiles)
            why += "; rows are not 16-byte aligned: pointers instead of descriptors"
        return Plan(name, tiles, why, tuple(refusals.items()))
    raise Unsupported(f"nothing here runs the {direction} of '{problem}' on {device.name}:", refusals)
