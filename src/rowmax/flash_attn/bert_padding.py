"""Padded batches `[B, T, ...]` to packed tokens `[total, ...]` and back, as `flash_attn.bert_padding`; differentiable."""

from typing import Optional

import torch


def unpad_input(hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: Optional[torch.Tensor] = None):
    """The tokens that `attention_mask` `[B, T]`, 1 for a token, keeps, one sequence after another.

    Args:
        unused_mask: `[B, T]`, 1 for tokens that are kept in memory but belong to no sequence's attention.

    Returns:
        `(hidden [total, ...], indices [total] into B * T, cu_seqlens int32 [B + 1], max_seqlen int, seqused int32 [B])`;
        `seqused` counts without the unused ones.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    longest = int(lengths.max()) if lengths.numel() else 0
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def unpad_input_for_concatenated_sequences(hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor):
    """Rows that hold several sequences each: the numbers above 0 of a row of `attention_mask_in_length` `[B, T]` are the
    lengths of its sequences in turn, and what is behind them is padding.

    Returns:
        `(hidden [total, ...], indices [total], cu_seqlens int32 [sequences + 1], max_seqlen int)`.
    """
    in_row = attention_mask_in_length.sum(-1, keepdim=True)
    place = torch.arange(attention_mask_in_length.shape[1], device=attention_mask_in_length.device)
    indices = (place < in_row).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length > 0].to(torch.int32)  # row by row
    longest = int(lengths.max()) if lengths.numel() else 0
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """`[total, ...]` back to `[batch, seqlen, ...]`, with zeros where there is no token."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`x[indices]`."""
    return x.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """Zeros `[first_axis_dim, ...]` with `values` at `indices`, each of which occurs once."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(x: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`(x[indices], x)`."""
    return index_first_axis(x, indices), x
