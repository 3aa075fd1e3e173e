"""Dropout in the Hopper backward: the draws of the forward, for transposed scores.

    dV = (Z P) dO / (1 - p),  dS = P (Z dP / (1 - p) - delta),  z_ij = 1 iff draw_ij % 2^15 >= p 2^15

A consumer draws for P in 16 bits before it is the first factor of dV. What is dropped becomes -0 there, as no weight is
negative, so that its sign tells what of dP is dropped once that is there, and a mask takes no registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rowmax.kernels.gluon.backward_walk import BEGIN_Q, COL, HEAD, KEYS, _note
from rowmax.kernels.gluon.layouts import row_layout
from rowmax.kernels.gluon.philox import keep_across, uniform


@gluon.jit
def seed_of(drop, BUILD: gl.constexpr):
    """`(low, high, least, factor, sequence)`: as of `dropout.dropping`, and the number of the sequence."""
    if BUILD.DROPS:
        seed_ptr, odds, sequence = drop
        seed = gl.load(seed_ptr)
        low, high = uniform(seed.to(gl.int32)), uniform((seed >> 32).to(gl.int32))
        return low, high, odds[0] * 0x10001, odds[1], sequence
    else:
        return drop


@gluon.jit
def drop_weights(weights, drop, row, turn, notes, CONSUMER: gl.constexpr, BUILD: gl.constexpr):
    """Weights, `[keys, queries]`, and -0 in the place of those that are not kept. row: of the tensor."""
    low, high, least, _factor, sequence = drop
    head = _note(notes, HEAD) * BUILD.GROUP + turn % BUILD.GROUP
    first = _note(notes, COL) + CONSUMER * KEYS
    keys = gl.expand_dims(first + gl.arange(0, KEYS, layout=row_layout(weights.type.layout)), 1)
    keys, _ = gl.broadcast(keys, weights)
    own_row = row - _note(notes, BEGIN_Q)
    return keep_across(weights, keys, own_row, head, sequence, low, high, least, BUILD.BLOCK_M)
