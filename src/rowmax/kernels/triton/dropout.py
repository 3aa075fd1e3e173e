"""Which weights dropout keeps: a function of the seed and of a weight's place alone, the same in every pass and backend.

    draw_ij = half j % 2 of word 2 (j // 8 % 2) + i // 8 % 2 of Philox4x32-7(key = seed,
                  counter = (8 (i // 16) + i % 8, 4 (j // 16) + j % 8 // 2, head, sequence))
    kept iff draw_ij % 2^15 >= p 2^15

One call of the generator serves four keys of two queries: what one thread has of 16 x 16 scores in a sum of tensor cores, two
neighbours a word, so that `gluon/philox.py` makes a mask of a word where it lies. Of transposed scores they lie in two threads,
with two calls of which each needs one half of every word. The low half is the first key.

For `forward`, `backward` and `bias`; on the CPU: `cpu/dropout.py`.
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
    """Boolean `[BLOCK_M, BLOCK_N]` for queries from `row` and keys from `col` on, multiples of 16; or its transpose."""
    rows = row // 16 * 8 + tl.arange(0, BLOCK_M // 2)
    calls = col // 16 * 4 + tl.arange(0, BLOCK_N // 4)
    if TRANSPOSED:
        a, b, c, d = tl.philox(drop[0], rows[None, :], calls[:, None], head, drop[1], ROUNDS)
    else:
        a, b, c, d = tl.philox(drop[0], rows[:, None], calls[None, :], head, drop[1], ROUNDS)
    words = tl.join(tl.join(a, b), tl.join(c, d))  # the last two dimensions: i // 8 % 2 and j // 8 % 2
    # Bytes, which are cheaper to move between threads than draws.
    low = ((words & 0x7FFF).to(tl.int32) >= drop[2]).to(tl.int8)
    high = ((words >> 16 & 0x7FFF).to(tl.int32) >= drop[2]).to(tl.int8)
    if TRANSPOSED:
        parts = tl.reshape(tl.join(low, high), [BLOCK_N // 16, 4, BLOCK_M // 16, 8, 2, 2, 2])
        return tl.reshape(tl.permute(parts, (0, 5, 1, 6, 2, 4, 3)), [BLOCK_N, BLOCK_M]) != 0
    else:
        parts = tl.reshape(tl.join(low, high), [BLOCK_M // 16, 8, BLOCK_N // 16, 4, 2, 2, 2])
        return tl.reshape(tl.permute(parts, (0, 4, 1, 2, 5, 3, 6)), [BLOCK_M, BLOCK_N]) != 0
