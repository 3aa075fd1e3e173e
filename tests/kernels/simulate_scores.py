"""What `simulate.py` does for the instructions of `names.py` that bend scores, and these instructions read as PTX.

`simulate.py` runs kernels with `NAMES`, plain torch; `ptx` runs what the GPU gets, so that a test may hold one to the other.
"""

import re
import struct
from types import SimpleNamespace

import numpy as np
import torch

from rowmax.cpu.dropout import philox
from rowmax.kernels.gluon import backward_names, given, names, scores, softmax


def exp2(x):
    """As `ex2.approx.ftz`: a result that is no normal number of fp32 is 0."""
    return torch.where(x < -126, 0.0, torch.exp2(x))


def _of_warps(x):
    """For each number, the largest x of the 16 rows of its warp; NaN is larger than others."""
    return x.reshape(len(x) // 16, -1).amax(1).repeat_interleave(16).view(-1, *[1] * (x.dim() - 1)).expand(x.shape)


def _odd(s, unit, factors):
    y, q = s * s, factors[-1]
    for factor in (*reversed(factors[:-1]), unit):
        q = q * y + factor
    return s * q


def _towards_zero(x, factor, number):
    """`x + factor number`: what fp32 rounds to infinity, of numbers that are finite, is its largest."""
    wide = x.double() + factor.double() * np.float32(number)
    most = torch.finfo(torch.float32).max
    return torch.where(wide.isinf() | wide.isnan(), wide, wide.clamp(-most, most)).float()


def _drawn(rows, columns, head, sequence, low, high, least):
    """Where weights are kept, by the CPU's generator. rows and columns broadcast."""
    seed = (int(high) << 32) | (int(low) & 0xFFFFFFFF)
    i, j, head, sequence = (torch.as_tensor(x).long() for x in (rows, columns, head, sequence))
    counter = (8 * (i // 16) + i % 8, 4 * (j // 16) + j % 8 // 2, head, sequence)
    words = torch.stack(philox(counter, seed))
    word = (2 * (j // 8 % 2) + i // 8 % 2).expand(words.shape[1:])
    words = words.gather(0, word.unsqueeze(0))[0]
    return torch.where(j % 2 == 0, words, words >> 16) & 0x7FFF >= int(least) & 0xFFFF


def _keep(p, rows, call, head, sequence, low, high, least, columns):
    """rows: `[64, 1]`, broadcast."""
    kept = _drawn(rows[:, :1], 4 * int(call) + torch.arange(columns), head, sequence, low, high, least)
    return torch.where(kept, p, torch.zeros_like(p))


def _keep_across(p, keys, row, head, sequence, low, high, least, columns):
    """keys: `[64, 1]`, broadcast."""
    kept = _drawn(int(row) + torch.arange(columns), keys[:, :1], head, sequence, low, high, least)
    return torch.where(kept, p, -torch.zeros_like(p))


def _settled(l, m, bound, above):
    """Of rows `[64, 4]`: all of a quad alike."""
    top = torch.where(l.isnan(), 0.0, l).amax(1, keepdim=True).expand(l.shape)
    k = (torch.frexp(top.clamp(max=2.0**126)).exponent - 1 + above).clamp(max=126).float()
    k = torch.where(top > bound, k, 0.0)
    alpha = torch.exp2(-k)
    return l * alpha, m + k, alpha


def _capped_weights(z, lse, unit, far, dtype, count):
    square = z * z
    near = z + z * square * _odd_part(square)
    p = exp2(torch.where(far != 0, torch.tanh(z), near) * unit - lse)
    p = torch.where(z == backward_names.HIDDEN, torch.where(far != 0, torch.tensor(0.0), p), p)
    away = torch.exp(-2 * z.abs())
    gain = torch.where(far != 0, 4 * away / (1 + away) ** 2, (1 - near * near).clamp(0, 1))
    return p.to(dtype), p * gain


def _odd_part(square):
    first, *others = reversed(names.TANH)
    found = torch.full_like(square, first)
    for coefficient in others:
        found = found * square + coefficient
    return found


def _add_bias(x, bias):
    return torch.minimum(_towards_zero(x, bias, backward_names.LOG2E), torch.tensor(backward_names.LARGEST.value))


NAMES = {
    "LOWEST": backward_names.HIDDEN,
    "SETTLED": softmax.SETTLED.value,
    "HEADROOM": softmax.HEADROOM.value,
    "LEAST_PIVOT": softmax.LEAST_PIVOT.value,
    "capped_weights": _capped_weights,
    "add_bias": _add_bias,
    **{
        name: getattr(scores, name).value
        for name in ("BOUND", "SHORT_BOUND", "LEAST", "C1", "C2", "C3", "C4", "SHORT1", "SHORT2")
    },
    **{name: getattr(given, name).value for name in ("LOG2E", "LARGEST")},
    "any_above": lambda x, bound: (~(_of_warps(x) <= bound)).float(),
    "warp_where": lambda wanted, x, other: torch.where(wanted != 0, torch.tensor(other), torch.as_tensor(x)),
    "tanh_where": lambda x, wanted, factor, count: torch.where(wanted != 0, torch.tanh(x * factor) / factor, x),
    "odd": _odd,
    "exp2_of_odd": lambda *given: exp2(_odd(*given[:-1]) - given[-1]),
    "settled": _settled,
    "let_next_begin": lambda: None,
    "sum_of_sizes": lambda a, b: (a.abs() + b.abs()).view(torch.int32),
    "add_product": _towards_zero,
    "as_bits": lambda x: torch.as_tensor(x, dtype=torch.float32).view(torch.int32),
    "as_number": lambda bits: bits.view(torch.float32),
    "uniform": lambda x: x,
    "keep": _keep,
    "keep_across": _keep_across,
    "kept": lambda x, p: torch.where(torch.signbit(p), torch.zeros_like(x), x),
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
    "fma.rn.sat.f32": lambda a, b, c: np.float32(np.nan_to_num(np.clip(np.float64(a) * np.float64(b) + np.float64(c), 0, 1))),
    "min.NaN.f32": np.minimum,
    "neg": lambda a: -a,
    "cvt": lambda second, first: (first, second),  # two of 16 bits in a register, not rounded here
    "ex2.approx": lambda x: np.where(x < -126, np.float32(0), np.exp2(x)),  # with .ftz
    "rcp": lambda a: np.float32(1) / a,
    "copysign": lambda sign, size: np.copysign(size, sign),
    "selp": lambda a, b, condition: a if condition else b,
    "or": lambda a, b: a or b,
    "max": lambda a, b: a if b != b else b if a != a else max(a, b),
    "min.u32": min,
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "shr.u32": lambda a, b: int(np.float32(a).view(np.uint32)) >> b,
    "shl.b32": lambda a, b: np.uint32(a << b).view(np.float32),
    "cvt.rn.f32.s32": np.float32,
    "shfl": lambda a, *_: a,  # of one thread
    "setp.gt.f32": lambda a, b: a > b,
    "setp.gtu": lambda a, b: not a <= b,
    "setp.lt": lambda a, b: a < b,
    "setp.neu": lambda a, b: a != b,
    "setp.equ": lambda a, b: not (a < b or a > b),
    "vote.sync.any": lambda here, _mask: here,  # of one thread
}


def ptx(name: str, *arguments, source=names, **options) -> np.ndarray:
    """What a function of `names.py` writes, run on `pack` elements for each argument, or each of a tuple (or as many numbers).

    `source`: another module with such functions. Of several results, all: of two with the first in halves of registers, too.
    """
    written: dict = {}

    def asm(code, constraints, args, dtype, is_pure, pack, _semantic):
        written.update(code=code, constraints=constraints.split(","), pack=pack)

    whole = source.gl
    source.gl = SimpleNamespace(inline_asm_elementwise=asm, float32=None, bfloat16=None, int32=None)
    try:
        getattr(source, name).__wrapped__(*arguments, **options, _semantic=object())
    finally:
        source.gl = whole
    pack, outputs = written["pack"], sum(constraint[0] == "=" for constraint in written["constraints"])
    flat = [one for a in arguments for one in (a if isinstance(a, tuple) else (a,))]
    count = (len(written["constraints"]) - outputs) // pack
    given = [np.broadcast_to(np.float32(a), (pack,)) for a in flat[:count]]
    assert any(isinstance(a, np.ndarray) for a in flat)
    registers = {f"${outputs + i}": value for i, value in enumerate(np.concatenate(given))}
    for i, constraint in enumerate(written["constraints"][outputs:]):
        if constraint.isdigit():  # an input that lies where an output will
            registers[f"${constraint}"] = registers[f"${outputs + i}"]
    _run(written["code"], registers)
    found = np.array([registers[f"${i}"] for i in range(outputs - pack, outputs)], np.float32)
    if outputs % pack == 0:
        every = np.array([registers[f"${i}"] for i in range(outputs)], np.float32).reshape(-1, pack)
        return found if outputs == pack else every
    halves = [number for i in range(outputs - pack) for number in registers[f"${i}"]]
    return np.stack([np.array(halves, np.float32), found])


def _chopped(x):
    """fp64 to fp32, towards zero."""
    near = np.float32(x)
    return np.nextafter(near, np.float32(0)) if abs(np.float64(near)) > abs(x) else near


def _run(code: str, registers: dict) -> None:
    """Instructions in order; branches go forwards only."""
    target = None
    for line in re.split(r"[;\n]", code.replace("{ ", "").replace("}", "")):
        line = line.strip()
        if target and line.startswith(target + ":"):
            target = None
        if target or not line or line.startswith(".reg") or line.endswith(":"):
            continue
        match = re.fullmatch(r"(?:@(!?)(\w+) )?([A-Za-z0-9.]+) (.*)", line)
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
    return 0 if word.startswith("0x") else int(word) if word.isdigit() else registers[word]
