"""Which weights dropout keeps: a function of the seed and of a weight's place alone, the same in every pass and backend.

    draw_ij = word j % 4 of Philox4x32-7(counter = (j // 4, i, head, sequence), key = seed),  kept iff draw_ij // 2 >= p 2^31

One call of the generator serves four neighbouring keys. For `forward`, `backward` and `bias`; on the CPU: `cpu/dropout.py`.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), section 4.3; seven rounds pass its tests.
"""

import triton
import triton.language as tl

from rowmax.kernels.address import sequence_of

ROUNDS: tl.constexpr = tl.constexpr(7)


@triton.jit
def dropping(seed_ptr, odds, pid, cu_rows, batch, program_heads, tiles, BLOCK: tl.constexpr):
    """What `kept` takes, for the program of `address.locate`: (seed, sequence, threshold, factor of what is kept)."""
    b = sequence_of(pid, cu_rows, batch, program_heads, tiles, BLOCK)
    return tl.load(seed_ptr), tl.cast(b, tl.int32), odds[0], odds[1]


@triton.jit
def kept(drop, head, row, col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Boolean `[BLOCK_M, BLOCK_N]` for queries from `row` and keys from `col` on, a multiple of 4; or its transpose."""
    rows = row + tl.arange(0, BLOCK_M)
    quads = col // 4 + tl.arange(0, BLOCK_N // 4)
    if TRANSPOSED:
        a, b, c, d = tl.philox(drop[0], quads[:, None], rows[None, :], head, drop[1], ROUNDS)
    else:
        a, b, c, d = tl.philox(drop[0], quads[None, :], rows[:, None], head, drop[1], ROUNDS)
    # Bytes, which are cheaper to move between threads than draws.
    a = ((a >> 1).to(tl.int32) >= drop[2]).to(tl.int8)
    b = ((b >> 1).to(tl.int32) >= drop[2]).to(tl.int8)
    c = ((c >> 1).to(tl.int32) >= drop[2]).to(tl.int8)
    d = ((d >> 1).to(tl.int32) >= drop[2]).to(tl.int8)
    four = tl.join(tl.join(a, c), tl.join(b, d))  # the last two dimensions count the words in order
    if TRANSPOSED:
        return tl.reshape(tl.permute(four, (0, 2, 3, 1)), [BLOCK_N, BLOCK_M]) != 0
    else:
        return tl.reshape(four, [BLOCK_M, BLOCK_N]) != 0
