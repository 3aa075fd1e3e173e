"""Compile what the launcher would launch, for any GPU, on a machine without one; what the binary needs, as JSON lines.

    python compile_only.py H200 "b2 h32/8 q1024 d128 bf16" forward      registers, stack, spills, shared memory, instructions
    python compile_only.py builds      how many builds a few hundred lengths, batches and windows ask for

Runs in a process of its own, because Triton decides at import whether it interprets.
"""

import collections
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from rowmax import Device, Problem, plan
from rowmax.kernels import launch
from rowmax.problem import Operands

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTIONS = ("HGMMA", "HMMA", "STL", "LDL", "UTMALDG", "MUFU")


def source(call, capability: tuple[int, int]):
    """`(source, target, options)` of a `launch.*_call`, specialised as a launch on that GPU would."""
    kernel, tile = call.kernel, call.tile
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "debug": False}
    bound, specialization, extra = binder(*call.tensors, *call.numbers, **options)
    settings, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, extra)
    return ASTSource(kernel, signature, constants, attributes), target, settings.__dict__


def calls(problem: Problem, device: Device, direction: str):
    """`(name, call)` of each kernel of one direction, with the tiles of the device's plan."""
    out_shape, lse_shape = problem.outputs()
    shapes = (
        (problem.batch, problem.len_q, problem.heads_q, problem.dim_qk),
        (problem.batch, problem.len_k, problem.heads_k, problem.dim_qk),
        (problem.batch, problem.len_k, problem.heads_k, problem.dim_v),
    )
    cu = torch.zeros(problem.batch + 1, dtype=torch.int32) if problem.packed else None
    q, k, v = (torch.empty(shape[problem.packed :], dtype=problem.dtype) for shape in shapes)
    operands = Operands(q, k, v, cu, cu)
    out, lse = torch.empty(out_shape, dtype=problem.dtype), torch.empty(lse_shape)
    tiles = plan(problem, device, direction=direction, prefer="q_outer").tiles
    if direction == "forward":
        return [("forward", launch.forward_call(problem, operands, tiles[0], out, lse))]
    query_tile, *key_tiles = tiles
    found = [
        ("row", launch.row_call(problem, out, out, lse, lse, lse, lse)),
        ("query", launch.query_call(problem, operands, query_tile, out, lse, lse, q)),
        ("key", launch.key_call(problem, operands, key_tiles[0], out, lse, lse, k, v if len(key_tiles) == 1 else None)),
    ]
    if len(key_tiles) > 1:
        found.append(("value", launch.key_call(problem, operands, key_tiles[1], out, lse, lse, None, v)))
    return found


INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?);", re.MULTILINE)


def unwritten(listing: str) -> list[str]:
    """Instructions of a disassembly that read a uniform register which none before them, from the top, writes.

    ptxas 12.8 emits such code for some kernels: a tensor core then reads its operand at a random address in shared memory.
    """
    written, found = set(), []
    for name, operands in INSTRUCTION.findall(listing):
        target, *sources = (operand.strip() for operand in operands.split(","))
        writes = re.fullmatch(r"UR(\d+)", target)
        for source in sources if writes else [target, *sources]:
            for register in map(int, re.findall(r"\bUR(\d+)", source)):
                # HGMMA takes four for its descriptors: of A, unused where A is in registers, then of B.
                read = {register + 2, register + 3} if name.startswith("HGMMA") else {register}
                if not read <= written:
                    found.append(f"{name} {operands}")
                    written |= read
        if writes:
            register = int(writes[1])
            written |= {register, register + 1} if ".64" in name or "WIDE" in name else {register}
    return found


def facts(name: str, call, device: Device) -> dict:
    built, target, options = source(call, device.capability)
    compiled = triton.compile(built, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True)
        listing = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, _, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage.stdout).groups())
    mnemonics = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", listing, re.MULTILINE)
    counts = collections.Counter(mnemonics)
    return {
        "kernel": name,
        "tile": str(call.tile),
        "registers": registers,
        "stack": stack,
        "local": local,
        "shared": compiled.metadata.shared,
        "unwritten": unwritten(listing),
        **{word: counts[word] for word in INSTRUCTIONS},
    }


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


def main(device_name: str, problem: str, direction: str) -> None:
    device = Device.named(device_name)
    for name, call in calls(Problem.parse(problem), device, direction):
        print(json.dumps(facts(name, call, device)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "builds":
        print(json.dumps(builds()))
    else:
        main(*sys.argv[1:])
