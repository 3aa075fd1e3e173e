"""Forward mode of attention, and the derivatives of its backward. Called by `ops_second`.

With x_ij the score after soft-cap, score_mod and bias, p_ij = exp(x_ij - l_i), z_ij dropout's factor (0 or 1 / (1 - p); without
it 1), and for a direction (tq, tk, tv, tb) of the inputs

    u_ij = dx/ds scale (tq_i.k_j + q_i.tk_j) + tb_ij
    e_ij = z_ij do_i.v_j - delta_i,    r_ij = z_ij do_i.tv_j,    delta_i = do_i.o_i - dl_i

one bilinear form holds everything, as do and dl and the direction each enter it once:

    psi = sum_ij p_ij (e_ij u_ij + r_ij)  =  <backward(do, dl), direction>  =  <forward mode(direction), (do, dl)>

    `forward_mode`        its derivative by (do, dl):
                          tl_i = sum_j p_ij u_ij,   to_i = sum_j p_ij z_ij (u_ij v_j + tv_j) - tl_i o_i
    `derivatives`         its derivatives by q, k, v, the bias (p_ij (e_ij u_ij + r_ij)), o, l, do and dl, which a backward
                          through the backward or through the forward mode needs
    `backward_mode`       the backward's own derivative along a direction of all that it takes

o and l count as inputs of their own; what they depend on is autograd's business. A sink is a key with a value of 0. A pair that
a mask or a bias of -inf hides has p = u = 0, and keys that no row of a tile sees, or rows without a key of it, are 0 there.

Row blocks outside, column tiles inside, in torch operations on any device: memory is linear in the length. Products are in fp32
(fp64 for fp64). Slower than the kernels of the first order by a factor that depends on the device: nothing here is fused.
"""

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, Optional

import torch

from rowmax.cpu.blocks import Chunks, Geometry, RowBlock, by_kv_head, fold
from rowmax.cpu.dropout import Dropout
from rowmax.cpu.scores import LARGEST, by_group, cut, of_tile
from rowmax.errors import Unsupported
from rowmax.mask import visible
from rowmax.numerics import LN2
from rowmax.plan.tile import Tile
from rowmax.problem import Operands, Problem
from rowmax.score_mod import ScoreMod, find, lacks

# Scores of a tile; a step holds about ten tensors of this size, in fp32.
TILES = {"cpu": Tile(256, 4096), "cuda": Tile(512, 16384)}


class Direction(NamedTuple):
    """Of q, k, v, the sink and the bias, each shaped as what it belongs to."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sink: Optional[torch.Tensor] = None
    bias: Optional[torch.Tensor] = None


def forward_mode(problem: Problem, operands: Operands, out, lse, direction: Direction):
    """`(t_out, t_lse)`: how the output and the LSE change along `direction`."""
    t_out, t_lse = torch.zeros_like(out, memory_format=torch.contiguous_format), torch.zeros_like(lse)
    rows = (direction.q, out, _rows(lse), t_out, _rows(t_lse))
    with _ieee_products(problem, operands):
        for chunk, (q, tq, o, l, to, tl), (k, v, tk, tv) in _chunks(problem, operands, direction, rows, direction[1:3]):
            walk = _Walk(chunk, q, k, l, tq, tk)
            for block in chunk.blocks:
                moved, acc = _zeros(block, l), _zeros(block, o, walk.wide)
                for cols in block.tiles(chunk.width):
                    p, u, _, _ = walk.tile(block, cols)
                    w = p * u
                    moved += w.sum(-1, keepdim=True)
                    acc += walk.kept(w) @ walk.columns(v, cols) + walk.kept(p) @ walk.columns(tv, cols)
                if chunk.sink is not None:
                    moved += walk.sink_weight(block) * chunk.sink_rows(block, chunk.t_sink)
                _write(to, block, acc - moved * _take(block, o, walk))
                _write(tl, block, moved)
    return t_out, t_lse


def derivatives(problem: Problem, operands: Operands, d_out, d_lse, out, lse, direction: Direction, needs):
    """Of psi: `(by_d_out, by_d_lse, by_out, by_lse, by_q, by_k, by_v, by_sink, by_bias)`.

    Args:
        needs: of q, k, v and the bias; one that is not needed is empty. The others cost little.
    """
    by_d_out, by_out = (torch.zeros_like(out, memory_format=torch.contiguous_format) for _ in range(2))
    by_d_lse, by_lse = torch.zeros_like(lse), torch.zeros_like(lse)
    grads = [t.new_zeros(t.shape) for t in operands[:3]]
    by_sink = None if operands.sink is None else torch.zeros_like(operands.sink)
    by_bias = _sums_of_bias(problem, operands) if needs[3] else None
    rows = (direction.q, out, d_out, *(_rows(t) for t in (lse, d_lse, by_d_lse, by_lse)), by_d_out, by_out, grads[0])
    with _ieee_products(problem, operands):
        for chunk, in_rows, in_cols in _chunks(problem, operands, direction, rows, (*direction[1:3], *grads[1:]), by_bias):
            q, tq, o, do, l, dl, at_dl, at_l, at_do, at_o, at_q = in_rows
            k, v, tk, tv, at_k, at_v = in_cols
            walk = _Walk(chunk, q, k, l, tq, tk)
            acc_k, acc_v = (torch.zeros(t.flatten(0, 1).shape, dtype=walk.wide, device=t.device) for t in (at_k, at_v))
            for block in chunk.blocks:
                block_do, block_o = _take(block, do, walk), _take(block, o, walk)
                delta = (block_do * block_o).sum(-1, keepdim=True) - _take(block, dl, walk)
                moved, lost, acc, acc_q = _zeros(block, l), _zeros(block, l), _zeros(block, o, walk.wide), _zeros(block, q)
                for cols in block.tiles(chunk.width):
                    p, u, gain, curve = walk.tile(block, cols)
                    values, t_values = walk.columns(v, cols), walk.columns(tv, cols)
                    w, ds = p * u, walk.shown((walk.kept(block_do @ values.mT) - delta) * p)
                    moved += w.sum(-1, keepdim=True)
                    acc += walk.kept(w) @ values + walk.kept(p) @ t_values
                    by_x = ds * u + walk.shown(p * walk.kept(block_do @ t_values.mT))
                    lost += by_x.sum(-1, keepdim=True)
                    if needs[2]:
                        acc_v[:, cols] += walk.kept(w).mT @ walk.rows(block_do)
                    if by_bias is not None:
                        walk.add_to_bias(by_x, block, cols)
                    if gain is not None:
                        by_x, ds = by_x * gain + curve * ds, ds * gain
                    if needs[0]:
                        acc_q += by_x @ walk.keys(cols) + ds @ walk.t_keys(cols)
                    if needs[1]:
                        acc_k[:, cols] += by_x.mT @ walk.queries(block) + ds.mT @ walk.t_queries(block)
                if chunk.sink is not None and by_sink is not None:
                    p, u = walk.sink_weight(block), chunk.sink_rows(block, chunk.t_sink)
                    moved += p * u
                    lost -= p * u * delta
                    by_sink += chunk.of_heads(block, -p * u * delta, by_sink)
                _write(at_do, block, acc - moved * block_o)
                _write(at_o, block, -moved * block_do)
                _write(at_dl, block, moved)
                _write(at_l, block, -lost)
                _write(at_q, block, acc_q * problem.scale)
            at_k.copy_((acc_k * problem.scale).view(at_k.shape))
            at_v.copy_(acc_v.view(at_v.shape))
    grads = [grad if need else grad.new_empty(0) for grad, need in zip(grads, needs[:3], strict=True)]
    grads.append(lse.new_empty(0) if by_sink is None else by_sink)
    return by_d_out, by_d_lse, by_out, by_lse, *grads, _of_bias(operands, by_bias, lse)


def backward_mode(problem: Problem, operands: Operands, given, t_given, direction: Direction):
    """`(t_dq, t_dk, t_dv, t_dsink, t_dbias)`: how the gradients change.

    Args:
        given: `(d_out, d_lse, out, lse)`; t_given: their direction.
    """
    grads = [t.new_zeros(t.shape) for t in operands[:3]]
    t_sink = None if operands.sink is None else torch.zeros_like(operands.sink)
    t_bias = None if operands.bias is None else _sums_of_bias(problem, operands)
    shaped = [(do, _rows(dl), o, _rows(l)) for do, dl, o, l in (given, t_given)]
    rows = (direction.q, *shaped[0], *shaped[1], grads[0])
    with _ieee_products(problem, operands):
        for chunk, in_rows, in_cols in _chunks(problem, operands, direction, rows, (*direction[1:3], *grads[1:]), t_bias):
            q, tq, do, dl, o, l, t_do, t_dl, t_o, t_l, at_q = in_rows
            k, v, tk, tv, at_k, at_v = in_cols
            walk = _Walk(chunk, q, k, l, tq, tk)
            acc_k, acc_v = (torch.zeros(t.flatten(0, 1).shape, dtype=walk.wide, device=t.device) for t in (at_k, at_v))
            for block in chunk.blocks:
                d, t_d, out, t_out = (_take(block, t, walk) for t in (do, t_do, o, t_o))
                delta = (d * out).sum(-1, keepdim=True) - _take(block, dl, walk)
                t_delta = (t_d * out + d * t_out).sum(-1, keepdim=True) - _take(block, t_dl, walk)
                moved, acc_q = _take(block, t_l, walk), _zeros(block, q)
                for cols in block.tiles(chunk.width):
                    p, u, gain, curve = walk.tile(block, cols)
                    values, t_values = walk.columns(v, cols), walk.columns(tv, cols)
                    tp = walk.shown(p * (u - moved))
                    e = walk.kept(d @ values.mT) - delta
                    t_e = walk.kept(t_d @ values.mT + d @ t_values.mT) - t_delta
                    ds, t_ds = walk.shown(p * e), walk.shown(tp * e + p * t_e)
                    if t_bias is not None:
                        walk.add_to_bias(t_ds, block, cols)
                    if gain is not None:
                        ds, t_ds = gain * ds, gain * t_ds + curve * ds
                    acc_q += t_ds @ walk.keys(cols) + ds @ walk.t_keys(cols)
                    acc_k[:, cols] += t_ds.mT @ walk.queries(block) + ds.mT @ walk.t_queries(block)
                    acc_v[:, cols] += walk.kept(tp).mT @ walk.rows(d) + walk.kept(p).mT @ walk.rows(t_d)
                if chunk.sink is not None and t_sink is not None:
                    p = walk.sink_weight(block)
                    change = (chunk.sink_rows(block, chunk.t_sink) - moved) * delta + t_delta
                    t_sink += chunk.of_heads(block, -p * change, t_sink)
                _write(at_q, block, acc_q * problem.scale)
            at_k.copy_((acc_k * problem.scale).view(at_k.shape))
            at_v.copy_(acc_v.view(at_v.shape))
    return *grads, given[3].new_empty(0) if t_sink is None else t_sink, _of_bias(operands, t_bias, given[3])


class _Chunk(NamedTuple):
    """Some KV heads of some sequences, and how they are cut.

    Attributes:
        slopes, sink, t_sink: `[n, G]`, or None.
        bias, t_bias, mask, by_bias: `[b, Hk, G, Tq, Tk]`, 1 where broadcast, or None; the last is added to.
        dropout: or None; mod: a function of scores and what it takes for all rows and columns, or None.
    """

    problem: Problem
    geometry: Geometry
    blocks: list[RowBlock]
    width: int
    part: tuple[slice, slice]
    slopes: Optional[torch.Tensor]
    sink: Optional[torch.Tensor]
    t_sink: Optional[torch.Tensor]
    bias: Optional[torch.Tensor]
    t_bias: Optional[torch.Tensor]
    mask: Optional[torch.Tensor]
    by_bias: Optional[torch.Tensor]
    dropout: Optional[Dropout]
    mod: Optional[tuple[ScoreMod, tuple[torch.Tensor, ...]]]

    def sink_rows(self, block: RowBlock, per_head) -> torch.Tensor:
        """`[n, G]` of heads as `[n, G * rows, 1]`."""
        return per_head[..., None].expand(-1, -1, block.rows).flatten(1).unsqueeze(-1)

    def of_heads(self, block: RowBlock, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """`[n, G * rows, 1]` added up for each query head, `[H]`; 0 for the heads of other chunks."""
        sums = rows.unflatten(1, (-1, block.rows)).sum((2, 3))  # [n, G]
        heads = torch.zeros_like(like).view(self.problem.heads_k, -1)
        here = heads[self.part[1]]
        here += sums.view(-1, *here.shape).sum(0)
        return heads.flatten()


class _Walk:
    """The tiles of a chunk: weights, and how scores change along a direction."""

    def __init__(self, chunk: _Chunk, q, k, lse, tq, tk):
        self.chunk, self.wide = chunk, torch.promote_types(q.dtype, torch.float32)
        self._q, self._tq, self._k, self._tk = q, tq, k, tk
        self._lse = lse.masked_fill(torch.isneginf(lse), 0.0)  # of rows that see nothing, whose weights are exp(-inf) then
        self._sizes = (*q.shape[:3], -1)  # b, h, G
        self._shown: Optional[torch.Tensor] = None  # of the tile, [n, G * rows, cols], where something hides pairs
        self._kept: Optional[torch.Tensor] = None  # the factors of dropout, of this shape

    def queries(self, block: RowBlock) -> torch.Tensor:
        return self.rows(_take(block, self._q, self))

    def t_queries(self, block: RowBlock) -> torch.Tensor:
        return self.rows(_take(block, self._tq, self))

    def keys(self, cols: slice) -> torch.Tensor:
        return self.columns(self._k, cols)

    def t_keys(self, cols: slice) -> torch.Tensor:
        return self.columns(self._tk, cols)

    def rows(self, t: torch.Tensor) -> torch.Tensor:
        """`[n, G * rows, D]`, 0 in rows that see no key of the tile, whatever they hold."""
        return t if self._shown is None else t.masked_fill(~self._shown.any(2, keepdim=True), 0.0)

    def columns(self, t: torch.Tensor, cols: slice) -> torch.Tensor:
        """`[n, cols, D]` of `[b, h, T, D]`, 0 in keys that no row of the tile sees, whatever they hold."""
        own = _cols(t, cols, self)
        return own if self._shown is None else own.masked_fill(~self._shown.any(1).unsqueeze(2), 0.0)

    def shown(self, t: torch.Tensor) -> torch.Tensor:
        """`[n, G * rows, cols]`, 0 for hidden pairs, whatever was there."""
        return t if self._shown is None else t.masked_fill(~self._shown, 0.0)

    def kept(self, t: torch.Tensor) -> torch.Tensor:
        """`[n, G * rows, cols]` times dropout's factors."""
        return t if self._kept is None else t * self._kept

    def add_to_bias(self, t: torch.Tensor, block: RowBlock, cols: slice) -> None:
        """`[n, G * rows, cols]` to the sums of the bias, over what it is broadcast in."""
        target, terms = of_tile(self.chunk.by_bias, block, cols), self._pairs(t)
        over = [dim for dim in range(5) if target.shape[dim] == 1 and terms.shape[dim] != 1]
        target.add_(terms.sum(over, keepdim=True) if over else terms)

    def _pairs(self, t: torch.Tensor) -> torch.Tensor:
        """`[n, G * rows, cols]` as `[b, h, G, rows, cols]`, a view."""
        return t.view(*self._sizes, t.shape[-1])

    def _modify(self, x, u, gain, curve, block: RowBlock, i, j):
        """Scores bent by the caller's function, in place; u and what `tile` gives of it, by the chain rule."""
        function, (sequences, heads, *numbers) = self.chunk.mod  # type: ignore[misc]
        where = (sequences, heads, i + self.chunk.geometry.shift, j, *numbers)
        score = self._pairs(x)
        slope, bent = (t.reshape(x.shape) for t in function.slopes(score, *where, order=2))
        score.copy_(function.bend(score.clone(), *where))
        curve = bent * u if gain is None else bent * u * gain + slope * curve  # u is past the soft-cap
        return u.mul_(slope), slope if gain is None else slope * gain, curve

    def tile(self, block: RowBlock, cols: slice):
        """`(p, u, gain, curve)`, `[n, G * rows, cols]`: gain is the derivative of soft-cap and score_mod, curve how it changes
        along the direction; None without them."""
        problem, chunk = self.chunk.problem, self.chunk
        self._shown = self._kept = None
        q, tq, k, tk = self.queries(block), self.t_queries(block), self.keys(cols), self.t_keys(cols)
        x = (q @ k.mT).mul_(problem.scale)
        u = (tq @ k.mT).add_(q @ tk.mT).mul_(problem.scale)
        gain = curve = None
        if problem.softcap:
            x.div_(problem.softcap)
            gain = x.cosh().square_().reciprocal_()  # 1 - tanh^2, without its cancellation
            x.tanh_()
            curve = gain * u * x * (-2.0 / problem.softcap)
            u.mul_(gain)
            x.mul_(problem.softcap)
        i = torch.arange(block.row, block.row + block.rows, device=x.device).unsqueeze(1)
        j = torch.arange(cols.start, cols.stop, device=x.device)
        by_row = x.unflatten(1, (-1, block.rows))
        _, len_k, band = shape = chunk.geometry
        if chunk.mod is not None:
            u, gain, curve = self._modify(x, u, gain, curve, block, i, j)
        if chunk.slopes is not None:
            distance = (i + shape.shift - j).abs_().to(x.dtype)
            by_row.sub_(chunk.slopes[..., None, None] * distance)
        hidden = None
        if chunk.bias is not None:
            bias = of_tile(chunk.bias, block, cols).to(x.dtype)
            hidden = bias == -torch.inf
            self._pairs(x).add_(bias.clamp(-LARGEST * LN2, LARGEST * LN2))
            if chunk.t_bias is not None:
                self._pairs(u).add_(of_tile(chunk.t_bias, block, cols))
        if chunk.mask is not None:
            masked = ~of_tile(chunk.mask, block, cols)
            hidden = masked if hidden is None else hidden | masked
        if cols.start < block.full_start or cols.stop > block.full_end:
            seen = visible(i, j, shape.shift, len_k, band)
            by_row.masked_fill_(~seen, -torch.inf)
            if hidden is not None or chunk.mod is not None:
                hidden = ~seen if hidden is None else hidden | ~seen
        if hidden is not None:
            self._pairs(x).masked_fill_(hidden, -torch.inf)
            self._pairs(u).masked_fill_(hidden, 0.0)
            self._shown = ~hidden.expand(self._pairs(x).shape).reshape(x.shape)
            gain, curve = (None if t is None else self.shown(t) for t in (gain, curve))
        if chunk.dropout is not None:
            kept = chunk.dropout.kept(slice(block.row, block.row + block.rows), cols)
            self._kept = kept.to(x.dtype).mul_(chunk.dropout.factor).expand(self._pairs(x).shape).reshape(x.shape)
        # A weight is never above 1; rounding alone may lift a huge score over the LSE.
        return x.sub_(_take(block, self._lse, self)).clamp_(max=0.0).exp_(), u, gain, curve

    def sink_weight(self, block: RowBlock) -> torch.Tensor:
        """`[n, G * rows, 1]`."""
        sink = self.chunk.sink_rows(block, self.chunk.sink)
        return (sink - _take(block, self._lse, self)).clamp_(max=0.0).exp_()


def _chunks(
    problem: Problem, operands: Operands, direction: Direction, for_q, for_k, by_bias=None
) -> Iterator[tuple[_Chunk, list, list]]:
    """`(chunk, rows, cols)`: q and `for_q` as `[b, h, G, T, ...]`, k, v and `for_k` as `[b, h, T, D]`, all views."""
    if why_not := lacks(problem.score_mod, "reference"):
        raise Unsupported("derivatives of second order are computed in torch:", {"score_mod": why_not})
    tile = TILES.get(operands.q.device.type, TILES["cuda"])
    if problem.heads_q == 0:
        return
    rows, cols = [operands.q, *for_q], [operands.k, operands.v, *for_k]
    for number, dense_rows, dense_cols in _sequences(problem, operands, rows, cols):
        rows, cols = [by_kv_head(t, problem.heads_k) for t in dense_rows], [t.transpose(1, 2) for t in dense_cols]
        batch, heads_k, group, len_q = rows[0].shape[:4]
        geometry = Geometry(len_q, cols[0].shape[2], problem.band)
        shares = Chunks.of(tile, geometry, batch, heads_k, group, False)
        blocks, parts = list(geometry.row_blocks(shares.step)), shares.parts
        if problem.sink:  # which rows without a key have, too
            starts = range(0, geometry.live_row, shares.step)
            blocks += [RowBlock(geometry, row, min(shares.step, geometry.live_row - row), 0, 0, 0, 0) for row in starts]
            parts = parts or [(slice(0, batch), slice(0, heads_k))]
        for part in parts:
            per_head = []
            for t in (operands.slopes, operands.sink, direction.sink):
                if t is not None:
                    t = t[number : number + batch] if t.dim() == 2 else t.expand(batch, -1)
                    t = t.reshape(batch, heads_k, group)[part].flatten(0, 1)
                per_head.append(t)
            of_pairs = (
                None if t is None else cut(by_group(problem, t), *part)
                for t in (operands.bias, None if operands.bias is None else direction.bias, operands.mask, by_bias)
            )
            numbered = _numbered(problem, operands, number, batch, part)
            given: tuple = (*per_head, *of_pairs, *numbered)
            chunk = _Chunk(problem, geometry, blocks, shares.width, part, *given)
            yield chunk, [t[part] for t in rows], [t[part] for t in cols]


def _numbered(problem: Problem, operands: Operands, number: int, batch: int, part: tuple[slice, slice]):
    """`(dropout, mod)` of some heads of some sequences, from sequence `number` on; None for what is not there."""
    if not (problem.dropout or problem.score_mod):
        return None, None
    device = operands.q.device
    heads = torch.arange(problem.heads_q, device=device).view(1, problem.heads_k, problem.group, 1, 1)
    sequences = (number + torch.arange(batch, device=device)).view(-1, 1, 1, 1, 1)[part[0]]
    dropout = mod = None
    if problem.dropout:
        odds = (int(operands.seed), problem.drop_below, problem.drop_factor)  # type: ignore[arg-type]
        dropout = Dropout(*odds, heads[:, part[1]], sequences, 0, 0)
    if problem.score_mod:
        numbers = (t.view(heads.shape)[:, part[1]] for t in operands.numbers)  # type: ignore[union-attr]
        mod = find(problem.score_mod), (sequences, heads[:, part[1]], *numbers)
    return dropout, mod


def _sums_of_bias(problem: Problem, operands: Operands) -> torch.Tensor:
    """Where its gradients are summed."""
    return torch.zeros(operands.bias.shape, dtype=problem.lse_dtype, device=operands.q.device)  # type: ignore[union-attr]


def _of_bias(operands: Operands, sums: Optional[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0) if sums is None else sums.to(operands.bias.dtype)  # type: ignore[union-attr]


def _sequences(problem: Problem, operands: Operands, rows: list, cols: list) -> Iterator[tuple[int, list, list]]:
    """Each set of equally long sequences as dense tensors, and the number of the first one."""
    if not problem.packed:
        yield 0, rows, cols
        return
    bounds = [_bounds(cu, tensor.shape[0]) for cu, tensor in zip(operands[3:5], operands[:2], strict=True)]
    for i, ((q0, q1), (k0, k1)) in enumerate(zip(*(pairwise(cuts) for cuts in bounds), strict=True)):
        if q0 < q1:
            yield i, [t[q0:q1].unsqueeze(0) for t in rows], [t[k0:k1].unsqueeze(0) for t in cols]


def _bounds(cu_seqlens, total: int) -> list[int]:
    """The bounds of packed sequences, read back from a GPU, and clamped as the kernels do."""
    bounds, least = [], 0
    for value in cu_seqlens.tolist():
        least = min(max(value, least), total)
        bounds.append(least)
    return bounds


@contextlib.contextmanager
def _ieee_products(problem: Problem, operands: Operands) -> Iterator[None]:
    """fp32 means IEEE fp32, also where the program allows TF32 for its own matmuls; and no autocast."""
    matmul = torch.backends.cuda.matmul
    kind = operands.q.device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext():
        if kind != "cuda" or problem.dtype != torch.float32 or matmul.fp32_precision != "tf32":
            yield
            return
        try:
            legacy = matmul.allow_tf32
        except RuntimeError:  # the precision was set through torch's newer interface, which the older one cannot read
            legacy = None
        matmul.allow_tf32 = False
        try:
            yield
        finally:
            if legacy is not None:
                matmul.allow_tf32 = legacy
            matmul.fp32_precision = "tf32"


def _rows(lse: torch.Tensor) -> torch.Tensor:
    """`[.., H, T]` seen as `[.., T, H]`."""
    return lse.movedim(-1, -2)


def _zeros(block: RowBlock, like: torch.Tensor, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    """Sums of a row block: `[n, G * rows, D]` for `[b, h, G, T, D]`, one column for `[b, h, G, T]`."""
    dim = like.shape[4] if like.dim() == 5 else 1
    shape = (like.shape[0] * like.shape[1], like.shape[2] * block.rows, dim)
    return torch.zeros(shape, dtype=dtype or torch.promote_types(like.dtype, torch.float32), device=like.device)


def _take(block: RowBlock, t: torch.Tensor, walk: "_Walk") -> torch.Tensor:
    """Rows of a block of `[b, h, G, T, D]`, one column of `[b, h, G, T]`: `[n, G * rows, D]`, in the type of the products."""
    t = t[:, :, :, block.row : block.row + block.rows]
    width = t.shape[4] if t.dim() == 5 else 1
    return t.reshape(t.shape[0] * t.shape[1], t.shape[2] * t.shape[3], width).to(walk.wide)


def _cols(t: torch.Tensor, cols: slice, walk: "_Walk") -> torch.Tensor:
    """`[n, cols, D]` of `[b, h, T, D]`, in the type of the products."""
    return fold(t[:, :, cols], walk.wide)


def _write(target: torch.Tensor, block: RowBlock, values: torch.Tensor) -> None:
    where = target[:, :, :, block.row : block.row + block.rows]
    where.copy_(values.view(where.shape))
