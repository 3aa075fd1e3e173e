"""A tile of the score matrix, and the loop ranges that a tile of rows needs.

The kernels compute the same three ranges on the device with `kernels/tile_ops.py`; tests compare the two.
"""

import re
from dataclasses import dataclass

from rowmax.errors import ProblemError
from rowmax.mask import AnyBand, early_keys, end_key, first_key

WINDOWS_ONLY = "sees through windows only: no sink tokens, prefix or chunks"

_SPELLING = re.compile(r"([0-9]{1,9})x([0-9]{1,9})(?: +w([1-9][0-9]?) +s([0-9]{1,2})( +tma)?)?")


@dataclass(frozen=True)
class Tile:
    """Rows and columns of scores per step, and what runs it. `warps` 0 means: not a GPU kernel."""

    block_m: int
    block_n: int
    warps: int = 0
    stages: int = 0
    descriptors: bool = False  # K/V through TMA descriptors made on the device

    def __str__(self) -> str:
        words = [f"{self.block_m}x{self.block_n}"]
        if self.warps:
            words += [f"w{self.warps}", f"s{self.stages}"]
        return " ".join(words + ["tma"] * self.descriptors)

    @classmethod
    def parse(cls, text: str) -> "Tile":
        """The inverse of `str`: `128x128 w8 s2 tma`, or `256x8192` on a CPU. Says nothing about which of them run."""
        match = _SPELLING.fullmatch(text.strip())
        if match is None:
            raise ProblemError(f"'{text}' is no tile; examples: '128x64 w4 s3' or '128x64 w4 s3 tma', on a CPU '256x8192'")
        block_m, block_n, warps, stages = (int(number or 0) for number in match.groups()[:4])
        return cls(block_m, block_n, warps, stages, match[5] is not None)


def key_ranges(row: int, rows: int, len_q: int, len_k: int, block_n: int, band: AnyBand) -> tuple[int, int, int, int]:
    """The key loop of the row block `[row, row + rows)`: `(start, full_start, full_end, end)`.

    Key tiles in `[start, full_start)` and `[full_end, end)` need the element mask; those in `[full_start, full_end)` are
    visible to every row. All but `end` are multiples of `block_n`; an empty block gives `start == end`. Those of `early` come
    before, and need the mask.
    """
    shift = len_k - len_q
    last = min(row + rows, len_q) - 1
    start = min(max(first_key(row, shift, band), 0), len_k)
    end = min(max(end_key(last, shift, len_k, band), 0), len_k)
    start = start // block_n * block_n
    end = max(end, start)
    full_start = min(max(first_key(last, shift, band), 0), len_k)
    full_end = min(max(end_key(row, shift, len_k, band), 0), len_k)
    full_start = min(max(-(-full_start // block_n) * block_n, start), end)
    full_end = max(full_end // block_n * block_n, full_start)
    return start, full_start, full_end, end


def early(start: int, band: AnyBand) -> int:
    """The end of the keys before `start` that no left side hides (`mask.early_keys`): the key loop also has `[0, early)`."""
    return min(early_keys(band), start)
