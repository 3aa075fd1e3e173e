"""Hugging Face transformers with rowmax attention: one import, one argument. A tiny random Llama, left-padded prompts."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rowmax.integrations.transformers  # noqa: F401  registers "rowmax"


def main() -> bool:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    prompts = torch.randint(2, 100, (2, 10))
    mask = torch.ones_like(prompts)
    mask[0, :4] = 0  # the first prompt is four tokens shorter

    answers = {}
    for implementation in ("rowmax", "eager"):
        model.set_attn_implementation(implementation)
        answers[implementation] = model.generate(prompts, attention_mask=mask, max_new_tokens=20, do_sample=False)
        print(f"{implementation:6} {answers[implementation][0, 10:].tolist()}")
    equal = torch.equal(answers["rowmax"], answers["eager"])
    print("the same tokens" if equal else "different tokens")
    return equal


if __name__ == "__main__":
    main()
