"""Soft-caps, ALiBi, biases and masks in the Hopper backward above 128 head dimensions: simulated, mutated, and when planned.

What bends scores of keys is `backward_scores.py`, whose own mutants are in `test_gluon_backward_scores.py`.
"""

import os

import pytest
import torch

from rowmax import Device, Problem, plan, testing

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels before and behind run in Triton's interpreter", allow_module_level=True)

import simulate_backward_wide
from gluon_mutants import only
from test_gluon_backward_scores import extreme_biases_are_as_in_the_portable_kernels, hidden_keys_have_no_say
from test_gluon_backward_wide_simulation import ACROSS, DOWN, fails, non_finite, run, tile_of

from rowmax.plan.hopper_wide import SHARED_BYTES, given_stages, shared_bytes, shares

H200 = Device.named("H200")
CAPPED, FLAT = "b1 h4/2 q130 k200 d136 bf16 causal softcap=2.0", "b1 h2 q200 k100 d136 bf16 softcap=2.0"
SLOPED, AROUND = "b2 h4/2 q130 k200 d136 bf16 causal alibi(batch)", "b1 h2 q130 k200 d136 fp16 alibi"
PACKED = "b3 h4/2 q200 k200 d136 bf16 packed causal alibi(batch)"
EACH = "b2 h4/2 q130 k200 d136 bf16 causal bias(bhqk)"
LONG = "b1 h2 q330 k136 d256 bf16 bias(hqk)"  # key tiles of 32, and one place for P
BELOW = "b1 h2 q128 k400 d256 bf16 causal bias(hqk)"  # the first consumer's rows see two of those less
SHOWN = "b2 h2 q130 k144 d144 fp16 mask(bqk)"
KEYS = "b2 h4/2 q130 k208 d136 bf16 mask(bk)"
CASES = [
    (CAPPED, "spiky"),
    ("b1 h2 q200 k300 d256 bf16 causal softcap=50.0", "normal"),
    ("b1 h2 q70 k130 d256 fp16 softcap=2.0 scale=-0.1", "spiky(90)"),
    ("b1 h2 q129 k130 d192/128 bf16 window(40,3) softcap=5.0", "spiky"),
    ("b2 h4/2 q200 k129 d256 bf16 causal softcap=3.0", "normal"),  # with rows that see nothing
    ("b3 h4/2 q200 k200 d256 bf16 packed causal softcap=1.0", "spiky"),
    (SLOPED, "normal"),
    ("b1 h2 q200 k130 d256 bf16 causal alibi", "spiky"),
    (AROUND, "normal"),
    ("b1 h4/2 q129 k130 d64/256 bf16 window(40,0) alibi", "normal"),
    ("b3 h4/2 q150 k200 d256 bf16 packed window(40,20) alibi(batch)", "normal"),
    ("b1 h2 q130 k130 d192/128 bf16 causal alibi sink", "normal"),
    (EACH, "normal"),
    (LONG, "normal"),
    (BELOW, "normal"),
    ("b2 h4/2 q130 k136 d256 fp16 causal bias(qk,fp32)", "spiky"),  # with one tile in flight
    ("b1 h4/2 q200 k136 d192/128 bf16 window(70,9) bias(hqk)", "normal"),
    ("b1 h2 q130 k136 d256 bf16 causal alibi bias(hk)", "normal"),
    (KEYS, "normal"),
    (SHOWN, "normal"),
    ("b2 h2 q130 k144 d256 fp16 mask(bqk)", "normal"),
    ("b2 h2 q130 k144 d256 bf16 window(40,20) bias(bk)", "normal"),
    ("b2 h4/2 q70 k144 d256 bf16 causal mask(hqk) sink", "spiky"),
]


@pytest.mark.parametrize(("text", "kind"), CASES)
def test_scores_that_are_bent_or_given_reach_the_gradients(text, kind):
    problem = Problem.parse(text)
    report, marks = run(problem, testing.operands(problem, kind), late=len(text) % 2 == 0)
    assert report.ok, str(report)
    assert not bool((marks == 1).any()), "finite operands, yet something is computed once more"


def backward(problem, operands, *rest):
    return simulate_backward_wide.backward(problem, operands, tile_of(problem), *rest)


def test_hidden_keys_have_no_say_in_how_a_cap_is_computed():
    hidden_keys_have_no_say(Problem.parse("b1 h1 q64 k80 d136 fp16 causal softcap=30.0"), backward)


@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
@pytest.mark.parametrize(
    "words", ["b2 h2/1 q70 k140 d136 fp16 causal softcap=2.0", "b3 h2/1 q150 k150 d144 fp16 packed alibi(batch)"]
)
def test_a_value_that_is_not_finite_reaches_what_sees_it_and_nothing_else(where, words):
    """What is computed once more is bent as well."""
    grads, _, expected = non_finite(where, words)
    for mine, theirs in zip(grads, expected, strict=True):
        assert torch.equal(mine.isfinite(), theirs.isfinite())
        assert float((mine - theirs)[theirs.isfinite()].abs().max()) < 0.1


@pytest.mark.parametrize("words", ["bf16 causal bias(hqk)", "bf16 bias(hqk,fp32)", "fp16 bias(k)"])
@pytest.mark.parametrize("value", ["lowest", "infinity"])
def test_extreme_biases_are_what_the_portable_kernels_take_them_for(words, value):
    problem = Problem.parse(f"b1 h2 q66 k72 d136 {words}")
    extreme_biases_are_as_in_the_portable_kernels(problem, value, backward)


# ---- mutants -----------------------------------------------------------------------------------------------------------------

SHIFT = "shift = _note(notes, LEN_K) - _note(notes, LEN_Q)"
OWN, OWN_KEYS = (
    "slopes_ptr += (b + sequence).to(gl.int64) * heads",
    "slopes_ptr += (b + sequence).to(gl.int64) * (heads * BUILD.GROUP)",
)
AWAIT = "    wait_full(ring, turn, BUILD.GIVEN_STAGES, True, CONSUMER, CONSUMERS)\n"
FREE = "    release_read(ring, turn, BUILD.GIVEN_STAGES, CONSUMER, CONSUMERS)\n"
PLACE_OF_P = "shares.index(buffer_of(turn, BUILD.SHARES))"
READ_P = f"    p = gl.convert_layout(_from_own({PLACE_OF_P}.load(own_layout())), score_layout(QUERIES))\n"
OWN_ROW = "row = _note(notes, COL) + CONSUMER * ROWS\n    if BUILD.CAP"
NEXT_COL = "next_col = key_tile_start(turn + 1,"
COLUMN = "_note(notes, COL), col - begin)"
IF_ONE, FREE_P = "    if BUILD.SHARES < BUILD.STAGES:\n", "        release(share_ring, turn, BUILD.SHARES)\n"
# name -> (replacements, problem, kernel)
MUTANTS = {
    # dQ
    "scores in units of log2": (only("s * as_number(_note(notes, NOTES))", "s * scale_log2"), CAPPED, ACROSS),
    "the cap in natural units": (only("as_bits(cap[1])", "as_bits(cap[1] / 1.4426950408889634)"), CAPPED, ACROSS),
    "no derivative of the cap": (only("    _weights, p = capped", "    p, _gain = capped"), CAPPED, ACROSS),
    "hidden keys are no lower than others": (only("band, LOWEST)", "band, 0.0)"), CAPPED, ACROSS),
    "nothing hidden under a cap": (only("edge = (col < full) | (col >= full_end)", "edge = col < 0"), CAPPED, ACROSS),
    "hidden from the first consumer's rows": (only(OWN_ROW, OWN_ROW.replace(" + CONSUMER * ROWS", "")), CAPPED, ACROSS),
    "keys of the turn before": (only(NEXT_COL, NEXT_COL.replace(" + 1", "")), CAPPED, ACROSS),
    "slopes at the keys of the turn before": (only(NEXT_COL, NEXT_COL.replace(" + 1", "")), SLOPED, ACROSS),
    "slopes of the first consumer's rows": (only(OWN_ROW, OWN_ROW.replace(" + CONSUMER * ROWS", "")), AROUND, ACROSS),
    "rows of a tile as one": (only("rows = slope * along", "rows = 0.0 * along"), SLOPED, ACROSS),
    "keys ahead as keys behind": (only('if BUILD.ALIBI == "around"', "if False"), AROUND, ACROSS),
    "slopes without the shift": (only(SHIFT, "shift = 0"), AROUND, ACROSS),
    "slopes of the first head": (only("gl.load(slopes_ptr + head)", "gl.load(slopes_ptr)"), AROUND, ACROSS),
    "slopes of the first sequence": (only(OWN, "pass"), SLOPED, ACROSS),
    "slopes of the first packed sequence": (only(OWN, OWN.replace(" + sequence", "")), PACKED, ACROSS),
    "slopes in natural units": (only("head) * 1.4426950408889634)", "head))"), AROUND, ACROSS),
    "not awaited": (only(AWAIT), EACH, ACROSS),
    "never given back": (only(FREE), LONG, ACROSS),
    "given back twice": (only(FREE, FREE + FREE), LONG, ACROSS),
    "the tile of the first consumer": (only("CONSUMER, CONSUMERS) * BUILD", "0, CONSUMERS) * BUILD"), EACH, ACROSS),
    "buffers side by side": (only("c, CONSUMERS, BUILD.GIVEN_APART)", "c, CONSUMERS, 1)"), KEYS, ACROSS),
    "read side by side": (only("CONSUMER, CONSUMERS) * BUILD.GIVEN_APART", "CONSUMER, CONSUMERS)"), KEYS, ACROSS),
    "given for the first consumer's rows": (only("own = row + c * ROWS if", "own = row if"), EACH, ACROSS),
    "given for the first keys": (only(COLUMN, COLUMN.replace("col - begin", "start")), EACH, ACROSS),
    "given for the first head": (only("head * BUILD.GIVEN_HEAD", "head * 0"), EACH, ACROSS),
    "given for the first sequence": (only("to = (b * BUILD.GIVEN_BATCH", "to = (b * 0"), EACH, ACROSS),
    "fetched for who does not take it": (only("if c > 0 or both", "if True"), BELOW, ACROSS),
    "two key tiles fewer": (only("fewer = gl.maximum(fewer, turns - 1)", "pass"), BELOW, ACROSS),
    "what the mask hides shown": (only("gl.where(own != 0,", "gl.where(own == 0,"), SHOWN, ACROSS),
    # dK and dV
    "the weights handed over": (only("store(_to_own(p))", "store(_to_own(weights.float()))"), FLAT, DOWN),
    "the derivative in dV": (only("gl.convert_layout(weights, ", "gl.convert_layout(p.to(q_buffers.dtype), "), FLAT, DOWN),
    "the cap in natural units, keys": (only("as_bits(cap[1])", "as_bits(cap[1] / 1.4426950408889634)"), CAPPED, DOWN),
    "the unit as the factor, keys": (only("as_bits(cap[0])", "as_bits(cap[1])"), CAPPED, DOWN),
    "slopes of the first member": (only("head * BUILD.GROUP + member)", "head * BUILD.GROUP)"), SLOPED, DOWN),
    "slopes of the first sequence, keys": (only(OWN_KEYS, "pass"), SLOPED, DOWN),
    "slopes of the first packed sequence, keys": (only(OWN_KEYS, OWN_KEYS.replace(" + sequence", "")), PACKED, DOWN),
    "P before its place is free": (only("        wait_empty(share_ring, turn, BUILD.SHARES)\n", "        pass\n"), LONG, DOWN),
    "the place of P never free": (only(FREE_P, "        pass\n"), LONG, DOWN),
    "the place of P free before P is read": (only(READ_P + IF_ONE + FREE_P, IF_ONE + FREE_P + READ_P), LONG, DOWN),
    "of the KV head, keys": (only("fetch_given(given, b, member + line,", "fetch_given(given, b, head,"), EACH, DOWN),
    "never fetched for keys": (only("                fetch_given(", "                0 and fetch_given("), EACH, DOWN),
    "slopes in natural units, keys": (only("+ member) * 1.4426950408889634", "+ member)"), AROUND, DOWN),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name):
    replacements, text, kernels = MUTANTS[name]
    problem = Problem.parse(text)
    assert fails(replacements, problem, testing.operands(problem, "spiky"), kernels), f"mutant '{name}' lives"


# ---- plan --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    ["softcap=50.0", "alibi", "alibi(batch)", "softcap=50.0 sink deterministic", "bias(hqk)", "bias(bk)", "alibi mask(bqk)"],
)
@pytest.mark.parametrize("dims", ["256", "160", "192/128", "64/256"])
def test_the_plan_takes_hopper_and_its_tile_fits(words, dims):
    problem = Problem.parse(f"b2 h16/4 q4096 k4096 d{dims} bf16 causal {words}")
    found = plan(problem, H200, direction="backward")
    assert found.algorithm == "hopper"
    assert max(shared_bytes(problem, found.tiles[0])) <= SHARED_BYTES


@pytest.mark.parametrize(
    ("words", "tile", "places", "stages"),
    [
        ("d256 bias(hqk)", "128x32 s2 wide g16", 1, (2, 2)),
        ("d256 bias(hqk,fp32)", "128x32 s2 wide g16", 1, (1, 2)),
        ("d256 mask(bk)", "128x64 s2 wide g16", 2, (2, 2)),
        ("d192/128 bias(hqk)", "128x64 s2 wide g16", 2, (2, 2)),
    ],
)
def test_what_is_given_for_pairs_takes_the_room_of_keys_and_of_p(words, tile, places, stages):
    problem = Problem.parse(f"b2 h16 q4096 k4096 bf16 causal {words}")
    found = plan(problem, H200, direction="backward").tiles[0]
    assert str(found) == tile
    assert (shares(problem, found), given_stages(problem, found)) == (places, stages)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("h16 d256 softcap=50.0 alibi", "a soft-cap without ALiBi, biases and masks only"),
        ("h16 d256 softcap=50.0 mask(bk)", "a soft-cap without ALiBi, biases and masks only"),
        ("h16 d256 bias(hqk) mask(bk)", "a bias or a mask, not both"),
        ("h512/1 d256 alibi", "bytes of shared memory"),
        ("h16 d256 dropout=0.1", "its backward computes dropout up to 128 dimensions only"),
    ],
)
def test_what_it_refuses(words, reason):
    found = plan(Problem.parse(f"b2 q4096 k4096 bf16 causal {words}"), H200, direction="backward")
    assert found.algorithm == "q_outer"
    assert reason in dict(found.refusals)["hopper"]
