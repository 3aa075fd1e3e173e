"""What a call gives for pairs of queries and keys, in the Hopper forward: a bias or a mask, as `triton/given.py` defines them.

    x = log2(e) (score + bias),  or -inf where the mask is False

Tiles come through a ring of each consumer (`ring.fill_given`): 64 rows of a key tile, or one that all queries share.
A consumer takes its tile when S is there, and gives it back at once: the next one has the rest of the turn to arrive.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rowmax.kernels.gluon.layouts import column_layout, given_layout, last_layout, pair_layout
from rowmax.kernels.gluon.names import add_product
from rowmax.kernels.gluon.ring import buffer_of, release_read, wait_full

LOG2E = gl.constexpr(1.4426950408889634)
LARGEST = gl.constexpr(3e38)  # that a bias counts as, in units of log2


@gluon.jit
def take_given(s, ring, buffers, turn, wanted, MEMBER: gl.constexpr, BUILD: gl.constexpr):
    """`s + bias`, s in units of log2, or s where the mask is set, else -inf: of a tile of the ring, given back at once.

    A bias times log2(e) may exceed fp32: rounded towards zero the lowest number of a type stays one, as in `triton/given.py`.
    """
    wait_full(ring, turn, BUILD.GIVEN_STAGES, wanted, MEMBER, BUILD.CONSUMERS)
    tile = buffers.index(buffer_of(turn, BUILD.GIVEN_STAGES, MEMBER, BUILD.CONSUMERS) * BUILD.GIVEN_APART)
    if BUILD.GIVEN == "bias":
        if BUILD.GIVEN_ROWS == 1:
            line = tile.reshape([BUILD.BLOCK_N]).load(column_layout(s.type.layout))
            given, s = gl.broadcast(gl.expand_dims(line, 0), s)
        else:
            given = tile.reshape([BUILD.GIVEN_ROWS, BUILD.BLOCK_N]).load(s.type.layout)
        release_read(ring, turn, BUILD.GIVEN_STAGES, MEMBER, BUILD.CONSUMERS)
        return add_product(s, given.to(gl.float32), LOG2E)
    else:  # two neighbours, which a thread has, are read as one number
        HALF: gl.constexpr = BUILD.BLOCK_N // 2
        pairs = tile._reinterpret(
            gl.int16, [1, 1, BUILD.GIVEN_ROWS, HALF], given_layout(BUILD.GIVEN_ROWS, BUILD.BLOCK_N // 2, gl.int16)
        )
        parts = s.reshape([s.shape[0], s.shape[1] // 2, 2])
        if BUILD.GIVEN_ROWS == 1:
            line = pairs.reshape([HALF]).load(column_layout(pair_layout(parts.type.layout)))
            shown = gl.expand_dims(line, 0)
        else:
            shown = pairs.reshape([BUILD.GIVEN_ROWS, HALF]).load(pair_layout(parts.type.layout))
        release_read(ring, turn, BUILD.GIVEN_STAGES, MEMBER, BUILD.CONSUMERS)
        second = gl.arange(0, 2, layout=last_layout(parts.type.layout))
        byte = gl.expand_dims(gl.expand_dims(gl.where(second == 0, 0xFF, 0xFF00), 0), 1)
        parts = gl.where((gl.expand_dims(shown, 2).to(gl.int32) & byte) != 0, parts, float("-inf"))
        return gl.convert_layout(parts.reshape(s.shape), s.type.layout)
