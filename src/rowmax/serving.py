"""The public calls of serving: attention over a paged KV cache, and writing new keys and values into it."""

from typing import NoReturn, Optional, Union

import torch

from rowmax.api import merge
from rowmax.arguments import Window, band, check_tensors, flags, integer, number, seen
from rowmax.eager import Prepared
from rowmax.eager import _somebody_listens as somebody_listens
from rowmax.errors import ProblemError, Unsupported
from rowmax.family import refuse
from rowmax.ops import ON_CPU, in_forward_mode, kernels
from rowmax.ops_paged import (
    APPEND,
    PAGED,
    PAGED_INTO,
    describe,
    form_of,
    kept,
    launch_of,
    plan_paged,
    run,
    run_kept,
    shapes_of,
)
from rowmax.paged import AppendOperands, PagedOperands, check_append, check_values, places
from rowmax.plan import Plan


def attention_paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    k_scale: Optional[torch.Tensor] = None,
    v_scale: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    causal: bool = True,
    window: Optional[Window] = None,
    sink_tokens: Optional[int] = None,
    scale: Optional[float] = None,
    num_splits: Optional[int] = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    out: Optional[torch.Tensor] = None,
    plan: Union[None, str, Plan] = None,
    debug: bool = False,
    **not_taken: NoReturn,
):
    """Exact attention of new tokens over sequences whose keys and values lie in pages: decoding, speculative decoding, prefill
    in chunks, and all of them in one call. Inference only.

    Args:
        q: one of
            `[B, Hq, D]`: one token of each sequence;
            `[B, T, Hq, D]`: the last T tokens of each sequence;
            `[Tq, Hq, D]` with `cu_seqlens_q`: the last tokens of each sequence, as many as it says, packed.
        k_pages: `[page, slot, Hk, D]` in q's dtype, D up to 576, any strides with the last equal to 1: pages stored as
            `[page, Hk, slot, D]` are passed as `k_pages.transpose(1, 2)`. Hq is a multiple of Hk.
        v_pages: `[page, slot, Hk, Dv]`, Dv up to 512. For multi-head latent attention pass `k_pages[..., :512]`: the same
            memory is then read once; on Hopper by a kernel of its own, if D is 576 and pages and heads are multiples of 64.
        block_table: int32 or int64 `[B, pages of a sequence]`: the page of keys `page_size * i` and following. Entries that a
            sequence does not reach may hold anything.
        seqlens_k: int32 or int64 `[B]`: keys of each sequence, those of the new tokens included, which must be in the cache.
        cu_seqlens_q: int32 or int64 `[B + 1]`, as for `attention_varlen`.
        k_scale, v_scale: fp32 `[Hk]` or `[page, Hk]`, of pages in 8 bits (`torch.float8_e4m3fn`, q in fp16 or bf16): keys and
            values are the pages' numbers times the scale of their head, or of their page and head. `None` is 1.
        max_seqlen_q: hint for the tile; the result does not depend on it.
        causal: the last query sees the last key, the one before it one key less.
        window: `(left, right)` around that diagonal, as for `attention`.
        sink_tokens: the first so many keys stay visible left of the window, as for `attention`; for one token of each sequence.
            A second call, over their pages, merged with the first. Keys between them and the window are not read.
        scale: `None` is `1/sqrt(D)`.
        num_splits: parts that the keys of a sequence are shared out in. `None`: by the plan, from the lengths on the device.
            1 spares looking through them and joining parts, where sequences are many and about as long as each other.
        return_lse: also return the log-sum-exp, fp32, natural logarithm.
        batch_invariant: the output of a query is bitwise the same whatever else is in the batch, in whichever pages the keys
            lie, and whether its prompt came in one piece or in chunks.
        out: where to write the output, shaped as below.
        plan: `None`, or a plan by its spelling, "split_kv[16x64 w4 s3 p264]"; see `rowmax.plan`.
        debug: check lengths, ids and bounds as on the CPU, and name the entry that is wrong. Copies them to the host and waits.

    Returns:
        out, q's shape with Dv for D; with `return_lse` also lse `[B, Hq]`, `[B, Hq, T]` or `[Hq, Tq]`. A query that sees no
        key, and packed rows of no sequence, give 0 and -inf.

    Lengths and tables are never read back from a GPU: one captured graph serves all of them. There, lengths and ids that leave
    the tensors are clamped, wrong numbers at worst; on the CPU they are checked.

    Raises:
        ProblemError: what arrived, what is required and the fix; also where gradients are asked for.
        Unsupported: no algorithm can run the call on this device; lists every candidate's reason.

    Method: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023) over pages (PagedAttention, Kwon et al. 2023, section 4.1).
    """
    if not_taken:
        refuse("attention_paged", not_taken)
    tensors = (q, k_pages, v_pages, block_table, seqlens_k, cu_seqlens_q, k_scale, v_scale)
    numbers = (max_seqlen_q, causal, window, scale, num_splits, return_lse, batch_invariant, plan)
    if sink_tokens is not None and seen(causal, window, sink_tokens, None, None):
        return _beside_sinks(sink_tokens, tensors, numbers, out, debug)
    form, given_out = None, out
    plain = type(causal) is type(return_lse) is type(batch_invariant) is type(debug) is bool  # 1 equals True; it is refused
    if plain and not (debug or torch.compiler.is_compiling()):
        form = form_of(("given", *numbers), out, tensors)
        launch = kept(form)  # the arguments of such a call were found right
        if launch is not None and not _dispatched(q, k_pages, v_pages):
            out, lse = launch(return_lse, out, tensors)
            if given_out is not None:
                torch.autograd.graph.increment_version(out)
            return (out, lse) if return_lse else out
    call = _call(tensors, *numbers)
    flags(debug=debug)
    if debug:
        _check_on_the_host(call)
    if _dispatched(q, k_pages, v_pages):
        if out is None:
            out, lse = PAGED(*call)
        else:
            lse = PAGED_INTO(out, *call)
    else:
        out, lse = run_kept(form, out, *call)
        if given_out is not None:
            torch.autograd.graph.increment_version(out)  # a graph of autograd that saved it notices that it changed
    return (out, lse) if return_lse else out


def _beside_sinks(sink_tokens: int, tensors: tuple, numbers: tuple, out, debug: bool):
    """Attention over the window, and over those of the first keys that lie before it, merged."""
    _, causal, window, scale, num_splits, return_lse, batch_invariant, plan = numbers
    _call(tensors, *numbers)
    q, k_pages, v_pages, table, lengths, cu, k_scale, v_scale = tensors
    if sink_tokens < 0:
        raise ProblemError(f"sink_tokens must be at least 0, or None for none; got {sink_tokens}.")
    if cu is not None or (q.dim() == 4 and q.shape[1] != 1):
        raise Unsupported(
            "sink_tokens over pages take one new token of each sequence: q [B, Hq, D]; for prompts call rowmax.attention or "
            "attention_varlen, which take sink_tokens of any queries."
        )
    options: dict = {"k_scale": k_scale, "v_scale": v_scale, "scale": scale, "return_lse": True, "plan": plan, "debug": debug}
    options["batch_invariant"] = batch_invariant
    result, lse = attention_paged(
        q, k_pages, v_pages, table, lengths, causal=causal, window=window, num_splits=num_splits, out=out, **options
    )
    first = (lengths - 1 - window[0]).clamp(0, sink_tokens)  # of the window, or the end of the sink tokens
    columns = max(-(-sink_tokens // max(k_pages.shape[1], 1)), 1)
    part, part_lse = attention_paged(q, k_pages, v_pages, table[:, :columns], first, causal=False, **options)
    lines = part_lse.flatten(1).T.contiguous()  # [Hq, B]
    if q.is_cuda and not _dispatched(q, k_pages, v_pages):
        kernels()
        from rowmax.kernels.decode_launch import merge_into

        merge_into(part.view(-1, *part.shape[-2:]), lines, result.view(-1, *result.shape[-2:]), lse, 1)
        return (result, lse) if return_lse else result
    merged, merged_lse = merge([t.view(-1, *t.shape[-2:]) for t in (result, part)], [lse.flatten(1).T, lines])
    result, lse = result.copy_(merged.view(result.shape)), merged_lse.T.reshape(lse.shape)
    return (result, lse) if return_lse else result


def _call(given, max_seqlen_q, causal, window, scale, num_splits, return_lse, batch_invariant, plan) -> tuple:
    """The operator's arguments, the first of them `need_lse`.

    Raises:
        ProblemError: one of them has the wrong type.
    """
    names = ("q", "k_pages", "v_pages", "block_table", "seqlens_k", "cu_seqlens_q", "k_scale", "v_scale")
    named = dict(zip(names, given, strict=False))
    check_tensors(**{name: tensor for name, tensor in named.items() if tensor is not None or name in names[:5]})
    flags(causal=causal, return_lse=return_lse, batch_invariant=batch_invariant)
    left, right = band(causal, window)
    scale = scale if scale is None or type(scale) is float else number("scale", scale)
    max_seqlen_q, num_splits = integer("max_seqlen_q", max_seqlen_q), integer("num_splits", num_splits)
    spelled = "" if plan is None else str(plan)
    return (return_lse, *given, max_seqlen_q, scale, left, right, num_splits, batch_invariant, spelled)


class PreparedPaged(Prepared):
    """A call over pages on tensors that stay where they are; as `rowmax.eager.Prepared`."""

    def __init__(self, tensors: tuple, *numbers):
        need_lse, *call = _call(tensors, *numbers)
        self.problem, operands, self.plan = plan_paged(*call)
        q = operands.q
        out_shape, lse_shape = shapes_of(self.problem, q)
        with torch.inference_mode(False), torch.no_grad():  # a tensor of inference mode could not be written outside of it
            out = torch.empty(out_shape, dtype=q.dtype, device=q.device)
            lse = torch.empty(lse_shape, dtype=self.problem.lse_dtype, device=q.device) if need_lse else None
        self._written = [out] if lse is None else [out, lse]
        self._result = (out, lse) if need_lse else out
        if self.plan.algorithm in ON_CPU or somebody_listens(*operands[:3]):

            def compute():
                with torch.no_grad():
                    for result, made in zip(self._written, run(None, need_lse, *call), strict=False):
                        result.copy_(made)

            self._run = compute
        else:
            self._run = launch_of(self.problem, self.plan, q).into(operands, out, lse)


def prepare_paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    k_scale: Optional[torch.Tensor] = None,
    v_scale: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    causal: bool = True,
    window: Optional[Window] = None,
    scale: Optional[float] = None,
    num_splits: Optional[int] = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    plan: Union[None, str, Plan] = None,
    **not_taken: NoReturn,
) -> PreparedPaged:
    """A call of `attention_paged` of which all but the launches is done once, for steps whose queries, lengths and table are
    written in place between the calls:

        attend = rowmax.prepare_paged(q, k_pages, v_pages, block_table, seqlens_k)
        for step in steps:
            q.copy_(...), seqlens_k.add_(1)
            out = attend()

    Args:
        As for `attention_paged`.

    Returns:
        A function without arguments, as `rowmax.prepare` gives: it returns the same tensors every time, overwritten, and keeps
        its tensors and its memory for partial results alive. Its calls must follow one another, as on one stream.

    Raises:
        ProblemError, Unsupported: as `attention_paged`; and if an input requires gradients, which the result cannot have.

    Method: as `attention_paged`.
    """
    if not_taken:
        refuse("prepare_paged", not_taken)
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in (q, k_pages, v_pages)):
        raise ProblemError(
            "prepare_paged gives no gradients, and an input requires them. Call it under torch.no_grad() or with detached "
            "tensors."
        )
    tensors = (q, k_pages, v_pages, block_table, seqlens_k, cu_seqlens_q, k_scale, v_scale)
    return PreparedPaged(tensors, max_seqlen_q, causal, window, scale, num_splits, return_lse, batch_invariant, plan)


def attention_shared(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    seqlens_k: torch.Tensor,
    shared_pages: int,
    *,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    k_scale: Optional[torch.Tensor] = None,
    v_scale: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    scale: Optional[float] = None,
    return_lse: bool = False,
    plan: Union[None, str, Plan] = None,
    **not_taken: NoReturn,
):
    """`attention_paged`, causal, of sequences that all begin with the same `shared_pages` full pages, which are read once:
    their queries attend to them as those of one sequence, to what follows each on its own, and the parts are merged. Exact.

    Worth it where the shared keys are many: sequences with n shared and o own keys read n + B o of them instead of B (n + o).

    Args:
        shared_pages: the first columns of the block table, the same in every row. Every sequence has all their keys, and its
            new tokens come behind them. Checked on the CPU; on a GPU the first row counts.
        others: as for `attention_paged`.

    Returns:
        As `attention_paged`.

    Raises:
        ProblemError, Unsupported: as `attention_paged`.

    Method: attention over disjoint sets of keys is merged by the log-sum-exp (FlashAttention-2, Dao 2023, section 3.1.1), here
        of shared prefixes (Juravsky et al., "Hydragen", 2024).
    """
    if not_taken:
        refuse("attention_shared", not_taken)
    given = (q, k_pages, v_pages, block_table, seqlens_k, cu_seqlens_q, k_scale, v_scale)
    _, *call = _call(given, max_seqlen_q, True, None, scale, None, return_lse, False, plan)
    ranks = tuple(t.dim() for t in given[1:5])
    if ranks != (4, 4, 2, 1) or q.dim() not in (3, 4) or q.is_cpu or not q.device == block_table.device == seqlens_k.device:
        describe(*call)  # says what is wrong
    columns = block_table.shape[-1]
    if type(shared_pages) is not int or not 0 <= shared_pages <= columns:
        raise ProblemError(
            f"shared_pages must be an integer from 0 to {columns}, the columns of the block table; got {shared_pages!r} with a "
            f"table {list(block_table.shape)}."
        )
    options: dict = {"k_scale": k_scale, "v_scale": v_scale, "scale": scale, "plan": plan}
    own: dict = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, **options}
    if not shared_pages or not seqlens_k.numel():
        return attention_paged(q, k_pages, v_pages, block_table, seqlens_k, return_lse=return_lse, **own)
    keys, packed = shared_pages * k_pages.shape[1], cu_seqlens_q is not None
    len_q = q.shape[0] if packed else 1 if q.dim() == 3 else q.shape[1]
    if seqlens_k.is_cpu and not torch.compiler.is_compiling():
        _check_shared(block_table, seqlens_k, cu_seqlens_q, len_q, shared_pages, keys)
    rows = q.flatten(0, 1) if q.dim() == 4 else q  # [queries of all sequences, H, D]
    first = (k_pages, v_pages, block_table[:1, :shared_pages], seqlens_k.new_full((1,), keys))
    if cu_seqlens_q is not None:  # rows of no sequence are none of this one, either
        options["cu_seqlens_q"] = cu_seqlens_q[:: len(seqlens_k)].contiguous()
    part, part_lse = attention_paged(rows if packed else rows[None], *first, causal=False, return_lse=True, **options)
    if not packed:
        part, part_lse = part[0], part_lse[0]
    behind = (k_pages, v_pages, block_table[:, shared_pages:], seqlens_k - keys)
    out, lse = attention_paged(q, *behind, return_lse=True, **own)
    if q.is_cuda and not _dispatched(q, k_pages, v_pages):
        kernels()
        from rowmax.kernels.decode_launch import merge_into

        merge_into(part, part_lse, out.view(part.shape), lse, len_q)
        return (out, lse) if return_lse else out
    own_lse = lse if packed else lse.view(len(seqlens_k), -1, len_q).transpose(0, 1).flatten(1)  # [H, rows]
    merged, merged_lse = merge((part, out.view(part.shape)), (part_lse, own_lse))
    if not packed:
        merged_lse = merged_lse.view(-1, len(seqlens_k), len_q).transpose(0, 1)
    out, lse = merged.view(out.shape), merged_lse.reshape(lse.shape)
    return (out, lse) if return_lse else out


def _check_shared(table, lengths, cu, len_q: int, shared: int, keys: int) -> None:
    different = (table[:, :shared] != table[:1, :shared]).nonzero()
    if len(different):
        b, column = (int(i) for i in different[0])
        raise ProblemError(
            f"block_table[{b}, {column}] is {int(table[b, column])} and block_table[0, {column}] is {int(table[0, column])}: "
            f"the first {shared} pages must be the same for all sequences."
        )
    new = torch.full_like(lengths, len_q) if cu is None else cu.diff()
    short = (lengths - new < keys).nonzero()
    if len(short):
        b = int(short[0])
        raise ProblemError(
            f"seqlens_k[{b}] is {int(lengths[b])}, {int(new[b])} of them new; {shared} shared pages hold {keys} keys, and new "
            "ones come behind them."
        )


def append_kv(
    k_pages: torch.Tensor,
    v_pages: Optional[torch.Tensor],
    k: torch.Tensor,
    v: Optional[torch.Tensor],
    block_table: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    cu_seqlens: Optional[torch.Tensor] = None,
    rotary_cos: Optional[torch.Tensor] = None,
    rotary_sin: Optional[torch.Tensor] = None,
    interleaved: bool = False,
    k_scale: Optional[torch.Tensor] = None,
    v_scale: Optional[torch.Tensor] = None,
    debug: bool = False,
) -> None:
    """Write the keys and values of new tokens into the pages of their sequences, in place.

    Args:
        k_pages, v_pages, block_table, seqlens_k: as for `attention_paged`, and to be handed to it afterwards: the lengths
            count the new tokens, which come last.
        k: `[B, Hk, D]` (one token of each sequence), `[B, T, Hk, D]`, or with `cu_seqlens` packed `[T, Hk, D]`, in the pages'
            type, or fp16 or bf16 for pages in 8 bits.
        v: alike with Dv for D; with `v_pages=None` also None, where values are columns of the keys.
        rotary_cos, rotary_sin: `[positions, pairs]`: rotate the first `2 * pairs` columns of a key by the angles of its
            position (`rotate` does the same to queries).
        k_scale, v_scale: as for `attention_paged`: into pages in 8 bits go k and v divided by them, at most 448 in size.
        interleaved: pairs are columns (2i, 2i + 1) instead of (i, pairs + i).
        debug: check lengths, ids and bounds as on the CPU before anything is written, and name the entry that is wrong. Copies
            them to the host and waits.

    A token whose place is outside of the table, or in a page that is not there, is not written; on the CPU it is an error.
    Never reads lengths or tables back from a GPU.

    Raises:
        ProblemError: what arrived, what is required and the fix.

    Method: pages as in PagedAttention (Kwon et al. 2023, section 4.1); rotation by position as in RoFormer (Su et al. 2021,
        section 3.4.2).
    """
    required = (k_pages, k, block_table, seqlens_k)
    for tensor in required:
        if not isinstance(tensor, torch.Tensor):
            check_tensors(**dict(zip(("k_pages", "k", "block_table", "seqlens_k"), required, strict=True)))
    if not (type(interleaved) is type(debug) is bool):
        flags(interleaved=interleaved, debug=debug)
    if debug:
        operands = AppendOperands(k_pages, v_pages, k, v, block_table, seqlens_k, cu_seqlens, rotary_cos, rotary_sin)
        check_append(operands)
        cu = None if cu_seqlens is None else cu_seqlens.cpu()
        places(operands._replace(block_table=block_table.cpu(), seqlens_k=seqlens_k.cpu(), cu_seqlens=cu))
    others = (cu_seqlens, rotary_cos, rotary_sin, k_scale, v_scale)
    try:
        APPEND(k_pages, v_pages, k, v, block_table, seqlens_k, *others, interleaved)
    except RuntimeError:  # of torch: it may say less about what arrived
        names = ("cu_seqlens", "rotary_cos", "rotary_sin", "k_scale", "v_scale")
        named = {"k_pages": k_pages, "v_pages": v_pages, "k": k, "v": v, "block_table": block_table, "seqlens_k": seqlens_k}
        named |= dict(zip(names, others, strict=True))
        check_tensors(**{name: tensor for name, tensor in named.items() if tensor is not None})
        for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
            if pages is not None and (pages.is_neg() or pages.is_conj()):
                raise ProblemError(f"{name} is a view with the other sign, which cannot be written to.") from None
        raise


def _check_on_the_host(call) -> None:
    problem, operands = describe(*call[1:])
    q, k, v, *numbers = operands
    check_values(problem, PagedOperands(q, k, v, *(None if t is None else t.cpu() for t in numbers)))


def _dispatched(q, k, v) -> bool:
    """Does the call have to go through the operator? Past it, an eager call costs the host a fraction (`eager`)."""
    return (
        torch.compiler.is_compiling()
        or in_forward_mode()
        or somebody_listens(q, k, v)
        or torch.autograd._profiler_enabled()
        or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    )
