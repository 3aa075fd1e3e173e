"""Dropout's draws as instructions, for `dropout.py`: Philox4x32-7 where no number is computed twice.

    draw_ij = half j % 2 of word j // 8 % 4 of Philox4x32-7(counter = (i, 4 (j // 32) + j % 8 // 2, head, sequence), key = seed)

A thread of a consumer has of each of its two rows, and of 32 keys, those eight whose draws are the halves of one call's words,
and has P of two neighbours in one register, as a word has their draws: what it draws is for itself, and a comparison of two
numbers of 16 bits each makes a mask of a word.

A call has 14 products of 32 by 32 bits. Nothing in the first two rounds' four depends on both the row and the keys, nor does
one of the third's; 9 are left for each call, one for its keys in both rows, and three for a row. Each product is one
instruction, and so is what is made of two words and a key: keys are in uniform registers.

A branch that is never taken leads around the draws (where nothing is dropped there is no dropout), so that ptxas leaves them in
one piece. Times over a call without dropout (H200, 16k tokens, causal): d128 1.570 with it, 1.586 without; d64 without
pingpong 1.903 and 1.947; but d128 without pingpong and mask, 8k tokens, 1.705 and 1.667, which no plan takes.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core

FIRST, SECOND = 0xD2511F53, 0xCD9E8D57  # what Philox multiplies with
KEYS = 0x9E3779B9, 0xBB67AE85  # what it adds to its keys in each round
ROUNDS = 7


@_core.builtin
def uniform(x, _semantic=None, _generator=None):
    """A number that all lanes of a warp have alike, in a uniform register, where what is computed of it stays."""
    code = "redux.sync.or.b32 $0, $1, 0xffffffff;"
    return gl.inline_asm_elementwise(code, "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1, _semantic=_semantic)


@_core.builtin
def keep(p, rows, call, head, sequence, low, high, least, columns, _semantic=None, _generator=None):
    """P, `[64, columns]` of 16 bits in `layouts.score_layout`, and 0 where a draw is below `least`.

    rows: of the sequence, of P's shape. call: the tile's first, an eighth of its first key, which is a multiple of `columns`.
    low, high: halves of the seed. `least` stands in both halves of a number, and is 0x7c00 at most: 15 bits are compared as
    fp16, where numbers above are NaN, and these are kept. All but P and the rows are numbers.
    """
    columns = _core._unwrap_if_constexpr(columns)
    registers, elements = columns // 4, columns // 2
    first = [2 * registers + elements * i for i in range(7)]  # of each of what follows P
    numbers = [f"${first[0]}", f"${first[0] + 2}", *(f"${i}" for i in first[1:])]
    code = "\n".join(_code([f"${i}" for i in range(registers)], *numbers))
    constraints = ["=r"] * registers + [str(i) for i in range(registers)] + ["r"] * (7 * elements)
    given = [p, rows, call, head, sequence, low, high, least]
    options = {"dtype": p.dtype, "is_pure": True, "pack": elements, "_semantic": _semantic}
    return gl.inline_asm_elementwise(code, ",".join(constraints), given, **options)


def _code(pairs: "list[str]", row, other_row, call, head, sequence, low, high, least) -> "list[str]":
    """PTX. `pairs`: registers of P, of both rows in turn, of columns 8 i + 2 t and the next one for i = 0, 1, ..."""
    code = [
        "{ .reg .b32 place, head_low, x, y, q, q_high, q_low, mask, key<7>, lock<7>, a<2>, b<2>, c<2>, d<2>;",
        ".reg .b32 row_high<2>, row_low<2>, rest<2>, row_rest<2>; .reg .b64 wide; .reg .pred upper, none;",
    ]
    for i in range(ROUNDS):
        code += [f"add.u32 key{i}, {low}, {_round(0, i)};", f"add.u32 lock{i}, {high}, {_round(1, i)};"]
    code += [
        f"setp.eq.u32 none, {least}, 0;",
        "@none bra KEPT_${:uid};",
        "mov.u32 x, %laneid;",
        "and.b32 x, x, 3;",
        f"and.b32 y, {call}, 0xfffffffc;",
        "add.u32 place, x, y;",
        *_product("y", "head_low", head, SECOND),
        _mix("place", "place", "y", "key0"),
    ]
    for s, number in enumerate((row, other_row)):  # what depends on a row alone, of three rounds
        code += [
            *_product("x", f"row_low{s}", number, FIRST),
            _mix("x", "x", sequence, "lock0"),
            *_product("x", f"rest{s}", "x", SECOND),
            _mix("x", "x", "head_low", "key1"),
            *_product(f"row_high{s}", f"row_rest{s}", "x", FIRST),
        ]
    for i in range(0, max(len(pairs) // 2, 4), 4):
        code += [f"xor.b32 q, place, {i};", *_product("q_high", "q_low", "q", FIRST)]
        for s in range(2):
            code += [
                _mix("x", "q_high", f"row_low{s}", "lock1"),
                *_product(f"a{s}", f"b{s}", "x", SECOND),
                _mix(f"a{s}", f"a{s}", f"rest{s}", "key2"),
                _mix(f"c{s}", "q_low", f"row_high{s}", "lock2"),
                f"mov.b32 d{s}, row_rest{s};",
            ]
        for r in range(3, ROUNDS):
            for s in range(2):
                code += [
                    *_product("x", "q", f"a{s}", FIRST),
                    *_product("y", "mask", f"c{s}", SECOND),
                    _mix(f"a{s}", "y", f"b{s}", f"key{r}"),
                    _mix(f"c{s}", "x", f"d{s}", f"lock{r}"),
                    f"mov.b32 b{s}, mask;",
                    f"mov.b32 d{s}, q;",
                ]
        words = "abcd"
        if len(pairs) == 4:  # a tile of 16 columns, which has the first or the last two words of a call
            words = "ab"
            code += [f"and.b32 x, {call}, 2;", "setp.ne.u32 upper, x, 0;"]
            code += [f"@upper mov.b32 {to}{s}, {of}{s};" for s in range(2) for to, of in ("ac", "bd")]
        for k, word in enumerate(words):
            for s in range(2):
                to = pairs[2 * (i + k) + s]
                code += [f"abs.f16x2 mask, {word}{s};", f"set.geu.u32.f16x2 mask, mask, {least};", f"and.b32 {to}, {to}, mask;"]
    return [*code, "KEPT_${:uid}:", "}"]


def _product(high: str, low: str, x: str, factor: int) -> "list[str]":
    return [f"mul.wide.u32 wide, {x}, {factor};", f"mov.b64 {{{low}, {high}}}, wide;"]


def _mix(to: str, x: str, y: str, key: str) -> str:
    return f"lop3.b32 {to}, {x}, {y}, {key}, 0x96;"


def _round(half: int, number: int) -> int:
    return KEYS[half] * number & 0xFFFFFFFF
