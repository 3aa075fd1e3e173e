"""Which public call takes which argument, and what one says of an argument that it does not take.

A call refuses what others of the family take by `Unsupported`, with the reason and who takes it, and what none takes by a
TypeError that names the argument meant. For `api`, `serving`, `cache`, `explain` and `sdpa`;
`analysis/calls.py` makes a table of it.
"""

import inspect
import re
from typing import Any, NoReturn

from rowmax.errors import Unsupported

CALLS = (
    *("attention", "attention_varlen", "prepare", "explain", "attention_paged", "attention_shared", "prepare_paged"),
    "PagedKVCache.attend",
    "sdpa",
)
CACHE_GIVES = ("seqlens_k", "cu_seqlens_q", "max_seqlen_q")  # from the step
TENSORS = ("q", "k", "v", "query", "key", "value", "k_pages", "v_pages", "block_table", "shared_pages")

_PAGES = "Over pages a mask is causal, window and sink_tokens, and scores are only scaled"
_NO_GRADIENTS = "There are no gradients, and the forward is bitwise repeatable as it is"
_DENSE = "It belongs to dense tensors [B, T, H, D]"
_LENGTHS = "Lengths are in cu_seqlens, for packed tensors [T, H, D]"
_BENT = ("softcap", "alibi_slopes", "sink", "bias", "mask", "dropout_p", "seed", "score_mod", "prefix", "chunk")
_PADDED = ("seqlens_q", "seqlens_k", "leftpad_k")
_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")

# Why a call does not take what others take.
WHY: dict[str, dict[str, str]] = {
    "attention": dict.fromkeys(_PACKED, "Its tensors are dense [B, T, H, D]; packed ones [T, H, D] are for attention_varlen"),
    "attention_varlen": {**dict.fromkeys(("bias", "mask"), _DENSE), **dict.fromkeys(_PADDED, _LENGTHS)},
    "prepare": {
        **dict.fromkeys(_PADDED, f"{_LENGTHS}, whose values may change between calls"),
        **dict.fromkeys(("dropout_p", "seed"), "A prepared call has no gradients, and dropout is for training"),
        "deterministic": _NO_GRADIENTS,
    },
    "explain": {
        **dict.fromkeys(_PADDED, _LENGTHS),
        "seed": "Which weights are dropped makes no difference",
        "return_lse": "It makes no difference: the LSE is a few bytes",
    },
    **{
        name: {**dict.fromkeys(_BENT, _PAGES), "deterministic": _NO_GRADIENTS}
        for name in ("attention_paged", "attention_shared", "prepare_paged", "PagedKVCache.attend")
    },
    "sdpa": {},
}
WHY["prepare_paged"] |= {
    "sink_tokens": "They are a second call, merged with the first",
    "out": "Its outputs are its own, the same tensors every time",
    "debug": "It would wait for the GPU in every call; check once with attention_paged(..., debug=True)",
}
WHY["attention_shared"] |= {
    **dict.fromkeys(("causal", "window", "sink_tokens"), "It is causal over all keys, those of the shared pages among them"),
    "batch_invariant": "It shares reads between sequences, so that results depend on who shares",
}
WHY["PagedKVCache.attend"] |= dict.fromkeys(CACHE_GIVES, "The cache's step has it")

# What other libraries, or other calls of this one, call it.
MEANT = {
    "is_causal": "causal",
    "attn_mask": "mask (boolean) or bias (added)",
    "attn_bias": "bias",
    "key_padding_mask": "seqlens_k and leftpad_k, or mask",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "window_size": "window, None on a side for no limit",
    "sliding_window": "window=(w - 1, 0) for w keys",
    "logits_soft_cap": "softcap",
    "dropout": "dropout_p",
    "attention_sinks": "sink",
    "s_aux": "sink",
    "learnable_sink": "sink",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse; probabilities are never made",
    "enable_gqa": "nothing: heads_q is any multiple of heads_k",
    "cache_seqlens": "seqlens_k",
}
_MEANT_BY_SDPA = {"causal": "is_causal, aligned to the top left", "mask": "attn_mask", "bias": "attn_mask"}


def refuse(call: str, given: dict[str, Any]) -> NoReturn:
    """The error of a call that was given keywords which it does not take.

    Raises:
        Unsupported: the first of them, by whatever name, is taken by another of `CALLS` alone.
        TypeError: no call takes it.
    """
    name, own = next(iter(given)), keywords(call)
    takers = [other for other in CALLS if name in keywords(other)]
    if call == "sdpa" and name in _MEANT_BY_SDPA:
        raise TypeError(f"sdpa() takes no argument '{name}'; it is {_MEANT_BY_SDPA[name]}.")
    said = name
    if name in MEANT and call != "sdpa":
        words = [word for word in re.findall(r"\w+", MEANT[name]) if any(word in keywords(other) for other in CALLS)]
        here = [word for word in words if word in own]
        if here or not words:
            raise TypeError(f"{call}() takes no argument '{name}'; here it is {MEANT[name] if here == words else here[0]}.")
        name, said = words[0], f"{name}; in rowmax it is {words[0]}"
        takers = [other for other in CALLS if name in keywords(other)]
    if takers:
        why = WHY[call].get(name)
        raise Unsupported(f"{call} takes no {said}. {why + '. ' if why else ''}It is taken by {', '.join(takers)}.")
    from difflib import get_close_matches

    near = get_close_matches(name, own, 1)
    hint = f"; did you mean '{near[0]}'?" if near else f". It takes {', '.join(own)}."
    raise TypeError(f"{call}() takes no argument '{name}'{hint}")


def keywords(call: str) -> list[str]:
    """Names of its arguments but those tensors that it is about."""
    import rowmax

    if call == "PagedKVCache.attend":
        return ["layer", *(name for name in keywords("attention_paged") if name not in CACHE_GIVES)]
    parameters = inspect.signature(getattr(rowmax, call)).parameters.values()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in TENSORS]
