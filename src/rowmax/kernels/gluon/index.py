"""Numbers along the axes of a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rowmax.kernels.gluon.layouts import axis_layout


@gluon.jit
def along(count, LAYOUT: gl.constexpr, AXIS: gl.constexpr):
    """0, 1, ... along one of four axes."""
    numbers = gl.arange(0, count, layout=axis_layout(LAYOUT, AXIS))
    for axis in gl.static_range(4):
        if axis != AXIS:
            numbers = gl.expand_dims(numbers, axis)
    return numbers
