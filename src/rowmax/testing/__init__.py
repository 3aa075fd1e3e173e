"""Is a result right? Random operands for a `Problem`, poisoned memory, and the acceptance rule. For the tests, for
`rowmax check`, and for anyone who doubts a result.

>>> from rowmax import Problem, testing
>>> report = testing.check(Problem.parse("b2 h4/2 q40 k50 d16 fp32 causal"), "spiky")
>>> report.ok
True
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Optional, Union

import torch

from rowmax.api import attention, attention_varlen
from rowmax.plan import Plan
from rowmax.problem import Operands, Problem
from rowmax.score_mod import find
from rowmax.testing.memory import LAYOUTS, carve, margins_intact, poisoned
from rowmax.testing.operands import KINDS, cotangents, operands
from rowmax.testing.report import Report
from rowmax.testing.rule import check_backward, check_forward

__all__ = [
    "KINDS",
    "LAYOUTS",
    "Report",
    "attend",
    "carve",
    "check",
    "check_backward",
    "check_forward",
    "cotangents",
    "margins_intact",
    "operands",
    "poisoned",
]


def attend(problem: Problem, operands: Operands, plan: Union[str, Plan, None] = None, *, return_lse: bool = True):
    """`(out, lse)` of the public call that `problem` describes, or `out` alone."""
    arguments: dict = {"return_lse": return_lse, "deterministic": problem.deterministic, "plan": plan}
    arguments["scale"] = None if problem.scale == problem.dim_qk**-0.5 else problem.scale
    arguments.update({"softcap": problem.softcap or None, "alibi_slopes": operands.slopes, "sink": operands.sink})
    if operands.bias is not None or operands.mask is not None:
        arguments.update(bias=operands.bias, mask=operands.mask)
    if problem.dropout:
        arguments.update(dropout_p=problem.dropout, seed=operands.seed)
    if problem.score_mod:
        arguments["score_mod"] = find(problem.score_mod)(*operands.numbers)  # type: ignore[misc]
    arguments.update({"causal": True} if problem.band[:2] == (None, 0) else {"window": tuple(problem.band[:2])})
    arguments.update(dict(zip(problem.band._fields[2:], problem.band[2:], strict=True)))
    q, k, v, cu_seqlens_q, cu_seqlens_k = operands[:5]
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return attention(q, k, v, **arguments)
    arguments.update(max_seqlen_q=problem.max_len_q, max_seqlen_k=problem.max_len_k)
    return attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **arguments)


def check(
    problem: Problem,
    kind: str = "normal",
    *,
    layout: str = "contiguous",
    lengths: Optional[Sequence[tuple[int, int]]] = None,
    seed: int = 0,
    device: "str | torch.device" = "cpu",
    plan: Union[str, Plan, None] = None,
    backward: bool = True,
    grad_lse: bool = True,
) -> Report:
    """Run one call in poisoned memory, forward (with and without the LSE) and backward, and compare with the definition.

    Args:
        kind, layout, lengths, seed: of `operands`.
        plan: as for `attention`.
        backward: also check the gradients; kinds with NaN or infinities have none to check.
        grad_lse: send a gradient through the LSE as well.

    Raises:
        Unsupported: no plan runs the problem on `device`.
    """
    tensors = operands(problem, kind, seed=seed, device=device, layout=layout, lengths=lengths)
    backward = backward and not kind.startswith(("nan", "inf"))
    names = ("q", "k", "v", *["sink"] * problem.sink, *["bias"] * bool(problem.bias))
    leaves = [getattr(tensors, name).detach().requires_grad_(backward) for name in names]
    with poisoned():
        out, lse = attend(problem, tensors._replace(**dict(zip(names, leaves, strict=True))), plan)
        with torch.no_grad():
            alone = attend(problem, tensors, plan, return_lse=False)
    report = check_forward(problem, tensors, out.detach(), lse.detach())
    if not torch.equal(alone, out):  # without an LSE a backend may take another way
        other = check_forward(problem, tensors, alone)
        ratios = {f"{name} alone": ratio for name, ratio in other.ratios.items()}
        report = report.merged(replace(other, ratios=ratios, broken=tuple(f"without LSE: {text}" for text in other.broken)))
    if not backward:
        return report
    d_out, d_lse = cotangents(problem, seed=seed, device=device, layout=layout)
    results, gradients = ((out, lse), (d_out, d_lse)) if grad_lse else ((out,), (d_out,))
    with poisoned():
        grads = torch.autograd.grad(results, leaves, gradients)
    return report.merged(check_backward(problem, tensors, grads, d_out, d_lse if grad_lse else None, out.detach()))
