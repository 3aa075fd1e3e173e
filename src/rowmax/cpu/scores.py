"""What happens to scores between the product and the softmax, on the CPU: soft-cap, ALiBi, and the logit of the sink.

    x_ij = c tanh(s_ij / c) - slope |i + shift - j|,    l_i = sum_j exp(x_ij) + exp(sink)

Scores are in units of log2 (x times log2(e)), rows of a group folded: `[n, G * rows, cols]`. The sink is a key whose value is
0: it belongs to the first column tile of a row block, and its gradient is -sum_i exp(sink - lse_i) delta_i.
"""

from typing import NamedTuple, Optional

import torch

from rowmax.cpu.blocks import RowBlock
from rowmax.numerics import LOG2E


class Scores(NamedTuple):
    """Of some heads, all in the type that scores are computed in; what is None, or 0, a problem has not.

    Attributes:
        softcap: c, natural units.
        slopes_log2, sink_log2: `[n, G]`, n KV heads of all sequences.
    """

    softcap: float
    slopes_log2: Optional[torch.Tensor]
    sink_log2: Optional[torch.Tensor]

    @classmethod
    def of(cls, problem, operands, sequence: int, batch: int, compute: torch.dtype) -> "Scores":
        """For `batch` sequences from `sequence` on."""
        per_head = []
        for t in (operands.slopes, operands.sink):
            if t is not None:
                t = t[sequence : sequence + batch] if t.dim() == 2 else t.expand(batch, -1)
                t = (t.to(compute) * LOG2E).reshape(batch, problem.heads_k, problem.group)
            per_head.append(t)
        return cls(problem.softcap, *per_head)

    def part(self, cut) -> "Scores":
        """Those of the sequences and KV heads of `cut`, folded."""
        slopes, sink = (None if t is None else t[cut].flatten(0, 1) for t in self[1:])
        return Scores(self.softcap, slopes, sink)

    def bend(self, s: torch.Tensor, block: RowBlock, cols: slice, want_gain: bool = False) -> Optional[torch.Tensor]:
        """Bend the scores of a tile in place; the soft-cap's derivative, if wanted and there is a cap."""
        gain = None
        if self.softcap:
            cap = self.softcap * LOG2E
            t = s.div_(cap)
            if want_gain:  # 1 - tanh^2, without its cancellation
                gain = t.cosh().square_().reciprocal_()
            t.tanh_().mul_(cap)
        if self.slopes_log2 is not None:
            i = torch.arange(block.row, block.row + block.rows, device="cpu").unsqueeze(1) + block.geometry.shift
            distance = (i - torch.arange(cols.start, cols.stop, device="cpu")).abs_().to(s.dtype)
            s.unflatten(1, (-1, block.rows)).sub_(self.slopes_log2[..., None, None] * distance)
        return gain

    def sink_rows(self, block: RowBlock) -> Optional[torch.Tensor]:
        """`[n, G * rows, 1]`."""
        if self.sink_log2 is None:
            return None
        return self.sink_log2[..., None].expand(-1, -1, block.rows).flatten(1).unsqueeze(-1)


def start_lse(problem, operands, lse: torch.Tensor) -> None:
    """The LSE of rows that see nothing is the sink; of rows outside every sequence it stays -inf. `lse` is `[.., H, T]`."""
    end = lse.shape[-1] if operands.cu_seqlens_q is None else int(operands.cu_seqlens_q[-1])
    lse[..., :end] = operands.sink.unsqueeze(-1)


def sink_gradient(problem, operands, out, lse, grad_out, grad_lse) -> torch.Tensor:
    """`[H]`, in the LSE's type."""
    delta = torch.zeros_like(lse)
    if grad_out is not None:
        delta += (out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(-1).movedim(-1, -2)
    if grad_lse is not None:
        delta -= grad_lse
    terms = torch.exp(operands.sink.unsqueeze(-1) - lse) * delta
    return -terms.masked_fill_(torch.isneginf(lse), 0.0).sum(-1).view(-1, problem.heads_q).sum(0)
