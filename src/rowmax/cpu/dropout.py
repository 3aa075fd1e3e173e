"""Which weights dropout keeps, in torch: the generator of `kernels/triton/dropout.py`, in 64-bit integers. On the CPU, and of
second order on any device.

    draw_ij = word j % 4 of Philox4x32-7(counter = (j // 4, i, head, sequence), key = seed),  kept iff draw_ij // 2 >= p 2^31

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), section 4.3.
"""

from typing import NamedTuple

import torch

ROUNDS = 7
_LOW = 0xFFFFFFFF


def philox(counter, seed: int, rounds: int = ROUNDS) -> list[torch.Tensor]:
    """The four 32-bit words, as int64, of counters that broadcast."""
    a, b, c, d = counter
    key0, key1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(rounds):
        one, two = 0xD2511F53 * a, 0xCD9E8D57 * c  # they wrap around; their bits are those of the product
        a, b, c, d = ((two >> 32) & _LOW) ^ b ^ key0, two & _LOW, ((one >> 32) & _LOW) ^ d ^ key1, one & _LOW
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    return [a, b, c, d]


class Dropout(NamedTuple):
    """Of some heads of some sequences.

    Attributes:
        below: a weight is dropped where its draw is below this; factor: of what is kept.
        heads, sequences: int64 `[1, Hk, G, 1, 1]` and `[b, 1, 1, 1, 1]`, their numbers.
        first_row, first_col: numbers of the first query and key in the sequence.
    """

    seed: int
    below: int
    factor: float
    heads: torch.Tensor
    sequences: torch.Tensor
    first_row: int
    first_col: int

    def kept(self, rows: slice, cols: slice) -> torch.Tensor:
        """Boolean `[b, Hk, G, rows, cols]`."""
        start, stop = cols.start + self.first_col, cols.stop + self.first_col
        first = start // 4
        quads = torch.arange(first, -(-stop // 4), device=self.heads.device)
        i = torch.arange(rows.start + self.first_row, rows.stop + self.first_row, device=self.heads.device).unsqueeze(1)
        words = philox((quads, i, self.heads, self.sequences), self.seed)
        draws = torch.stack(words, -1).flatten(-2)  # [b, Hk, G, rows, 4 * quads]
        return (draws >> 1)[..., start - 4 * first : stop - 4 * first] >= self.below
