"""What a timed problem does to scores beside scaling and its band: the tensors it takes, and the definition on some rows.

    s_ij = cap(scale q_i.k_j) - slope |i + shift - j| + bias_ij  where mask_ij;   P = softmax over keys and the sink;   Z P

with Z the dropout: 1 / (1 - p) for the weights that the seed keeps, else 0. `calls.py` draws the tensors, `check.py` asks
`Rows`.
"""

from typing import NamedTuple, Optional, Union

import torch

from rowmax import reference
from rowmax.problem import Operands, Problem


def draw(problem: Problem, generator: torch.Generator, device: torch.device) -> tuple[Optional[torch.Tensor], ...]:
    """`(slopes, sink, bias, mask, seed)` of `Operands`, `None` for what the problem has not.

    Slopes are 2^(-8 h / H), as published, a little less steep from sequence to sequence where each has its own. Sinks are
    numbers of bf16, the type in which some peers take them. A bias is standard normal, drawn in its own type, since a wider
    copy of the largest would not fit beside it. A mask shows seven of ten pairs, and the first key to every query.
    """
    heads = torch.arange(1, problem.heads_q + 1, device=device)
    sizes = dict(zip("bhqk", (problem.batch, problem.heads_q, problem.len_q, problem.len_k), strict=True))
    wide = {"device": device, "dtype": problem.lse_dtype}
    slopes = sink = bias = mask = seed = None
    if problem.alibi:
        slopes = (2.0 ** (-8.0 * heads / problem.heads_q)).to(problem.lse_dtype)
    if problem.alibi == "batch":
        slopes = slopes / torch.arange(1, problem.batch + 1, **wide)[:, None]
    if problem.sink:
        sink = (2 * torch.randn(problem.heads_q, generator=generator, **wide) + 2 * (heads % 3)).bfloat16().to(**wide)
    if problem.bias:
        letters, _, separate = problem.bias.partition(",")
        shape = [size if letter in letters else 1 for letter, size in sizes.items()]
        bias = torch.randn(shape, generator=generator, device=device, dtype=torch.float32 if separate else problem.dtype)
    if problem.mask:
        shape = [size if letter in problem.mask else 1 for letter, size in sizes.items()]
        mask = torch.rand(shape, generator=generator, device=device) < 0.7
        mask[..., 0] = True
    if problem.dropout:
        seed = torch.randint(-(2**62), 2**62, (1,), generator=generator, device=device)
    return slopes, sink, bias, mask, seed


def uncheckable(problem: Problem) -> str:
    """Why a sample cannot show that gradients are right; "" if it can. It has one sequence, and of a bias some rows."""
    bias = problem.bias.partition(",")[0]
    sizes = zip("bhqk", (problem.batch, problem.heads_q, problem.len_q, problem.len_k), strict=True)
    if bias and any(letter not in bias and size > 1 for letter, size in sizes):
        return "the gradient of a bias that is broadcast is a sum over more than the check's sample"
    if problem.sink and problem.batch > 1:
        return "the gradient of a sink is a sum over all sequences, of which the check computes one"
    return ""


class Weights(NamedTuple):
    """Of some rows of one head, `[rows, keys]`, in the type of the scores that they came from."""

    p: torch.Tensor  # probabilities; what is not seen is 0
    z: Union[float, torch.Tensor]  # dropout's factor on them
    of_sink: Optional[torch.Tensor]  # [rows, 1], the sink's probability
    steep: Union[float, torch.Tensor]  # d cap(x) / d x


class Rows(NamedTuple):
    """Some queries of one head against every key of their sequence, from the definition. Numbers are fp64."""

    problem: Problem
    seen: torch.Tensor  # [rows, keys]
    added: Optional[torch.Tensor]  # [rows, keys], of ALiBi and bias
    sink: Optional[torch.Tensor]  # []
    kept: Optional[torch.Tensor]  # [rows, keys], by dropout

    @classmethod
    def of(cls, problem: Problem, operands: Operands, sequence: int, sizes: tuple[int, int], head: int, rows) -> "Rows":
        """`sequence`: its number; `sizes`: its queries and keys; `rows`: which queries of it."""
        len_q, len_k = sizes
        j = torch.arange(len_k, device=rows.device)[None, :]
        distance = j - (rows[:, None] + len_k - len_q)  # the last query sees the last key
        seen = torch.ones_like(distance, dtype=torch.bool)
        if problem.band.left is not None:
            seen &= distance >= -problem.band.left
        if problem.band.right is not None:
            seen &= distance <= problem.band.right
        if operands.mask is not None:
            seen &= _pairs(operands.mask, sequence, head, rows)
        added = sink = kept = None
        if operands.slopes is not None:
            slopes = operands.slopes if operands.slopes.dim() == 1 else operands.slopes[sequence]
            added = -slopes[head].double() * distance.abs()
        if operands.bias is not None:
            bias = _pairs(operands.bias, sequence, head, rows).double().expand(seen.shape)
            added = bias if added is None else added + bias
        if operands.sink is not None:
            sink = operands.sink[head].double()
        if operands.seed is not None:
            drawn = (int(operands.seed), problem.dropout, [sequence], problem.heads_q, len_q, len_k)
            kept = reference.dropout(*drawn, rows=rows)[0, head]
        return cls(problem, seen, added, sink, kept)

    def weights(self, scaled: torch.Tensor) -> Weights:
        """From the scaled products, computed in their type."""
        scores, steep, z, of_sink = scaled, 1.0, 1.0, None
        if cap := self.problem.softcap:
            scores = scores / cap
            scores, steep = cap * torch.tanh(scores), 1 / torch.cosh(scores) ** 2
        if self.added is not None:
            scores = scores + self.added.to(scores.dtype)
        scores = torch.where(self.seen, scores, -torch.inf)
        if self.sink is None:
            p = torch.softmax(scores, -1)
        else:
            logits = self.sink.to(scores.dtype).expand(len(scores), 1)
            p, of_sink = torch.softmax(torch.cat([scores, logits], -1), -1).split([scores.shape[-1], 1], -1)
        if self.kept is not None:
            z = self.kept.to(scores.dtype) * self.problem.drop_factor
        return Weights(torch.where(self.seen, p, 0.0), z, of_sink, steep)

    def sizes(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """`[rows, 1]`: how big the terms of the seen scores are."""
        found = (q.abs() @ k.abs().T) * abs(self.problem.scale)
        found = found if self.added is None else found + self.added.abs()
        return torch.where(self.seen, found, 0.0).amax(-1, keepdim=True)


def _pairs(tensor: torch.Tensor, sequence: int, head: int, rows: torch.Tensor) -> torch.Tensor:
    """`[rows or 1, keys or 1]` of one sequence and head."""
    own = tensor[sequence if tensor.shape[0] > 1 else 0, head if tensor.shape[1] > 1 else 0]
    return own[rows] if own.shape[0] > 1 else own
