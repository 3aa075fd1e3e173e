"""Attention in three loop orders, in a few lines each, that count what they read, write and compute. On the CPU, to learn from.

    dense      S = Q K^T to memory, P = softmax(S) to memory, O = P V                          (before FlashAttention)
    kv_outer   for each K/V tile: for each Q tile: O, m, l from memory, one step, back to it   (FlashAttention, algorithm 1)
    q_outer    for each Q tile: for each K/V tile: one step; O to memory once                  (FlashAttention-2, algorithm 1)

"Memory" is what a GPU's blocks share: tensors are read and written through `Tally` and everything else is on chip. Called by
`rowmax lessons` and the pages in docs/lessons. Source: Dao et al. 2022; Dao 2023; Milakov and Gimelshein 2018.
"""

import math
from dataclasses import dataclass

import torch

from rowmax.mask import visible
from rowmax.plan.tile import early, key_ranges
from rowmax.problem import Problem


@dataclass
class Tally:
    """Attributes:
    loaded, stored: bytes from and to memory.
    extra: bytes of memory taken besides inputs and output.
    q_loaded: of `loaded`, those of Q.
    flops: of matrix products. exps: exponentials. rescaled: numbers of O multiplied or divided.
    scores: computed, seen or not.
    """

    loaded: int = 0
    stored: int = 0
    extra: int = 0
    q_loaded: int = 0
    flops: int = 0
    exps: int = 0
    rescaled: int = 0
    scores: int = 0

    def load(self, tensor: torch.Tensor, *, of_q: bool = False) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        self.loaded += size
        self.q_loaded += size * of_q
        return tensor

    def store(self, place: torch.Tensor, value: torch.Tensor) -> None:
        self.stored += place.numel() * place.element_size()
        place.copy_(value)

    def new(self, *shape: int, fill: float = 0.0) -> torch.Tensor:
        """fp32 memory besides inputs and output."""
        self.extra += 4 * math.prod(shape)
        return torch.full(shape, fill)

    def dot(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return a.float() @ b.float()

    def exp(self, x: torch.Tensor) -> torch.Tensor:
        self.exps += x.numel()
        return torch.exp(x)


ORDERS = ("dense", "kv_outer", "q_outer")


def run(problem: Problem, q, k, v, order: str, rows: int = 64, columns: int = 64) -> tuple[torch.Tensor, Tally]:
    """`(out, tally)` of a dense problem: q `[B, T, H, D]` and so on; out in fp32. Tiles are `rows` x `columns`.

    Raises:
        ValueError: packed sequences, or an order that is not in `ORDERS`.
    """
    if problem.packed or order not in ORDERS:
        raise ValueError(f"takes no packed sequences, and one of {', '.join(ORDERS)}; got '{problem}', {order!r}")
    out, tally = torch.zeros(problem.outputs()[0]), Tally()
    step = {"dense": _dense, "kv_outer": _kv_outer, "q_outer": _q_outer}[order]
    for b in range(problem.batch):
        for head in range(problem.heads_q):
            kv = head // problem.group
            step(problem, q[b, :, head], k[b, :, kv], v[b, :, kv], out[b, :, head], tally, rows, columns)
    return out, tally


def _scores(problem: Problem, tally: Tally, q, k, row: int, col: int) -> torch.Tensor:
    """A tile of scaled scores, -inf where hidden."""
    s = tally.dot(q, k.T) * problem.scale
    tally.scores += s.numel()
    shift = problem.len_k - problem.len_q
    i, j = torch.arange(row, row + s.shape[0])[:, None], torch.arange(col, col + s.shape[1])
    seen = visible(i, j, shift, problem.len_k, problem.band)
    return s.masked_fill(~seen, -math.inf)


def _columns(problem: Problem, row: int, rows: int, columns: int) -> list[int]:
    """Where the tiles of keys that a tile of rows sees begin."""
    start, _, _, end = key_ranges(row, rows, problem.len_q, problem.len_k, columns, problem.band)
    return [*range(0, early(start, problem.band), columns), *range(start, end, columns)]


def _step(tally: Tally, s, v, acc, m, l):
    """One step of the online softmax: the accumulator, the row maximum and the row sum with one more tile of keys."""
    m_new = torch.maximum(m, s.amax(1))
    pivot = m_new.masked_fill(m_new == -math.inf, 0.0)
    p, alpha = tally.exp(s - pivot[:, None]), tally.exp(m - pivot)
    tally.rescaled += acc.numel()
    return acc * alpha[:, None] + tally.dot(p, v), m_new, l * alpha + p.sum(1)


def _q_outer(problem, q, k, v, out, tally, rows, columns) -> None:
    for row in range(0, problem.len_q, rows):
        qi = tally.load(q[row : row + rows], of_q=True)
        size = qi.shape[0]
        acc, m, l = torch.zeros(size, problem.dim_v), torch.full((size,), -math.inf), torch.zeros(size)
        for col in _columns(problem, row, rows, columns):
            kj, vj = tally.load(k[col : col + columns]), tally.load(v[col : col + columns])
            acc, m, l = _step(tally, _scores(problem, tally, qi, kj, row, col), vj, acc, m, l)
        tally.rescaled += acc.numel()
        tally.store(out[row : row + rows], acc / l.clamp_min(1e-38)[:, None])


def _kv_outer(problem, q, k, v, out, tally, rows, columns) -> None:
    acc = tally.new(problem.len_q, problem.dim_v)
    m, l = tally.new(problem.len_q, fill=-math.inf), tally.new(problem.len_q)
    for col in range(0, problem.len_k, columns):
        kj, vj = tally.load(k[col : col + columns]), tally.load(v[col : col + columns])
        for row in range(0, problem.len_q, rows):
            if col not in _columns(problem, row, rows, columns):
                continue
            here = slice(row, row + rows)
            s = _scores(problem, tally, tally.load(q[here], of_q=True), kj, row, col)
            old, m_old, l_old = tally.load(acc[here]), tally.load(m[here]), tally.load(l[here])
            new, m_new, l_new = _step(tally, s, vj, old * l_old[:, None], m_old, l_old)
            tally.rescaled += 2 * new.numel()  # times the old l, over the new
            for place, value in ((acc[here], new / l_new.clamp_min(1e-38)[:, None]), (m[here], m_new), (l[here], l_new)):
                tally.store(place, value)
    tally.store(out, tally.load(acc))


def _dense(problem, q, k, v, out, tally, rows, columns) -> None:
    scores, weights = tally.new(problem.len_q, problem.len_k), tally.new(problem.len_q, problem.len_k)
    for row in range(0, problem.len_q, rows):
        for col in range(0, problem.len_k, columns):
            qi, kj = tally.load(q[row : row + rows], of_q=True), tally.load(k[col : col + columns])
            tally.store(scores[row : row + rows, col : col + columns], _scores(problem, tally, qi, kj, row, col))
    for row in range(problem.len_q):
        s = tally.load(scores[row])
        m = s.max()
        p = tally.exp(s - m.masked_fill(m == -math.inf, 0.0))
        tally.store(weights[row], p / p.sum().clamp_min(1e-38))
    for row in range(0, problem.len_q, rows):
        acc = torch.zeros(min(rows, problem.len_q - row), problem.dim_v)
        for col in range(0, problem.len_k, columns):
            p, vj = tally.load(weights[row : row + rows, col : col + columns]), tally.load(v[col : col + columns])
            acc += tally.dot(p, vj)
        tally.store(out[row : row + rows], acc)
