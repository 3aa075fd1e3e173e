"""The least work that a problem can be, exactly: visible pairs, FLOPs, bytes.

FLOPs: 2 x visible (query, key) pairs x (dim_qk + dim_v) forward, x (3 dim_qk + 2 dim_v) backward.
Bytes: each input read once and each output written once.
"""

from itertools import pairwise

import torch

from rowmax.mask import end_key, first_key, visible_pairs
from rowmax.paged import PagedProblem
from rowmax.plan.tile import early
from rowmax.problem import Problem


def sequences(problem: Problem) -> list[tuple[int, int]]:
    """`(len_q, len_k)` of each sequence. Packed lengths are data, so that equal ones (up to one token) stand for them."""
    if not problem.packed:
        return [(problem.len_q, problem.len_k)] * problem.batch
    if isinstance(problem, PagedProblem):  # its keys are those of one sequence
        cut = [problem.len_q * i // max(problem.batch, 1) for i in range(problem.batch + 1)]
        return [(end - start, problem.len_k) for start, end in pairwise(cut)]
    cuts = ([total * i // max(problem.batch, 1) for i in range(problem.batch + 1)] for total in (problem.len_q, problem.len_k))
    lengths = ([end - start for start, end in pairwise(cut)] for cut in cuts)
    return list(zip(*lengths, strict=True))


def pairs_of(problem: Problem) -> int:
    """(query, key) pairs of all sequences and query heads."""
    return problem.heads_q * sum(visible_pairs(len_q, len_k, problem.band) for len_q, len_k in sequences(problem))


def flops_of(problem: Problem, direction: str) -> int:
    """Matrix-product FLOPs over visible pairs only; the backward computes the scores again."""
    times_qk, times_v = (1, 1) if direction == "forward" else (3, 2)
    return 2 * pairs_of(problem) * (times_qk * problem.dim_qk + times_v * problem.dim_v)


def bytes_of(problem: Problem, direction: str) -> int:
    """Bytes that any algorithm must move: tensors once; of keys and values, those that some query sees."""
    element = torch.finfo(problem.dtype).bits // 8
    rows = problem.heads_q * sum(len_q for len_q, _ in sequences(problem))
    keys = problem.heads_k * sum(keys_seen(len_q, len_k, problem.band) for len_q, len_k in sequences(problem))
    q, out = rows * problem.dim_qk * element, rows * problem.dim_v * element
    k, v = keys * problem.dim_qk * element, keys * problem.dim_v * element
    if direction == "forward":
        return q + k + v + out
    lse = rows * torch.finfo(problem.lse_dtype).bits // 8
    return (q + k + v) * 2 + out * 2 + lse  # read q k v, write dq dk dv; read out, dout, lse


def keys_seen(len_q: int, len_k: int, band) -> int:
    """Keys of a sequence that some query sees."""
    if len_q == 0:
        return 0
    shift = len_k - len_q
    start = min(max(first_key(0, shift, band), 0), len_k)
    return max(min(max(end_key(len_q - 1, shift, len_k, band), 0), len_k) - start, 0) + early(start, band)
