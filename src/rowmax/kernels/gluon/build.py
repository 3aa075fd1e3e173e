"""For `forward.py` and `producer.py`: what is fixed when the kernel is compiled, and what consumers are told of a tile."""

from dataclasses import dataclass

from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # of a consumer: what one warpgroup multiplies at once
SLOTS = gl.constexpr(3)  # row tiles that consumers know of: the one stored, the one computed, and the next
# What consumers are told of a tile. TURNS: of key tiles; 0: there is no further tile. START: of the keys that it sees, behind a
# gap where it sees first keys, too (`tile_ops.key_tile_start`).
TURNS, ROW, HEAD, BATCH, FLAG, START, FULL, FULL_END, BEGIN_Q, LEN_Q, BEGIN_K, LEN_K = map(gl.constexpr, range(12))
FIELDS = gl.constexpr(12)
SLOPE = gl.constexpr(12)  # where scores are bent: numbers of the head, in units of scores and of log2
SINK = gl.constexpr(13)
BENT_FIELDS = gl.constexpr(14)
SEQUENCE = gl.constexpr(14)  # where weights are dropped, behind all of these
DROP_FIELDS = gl.constexpr(15)


@dataclass(frozen=True)
class Build:
    """What is fixed when the kernel is compiled.

    Attributes:
        BLOCK_D, BLOCK_DV: head dimensions in shared memory, zero-filled.
        BLOCK_D2: those of Q and K from `BLOCK_D` on, in tiles of their own, as sizes are powers of two (192 = 128 + 64); or 0.
        BLOCK_O: those of O that go through shared memory at once.
        BANDED: behind the first key tile that a consumer takes, keys may be hidden from some of its rows.
        SKIPS: a consumer leaves out key tiles that are hidden from all its rows.
        PRESCALE: see the portable kernel.
        CAP, SINK: there is a soft-cap, a sink. ALIBI: "", "behind" where no visible key lies ahead of its query, or "around".
        SHORT: of a soft-cap's polynomials the short one (`scores.py`). STEADY: no maxima in the loop
            (`softmax.py`).
        PER_SEQUENCE: slopes are [B, H].
        GIVEN: "bias" or "mask" where a number is read for every pair of a query and a key, or "".
        GIVEN_ROWS: ROWS, or 1 where all queries share them. GIVEN_BATCH, GIVEN_HEAD: 1 where each sequence, each head has its
            own, 0 where they share them. GIVEN_STAGES: tiles of them in flight for each consumer. GIVEN_APART: so many tiles
            from one buffer to the next, as TMA writes to multiples of 128 bytes.
        DROPS: weights are dropped.
        STAGES, Q_STAGES: K/V tiles and Q tiles in flight.
        LAZY: a maximum that grows by less than 2^8 stays, so that most turns leave the accumulator as it is.
        SCHEDULE: "static", block i takes tiles i, i + blocks, ...; "dynamic", the next one when free.
        REGISTERS, PRODUCER_REGISTERS: of one thread.
    """

    PACKED: bool
    NEED_LSE: bool
    GROUP: int
    DIM_V: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_D2: int
    BLOCK_DV: int
    BLOCK_O: int
    BANDED: bool
    SKIPS: bool
    PRESCALE: bool
    CAP: bool
    SHORT: bool
    STEADY: bool
    ALIBI: str
    SINK: bool
    PER_SEQUENCE: bool
    GIVEN: str
    GIVEN_ROWS: int
    GIVEN_BATCH: int
    GIVEN_HEAD: int
    GIVEN_STAGES: int
    GIVEN_APART: int
    DROPS: bool
    STAGES: int
    Q_STAGES: int
    CONSUMERS: int
    PINGPONG: bool
    LAZY: bool
    SCHEDULE: str
    REGISTERS: int
    PRODUCER_REGISTERS: int

    def __post_init__(self):  # in a kernel, an attribute of a constant is a constant only if it says so
        for name, value in vars(self).copy().items():
            object.__setattr__(self, name, gl.constexpr(value))
