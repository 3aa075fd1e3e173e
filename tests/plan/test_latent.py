"""When the plan takes the Hopper kernel of latent attention, and what it says when it does not."""

import pytest

from rowmax import Device, PagedProblem, Problem, Unsupported, plan

H200 = Device.named("H200")
LATENT = "b128 h128/1 q1 k8192 d576/512 bf16 causal paged64"


def asked(text: str, **options):
    return plan(PagedProblem.parse(text), H200, prefer="latent", **options)


@pytest.mark.parametrize(
    "text",
    [
        LATENT,
        "b1 h64/1 q1 k512 d576/512 fp16 paged128",
        "b3 h128/1 q4 k512 d576/512 bf16 causal paged64",
        "b3 h192/1 q40 k512 d576/512 bf16 causal packed paged64",
        "b3 h64/1 q4 k512 d576/512 bf16 window(inf,3) paged64",
    ],
)
def test_what_it_runs(text):
    chosen = asked(text)
    assert str(chosen) == "latent[64x64 w4 s8 p132]"
    assert str(plan(PagedProblem.parse(text), H200)) == str(chosen)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LATENT.replace("paged64", "paged16"), "pages of 16 are not cut into such tiles"),
        (LATENT.replace("paged64", "paged96"), "pages of 96 are not cut"),
        (LATENT.replace("h128", "h96"), "takes 64 query heads and multiples of them"),
        (LATENT.replace("h128", "h16"), "takes 64 query heads and multiples of them"),
        (LATENT.replace("bf16", "fp32"), "takes fp16 and bf16"),
        (LATENT.replace("d576/512", "d512"), "is for latent attention"),
        (LATENT.replace("h128/1", "h128/2"), "one KV head"),
        (LATENT + " e4m3", "8 bits"),
        (LATENT + " invariant", "batch-invariant"),
        (LATENT.replace("causal", "window(100,0)"), "left side of a window"),
    ],
)
def test_what_it_refuses(text, reason):
    with pytest.raises(Unsupported) as told:
        asked(text)
    assert reason in told.value.refusals["latent"]
    assert plan(PagedProblem.parse(text), H200).algorithm == "split_kv"


def test_values_that_lie_apart_and_other_chips():
    assert plan(PagedProblem.parse(LATENT), H200, aligned=False).algorithm == "split_kv"
    with pytest.raises(Unsupported, match="values that are the first columns of the keys"):
        asked(LATENT, aligned=False)
    for name in ("A100", "B200"):
        with pytest.raises(Unsupported, match=r"compute capability 9\.0"):
            plan(PagedProblem.parse(LATENT), Device.named(name), prefer="latent")
    with pytest.raises(Unsupported, match="takes keys in pages only"):
        plan(Problem.parse("b1 h64/1 q1 k512 d256 bf16"), H200, prefer="latent")


@pytest.mark.parametrize("tile", ["64x64 w4 s8 x1", "64x64 w4 s8 x3", "64x64 w4 s8 p264"])
def test_tiles_that_are_asked_for(tile):
    assert str(plan(PagedProblem.parse(LATENT), H200, prefer=f"latent[{tile}]")) == f"latent[{tile}]"


@pytest.mark.parametrize(
    "tile", ["64x64 w8 s8 x3", "64x64 w4 s5 x3", "32x64 w4 s8 x3", "64x64 w4 s8 c16", "64x64 w4 s8 x3 once"]
)
def test_tiles_that_it_has_not(tile):
    with pytest.raises(Unsupported):
        plan(PagedProblem.parse(LATENT), H200, prefer=f"latent[{tile}]")


def test_so_many_sequences_that_none_are_looked_through():
    assert str(asked(LATENT.replace("b128", "b2000"))) == "latent[64x64 w4 s8 x1]"
