"""Soft-caps, biases and masks in the Hopper backward: simulated and mutated, PTX beside fp64, and when the plan takes it."""

import os

import numpy as np
import pytest
import torch

from rowmax import Device, Problem, plan, reference, testing

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels before and behind run in Triton's interpreter", allow_module_level=True)

import simulate_backward
from gluon_mutants import only
from simulate_scores import ptx
from test_gluon_backward_simulation import PLAIN, WIDE, fails, run

from rowmax.kernels.gluon import backward_names
from rowmax.plan.hopper_backward import SHARED_BYTES, HopperBackwardTile, bias_tile, shared_bytes, slots

H200 = Device.named("H200")
CAPPED = "b1 h4/2 q130 k200 d64 bf16 causal softcap=2.0"
EACH = "b2 h4/2 q130 k200 d64 bf16 causal bias(bhqk)"
LONG = "b1 h2 q330 k136 d128 bf16 bias(hqk)"  # three tiles in flight
SHOWN = "b2 h2 q130 k144 d64 fp16 mask(bqk)"
KEYS = "b2 h4/2 q130 k208 d64 bf16 mask(bk)"
CASES = [
    (CAPPED, WIDE, "spiky"),
    ("b1 h2 q200 k300 d128 bf16 causal softcap=50.0", PLAIN, "normal"),
    ("b1 h2 q70 k130 d64 fp16 causal softcap=2.0 scale=-0.1", WIDE, "spiky(90)"),
    ("b1 h2 q129 k130 d72/40 bf16 window(40,3) softcap=5.0", PLAIN, "spiky"),
    ("b2 h4/2 q200 k129 d64 bf16 causal softcap=3.0", f"{WIDE} p2", "normal"),  # with rows that see nothing
    ("b3 h4/2 q200 k200 d64 bf16 packed causal softcap=1.0", WIDE, "spiky"),
    (EACH, WIDE, "normal"),
    (LONG, PLAIN, "normal"),
    ("b2 h4/2 q130 k136 d128 fp16 causal bias(qk,fp32)", PLAIN, "spiky"),
    ("b1 h4/2 q200 k136 d64 bf16 causal bias(hqk)", f"{WIDE} p2", "normal"),
    ("b1 h2 q130 k136 d64 bf16 causal alibi bias(hk)", WIDE, "normal"),
    (KEYS, WIDE, "normal"),
    (SHOWN, WIDE, "normal"),
    ("b2 h2 q130 k144 d128 bf16 window(40,20) bias(bk)", PLAIN, "normal"),
]


@pytest.mark.parametrize(("text", "tile", "kind"), CASES)
def test_scores_that_are_bent_or_given_reach_the_gradients(text, tile, kind):
    problem = Problem.parse(text)
    report, suspect = run(problem, testing.operands(problem, kind), tile, late=len(text) % 2 == 0)
    assert report.ok, str(report)
    assert not bool((suspect == 1).any()), "finite operands, yet keys are computed once more"


def test_weights_that_are_no_normal_numbers_are_zero_and_the_rule_knows():
    """A key that one query sees has a dV of its weight alone, down to exp(-100): 43 times a bound that forgets it."""
    problem = Problem.parse("b1 h2 q1 k700 d64 bf16 softcap=50.0")
    operands = testing.operands(problem, "spiky(60)")
    report, _ = run(problem, operands, WIDE)
    assert report.ok, str(report)
    report = testing.check(problem, "spiky(60)", plan="q_outer")
    assert report.ok, str(report)


def hidden_keys_have_no_say(problem, backward) -> None:
    """A large score that a query does not see changes nothing, bit by bit. `backward`: of all that a gradient is made of."""
    operands = testing.operands(problem)
    out, lse = testing.attend(problem, operands)
    hidden = ~reference.visible(64, 80, *problem.band)[:60].any(0)  # from all rows but the last ones, whose gradient is 0
    grad_out, grad_lse = testing.cotangents(problem)
    grad_out[:, 60:], grad_lse[..., 60:] = 0.0, 0.0
    found = []
    for keys in (operands.k, operands.k.clone()):
        if found:
            keys[:, hidden] = 1e4
        found.append(backward(problem, operands._replace(k=keys), out, lse, grad_out, grad_lse))
    (dq, dk, dv, *_), (dq_again, dk_again, dv_again, *_) = found
    assert torch.equal(dq[:, :60], dq_again[:, :60])
    assert torch.equal(dk[:, ~hidden], dk_again[:, ~hidden])
    assert torch.equal(dv[:, ~hidden], dv_again[:, ~hidden])


def extreme_biases_are_as_in_the_portable_kernels(problem, value: str, backward) -> None:
    """`value`: "lowest" or "infinity", and the largest number."""
    from rowmax.kernels import launch

    operands = testing.operands(problem)
    if value == "lowest":
        operands.bias.fill_(torch.finfo(operands.bias.dtype).min)[..., 0] = -torch.inf
    else:
        operands.bias[..., 30] = torch.inf
        operands.bias[..., 3] = torch.finfo(operands.bias.dtype).max
    out, lse = testing.attend(problem, operands)
    rest = (out, lse, *testing.cotangents(problem))
    portable = plan(problem, H200, direction="backward", prefer="q_outer[16x16 w4 s1,32x32 w4 s1,32x32 w4 s1]")
    theirs = launch.backward(problem, operands, *rest, (True,) * 3, portable)
    for one, other in zip(backward(problem, operands, *rest)[:3], theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


def backward_by(tile: str):
    return lambda problem, operands, *rest: simulate_backward.backward(problem, operands, HopperBackwardTile.parse(tile), *rest)


def test_hidden_keys_have_no_say_in_how_a_cap_is_computed():
    hidden_keys_have_no_say(Problem.parse("b1 h1 q64 k80 d64 fp16 causal softcap=30.0"), backward_by(WIDE))


@pytest.mark.parametrize("words", ["bf16 causal bias(hqk)", "bf16 bias(hqk,fp32)", "fp16 bias(k)"])
@pytest.mark.parametrize("value", ["lowest", "infinity"])
def test_extreme_biases_are_what_the_portable_kernels_take_them_for(words, value):
    problem = Problem.parse(f"b1 h2 q66 k72 d128 {words}")
    extreme_biases_are_as_in_the_portable_kernels(problem, value, backward_by(PLAIN))


# ---- mutants -----------------------------------------------------------------------------------------------------------------

AWAIT = "    wait_full(ring, turn, BUILD.GIVEN_STAGES, True, CONSUMER, BUILD.CONSUMERS)\n"
LOAD = "        own = tile.reshape([BUILD.BLOCK_M, KEYS]).permute((1, 0)).load(x.type.layout)\n"
FREE = "        release_read(ring, turn, BUILD.GIVEN_STAGES, CONSUMER, BUILD.CONSUMERS)\n"
BRANCH = "    if BUILD.GIVEN_STAGES < BUILD.STAGES:\n"
MUTANTS = {
    "not awaited": (only(AWAIT), EACH, WIDE),
    "never given back": (only(FREE, "        pass\n"), EACH, WIDE),
    "given back before it is read": (only(LOAD, FREE + LOAD) + only(BRANCH + FREE, BRANCH + "        pass\n"), EACH, WIDE),
    "given back without a fence": (only(FREE, FREE.replace("_read", "")), EACH, WIDE),
    "given back twice": (only(FREE, FREE + FREE), EACH, WIDE),
    "the tile of the first consumer": (
        only("GIVEN_STAGES, CONSUMER, BUILD.CONSUMERS) * BUILD", "GIVEN_STAGES, 0, BUILD.CONSUMERS) * BUILD"), EACH, WIDE,
    ),
    "buffers side by side": (only("c, BUILD.CONSUMERS, BUILD.GIVEN_APART)", "c, BUILD.CONSUMERS, 1)"), KEYS, WIDE),
    "read side by side": (only("CONSUMER, BUILD.CONSUMERS) * BUILD.GIVEN_APART", "CONSUMER, BUILD.CONSUMERS)"), KEYS, WIDE),
    "keys of the first consumer": (only("own, first_key + c * KEYS)", "own, first_key)"), EACH, WIDE),
    "the first rows": (only("own = row if BUILD.GIVEN_ROWS", "own = 0 if BUILD.GIVEN_ROWS"), LONG, PLAIN),
    "of the first head": (only("head * BUILD.GIVEN_HEAD", "head * 0"), EACH, WIDE),
    "of the KV head": (only("fetch_given(given, b, member + line,", "fetch_given(given, b, head,"), EACH, WIDE),
    "of the first sequence": (only("place = (b * BUILD.GIVEN_BATCH", "place = (b * 0"), EACH, WIDE),
    "what the mask hides shown": (only("gl.where(own != 0,", "gl.where(own == 0,"), SHOWN, WIDE),
    "hidden keys are no lower than others": (only("len_k, band, LOWEST)", "len_k, band, 0.0)"), CAPPED, WIDE),
    "scores in units of log2": (only("s * as_number(_note(notes, NOTES))", "s * scale_log2"), CAPPED, WIDE),
    "the cap in natural units": (only("as_bits(cap[1])", "as_bits(cap[1] / 1.4426950408889634)"), CAPPED, WIDE),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name):
    replacements, text, tile = MUTANTS[name]
    problem = Problem.parse(text)
    assert fails(replacements, problem, testing.operands(problem, "spiky"), tile), f"mutant '{name}' lives"


# ---- PTX ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [0.5, 8.0, 50.0, 1000.0])
def test_weights_and_their_derivative_keep_their_digits(cap):
    """Against fp64: P as far as its exponent is known, and 1 - t^2 to 2^-14 of itself, however near to 1 t is."""
    near = np.float32(np.linspace(-0.5999, 0.5999, 64))
    others = [1e-30, 0.0, 0.6, -0.6, 20.0, -20.0, 40.0, 1e9, -1e9, 0.59, 0.3, 0.1, np.inf, -np.inf]
    far = np.float32(np.concatenate([np.linspace(-9, 9, 50), others]))
    unit = np.float32(cap * 1.4426950408889634)
    for z, away in ((near, 0.0), (far, 1.0), (near, 1.0)):
        t = np.tanh(np.float64(z))
        for lse in (unit, np.float32(0.0) * unit):
            given = (z, np.float32(lse), unit, np.float32(away))
            p, g = ptx("capped_weights", *given, source=backward_names, dtype=None, count=64)
            wide = np.float64(unit) * t - np.float64(lse)
            known = np.isfinite(p)
            with np.errstate(over="ignore"):
                exact = np.exp2(wide)
            rounding = np.float64(unit) * 2.0**-22 + 2.0**-22
            assert np.all(np.abs(p - exact)[known] <= np.expm1(rounding) * exact[known] + 1e-37)
            derivative = 1 / np.cosh(np.clip(np.float64(z), -350, 350)) ** 2
            wanted = exact * derivative
            some = known & (wanted > 1e-30)
            assert np.all(np.abs(g - wanted)[some] <= (np.expm1(rounding) + 2.0**-14) * wanted[some])


def test_what_is_hidden_has_no_weight():
    for away in (0.0, 1.0):
        z = np.float32([backward_names.HIDDEN, 0.5] * 2)
        given = (z, np.float32([3.0, 3.0, -200.0, np.inf]), np.float32(70.0), np.float32(away))
        p, g = ptx("capped_weights", *given, source=backward_names, dtype=None, count=4)
        assert p[0] == g[0] == p[2] == g[2] == p[3] == g[3] == 0.0
        given = (np.float32([np.nan, 0.1]), np.float32(0.0), np.float32(70.0), np.float32(away))
        p, g = ptx("capped_weights", *given, source=backward_names, dtype=None, count=2)
        assert np.isnan(p[0])
        assert np.isnan(g[0])


# ---- plan --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["softcap=50.0", "bias(hqk)", "bias(bk,fp32)", "mask(bhqk)", "alibi mask(k)"])
@pytest.mark.parametrize("dims", ["64", "96", "128", "72/40"])
def test_the_plan_takes_hopper_and_its_tile_fits(words, dims):
    problem = Problem.parse(f"b2 h16/4 q4096 k4096 d{dims} bf16 causal {words}")
    found = plan(problem, H200, direction="backward")
    assert found.algorithm == "hopper"
    assert shared_bytes(problem, found.tiles[0]) <= SHARED_BYTES


@pytest.mark.parametrize(
    ("words", "turns"),
    [("d64", 2), ("d128", 2), ("d64 bias(hqk)", 1), ("d128 bias(hqk,fp32)", 1), ("d128 mask(k)", 2), ("d64 mask(k)", 1)],
)
def test_in_order_dq_of_two_turns_waits_where_there_is_room(words, turns):
    problem = Problem.parse(f"b2 h16/4 q4096 k4096 bf16 causal {words} deterministic")
    (tile,) = plan(problem, H200, direction="backward").tiles
    assert tile.ordered
    assert slots(problem, tile) == turns
    assert shared_bytes(problem, tile) <= SHARED_BYTES


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("d128 softcap=50.0 alibi", "a soft-cap without ALiBi, biases and masks only"),
        ("d128 softcap=50.0 mask(bk)", "a soft-cap without ALiBi, biases and masks only"),
        ("d64 bias(hqk,fp32)", "bytes of shared memory"),
        ("d128 bias(hqk) mask(bk)", "a bias or a mask, not both"),
    ],
)
def test_what_it_refuses(words, reason):
    found = plan(Problem.parse(f"b2 h16 q4096 k4096 bf16 causal {words}"), H200, direction="backward")
    assert found.algorithm == "q_outer"
    assert reason in dict(found.refusals)["hopper"]


@pytest.mark.parametrize(
    ("words", "tile"),
    [
        ("b2 h4 bias(bhqk)", "64x128 w4 s2"),
        ("b1 h4 bias(hqk)", "64x128 w4 s2"),
        ("b2 h4 bias(hqk)", "64x32 w4 s2 tma"),  # a walk over the batch
        ("b1 h4 bias(hk)", "64x32 w4 s2 tma"),
        ("b1 h4 alibi bias(hqk,fp32)", "64x128 w4 s2"),
        ("b1 h4 d192/128 bias(hqk)", "64x64 w4 s2"),
        ("b2 h4 d256 bias(hqk)", "128x32 w8 s3"),
    ],
)
def test_a_gradient_that_is_no_sum_over_tiles_takes_the_larger_ones(words, tile):
    dims = "" if " d" in words else "d64"
    assert str(bias_tile(Problem.parse(f"q400 k400 {dims} bf16 {words}"))) == tile
