"""A bias and a mask in the Hopper forward: their ring simulated and mutated, and when the plan takes the kernel for them."""

import os

import numpy as np
import pytest
import torch

from rowmax import Device, Problem, plan, testing
from rowmax.problem import aligned_pairs

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the second kernel runs in Triton's interpreter", allow_module_level=True)

import simulate
from gluon_mutants import DYNAMIC, LAZY, ONE, QUEUE, SKIPS, STATIC, THREE, only
from simulate_scores import ptx
from test_gluon_simulation import fails

from rowmax.plan.hopper import HopperTile

H200 = Device.named("H200")
EACH = "b2 h4/2 q90 k140 d64 bf16 causal bias(bhqk)"
KEYS = "b2 h2 q70 k100 d64 fp16 bias(bk)"
TALL = "b2 h2/1 q130 k76 d64 bf16 causal bias(qk)"  # with rows that see nothing
SHOWN = "b2 h2 q130 k70 d64 bf16 mask(hqk)"
CASES = [
    (EACH, LAZY, "normal"),
    ("b1 h2 q200 k200 d128 fp16 causal bias(hqk)", SKIPS, "spiky"),
    (TALL, DYNAMIC, "normal"),
    ("b1 h1 q100 k130 d192/128 bf16 bias(hqk)", QUEUE, "normal"),
    ("b2 h2 q70 k90 d64 bf16 window(30,9) bias(bqk) sink", THREE, "normal"),
    ("b1 h2 q70 k70 d96 bf16 bias(hqk,fp32) scale=-0.2", ONE, "normal"),
    ("b1 h2/1 q70 k100 d256 bf16 causal bias(hqk)", "128x32 s2 q1 dynamic", "normal"),
    ("b1 h4/2 q70 k100 d64 bf16 causal alibi bias(hqk) sink", LAZY, "normal"),
    ("b2 h2 q70 k100 d64 fp16 alibi(batch) mask(bqk)", QUEUE, "normal"),
    ("b1 h4/2 q70 k100 d64 bf16 causal softcap=4.0 alibi bias(hqk)", LAZY, "spiky"),
    ("b1 h2 q70 k100 d64 fp16 softcap=50.0 bias(qk) sink", DYNAMIC, "spiky(9)"),
    ("b2 h2 q70 k100 d64 bf16 causal softcap=8.0 mask(bqk)", QUEUE, "spiky"),
    (KEYS, STATIC, "normal"),
    ("b1 h2 q90 k90 d64 fp16 causal bias(hk)", QUEUE, "nan(v)"),
    (SHOWN, DYNAMIC, "normal"),
    ("b2 h2 q70 k90 d64 bf16 causal mask(bk)", "128x32 s3 q1 lazy dynamic", "normal"),
    ("b1 h4/2 q90 k140 d64 fp16 window(50,9) mask(bqk) sink", LAZY, "nan(v)"),
]


@pytest.mark.parametrize(("text", "tile", "kind"), CASES)
def test_what_is_given_for_pairs_reaches_its_scores(text, tile, kind):
    problem = Problem.parse(text)
    operands = testing.operands(problem, kind)
    assert aligned_pairs(operands.bias, operands.mask)
    out, lse, suspect = simulate.forward(problem, operands, HopperTile.parse(tile), late=len(text) % 2 == 0)
    report = testing.check_forward(problem, operands, out, lse)
    assert report.ok, str(report)
    assert bool((suspect == 1).any()) == kind.startswith("nan")


def test_a_broadcast_bias_is_read_as_one_that_is_shared():
    problem = Problem.parse("b2 h4/2 q70 k80 d64 bf16 bias(bhqk)")
    operands = testing.operands(problem)
    for shared in (operands.bias[:1, :, :1], operands.bias[:, 2:3]):
        bias = shared.expand(operands.bias.shape)
        assert aligned_pairs(bias)
        out, lse, _ = simulate.forward(problem, operands._replace(bias=bias), HopperTile.parse(LAZY))
        report = testing.check_forward(problem, operands._replace(bias=bias), out, lse)
        assert report.ok, str(report)


@pytest.mark.parametrize("words", ["bf16 causal bias(hqk)", "bf16 bias(hqk,fp32)", "fp16 bias(k)"])
def test_the_lowest_number_is_one_and_minus_infinity_is_none(words):
    """A row of nothing else is a row of ties, of those keys that are not hidden; as the portable kernel has it, bit by bit."""
    problem = Problem.parse(f"b1 h2 q66 k72 d64 {words}")
    operands = testing.operands(problem, "v_index")
    bias = operands.bias.fill_(torch.finfo(operands.bias.dtype).min)
    bias[..., 0] = -torch.inf
    out, lse, suspect = simulate.forward(problem, operands, HopperTile.parse(LAZY))
    want, want_lse = testing.attend(problem, operands, plan="q_outer[32x32 w4 s2]")
    assert not bool(suspect.any())
    if problem.dtype == torch.float16:  # not so low that it is added to nothing else
        torch.testing.assert_close(lse, want_lse, rtol=2**-22, atol=0.0)
        torch.testing.assert_close(out, want, rtol=2**-9, atol=1e-5)
        return
    assert torch.equal(lse, want_lse)
    seen = torch.arange(72)[None] <= torch.arange(66)[:, None] + 6 if problem.band.right == 0 else torch.ones(66, 72).bool()
    seen = seen[:, 1:].double()
    ties = (seen @ operands.v[0, 1:, 0, 0].double()) / seen.sum(1)
    torch.testing.assert_close(out[0, :, 0, 0].double(), ties, rtol=2**-7, atol=0.0)
    assert torch.equal(out, want)


@pytest.mark.parametrize("what", ["infinity", "hidden"])
def test_numbers_that_are_none(what):
    """Infinity is what the portable kernel takes it for; NaN has no effect at keys that the band hides."""
    problem = Problem.parse("b1 h2 q70 k80 d64 fp16 causal bias(hqk)")
    operands = testing.operands(problem)
    want = testing.attend(problem, operands, plan="q_outer[32x32 w4 s2]")
    if what == "infinity":
        operands.bias[..., 30] = torch.inf
        want = testing.attend(problem, operands, plan="q_outer[32x32 w4 s2]")
    else:
        operands.bias.masked_fill_(torch.arange(80)[None] > torch.arange(70)[:, None] + 10, torch.nan)
    out, lse, _ = simulate.forward(problem, operands, HopperTile.parse(LAZY))
    torch.testing.assert_close(out, want[0], rtol=2**-9, atol=2**-9)
    torch.testing.assert_close(lse, want[1], rtol=1e-6, atol=1e-5)


def test_a_bias_is_added_towards_zero():
    """As it is written: what is finite stays so, and the result is within a unit in the last place."""
    x = np.float32([0.0, 1.5, -3e30, np.inf, 0.0, -3.4e38, 2.0, 1e-3])
    for bias in (-3.3895e38, -3.4e38, 3.4e38, 0.7, -np.inf):
        for one in x:
            (found,) = ptx("add_product", np.float32([one]), np.float32([bias]), 1.4426950408889634)
            exact = np.float64(one) + np.float64(np.float32(bias)) * np.float64(np.float32(1.4426950408889634))
            if np.isfinite([one, bias]).all():
                assert abs(found - exact) <= 2**-23 * abs(exact) or abs(found) == np.finfo(np.float32).max < abs(exact)
            else:
                assert found == exact or np.isnan([found, exact]).all()


# ---- mutants -----------------------------------------------------------------------------------------------------------------

AWAIT = "    wait_full(ring, turn, BUILD.GIVEN_STAGES, wanted, MEMBER, BUILD.CONSUMERS)\n"
LOAD = "            given = tile.reshape([BUILD.GIVEN_ROWS, BUILD.BLOCK_N]).load(s.type.layout)\n"
FREE = "        release_read(ring, turn, BUILD.GIVEN_STAGES, MEMBER, BUILD.CONSUMERS)\n"
BEHIND_BIAS, BEHIND_MASK = FREE + "        return add_product", FREE + "        second ="
SIZE, LOADS = "source.block_type.nbytes)\n", "    tma_load(source, [b, head"
# name -> (replacements, problem, tile)
MUTANTS = {
    "not awaited": (only(AWAIT), EACH, LAZY),
    "awaited behind the last tile": (only("turn, key_tile >= 0, CONSUMER", "turn, True, CONSUMER"), EACH, LAZY),
    "never given back": (only(BEHIND_BIAS, "        return add_product"), EACH, LAZY),
    "a mask never given back": (only(BEHIND_MASK, "        second ="), SHOWN, LAZY),
    "given back before it is read": (only(LOAD, "    " + FREE + LOAD, BEHIND_BIAS, "        return add_product"), EACH, LAZY),
    "given back without a fence": (only(BEHIND_BIAS, BEHIND_BIAS.replace("_read", "")), EACH, LAZY),
    "given back twice": (only(BEHIND_BIAS, FREE + BEHIND_BIAS), EACH, LAZY),
    "the tile of the first consumer": (
        only("GIVEN_STAGES, MEMBER, BUILD.CONSUMERS) * BUILD", "GIVEN_STAGES, 0, BUILD.CONSUMERS) * BUILD"),
        EACH,
        LAZY,
    ),
    "buffers side by side": (only("buffers.index(i * APART)", "buffers.index(i)"), KEYS, STATIC),
    "read side by side": (only("MEMBER, BUILD.CONSUMERS) * BUILD.GIVEN_APART", "MEMBER, BUILD.CONSUMERS)"), KEYS, STATIC),
    "not awaited to be empty": (
        only("STAGES) ^ 1)\n    mbarrier.expect(full.index(i), source.block_type.nbytes)\n    tma_load(source, [b, head",
             "STAGES))\n    mbarrier.expect(full.index(i), source.block_type.nbytes)\n    tma_load(source, [b, head"),
        EACH,
        LAZY,
    ),
    "half of its bytes": (
        only(SIZE + LOADS, SIZE.replace(")", " // 2)") + LOADS),
        EACH,
        LAZY,
    ),
    "rows of the first consumer": (only("row + c * ROWS if BUILD", "row if BUILD"), EACH, LAZY),
    "the first rows": (only("own = row + c * ROWS", "own = c * ROWS"), TALL, DYNAMIC),
    "the last keys": (only("head * BUILD.GIVEN_HEAD, own, col)", "head * BUILD.GIVEN_HEAD, own, first)"), EACH, LAZY),
    "of the first head": (only("head * BUILD.GIVEN_HEAD", "head * 0"), EACH, LAZY),
    "of the KV head": (only("head * BUILD.GIVEN_HEAD", "group * BUILD.GIVEN_HEAD"), EACH, LAZY),
    "of the first sequence": (only("place = (b * BUILD.GIVEN_BATCH", "place = (b * 0"), EACH, LAZY),
    "in natural units": (only("given.to(gl.float32), LOG2E)", "given.to(gl.float32), 1.0)"), EACH, LAZY),
    "the mask of the other neighbour": (only("0xFF, 0xFF00", "0xFF00, 0xFF"), SHOWN, DYNAMIC),
    "a row without keys is NaN": (only('FIRST or BUILD.BANDED or BUILD.GIVEN != ""', "FIRST or BUILD.BANDED"), SHOWN, DYNAMIC),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_what_is_given_fails(name):
    replacements, text, tile = MUTANTS[name]
    problem = Problem.parse(text)
    assert fails(replacements, problem, testing.operands(problem), tile, False, 4), f"mutant '{name}' lives"


# ---- plan --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["bias(hqk)", "bias(hqk,fp32)", "bias(bk)", "mask(bhqk)", "bias(qk) sink", "mask(k) sink"])
@pytest.mark.parametrize("dims", ["64", "96", "128", "192/128", "256"])
def test_the_plan_takes_hopper_and_its_tile_fits(words, dims):
    from rowmax.plan.hopper import SHARED_BYTES, shared_bytes

    problem = Problem.parse(f"b2 h16 q4096 k4096 d{dims} bf16 causal {words}")
    found = plan(problem, H200)
    assert found.algorithm == "hopper"
    assert shared_bytes(problem, found.tiles[0]) <= SHARED_BYTES


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("bias(hqk) mask(bk)", "a bias or a mask, not both"),
        ("bias(hq)", "whose last dimension is that of the keys"),
        ("bias(1)", "whose last dimension is that of the keys"),
        ("bias(hqk) dropout=0.1", "no dropout"),
    ],
)
def test_what_it_refuses(words, reason):
    found = plan(Problem.parse(f"b2 h16 q4096 k4096 d128 bf16 causal {words}"), H200)
    assert found.algorithm == "q_outer"
    assert reason in dict(found.refusals)["hopper"]


def test_rows_that_tma_does_not_take():
    """Contiguous ones as they would lie; given ones as they do."""

    def chosen(words, **options):
        return plan(Problem.parse(f"b2 h16 q4096 {words}"), H200, **options)

    for words, taken in (
        ("k4100 d128 bf16 bias(hqk)", False),
        ("k4100 d128 bf16 bias(hqk,fp32)", True),
        ("k4104 d128 bf16 bias(hqk)", True),
        ("k4104 d128 bf16 mask(qk)", False),
        ("k4099 d128 bf16 bias(k)", True),
        ("k4099 d128 bf16 bias(bk)", False),
    ):
        found = chosen(words)
        assert (found.algorithm == "hopper") == taken, words
        assert taken or "multiples of 16 bytes" in dict(found.refusals)["hopper"]
        assert chosen(words, pairs_aligned=True).algorithm == "hopper"
        assert chosen(words, pairs_aligned=False).algorithm == "q_outer"
    long = torch.zeros(1, 4, 8, 4112, dtype=torch.bfloat16)
    assert aligned_pairs(long, None, long[..., :4099], long[:, :1], long[:, :1].expand(-1, 4, -1, -1), long[..., 8:])
    for wrong in (long[..., 1:], long.transpose(2, 3), long[..., ::2], long[..., :4100].contiguous()):
        assert not aligned_pairs(wrong)
