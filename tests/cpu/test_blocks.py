"""The walk of the CPU path against a mask made by comparing indices, and the memory that its calls share."""

import itertools
import threading

import pytest
import torch

from rowmax import Problem, testing
from rowmax.cpu import blocks
from rowmax.cpu.blocks import Chunks, Geometry, Scratch
from rowmax.mask import Band
from rowmax.plan.tile import Tile
from rowmax.problem import Operands

SIDES = (None, 0, 2, 50)
GEOMETRIES = [
    Geometry(len_q, len_k, Band(left, right))
    for len_q, len_k in ((1, 1), (7, 7), (5, 12), (12, 5), (40, 70), (3, 0))
    for left, right in itertools.product(SIDES, SIDES)
]


def seen_by(geometry: Geometry) -> torch.Tensor:
    """`[len_q, len_k]`, from the definition."""
    distance = torch.arange(geometry.len_k) - torch.arange(geometry.len_q).unsqueeze(1) - geometry.shift
    left, right = geometry.band
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


@pytest.mark.parametrize("step", [1, 4, 64])
def test_row_blocks_hold_every_pair_once(step):
    for geometry in GEOMETRIES:
        seen, rows = seen_by(geometry), []
        for block in geometry.row_blocks(step):
            mine = slice(block.row, block.row + block.rows)
            rows += range(mine.start, mine.stop)
            part = seen[mine]
            assert not part[:, : block.start].any(), geometry
            assert not part[:, block.end :].any(), geometry
            assert part[:, block.full_start : block.full_end].all(), geometry
            assert block.fewest_columns == int(part.sum(1).min()), geometry
        alive = seen.any(1).nonzero().flatten().tolist()
        assert sorted(rows) == alive, geometry


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("width", [3, 32, 100])
def test_hide_is_the_mask(width, exact):
    for geometry in GEOMETRIES:
        seen, scratch = seen_by(geometry), Scratch()
        for block in geometry.row_blocks(6):
            for cols in block.tiles(width):
                group = 2
                s = torch.zeros(3, group * block.rows, cols.stop - cols.start)
                part = seen[block.row : block.row + block.rows, cols]
                if exact:  # a hidden NaN goes too
                    s.masked_fill_(~part.repeat(group, 1), torch.nan)
                block.hide(s, cols, scratch, exact)
                assert torch.equal(s, torch.zeros_like(s).masked_fill(~part.repeat(group, 1), -torch.inf)), geometry
                blind = block.blind_rows(cols)
                if blind is not None:
                    assert torch.equal(blind, ~part.any(1)), geometry
                elif (cols.start, cols.stop) != (block.start, block.end):
                    assert part.any(1).all(), geometry


def test_rare_columns_are_those_that_few_rows_see():
    for geometry in GEOMETRIES:
        left, right = geometry.band
        if geometry.len_q < 3 or (left is not None and right is not None and left + right + 1 < 3):
            continue
        rows = seen_by(geometry).sum(0)
        for block in geometry.row_blocks(64):
            rare = {j for cols in block.rare_columns(3) for j in range(cols.start, cols.stop)}
            assert {j for j in range(block.start, block.end) if rows[j] < 3} <= rare, geometry


@pytest.mark.parametrize(("batch", "heads_k", "group"), [(1, 8, 1), (3, 5, 2), (7, 1, 4), (2, 2, 300)])
def test_chunks_hold_every_head_once_and_no_score_block_is_larger_than_the_tile(batch, heads_k, group):
    tile = Tile(256, 1024)
    for half, length in itertools.product((False, True), (1, 100, 5000)):
        chunks = Chunks.of(tile, Geometry(length, length, Band(None, 0)), batch, heads_k, group, half)
        count = torch.zeros(batch, heads_k)
        for part in chunks.parts:
            count[part] += 1
            heads = count[part].numel()
            scores = heads * group * chunks.step * chunks.width
            assert scores <= (1 + half) * max(tile.block_m, group) * tile.block_n
        assert bool((count == 1).all())


def test_packed_sequences_without_queries_or_keys_are_left_out():
    problem = Problem.parse("b3 h2 q9 k9 d4 fp32 packed")
    operands = testing.operands(problem, lengths=[(4, 0), (0, 6), (5, 3)])
    found = [(rows[0].shape[1], cols[0].shape[1]) for rows, cols in blocks.sequences(problem, operands)]
    assert found == [(5, 3)]


@pytest.mark.parametrize("packed", [False, True])
def test_sequences_leave_out_what_nobody_sees(packed):
    for geometry in GEOMETRIES:
        len_q, len_k, band = geometry
        problem = Problem(1, 1, 1, len_q, len_k, 1, 1, torch.float32, band, packed=packed)
        operands = Operands(torch.arange(len_q), torch.arange(len_k), torch.arange(len_k))
        operands = Operands(*(t.view(-1, 1, 1) if packed else t.view(1, -1, 1, 1) for t in operands[:3]))
        if packed:
            operands = operands._replace(cu_seqlens_q=torch.tensor([0, len_q]), cu_seqlens_k=torch.tensor([0, len_k]))
        seen = seen_by(geometry)
        found = [[t.flatten().tolist() for t in (*rows, *cols)] for rows, cols in blocks.sequences(problem, operands)]
        cols = seen.any(0).nonzero().flatten().tolist()
        assert found == ([[seen.any(1).nonzero().flatten().tolist(), cols, cols]] if cols else []), geometry


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_scratch_is_kept_by_the_thread():
    first = Scratch()("s", (4, 8), torch.float32)
    assert Scratch()("s", (2, 3), torch.float32).data_ptr() == first.data_ptr()
    assert Scratch()("p", (2, 3), torch.float32).data_ptr() != first.data_ptr()
    assert Scratch()("s", (2, 3), torch.bfloat16).data_ptr() != first.data_ptr()
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(Scratch()("s", (4, 8), torch.float32)))
    thread.start()
    thread.join()
    assert elsewhere[0].data_ptr() != first.data_ptr()


def test_no_more_than_the_limit_is_kept(monkeypatch):
    monkeypatch.setattr(blocks, "_of_thread", threading.local())
    monkeypatch.setattr(blocks, "KEPT_BYTES", 1000)
    scratch = Scratch()
    small, large = scratch("small", (100,), torch.float32), scratch("large", (1000,), torch.float32)
    assert scratch("large", (1000,), torch.float32).data_ptr() == large.data_ptr()  # within the call
    assert Scratch()("small", (100,), torch.float32).data_ptr() == small.data_ptr()
    assert set(blocks._kept_by_thread().flat) == {("small", torch.float32)}
    assert all(view.untyped_storage().nbytes() <= 1000 for view in blocks._kept_by_thread().views.values())


def test_memory_that_was_replaced_is_not_handed_out_again(monkeypatch):
    monkeypatch.setattr(blocks, "_of_thread", threading.local())
    small = Scratch()("s", (4,), torch.float32)
    large = Scratch()("s", (400,), torch.float32)
    assert Scratch()("s", (4,), torch.float32).data_ptr() == large.data_ptr() != small.data_ptr()


def test_kept_tensors_are_few(monkeypatch):
    monkeypatch.setattr(blocks, "_of_thread", threading.local())
    monkeypatch.setattr(blocks, "_MOST_VIEWS", 3)
    monkeypatch.setattr(blocks, "_MOST_OF_EDGES", 100)
    scratch = Scratch()
    for n in range(1, 20):
        scratch("s", (n,), torch.float32)
        scratch.edge(5, 5, -n, 1, torch.float32)
    assert len(blocks._kept_by_thread().views) <= 3
    assert len(blocks._kept_by_thread().edges) <= 5


def test_old_memory_does_not_hide_what_nobody_wrote():
    from rowmax import testing

    Scratch()("s", (8,), torch.float32).zero_()
    with testing.poisoned():
        assert bool(Scratch()("s", (8,), torch.float32).isnan().all())


def test_memory_kept_in_inference_mode_serves_outside_of_it():
    from rowmax import attention

    def run():
        q, k, v = (torch.ones(1, 300, 2, 16, dtype=torch.bfloat16) for _ in range(3))
        return attention(q, k, v, causal=True, plan="tiled")

    with torch.inference_mode():
        run()
    assert bool(((run() - 1).abs() <= 2**-8).all())
