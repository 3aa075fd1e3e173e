"""Many prompts at once over one cache, and transformers' continuous batching: answers are those that a model gives alone."""

import functools

import pytest
import torch

import rowmax
from rowmax import CacheFull, ProblemError, Unsupported

transformers = pytest.importorskip("transformers")
pytest.importorskip("rowmax.integrations.transformers")
from test_transformers import SIZES, build  # noqa: E402

from rowmax.integrations.concurrent import cache_for, stream  # noqa: E402

TOKENS = 6
BEGINNING = torch.randint(2, 97, (5,), generator=torch.Generator().manual_seed(3)).tolist()
PROMPTS = [
    BEGINNING + torch.randint(2, 97, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 1, 12, 3, 9)
]


@functools.cache
def alone(name: str) -> list[list[int]]:
    """One by one, with eager attention."""
    model = build(name)
    model.set_attn_implementation("eager")
    options = {"max_new_tokens": TOKENS, "do_sample": False}
    return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS]


def together(name: str, **options) -> list[list[int]]:
    model = build(name)
    model.set_attn_implementation("rowmax")
    answers: list[list[int]] = [[] for _ in PROMPTS]
    for prompt, token, last in stream(model, PROMPTS, TOKENS, **options):
        answers[prompt].append(token)
        assert last == (len(answers[prompt]) == TOKENS)
    return answers


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_answers_are_those_of_each_prompt_alone(name):
    assert len({tuple(answer) for answer in alone(name)}) > 1
    assert together(name) == alone(name)
    assert together(name, budget=4) == alone(name)  # prompts in pieces


@pytest.mark.parametrize(
    "sizes", [{"pages": 11, "page_size": 4}, {"pages": 60, "page_size": 1, "max_sequences": 3}, {"pages": 2, "page_size": 64}]
)
def test_prompts_wait_for_room(sizes):
    cache = cache_for(build("llama"), **sizes)
    assert together("llama", cache=cache) == alone("llama")
    assert (cache.free_pages, cache.sequences) == (sizes["pages"], ())
    cache.check()


def test_an_answer_ends_with_the_token_that_stops_it_and_nobody_has_to_hear_the_rest():
    model, stop = build("llama"), alone("llama")[0][2]
    model.set_attn_implementation("rowmax")
    answers = [[] for _ in PROMPTS]
    for prompt, token, _ in stream(model, PROMPTS, TOKENS, stop=[stop]):
        answers[prompt].append(token)
    for answer, whole in zip(answers, alone("llama"), strict=True):
        assert answer == whole[: whole.index(stop) + 1 if stop in whole else None]
    cache = cache_for(model, 40)
    tokens = stream(model, PROMPTS, TOKENS, cache=cache)
    next(tokens)
    tokens.close()
    assert (cache.free_pages, cache.sequences) == (40, ())


def test_what_stream_refuses():
    model = build("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(ProblemError, match=r'set_attn_implementation\("rowmax"\)'):
        stream(model, PROMPTS, 3)
    model.set_attn_implementation("rowmax")
    for prompts, tokens, says in (([[]], 3, "at least one token"), (PROMPTS, 0, "at least one token")):
        with pytest.raises(ProblemError, match=says):
            stream(model, prompts, tokens)
    with pytest.raises(ProblemError, match="never fit into the cache"):
        list(stream(model, PROMPTS, 30, cache=cache_for(model, 3, page_size=4)))
    cache = cache_for(model, 3, page_size=4)
    cache.extend([cache.add()], 12)
    with pytest.raises(CacheFull):  # somebody else has the pages
        list(stream(model, PROMPTS, 3, cache=cache))
    for name in ("gemma2", "gpt_oss", "llama4"):
        model = build(name)
        model.set_attn_implementation("rowmax")
        with pytest.raises(Unsupported, match="chunked" if name == "llama4" else "without soft-caps and sinks"):
            list(stream(model, PROMPTS, 3))


# ---- transformers' own -------------------------------------------------------------------------------------------------

batching = pytest.importorskip("transformers.generation.continuous_batching")
ours = pytest.importorskip("rowmax.integrations.continuous_batching", exc_type=ImportError)


def batched(name: str, blocks: int) -> list[list[int]]:
    """`blocks`: pages of a sequence in the block table; 0: keys are gathered."""
    model = build(name)
    model.set_attn_implementation(ours.NAME)
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    sizes = {"num_blocks": 32, "page_size": 8, "max_batch_tokens": 16, "max_blocks_per_request": blocks}
    config = transformers.ContinuousBatchingConfig(**sizes)
    given = {"generation_config": transformers.GenerationConfig(**options), "continuous_batching_config": config}
    results = model.generate_batch(PROMPTS, progress_bar=False, **given)
    return [results[key].generated_tokens for key in sorted(results)]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_continuous_batching_with_gathered_keys(name):
    assert batched(name, 0) == alone(name)


def test_continuous_batching_over_pages(monkeypatch):
    """transformers hands pages out on CUDA only, unless its check is left out."""
    from transformers.generation.continuous_batching import initialization

    calls, attend = [], rowmax.attention_paged
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_, **__: None)
    monkeypatch.setattr(rowmax, "attention_paged", lambda *given, **options: calls.append(1) or attend(*given, **options))
    assert batched("llama", 4) == alone("llama")
    assert len(calls) >= 2 * (TOKENS - 1)
    given = {"softcap": 30.0, "write_index": [0], "block_table": 0, "cu_seq_lens_q": 0, "cu_seq_lens_k": 0}
    layer = torch.zeros(1, 4, 1, 8)
    with pytest.raises(Unsupported, match="max_blocks_per_request=0"):
        ours.attend_batch(None, layer, layer, layer, None, **given)


def test_outside_of_a_batch_the_name_is_rowmax():
    model = build("qwen3")
    ids = torch.tensor(PROMPTS[:1])
    results = []
    for name in ("eager", ours.NAME):
        model.set_attn_implementation(name)
        results.append(model.generate(ids, max_new_tokens=TOKENS, do_sample=False, cache_implementation="static"))
    assert torch.equal(*results)


# ---- a cache of fixed size ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
def test_one_token_over_a_static_cache_is_a_call_over_pages(padded, monkeypatch):
    """No dense mask, no copy of the cache: pages are views of it."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = {"attention_mask": mask} if padded else {}
    calls, attend = [], rowmax.attention_paged

    def seen(q, k_pages, v_pages, table, lengths, **given):
        assert k_pages._base is not None
        calls.append((k_pages.shape, lengths.tolist()))
        return attend(q, k_pages, v_pages, table, lengths, **given)

    monkeypatch.setattr(rowmax, "attention_paged", seen)
    results = []
    for name in ("eager", "rowmax"):
        model.set_attn_implementation(name)
        results.append(model.generate(ids, max_new_tokens=4, do_sample=False, cache_implementation="static", **options))
    assert torch.equal(*results)
    assert len(calls) == 3 * 2  # two layers; the prompt is another call
    shape, lengths = calls[0]
    room = int(shape[1]) if not padded else int(shape[0]) // 4
    assert shape == ((4 * room, 1, 1, 16) if padded else (2, room, 2, 16))
    assert lengths == ([11, 11] if not padded else [11, 11, 7, 7])
