"""Draws of dropout as instructions, for `dropout.py`: Philox4x32-7 where no number is computed twice.

    draw_ij = word j % 4 of Philox4x32-7(counter = (j // 4, i, head, sequence), key = seed)

A call of the generator serves four neighbouring keys, a "quad" of a row, of which two lie in one thread of a consumer and two
in its neighbour. Each of them makes the calls of both its rows for half of the quads, keeps a bit of each draw, and hands over
those bits that are the other's, 32 in one number. A call has 14 products of 32 by 32 bits. Nothing in the first round's two, in
one of the second's and in one of the third's depends on both row and quad: 9 are left for each call, and 3 for each quad.

Each product is one instruction, and so is what is made of two words and a key: keys are in uniform registers.
"""

import struct

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core

FIRST, SECOND = 0xD2511F53, 0xCD9E8D57  # what Philox multiplies with
KEYS = 0x9E3779B9, 0xBB67AE85  # what it adds to its keys in each round
ROUNDS = 7
STEP = 2  # quads of a turn of the loop


@_core.builtin
def uniform(x, _semantic=None, _generator=None):
    """A number that all lanes of a warp have alike, in a uniform register, where what is computed of it stays."""
    code = "redux.sync.or.b32 $0, $1, 0xffffffff;"
    return gl.inline_asm_elementwise(code, "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1, _semantic=_semantic)


@_core.builtin
def keep_bits(rows, quad, head, sequence, low, high, least, block_n, _semantic=None, _generator=None):
    """Bit 2 i + e of a number for each row and thread t of a quad: whether the draw for key 8 i + 2 t + e is `least` or more.

    rows: of the sequence, `[64, 4]` in `layouts.keep_layout`. quad: the first of the key tile, a quarter of its first key.
    low, high: halves of the seed, of 64 bits; all but the rows are numbers.
    """
    code = "\n".join(_calls(_core._unwrap_if_constexpr(block_n) // 16))
    options = {"dtype": gl.int32, "is_pure": False, "pack": 2, "_semantic": _semantic}
    constraints = ",".join(["=&r"] * 2 + ["r"] * 14)
    return gl.inline_asm_elementwise(code, constraints, [rows, quad, head, sequence, low, high, least], **options)


def _calls(quads: int) -> "list[str]":
    """For two rows, and so many quads of each: PTX. It is a loop, behind which ptxas leaves what is awaited next.

    Sums of powers of two, with 2^23, are numbers whose last bits are those added: on the pipe of fp32, which has less to do.
    """
    rows, (quad, head, sequence, low, high, least) = ("$2", "$3"), (f"${i}" for i in range(4, 16, 2))
    step = min(STEP, quads)
    code = [
        "{ .reg .b32 lane, t, q, first, place, turns, own, other, lower, upper;",
        ".reg .b32 quad0, quad1, quad2, rest0, rest1, rest2, sum0, sum1, sum2, sum3;",
        ".reg .b32 key<7>, lock<7>, of_row<2>, rest_of_row<2>, a<2>, b<2>, c<2>, d<2>, x<2>, y<2>;",
        f".reg .f32 kept<2>, given<2>, bit<{2 * step}>; .reg .b64 wide; .reg .pred odd, is, more;",
    ]
    for i in range(ROUNDS):
        code += [f"add.u32 key{i}, {low}, {_round(0, i)};", f"add.u32 lock{i}, {high}, {_round(1, i)};"]
    code += [
        "mov.u32 lane, %laneid;",
        "and.b32 t, lane, 1;",
        "setp.ne.u32 odd, t, 0;",
        f"mul.lo.u32 t, t, {2 * quads};",
        "bfe.u32 q, lane, 1, 1;",
        "add.u32 q, q, t;",
        f"add.u32 q, q, {quad};",
        "mov.u32 turns, 0;",
        # The first round, but for the quads.
        *_product("t", "place", head, SECOND),
        "xor.b32 place, place, key1;",
        f"xor.b32 first, {sequence}, lock0;",
    ]
    for s in range(2):
        code += [
            _mix(f"a{s}", "t", rows[s], "key0"),
            *_product(f"of_row{s}", f"rest_of_row{s}", f"a{s}", FIRST),
            f"xor.b32 of_row{s}, of_row{s}, lock1;",
            f"mov.f32 kept{s}, {_number(2.0**23)};",
            f"mov.f32 given{s}, {_number(2.0**23)};",
        ]
    code += [*(f"mov.f32 bit{k}, {_number(2.0**k)};" for k in range(2 * step)), "DRAW_${:uid}:", '.pragma "nounroll";']
    for i in range(step):
        code += [
            *_product("quad0", "rest0", "q", FIRST),
            "xor.b32 quad0, quad0, first;",
            *_product("quad1", "rest1", "quad0", SECOND),
            "xor.b32 quad1, quad1, place;",
            *_product("quad2", "rest2", "quad1", FIRST),
        ]
        for s in range(2):
            code += [
                f"xor.b32 c{s}, of_row{s}, rest0;",
                *_product(f"a{s}", f"b{s}", f"c{s}", SECOND),
                _mix(f"a{s}", f"a{s}", "rest1", "key2"),
                _mix(f"c{s}", "quad2", f"rest_of_row{s}", "lock2"),
                f"mov.b32 d{s}, rest2;",
            ]
            for r in range(3, ROUNDS):
                code += [
                    *_product(f"x{s}", "t", f"a{s}", FIRST),
                    *_product(f"y{s}", "own", f"c{s}", SECOND),
                    _mix(f"a{s}", f"y{s}", f"b{s}", f"key{r}"),
                    _mix(f"c{s}", f"x{s}", f"d{s}", f"lock{r}"),
                    f"mov.b32 b{s}, own;",
                    f"mov.b32 d{s}, t;",
                ]
            for word, kept, k in (("a", "kept", 0), ("b", "kept", 1), ("c", "given", 0), ("d", "given", 1)):
                code += [f"setp.ge.u32 is, {word}{s}, {least};", f"@is add.f32 {kept}{s}, {kept}{s}, bit{2 * i + k};"]
        code.append("add.u32 q, q, 2;")
    code += [
        *(f"mul.f32 bit{k}, bit{k}, {_number(4.0**step)};" for k in range(2 * step)),
        "add.u32 turns, turns, 1;",  # which all lanes have alike: otherwise they would have to meet again
        f"setp.ne.u32 more, turns, {quads // step};",
        "@more bra DRAW_${:uid};",
        # Of both rows 16 bits each, then of both threads.
        *(f"mov.b32 sum{i}, {name};" for i, name in enumerate(("kept0", "kept1", "given0", "given1"))),
        "prmt.b32 sum0, sum0, sum1, 0x5410;",
        "prmt.b32 sum2, sum2, sum3, 0x5410;",
        "selp.b32 other, sum0, sum2, odd;",
        "selp.b32 own, sum2, sum0, odd;",
        "shfl.sync.bfly.b32 other, other, 1, 31, 0xffffffff;",
        "selp.b32 lower, other, own, odd;",
        "selp.b32 upper, own, other, odd;",
        f"shl.b32 t, upper, {2 * quads};",
        "prmt.b32 $0, lower, upper, 0x5410;" if quads == 8 else "or.b32 lower, lower, t;",
        "prmt.b32 $1, lower, upper, 0x7632;" if quads == 8 else "shr.u32 $1, lower, 16;",
        *([] if quads == 8 else ["and.b32 $0, lower, 65535;"]),
        "}",
    ]
    return code


def _product(high: str, low: str, x: str, factor: int) -> "list[str]":
    return [f"mul.wide.u32 wide, {x}, {factor};", f"mov.b64 {{{low}, {high}}}, wide;"]


def _mix(to: str, x: str, y: str, key: str) -> str:
    return f"lop3.b32 {to}, {x}, {y}, {key}, 0x96;"


def _round(half: int, number: int) -> int:
    return KEYS[half] * number & 0xFFFFFFFF


def _number(x: float) -> str:
    """As PTX spells a number of 32 bits."""
    return "0f" + struct.pack(">f", x).hex().upper()


@_core.builtin
def zero_unless(x, bits, count, _semantic=None, _generator=None):
    """x where bit k of `bits`, of x's shape, is set, else 0; k: number of the element in its row's part of a thread.

    `count`: elements of a thread, which holds two rows, elements 0 and 1, 4 and 5, ... of one and the others of the other.
    Of a choice written for tiles LLVM makes one of 16 bits, behind the conversion, and packs P anew.
    """
    count = _core._unwrap_if_constexpr(count)
    code = ["{ .reg .pred hidden; .reg .b32 bit;"]
    for i in range(count):
        row, k = i // 2 % 2, i // 4 * 2 + i % 2
        code += [f"and.b32 bit, ${2 * count + 2 * row}, {1 << k};", "setp.eq.u32 hidden, bit, 0;"]
        code.append(f"@hidden mul.f32 ${i}, ${i}, 0f00000000;")
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * count)
    options = {"dtype": gl.float32, "is_pure": True, "pack": count, "_semantic": _semantic}
    return gl.inline_asm_elementwise("\n".join([*code, "}"]), constraints, [x, bits], **options)
