"""`mask` against brute force over every pair, on ints and on tensors; and the plan's key ranges against the same."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowmax.mask import Band, Pattern, end_key, end_query, first_key, first_query, pattern, visible, visible_pairs
from rowmax.plan.tile import early, key_ranges

LENGTHS = st.integers(0, 20)
SIDES = st.one_of(st.none(), st.integers(0, 25))
PATTERNS = st.builds(pattern, SIDES, SIDES, SIDES, SIDES, st.one_of(st.none(), st.integers(1, 25)))
BANDS = st.one_of(st.builds(Band, SIDES, SIDES), PATTERNS)


def sees(i, j, len_q, len_k, band):
    """The definition: the last query is aligned with the last key."""
    position = i + len_k - len_q
    left, right, sink_tokens, prefix, chunk = (*band, *(None,) * 3)[:5]
    behind = (right is not None and j > position + right) or (chunk is not None and j // chunk > position // chunk)
    before = (left is not None and j < position - left) or (chunk is not None and j // chunk < position // chunk)
    return j < (prefix or 0) or (not behind and (not before or j < (sink_tokens or 0)))


@given(LENGTHS, LENGTHS, BANDS)
def test_rows_see_an_interval_of_keys_and_early_ones(len_q, len_k, band):
    shift = len_k - len_q
    for i, j in itertools.product(range(len_q), range(len_k)):
        inside = first_key(i, shift, band) <= j < end_key(i, shift, len_k, band)
        assert bool(visible(i, j, shift, len_k, band)) == sees(i, j, len_q, len_k, band)
        assert inside == sees(i, j, len_q, len_k, band) or (len(band) > 2 and not inside)


@given(SIDES, SIDES, SIDES, SIDES, LENGTHS, LENGTHS)
def test_a_pattern_that_is_a_window_becomes_one(left, right, sink_tokens, prefix, len_q, len_k):
    simplest, whole = pattern(left, right, sink_tokens, prefix), Pattern(left, right, sink_tokens, prefix)
    for i, j in itertools.product(range(len_q), range(len_k)):
        assert sees(i, j, len_q, len_k, simplest) == sees(i, j, len_q, len_k, whole)
    if len(simplest) == 2:
        assert simplest == Band(left, right)


@given(LENGTHS, LENGTHS, BANDS)
def test_keys_are_seen_by_an_interval_of_rows(len_q, len_k, band):
    shift = len_k - len_q
    for i, j in itertools.product(range(len_q), range(len_k)):
        inside = first_query(j, shift, band) <= i < end_query(j, shift, len_q, band)
        assert inside == sees(i, j, len_q, len_k, band)


@given(LENGTHS, LENGTHS, BANDS)
def test_visible_pairs_counts_them(len_q, len_k, band):
    pairs = itertools.product(range(len_q), range(len_k))
    assert visible_pairs(len_q, len_k, band) == sum(sees(i, j, len_q, len_k, band) for i, j in pairs)


def test_visible_pairs_of_long_sequences_is_arithmetic():
    n = 1 << 40
    assert visible_pairs(n, n, Band(None, 0)) == n * (n + 1) // 2
    assert visible_pairs(n, n, Band(0, 0)) == n
    assert visible_pairs(n, n, pattern(None, 0, chunk=8192)) == n // 8192 * (8192 * 8193 // 2)
    assert visible_pairs(n, n, pattern(7, 0, sink_tokens=4)) == 36 + (n - 8) * 8 + 1 + 2 + 3 + (n - 11) * 4


@given(LENGTHS, LENGTHS, BANDS)
def test_tensors_give_what_ints_give(len_q, len_k, band):
    rows, shift = torch.arange(len_q), len_k - len_q
    assert first_key(rows, shift, band).tolist() == [first_key(i, shift, band) for i in range(len_q)]
    assert end_key(rows, shift, len_k, band).tolist() == [end_key(i, shift, len_k, band) for i in range(len_q)]


@given(st.integers(1, 40), st.integers(0, 60), BANDS, st.integers(1, 16), st.sampled_from([1, 4, 8, 16]))
def test_key_ranges_cover_exactly_what_a_block_sees(len_q, len_k, band, rows, block):
    for row in range(0, len_q, rows):
        start, full_start, full_end, end = key_ranges(row, rows, len_q, len_k, block, band)
        assert 0 <= start <= full_start <= full_end <= end <= max(len_k, start)
        assert start % block == 0
        assert all(x % block == 0 or x == end for x in (full_start, full_end))
        block_rows = range(row, min(row + rows, len_q))
        for j in range(len_k):
            seen = [sees(i, j, len_q, len_k, band) for i in block_rows]
            if any(seen):
                assert start <= j < end or j < early(start, band), "a visible key is outside the loop"
            if full_start <= j < full_end:
                assert all(seen), "a hidden pair is in the part without a mask"


@pytest.mark.parametrize(("band", "want"), [(Band(None, 0), (0, 0, 128, 160)), (Band(), (0, 0, 256, 256))])
def test_key_ranges_by_hand(band, want):
    assert key_ranges(128, 32, 256, 256, 64, band) == want
