"""The public calls: describe, call the operator, shape the result."""

from typing import NoReturn, Optional, Union

import torch

from rowmax import ops_masked, ops_scored
from rowmax.arguments import Beside, Window, band, beside, check_tensors, flags, integer, number
from rowmax.eager import Prepared, forward_without_gradient
from rowmax.errors import ProblemError, Unsupported
from rowmax.family import refuse
from rowmax.ops import FORWARD, in_forward_mode, plan_forward
from rowmax.padding import RUNS, Lengths, cu_seqlens
from rowmax.plan import Plan
from rowmax.problem import Operands, Problem
from rowmax.score_mod import Bound, ScoreMod, bound


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Optional[Window] = None,
    sink_tokens: Optional[int] = None,
    prefix: Union[None, int, torch.Tensor] = None,
    chunk: Optional[int] = None,
    scale: Optional[float] = None,
    softcap: Optional[float] = None,
    alibi_slopes: Optional[torch.Tensor] = None,
    sink: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    mask: Optional[torch.Tensor] = None,
    seqlens_q: Optional[torch.Tensor] = None,
    seqlens_k: Optional[torch.Tensor] = None,
    leftpad_k: Optional[torch.Tensor] = None,
    dropout_p: float = 0,  # 0.0 would be traced as a number that changes, and every first graph built twice
    seed: Union[None, int, torch.Tensor] = None,
    score_mod: Union[None, ScoreMod, Bound] = None,
    return_lse: bool = False,
    deterministic: bool = False,
    plan: Union[None, str, Plan] = None,
    **not_taken: NoReturn,
):
    """Exact attention, `softmax(scale * q k^T) v`, without storing the scores.

    Args:
        q: `[B, Tq, Hq, D]`, fp16, bf16, fp32 (fp64 on the CPU), D from 1 to 256. Any strides with the last equal to 1.
        k: `[B, Tk, Hk, D]`; Hq is a multiple of Hk, and consecutive query heads share one KV head.
        v: `[B, Tk, Hk, Dv]`; Dv may differ from D.
        causal: query i sees keys j <= i + Tk - Tq: the last query sees the last key (bottom-right alignment).
        window: `(left, right)` keys kept on each side of that diagonal, self included; `None` on a side is no limit.
        chunk: query i sees keys of its own chunk only, of those numbers j with `j // chunk == (i + Tk - Tq) // chunk` (Llama 4;
            blocks on the diagonal without `causal`).
        sink_tokens: the first so many keys stay visible left of a window or of a chunk (StreamingLLM); not to queries before
            them, if `causal`. Without either they change nothing.
        prefix: the first so many keys are visible to every query (prefix-LM, with `causal`), whatever else is said here. Or an
            int32 or int64 tensor `[B]`, a number for each sequence: with `causal`, without window, sink_tokens, chunk, bias,
            mask, dropout and score_mod. It runs as two calls over packed sequences, and is not read back.
        scale: factor on the scores, any finite number; `None` is `1/sqrt(D)`.
        softcap: c > 0 makes a scaled score s into `c tanh(s / c)`, in natural units, at most 1e30; `None` and 0 are none.
        alibi_slopes: `[Hq]` or `[B, Hq]`, floating point: adds `-slope * |i + Tk - Tq - j|` to the score of query i and key j,
            after the soft-cap, before the mask. Constants: a gradient is refused.
        sink: `[Hq]`, floating point: one more logit in each row's denominator, natural units, without a value, so that weights
            sum to less than 1; -inf is none. Part of the LSE. Gradients flow to it. For partial results that are to be merged
            leave it out, and give it to one of them.
        bias: `[B, Hq, Tq, Tk]`, any of them 1 to broadcast, any strides; fp32 or the type of q: added to scaled, capped scores
            in fp32. -inf hides a key, as `mask` does. Gradients flow to it, summed in fp32 over what is broadcast.
        mask: boolean `[B, Hq, Tq, Tk]`, any of them 1: True where the query sees the key, within the band of `causal` and
            `window`.
        seqlens_k: int32 or int64 `[B]`: of each row of the batch only keys below it count, as though Tk were that number, also
            for the alignment of `causal` and `window`.
        leftpad_k: `[B]`: keys below it do not count; causal rows end where they did. Padded keys may hold anything.
        seqlens_q: `[B]`: queries from it on see nothing, as though Tq were that number. Self-attention padded on the right has
            seqlens_q = seqlens_k. These three take no bias or mask beside them. They run as packed sequences do, on views where
            batches lie Tq or Tk rows apart, else on copies; on a GPU they are not read back, and are clamped.
        dropout_p: each weight is dropped with this probability, and multiplied by 1 / (1 - dropout_p) otherwise, after the
            softmax: the LSE knows nothing of it. Both are of the next multiple of 2^-15, from 2^-15 to 1 - 2^-15. Pass 0 in
            evaluation; there is no hidden mode.
        seed: of dropout: an integer, or an int64 tensor `[1]` on q's device; with `None` one is drawn from torch's generator of
            that device. Which weights are dropped depends on the seed and on (row of the batch, query head, query, key) alone,
            on every backend, and is the same in the backward: `rowmax.reference.dropout` gives it.
        score_mod: a function of your own for scores, behind the soft-cap and before ALiBi, bias and mask: a
            `rowmax.ScoreMod`, or one with its numbers, `mod(0.5)`. It takes no seqlens_q, seqlens_k or leftpad_k beside it.
        return_lse: also return the log-sum-exp of the scaled, masked scores.
        deterministic: ask for a bitwise repeatable backward (the forward always is).
        plan: `None`, or an algorithm by name ("q_outer", "tiled", ...), or a `Plan`; see `rowmax.plan`.

    Returns:
        out `[B, Tq, Hq, Dv]` in the inputs' dtype; with `return_lse` also lse `[B, Hq, Tq]`, fp32, natural logarithm. A query
        that sees no key gives 0 and -inf (the sink, if there is one). Gradients flow to q, k, v, the sink and the
        bias through both results, to first and to second order, with forward mode (`torch.func.jvp`), in linear memory.

    Raises:
        ProblemError: the arguments contradict each other; the message says what arrived, what is required and the fix.
        Unsupported: no algorithm can run the call on this device; lists every candidate's reason.

    Method: FlashAttention-2 (Dao 2023, section 3.1), after the online softmax of Milakov and Gimelshein (2018). Soft-cap:
    Gemma 2 (2024, section 2); ALiBi: Press et al. (2022); sinks as in gpt-oss (2025), after Xiao et al. (2023), who keep the
    first tokens (section 3.2); prefix-LM: Raffel et al. (2020, section 3.2.1).
    """
    if not_taken:
        refuse("attention", not_taken)
    given = (softcap, alibi_slopes, sink, bias, mask, seed, dropout_p, score_mod, sink_tokens, prefix, chunk)
    scores = beside(causal, window, *given)
    if seqlens_q is not None or seqlens_k is not None or leftpad_k is not None:
        lengths = Lengths(seqlens_q, seqlens_k, leftpad_k)
        if score_mod is not None:
            raise ProblemError(
                "seqlens_q, seqlens_k and leftpad_k come without a score_mod, which would be given other numbers of sequences; "
                "hide the padding in the mask, or pack the sequences and call attention_varlen."
            )
        if bias is not None or mask is not None:
            raise ProblemError(
                "seqlens_q, seqlens_k and leftpad_k come without a bias or a mask; hide the padding in the mask instead: "
                "mask & (torch.arange(Tk) < seqlens_k[:, None])[:, None, None]."
            )
        return _call_padded(q, k, v, lengths, causal, window, scale, return_lse, deterministic, plan, scores)
    return _call(q, k, v, None, None, None, None, causal, window, scale, return_lse, deterministic, plan, scores)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    causal: bool = False,
    window: Optional[Window] = None,
    sink_tokens: Optional[int] = None,
    prefix: Union[None, int, torch.Tensor] = None,
    chunk: Optional[int] = None,
    scale: Optional[float] = None,
    softcap: Optional[float] = None,
    alibi_slopes: Optional[torch.Tensor] = None,
    sink: Optional[torch.Tensor] = None,
    dropout_p: float = 0,
    seed: Union[None, int, torch.Tensor] = None,
    score_mod: Union[None, ScoreMod, Bound] = None,
    return_lse: bool = False,
    deterministic: bool = False,
    plan: Union[None, str, Plan] = None,
    **not_taken: NoReturn,
):
    """Exact attention over sequences of different lengths, packed one after another.

    Args:
        q: `[Tq, Hq, D]`; k: `[Tk, Hk, D]`; v: `[Tk, Hk, Dv]`, as for `attention`.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 `[B + 1]` on the tensors' device: sequence b has rows
            `cu_seqlens[b]` to `cu_seqlens[b + 1]` (exclusive). Never read back to the host. On a GPU, values that decrease or
            leave the tensors are clamped, so that no memory outside the tensors is touched.
        max_seqlen_q, max_seqlen_k: hints to choose tiles; the result does not depend on them.

    Returns:
        out `[Tq, Hq, Dv]` in the inputs' dtype; with `return_lse` also lse `[Hq, Tq]`, fp32, natural logarithm. Rows of q that
        belong to no sequence give 0 and -inf.

    Raises:
        ProblemError, Unsupported: as `attention`; and for lengths that decrease or leave the tensors, on the CPU.

    The other arguments, conventions (bottom-right alignment within each sequence) and the method are those of `attention`.
    """
    if not_taken:
        refuse("attention_varlen", not_taken)
    _check_lengths(cu_seqlens_q, cu_seqlens_k)
    given = (softcap, alibi_slopes, sink, None, None, seed, dropout_p, score_mod, sink_tokens, prefix, chunk)
    scores = beside(causal, window, *given)
    return _call(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal,
        window,
        scale,
        return_lse,
        deterministic,
        plan,
        scores,
    )


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k: Optional[torch.Tensor] = None,
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
    score_mod: Union[None, ScoreMod, Bound] = None,
    return_lse: bool = False,
    plan: Union[None, str, Plan] = None,
    **not_taken: NoReturn,
) -> Prepared:
    """A call of `attention`, or with `cu_seqlens` of `attention_varlen`, of which all but the launch is done once.

    For loops that compute attention of the same buffers again and again, written in place between the calls:

        attend = rowmax.prepare(q, k, v, causal=True)
        for step in steps:
            q.copy_(...)
            out = attend()

    Args:
        As for `attention` and `attention_varlen`. `cu_seqlens` are contiguous; on a GPU their values may change in between. So
        may those of `alibi_slopes` and `sink`, which are read in place: fp32 (fp64 for fp64) and contiguous; and of `bias` and
        `mask`. Numbers of a `score_mod` are read once.

    Returns:
        A function without arguments. It computes what `attention` gives for what the tensors hold by then, without gradients
        and whatever autocast says, and returns the same tensors every time, overwritten: clone what must last. It keeps the
        tensors and its outputs alive, and must itself be kept as long as a CUDA graph that captured it is replayed. Its calls
        must follow one another, as on one stream. The first one may compile kernels. It saves the host time on a GPU only.

    Raises:
        ProblemError, Unsupported: as `attention`; and if an input requires gradients, which the result cannot have.
    """
    if not_taken:
        refuse("prepare", not_taken)
    _check_lengths(cu_seqlens_q, cu_seqlens_k, optional=True)
    check_tensors(**_named(q, k, v, cu_seqlens_q, cu_seqlens_k))
    numbers = _numbers(q, k, v, max_seqlen_q, max_seqlen_k, causal, window, scale, return_lse, False, plan)
    if isinstance(prefix, torch.Tensor):
        raise Unsupported("prepare takes one prefix for all sequences, an integer: one for each is two calls; call attention.")
    given = (softcap, alibi_slopes, sink, bias, mask, None, 0, score_mod, sink_tokens, prefix, chunk)
    scores = beside(causal, window, *given)
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in (q, k, v, sink, bias)):
        fix = "Call it under torch.no_grad() or with detached tensors, or call rowmax.attention."
        raise ProblemError(f"prepare gives no gradients, and an input requires them. {fix}")
    in_place = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "alibi_slopes": alibi_slopes, "sink": sink}
    for name, tensor in in_place.items():
        if isinstance(tensor, torch.Tensor) and not tensor.is_contiguous():
            raise ProblemError(f"prepare reads {name} in place and needs it contiguous; got stride {tensor.stride()}.")
    if scores is None:
        return Prepared(FORWARD, plan_forward, return_lse, q, k, v, cu_seqlens_q, cu_seqlens_k, *numbers)
    read = _with_tensors(q, scores)
    for name, given_tensor, tensor in (("alibi_slopes", alibi_slopes, read.slopes), ("sink", sink, read.sink)):
        if given_tensor is not None and tensor is not None and tensor is not given_tensor:
            raise ProblemError(
                f"prepare reads {name} in place and needs it in {tensor.dtype}; got {given_tensor.dtype}. Convert it before."
            )
    operator, planned, call = _scored(q, k, v, cu_seqlens_q, cu_seqlens_k, numbers, read)
    return Prepared(operator, planned, return_lse, *call)


def merge(outs, lses) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint sets of keys into attention over their union.

    Args:
        outs: partial outputs, a sequence of `[B, T, H, D]` (or packed `[T, H, D]`) floating point tensors of one shape and
            type; or one tensor `[parts, B, T, H, D]`.
        lses: their log-sum-exps, `[B, H, T]` (or `[H, T]`), natural logarithm, fp32 or wider; or one tensor
            `[parts, B, H, T]`.

    Returns:
        `(out, lse)` of the union, in the inputs' dtypes; computed in fp32 (fp64 for fp64). Where every part saw nothing: 0 and
        -inf. Differentiable in all arguments, with zero gradient where a row saw nothing.

    Raises:
        ProblemError: they do not belong together, or are no sequences of parts.

    Method: the rescaling of FlashAttention-2 (Dao 2023, section 3.1.1) applied once, to whole parts.
    """
    outs, lses = _parts("outs", outs, 5), _parts("lses", lses, 4)
    if not outs or len(outs) != len(lses):
        raise ProblemError(f"merge needs as many outputs as LSEs, at least one; got {len(outs)} and {len(lses)}.")
    for out, lse in zip(outs, lses, strict=True):
        want = (*out.shape[:-3], out.shape[-2], out.shape[-3]) if out.dim() in (3, 4) else None
        if out.shape != outs[0].shape or tuple(lse.shape) != want:
            raise ProblemError(
                f"merge needs outputs [B, T, H, D] of one shape with LSEs [B, H, T] (packed: [T, H, D], [H, T]); got out "
                f"{list(out.shape)} beside {list(outs[0].shape)} and LSE {list(lse.shape)}."
            )
        if not out.dtype == outs[0].dtype or not lse.dtype == lses[0].dtype:
            raise ProblemError(
                f"merge needs outputs of one dtype, and LSEs of one; got {out.dtype} beside {outs[0].dtype}, {lse.dtype} "
                f"beside {lses[0].dtype}. Convert them first."
            )
        if not out.device == lse.device == outs[0].device:
            raise ProblemError(f"merge needs all parts on one device; got {out.device}, {lse.device}, {outs[0].device}.")
    wide = torch.promote_types(outs[0].dtype, torch.float32)
    stacked = torch.stack([lse.to(wide) for lse in lses])
    peak = stacked.detach().amax(0)
    peak = torch.where(torch.isneginf(peak), 0.0, peak)
    weights = torch.exp(stacked - peak)
    total = weights.sum(0)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, peak + torch.log(total))
    shares = (weights / total).transpose(-1, -2).unsqueeze(-1)
    out = sum(share * part.to(wide) for share, part in zip(shares, outs, strict=True))
    return out.to(outs[0].dtype), lse.to(lses[0].dtype)


def _parts(name: str, given, stacked: int) -> list[torch.Tensor]:
    """Of `merge`: a list of tensors, from a sequence or from a tensor of `stacked` dimensions, with the parts in front."""
    if isinstance(given, torch.Tensor):
        check_tensors(**{name: given})
        if given.dim() != stacked:
            raise ProblemError(
                f"merge needs {name} as a sequence, a tensor for each part; got one tensor {list(given.shape)}, which may be "
                f"one part or many. Pass [part, ...], or {name}.unbind(0) if the parts are stacked."
            )
    try:
        parts = list(given)
    except TypeError:
        kind = type(given).__name__
        raise ProblemError(f"merge needs {name} as a sequence, a tensor for each part; got {kind}.") from None
    for part in parts:
        if not isinstance(part, torch.Tensor) or not part.is_floating_point() or part.dtype.itemsize < 2:
            kind = str(part.dtype) if isinstance(part, torch.Tensor) else type(part).__name__
            raise ProblemError(f"merge needs sequences of floating point tensors, of 16 bits or more; got {kind} in {name}.")
        check_tensors(**{f"a part of {name}": part})
    return parts


def _call(q, k, v, cu_q, cu_k, max_q, max_k, causal, window, scale, return_lse, deterministic, plan, scores=None):
    numbers = _numbers(q, k, v, max_q, max_k, causal, window, scale, return_lse, deterministic, plan)
    if torch._C._is_any_autocast_enabled():
        q, k, v = _as_autocast(q, k, v)
    if scores is not None:
        check_tensors(**_named(q, k, v, cu_q, cu_k))
        return _call_scored(q, k, v, cu_q, cu_k, numbers, return_lse, scores)
    need_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    dispatched = need_grad or torch.compiler.is_compiling() or in_forward_mode()
    if dispatched:
        check_tensors(**_named(q, k, v, cu_q, cu_k))
    forward = FORWARD if dispatched else forward_without_gradient
    out, lse = forward(return_lse or need_grad, q, k, v, cu_q, cu_k, *numbers)
    return (out, lse) if return_lse else out


def _call_padded(q, k, v, lengths, causal, window, scale, return_lse, deterministic, plan, scores):
    check_tensors(q=q, k=k, v=v, **{name: t for name, t in lengths._asdict().items() if isinstance(t, torch.Tensor)})
    _numbers(q, k, v, None, None, causal, window, scale, return_lse, deterministic, plan)
    q, k, v = _as_autocast(q, k, v)
    left, right = band(causal, window)
    Problem.describe(Operands(q, k, v), left=left, right=right)
    batch, len_q, len_k = q.shape[0], q.shape[1], k.shape[1]
    cu = cu_seqlens(lengths, batch, len_q, len_k, q.device)
    if scores is not None and isinstance(scores.slopes, torch.Tensor) and scores.slopes.dim() == 2:
        scores = scores._replace(slopes=scores.slopes.repeat_interleave(RUNS, 0))
    if scores is not None and isinstance(scores.prefix, torch.Tensor):
        from rowmax import prefixes

        prefixes.check(scores.prefix, batch, q.device)
        nothing = torch.zeros_like(scores.prefix)  # the run of a row that has keys and queries is the second
        scores = scores._replace(prefix=torch.stack([nothing, scores.prefix, nothing], 1).flatten())
    flat = (t.flatten(0, 1) for t in (q, k, v))
    found = _call(*flat, *cu, len_q, len_k, causal, window, scale, return_lse, deterministic, plan, scores)
    if not return_lse:
        return found.unflatten(0, (batch, len_q))
    return found[0].unflatten(0, (batch, len_q)), found[1].unflatten(1, (batch, len_q)).transpose(0, 1).contiguous()


def _call_scored(q, k, v, cu_q, cu_k, numbers, return_lse, scores: Beside):
    scores = _with_tensors(q, scores)
    if isinstance(scores.prefix, torch.Tensor):
        from rowmax import prefixes

        return prefixes.attend(_call, q, k, v, cu_q, cu_k, numbers, return_lse, scores)
    leaves = (q, k, v, scores.sink, scores.bias)
    need_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in leaves)
    operator, _, call = _scored(q, k, v, cu_q, cu_k, numbers, scores)
    out, lse = operator(return_lse or need_grad, *call)
    return (out, lse) if return_lse else out


def _with_tensors(q, scores: Beside) -> Beside:
    """The same, with slopes and sink in the type of the LSE.

    Raises:
        ProblemError: what must be a tensor is none.
    """
    for name, tensor in (("alibi_slopes", scores.slopes), ("sink", scores.sink)):
        if tensor is not None and not (isinstance(tensor, torch.Tensor) and tensor.is_floating_point()):
            kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ProblemError(f"{name} must be a tensor of floating point numbers, one for each query head; got {kind}.")
    given = {
        "alibi_slopes": scores.slopes,
        "sink": scores.sink,
        "bias": scores.bias,
        "mask": scores.mask,
        "prefix": scores.prefix,
    }
    check_tensors(**{name: tensor for name, tensor in given.items() if isinstance(tensor, torch.Tensor)})
    for name, tensor in (("bias", scores.bias), ("mask", scores.mask)):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise ProblemError(f"{name} must be a tensor [B|1, H|1, Tq|1, Tk|1] or None; got {type(tensor).__name__}.")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    slopes, sink = (None if t is None else t.to(wide) for t in (scores.slopes, scores.sink))
    return scores._replace(slopes=slopes, sink=sink)


def _scored(q, k, v, cu_q, cu_k, numbers, scores: Beside, pairs: bool = False) -> tuple:
    """The operator of a call with scores that are bent or hidden, what plans it, and its arguments behind `need_lse`; with
    `pairs` the one that takes everything."""
    softcap = 0.0 if scores.softcap is None else number("softcap", scores.softcap)
    tensors = (q, k, v, cu_q, cu_k, scores.slopes, scores.sink)
    if scores.scored and not pairs:
        return ops_scored.FORWARD_SCORED, ops_scored.planned, (*tensors, *numbers, softcap)
    mod = None if scores.score_mod is None else bound(scores.score_mod)
    seed = _seed(scores.seed, q.device, scores.dropout_p)
    given = (scores.bias, scores.mask, seed, None if mod is None else mod.operand(q))
    more = (scores.dropout_p, "" if mod is None else mod.mod.key, scores.sink_tokens, scores.prefix, scores.chunk)
    return ops_masked.FORWARD_MASKED, ops_masked.planned, (*tensors, *given, *numbers, softcap, *more)


def describe(q, k, v, cu_q, cu_k, max_q, max_k, causal, window, scale, deterministic, scores: Optional[Beside]) -> Problem:
    """What a call with these arguments is: for `explain`. Validated as the call is; makes nothing but the seed of dropout."""
    _check_lengths(cu_q, cu_k, optional=True)
    check_tensors(**_named(q, k, v, cu_q, cu_k))
    numbers = _numbers(q, k, v, max_q, max_k, causal, window, scale, False, deterministic, None)
    q, k, v = _as_autocast(q, k, v)
    scores = _with_tensors(q, scores or Beside())._replace(seed=0)
    if isinstance(scores.prefix, torch.Tensor):
        raise Unsupported("explain takes one prefix for all sequences, an integer: one for each is two calls.")
    return ops_masked.describe(*_scored(q, k, v, cu_q, cu_k, numbers, scores, pairs=True)[2])[0]


def _seed(seed, device, dropout_p: float) -> Optional[torch.Tensor]:
    """int64 `[1]`; None where nothing is dropped, and then nothing is drawn."""
    if not dropout_p:
        return None
    if seed is None:
        return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, torch.Tensor):
        return seed.reshape(1) if seed.dim() == 0 else seed
    return torch.full((1,), seed if isinstance(seed, torch.SymInt) else int(seed), dtype=torch.int64, device=device)  # type: ignore[arg-type]


def _named(q, k, v, cu_q, cu_k) -> dict[str, torch.Tensor]:
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    return {"q": q, "k": k, "v": v, **{name: cu for name, cu in lengths.items() if cu is not None}}


def _numbers(q, k, v, max_q, max_k, causal, window, scale, return_lse, deterministic, plan):
    """The operator's arguments behind the tensors. What depends on tensors is checked there."""
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        check_tensors(q=q, k=k, v=v)
    if not (type(causal) is type(return_lse) is type(deterministic) is bool):
        flags(causal=causal, return_lse=return_lse, deterministic=deterministic)
    left, right = band(causal, window)
    scale = scale if scale is None or type(scale) is float else number("scale", scale)
    if max_q is not None or max_k is not None:
        max_q, max_k = integer("max_seqlen_q", max_q), integer("max_seqlen_k", max_k)
    return max_q, max_k, scale, left, right, deterministic, "" if plan is None else str(plan)


def _as_autocast(q, k, v):
    device = q.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v)]


def _check_lengths(cu_seqlens_q, cu_seqlens_k, optional: bool = False) -> None:
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cu, torch.Tensor) and not (optional and cu is None):
            raise ProblemError(f"{name} must be an int32 tensor of shape [B + 1]; got {type(cu).__name__}.")
