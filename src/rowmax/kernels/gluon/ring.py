"""Who waits for whom: rings of buffers between the producer warp and the consumers. Barriers live only here.

A ring of STAGES buffers has for each a barrier "full" (its bytes have arrived) and a barrier "empty" (every reader is done).
`turn` counts uses of the ring from 0: use `turn` takes buffer `turn % STAGES` and is the `turn // STAGES`-th round of its
barriers, whose parity is the phase to wait for. A fresh barrier counts as having finished the round before the first, so that
the producer's first waits for "empty" return at once.

A ring of Q has one buffer for each consumer and stage: MEMBER of MEMBERS.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rowmax.kernels.gluon.layouts import number_layout, slot_layout
from rowmax.kernels.gluon.names import named_barrier, tma_load

FIRST_NAME = gl.constexpr(8)  # of the hardware's named barriers, for turns, and behind them for `meet`: lower ones are Triton's


@gluon.jit
def open_ring(BUFFERS: gl.constexpr, READERS: gl.constexpr):
    """`(full, empty)`; `READERS` consumers read each buffer."""
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


@gluon.jit
def buffer_of(turn, STAGES: gl.constexpr, MEMBER: gl.constexpr = 0, MEMBERS: gl.constexpr = 1):
    return turn % STAGES * MEMBERS + MEMBER


@gluon.jit
def phase_of(turn, STAGES: gl.constexpr):
    return turn // STAGES & 1


@gluon.jit
def fill(
    ring, parts, b, row, head, turn, STAGES: gl.constexpr, MEMBER: gl.constexpr, MEMBERS: gl.constexpr, SECOND: gl.constexpr
):  # fmt: skip
    """Producer: when the buffer is empty, load rows from `row` on of one head into it.

    `parts` are buffers and source, and those of the dimensions from `SECOND` on; 0: there are none.
    """
    full, empty = ring
    buffers, source, second_buffers, second_source = parts
    i = buffer_of(turn, STAGES, MEMBER, MEMBERS)
    mbarrier.wait(empty.index(i), phase_of(turn, STAGES) ^ 1)
    if SECOND > 0:
        mbarrier.expect(full.index(i), source.block_type.nbytes + second_source.block_type.nbytes)
        tma_load(source, [b, row, head, 0], full.index(i), buffers.index(i))
        tma_load(second_source, [b, row, head, SECOND], full.index(i), second_buffers.index(i))
    else:
        mbarrier.expect(full.index(i), source.block_type.nbytes)
        tma_load(source, [b, row, head, 0], full.index(i), buffers.index(i))


@gluon.jit
def fill_given(
    ring, tile, place, turn, STAGES: gl.constexpr, MEMBER: gl.constexpr, MEMBERS: gl.constexpr, APART: gl.constexpr
):  # fmt: skip
    """Producer: as `fill`, a tile of what is given for pairs. `tile`: buffers and source; `place`: (b, head, row, column)."""
    full, empty = ring
    buffers, source = tile
    b, head, row, col = place
    i = buffer_of(turn, STAGES, MEMBER, MEMBERS)
    mbarrier.wait(empty.index(i), phase_of(turn, STAGES) ^ 1)
    mbarrier.expect(full.index(i), source.block_type.nbytes)
    tma_load(source, [b, head, row, col], full.index(i), buffers.index(i * APART))


@gluon.jit
def wait_full(ring, turn, STAGES: gl.constexpr, wanted=True, MEMBER: gl.constexpr = 0, MEMBERS: gl.constexpr = 1):
    full, _ = ring
    mbarrier.wait(full.index(buffer_of(turn, STAGES, MEMBER, MEMBERS)), phase_of(turn, STAGES), pred=wanted)


@gluon.jit
def release(ring, turn, STAGES: gl.constexpr, MEMBER: gl.constexpr = 0, MEMBERS: gl.constexpr = 1):
    """Consumer: this reader is done with the buffer."""
    _, empty = ring
    mbarrier.arrive(empty.index(buffer_of(turn, STAGES, MEMBER, MEMBERS)), count=1)


@gluon.jit
def release_read(ring, turn, STAGES: gl.constexpr, MEMBER: gl.constexpr = 0, MEMBERS: gl.constexpr = 1):
    """As `release`, of a buffer that threads have just loaded from; products need nothing more.

    Loads of threads and what TMA writes are ordered by a fence alone, in every thread. Without it some rows held numbers of the
    next tile on an H200, though a barrier and the release stood between the last load and the TMA that followed.
    """
    fence_async_shared()
    release(ring, turn, STAGES, MEMBER, MEMBERS)


# ---- what consumers are told of a tile: a few numbers ----------------------------------------------------------------


@gluon.jit
def open_slots(STAGES: gl.constexpr, FIELDS: gl.constexpr, READERS: gl.constexpr):
    """`(numbers, ring)`: a ring of FIELDS numbers each."""
    return gl.allocate_shared_memory(gl.int32, [STAGES * FIELDS, 1], slot_layout()), open_ring(STAGES, READERS)


@gluon.jit
def publish(slots, numbers, turn, STAGES: gl.constexpr):
    """Producer: tell every consumer a tuple of numbers."""
    places, ring = slots
    full, empty = ring
    i = buffer_of(turn, STAGES)
    mbarrier.wait(empty.index(i), phase_of(turn, STAGES) ^ 1)
    zero = gl.full([1], 0, gl.int32, number_layout(gl.num_warps()))
    for field in gl.static_range(len(numbers)):
        places.index(field * STAGES + i).store(zero + numbers[field])
    mbarrier.arrive(full.index(i), count=1)


@gluon.jit
def wait_told(slots, turn, STAGES: gl.constexpr):
    """Consumer: from here on `told` is what was published, until `release_told`."""
    _, ring = slots
    wait_full(ring, turn, STAGES)


@gluon.jit
def told(slots, turn, STAGES: gl.constexpr, FIELD: gl.constexpr):
    places, _ = slots
    return gl.max(places.index(FIELD * STAGES + turn % STAGES).load(number_layout(gl.num_warps())), 0)


@gluon.jit
def release_told(slots, turn, STAGES: gl.constexpr):
    _, ring = slots
    release(ring, turn, STAGES)


# ---- ping-pong: consumers issue their products in turn -----------------------------------------------------------------


@gluon.jit
def begin_turns(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """The last consumer gives the first turn to the first one."""
    if CONSUMER == CONSUMERS - 1:
        named_barrier("bar.arrive", FIRST_NAME, 256)


@gluon.jit
def end_turns(CONSUMER: gl.constexpr):
    """The first consumer takes the turn that nobody will use."""
    if CONSUMER == 0:
        take_turn(CONSUMER)


@gluon.jit
def take_turn(CONSUMER: gl.constexpr):
    named_barrier("bar.sync", FIRST_NAME + CONSUMER, 256)


@gluon.jit
def give_turn(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    named_barrier("bar.arrive", FIRST_NAME + (CONSUMER + 1) % CONSUMERS, 256)


# ---- backward: query tiles with a number for each row, and what consumers make for each other --------------------------------


@gluon.jit
def fill_with_line(ring, tile, line, b, row, head, number, place, turn, STAGES: gl.constexpr):
    """Producer: as `fill`, and with it the numbers of these rows, from `place` on in line `number`.

    `tile`, `line`: buffers and source. `place` is a multiple of 4.
    """
    full, empty = ring
    buffers, source = tile
    line_buffers, line_source = line
    i = buffer_of(turn, STAGES)
    mbarrier.wait(empty.index(i), phase_of(turn, STAGES) ^ 1)
    mbarrier.expect(full.index(i), source.block_type.nbytes + line_source.block_type.nbytes)
    tma_load(source, [b, row, head, 0], full.index(i), buffers.index(i))
    tma_load(line_source, [number, place], full.index(i), line_buffers.index(i))


@gluon.jit
def open_shares(BUFFERS: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    """A ring whose buffers are full when every writer has arrived."""
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(full.index(i), count=WRITERS)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


@gluon.jit
def wait_empty(ring, turn, STAGES: gl.constexpr):
    _, empty = ring
    mbarrier.wait(empty.index(buffer_of(turn, STAGES)), phase_of(turn, STAGES) ^ 1)


@gluon.jit
def give(ring, turn, STAGES: gl.constexpr):
    """Writer: this one has written its part of the buffer."""
    full, _ = ring
    mbarrier.arrive(full.index(buffer_of(turn, STAGES)), count=1)


@gluon.jit
def meet(CONSUMERS: gl.constexpr):
    """All consumers wait for each other."""
    named_barrier("bar.sync", FIRST_NAME + CONSUMERS, CONSUMERS * 128)
