"""Which algorithm and which tiles run a problem on a device, and why not the others.

The plan decides and the kernels obey: they hold no heuristics and read no environment. Nothing here needs a GPU or Triton.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Optional

from rowmax.device import Device
from rowmax.errors import Unsupported
from rowmax.plan import cpu, hopper, portable
from rowmax.plan.tile import Tile
from rowmax.problem import Problem

Direction = Literal["forward", "backward"]

# Name -> the module that decides for it, in order of preference.
CANDIDATES: dict[str, Any] = {"aten": cpu.ATEN, "tiled": cpu.TILED, "hopper": hopper, "q_outer": portable}
BACKWARD_OF = {"hopper": "q_outer"}  # a forward that was asked for by name -> whose backward runs


@dataclass(frozen=True)
class Plan:
    """Attributes:
    algorithm: a name in `CANDIDATES`.
    tiles: forward: one; backward: the tile of the dQ kernel, then that of the dK/dV kernel, or one for dK and one for dV,
        which then run apart (CPU: one).
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
        """`q_outer` (tiles chosen by the plan) or `q_outer[128x128 w8 s2 tma]` (as given)."""
        match = re.fullmatch(r"(\w+)(?:\[(.*)\])?", text.strip())
        if match is None:
            raise ValueError(f"'{text}' is no plan; an example: 'q_outer[128x128 w8 s2]'")
        first, *others = match[2].split(",") if match[2] else ("",)
        parse = hopper.HopperTile.parse if match[1] == "hopper" else Tile.parse
        return cls(match[1], (parse(first), *map(Tile.parse, others)) if first else ())


@lru_cache(maxsize=4096)
def plan(problem: Problem, device: Device, *, direction: Direction = "forward", prefer: str = "", aligned: bool = True) -> Plan:
    """The plan for one direction of `problem` on `device`.

    Args:
        prefer: "" for the best candidate; an algorithm's name; or a whole plan's spelling, whose tiles are then used as they
            are: the first for the forward, the others for the backward (see `Plan.tiles`).
        aligned: rows of every tensor start at multiples of 16 bytes, as TMA descriptors require.

    Raises:
        Unsupported: no candidate, or not the preferred one, can run it; lists every candidate's reason.
    """
    wanted: Optional[Plan] = Plan.parse(prefer) if prefer else None
    if wanted and wanted.algorithm not in CANDIDATES:
        raise Unsupported(f"no algorithm '{wanted.algorithm}'; known are {', '.join(CANDIDATES)}")
    if wanted and direction == "backward":
        wanted = replace(wanted, algorithm=BACKWARD_OF.get(wanted.algorithm, wanted.algorithm))
    refusals = {}
    for name, candidate in CANDIDATES.items():
        reason = candidate.refuses(problem, device, direction)
        if wanted and not reason and name != wanted.algorithm:
            reason = f"{wanted.algorithm} was asked for"
        if not reason and name == "hopper":
            reason = hopper.UNMEASURED if not wanted else "" if aligned else hopper.UNALIGNED
        if reason:
            refusals[name] = reason
            continue
        tiles, why = candidate.tiles(problem, device, direction)
        given = wanted.tiles if wanted else ()
        given = given[:1] if direction == "forward" else given[1:]
        if given:
            tiles, why = given, "tiles as asked for"
        if not aligned and any(tile.descriptors for tile in tiles):
            tiles = tuple(replace(tile, descriptors=False) for tile in tiles)
            why += "; rows are not 16-byte aligned: pointers instead of descriptors"
        return Plan(name, tiles, why, tuple(refusals.items()))
    raise Unsupported(f"nothing here runs the {direction} of '{problem}' on {device.name}:", refusals)
