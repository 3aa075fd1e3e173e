"""Hugging Face transformers: import this module once, then load any model with `attn_implementation="rowmax"`.

    import rowmax.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="rowmax")

Two functions are registered under that name. `make_mask` is called once per forward pass and decides what the queries see;
`attend` is called by every layer. No dense mask is ever made. Plain causal attention needs no mask at all (`None`); for
the rest, what `make_mask` found travels to the layers as one small int32 tensor of shape

    [rows, right, left, columns]        (`_carry`, `_limits`)

whose middle two *sizes* say how far a query sees to each side of its own position (or in chunks of what size), and whose
data (stride 0 in between) depend on `columns`:

    0               no data: the first `rows` keys exist and the last query is aligned with the last of them
    1               packed sequences: the data are `cu_seqlens` over the flattened batch
    _ROW_COLUMNS    padding or a static cache: where the live queries and keys of each row of the batch lie
    _TOKEN_COLUMNS  the same, and how many keys the row's one query sees; _WHOLE_COLUMNS: they begin at the row's first

Facts known to the host (limits, the number of keys) must not depend on reading device memory, and must survive
`torch.compile` and `generate`, which make masks in one place and use them in another; a tensor's shape does both.

Differences from eager attention, by intention: the output at a padded position is 0 (eager computes a value there that
nothing reads). What cannot be served (arbitrary 4-D masks, block patterns, position biases, ...)
raises `rowmax.Unsupported`; nothing is computed in another way than the model asked for.
"""

from typing import Any, Optional, Union

import torch
from torch import Tensor

import rowmax
from rowmax.errors import Unsupported
from rowmax.integrations.mask_functions import EAGER, INSTEAD, Limit, read

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function
    from transformers.utils.import_utils import is_tracing
except ImportError as error:
    raise ImportError(
        f"rowmax.integrations.transformers needs transformers >= 5.0 with AttentionMaskInterface ({error}). "
        "Install it with: pip install 'rowmax[hf]'"
    ) from error

NAME = "rowmax"

# Sizes in the middle of the carried shape: _UNLIMITED for no limit, else 1 + the limit above it. The number keeps the
# shape apart from that of an integer mask made by a user, whose second size is 1 or the number of heads.
_UNLIMITED = 23
_CHUNKED = 22  # instead of the limit to the right: causal within chunks, whose size stands for the limit to the left
_ROW_COLUMNS = 10  # five ends of runs for the queries, then five for the keys (`_row_ends`)
_TOKEN_COLUMNS = _ROW_COLUMNS + 1  # and the number of keys
_WHOLE_COLUMNS = _ROW_COLUMNS + 2  # and the number of the row

# Keyword arguments of attention functions in transformers that change the result and that rowmax does not compute.
_UNSERVED = {
    "sinks": "attention sinks under this name",
    "position_bias": "a position bias",
    "indices": "sparse attention by indices",
    "block_indices": "sparse attention by block indices",
    "block_table": "a paged cache",
    "k_cache": "a paged cache",
    "v_cache": "a paged cache",
}


# ---- once per forward pass: the mask -------------------------------------------------------------------------------


def make_mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: Union[int, Tensor] = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: Optional[Tensor] = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: Union[str, torch.device, None] = None,
    cache_position: Optional[Tensor] = None,
    **__,
) -> Optional[Tensor]:
    """What the queries see; the signature is that of transformers' mask functions.

    Args:
        q_offset: position of the first query; a tensor for a static cache, whose length lives on the device.
        kv_offset: position of the first key that the layers will pass.
        attention_mask: boolean `[B, positions]`, False for padding.
        use_vmap: set by transformers when the mask function is not only its own.
        cache_position: positions of the queries; transformers before 5.4 passes it instead of `q_length` and `q_offset`.

    Returns:
        None for plain causal attention in which the last query sees the last key, else the carried tensor.
    """
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], _first_position(cache_position, kv_length + kv_offset)
    left, right, sequence_ids, _, chunk, padding, _ = read(mask_function, custom=use_vmap)
    if chunk is not None and kv_offset == 0 and kv_length <= chunk:
        chunk = None  # there is but one
    if sequence_ids is not None:
        return _carry(_packed_bounds(sequence_ids), left, right, chunk)
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.reshape(())  # shape [1] in some versions
    unlimited = left is None and right is None
    # One past the key at the last query's position; without a diagonal positions do not matter.
    end = kv_length if unlimited else q_offset - kv_offset + q_length
    on_device = isinstance(end, Tensor)
    if right != 0 and (on_device or end != kv_length):
        raise Unsupported(
            f"rowmax attention: the mask lets queries see keys after their own position, but the last query is not at the "
            f"last of the {kv_length} keys; {INSTEAD}."
        )
    if not on_device and not 0 <= end <= kv_length:
        raise Unsupported(f"rowmax attention: the last query is at key {end - 1} of {kv_length}; {INSTEAD}.")

    if chunk is not None and padding is not None:
        return _in_chunks(chunk, padding, attention_mask, q_length, kv_length, kv_offset, end)
    if attention_mask is not None:
        start, stop, whole = _real_range(attention_mask, kv_offset, end)
        if isinstance(end, Tensor) or not whole:
            return _carry(_row_ends(start, stop, end, q_length, kv_length, unlimited), left, right)
    elif isinstance(end, Tensor):
        stop = end.expand(batch_size)
        return _carry(_row_ends(torch.zeros_like(stop), stop, end, q_length, kv_length, False, whole=True), left, right)
    if right == 0 and end == kv_length and (left is None or left + 1 >= end) and allow_is_causal_skip:
        return None
    return _carry(torch.empty((end, 0), dtype=torch.int32, device=device), left, right)


def _in_chunks(chunk: int, padding: Tensor, attention_mask, q_length: int, kv_length: int, kv_offset: int, end) -> Tensor:
    """What is carried where queries see their own chunk only. A row's first chunk begins behind its padding."""
    if kv_offset and kv_length - q_length < chunk - 1:
        raise Unsupported(
            f"rowmax attention: of {kv_offset + kv_length} positions in chunks of {chunk} the layers pass {kv_length}, "
            f"too few to begin a chunk before {q_length} queries; {INSTEAD}."
        )
    start, stop, whole = padding * 0, padding * 0 + end, not isinstance(end, Tensor)
    if attention_mask is not None:
        start, stop, whole = _real_range(attention_mask, kv_offset, end)
    if q_length == 1:  # its chunk is all that it sees
        start = torch.maximum(start, end - 1 - (end - 1 + kv_offset - padding) % chunk)
        return _carry(_row_ends(torch.minimum(start, stop), stop, end, 1, kv_length, False), None, 0)
    if whole and not kv_offset:
        return _carry(torch.empty((end, 0), dtype=torch.int32, device=padding.device), None, 0, chunk)
    # Where the first keys are gone, the rest of their chunk is seen by nobody.
    start = torch.maximum(start, -(kv_offset - padding).clamp(min=0) % chunk)
    return _carry(_row_ends(torch.minimum(start, stop), stop, end, q_length, kv_length, False), None, 0, chunk)


def _first_position(cache_position: Tensor, keys: int) -> Union[int, Tensor]:
    """The first query's position; read to the host only where it lets the mask be dropped (a cache that grows)."""
    if is_tracing(cache_position):
        return cache_position[0]
    first = int(cache_position[0])
    return first if first == 0 or first + cache_position.shape[0] == keys else cache_position[0]


def _packed_bounds(sequence_ids: Tensor) -> Tensor:
    """`cu_seqlens`, `[sequences + 1, 1]`, from ids `[B, T]` that change where a sequence begins; rows are separate."""
    first = torch.ones_like(sequence_ids[:, :1], dtype=torch.bool)
    begins = torch.cat([first, sequence_ids[:, 1:] != sequence_ids[:, :-1]], 1).flatten()
    tokens = begins.shape[0]
    if is_tracing(begins):
        # The number of sequences is data. One for each token is enough; those left over are empty, at the end.
        places = torch.arange(tokens, dtype=torch.int32, device=begins.device)
        starts = torch.where(begins, places, tokens).sort().values
    else:
        starts = begins.nonzero().squeeze(1).to(torch.int32)
    return torch.nn.functional.pad(starts, (0, 1), value=tokens).unsqueeze(1)


def _real_range(attention_mask: Tensor, kv_offset: int, end: Union[int, Tensor]) -> tuple[Tensor, Tensor, bool]:
    """`(start, stop, whole)`: the keys `[start, stop)` of each row that are not padding, among the keys `[0, end)`.

    `whole` says that nothing is padded anywhere; False also where the host must not read the device (compilation).
    The one read-back of a forward pass is here, and only for a model that was given an attention mask.
    """
    if attention_mask.dim() != 2:
        raise Unsupported(f"rowmax attention takes padding masks [B, positions]; got shape {list(attention_mask.shape)}.")
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device) - kv_offset
    real = attention_mask.to(torch.bool) & (positions >= 0) & (positions < end)
    count = real.sum(-1)
    start = torch.where(real, positions, attention_mask.shape[1]).amin(-1)
    last = torch.where(real, positions, -1).amax(-1)
    start = torch.where(count == 0, 0, start)
    covered = attention_mask.shape[1] - kv_offset >= end
    contiguous = ((count == 0) | (last - start + 1 == count)).all() & covered
    problem = (
        "rowmax attention needs an attention_mask that covers every position so far and whose ones are contiguous in each "
        "row (padding only on the left or only on the right; to generate, pad on the left)"
    )
    if is_tracing(real):
        torch._assert_async(contiguous, problem)
        return start, start + count, False
    fine, whole = torch.stack([contiguous, (count == end).all()]).tolist()
    if not fine:
        raise Unsupported(f"{problem}. Otherwise {INSTEAD}.")
    return start, start + count, whole


def _row_ends(
    start: Tensor, stop: Tensor, end, q_length: int, kv_length: int, all_queries: bool, whole: bool = False
) -> Tensor:
    """Where the runs of each row end, `[B, columns]`: `(queries, keys)` in five runs, of which one is attention.

        queries before the live ones | no query         | live queries | queries after them | no query
        no key                       | keys before live | live keys    | no key             | keys after them

    Runs without keys give 0. The live queries end where the live keys do, so that the bottom-right alignment of
    `attention_varlen` is the model's own. For one query a row, more columns say what `attention_paged` needs; `whole`:
    live keys begin at the first.
    """
    if all_queries:
        first, last = torch.zeros_like(start), torch.full_like(start, q_length)
    else:
        shift = end - q_length
        first, last = (start - shift).clamp(0, q_length), (stop - shift).clamp(0, q_length)
    all_q, all_k = torch.full_like(start, q_length), torch.full_like(start, kv_length)
    runs = [first, first, last, all_q, all_q, torch.zeros_like(start), start, stop, stop, all_k]
    if q_length == 1:
        runs.append(torch.where(last > first, stop - start, 0))
        runs += [torch.arange(len(start), device=start.device)] * whole
    return torch.stack(runs).to(torch.int32).t()  # columns without gaps


def _carry(data: Tensor, left: Limit, right: Limit, chunk: Optional[int] = None) -> Tensor:
    """int32 `[rows, columns]` as `[rows, right, left, columns]`, see the module's docstring; no memory is added."""
    sizes = [_UNLIMITED if side is None else _UNLIMITED + 1 + side for side in (right, left)]
    if chunk is not None:
        sizes = [_CHUNKED, _UNLIMITED + 1 + chunk]
    return data[:, None, None].expand(data.shape[0], *sizes, data.shape[1])


def no_mask(device) -> Tensor:
    """Where a mask is expected and nothing is to be said: models hand on what has four dimensions."""
    return _carry(torch.empty((0, 0), dtype=torch.int32, device=device), None, None)


def _limits(mask: Tensor) -> tuple[Limit, Limit, Optional[int]]:
    """`(left, right, chunk)` back from the shape."""
    right, left = (None if size == _UNLIMITED else size - _UNLIMITED - 1 for size in mask.shape[1:3])
    return (None, 0, left) if mask.shape[1] == _CHUNKED else (left, right, None)


def _is_carried(mask: Tensor) -> bool:
    return (
        mask.dim() == 4
        and mask.dtype == torch.int32
        and mask.shape[3] in (0, 1, _ROW_COLUMNS, _TOKEN_COLUMNS, _WHOLE_COLUMNS)
        and mask.shape[1] >= _CHUNKED
        and mask.shape[2] >= _UNLIMITED
    )


# ---- every layer: the attention ------------------------------------------------------------------------------------


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    *,
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    sliding_window: Optional[int] = None,
    is_causal: Optional[bool] = None,
    cu_seq_lens_q: Optional[Tensor] = None,
    cu_seq_lens_k: Optional[Tensor] = None,
    max_length_q=None,
    max_length_k=None,
    softcap: Optional[float] = None,
    s_aux: Optional[Tensor] = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention of one layer; the signature is that of transformers' attention functions.

    Args:
        query: `[B, Hq, Tq, D]`; key: `[B, Hk, Tk, D]`; value: `[B, Hk, Tk, Dv]`, any strides with the last equal to 1.
        attention_mask: what `make_mask` returned.
        cu_seq_lens_q, cu_seq_lens_k: sequences packed into a batch of one, as `DataCollatorWithFlattening` gives them.
        dropout: of the weights, which models ask for in training; other weights are dropped than by eager attention.
        softcap: of the scores, as in Gemma 2; s_aux: sink logits `[Hq]`, as in gpt-oss.

    Returns:
        `[B, Tq, Hq, Dv]`, and None in place of the attention weights, which are never stored.
    """
    _refuse_unserved(0.0, kwargs)
    if (pages := kwargs.get("rowmax_pages")) is not None:  # of `concurrent`, which knows what the queries see
        refuse_chunks(module)
        given = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        return pages.attend(module, query, key, value, **given), None
    chunk = None
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        left = None if sliding_window is None else sliding_window - 1
        right = 0 if causal else left
        if causal and query.shape[2] > key.shape[2] and cu_seq_lens_q is None:
            raise Unsupported(
                f"rowmax attention: causal attention of {query.shape[2]} queries over {key.shape[2]} keys without a mask has "
                f"no agreed alignment; {INSTEAD}."
            )
    elif not _is_carried(attention_mask):
        raise Unsupported(
            f"rowmax attention takes no dense masks; got a {attention_mask.dtype} mask of shape {list(attention_mask.shape)}. "
            f"Pass a 2-D padding mask, packed position_ids or no mask; or {INSTEAD}."
        )
    else:
        left, right, chunk = _limits(attention_mask)
        if sliding_window is not None and left != sliding_window - 1:
            raise Unsupported(
                f"rowmax attention: the layer has sliding_window={sliding_window}, its mask was made for "
                f"{'no window' if left is None else f'a window of {left + 1}'}; {INSTEAD}."
            )
    call: dict[str, Any] = {"window": (left, right), "scale": scaling}
    if chunk is not None:
        call["chunk"] = chunk
    if softcap is not None:
        call["softcap"] = softcap
    if s_aux is not None:
        call["sink"] = s_aux
    if dropout:
        call["dropout_p"] = dropout
    columns = 0 if attention_mask is None else attention_mask.shape[3]
    if cu_seq_lens_q is not None:
        if columns >= _ROW_COLUMNS or query.shape[2] * query.shape[0] != key.shape[2] * key.shape[0]:
            raise Unsupported(
                "rowmax attention takes cu_seq_lens_q/k for packed sequences without padding and without a cache: drop the "
                "attention_mask and past key values, or drop cu_seq_lens."
            )
        call["max_seqlen_q"], call["max_seqlen_k"] = (n if isinstance(n, int) else None for n in (max_length_q, max_length_k))
        return _by_token(query, key, value, cu_seq_lens_q, cu_seq_lens_k, call), None
    if attention_mask is not None:
        if columns == 1:
            cu_seqlens = attention_mask[:, 0, 0, 0]
            return _by_token(query, key, value, cu_seqlens, cu_seqlens, call), None
        if columns >= _ROW_COLUMNS:
            return _by_row(query, key, value, attention_mask[:, 0, 0], call), None
        keys = attention_mask.shape[0]  # a static cache that is being filled: the rest of it is not written yet
        key, value = key[:, :, :keys], value[:, :, :keys]
    return rowmax.attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **call), None


def _refuse_unserved(dropout: float, kwargs: dict) -> None:
    if dropout:
        raise Unsupported(
            f"rowmax attention has no dropout while serving; the model asks for {dropout}. Set config.attention_dropout = 0.0."
        )
    if kwargs.get("output_attentions"):
        raise Unsupported(f"rowmax attention never stores the weights; for output_attentions=True {EAGER}.")
    for name, what in _UNSERVED.items():
        if kwargs.get(name) is not None:
            raise Unsupported(f"rowmax attention does not compute {what} ('{name}'), which this model uses; {EAGER}.")


def refuse_chunks(module: torch.nn.Module) -> None:
    """Where the model's masks, which would say it, are not made."""
    kinds, index = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and index is not None and kinds[index] == "chunked_attention":
        raise Unsupported(
            "rowmax serves no layers of chunked attention, which this model has, from pages: call model.generate."
        )


def _by_token(query, key, value, cu_seqlens_q, cu_seqlens_k, call) -> Tensor:
    """Attention over `cu_seqlens` of the flattened tokens `[B * T, H, D]`: free when T was stored before H, else a copy."""
    batch, _, len_q, _ = query.shape
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    out = rowmax.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **call)
    return out.view(batch, len_q, *out.shape[1:])


def _by_row(query, key, value, ends, call) -> Tensor:
    """Attention within the live ranges of each row; `ends` is `[B, columns]` from `_row_ends`.

    A cache stores `[B, H, T, D]`. To keep it where it is, each KV head of each row can be made a sequence of its own,
    with the query heads that share it; that moves queries and outputs instead of keys and values.
    """
    (batch, heads_q, len_q, _), (_, heads_k, len_k, _), dim_v = query.shape, key.shape, value.shape[3]
    if ends.shape[0] != batch:
        raise Unsupported(f"rowmax attention: the mask was made for a batch of {ends.shape[0]}, the queries have {batch}.")
    stored = key.is_contiguous() and value.is_contiguous()
    needs_gradient = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if stored and ends.shape[1] > _ROW_COLUMNS and not needs_gradient and not {"sink", "softcap", "chunk"} & call.keys():
        return _one_token(query, key, value, ends, call)
    by_head = stored and len_q * heads_q <= len_k * heads_k
    by_head = by_head and "sink" not in call  # sinks differ between heads, which would be sequences
    cu_seqlens_q = _flat_ends(ends[:, :5], len_q, heads_k if by_head else 1)
    cu_seqlens_k = _flat_ends(ends[:, 5:_ROW_COLUMNS], len_k, heads_k if by_head else 1)
    call.update(max_seqlen_q=len_q, max_seqlen_k=len_k)
    if not by_head:
        return _by_token(query, key, value, cu_seqlens_q, cu_seqlens_k, call)
    group = heads_q // heads_k
    q = query.unflatten(1, (heads_k, group)).transpose(2, 3).reshape(batch * heads_k * len_q, group, -1)
    k, v = key.view(batch * heads_k * len_k, 1, -1), value.view(batch * heads_k * len_k, 1, -1)
    out = rowmax.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **call)
    return out.view(batch, heads_k, len_q, group, dim_v).transpose(1, 2).reshape(batch, len_q, heads_q, dim_v)


def _one_token(query, key, value, ends, call) -> Tensor:
    """One query a row over a cache `[B, H, T, D]`: whole rows are pages, of padded ones each key of each head is."""
    (batch, heads_k, len_k, dim), dim_v, lengths = key.shape, value.shape[3], ends[:, _ROW_COLUMNS].contiguous()
    if ends.shape[1] == _WHOLE_COLUMNS:
        pages, table = (key.transpose(1, 2), value.transpose(1, 2)), ends[:, _TOKEN_COLUMNS:]
        return rowmax.attention_paged(query.transpose(1, 2), *pages, table.contiguous(), lengths, **call)
    pages = key.view(-1, 1, 1, dim), value.view(-1, 1, 1, dim_v)
    rows = torch.arange(batch * heads_k, device=key.device).unsqueeze(1) * len_k  # the first page of each head of each row
    table = rows + ends[:, 6].repeat_interleave(heads_k).unsqueeze(1) + torch.arange(len_k, device=key.device)
    q = query.reshape(batch * heads_k, -1, query.shape[3])  # [B * Hk, heads of a group, D]
    out = rowmax.attention_paged(q, *pages, table, lengths.repeat_interleave(heads_k), **call)
    return out.view(batch, 1, -1, dim_v)


def _flat_ends(ends: Tensor, length: int, repeats: int) -> Tensor:
    """`cu_seqlens` of `[B, repeats]` rows stored one after another, `length` apart, from the ends `[B, 5]` within a row."""
    rows = ends.shape[0] * repeats
    begins = torch.arange(rows, dtype=torch.int32, device=ends.device) * length
    flat = (ends[:, None] + begins.view(-1, repeats, 1)).flatten()
    return torch.nn.functional.pad(flat, (1, 0))


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
