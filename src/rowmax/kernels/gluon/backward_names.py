"""Instructions that only the Hopper backward needs and Gluon has no name for; others are in `names.py`."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core

from rowmax.kernels.gluon.given import LARGEST
from rowmax.kernels.gluon.names import NEAR, TANH, _hexadecimal
from rowmax.numerics import LOG2E

HIDDEN = -3.4028234663852886e38  # the lowest number: the argument of tanh where a query does not see a key


@_core.builtin
def capped_weights(z, lse, unit, far, dtype, count, _semantic=None, _generator=None):
    """`(p, g)`: p = exp2(unit t - lse) with t = tanh z, as `dtype`, and g = p (1 - t^2) in fp32; 0 where z is `HIDDEN`.

    Warps where `far` is 0 hold no larger z than `NEAR`: tanh is a polynomial there, and 1 - t^2 far enough from 0 to be the
    difference. Others take one exponential and one reciprocal more, and 1 - t^2 = 4 e / (1 + e)^2 with e = exp(-2 |z|), which
    keeps its digits however small it is. All arguments have the shape of z. `count`: elements of a thread.

    One piece of code, so that g takes the registers of z and p half as many: of arithmetic on tiles there would be two in fp32.
    """
    count, dtype = _core._unwrap_if_constexpr(count), _core._unwrap_if_constexpr(dtype)
    halves = count // 2
    lines = [
        "{ .reg .pred away, small, shown; .reg .f32 a, e, g, n, p0, p1, r, t, y;",
        f"setp.neu.f32 away, ${halves + 4 * count}, 0f00000000;",  # of the first element, as of all
        "@away bra FAR_${:uid};",
    ]
    pack = f"cvt.rn.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2.f32"
    for far_off in (False, True):
        for i in range(count):
            z_i = f"${halves + i}"  # where g will be
            lse_i, unit_i = f"${halves + 2 * count + i}", f"${halves + 3 * count + i}"
            exponential = [f"neg.f32 n, {lse_i};", f"fma.rn.f32 a, t, {unit_i}, n;", f"ex2.approx.ftz.f32 p{i % 2}, a;"]
            lines += _far(z_i, exponential, i) if far_off else _near(z_i, exponential, i)
            if i % 2:
                lines.append(f"{pack} ${i // 2}, p1, p0;")
        lines += ["FAR_END_${:uid}: }"] if far_off else ["bra FAR_END_${:uid};", "FAR_${:uid}:"]
    constraints = ",".join(["=&r"] * halves + ["=&f"] * count + [str(halves + i) for i in range(count)] + ["f"] * (3 * count))
    options = {"dtype": (dtype, gl.float32), "is_pure": True, "pack": count, "_semantic": _semantic}
    return gl.inline_asm_elementwise("\n".join(lines), constraints, [z, lse, unit, far], **options)


@_core.builtin
def add_bias(x, bias, _semantic=None, _generator=None):
    """`x + bias log2(e)`, at most `LARGEST`; rounded towards zero the lowest number of a type stays one, as in `given.py`."""
    code = f"{{ .reg .f32 y; fma.rz.f32 y, $2, {_hexadecimal(LOG2E)}, $1; min.NaN.f32 $0, y, {_hexadecimal(LARGEST)}; }}"
    options = {"dtype": gl.float32, "is_pure": True, "pack": 1, "_semantic": _semantic}
    return gl.inline_asm_elementwise(code, "=f,f,f", [x, bias], **options)


def _polynomial(y: str) -> "list[str]":
    """(tanh x - x) / x of y = x^2, in r."""
    first, *others = (_hexadecimal(c) for c in reversed(TANH))
    return [
        f"mov.f32 r, {first};",
        *(f"fma.rn.f32 r, r, {y}, {c};" for c in others),
        f"mul.rn.f32 r, r, {y};",
    ]


def _near(z: str, exponential: "list[str]", i: int) -> "list[str]":
    return [
        f"mul.rn.f32 y, {z}, {z};",
        *_polynomial("y"),
        f"fma.rn.f32 t, r, {z}, {z};",
        *exponential,
        "neg.f32 n, t;",
        "fma.rn.sat.f32 g, n, t, 0f3F800000;",  # -inf, of what is hidden, becomes 0
        f"mul.rn.f32 {z}, p{i % 2}, g;",
    ]


def _far(z: str, exponential: "list[str]", i: int) -> "list[str]":
    return [
        f"abs.f32 a, {z};",
        f"mul.rn.f32 e, a, {_hexadecimal(-2 * LOG2E)};",
        "ex2.approx.ftz.f32 e, e;",
        "add.rn.f32 r, e, 0f3F800000;",
        "rcp.approx.ftz.f32 n, r;",
        "mul.rn.f32 g, e, n;",
        "mul.rn.f32 g, g, n;",
        "mul.rn.f32 g, g, 0f40800000;",  # 4
        "sub.rn.f32 e, 0f3F800000, e;",
        "mul.rn.f32 e, e, n;",
        "mul.rn.f32 y, a, a;",
        *_polynomial("y"),
        "fma.rn.f32 r, r, a, a;",
        f"setp.lt.f32 small, a, {_hexadecimal(NEAR)};",
        "selp.f32 t, r, e, small;",
        f"copysign.f32 t, {z}, t;",
        *exponential,
        f"setp.neu.f32 shown, {z}, {_hexadecimal(HIDDEN)};",
        f"selp.f32 p{i % 2}, p{i % 2}, 0f00000000, shown;",
        f"mul.rn.f32 {z}, p{i % 2}, g;",
    ]
