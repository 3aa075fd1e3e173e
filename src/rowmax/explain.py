"""`rowmax.explain`: what would run for the tensors at hand, how long it takes, and what holds it back. Runs nothing.

The same facts as `rowmax explain` at the shell, from `analysis/report.py`, which is imported when it is asked.
"""

from collections.abc import Sequence
from typing import Any, NoReturn, Optional, Union

import torch

from rowmax.api import describe
from rowmax.arguments import Window, beside
from rowmax.device import Device
from rowmax.errors import ProblemError
from rowmax.family import refuse
from rowmax.plan import Plan
from rowmax.score_mod import Bound, ScoreMod


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    *,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    causal: bool = False,
    window: Optional[Window] = None,
    sink_tokens: Optional[int] = None,
    prefix: Optional[int] = None,
    chunk: Optional[int] = None,
    scale: Optional[float] = None,
    softcap: Optional[float] = None,
    alibi_slopes: Optional[torch.Tensor] = None,
    sink: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    mask: Optional[torch.Tensor] = None,
    dropout_p: float = 0,
    score_mod: Union[None, ScoreMod, Bound] = None,
    deterministic: bool = False,
    plan: Union[None, str, Plan] = None,
    gpu: Optional[str] = None,
    against: Sequence[str] = (),
    **not_taken: NoReturn,
) -> dict[str, Any]:
    """What a call of `attention` (or, with `cu_seqlens`, `attention_varlen`) with these arguments would be.

    Args:
        q, k, v and all up to plan: as for the call. Only shapes and types of tensors are looked at, so that with `gpu` tensors
            on `meta` do. Lengths in `cu_seqlens` are read, once the device has them; those on `meta` are taken as equal.
        gpu: a device by name, "H200"; default: the one the tensors are on.
        against: other plans to compare with, such as "kv_outer", "dense" or "q_outer[64x64 w4 s3]".

    Returns:
        A dictionary of plain values, times in ms; `docs/explain.md` documents its keys.

    Raises:
        ProblemError: as the call does, and where a device is not known.
    """
    from rowmax.analysis import report

    if not_taken:
        refuse("explain", not_taken)
    given = (softcap, alibi_slopes, sink, bias, mask, None, dropout_p, score_mod, sink_tokens, prefix, chunk)
    scores = beside(causal, window, *given)
    numbers = (max_seqlen_q, max_seqlen_k, causal, window, scale, deterministic)
    problem = describe(q, k, v, cu_seqlens_q, cu_seqlens_k, *numbers, scores)
    if not (gpu is None or isinstance(gpu, str)):
        raise ProblemError(f"gpu must be a device's name, 'H200', or None for the one at hand; got {type(gpu).__name__}.")
    names = (against,) if isinstance(against, (str, Plan)) else against
    if not isinstance(names, Sequence) or not all(
        isinstance(name, (str, Plan)) for name in (*names, plan if plan is not None else "")
    ):
        raise ProblemError(
            f"plan and those it is compared with are named: 'kv_outer', or a rowmax.Plan; got {plan!r}, {against!r}."
        )
    lengths = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None and not cu_seqlens_q.is_meta:
        sizes = (cu.diff().tolist() for cu in (cu_seqlens_q, cu_seqlens_k))
        lengths = list(zip(*sizes, strict=True))
    try:
        device = Device.of(q) if gpu is None else Device.named(gpu)
    except KeyError as error:
        raise ProblemError(error.args[0]) from None
    return report.explain(
        problem, device, plan="" if plan is None else str(plan), against=tuple(map(str, names)), lengths=lengths
    )
