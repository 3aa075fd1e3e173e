"""Compile the decode and the combine kernel as the launcher would launch them, for any GPU, without one.

    python compile_decode.py "H200: b1 h32/8 q1 k8192 d128 bf16 causal paged16" ...

prints what each binary needs as JSON lines. In a process of its own, because Triton decides at import whether it interprets.
"""

import dataclasses
import json
import re
import sys

import torch
import triton
from compile_only import facts
from machine_code import source

from rowmax import Device, PagedProblem, Problem, plan
from rowmax.kernels import decode_launch
from rowmax.paged import AppendOperands, PagedOperands


def calls(problem: Problem, device: Device, once: bool = False):
    """Both kernels with the plan's tile; the second may begin early where the chip can do that. `once`: one of both."""
    lead = () if problem.packed else (problem.batch,)
    q = torch.empty(*lead, problem.len_q, problem.heads_q, problem.dim_qk, dtype=problem.dtype)
    out = torch.empty(problem.outputs()[0], dtype=problem.dtype)
    table = lengths = cu = None
    rows = (problem.batch, problem.len_k)
    if isinstance(problem, PagedProblem):
        rows = (4, problem.page_size)
        table = torch.zeros(problem.batch, problem.len_k // problem.page_size, dtype=torch.int32)
        lengths = torch.zeros(problem.batch, dtype=torch.int32)
        cu = torch.zeros(problem.batch + 1, dtype=torch.int32) if problem.packed else None
    eight_bits = isinstance(problem, PagedProblem) and problem.eight_bits
    stored = torch.float8_e4m3fn if eight_bits else problem.dtype
    k = torch.empty(*rows, problem.heads_k, problem.dim_qk, dtype=stored)
    latent = problem.dim_qk > 256
    v = k[..., : problem.dim_v] if latent else torch.empty(*rows, problem.heads_k, problem.dim_v, dtype=stored)
    scales = (torch.empty(rows[0], problem.heads_k),) * 2 if eight_bits else (None, None)
    tile = dataclasses.replace(plan(problem, device, prefer="split_kv").tiles[0], once=once)
    slopes = torch.empty(problem.heads_q) if problem.alibi else None
    scores = () if problem.plain else (slopes, torch.empty(problem.heads_q) if problem.sink else None)
    elements = decode_launch.part_elements(problem, tile)
    parts = torch.empty(elements) if elements else None
    operands = PagedOperands(q, k, v, table, lengths, cu, *scales)
    ended = torch.zeros(decode_launch.counters_of(problem, tile), dtype=torch.int32) if once else None
    made = decode_launch.calls(problem, operands, tile, out, None, parts, device.capability >= (9, 0), scores, ended)
    if eight_bits:  # what such a cache launches besides
        new = (torch.empty(problem.batch, *t.shape[2:], dtype=problem.dtype) for t in (k, v))
        made += (decode_launch.append_call(AppendOperands(k, v, *new, table, lengths, None, None, None, *scales), False),)
        rows, a_lse = out.flatten(0, 1), torch.empty(problem.heads_q, problem.batch * problem.len_q)
        made += (decode_launch.merge_call(rows, a_lse, rows.clone(), torch.empty(problem.outputs()[1]), problem.len_q),)
    return made


def spread(call, device: Device) -> list[str]:
    """How warps share the tiles of the kernel's products, rows by columns."""
    built, target, options = source(call, device.capability)
    text = triton.compile(built, target=target, options=options).asm["ttgir"]
    return re.findall(r"nvidia_mma<(\{.*?\})>", text)


def main(builds: list[str]) -> None:
    for build in builds:
        name, text = build.split(": ")
        device = Device.named(name)
        text, once = text.removesuffix(" once"), text.endswith(" once")
        for call in calls((PagedProblem if "paged" in text else Problem).parse(text), device, once):
            found = facts(call.kernel.fn.__name__, call, device)
            if text.endswith(" invariant"):
                found["warps"] = spread(call, device)
            print(json.dumps({"build": build, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
