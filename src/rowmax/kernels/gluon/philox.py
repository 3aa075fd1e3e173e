"""Dropout's draws as instructions, for `dropout.py` and `backward_dropout.py`: Philox4x32-7 where no number is computed twice.

    draw_ij = half j % 2 of word 2 (j // 8 % 2) + i // 8 % 2 of Philox4x32-7(key = seed,
                  counter = (8 (i // 16) + i % 8, 4 (j // 16) + j % 8 // 2, head, sequence))

A thread of a consumer has of 16 x 16 scores those eight whose draws are the halves of one call's words, and has P of two
neighbours in one register, as a word has their draws: what it draws is for itself, and a comparison of two numbers of 16 bits
each makes a mask of a word.

Of transposed scores a thread has two neighbouring queries in a register, whose draws are of two calls, and of each of these the
halves for one key. The thread four lanes away has the other key's: each makes one call, and hands over what it has no use for.

A call has 14 products of 32 by 32 bits. Nothing in the first two rounds' four depends on both the row and the keys, nor does
one of the third's; 9 are left for each call, one for its keys (where scores are transposed, in all rows) and three for its row
(where they are not, for all keys). Each product is one instruction, and so is what is made of two words and a key: keys are in
uniform registers.

A branch that is never taken leads around the draws (where nothing is dropped there is no dropout), so that ptxas leaves them in
one piece. Times over a call without dropout (H200, 16k tokens, causal; of draws in another order, as many): d128 1.570 with it,
1.586 without; d64 without pingpong 1.903 and 1.947; but d128 without pingpong and mask, 8k tokens, 1.705 and 1.667, which no
plan takes.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core

FIRST, SECOND = 0xD2511F53, 0xCD9E8D57  # what Philox multiplies with
KEYS = 0x9E3779B9, 0xBB67AE85  # what it adds to its keys in each round
ROUNDS = 7
AT_ONCE = 2  # calls whose instructions alternate


@_core.builtin
def uniform(x, _semantic=None, _generator=None):
    """A number that all lanes of a warp have alike, in a uniform register, where what is computed of it stays."""
    code = "redux.sync.or.b32 $0, $1, 0xffffffff;"
    return gl.inline_asm_elementwise(code, "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1, _semantic=_semantic)


@_core.builtin
def keep(p, rows, call, head, sequence, low, high, least, columns, _semantic=None, _generator=None):
    """P, `[64, columns]` of 16 bits in `layouts.score_layout`, and 0 where a draw is below `least`.

    rows: of the sequence, of P's shape. call: the tile's first, a quarter of its first key, which is a multiple of `columns`.
    low, high: halves of the seed. `least` stands in both halves of a number, and is 0x7c00 at most: 15 bits are compared as
    fp16, where numbers above are NaN, and these are kept. All but P and the rows are numbers.
    """
    return _made(_code, p, [rows, call, head, sequence, low, high, least], columns, _semantic)


@_core.builtin
def keep_across(p, keys, row, head, sequence, low, high, least, columns, _semantic=None, _generator=None):
    """The same of transposed P, `[64, columns]`, but -0 where a draw is below `least`: `kept` reads that.

    keys: of the sequence, of P's shape. row: the tile's first, a multiple of `columns`.
    """
    return _made(_code_across, p, [keys, row, head, sequence, low, high, least], columns, _semantic)


@_core.builtin
def kept(x, p, _semantic=None, _generator=None):
    """x in fp32, and 0 where p, of 16 bits, has its sign set."""
    code = "\n".join(
        [
            "{ .reg .b32 mask;",
            "prmt.b32 mask, $4, 0, 0x9999;",  # of each byte the sign of the first half
            "lop3.b32 $0, $2, mask, 0, 0x30;",  # $2 and not the mask
            "prmt.b32 mask, $4, 0, 0xBBBB;",
            "lop3.b32 $1, $3, mask, 0, 0x30; }",
        ]
    )
    options = {"dtype": gl.float32, "is_pure": True, "pack": 2, "_semantic": _semantic}
    return gl.inline_asm_elementwise(code, "=f,=f,f,f,r", [x, p], **options)


def _made(writer, p, given: list, columns, semantic):
    columns = _core._unwrap_if_constexpr(columns)
    registers, elements = columns // 4, columns // 2
    numbers = [f"${2 * registers + elements * i}" for i in range(len(given))]  # the first of each of what follows P
    code = "\n".join(writer([f"${i}" for i in range(registers)], *numbers))
    constraints = ["=r"] * registers + [str(i) for i in range(registers)] + ["r"] * (len(given) * elements)
    options = {"dtype": p.dtype, "is_pure": True, "pack": elements, "_semantic": semantic}
    return gl.inline_asm_elementwise(code, ",".join(constraints), [p, *given], **options)


def _code(pairs: "list[str]", row, call, head, sequence, low, high, least) -> "list[str]":
    """PTX. `pairs`: registers of P, of columns 8 i + 2 t and the next one for i = 0, 1, ..., of both rows each; row: the first.

    Of 16 columns, their order is that of the words.
    """
    code = [
        *_begin(low, high, least),
        "mov.u32 x, %laneid;",
        "and.b32 x, x, 3;",
        f"add.u32 place, x, {call};",
        *_place(head),
        f"and.b32 x, {row}, 7;",
        f"add.u32 x, x, {row};",
        "shr.u32 x, x, 1;",
        *_of_a_row(0, sequence),
    ]
    calls = len(pairs) // 4
    for first in range(0, calls, AT_ONCE):
        together = range(min(AT_ONCE, calls - first))
        for s in together:
            code += [f"xor.b32 q, place, {4 * (first + s)};", *_product(f"q_high{s}", f"q_low{s}", "q", FIRST)]
        code += _words([(s, s, 0) for s in together])
        for k, word in enumerate("abcd"):
            for s in together:
                to = pairs[4 * (first + s) + k]
                code += [*_compared(f"{word}{s}", least), f"and.b32 {to}, {to}, mask;"]
    return [*code, "KEPT_${:uid}:", "}"]


def _code_across(pairs: "list[str]", key, row, head, sequence, low, high, least) -> "list[str]":
    """PTX. `pairs`: of queries 8 i + 2 t and the next one for i = 0, 1, ..., of both keys each; key: the first."""
    code = [
        *_begin(low, high, least),
        f"and.b32 x, {key}, 7;",
        f"add.u32 x, x, {key};",
        "shr.u32 place, x, 2;",
        *_place(head),
        *_product("q_high0", "q_low0", "place", FIRST),
        f"and.b32 x, {key}, 1;",
        "setp.ne.u32 upper, x, 0;",
        "mov.u32 y, %laneid;",
        "and.b32 y, y, 3;",
        "add.u32 y, y, y;",
        "add.u32 x, x, y;",
        f"shr.u32 y, {row}, 1;",
        "add.u32 first, x, y;",
        # Bytes of two registers: the half of both for the other thread, and what both have for one in the order of the queries.
        "selp.b32 sent, 0x5410, 0x7632, upper;",
        "selp.b32 even, 0x3254, 0x5410, upper;",
        "selp.b32 odd, 0x3276, 0x7610, upper;",
    ]
    calls = len(pairs) // 4
    for m in range(0, calls, AT_ONCE):
        together = range(min(AT_ONCE, calls - m))
        for s in together:
            code += [f"add.u32 x, first, {8 * (m + s)};", *_of_a_row(s, sequence)]
        code += _words([(s, 0, s) for s in together])
        for k, (one, two) in enumerate((("a", "b"), ("c", "d"))):  # of a key
            for s in together:
                code += [
                    f"prmt.b32 x, {one}{s}, {two}{s}, sent;",
                    "shfl.sync.bfly.b32 x, x, 4, 0x1f, 0xffffffff;",
                    f"prmt.b32 {one}{s}, {one}{s}, x, even;",
                    f"prmt.b32 {two}{s}, {two}{s}, x, odd;",
                ]
                for word, to in ((one, pairs[4 * (m + s) + k]), (two, pairs[4 * (m + s) + 2 + k])):
                    # The mask chooses between what is there and the sign.
                    code += [*_compared(f"{word}{s}", least), f"lop3.b32 {to}, {to}, mask, 0x80008000, 0xe2;"]
    return [*code, "KEPT_${:uid}:", "}"]


def _begin(low, high, least) -> "list[str]":
    """Names, the keys of each round, and the branch."""
    s = f"<{AT_ONCE}>"
    return [
        "{ .reg .b32 place, first, head_low, x, y, q, mask, sent, even, odd, key<7>, lock<7>;",
        f".reg .b32 a{s}, b{s}, c{s}, d{s}, q_high{s}, q_low{s}, row_high{s}, row_low{s}, rest{s}, row_rest{s};",
        ".reg .b64 wide; .reg .pred upper, none;",
        *(f"add.u32 key{i}, {low}, {_round(0, i)};" for i in range(ROUNDS)),
        *(f"add.u32 lock{i}, {high}, {_round(1, i)};" for i in range(ROUNDS)),
        f"setp.eq.u32 none, {least}, 0;",
        "@none bra KEPT_${:uid};",
    ]


def _place(head) -> "list[str]":
    """What depends on `place`, the counter's number of keys, after a round."""
    return [*_product("y", "head_low", head, SECOND), _mix("place", "place", "y", "key0")]


def _of_a_row(s: int, sequence) -> "list[str]":
    """What depends on x, the counter's number of a row, alone, of three rounds."""
    return [
        *_product("x", f"row_low{s}", "x", FIRST),
        _mix("x", "x", sequence, "lock0"),
        *_product("x", f"rest{s}", "x", SECOND),
        _mix("x", "x", "head_low", "key1"),
        *_product(f"row_high{s}", f"row_rest{s}", "x", FIRST),
    ]


def _words(calls: "list[tuple[int, int, int]]") -> "list[str]":
    """The words a, b, c, d of calls, each with the number of its own, its keys and its row."""
    code = []
    for s, keys, row in calls:
        code += [
            _mix("x", f"q_high{keys}", f"row_low{row}", "lock1"),
            *_product(f"a{s}", f"b{s}", "x", SECOND),
            _mix(f"a{s}", f"a{s}", f"rest{row}", "key2"),
            _mix(f"c{s}", f"q_low{keys}", f"row_high{row}", "lock2"),
            f"mov.b32 d{s}, row_rest{row};",
        ]
    for r in range(3, ROUNDS):
        for s, _, _ in calls:
            code += [
                *_product("x", "q", f"a{s}", FIRST),
                *_product("y", "mask", f"c{s}", SECOND),
                _mix(f"a{s}", "y", f"b{s}", f"key{r}"),
                _mix(f"c{s}", "x", f"d{s}", f"lock{r}"),
                f"mov.b32 b{s}, mask;",
                f"mov.b32 d{s}, q;",
            ]
    return code


def _compared(word: str, least) -> "list[str]":
    """The mask of a word: all bits of a half are set where its draw is not below `least`."""
    return [f"abs.f16x2 mask, {word};", f"set.geu.u32.f16x2 mask, mask, {least};"]


def _product(high: str, low: str, x: str, factor: int) -> "list[str]":
    return [f"mul.wide.u32 wide, {x}, {factor};", f"mov.b64 {{{low}, {high}}}, wide;"]


def _mix(to: str, x: str, y: str, key: str) -> str:
    return f"lop3.b32 {to}, {x}, {y}, {key}, 0x96;"


def _round(half: int, number: int) -> int:
    return KEYS[half] * number & 0xFFFFFFFF
