"""When the plan takes the Hopper kernel, what it says when it does not, and what is launched. No GPU is needed to ask."""

import pytest
import torch

from rowmax import Device, Plan, Problem, ProblemError, Unsupported, plan
from rowmax.plan.hopper import HopperTile
from rowmax.plan.hopper_backward import HopperBackwardTile

H200 = Device.named("H200")
DENSE = Problem.parse("b2 h8/2 q512 k512 d128 bf16 causal")


@pytest.mark.parametrize("text", ["128x128 s2 q1 pingpong static", "192x64 s3 q2 dynamic g32", "64x32 s2 q1 lazy static"])
def test_tile_spelling(text):
    assert str(HopperTile.parse(text)) == text
    assert str(Plan.parse(f"hopper[{text}]")) == f"hopper[{text}]"


@pytest.mark.parametrize("text", ["100x64 s2", "128x100 s2", "128x64 w8", "128x64 s2 later"])
def test_a_wrong_tile_teaches_its_spelling(text):
    with pytest.raises(ValueError, match="an example: '128x128 s2 q1 pingpong static g32'"):
        HopperTile.parse(text)


def test_it_is_taken_unless_there_are_few_queries_or_another_is_asked_for():
    packed, few = DENSE.with_(packed=True, len_q=5 * 512, batch=5), "with fewer than 384 queries a sequence q_outer is faster"
    for problem in (DENSE, DENSE.with_(len_q=384), packed):
        assert plan(problem, H200).algorithm == "hopper"
        assert plan(problem, H200, prefer="q_outer").algorithm == "q_outer"
    for problem in (DENSE.with_(len_q=383), DENSE.with_(len_q=1), packed.with_(batch=8)):
        chosen = plan(problem, H200)
        assert chosen.algorithm == ("split_kv" if problem.len_q == 1 else "q_outer")
        if chosen.algorithm == "q_outer":
            assert dict(chosen.refusals)["hopper"] == few
        assert plan(problem, H200, prefer="hopper").algorithm == "hopper"
    unaligned = plan(DENSE, H200, aligned=False)
    assert unaligned.algorithm == "q_outer"
    assert "no broadcast tensors" in dict(unaligned.refusals)["hopper"]


@pytest.mark.parametrize(
    ("text", "device", "aligned", "reason"),
    [
        (str(DENSE), "A100", True, "compute capability 9.0"),
        (str(DENSE), "B200", True, "compute capability 9.0"),
        (str(DENSE), "cpu", True, "runs on a GPU"),
        ("b1 h2 q64 k64 d64 fp32", "H200", True, "fp16 and bf16, not fp32"),
        ("b1 h2 q64 k64 d64 fp64", "H200", True, "fp16 and bf16, not fp64"),
        ("b1 h2 q64 k64 d60 bf16", "H200", True, "multiples of 16 bytes"),
        ("b1 h2 q64 k64 d64/12 bf16", "H200", True, "multiples of 16 bytes"),
        (str(DENSE), "H200", False, "no broadcast tensors"),
    ],
)
def test_a_refusal_says_why(text, device, aligned, reason):
    with pytest.raises(Unsupported) as caught:
        plan(Problem.parse(text), Device.named(device), prefer="hopper", aligned=aligned)
    assert reason in caught.value.refusals["hopper"]


@pytest.mark.parametrize("text", ["64x128 s2 backward", "128x128 s3 backward g16"])
def test_backward_tile_spelling(text):
    assert str(HopperBackwardTile.parse(text)) == text
    forward = HopperTile.parse("128x128 s2 q1 static")
    assert Plan.parse(f"hopper[{forward}, {text}]").tiles == (forward, HopperBackwardTile.parse(text))
    assert Plan.parse(f"hopper[{text}]").tiles == (HopperBackwardTile.parse(text),)  # as a backward is printed
    for wrong in (text.replace(" backward", ""), text + " ahead", text.replace("x128", "x")):
        with pytest.raises(ProblemError, match="an example: '64x128 s2 backward g16'"):
            HopperBackwardTile.parse(wrong)


def test_its_backward_is_its_own_or_the_portable_one():
    def chosen(problem=DENSE, prefer="hopper", **options):
        return plan(problem, H200, direction="backward", prefer=prefer, **options)

    assert chosen(prefer="").algorithm == chosen().algorithm == "hopper"
    assert chosen(prefer="q_outer").algorithm == "q_outer"
    problem = DENSE.with_(dim_qk=100)
    assert chosen(problem).algorithm == chosen(problem, "").algorithm == "q_outer"
    assert "multiples of 16 bytes" in dict(chosen(problem).refusals)["hopper"]
    assert "hopper has no backward here" in chosen(problem).reason
    assert chosen(aligned=False).algorithm == "q_outer"
    for problem, tile in (
        (DENSE.with_(deterministic=True), "64x128 s2 backward g32 p4 ordered"),
        (DENSE.with_(deterministic=True, dim_qk=96, softcap=30.0), "64x128 s2 backward g32 p4 ordered"),
        (DENSE.with_(deterministic=True, dim_qk=64, dim_v=64, alibi="head"), "128x128 s2 backward g16 p4 ordered"),
        (DENSE.with_(deterministic=True, bias="hqk"), "64x128 s2 backward g32 p4 ordered"),
    ):
        found = chosen(problem, "")
        assert [str(each) for each in found.tiles] == [tile]
        assert "dQ is added up in a fixed order" in found.reason
        with pytest.raises(Unsupported, match="a tile for it ends with 'ordered'"):
            chosen(problem, f"hopper[128x128 s2 q1 static, {tile.removesuffix(' ordered')}]")
    large = DENSE.with_(dim_qk=192, deterministic=True)
    assert [str(tile) for tile in chosen(large, "").tiles] == ["128x64 s2 wide g16"]
    with pytest.raises(Unsupported, match="no tile of its backward here"):
        chosen(large, "hopper[128x64 s2 q1 static, 64x128 s2 backward]")
    with pytest.raises(Unsupported, match="no tile of its backward here"):
        chosen(prefer="hopper[128x128 s2 q1 static, 128x64 s2 wide]")
    assert chosen(DENSE.with_(len_q=383), "").algorithm == "q_outer"
    given = "hopper[128x128 s2 q1 static, 64x128 s2 backward g8]"
    assert [str(tile) for tile in chosen(prefer=given).tiles] == ["64x128 s2 backward g8"]
    for wrong in ("128x128 s2 backward", "64x128 s1 backward", "64x128 s4 backward", "64x128 s2 backward g2000", "64x64 w4 s2"):
        with pytest.raises(Unsupported):
            chosen(prefer=f"hopper[128x128 s2 q1 static, {wrong}]")
    for other in ("q_outer[128x128 w8 s2, 64x128 s2 backward]", "q_outer[128x128 w8 s2, 64x128 s2 backward, 64x64 w4 s2]"):
        with pytest.raises(Unsupported):
            chosen(prefer=other)
    given = "hopper[128x128 s2 q1 static, 64x64 w4 s2, 64x64 w4 s1]"
    assert [str(tile) for tile in plan(DENSE, H200, direction="backward", prefer=given).tiles] == ["64x64 w4 s2", "64x64 w4 s1"]
    assert [str(tile) for tile in plan(DENSE, H200, prefer=given).tiles] == ["128x128 s2 q1 static"]


@pytest.mark.parametrize("dims", ["8", "64", "72", "96", "128", "192", "192/128", "64/256", "256"])
@pytest.mark.parametrize("mask", ["", "causal", "window(9,3)", "causal packed"])
def test_every_tile_of_the_plan_fits_the_chip(dims, mask):
    """Shared memory of the buffers, without the barriers; registers of all threads."""
    from rowmax.kernels import hopper_forward, launch

    pytest.importorskip("triton.experimental.gluon")
    problem = Problem.parse(f"b2 h4/2 q300 k300 d{dims} bf16 {mask}")
    (tile,) = plan(problem, H200, prefer="hopper").tiles
    assert isinstance(tile, HopperTile)
    lead = (300,) if problem.packed else (2, 300)
    q, k, v, out = (
        torch.empty(*lead, heads, dim, dtype=torch.bfloat16)
        for heads, dim in ((4, problem.dim_qk), (2, problem.dim_qk), (2, problem.dim_v), (4, problem.dim_v))
    )
    cu = torch.tensor([0, 100, 300], dtype=torch.int32) if problem.packed else None
    *_, call, _ = hopper_forward.hopper_calls(problem, launch.Operands(q, k, v, cu, cu), tile, out, None)
    build = call.numbers[-1]
    registers = (
        build.REGISTERS.value * 128 * tile.consumers + build.PRODUCER_REGISTERS.value * 128
    )  # the producer's warp counts as four
    assert registers <= 65_536
    names = [name for name in vars(build) if name.startswith("BLOCK_D")]
    sizes = {name: getattr(build, name).value for name in names}
    q_bytes = tile.q_stages * tile.block_m * sum(size for name, size in sizes.items() if "DV" not in name) * 2
    kv_bytes = tile.stages * tile.block_n * sum(sizes.values()) * 2
    assert q_bytes + kv_bytes <= 232_448 - 256
