"""`rowmax.explain`: what would run for the tensors at hand, how long it takes, and what holds it back. Runs nothing.

The same facts as `rowmax explain` at the shell, from `analysis/report.py`, which is imported when it is asked.
"""

from collections.abc import Sequence
from typing import Any, Optional, Union

import torch

from rowmax.device import Device
from rowmax.errors import ProblemError
from rowmax.plan import Plan
from rowmax.problem import Operands, Problem


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    *,
    causal: bool = False,
    window: Optional[tuple[Optional[int], Optional[int]]] = None,
    scale: Optional[float] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    plan: Union[None, str, Plan] = None,
    gpu: Optional[str] = None,
    against: Sequence[str] = (),
) -> dict[str, Any]:
    """What a call of `attention` (or, with `cu_seqlens`, `attention_varlen`) with these arguments would be.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window, scale, plan: as for the call. Only shapes and types of q, k and v
            are looked at, so that with `gpu` tensors on `meta` do. Lengths in `cu_seqlens` are read, once the device has them.
        gpu: a device by name, "H200"; default: the one the tensors are on.
        against: other plans to compare with, such as "kv_outer", "dense" or "q_outer[64x64 w4 s3]".

    Returns:
        A dictionary of plain values, times in ms; `docs/explain.md` documents its keys.

    Raises:
        ProblemError: as the call does, and where a device is not known.
    """
    from rowmax.analysis import report

    left, right = (None, None) if window is None else window
    if causal:
        if right not in (None, 0):
            raise ProblemError(f"causal=True and window={window} contradict each other: causal ends the window at the query")
        right = 0
    problem = Problem.describe(
        Operands(q, k, v, cu_seqlens_q, cu_seqlens_k),
        left=left,
        right=right,
        scale=scale,
        max_len_q=max_seqlen_q,
        max_len_k=max_seqlen_k,
    )
    lengths = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        sizes = (cu.diff().tolist() for cu in (cu_seqlens_q, cu_seqlens_k))
        lengths = list(zip(*sizes, strict=True))
    try:
        device = Device.of(q) if gpu is None else Device.named(gpu)
    except KeyError as error:
        raise ProblemError(error.args[0]) from None
    return report.explain(problem, device, plan=str(plan or ""), against=tuple(against), lengths=lengths)
