"""`batch_invariant=True`: a query's output and LSE, bit for bit, whatever else is in the call."""

import pytest
import torch

import interpreter
from rowmax import Device, PagedProblem, ProblemError, attention_paged, plan
from rowmax.testing import paged
from test_paged import BACKENDS

LENGTH, QUERIES = 75, 7


@pytest.fixture(autouse=True)
def dots_in_order(monkeypatch):
    if "split_kv" in BACKENDS:
        interpreter.dot_in_order(monkeypatch)


# Parts of 32 keys, in turn; of 16, 16, 32, 32, 64 and so on, side by side, and joined in the same launch.
PLANS = ["gathered", *(f"split_kv[16x16 w4 s1 {how}]" for how in ("r2", "c1d2", "c1d1 once") if "split_kv" in BACKENDS)]
WINDOWS = {"causal": {"causal": True}, "window": {"causal": False, "window": (40, 0)}}


def cache(size, lengths, seed, first):
    """Pages of `size` with sequences of random keys, the first of them given; table and lengths."""
    generator = torch.Generator().manual_seed(seed)
    columns = -(-max(lengths) // size) + seed
    order = torch.randperm(len(lengths) * columns + 2, generator=generator)
    pages = torch.randn(len(order), size, 2, 16, generator=generator), torch.randn(len(order), size, 2, 8, generator=generator)
    table = order[: len(lengths) * columns].view(len(lengths), columns)
    for memory, keys in zip(pages, first, strict=True):
        for j in range(lengths[0]):
            memory[table[0, j // size], j % size] = keys[j]
    return *pages, table.to(torch.int32), torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("spelled", PLANS)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_query_gives_the_same_bits_in_every_company(spelled, window):
    torch.manual_seed(0)
    keys, q = (torch.randn(LENGTH, 2, 16), torch.randn(LENGTH, 2, 8)), torch.randn(QUERIES, 4, 16)
    options = {"batch_invariant": True, "return_lse": True, "plan": spelled, **WINDOWS[window]}

    def run(q, size, lengths, counts, seed):
        """Rows of the first sequence, which comes with others."""
        others = torch.randn(sum(counts[1:]), 4, 16)
        cu = torch.tensor([0, *counts]).cumsum(0)
        out, lse = attention_paged(torch.cat([q, others]), *cache(size, lengths, seed, keys), cu_seqlens_q=cu, **options)
        return out[: counts[0]], lse[:, : counts[0]]

    out, lse = run(q, 16, [LENGTH], [QUERIES], 0)
    for size, others, counts in ((16, [3], [2]), (5, [75, 0], [1, 0])):
        again = run(q, size, [LENGTH, *others], [QUERIES, *counts], 1)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
    for chunk in (1, 3) if spelled == "gathered" else (3,):  # the prompt in chunks, other sequences beside them
        for begin in range(0, QUERIES, chunk):
            rows = slice(begin, min(begin + chunk, QUERIES))
            length = LENGTH - QUERIES + rows.stop
            part = run(q[rows], 7, [length, 20], [rows.stop - rows.start, 4], 2)
            assert torch.equal(part[0], out[rows])
            assert torch.equal(part[1], lse[:, rows])


@pytest.mark.skipif("split_kv" not in BACKENDS, reason="needs Triton's interpreter")
@pytest.mark.parametrize("parts", ["2", "1d1", "1d2"])
def test_parts_in_turn_give_the_bits_of_parts_side_by_side(parts):
    problem = PagedProblem.parse("b2 h4/2 q3 k96 d16 fp16 causal paged8 invariant")
    given = paged.paged_operands(problem, [(3, 90), (3, 17)])[0]
    wanted, *others = (
        paged.attend_paged(problem, given, f"split_kv[{rows}x16 w4 s1 {how}]")
        for rows, how in ((16, f"r{parts}"), (16, f"c{parts}"), (32, f"c{parts}"), (16, f"c{parts} once"))
    )
    for other in others:
        for one, another in zip(wanted, other, strict=True):
            assert torch.equal(one, another)


@pytest.mark.parametrize(
    ("prompt", "steps"),
    [("gathered", "gathered"), ("split_kv[32x16 w4 s1 r1d1]", "split_kv[16x16 w4 s1 c1d1]")][: 1 + ("split_kv" in BACKENDS)],
)
@pytest.mark.parametrize("window", [{"causal": True}, {"causal": False, "window": (37, 0)}])
def test_a_sequence_keeps_its_bits_as_it_grows_over_every_boundary(window, prompt, steps, monkeypatch):
    """Parts of 16, 32, 64 and 128 keys. Steps of a token and of three, all of them sequences of one call over one sequence's
    pages, against the prompt in one piece."""
    monkeypatch.setattr("rowmax.cpu.paged.PART", 16)
    length = 117
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    pages = [torch.randn(15, 8, 2, dim, generator=generator) for dim in (16, 8)]
    row, q = torch.randperm(15, generator=generator).to(torch.int32), torch.randn(length, 4, 16)
    options = {"batch_invariant": True, "return_lse": True, **window}
    lengths, cu = torch.tensor([length], dtype=torch.int32), torch.tensor([0, length])
    out, lse = attention_paged(q, *pages, row[None], lengths, cu_seqlens_q=cu, plan=prompt, **options)
    for queries in (1, 3):
        ends = torch.tensor([n + i for n in (16, 48, 112) for i in (-1, 0, 1, 2, 3)] + [3, length], dtype=torch.int32)
        rows = ends[:, None] - queries + torch.arange(queries)
        got, got_lse = attention_paged(q[rows], *pages, row.expand(len(ends), -1), ends, plan=steps, **options)
        assert torch.equal(got, out[rows])
        assert torch.equal(got_lse.transpose(1, 2), lse.T[rows])


@pytest.mark.parametrize("spelled", PLANS)
@pytest.mark.parametrize(
    "text", ["b2 h4/2 q3 k96 d16 fp16 causal paged8 invariant", "b2 h4/2 q2 k96 d16/24 fp32 window(9,1) paged8 invariant"]
)
def test_it_is_right(spelled, text):
    problem = PagedProblem.parse(text)
    report = paged.check_paged(problem, [(problem.len_q, 90), (problem.len_q, 1)], plan=spelled)
    assert report.ok, str(report)


def test_the_plan_has_one_tile_for_all_calls_of_a_kind():
    """Keys of a turn and of a part must not depend on the batch, the queries or the device's size. Rows may: tiles of 16 and of
    32 give the same bits (kernels/test_decode_compile.py, and on a GPU gpu_invariance.py)."""
    tiles = set()
    for text in ("b1 h32/8 q1 k8192", "b64 h32/8 q1 k131072", "b1 h32/8 q5000 k8192", "b8 h32/8 q4096 k8192"):
        chosen = plan(PagedProblem.parse(f"{text} d128 bf16 causal paged16 invariant"), Device.named("H200"))
        tile = chosen.tiles[0]
        assert tile.how in "cr"
        assert tile.block_m <= 32
        tiles.add((tile.block_n, tile.warps, tile.parts, tile.doubles))
    assert len(tiles) == 1


def test_it_leaves_no_choice_of_splits():
    pages = torch.zeros(2, 4, 1, 8)
    with pytest.raises(ProblemError, match="leave num_splits out"):
        attention_paged(
            torch.zeros(1, 1, 8), pages, pages, torch.tensor([[0]]), torch.tensor([3]), batch_invariant=True, num_splits=2
        )
