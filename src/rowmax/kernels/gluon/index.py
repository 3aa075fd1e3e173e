"""Numbers along the axes of a tile, and where a row sees none of its keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rowmax.kernels.gluon.layouts import axis_layout
from rowmax.kernels.tile_ops import early_keys, end_key, first_key


@gluon.jit
def along(count, LAYOUT: gl.constexpr, AXIS: gl.constexpr):
    """0, 1, ... along one of four axes."""
    numbers = gl.arange(0, count, layout=axis_layout(LAYOUT, AXIS))
    for axis in gl.static_range(4):
        if axis != AXIS:
            numbers = gl.expand_dims(numbers, axis)
    return numbers


@gluon.jit
def hide(s, row, col, len_k, shift, band, hidden):
    """`hidden` where a key is not visible. A column is 8 i + 2 t + e; a thread has every i: constants to compare with."""
    parts = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    LAYOUT: gl.constexpr = parts.type.layout
    rows = row + along(s.shape[0], LAYOUT, 0)
    eights = 8 * along(parts.shape[1], LAYOUT, 1)
    own = col + 2 * along(4, LAYOUT, 2) + along(2, LAYOUT, 3)
    seen = eights < gl.minimum(end_key(rows, shift, len_k, band), len_k) - own
    if band.__len__() > 2:
        if band.left is not None or band.chunk is not None:
            near = eights >= first_key(rows, shift, band) - own
            if band.sink_tokens is not None or band.prefix is not None:
                near = near | (eights < early_keys(row, band) - own)
            seen = seen & near
    elif band.left is not None:
        seen = seen & (eights >= first_key(rows, shift, band) - own)
    return gl.convert_layout(gl.where(seen, parts, hidden).reshape(s.shape), s.type.layout)
