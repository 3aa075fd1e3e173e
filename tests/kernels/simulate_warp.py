"""Integer instructions as PTX, run for all 32 lanes of a warp: what `gluon/philox.py` writes, without a GPU."""

import re
import struct

import numpy as np

LANES = 32


def _halves_that_are(a, b):
    """A mask of halves, as fp16, of which a's is not below b's: NaN is not."""
    (x, y), width = (word.view(np.float16).reshape(LANES, 2) for word in (a, b)), np.uint16(0xFFFF)
    return np.ascontiguousarray(np.where(x < y, np.uint16(0), width)).view(np.uint32).reshape(LANES)


def _of_three_bits(a, b, c, table):
    """The bits of a table of eight that those of a, b and c are the numbers of."""
    found = np.zeros(LANES, np.uint32)
    for number in range(8):
        if table >> number & 1:
            bits = (word if number >> place & 1 else ~word for word, place in ((a, 2), (b, 1), (c, 0)))
            found |= np.bitwise_and.reduce(list(bits))
    return found


def _bytes(a, b, which):
    """Four of the eight bytes of a and b; with the highest bit of a number set, the sign of each instead."""
    both, found = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.zeros(LANES, np.uint32)
    for place in range(4):
        number = which >> np.uint32(4 * place) & np.uint32(0xF)
        byte = (both >> (8 * (number & np.uint32(7))).astype(np.uint64)).astype(np.uint32) & np.uint32(0xFF)
        byte = np.where(number & np.uint32(8), np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0)), byte)
        found |= byte.astype(np.uint32) << np.uint32(8 * place)
    return found


_OPERATIONS = {
    "mov.u32": lambda a: a,
    "mov.b32": lambda a: a,
    "add.u32": lambda a, b: a + b,
    "mul.wide.u32": lambda a, b: a.astype(np.uint64) * b.astype(np.uint64),
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": lambda a, b, c, table: _of_three_bits(a, b, c, int(table[0])),
    "prmt.b32": lambda a, b, which: _bytes(a, b, which),
    "selp.b32": lambda a, b, wanted: np.where(wanted, a, b),
    "shfl.sync.bfly.b32": lambda a, lanes, *_: a[np.arange(LANES) ^ int(lanes[0])],
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
