"""Which weights dropout keeps, in torch: the generator of `kernels/triton/dropout.py`, in 64-bit integers. On the CPU, and of
second order on any device.

    draw_ij = half j % 2 of word 2 (j // 8 % 2) + i // 8 % 2 of Philox4x32-7(key = seed,
                  counter = (8 (i // 16) + i % 8, 4 (j // 16) + j % 8 // 2, head, sequence))
    kept iff draw_ij % 2^15 >= p 2^15

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
        row, col = rows.start + self.first_row, cols.start + self.first_col
        row_stop, col_stop = rows.stop + self.first_row, cols.stop + self.first_col
        device, above, left = self.heads.device, row // 16, col // 16
        i = torch.arange(8 * above, 8 * -(-row_stop // 16), device=device).unsqueeze(1)
        calls = torch.arange(4 * left, 4 * -(-col_stop // 16), device=device)
        words = torch.stack(philox((i, calls, self.heads, self.sequences), self.seed), -1)  # [b, Hk, G, i, calls, 4]
        draws = torch.stack((words & 0x7FFF, words >> 16 & 0x7FFF), -1)
        parts = draws.view(*draws.shape[:3], -1, 8, calls.numel() // 4, 4, 2, 2, 2)  # before halves: j // 8 % 2 and i // 8 % 2
        draws = parts.permute(0, 1, 2, 3, 8, 4, 5, 7, 6, 9).flatten(6).flatten(3, 5)
        return draws[..., row - 16 * above : row_stop - 16 * above, col - 16 * left : col_stop - 16 * left] >= self.below
