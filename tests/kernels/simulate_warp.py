"""Integer instructions as PTX, run for all 32 lanes of a warp: what `gluon/philox.py` writes, without a GPU."""

import re
import struct

import numpy as np

LANES = 32


def _halves_that_are(a, b):
    """A mask of halves, as fp16, of which a's is not below b's: NaN is not."""
    (x, y), width = (word.view(np.float16).reshape(LANES, 2) for word in (a, b)), np.uint16(0xFFFF)
    return np.ascontiguousarray(np.where(x < y, np.uint16(0), width)).view(np.uint32).reshape(LANES)


_OPERATIONS = {
    "mov.u32": lambda a: a,
    "mov.b32": lambda a: a,
    "add.u32": lambda a, b: a + b,
    "mul.wide.u32": lambda a, b: a.astype(np.uint64) * b.astype(np.uint64),
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "lop3.b32": lambda a, b, c, table: a ^ b ^ c if table[0] == 0x96 else None,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.ne.u32": lambda a, b: a != b,
    "abs.f16x2": lambda a: a & 0x7FFF7FFF,
    "set.geu.u32.f16x2": _halves_that_are,
}


def run(code: str, given: list, outputs: int) -> list[np.ndarray]:
    """`$0`, `$1`, ... of all lanes, as uint32, from what follows them: a number, or one of each lane."""
    registers = {f"${outputs + i}": _lanes(value) for i, value in enumerate(given)}
    registers |= {"%laneid": np.arange(LANES, dtype=np.uint32)}
    lines = [line.strip() for line in re.split(r"[;\n]", code.replace("{ ", "", 1)) if line.strip() not in ("", "}")]
    lines = [line for line in lines if not line.startswith((".reg", ".pragma"))]
    places = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    i = 0
    while i < len(lines):
        line, i = lines[i], i + 1
        if line.endswith(":"):
            continue
        match = re.fullmatch(r"(?:@(\w+) )?([a-z0-9.]+) (.*)", line)
        assert match is not None, line
        guard = registers[match[1]] if match[1] else np.ones(LANES, bool)
        if match[2] == "bra":
            assert guard.all() == guard.any(), "lanes part"
            i = places[match[3]] if guard.all() else i
            continue
        to, *sources = re.findall(r"\{.*?\}|[^, ]+", match[3])
        if match[2] == "mov.b64":
            low, high = to.strip("{}").split(", ")
            wide = registers[sources[0]]
            registers[low], registers[high] = wide.astype(np.uint32), (wide >> np.uint64(32)).astype(np.uint32)
            continue
        values = [_value(word, registers) for word in sources]
        result = _OPERATIONS[match[2]](*values)
        registers[to] = result if guard.all() else np.where(guard, result, registers[to])
    return [registers[f"${i}"] for i in range(outputs)]


def _lanes(value) -> np.ndarray:
    return np.broadcast_to(np.asarray(value).astype(np.int64) & 0xFFFFFFFF, (LANES,)).astype(np.uint32)


def _value(word: str, registers: dict) -> np.ndarray:
    if word.startswith("0f"):
        return _lanes(struct.unpack(">I", bytes.fromhex(word[2:]))[0])
    return _lanes(int(word, 0)) if word[0].isdigit() else registers[word]
