"""transformers' continuous batching, `model.generate_batch`, with rowmax attention over its paged cache.

    import rowmax.integrations.continuous_batching
    model.set_attn_implementation("rowmax_flash2")
    model.generate_batch(prompts, ...)

transformers lets a batch run without dense masks only if the name of the attention contains "flash", and hands its layers the
pages themselves, to be written and read where they lie, only if "2" or "3" follows. Hence the name. For such names it also
loads functions of FlashAttention's interface, by `_lazy_imports`: for this one name it is given those of `rowmax.flash_attn`.

A layer is called in one of two ways. Mixed batches come as packed queries, with the keys of each sequence gathered from its
pages (`attention_varlen`). Batches of one token a sequence come with pages and a block table (`append_kv`, `attention_paged`):
on CUDA, for models without windows. Outside of `generate_batch` the name does what "rowmax" does.

Needs transformers 5.23. Older ones attend to pages by a function of their own, which leaves out windows and soft-caps that a
layer is called with.
"""

import functools
from typing import Any, Optional

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils

import rowmax
from rowmax import flash_attn
from rowmax.errors import Unsupported
from rowmax.integrations.transformers import _refuse_unserved, attend, make_mask, refuse_chunks

NAME = "rowmax_flash2"


def attend_batch(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    *,
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[Tensor] = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention of one layer; the signature is that of transformers' attention functions.

    Args:
        query: `[1, Hq, T, D]`, the new tokens of all sequences.
        key, value: `[1, Hk, keys of all sequences, D]` where they were gathered, else those of the new tokens, which go into
            `k_cache`, `v_cache` (`[page, slot, Hk, D]`) by `block_table`.
        cu_seq_lens_q, cu_seq_lens_k: bounds of the sequences; new tokens count as keys, and come last.

    Returns:
        `[1, T, Hq, Dv]`, and None in place of the attention weights.
    """
    if kwargs.get("write_index") is None:  # not a batch of `generate_batch`
        options: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window}
        options |= {"softcap": softcap, "s_aux": s_aux, **kwargs}
        return attend(module, query, key, value, attention_mask, **options)
    table, bounds_q, bounds_k = (kwargs.pop(name, None) for name in ("block_table", "cu_seq_lens_q", "cu_seq_lens_k"))
    k_pages, v_pages = kwargs.pop("k_cache", None), kwargs.pop("v_cache", None)
    _refuse_unserved(dropout, kwargs)
    refuse_chunks(module)
    call: dict[str, Any] = {"scale": scaling, "window": (None if sliding_window is None else sliding_window - 1, 0)}
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, H, D]
    if table is None:
        scores = {"softcap": softcap, "sink": s_aux}
        call.update({name: given for name, given in scores.items() if given is not None})
        hints = {"max_seqlen_q": kwargs.get("max_length_q"), "max_seqlen_k": kwargs.get("max_length_k")}
        call.update({name: given for name, given in hints.items() if isinstance(given, int)})
        return rowmax.attention_varlen(q, k, v, bounds_q, bounds_k, **call).unsqueeze(0), None
    if softcap is not None or s_aux is not None:
        raise Unsupported(
            "rowmax attends over pages without soft-caps and sinks: set max_blocks_per_request=0 in the "
            "ContinuousBatchingConfig, and the keys are gathered."
        )
    lengths = bounds_k[1 : q.shape[0] + 1] - bounds_k[: q.shape[0]]
    rowmax.append_kv(k_pages, v_pages, k, v, table, lengths)
    return rowmax.attention_paged(q, k_pages, v_pages, table, lengths, **call).unsqueeze(0), None


def _register() -> None:
    if "paged|sdpa" in AttentionInterface().valid_keys():
        raise ImportError(
            f"rowmax in continuous batching needs transformers 5.23 or newer, here is {transformers.__version__}: its paged "
            "attention leaves out windows and soft-caps. `rowmax.integrations.concurrent.stream(model, prompts, tokens)` does "
            "the same with any version."
        )
    AttentionInterface.register(NAME, attend_batch)
    AttentionMaskInterface.register(NAME, make_mask)
    theirs = modeling_flash_attention_utils._lazy_imports
    if getattr(theirs, "knows", None) == NAME:
        return
    functions = (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache)

    @functools.wraps(theirs)
    def imports(implementation, *arguments, **options):
        if implementation == NAME:
            utils = modeling_flash_attention_utils
            return (*functions, utils._pad_input, utils._unpad_input)
        return theirs(implementation, *arguments, **options)

    imports.knows = NAME  # type: ignore[attr-defined]
    modeling_flash_attention_utils._lazy_imports = imports


_register()
