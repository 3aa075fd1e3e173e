"""The order of packed sequences: a permutation, by falling number of keys, with the row tiles in front of each."""

import os

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernel runs in Triton's interpreter", allow_module_level=True)

from rowmax.kernels import hopper_forward, launch
from rowmax.kernels.gluon.order import MOST
from rowmax.plan.hopper import HopperTile
from rowmax.problem import Operands, Problem


def ordered(lengths_q, lengths_k, tile="128x64 s2 q1 static") -> tuple[list[int], list[int]]:
    """`(order, row tiles in front of each and of all)`."""
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    total_q, total_k = int(cu_q[-1]), int(cu_k[-1])
    problem = Problem.parse(f"b{len(lengths_q)} h1 q{total_q} k{total_k} d64 bf16 packed")
    q, k = torch.empty(total_q, 1, 64, dtype=torch.bfloat16), torch.empty(total_k, 1, 64, dtype=torch.bfloat16)
    order, *_ = hopper_forward.hopper_calls(
        problem, Operands(q, k, k, cu_q, cu_k), HopperTile.parse(tile), torch.empty_like(q), None
    )
    launch._launch(q.device, order)
    found, batch = order.tensors[-1].tolist(), len(lengths_q)
    return found[:batch], found[batch:]


@pytest.mark.parametrize("batch", [1, 2, 7, 64, 100])
def test_sequences_with_the_most_keys_come_first(batch):
    generator = torch.Generator().manual_seed(batch)
    lengths_q = torch.randint(0, 700, (batch,), generator=generator).tolist()
    lengths_k = torch.randint(0, 3000, (batch,), generator=generator).tolist()
    lengths_q[0], lengths_k[0] = 300, 100
    order, before = ordered(lengths_q, lengths_k)
    assert sorted(order) == list(range(batch))
    keys = [lengths_k[b] // 64 for b in order]
    assert keys == sorted(keys, reverse=True)
    tiles = [-(-lengths_q[b] // 128) for b in order]
    assert before == [sum(tiles[:i]) for i in range(batch + 1)]


def test_more_sequences_than_are_sorted_come_as_they_are():
    lengths = [i % 3 * 70 for i in range(MOST + 500)]
    order, before = ordered(lengths, lengths)
    assert order == list(range(len(lengths)))
    tiles = [-(-length // 128) for length in lengths]
    assert before == [0, *torch.tensor(tiles).cumsum(0).tolist()]
