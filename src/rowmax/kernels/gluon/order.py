"""In which order packed sequences are computed: those with the most keys first, so that short ones fill up the end.

Launched in front of every packed forward; nothing of it is read back to the host.
"""

import triton
import triton.language as tl

from rowmax.kernels.address import extent

MOST = 1024  # sequences that are sorted; more come as they are: among so many the last ones are a small part


@triton.jit
def order_kernel(
    cu_seqlens_q, cu_seqlens_k,  # [batch + 1]
    order_ptr,  # int32 [2 batch + 1]: the sequences in order, then the row tiles in front of each, and of all
    batch, len_q, len_k,
    BLOCK_M: tl.constexpr, SIZE: tl.constexpr, SORT: tl.constexpr,
):  # fmt: skip
    """One program. `SIZE`: a power of two; with `SORT` at least `batch`, and at most 1024."""
    before = batch * 0
    for first in range(0, batch, SIZE):
        places = first + tl.arange(0, SIZE)
        b = places
        if SORT:
            _, keys = extent(cu_seqlens_k, tl.minimum(b, batch - 1), len_k)
            # What is sorted: keys by the 64, and the number of the sequence in the lowest ten bits.
            b = tl.where(b < batch, (tl.minimum(keys // 64, 1 << 20) << 10) | b, -1)
            b = tl.sort(b, descending=True) & 1023
        _, rows = extent(cu_seqlens_q, tl.minimum(b, batch - 1), len_q)
        tiles = tl.where(places < batch, tl.cdiv(rows, BLOCK_M), 0)
        tl.store(order_ptr + places, b, mask=places < batch)
        tl.store(order_ptr + batch + places, before + tl.cumsum(tiles, 0) - tiles, mask=places < batch)
        before += tl.sum(tiles, 0)
    tl.store(order_ptr + 2 * batch, before)
