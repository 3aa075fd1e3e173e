"""Memory that the kernels of one call hand on to each other, kept for the next call on the same stream.

The first number is a counter, flags follow; all are 0 before the first launch of a call and after the last. To allocate and to
clear them anew would cost each call two launches' worth of the host's time.

Why that is safe: work on one stream runs in order, so that the next call finds zeros. The memory is allocated and cleared on
that stream, which is also where the allocator lets others have it when it is dropped. A call takes it away and gives it back
when all its launches are enqueued: another thread on the same stream finds none and makes its own, and so does the next call
after one that raised in between. A stream under capture gets fresh memory, cleared by the graph itself, because a graph may be
replayed beside other work; and so does the default stream of each thread, because one handle names many of them. What is kept
is small: 4 bytes for 64 rows of a head.

To clear memory in a graph costs each replay a node, as much as a launch: no gain for a call that counts in order to save one.
It asks for `lasting` memory: under capture that is a piece of a reserve which was cleared before, and nobody else's ever after.
"""

from typing import Optional

import torch

FLAGS_AT = 64  # numbers: flags start at a multiple of 256 bytes
PER_THREAD = 2  # cudaStreamPerThread

RESERVE = 2**18  # numbers for calls under capture, of which decoding takes some hundreds
ALIGNED = 64  # numbers: what is given out begins at multiples of 256 bytes

_kept: dict = {}  # (device, stream) -> memory
_reserves: dict = {}  # device -> (memory, numbers of it that were given out)
_spent: list = []  # reserves of before: graphs have pieces of them


def take(like: torch.Tensor, device_index: int, stream: int, size: int, *, lasting: bool = False):
    """`(key, memory)`, int32 of at least `size` elements, all 0 when the stream comes to it. `lasting`: see above."""
    if torch.cuda.is_current_stream_capturing():
        piece = _reserved(device_index, size) if lasting else None
        return None, like.new_zeros(size, dtype=torch.int32) if piece is None else piece
    if lasting:
        _fill(like, device_index)
    if stream == PER_THREAD:
        return None, like.new_zeros(size, dtype=torch.int32)
    key = device_index, stream
    memory = _kept.pop(key, None)
    if memory is None or memory.numel() < size:
        memory = like.new_zeros(size, dtype=torch.int32)
    return key, memory


def give_back(key, memory: torch.Tensor) -> None:
    """After the last launch that uses it."""
    if key is not None:
        _kept[key] = memory


def _fill(like: torch.Tensor, device_index: int) -> None:
    """A reserve for captures to come, a new one when half of it was given out."""
    before = _reserves.get(device_index)
    if before is not None and before[1] <= RESERVE // 2:
        return
    if before is not None:
        _spent.append(before[0])
    memory = like.new_zeros(RESERVE, dtype=torch.int32)
    if memory.is_cuda:
        torch.cuda.current_stream(device_index).synchronize()  # a graph may be replayed on another stream
    _reserves[device_index] = memory, 0


def _reserved(device_index: int, size: int) -> Optional[torch.Tensor]:
    """Memory that is 0 and that nobody else has; None where none is left."""
    memory, used = _reserves.get(device_index, (None, 0))
    if memory is None or used + size > RESERVE:
        return None
    _reserves[device_index] = memory, used + -(-size // ALIGNED) * ALIGNED
    return memory[used : used + size]
