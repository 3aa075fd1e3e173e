"""Operands are reproducible, have the values that their kind promises, and lie where their layout says."""

import pytest
import torch

from rowmax import Problem, reference, testing

DENSE = Problem.parse("b2 h4/2 q40 k56 d32 bf16 causal")
PACKED = Problem.parse("b4 h4/2 q50 k50 d32 fp16 packed")
SQUARE = Problem.parse("b2 h4/2 q24 k24 d16 fp32")


@pytest.mark.parametrize("kind", testing.KINDS)
@pytest.mark.parametrize("problem", [DENSE, PACKED, SQUARE], ids=str)
def test_every_kind_fits_the_problem_and_repeats(problem, kind):
    one, other = testing.operands(problem, kind, seed=3), testing.operands(problem, kind, seed=3)
    assert Problem.describe(one, left=problem.band.left, right=problem.band.right) == problem
    for a, b in zip(one, other, strict=True):
        assert a is b is None or torch.equal(a.nan_to_num(nan=3.0), b.nan_to_num(nan=3.0))
    if kind == "normal":
        assert not torch.equal(one.q, testing.operands(problem, kind, seed=4).q)


@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_layouts_hold_the_same_values(layout):
    """Broadcast repeats the first KV head; nothing else differs."""
    plain, placed = testing.operands(SQUARE), testing.operands(SQUARE, layout=layout)
    assert torch.equal(placed.q, plain.q)
    if layout == "broadcast":
        assert placed.k.stride(2) == 0
        assert torch.equal(placed.k[:, :, 1], plain.k[:, :, 0])
    else:
        assert torch.equal(placed.k, plain.k)
    assert all(t.stride(-1) == 1 for t in placed[:3])
    assert placed.q.is_contiguous() == (layout in ("contiguous", "broadcast"))


def test_fused_needs_one_shape():
    with pytest.raises(ValueError, match="'fused' needs equal lengths and head dimensions; got"):
        testing.operands(DENSE, layout="fused")


@pytest.mark.parametrize(("argument", "known"), [({"kind": "odd"}, "shift"), ({"layout": "diagonal"}, "broadcast")])
def test_unknown_names_list_the_known_ones(argument, known):
    with pytest.raises(ValueError, match=f"must be one of .*{known}"):
        testing.operands(DENSE, **argument)


def test_lengths_are_taken_or_drawn():
    given = testing.operands(PACKED, lengths=((10, 5), (0, 20), (30, 0), (2, 2)))
    assert given.cu_seqlens_q.tolist() == [0, 10, 10, 40, 42]
    assert given.cu_seqlens_k.tolist() == [0, 5, 25, 25, 27]
    drawn = testing.operands(PACKED).cu_seqlens_q.tolist()
    assert drawn[0] == 0
    assert drawn[-1] == 50
    assert drawn == sorted(drawn)
    with pytest.raises(ValueError, match="4 pairs within the totals"):
        testing.operands(PACKED, lengths=((10, 5),))
    with pytest.raises(ValueError, match="within the totals"):
        testing.operands(PACKED, lengths=((50, 5), (1, 1), (0, 0), (0, 0)))


def logits(problem, operands):
    q, k = operands.q.double(), operands.k.double().repeat_interleave(problem.group, -2)
    return torch.einsum("bihd,bjhd->bhij", q, k) * problem.scale


def test_shift_moves_all_logits():
    s = logits(DENSE, testing.operands(DENSE, "shift(-1000)"))
    assert float((s + 1000).abs().max()) < 8


def test_probe_points_at_one_key_within_and_one_past_every_edge():
    problem = Problem.parse("b1 h2 q40 k56 d64 fp32 window(6,3)")
    top = logits(problem, testing.operands(problem, "probe")).argmax(-1)[0, 0]
    distance = top - torch.arange(40) - 16
    assert {-7, -6, 0, 3, 4} <= set(distance.tolist())
    assert {0, 55} <= set(top.tolist())


def test_probe_makes_a_mask_off_by_one_an_error_of_order_one():
    problem = Problem.parse("b1 h2 q40 k56 d64 bf16 window(6,3)")
    operands = testing.operands(problem, "probe")
    right = reference.attention(*(t.double() for t in operands[:3]), left=6, right=3)[0]
    for left, more in ((5, 3), (7, 3), (6, 2), (6, 4)):
        wrong = reference.attention(*(t.double() for t in operands[:3]), left=left, right=more)[0]
        assert float((wrong - right).abs().max()) > 0.5


def test_overflow_exceeds_fp16_before_the_scale():
    problem = Problem.parse("b1 h1 q8 k8 d128 fp16")
    operands = testing.operands(problem, "overflow")
    assert float(logits(problem.with_(scale=1.0), operands).max()) > 65504


def test_one_element_is_not_finite():
    for kind, name in (("nan(q)", "q"), ("nan(k)", "k"), ("nan(v)", "v"), ("inf(v)", "v")):
        operands = testing.operands(DENSE, kind)
        counts = {n: int((~torch.isfinite(getattr(operands, n))).sum()) for n in "qkv"}
        assert counts == {**dict.fromkeys("qkv", 0), name: 1}


def test_margins_notice_a_write():
    for gap, offset in ((0, 0), (16, 0), (1, 1)):
        for index in (-1, 3 if gap else 8):
            tensor = testing.carve(torch.ones(2, 4, 1), gap=gap, offset=offset)
            assert testing.margins_intact(tensor)
            assert bool((tensor == 1).all())
            storage = torch.empty(0).set_(tensor.untyped_storage())
            storage[tensor.storage_offset() + (index if gap == 0 or index < 0 else 1)] = 0.0
            assert not testing.margins_intact(tensor)
    assert testing.margins_intact(testing.carve(torch.zeros(3, dtype=torch.int32)))


def test_poisoned_memory_is_nan_and_stops_being_so():
    before = torch.are_deterministic_algorithms_enabled()
    with testing.poisoned():
        assert bool(torch.isnan(torch.empty(1000)).all())
        assert bool(torch.isnan(torch.zeros(3).new_empty(1000)).all())
        assert bool(torch.isnan(torch.empty_like(torch.zeros(1000, dtype=torch.bfloat16))).all())
    assert torch.are_deterministic_algorithms_enabled() == before
