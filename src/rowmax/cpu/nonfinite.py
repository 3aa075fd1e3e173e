"""NaN and infinity reach exactly the rows that see them: the repair of a result that came out non-finite.

The keys that a row sees are an interval or two, so "does row i see a marked key" is a difference of two prefix sums over the
keys, and "is key j seen by a marked row" one over the rows: the repair is linear in the length, but for masks, which it
multiplies with the marks. The values themselves are
replaced by 0 before the algorithm runs again; a hidden pair has weight exactly 0, so rows and keys that are not marked
come out bit for bit as if the non-finite values had been finite.
"""

import torch

from rowmax.cpu import blocks
from rowmax.mask import early_keys, end_key, end_query, first_key, first_query, visible


def all_finite(t) -> bool:
    """Whether every element is finite, by one sum; a sum that overflows also answers no, which costs time, not truth."""
    # torch sums bf16 in fp32, and 4 times faster when the result is bf16 too; the range of fp16 is too small for that.
    return t.numel() == 0 or bool(torch.isfinite(t.sum(dtype=torch.float32 if t.dtype == torch.float16 else None)))


def forward(problem, operands, run):
    """The results of `run(operands)`, which keeps hidden scores apart, with the non-finite values of V marked in the rows that
    see them."""
    bad = ~torch.isfinite(operands.v)
    if not bool(bad.any()):
        return run(operands)
    out, lse = run(operands._replace(v=operands.v.masked_fill(bad, 0.0)))
    for (_, o), (_, _, marked) in blocks.sequences(problem, operands, (out,), (bad,)):
        o.masked_fill_(_rows_that_see(problem, operands, marked, o.shape[1]), torch.nan)
    return out, lse


def backward(problem, operands, out, lse, grad_out, grad_lse, grads, run):
    """Gradients with non-finite values marked: dq of every row that has or sees one, and through those rows dk and dv.

    dv does not depend on V: a row whose own weights and do are finite contributes to it as usual.
    """
    bad_q, bad_k, bad_v = (~torch.isfinite(t) for t in operands[:3])
    bad_do = torch.zeros_like(out, dtype=torch.bool) if grad_out is None else ~torch.isfinite(grad_out)
    rows_lse = lse.movedim(-1, -2)  # [B, T, H]
    # A row with a NaN has that in its LSE, if it sees a key; if it sees none, the NaN goes nowhere.
    no_weights = torch.isinf(operands.q).any(-1) | torch.isnan(rows_lse) | torch.isposinf(rows_lse)
    no_scores = bad_do.any(-1)
    if grad_lse is not None:
        no_scores = no_scores | ~torch.isfinite(grad_lse.movedim(-1, -2))
    k_marks, v_marks = bad_k.any(-1), bad_v.any(-1)
    if not any(bool(t.any()) for t in (bad_q, no_weights, no_scores, k_marks, v_marks)):
        return grads
    for (_, weights, scores), (_, _, k_mark, v_mark) in blocks.sequences(
        problem, operands, (no_weights, no_scores), (k_marks, v_marks)
    ):
        weights |= _rows_that_see(problem, operands, k_mark, weights.shape[1])
        scores |= weights | _rows_that_see(problem, operands, v_mark, weights.shape[1])
    q, k, v = (t.masked_fill(bad, 0.0) for t, bad in zip(operands[:3], (bad_q, bad_k, bad_v), strict=True))
    clean = operands._replace(q=q.masked_fill(no_weights.unsqueeze(-1), 0.0), k=k, v=v)
    gone = no_weights.movedim(-1, -2)
    lse = lse.masked_fill(gone & (lse != -torch.inf), 0.0)
    out = out.masked_fill(~torch.isfinite(out) | no_weights.unsqueeze(-1), 0.0)
    if grad_out is not None:
        grad_out = grad_out.masked_fill(bad_do | no_weights.unsqueeze(-1), 0.0)
    if grad_lse is not None:
        grad_lse = grad_lse.masked_fill(~torch.isfinite(grad_lse) | gone, 0.0)
    dq, dk, dv, *bias = run(clean, out, lse, grad_out, grad_lse)
    row_marks = (no_scores, bad_do | no_weights.unsqueeze(-1))
    for_q = (*row_marks, dq) if dq.numel() else row_marks
    for_k = tuple(t for t in (dk, dv) if t.numel())
    for (_, scores, do_marks, *row_dq), (k, _, *cols) in blocks.sequences(problem, operands, for_q, for_k):
        len_k = k.shape[1]
        if row_dq:
            row_dq[0].masked_fill_(scores.unsqueeze(-1), torch.nan)
        if dk.numel():
            seen = _keys_seen_by(problem, operands, scores, len_k)
            cols[0].masked_fill_(seen.unsqueeze(-1), torch.nan)
        if dv.numel():
            cols[-1].masked_fill_(_keys_seen_by(problem, operands, do_marks, len_k), torch.nan)
        for grad in bias:
            if grad.numel():
                _mark_pairs(problem, operands, scores, len_k, grad)
    return dq, dk, dv, *bias


def _rows_that_see(problem, operands, marked, len_q):
    """`[B, Tk, Hk, ...]` marks on keys -> `[B, Tq, H, ...]`: does the row see a marked key?"""
    len_k, band = marked.shape[1], problem.band
    if operands.mask is not None or operands.bias is not None:
        return _multiplied(problem, operands, _to_query_heads(marked, problem), len_q, len_k, "ij,bjx->bix")
    i = torch.arange(len_q, device="cpu")
    shift = len_k - len_q
    end = end_key(i, shift, len_k, band)
    count = _count(marked, first_key(i, shift, band), end)
    if early_keys(band):
        count = count + _count(marked, torch.zeros_like(i), end.clamp(max=early_keys(band)))
    return _to_query_heads(count > 0, problem)


def _keys_seen_by(problem, operands, marked, len_k):
    """`[B, Tq, H, ...]` marks on rows -> `[B, Tk, Hk, ...]`: is the key seen by a marked row?"""
    len_q, band = marked.shape[1], problem.band
    if operands.mask is not None or operands.bias is not None:
        return _to_kv_heads(_multiplied(problem, operands, marked, len_q, len_k, "ij,bix->bjx"), problem)
    j = torch.arange(len_k, device="cpu")
    shift = len_k - len_q
    return _to_kv_heads(_count(marked, first_query(j, shift, band), end_query(j, shift, len_q, band)) > 0, problem)


def _shown(problem, operands, b, head, len_q, len_k):
    """`[Tq, Tk]`: what the last queries see of the last keys, by the band, the mask and a bias of -inf."""
    i, j = torch.arange(len_q, device="cpu").unsqueeze(1), torch.arange(len_k, device="cpu")
    shift = len_k - len_q
    seen = visible(i, j, shift, len_k, problem.band)
    for t in (operands.mask, None if operands.bias is None else operands.bias != -torch.inf):
        if t is not None:
            own = t[b if t.shape[0] > 1 else 0, head if t.shape[1] > 1 else 0]
            seen = seen & own[-len_q if own.shape[0] > 1 else 0 :, -len_k if own.shape[1] > 1 else 0 :]
    return seen


def _multiplied(problem, operands, marked, len_q, len_k, how):
    """Marks `[B, T, H, ...]` carried over pairs that see each other, one head after another."""
    found = marked.new_zeros(marked.shape[0], len_q if how.endswith("bix") else len_k, *marked.shape[2:])
    for b in range(marked.shape[0]):
        for head in range(marked.shape[2]):
            marks = marked[b : b + 1, :, head].flatten(2) if marked.dim() > 3 else marked[b : b + 1, :, head].unsqueeze(-1)
            pairs = _shown(problem, operands, b, head, len_q, len_k)
            found[b, :, head] = (torch.einsum(how, pairs.float(), marks.float())[0] > 0).view(found[b, :, head].shape)
    return found


def _mark_pairs(problem, operands, scores, len_k, grad):
    """NaN in the bias's gradient where a marked row `[B, Tq, H]` sees a key."""
    len_q = scores.shape[1]
    for b in range(scores.shape[0]):
        for head in range(scores.shape[2]):
            pairs = _shown(problem, operands, b, head, len_q, len_k) & scores[b, :, head].unsqueeze(1)
            own = grad[b if grad.shape[0] > 1 else 0, head if grad.shape[1] > 1 else 0]
            part = own[-len_q if own.shape[0] > 1 else 0 :, -len_k if own.shape[1] > 1 else 0 :]
            over = [dim for dim in range(2) if part.shape[dim] == 1 and pairs.shape[dim] != 1]
            part.masked_fill_(
                pairs.any(dim=over[0], keepdim=True) if len(over) == 1 else pairs.any() if over else pairs, torch.nan
            )


def _count(marked, start, end):
    """How many of dimension 1 are marked in each interval `[start, end)`, clamped to what exists."""
    total = torch.cumsum(marked, 1, dtype=torch.int32)
    total = torch.cat([torch.zeros_like(total[:, :1]), total], 1)
    size = marked.shape[1]
    return total[:, end.clamp(0, size)] - total[:, start.clamp(0, size)]


def _to_query_heads(marked, problem):
    return marked.repeat_interleave(problem.group, 2)


def _to_kv_heads(marked, problem):
    return marked.unflatten(2, (problem.heads_k, problem.group)).any(3)
