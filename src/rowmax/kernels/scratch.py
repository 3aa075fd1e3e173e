"""Memory that the kernels of one call hand on to each other, kept for the next call on the same stream.

The first number is a counter, flags follow; all are 0 before the first launch of a call and after the last. To allocate and to
clear them anew would cost each call two launches' worth of the host's time.

Why that is safe: work on one stream runs in order, so that the next call finds zeros. The memory is allocated and cleared on
that stream, which is also where the allocator lets others have it when it is dropped. A call takes it away and gives it back
when all its launches are enqueued: another thread on the same stream finds none and makes its own, and so does the next call
after one that raised in between. A stream under capture gets fresh memory, cleared by the graph itself, because a graph may be
replayed beside other work; and so does the default stream of each thread, because one handle names many of them. What is kept
is small: 4 bytes for 64 rows of a head.
"""

import torch

FLAGS_AT = 64  # numbers: flags start at a multiple of 256 bytes
PER_THREAD = 2  # cudaStreamPerThread

_kept: dict = {}  # (device, stream) -> memory


def take(like: torch.Tensor, device_index: int, stream: int, size: int):
    """`(key, memory)`, int32 of at least `size` elements, all 0 when the stream comes to it."""
    if stream == PER_THREAD or torch.cuda.is_current_stream_capturing():
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
