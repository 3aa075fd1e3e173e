"""Tiles of dense decoding on an H200, each as it was measured to be best (`plan/split_kv.py` has the figures)."""

import pytest

from rowmax import Device, Problem, plan

H200 = Device.named("H200")


@pytest.mark.parametrize(
    ("text", "tile"),
    [
        ("b1 h32/8 q1 k8192 d128 bf16", "16x64 w4 s3 x16"),
        ("b1 h32/8 q1 k131072 d128 bf16", "16x64 w2 s3 x33"),
        ("b16 h32/8 q1 k8192 d128 bf16", "16x64 w2 s3 x2"),
        ("b128 h32/8 q1 k4096 d128 bf16", "16x64 w4 s4 x1"),
        ("b16 h32/32 q1 k8192 d128 bf16", "16x64 w4 s2 x1"),  # four blocks a multiprocessor: all at once
        ("b64 h64/8 q1 k8192 d64 bf16", "16x64 w2 s3 x1"),
        ("b8 h32/8 q1 k1024 d128 bf16", "16x64 w4 s3 x2"),
        ("b1 h64/8 q1 k32768 d128 bf16", "16x64 w4 s4 x16"),  # one block a multiprocessor
    ],
)
def test_what_was_measured(text, tile):
    assert str(plan(Problem.parse(text), H200)) == f"split_kv[{tile}]"
