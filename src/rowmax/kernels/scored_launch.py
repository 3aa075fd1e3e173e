"""What a launch of bent scores has more than a plain one: a bias, a mask, a seed, and the gradients of a sink and a bias.

`launch` asks for the arguments, and for the gradients of the sink and of the bias behind its own.
"""

from typing import Optional

import torch

from rowmax.errors import ProblemError
from rowmax.kernels.launch import Call, _bounded, _cap, _constants, _launch, _strides
from rowmax.kernels.triton.bias import bias_kernel
from rowmax.numerics import LOG2E
from rowmax.plan.tile import Tile
from rowmax.problem import Operands, Problem
from rowmax.score_mod import find

MOST_APART = 2**23  # kernels count within a tile, of up to 256 rows, in 32 bits


def given(operands: Operands) -> tuple[Optional[torch.Tensor], ...]:
    """Bias, mask and seed as kernels take them: booleans are bytes there."""
    return operands.bias, None if operands.mask is None else operands.mask.view(torch.uint8), operands.seed


def given_numbers(problem: Problem, operands: Operands) -> tuple:
    """Strides (batch, head, query, key) of the bias and of the mask, 0 where they are broadcast, and the odds of dropout: what
    a draw of 15 bits is compared with, and the factor of what is kept. None for what is not there."""
    for name, tensor in (("bias", operands.bias), ("mask", operands.mask)):
        if tensor is not None and max(_pair_strides(tensor)[2:]) >= MOST_APART:  # type: ignore[index]
            raise ProblemError(
                f"{name}: neighbouring queries and keys must be less than {MOST_APART} elements apart; got strides "
                f"{tensor.stride()}. Call {name}.contiguous()."
            )
    odds = (problem.drop_below, problem.drop_factor) if problem.dropout else None
    return _pair_strides(operands.bias), _pair_strides(operands.mask), odds


def functions(problem: Problem) -> tuple:
    """Those of a problem's `ScoreMod`, forward and derivative, and how many numbers they take."""
    mod = find(problem.score_mod)
    return mod.forward, mod.backward, len(mod.numbers)


def _pair_strides(tensor: Optional[torch.Tensor]) -> Optional[tuple[int, ...]]:
    if tensor is None:
        return None
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def rows_of_sinks(lse, sink, cu_seqlens_q) -> None:
    """The LSE where no row sees a key: the sink, in rows that belong to a sequence."""
    if cu_seqlens_q is None:
        lse.copy_(sink.unsqueeze(-1))
    else:
        row = torch.arange(lse.shape[-1], device=lse.device)
        own = (row >= cu_seqlens_q[0]) & (row < cu_seqlens_q[-1])
        lse.copy_(torch.where(own, sink.unsqueeze(-1), -torch.inf))


def sink_gradient(sink, lse_log2, delta) -> torch.Tensor:
    """`[H]`: -sum over rows of p_sink delta; the sink is a key whose value is 0. Rows without weights have an infinite LSE.

    A weight is at most 1, whatever the LSE of rows that are nobody's, whose delta is 0.
    """
    terms = torch.exp2((sink.unsqueeze(-1) * LOG2E - lse_log2).clamp(max=0.0)) * delta
    return -terms.masked_fill(torch.isinf(lse_log2), 0.0).sum(-1).view(-1, sink.shape[0]).sum(0)


def gradients(problem: Problem, operands: Operands, needs, tile: Tile, grad_out, lse_log2, delta) -> list[torch.Tensor]:
    """Those of the sink and of the bias, as far as `needs` has them; empty where it is False."""
    found = [delta.new_empty(0) for _ in needs]
    if needs[0]:
        found[0] = sink_gradient(operands.sink, lse_log2, delta)
    if len(needs) > 1 and needs[1]:
        call, sums = bias_call(problem, operands, tile, grad_out, lse_log2.contiguous(), delta.contiguous())
        _launch(delta.device, call)
        found[1] = bias_gradient(operands, sums)
    return found


def idle_gradients(operands: Operands, needs, lse, grad_lse) -> list[torch.Tensor]:
    """As `gradients`, where no query has a key."""
    found = [lse.new_empty(0) for _ in needs]
    if needs[0]:
        delta = torch.zeros_like(lse) if grad_lse is None else -grad_lse
        found[0] = sink_gradient(operands.sink, lse * LOG2E, delta)
    if len(needs) > 1 and needs[1]:
        found[1] = operands.bias.new_zeros(operands.bias.shape)  # type: ignore[union-attr]
    return found


def bias_call(problem: Problem, operands: Operands, tile: Tile, grad_out, lse_log2, delta) -> tuple[Call, torch.Tensor]:
    """`(call, sums)` of the kernel; `bias_gradient` makes the gradient of the sums."""
    q, k, v = operands[:3]
    own_b, own_h, own_q, own_k = (letter in problem.bias.split(",")[0] for letter in "bhqk")
    whole = own_q and own_k
    if not whole:  # sums are left for each sequence and head, that there be programs enough, and for rows if for nothing
        own_b, own_h, own_q = True, True, not own_k
    own = (own_b, own_h, own_q, own_k)
    sizes = (problem.batch, problem.heads_q, problem.len_q, problem.len_k)
    shape = tuple(size if has else 1 for size, has in zip(sizes, own, strict=True))
    sums = q.new_empty(shape, dtype=operands.bias.dtype if whole else torch.float32)  # type: ignore[union-attr]
    row_tiles, col_tiles = -(-problem.len_q // tile.block_m), -(-problem.len_k // tile.block_n)
    function, _, count = functions(problem) if problem.score_mod else (None, None, 0)
    tensors = (q, k, v, grad_out, sums, lse_log2, delta, operands.slopes, *given(operands), operands.numbers)
    numbers = (
        *(_strides(t) for t in (q, k, v, q if grad_out is None else grad_out)),
        *(
            *given_numbers(problem, operands),
            _pair_strides(sums),
            problem.scale,
            _cap(problem),
            _bounded(problem),
            problem.batch,
        ),
        *(problem.heads_q, row_tiles, col_tiles, problem.len_q, problem.len_k, *_constants(problem, tile)),
        *(problem.alibi == "batch", *own, function, count),
    )
    programs = (problem.batch if own_b else 1) * (problem.heads_q if own_h else 1)
    programs *= (row_tiles if own_q else 1) * (col_tiles if own_k else 1)
    return Call(bias_kernel, programs, tensors, numbers, tile), sums


def bias_gradient(operands: Operands, sums: torch.Tensor) -> torch.Tensor:
    """In the shape and type of the bias."""
    bias = operands.bias
    over = [dim for dim in range(4) if bias.shape[dim] == 1 and sums.shape[dim] != 1]  # type: ignore[union-attr]
    return (sums.sum(over, keepdim=True) if over else sums).to(bias.dtype)  # type: ignore[union-attr]
