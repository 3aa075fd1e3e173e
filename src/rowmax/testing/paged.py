"""Calls over a paged cache: operands whose pages are shuffled and poisoned, and the acceptance rule.

A call over pages is a packed call over the keys that they hold, which is what the rule compares it with. Slots behind a
sequence's last key hold NaN, as do pages of nobody, and entries of the block table that no sequence reaches hold garbage.
"""

import math
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch

from rowmax.mask import Band
from rowmax.paged import E4M3, PagedOperands, PagedProblem
from rowmax.plan import Plan
from rowmax.problem import Operands
from rowmax.serving import attention_paged
from rowmax.testing.memory import poisoned
from rowmax.testing.operands import operands
from rowmax.testing.report import Report
from rowmax.testing.rule import check_forward

GARBAGE = (-(2**31), 2**31 - 1, -1, 2**20)  # in entries of the block table that no sequence reaches


def paged_operands(
    problem: PagedProblem,
    lengths: Sequence[tuple[int, int]],
    kind: str = "normal",
    *,
    seed: int = 0,
    device: "str | torch.device" = "cpu",
    heads_first: bool = False,
    ids: torch.dtype = torch.int32,
    page_scales: bool = False,
    shared: bool = False,
) -> tuple[PagedOperands, PagedProblem, Operands]:
    """`(operands of the call, packed problem, operands of the packed problem)`.

    Args:
        lengths: queries and keys of each sequence; queries are `len_q` for all unless the problem is packed.
        kind, seed: of `testing.operands`.
        heads_first: pages are stored `[page, H, slot, D]`.
        ids: type of the block table and the lengths.
        page_scales: of pages in 8 bits: each has scales of its own.
        shared: values are the first columns of the keys, as in latent attention.
    """
    queries, keys = (sum(pair[i] for pair in lengths) for i in (0, 1))
    flat: Any = problem.with_(packed=True, len_q=max(queries, problem.len_q if problem.packed else 0), len_k=keys)
    packed = operands(flat, kind, seed=seed, device=device, lengths=lengths)
    if shared:
        packed = packed._replace(v=packed.k[..., : problem.dim_v])
    generator = torch.Generator().manual_seed(seed)
    size, columns = problem.page_size, -(-problem.len_k // problem.page_size)
    used = [-(-length // size) for _, length in lengths]
    order = torch.randperm(sum(used) + 3, generator=generator)
    garbage = torch.tensor(GARBAGE).repeat(-(-problem.batch * columns // len(GARBAGE)) + 1)
    table = garbage[: problem.batch * columns].view(problem.batch, columns).clone()
    slots, first = [], 0
    for b, (count, (_, length)) in enumerate(zip(used, lengths, strict=True)):
        table[b, :count] = order[first : first + count]
        j = torch.arange(length)
        slots.append(order[first : first + count][j // size] * size + j % size)
        first += count
    where = torch.cat([*slots, torch.zeros(0, dtype=torch.long)]).to(device)
    scales: tuple = (None, None)
    stored = [packed.k, packed.v]
    if problem.eight_bits:  # powers of two, so that what the pages stand for is exact in 16 bits
        heads = torch.arange(problem.heads_k, device=device)
        if page_scales:
            heads = heads + torch.arange(len(order), device=device)[:, None]
        scales = tuple(2.0 ** (heads % 3 - first) for first in (3, 2))
        if page_scales:
            for scale in scales:  # of pages of nobody
                scale[torch.bincount(where // size, minlength=len(order)) == 0] = math.nan
        mine = [scale[where // size] if page_scales else scale for scale in scales]
        stored = [(t[:keys].float() / scale[..., None]).to(E4M3) for t, scale in zip(stored, mine, strict=True)]
        meant = [(t.float() * scale[..., None]).to(problem.dtype) for t, scale in zip(stored, mine, strict=True)]
        packed = packed._replace(k=meant[0], v=meant[1])
    pages = []
    for dense in stored:
        memory = torch.full((len(order) * size, *dense.shape[1:]), math.nan, device=device).to(dense.dtype)
        memory[where] = dense[:keys]
        memory = memory.view(len(order), size, *dense.shape[1:])
        pages.append(memory.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else memory)
    if shared:
        pages[1] = pages[0][..., : problem.dim_v]
    q = packed.q if problem.packed else packed.q.view(problem.batch, problem.len_q, *packed.q.shape[1:])
    counts = torch.tensor([length for _, length in lengths], dtype=ids, device=device)
    cu = packed.cu_seqlens_q.to(ids) if problem.packed and packed.cu_seqlens_q is not None else None
    return PagedOperands(q, pages[0], pages[1], table.to(ids).to(device), counts, cu, *scales), flat, packed


def attend_paged(
    problem: PagedProblem,
    operands: PagedOperands,
    plan: Union[str, Plan, None] = None,
    *,
    num_splits: Optional[int] = None,
    return_lse: bool = True,
):
    """`(out, lse)` of the public call that `problem` describes, or `out` alone."""
    arguments: dict = {"plan": plan, "num_splits": num_splits, "return_lse": return_lse, "causal": False}
    arguments["batch_invariant"] = problem.batch_invariant
    arguments["scale"] = None if problem.scale == problem.dim_qk**-0.5 else problem.scale
    arguments.update({"causal": True} if problem.band == Band(None, 0) else {"window": tuple(problem.band)})
    *tensors, cu, arguments["k_scale"], arguments["v_scale"] = operands
    return attention_paged(*tensors, cu_seqlens_q=cu, max_seqlen_q=problem.max_len_q, **arguments)


def check_paged(
    problem: PagedProblem,
    lengths: Sequence[tuple[int, int]],
    kind: str = "normal",
    *,
    plan: Union[str, Plan, None] = None,
    num_splits: Optional[int] = None,
    **options,
) -> Report:
    """Run one call in poisoned memory, with and without the LSE, and compare with the definition.

    Raises:
        Unsupported: no plan runs the problem on the device.
    """
    given, flat, packed = paged_operands(problem, lengths, kind, **options)
    with poisoned():
        out, lse = attend_paged(problem, given, plan, num_splits=num_splits)
        alone = attend_paged(problem, given, plan, num_splits=num_splits, return_lse=False)
    report = check_forward(flat, packed, *as_packed(problem, out, lse))
    if not torch.equal(out.nan_to_num(nan=7.25), alone.nan_to_num(nan=7.25)):
        report = report.merged(Report(flat, {"alone": math.inf}, ("the output without the LSE is another",)))
    return report


def as_packed(problem: PagedProblem, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The results in the form of a packed call: out `[T, H, D]`, lse `[H, T]`."""
    if problem.packed:
        return out, lse
    if out.dim() == 3:
        out, lse = out.unsqueeze(1), lse.unsqueeze(2)
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1, 2)
