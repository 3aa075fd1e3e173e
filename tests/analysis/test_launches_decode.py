"""The counts of decoding: parts as the kernels share them out, and what is read, stored and combined."""

import os
import random

import pytest

from rowmax import Device, PagedProblem, Plan, Problem
from rowmax.analysis import report
from rowmax.analysis.launches import launches
from rowmax.analysis.launches_decode import shared_out
from rowmax.analysis.predict import Constants, predict
from rowmax.device import Rates
from rowmax.plan.split_kv import SplitTile, least_turns

H200 = Device.named("H200")


def launched(problem, plan: str, lengths=None) -> list:
    return launches(problem, H200, Rates.of(H200), Plan.parse(plan), lengths)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import torch
    import triton
    import triton.language as tl

    from rowmax.kernels.launch import _bounded
    from rowmax.kernels.triton.parts import shares

    @triton.jit
    def told(out, seqlens, batch, heads_k, len_q, most, programs, band, GROUP: tl.constexpr, LEAST: tl.constexpr):
        b, _, parts = shares(seqlens, None, batch, heads_k, len_q, most, programs, band, GROUP, 16, 64, LEAST, 8)
        tl.store(out + b, parts, mask=b < batch)


@pytest.mark.skipif(not INTERPRETED, reason="the kernels' own function runs under the interpreter")
@pytest.mark.parametrize("words", ["", " window(700,0)"])
def test_parts_are_those_that_the_kernels_find(words):
    rnd = random.Random(3)
    for programs in (20, 264, 528):
        keys = [round(2 ** rnd.uniform(0, 15)) for _ in range(5)]
        problem = PagedProblem.parse(f"b5 h8/2 q1 k32768 d128 bf16 causal paged16{words}")
        found, seqlens = torch.zeros(8, dtype=torch.int32), torch.tensor(keys, dtype=torch.int32)
        told[(1,)](found, seqlens, 5, 2, 1, 32768, programs, _bounded(problem), GROUP=4, LEAST=least_turns(64))
        tile = SplitTile(16, 64, 4, 3, False, programs, True)
        assert shared_out(problem, tile, [(1, one) for one in keys]) == found[:5].tolist()


def test_long_sequences_have_many_parts():
    problem = PagedProblem.parse("b3 h32/8 q1 k16384 d128 bf16 causal paged16")
    decode, combine = launched(problem, "split_kv[16x64 w4 s4 p264]", [(1, 16384), (1, 256), (1, 4096)])
    assert decode.tasks == ((8 * 23, 11, 11), (8, 3, 3), (8, 4, 4), (8 * 5, 11, 11), (8, 9, 9))
    assert decode.empty + decode.blocks >= 264
    assert combine.blocks == 3 * 32


def test_the_last_part_is_shorter_and_some_may_have_none():
    problem = Problem.parse("b1 h32/8 q1 k8192 d128 bf16")
    decode, combine = launched(problem, "split_kv[16x64 w4 s3 x99]")
    assert decode.tasks == ((8 * 64, 2, 2),)
    assert decode.empty == 8 * 35
    assert combine.turns == 32 * 99
    decode, _ = launched(problem, "split_kv[16x64 w4 s3 x12]")
    assert decode.tasks == ((8 * 11, 11, 11), (8, 7, 7))


def test_a_cache_in_8_bits_takes_half_the_shared_memory():
    text = "b64 h32/8 q1 k8192 d128 bf16 causal paged64"
    wide, narrow = (
        launched(PagedProblem.parse(text + words), "split_kv[16x64 w4 s3 p264]")[0].shared_bytes for words in ("", " e4m3")
    )
    q = 16 * 128 * 2
    assert 2 * (narrow - q) == wide - q


def test_one_launch_saves_a_launch_and_joins_the_parts_all_the_same():
    problem = Problem.parse("b1 h32/8 q1 k8192 d128 bf16")
    two, one = (predict(problem, H200, Plan.parse(f"split_kv[16x64 w4 s3 x16{how}]")) for how in ("", " once"))
    assert [launch.inside for launch in one.launches] == [False, True]
    assert 16 * one.launches[1].blocks == one.launches[1].turns
    assert one.terms["launch"] == Constants().launch_s == two.terms["launch"] - Constants().next_s
    assert two.seconds - 2 * Constants().next_s < one.seconds < two.seconds


def test_fixed_parts_double_and_the_last_are_launched_first():
    problem = PagedProblem.parse("b1 h32/8 q1 k131072 d128 bf16 causal paged16 invariant")
    decode, combine = launched(problem, "split_kv[16x64 w4 s4 c8d24]")
    assert decode.tasks == ((8 * 11, 64, 64), (8 * 24, 32, 32), (8 * 24, 16, 16), (8 * 24, 8, 8))
    assert combine.turns == 32 * (3 * 24 + 11)
    (advised,) = report.explain(problem, H200)["advice"][:1]
    assert advised["taken"]
    assert "makes 8 blocks for 132 SMs: 664 parts of keys" in advised["what"]
    assert advised["gain"] > 5  # over one program for each head
    (decode,) = launched(problem, "split_kv[16x64 w4 s4 r8d24]")
    assert decode.tasks == ((8, 2048, 2048),)
    windowed = PagedProblem.parse("b1 h32/8 q1 k8192 d128 bf16 window(1000,0) paged16 invariant")
    decode, _ = launched(windowed, "split_kv[16x64 w4 s4 c8]")  # keys 7191 to 8191, tiles 112 to 127
    assert decode.tasks == ((16, 8, 8),)
