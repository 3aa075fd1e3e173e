"""Scores bent by a pair of Triton functions of the caller's own, `rowmax.ScoreMod`.

    x = log2(e) f(score, sequence, head, i + shift, j, *numbers),    gain = f'(the same)

The functions are compile-time constants: every mod has builds of its own, and a call without one is what it was without this
file. What the walks of `forward`, `backward` and `bias` carry for it, or None, is

    mod = (f, f', how many numbers, pointer to numbers [how many, heads], heads, sequence)
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def modify(x, mod, head, rows, cols, shift):
    """`(x, gain)` of a tile of scores x in units of log2, for `tile_ops.bend`; `rows` and `cols` broadcast to it.

    Who does not use the gain passes f twice: what is computed for nothing the compiler leaves out, but a tuple takes no None.
    """
    numbers = ()
    for n in tl.static_range(mod[2]):
        numbers = numbers + (tl.load(mod[3] + n * mod[4] + head),)  # noqa: RUF005, Triton has no stars in tuples
    score = x * LN2
    sequence = tl.cast(mod[5], tl.int32)
    rows = rows + shift
    new = mod[0](score, sequence, head, rows, cols, *numbers) * LOG2E
    return new, mod[1](score, sequence, head, rows, cols, *numbers)
