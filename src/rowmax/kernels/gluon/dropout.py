"""Dropout in the Hopper forward: `triton/dropout.py`'s draws, bit by bit, made while the products run.

    O = (Z P) V / ((1 - p) l),  z_ij = 1 iff draw_ij // 2 >= p 2^31,  l and the LSE of all weights

A consumer draws for a key tile when it has issued Q K^T of that tile and P V of the one before, where it would otherwise wait
for the tensor cores. Until P is there, what is left of a draw is one bit of a number.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rowmax.kernels.gluon.build import HEAD, ROW, ROWS, SEQUENCE, SLOTS, START
from rowmax.kernels.gluon.layouts import keep_layout, kept_layout, row_layout
from rowmax.kernels.gluon.philox import keep_bits, uniform, zero_unless
from rowmax.kernels.gluon.ring import told


@gluon.jit
def dropping(drop, BUILD: gl.constexpr):
    """`(low, high, least, factor)`: halves of the seed, the least draw that is kept, and the factor of what is."""
    seed_ptr, odds = drop
    below, factor = odds
    if BUILD.DROPS:
        seed = gl.load(seed_ptr)
        return uniform(seed.to(gl.int32)), uniform((seed >> 32).to(gl.int32)), below * 2, factor
    else:
        return 0, 0, below, factor


@gluon.jit
def draw(drop, slots, round, key_tile, CONSUMER: gl.constexpr, BUILD: gl.constexpr):
    """What `dropped` takes for a tile of scores."""
    low, high, least, _factor = drop
    bits = key_tile
    if BUILD.DROPS:
        row = told(slots, round, SLOTS, ROW) + CONSUMER * ROWS
        start = told(slots, round, SLOTS, START)
        quad = (start + key_tile * BUILD.BLOCK_N) >> 2
        rows = gl.expand_dims(row + gl.arange(0, ROWS, layout=row_layout(keep_layout())), 1)
        rows, _ = gl.broadcast(rows, gl.full([ROWS, 4], 0, gl.int32, keep_layout()))
        head, sequence = told(slots, round, SLOTS, HEAD), told(slots, round, SLOTS, SEQUENCE)
        bits = keep_bits(rows, quad, head, sequence, low, high, least, BUILD.BLOCK_N)
    return bits


@gluon.jit
def dropped(p, bits, BUILD: gl.constexpr):
    """P, and 0 in the place of weights that are not kept. A column is 8 i + 2 t + e: thread t of a row has bit 2 i + e."""
    if BUILD.DROPS:
        parts = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
        own = gl.convert_layout(bits, kept_layout(parts.type.layout))
        own, _ = gl.broadcast(gl.expand_dims(gl.expand_dims(own, 1), 3), parts)
        p = zero_unless(p, gl.convert_layout(own.reshape(p.shape), p.type.layout), p.shape[1] // 2)
    return p
