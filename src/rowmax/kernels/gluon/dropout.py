"""Dropout in the Hopper forward: `triton/dropout.py`'s draws, bit by bit.

    O = (Z P) V / ((1 - p) l),  z_ij = 1 iff draw_ij % 2^15 >= p 2^15,  l and the LSE of all weights

A consumer draws for a tile of P before it issues the products of the next turn, or between them (`forward._products`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rowmax.kernels.gluon.build import HEAD, ROW, ROWS, SEQUENCE, SLOTS, START
from rowmax.kernels.gluon.layouts import row_layout
from rowmax.kernels.gluon.philox import keep, uniform
from rowmax.kernels.gluon.ring import told
from rowmax.kernels.tile_ops import key_tile_start


@gluon.jit
def dropping(drop, BUILD: gl.constexpr):
    """`(low, high, least, factor)`: halves of the seed, the least draw that is kept, twice, and the factor of what is."""
    seed_ptr, odds = drop
    below, factor = odds
    if BUILD.DROPS:
        seed = gl.load(seed_ptr)
        return uniform(seed.to(gl.int32)), uniform((seed >> 32).to(gl.int32)), below * 0x10001, factor
    else:
        return 0, 0, below, factor


@gluon.jit
def dropped(p, drop, own, band, CONSUMER: gl.constexpr, BUILD: gl.constexpr):
    """P, and 0 in the place of weights that are not kept. own: `(slots, round, key_tile)`, where they are."""
    if BUILD.DROPS:
        low, high, least, _factor = drop
        slots, round, key_tile = own
        row = told(slots, round, SLOTS, ROW) + CONSUMER * ROWS
        call = key_tile_start(key_tile, told(slots, round, SLOTS, START), band, BUILD.BLOCK_N) >> 2
        rows = gl.expand_dims(row + gl.arange(0, ROWS, layout=row_layout(p.type.layout)), 1)
        rows, _ = gl.broadcast(rows, p)
        head, sequence = told(slots, round, SLOTS, HEAD), told(slots, round, SLOTS, SEQUENCE)
        p = keep(p, rows, call, head, sequence, low, high, least, BUILD.BLOCK_N)
    return p
