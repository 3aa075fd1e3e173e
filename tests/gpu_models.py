"""What only a GPU can show of language models that run on rowmax; `gpu_serving.py` has these checks in its list.

Each raises an AssertionError that says what is wrong; without transformers there is nothing to check.
"""

import torch

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def _transformers():
    """A small model, prompts, and the answers one by one with eager attention; None where transformers is not installed."""
    try:
        import transformers
    except ImportError:
        return None
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.3}
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval().cuda()
    prompts = [torch.randint(2, 97, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 7, 150, 23)]
    model.set_attn_implementation("eager")
    alone = [
        model.generate(torch.tensor([p], device="cuda"), max_new_tokens=12, do_sample=False)[0, len(p) :].tolist()
        for p in prompts
    ]
    return model, prompts, alone


@check
def transformers_streams_and_batches_give_the_answers_of_each_prompt_alone():
    if (made := _transformers()) is None:
        return
    model, prompts, alone = made
    import transformers

    from rowmax.integrations.concurrent import stream

    model.set_attn_implementation("rowmax")
    answers: list = [[] for _ in prompts]
    for prompt, token, _ in stream(model, prompts, 12):
        answers[prompt].append(token)
    assert answers == alone, "stream: other answers"
    try:
        from rowmax.integrations import continuous_batching
    except ImportError as refused:  # transformers is too old
        print(refused)
        return
    model.set_attn_implementation(continuous_batching.NAME)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    for graphs in (False, True):  # pages are handed out on CUDA
        config = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64, use_cuda_graph=graphs)
        given = {"generation_config": transformers.GenerationConfig(**options), "continuous_batching_config": config}
        results = model.generate_batch(prompts, progress_bar=False, **given)
        found = [results[key].generated_tokens for key in sorted(results)]
        assert found == alone, f"generate_batch, graphs {graphs}: other answers"


@check
def transformers_decodes_over_static_and_padded_caches():
    if (made := _transformers()) is None:
        return
    model, prompts, _ = made
    import rowmax.integrations.transformers  # noqa: F401

    ids = torch.tensor([prompts[0], prompts[2][:40]], device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    for padded in (None, mask):
        for kind in ({"cache_implementation": "static"}, {}):
            results = []
            for name in ("eager", "rowmax"):
                model.set_attn_implementation(name)
                results.append(model.generate(ids, attention_mask=padded, max_new_tokens=12, do_sample=False, **kind))
            assert torch.equal(*results), f"padded {padded is not None}, {kind}: other tokens"
