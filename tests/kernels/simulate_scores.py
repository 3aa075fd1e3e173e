"""What `simulate.py` does for the instructions of `names.py` that bend scores, and these instructions read as PTX.

`simulate.py` runs kernels with `NAMES`, plain torch; `ptx` runs what the GPU gets, so that a test may hold one to the other.
"""

import re
import struct
from types import SimpleNamespace

import numpy as np
import torch

from rowmax.kernels.gluon import given, names, scores


def _of_warps(x):
    """For each row, the largest x of the 16 rows of its warp."""
    return x.view(-1, 16).amax(1, keepdim=True).expand(-1, 16).reshape(x.shape)


def _odd(s, unit, c1, c2, c3, c4):
    y = s * s
    return s * ((((c4 * y + c3) * y + c2) * y + c1) * y + unit)


def _towards_zero(x, factor, number):
    """`x + factor number`: what fp32 rounds to infinity, of numbers that are finite, is its largest."""
    wide = x.double() + factor.double() * np.float32(number)
    most = torch.finfo(torch.float32).max
    return torch.where(wide.isinf() | wide.isnan(), wide, wide.clamp(-most, most)).float()


NAMES = {
    **{name: getattr(scores, name).value for name in ("BOUND", "LEAST", "C1", "C2", "C3", "C4")},
    **{name: getattr(given, name).value for name in ("LOG2E", "LARGEST")},
    "any_above": lambda x, bound: (_of_warps(x) > bound).float(),
    "warp_where": lambda wanted, x, other: torch.where(wanted != 0, torch.tensor(other), torch.as_tensor(x)),
    "tanh_where": lambda x, wanted, factor, count: torch.where(wanted != 0, torch.tanh(x * factor) / factor, x),
    "odd": _odd,
    "exp2_of_odd": lambda *given: torch.exp2(_odd(*given[:-1]) - given[-1]),
    "add_product": _towards_zero,
    "as_bits": lambda x: torch.as_tensor(x, dtype=torch.float32).view(torch.int32),
    "as_number": lambda bits: bits.view(torch.float32),
}


# ---- PTX ---------------------------------------------------------------------------------------------------------------------

_OPERATIONS = {
    "mov": lambda a: a,
    "abs": abs,
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "fma.rz": lambda a, b, c: _chopped(np.float64(a) * np.float64(b) + np.float64(c)),
    "fma": lambda a, b, c: np.float32(np.float64(a) * np.float64(b) + np.float64(c)),
    "ex2": np.exp2,
    "rcp": lambda a: np.float32(1) / a,
    "copysign": lambda sign, size: np.copysign(size, sign),
    "selp": lambda a, b, condition: a if condition else b,
    "or": lambda a, b: a or b,
    "setp.gt": lambda a, b: a > b,
    "setp.lt": lambda a, b: a < b,
    "setp.neu": lambda a, b: a != b,
    "setp.equ": lambda a, b: not (a < b or a > b),
    "vote.sync.any": lambda here, _mask: here,  # of one thread
}


def ptx(name: str, *arguments, **options) -> list[np.ndarray]:
    """What a function of `names.py` writes, run on `pack` elements for each argument (a number stands for as many)."""
    written: dict = {}

    def asm(code, constraints, args, dtype, is_pure, pack, _semantic):
        written.update(code=code, constraints=constraints.split(","), pack=pack)

    whole = names.gl
    names.gl = SimpleNamespace(inline_asm_elementwise=asm, float32=None)
    try:
        getattr(names, name).__wrapped__(*arguments, **options, _semantic=object())
    finally:
        names.gl = whole
    pack = written["pack"]
    tensors = [a for a in arguments if isinstance(a, np.ndarray)]
    given = [np.broadcast_to(np.float32(a), (pack,)) for a in arguments[: _inputs(written["constraints"], pack)]]
    assert tensors
    registers = {f"${pack + i}": value for i, value in enumerate(np.concatenate(given))}
    for i, constraint in enumerate(written["constraints"][pack:]):
        if constraint.isdigit():  # an input that lies where an output will
            registers[f"${constraint}"] = registers[f"${pack + i}"]
    _run(written["code"], registers)
    return np.array([registers[f"${i}"] for i in range(pack)], np.float32)


def _chopped(x):
    """fp64 to fp32, towards zero."""
    near = np.float32(x)
    return np.nextafter(near, np.float32(0)) if abs(np.float64(near)) > abs(x) else near


def _inputs(constraints, pack: int) -> int:
    return (len(constraints) - pack) // pack


def _run(code: str, registers: dict) -> None:
    """Instructions in order; branches go forwards only."""
    target = None
    for line in re.split(r"[;\n]", code.replace("{ ", "").replace("}", "")):
        line = line.strip()
        if target and line.startswith(target + ":"):
            target = None
        if target or not line or line.startswith(".reg") or line.endswith(":"):
            continue
        match = re.fullmatch(r"(?:@(!?)(\w+) )?([a-z0-9.]+) (.*)", line)
        assert match is not None, line
        if match[2] and bool(registers[match[2]]) == bool(match[1]):
            continue
        if match[3] == "bra":
            target = match[4]
            continue
        to, *sources = [word.strip() for word in match[4].split(",")]
        words = match[3].split(".")
        key = next(k for k in (match[3].removesuffix(".pred"), ".".join(words[:2]), words[0]) if k in _OPERATIONS)
        with np.errstate(all="ignore"):
            registers[to] = _OPERATIONS[key](*(_value(word, registers) for word in sources))


def _value(word: str, registers: dict):
    if word.startswith("0f"):
        return np.float32(struct.unpack(">f", bytes.fromhex(word[2:]))[0])
    return 0 if word.startswith("0x") else registers[word]
