"""Gluon's names that differ between Triton 3.6, 3.8 and 3.9, and the instructions that it has no name for.

No other file asks which Triton is here.
"""

import struct

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import tma

# tanh(x) = x (1 + y (c1 + y (c2 + y (c3 + y c4)))) with y = x^2, to 8.3e-08 of itself for |x| < NEAR (minimax, c0 = 1).
TANH = (-0.33332598, 0.13313117, -0.05221181, 0.01561263)
NEAR = 0.6
# The same with c1 and c2 alone, to 1.3e-07 for |x| < NEARER.
TANH_SHORT = (-0.33329698, 0.13038027)
NEARER = 0.2

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait


@_core.builtin
def _tma_add(target, place, buffer, _semantic=None):
    """Adds a buffer to a box of global memory, element by element; awaited like a store. Named from 3.8 on."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, target.handle, place, buffer.handle)


tma_add = getattr(tma, "async_atomic_add", None) or _tma_add


@_core.builtin
def wait_count(pointer, least, _semantic=None, _generator=None):
    """Waits until the integer at `pointer` is `least` or more: then TMA finds what was in memory before it became so."""
    code = [
        "{ .reg .pred behind;",
        "AGAIN_${:uid}:",
        "ld.acquire.gpu.global.b32 $0, [$1];",
        "setp.lt.s32 behind, $0, $2;",
        "@behind bra AGAIN_${:uid};",
        "fence.proxy.async.global; }",
    ]
    options = {"dtype": gl.int32, "is_pure": False, "pack": 1, "_semantic": _semantic}
    gl.inline_asm_elementwise("\n".join(code), "=&r,l,r", [pointer, least], **options)


@_core.builtin
def wait_sums(_semantic=None, _generator=None):
    """Of a warp: waits until all that its TMA has stored or added is in memory, where others find it; not only read."""
    options = {"dtype": gl.int32, "is_pure": False, "pack": 1, "_semantic": _semantic}
    code = "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r", [], **options)


@_core.builtin
def let_next_begin(_semantic=None, _generator=None):
    """The next launch of the stream, if it says that it waits by itself, may take multiprocessors as this one leaves them."""
    options = {"dtype": gl.int32, "is_pure": False, "pack": 1, "_semantic": _semantic}
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], **options)


@_core.builtin
def count_up(pointer, _semantic=None, _generator=None):
    """Of a warp: 1 more at `pointer`, behind what it has seen in memory."""
    code = [
        "{ .reg .pred first; .reg .b32 lane;",
        "mov.u32 lane, %laneid;",
        "setp.eq.u32 first, lane, 0;",
        "@first red.release.gpu.global.add.s32 [$1], 1;",
        "mov.u32 $0, 0; }",
    ]
    options = {"dtype": gl.int32, "is_pure": False, "pack": 1, "_semantic": _semantic}
    gl.inline_asm_elementwise("\n".join(code), "=r,l", [pointer], **options)


@_core.builtin
def named_barrier(op, number, threads, _semantic=None, _generator=None):
    """`bar.sync` or `bar.arrive` on a barrier of the hardware. Triton takes numbers from 0 up for itself: use 8 and more."""
    op, number, threads = (_core._unwrap_if_constexpr(x) for x in (op, number, threads))
    gl.inline_asm_elementwise(
        f"{op} {number}, {threads}; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic
    )


@_core.builtin
def opaque(x, _semantic=None, _generator=None):
    """x, through a shuffle with itself, which ptxas does not move to another basic block: what needs x stays below it."""
    code = "{ .reg .u32 lane; mov.u32 lane, %laneid; shfl.sync.idx.b32 $0, $1, lane, 31, 0xffffffff; }"
    return gl.inline_asm_elementwise(code, "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1, _semantic=_semantic)


@_core.builtin
def scale_unless_one(acc, factor, count, _semantic=None, _generator=None):
    """`acc * factor`, of one shape, skipped by a warp whose factors are all 1. `count`: elements of a thread.

    A thread holds two rows of an accumulator, elements 0 and 1, 4 and 5, ... of one and the others of the other.
    """
    count = _core._unwrap_if_constexpr(count)
    lines = [
        "{ .reg .pred here, other;",
        f"setp.neu.f32 here, ${2 * count}, 0f3F800000;",
        f"setp.neu.f32 other, ${2 * count + 2}, 0f3F800000;",
        "or.pred here, here, other;",
        "vote.sync.any.pred here, here, 0xffffffff;",
        "@!here bra UNCHANGED_${:uid};",
        *(f"mul.f32 ${i}, ${count + i}, ${2 * count + i % 4};" for i in range(count)),
        "UNCHANGED_${:uid}: }",
    ]
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)
    options = {"dtype": gl.float32, "is_pure": True, "pack": count, "_semantic": _semantic}
    return gl.inline_asm_elementwise("\n".join(lines), constraints, [acc, factor], **options)


@_core.builtin
def any_above(x, bound, _semantic=None, _generator=None):
    """1.0 for all of a warp where any of its x is not at most the number `bound`, else 0.0. x: two rows a thread."""
    code = [
        "{ .reg .pred here, other;",
        f"setp.gtu.f32 here, $2, {_hexadecimal(bound)};",
        f"setp.gtu.f32 other, $3, {_hexadecimal(bound)};",
        "or.pred here, here, other;",
        "vote.sync.any.pred here, here, 0xffffffff;",
        "selp.f32 $0, 0f3F800000, 0f00000000, here;",
        "mov.f32 $1, $0; }",
    ]
    options = {"dtype": gl.float32, "is_pure": True, "pack": 2, "_semantic": _semantic}
    return gl.inline_asm_elementwise("\n".join(code), "=f,=f,f,f", [x], **options)


@_core.builtin
def settled(l, m, bound, above, _semantic=None, _generator=None):
    """`(l, m, alpha)`: where a thread of a row has l above `bound`, l times alpha = 2^-k and m + k, k the integer `above` log2
    of l, or less where 2^-k would not be normal; else alpha is 1.

    All `[M, 4]`: a number of a row in each thread of its quad, which agree on k; two rows a thread. An infinite l stays so. In
    most tiles this is two comparisons and a vote.
    """
    code = [
        "{ .reg .pred here, other; .reg .b32 top, far; .reg .f32 rise;",
        "mov.f32 $4, 0f3F800000;",
        "mov.f32 $5, 0f3F800000;",
        f"setp.gt.f32 here, $0, {_hexadecimal(bound)};",
        f"setp.gt.f32 other, $1, {_hexadecimal(bound)};",
        "or.pred here, here, other;",
        "vote.sync.any.pred here, here, 0xffffffff;",
        "@!here bra SETTLED_${:uid};",
    ]
    for i in range(2):
        code += [f"mov.b32 top, ${i};"]
        code += [f"shfl.sync.bfly.b32 far, top, {way}, 31, 0xffffffff;\nmax.f32 top, top, far;" for way in (1, 2)]
        code += [
            f"setp.gt.f32 other, top, {_hexadecimal(bound)};",
            "shr.u32 far, top, 23;",
            f"add.u32 far, far, {_core._unwrap_if_constexpr(above)};",  # 127 + k
            "min.u32 far, far, 253;",
            "sub.u32 top, 254, far;",
            "shl.b32 top, top, 23;",
            f"selp.f32 ${4 + i}, top, 0f3F800000, other;",
            "sub.u32 far, far, 127;",
            "cvt.rn.f32.s32 rise, far;",
            "selp.f32 rise, rise, 0f00000000, other;",
            f"mul.rn.f32 ${i}, ${i}, ${4 + i};",
            f"add.rn.f32 ${2 + i}, ${2 + i}, rise;",
        ]
    code.append("SETTLED_${:uid}: }")
    options = {"dtype": (gl.float32,) * 3, "is_pure": True, "pack": 2, "_semantic": _semantic}
    return gl.inline_asm_elementwise("\n".join(code), "=&f,=&f,=&f,=&f,=&f,=&f,0,1,2,3", [l, m], **options)


@_core.builtin
def sum_of_sizes(a, b, _semantic=None, _generator=None):
    """The bits of `|a| + |b|`: integers in the order of these numbers, and the largest of three is one instruction."""
    code = "{ .reg .f32 x, y; abs.f32 x, $1; abs.f32 y, $2; add.rn.f32 x, x, y; mov.b32 $0, x; }"
    return gl.inline_asm_elementwise(code, "=r,f,f", [a, b], dtype=gl.int32, is_pure=True, pack=1, _semantic=_semantic)


@_core.builtin
def warp_where(wanted, x, other, _semantic=None, _generator=None):
    """The number `other` for all of a warp where `wanted` is not 0, else x: one register for both rows of a thread."""
    code = [
        "{ .reg .pred here;",
        "setp.neu.f32 here, $2, 0f00000000;",
        f"selp.f32 $0, {_hexadecimal(other)}, $4, here;",
        "mov.f32 $1, $0; }",
    ]
    options = {"dtype": gl.float32, "is_pure": True, "pack": 2, "_semantic": _semantic}
    return gl.inline_asm_elementwise("\n".join(code), "=f,=f,f,f,f,f", [wanted, x], **options)


@_core.builtin
def odd(s, unit, factors, _semantic=None, _generator=None):
    """`s (unit + y (c1 + y (c2 + ...)))`, y = s^2, c1, c2, ... `factors`: as one piece of code for four elements.

    Of arithmetic on tiles ptxas makes all polynomials first, which takes more registers than there are.
    """
    return _of_four(s, unit, factors, [], ["mul.rn.f32 {out}, q, {0};"], _semantic)


@_core.builtin
def exp2_of_odd(s, unit, factors, pivot, _semantic=None, _generator=None):
    """`exp2(odd(s) - pivot)`, in the same way."""
    end = ["sub.rn.f32 y, 0f00000000, {last};", "fma.rn.f32 q, q, {0}, y;", "ex2.approx.ftz.f32 {out}, q;"]
    return _of_four(s, unit, factors, [pivot], end, _semantic)


def _of_four(s, unit, factors, more: list, end: "list[str]", _semantic):
    """Four elements of each tile: the polynomial in q, and what `end` makes of it, and of the last of `more`."""
    given = [s, unit, *factors, *more]
    count = len(factors)
    polynomial = [
        "mul.rn.f32 y, {0}, {0};",
        f"fma.rn.f32 q, y, {{{count + 1}}}, {{{count}}};",
        *(f"fma.rn.f32 q, q, y, {{{i}}};" for i in range(count - 1, 0, -1)),
    ]
    lines = ["{ .reg .f32 y, q;"]
    for i in range(4):
        names = [f"${4 * k + i}" for k in range(1, len(given) + 1)]
        lines += [line.format(*names, last=names[-1], out=f"${i}") for line in [*polynomial, *end]]
    lines.append("}")
    constraints = ",".join(["=&f"] * 4 + ["f"] * 4 * len(given))
    options = {"dtype": gl.float32, "is_pure": True, "pack": 4, "_semantic": _semantic}
    return gl.inline_asm_elementwise("\n".join(lines), constraints, given, **options)


@_core.builtin
def tanh_where(x, wanted, factor, count, _semantic=None, _generator=None):
    """`tanh(factor x) / factor` in warps where `wanted`, of one shape with x, is not 0; others leave x as it is.

    Two units in the last place: the exponential, and below NEAR a polynomial. `count`: elements of a thread.
    """
    count = _core._unwrap_if_constexpr(count)
    near = "".join(f"fma.rn.f32 r, r, y, {_hexadecimal(c)};" for c in reversed(TANH[:-1]))
    lines = [
        "{ .reg .pred here, small, never; .reg .f32 a, e, r, t, y, inverse;",
        f"setp.neu.f32 here, ${2 * count}, 0f00000000;",
        "@!here bra NEAR_${:uid};",
        f"rcp.approx.ftz.f32 inverse, ${3 * count};",
        "setp.equ.f32 never, inverse, 0f00000000;",
    ]
    for i in range(count):
        if i % 4 == 0 and i:
            lines.append("@never bra NEAR_${:uid};")
        lines += [
            f"mul.rn.f32 t, ${count + i}, ${3 * count};",
            "abs.f32 a, t;",
            "mul.rn.f32 e, a, 0fC038AA3B;",  # -2 log2(e)
            "ex2.approx.ftz.f32 e, e;",
            "add.rn.f32 r, e, 0f3F800000;",
            "rcp.approx.ftz.f32 r, r;",
            "sub.rn.f32 e, 0f3F800000, e;",
            "mul.rn.f32 e, e, r;",
            "mul.rn.f32 y, a, a;",
            f"mov.f32 r, {_hexadecimal(TANH[-1])};",
            near,
            "mul.rn.f32 r, r, y;",
            "fma.rn.f32 r, r, a, a;",
            f"setp.lt.f32 small, a, {_hexadecimal(NEAR)};",
            "selp.f32 r, r, e, small;",
            "copysign.f32 r, t, r;",
            f"mul.rn.f32 ${i}, r, inverse;",
        ]
    lines.append("NEAR_${:uid}: }")
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * (2 * count))
    options = {"dtype": gl.float32, "is_pure": True, "pack": count, "_semantic": _semantic}
    return gl.inline_asm_elementwise("\n".join(lines), constraints, [x, wanted, factor], **options)


def _hexadecimal(number) -> str:
    """As PTX spells a number of 32 bits."""
    return "0f" + struct.pack(">f", _core._unwrap_if_constexpr(number)).hex().upper()


@_core.builtin
def add_product(x, factor, number, _semantic=None, _generator=None):
    """`x + factor number`, rounded towards zero: it becomes infinite only where one of them is."""
    code = f"fma.rz.f32 $0, $2, {_hexadecimal(number)}, $1;"
    options = {"dtype": gl.float32, "is_pure": True, "pack": 1, "_semantic": _semantic}
    return gl.inline_asm_elementwise(code, "=f,f,f", [x, factor], **options)


@_core.builtin
def as_bits(x, _semantic=None, _generator=None):
    """The 32 bits of a number, as an integer."""
    return x.to(gl.int32, bitcast=True, _semantic=_semantic)


@_core.builtin
def as_number(bits, _semantic=None, _generator=None):
    return bits.to(gl.float32, bitcast=True, _semantic=_semantic)
