"""Compile what the launcher would launch, for any GPU, on a machine without one; what the binary needs, as JSON lines.

    python compile_only.py H200 "b2 h32/8 q1024 d128 bf16" forward      registers, stack, spills, shared memory, instructions
    python compile_only.py H200 "..." forward -- A100 "..." backward    several, each line with the number of its build
    python compile_only.py builds      how many builds a few hundred lengths, batches and windows ask for

Runs in a process of its own, because Triton decides at import whether it interprets.
"""

import collections
import itertools
import json
import random
import sys
from pathlib import Path

import torch
from machine_code import compiled, instructions, source

from rowmax import Device, Problem, plan
from rowmax.kernels import generations, launch, scored_launch
from rowmax.plan.generations import BY_NAME
from rowmax.problem import Operands
from rowmax.score_mod import find

sys.path.append(str(Path(__file__).parents[1]))
import score_mods  # noqa: F401, makes the functions that problems name

INSTRUCTIONS = ("HGMMA", "HMMA", "UTCHMMA", "LDGDEPBAR", "STL", "LDL", "UTMALDG", "MUFU")


def calls(problem: Problem, device: Device, direction: str, algorithm: str = "q_outer"):
    """`(name, call)` of each kernel of one direction, with the tiles of the device's plan."""
    out_shape, lse_shape = problem.outputs()
    shapes = (
        (problem.batch, problem.len_q, problem.heads_q, problem.dim_qk),
        (problem.batch, problem.len_k, problem.heads_k, problem.dim_qk),
        (problem.batch, problem.len_k, problem.heads_k, problem.dim_v),
    )
    cu = torch.zeros(problem.batch + 1, dtype=torch.int32) if problem.packed else None
    q, k, v = (torch.empty(shape[problem.packed :], dtype=problem.dtype) for shape in shapes)
    slopes = torch.empty((problem.batch, problem.heads_q)[problem.alibi == "head" :]) if problem.alibi else None
    pairs = [
        made_for(problem, letters, dtype) for letters, dtype in ((problem.bias, problem.dtype), (problem.mask, torch.bool))
    ]
    seed = torch.zeros(1, dtype=torch.int64) if problem.dropout else None
    numbers = torch.empty(len(find(problem.score_mod).numbers), problem.heads_q) if problem.score_mod else None
    operands = Operands(q, k, v, cu, cu, slopes, torch.empty(problem.heads_q) if problem.sink else None, *pairs, seed, numbers)
    out, lse = torch.empty(out_shape, dtype=problem.dtype), torch.empty(lse_shape)
    chosen = plan(problem, device, direction=direction, prefer=algorithm)
    tiles = chosen.tiles
    if chosen.algorithm in BY_NAME:
        named = generations.calls(chosen.algorithm, problem, operands, tiles[0], out, lse)
        return [(call.kernel.fn.__name__, call) for call in named]
    if direction == "forward":
        return [("forward", launch.forward_call(problem, operands, tiles[0], out, lse))]
    query_tile, *key_tiles = tiles
    found = [
        ("row", launch.row_call(problem, out, out, lse, lse, lse, lse)),
        ("query", launch.query_call(problem, operands, query_tile, out, lse, lse, q)),
        ("key", launch.key_call(problem, operands, key_tiles[0], out, lse, lse, k, v if len(key_tiles) == 1 else None)),
    ]
    if problem.bias:
        found.append(("bias", scored_launch.bias_call(problem, operands, query_tile, out, lse, lse)[0]))
    if len(key_tiles) > 1:
        found.append(("value", launch.key_call(problem, operands, key_tiles[1], out, lse, lse, None, v)))
    return found


def made_for(problem: Problem, letters: str, dtype):
    """A bias or a mask, or None."""
    sizes = (problem.batch, problem.heads_q, problem.len_q, problem.len_k)
    letters, _, wide = letters.partition(",")
    shape = [size if letter in letters else 1 for letter, size in zip("bhqk", sizes, strict=True)]
    return torch.empty(shape, dtype=torch.float32 if wide else dtype) if letters else None


def facts(name: str, call, device: Device) -> dict:
    needs, listing = compiled(call, device.capability)
    counts = collections.Counter(mnemonic.split(".")[0] for _, mnemonic, _ in instructions(listing)[0])
    return {"kernel": name, "tile": str(call.tile), **needs, **{word: counts[word] for word in INSTRUCTIONS}}


def builds() -> dict:
    """Kernel -> how many different builds are asked for by problems that differ in numbers only, and by how many problems."""
    device, rnd = Device.named("H200"), random.Random(0)
    found: dict = collections.defaultdict(set)
    problems = 0
    for packed in ("", "packed"):
        for _ in range(100):
            batch, len_q, len_k = rnd.randint(1, 64), rnd.randint(1, 5000), rnd.randint(1, 5000)
            window = f"window({rnd.randint(0, 999)},{rnd.randint(0, 999)})"
            problem = Problem.parse(f"b{batch} h8/2 q{len_q} k{len_k} d64 bf16 {window} {packed}")
            problems += 1
            for direction in ("forward", "backward"):
                for name, call in calls(problem, device, direction):
                    built, _, options = source(call, device.capability)
                    key = (built.signature, built.constants, built.attrs, options["num_warps"], options["num_stages"])
                    found[f"{name} {packed}".strip()].add(repr(key))
    return {"problems": problems, "builds": {name: len(keys) for name, keys in found.items()}}


def main(number: int, device_name: str, problem: str, direction: str, algorithm: str = "q_outer") -> None:
    device = Device.named(device_name)
    for name, call in calls(Problem.parse(problem), device, direction, algorithm):
        print(json.dumps({"build": number, **facts(name, call, device)}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "builds":
        print(json.dumps(builds()))
    else:
        ends = [i for i, word in enumerate([*sys.argv, "--"]) if word == "--"]
        for number, (before, end) in enumerate(itertools.pairwise([0, *ends])):
            main(number, *sys.argv[before + 1 : end])
