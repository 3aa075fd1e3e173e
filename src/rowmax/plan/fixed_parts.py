"""Parts of keys that are the same in every call: where part n begins, and in which part a tile of keys lies.

Plain arithmetic and no imports: the same source runs on Python ints (plan, analysis) and, wrapped by `triton.jit`, in the
kernels (`kernels/triton/parts.py`). All numbers are at least 0, and in tiles of keys, counted from the first key.

The first `doubles` parts have `size` tiles each, the next `doubles` parts twice as many, and so on; with `doubles` 0 all have
`size`. A part is numbered as a floating-point number is, exponent first: n = e doubles + i, i < doubles, has size 2^e tiles,
from this tile on:

    size ((doubles + i) 2^e - doubles)

Why they grow: a part costs its program the time of two tiles of keys and the joining of parts some more, and of a long sequence
larger parts are programs enough. A size in proportion to a part's place depends on nothing but the place: neither on the
sequence's length, or a query's bits would change when the sequence goes on, nor on the batch.
"""


def first_tile(part, size, doubles):
    """The tile of keys that a part begins with; of the part behind it, one past its last."""
    if doubles == 0:
        return part * size
    else:
        return size * (((doubles + part % doubles) << (part // doubles)) - doubles)


def part_of(tile, size, doubles):
    """The part in which a tile of keys lies."""
    if doubles == 0:
        return tile // size
    else:
        unit = tile // size + doubles
        exponent = 0
        while unit >= 2 * doubles:
            unit = unit >> 1
            exponent += 1
        return exponent * doubles + unit - doubles
