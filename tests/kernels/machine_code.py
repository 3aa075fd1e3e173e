"""Compile a kernel for a GPU that is not here, and read its machine code."""

import re
import subprocess
import tempfile
from pathlib import Path

TOOLS = Path(__import__("triton").__file__).parent / "backends" / "nvidia" / "bin"


def source(call, capability: tuple[int, int]):
    """`(source, target, options)` of a `Call` of `rowmax.kernels.launch`, specialised as a launch on that GPU would."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

    kernel, target = call.kernel, GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {"num_warps": call.tile.warps, "num_stages": call.tile.stages, "debug": False}
    bound, specialization, extra = binder(*call.tensors, *call.numbers, **options)
    settings, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, extra)
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    return kind(kernel, signature, constants, attributes), target, settings.__dict__


def compiled(call, capability: tuple[int, int]) -> tuple[dict, str]:
    """What the binary needs, and its disassembly."""
    import triton

    built, target, options = source(call, capability)
    kernel = triton.compile(built, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True)
        listing = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, _, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage.stdout).groups())
    needs = {"registers": registers, "stack": stack, "local": local, "shared": kernel.metadata.shared}
    return {**needs, "uninitialised": uninitialised(listing)}, listing


LINE = re.compile(r"^\s*(?:/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+)?\s*([A-Z][A-Za-z0-9_.]*)\s*(.*?)\s*;?(\s*/\*.*)?|(\.L_\w+):)$")


def instructions(listing: str) -> tuple[list, dict]:
    """`[(predicate, name, operands)]`, and label -> index of the instruction behind it."""
    found: list = []
    labels = {}
    for line in listing.splitlines():
        match = LINE.match(line)
        if match and match[5]:
            labels[match[5]] = len(found)
        elif match:
            found.append((match[1], match[2], match[3].rstrip("; ")))
    return found, labels


def successors(code: list, labels: dict, i: int) -> list[int]:
    """Instructions that may follow instruction i."""
    predicate, name, operands = code[i]
    targets = [labels[label] for label in re.findall(r"\.L_\w+", operands) if label in labels and name != "BSSY"]
    goes_on = name not in ("BRX", "EXIT", "RET.REL.NODEC") and not (name == "BRA" and operands.startswith("`"))
    if i + 1 < len(code) and (predicate or goes_on):
        targets.append(i + 1)
    return targets


def inner_loops(code: list, labels: dict, name: str) -> list[tuple[int, int]]:
    """First and last instruction of the innermost loops that hold an instruction `name`.

    A jump backwards ends a loop if there is no way to it but through its target: waits that try again lie elsewhere.
    """
    after = [successors(code, labels, i) for i in range(len(code))]
    found = []
    for i, targets in enumerate(after):
        for start in targets:
            if start <= i and any(other.startswith(name) for _, other, _ in code[start:i]):
                reached, waiting = {0, start}, [0]
                while waiting:
                    new = set(after[waiting.pop()]) - reached
                    reached |= new
                    waiting += new
                if i not in reached:
                    found.append((start, i))
    return [one for one in found if not any(one != other and one[0] <= other[0] and other[1] <= one[1] for other in found)]


def shared_traffic(code: list) -> tuple[int, int]:
    """Bytes that a warp with all lanes reads from shared memory, and writes to it, in these instructions."""
    read = written = 0
    for predicate, name, _ in code:
        if predicate == "@!PT" or not name.startswith(("LDS", "STS", "LDGSTS")):
            continue
        if name.startswith("LDSM"):
            read += 32 * 4 * int(name.rsplit(".", 1)[1])  # so many matrices of 8 rows of 16 bytes
            continue
        last = name.rsplit(".", 1)[-1]
        size = 32 * (int(last) // 8 if last.isdigit() else 1 if last == "U8" else 2 if last == "U16" else 4)
        read, written = (read + size, written) if name.startswith("LDS") else (read, written + size)
    return read, written


def uninitialised(listing: str) -> list[str]:
    """Instructions for Ampere to Hopper that read a uniform register which some path from the entry to them leaves unwritten.

    ptxas 12.8 emits such code for some kernels: a tensor core then takes its operand from a random address in shared memory.
    """
    code, labels = instructions(listing)
    every = frozenset(range(64))
    known: list = [every] * len(code)  # written on every path to here; `every` until a path is known
    known[0] = frozenset()
    reached, waiting = {0}, [0]
    while waiting:
        i = waiting.pop()
        after = known[i] | _uniform(*code[i][1:])[1]
        for target in successors(code, labels, i):
            merged = known[target] & after
            if target not in reached or merged != known[target]:
                known[target] = merged
                reached.add(target)
                waiting.append(target)
    return [f"{code[i][1]} {code[i][2]}" for i in sorted(reached) if _uniform(*code[i][1:])[0] - known[i]]


def _uniform(name: str, operands: str) -> tuple[set, set]:
    """Uniform registers that an instruction reads, and those that it writes."""
    target, *others = operands.split(",")
    written = re.fullmatch(r"UR(\d+)", target.strip())
    writes = set()
    if written:
        first = int(written[1])
        writes = {first, first + 1} if ".64" in name or "WIDE" in name else {first}
    reads = set()
    for part in others if written else [target, *others]:
        for register in map(int, re.findall(r"\bUR(\d+)", part)):
            if "gdesc" in part and name.startswith("HGMMA"):  # four: of A, unused where A is in registers, then of B
                from_registers = re.match(r"\s*R\d", others[0]) is not None
                reads |= {register + i for i in range(2 * from_registers, 4)}
            elif "desc" in part or ".64" in part:
                reads |= {register, register + 1}
            else:
                reads.add(register)
    return reads, writes
