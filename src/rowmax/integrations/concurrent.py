"""Many prompts at once: a transformers model whose keys and values lie in one `PagedKVCache`.

    model.set_attn_implementation("rowmax")                    after `import rowmax.integrations.transformers`
    for prompt, token, last in stream(model, prompts, 64):     prompts: lists of token ids
        ...

A step is one forward pass over the new tokens of all sequences, packed: one token of each that is being answered, and as much
of the waiting prompts as `budget` allows ("continuous batching", Yu et al., "Orca", OSDI 2022; prompts in chunks as in Agrawal
et al., "Sarathi", 2023). What all prompts begin with is computed and stored once. The likeliest token is taken. Used by
`rowmax demo --concurrent`.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, Optional

import torch
from torch import Tensor

from rowmax import PagedKVCache
from rowmax.errors import ProblemError, Unsupported
from rowmax.integrations.transformers import NAME, no_mask

if TYPE_CHECKING:
    from rowmax.cache import Step


class Token(NamedTuple):
    prompt: int  # its place in `prompts`
    token: int
    last: bool  # the answer is complete


def cache_for(model, pages: int, **options) -> PagedKVCache:
    """A cache for all layers of a model, on its device and in its dtype; `options` as for `PagedKVCache`."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    sizes = {
        "heads": getattr(config, "num_key_value_heads", None) or heads,
        "dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "layers": config.num_hidden_layers,
    }
    return PagedKVCache(pages, **{**sizes, "dtype": model.dtype, "device": model.device, **options})


def stream(
    model,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    cache: Optional[PagedKVCache] = None,
    stop: Optional[Sequence[int]] = None,
    budget: int = 2048,
) -> Iterator[Token]:
    """The answers' tokens, as they come.

    Args:
        model: a causal language model with `attn_implementation="rowmax"`, whose layers hand keyword arguments on to attention.
        prompts: token ids, at least one each.
        tokens: most tokens of an answer.
        cache: `None` makes one that holds all prompts and answers at a time. In a smaller one prompts wait for room.
        stop: token ids that end an answer, and are its last; `None`: those of `model.generation_config`.
        budget: most new tokens of a forward pass.

    Raises:
        ProblemError: an empty prompt, one that never fits into the cache, or another attention implementation.
        Unsupported: the model keeps keys and values elsewhere, or its scores are bent (soft-cap, sinks), or it
            attends in chunks.
    """
    implementation = str(model.config._attn_implementation)
    if not implementation.startswith(NAME):
        raise ProblemError(f'stream needs rowmax attention: model.set_attn_implementation("{NAME}"); got "{implementation}".')
    wrong = [i for i, prompt in enumerate(prompts) if not len(prompt)]
    if wrong or tokens < 1 or budget < 1:
        raise ProblemError(
            f"prompts need at least one token, and so do answers and budget; got empty prompts {wrong[:8]}, {tokens} tokens, "
            f"budget {budget}."
        )
    if cache is None:
        size = 16
        most = sum(-(-(len(prompt) + tokens) // size) + 1 for prompt in prompts)
        cache = cache_for(model, most, page_size=size, max_sequences=len(prompts) + 1)
    if stop is None:
        ends = getattr(model.generation_config, "eos_token_id", None)
        stop = [] if ends is None else [ends] if isinstance(ends, int) else ends
    return _steps(model, [list(map(int, prompt)) for prompt in prompts], tokens, cache, set(stop), budget)


@dataclass
class _Sequence:
    prompt: int
    number: int  # in the cache
    pending: list[int]  # tokens that are not in it yet
    reserved: int  # pages that it will have at most
    answered: int = 0


@dataclass
class Pages:
    """What the layers of one forward pass need; it reaches `attend` as the keyword argument `rowmax_pages`."""

    cache: PagedKVCache
    step: "Step"
    layers: set = field(default_factory=set)  # that wrote their keys

    def attend(self, module, query: Tensor, key: Tensor, value: Tensor, *, scaling, sliding_window, softcap, s_aux) -> Tensor:
        """query `[1, Hq, T, D]`, key and value alike, of the new tokens; `[1, T, Hq, Dv]`."""
        if softcap is not None or s_aux is not None:
            raise Unsupported("rowmax attends over pages without soft-caps and sinks, which this model has.")
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, H, D]
        self.layers.add(module.layer_idx)
        self.cache.append(self.step, k, v, layer=module.layer_idx)
        window = None if sliding_window is None else (sliding_window - 1, 0)
        return self.cache.attend(self.step, q, layer=module.layer_idx, scale=scaling, window=window).unsqueeze(0)


def _steps(model, prompts, tokens: int, cache: PagedKVCache, stop: set, budget: int) -> Iterator[Token]:
    shared = _common(prompts) if len(prompts) > 1 else []
    waiting: deque[int] = deque(range(len(prompts)))
    running: list[_Sequence] = []
    prefix, room = None, cache.free_pages
    try:
        if shared:
            prefix = cache.add()
            for begin in range(0, len(shared), budget):
                _forward(model, cache, [prefix], [shared[begin : begin + budget]], [])
        while waiting or running:
            while waiting and (new := _admit(cache, prompts, waiting[0], tokens, running, prefix, room)) is not None:
                running.append(new)
                waiting.popleft()
            step, left = [], budget
            for sequence in sorted(running, key=lambda sequence: len(sequence.pending)):  # answers first
                taken = sequence.pending[:left]
                if taken:
                    step.append((sequence, taken))
                    del sequence.pending[: len(taken)]
                    left -= len(taken)
            ready = [sequence for sequence, _ in step if not sequence.pending]
            chunks = [taken for _, taken in step]
            wanted = [i for i, (sequence, _) in enumerate(step) if not sequence.pending]
            likeliest = _forward(model, cache, [sequence.number for sequence, _ in step], chunks, wanted)
            for sequence, token in zip(ready, likeliest, strict=True):
                sequence.answered += 1
                sequence.pending = [token]
                last = token in stop or sequence.answered == tokens
                if last:
                    cache.free(sequence.number)
                    running.remove(sequence)
                yield Token(sequence.prompt, token, last)
    finally:  # also when nobody wants to hear the rest
        for number in [sequence.number for sequence in running] + ([] if prefix is None else [prefix]):
            cache.free(number)


def _common(prompts) -> list[int]:
    """What all prompts begin with, but for the last token of the shortest: each has its own to continue from."""
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    return [column[0] for column in columns][: min(map(len, prompts)) - 1]


def _admit(cache: PagedKVCache, prompts, which: int, tokens: int, running, prefix, room: int) -> Optional[_Sequence]:
    """A place for a prompt and its whole answer, or None until others have ended. `room`: pages for prefix and sequences."""
    own = 0 if prefix is None else cache.length(prefix)
    size, prompt = cache.page_size, prompts[which]
    reserved = -(-(len(prompt) + tokens) // size) - own // size  # whole pages of the prefix are shared
    there = room + -own // size
    fits = sum(sequence.reserved for sequence in running) + reserved <= there and len(prompt) + tokens <= cache.max_length
    if not fits or not cache.free_sequences:
        if running:
            return None
        raise ProblemError(
            f"prompt {which} of {len(prompt)} tokens and an answer of {tokens} never fit into the cache: there are {there} "
            f"pages of {size} for it, {cache.max_length} tokens of a sequence at most, room for {cache.free_sequences} more "
            "sequences. Make a larger one."
        )
    number = cache.add() if prefix is None else cache.fork(prefix)
    return _Sequence(which, number, prompt[own:], reserved)


@torch.no_grad()
def _forward(model, cache: PagedKVCache, sequences: list[int], chunks: list[list[int]], wanted: list[int]) -> list[int]:
    """One pass over new tokens of sequences; the likeliest next token of those wanted."""
    lengths = [cache.length(sequence) for sequence in sequences]
    pages = Pages(cache, cache.extend(sequences, [len(chunk) for chunk in chunks]))
    ids = [token for chunk in chunks for token in chunk]
    positions = [n + i for n, chunk in zip(lengths, chunks, strict=True) for i in range(len(chunk))]
    ends, total = [], 0
    for chunk in chunks:
        ends.append(total := total + len(chunk))
    keep = [ends[i] - 1 for i in wanted] or [0]
    sent = torch.tensor([ids, positions], device=model.device)
    logits = model(
        input_ids=sent[:1],
        position_ids=sent[1:],
        attention_mask=no_mask(model.device),
        use_cache=False,
        logits_to_keep=torch.tensor(keep, device=model.device),
        rowmax_pages=pages,
    ).logits[0]
    if len(pages.layers) != cache.k_pages.shape[0]:
        raise Unsupported(
            f"of the cache's {cache.k_pages.shape[0]} layers {len(pages.layers)} were written: this model does not hand "
            "keyword arguments on to its attention, or keeps its state elsewhere."
        )
    return logits[: len(wanted)].argmax(-1).tolist()
