"""Attention shapes of public models, by name: heads, KV heads, head dimension and window, as their configurations say."""

from typing import NamedTuple, Optional

from rowmax.errors import ProblemError
from rowmax.problem import Problem

PHASES = ("prefill", "decode")


class Model(NamedTuple):
    """`window`: keys that a layer with one keeps, itself included; `every`: what share of the layers has it, in words."""

    heads: int
    kv_heads: int
    dim: int
    dim_v: Optional[int] = None
    window: Optional[int] = None
    every: str = ""


MODELS = {
    "gpt2": Model(12, 12, 64),
    "bert-base": Model(12, 12, 64),
    "meta-llama-2-7b": Model(32, 32, 128),
    "meta-llama-3-8b": Model(32, 8, 128),
    "meta-llama-3-70b": Model(64, 8, 128),
    "meta-llama-3.1-405b": Model(128, 8, 128),
    "mistral-7b-v0.1": Model(32, 8, 128, window=4096, every="every layer"),
    "mixtral-8x7b": Model(32, 8, 128),
    "qwen2.5-7b": Model(28, 4, 128),
    "qwen3-8b": Model(32, 8, 128),
    "qwen3-32b": Model(64, 8, 128),
    "gemma-7b": Model(16, 16, 256),
    "phi-3-mini": Model(32, 32, 96),
    "phi-4": Model(40, 10, 128),
    "deepseek-v3": Model(128, 128, 192, 128),  # keys and values written out, as in training and prefill
    "gpt-oss-20b": Model(64, 8, 64, window=128, every="every second layer"),
    "smollm2-135m": Model(9, 3, 64),
}


def problem(name: str, phase: str, *, tokens: int = 8192, batch: Optional[int] = None, window: bool = False) -> Problem:
    """One layer of a model in bf16: a prompt of `tokens` (prefill, batch 1), or one more token behind it (decode, batch 8).

    Args:
        window: a layer with a window, for models that have some with and some without.

    Raises:
        ProblemError: an unknown model or phase.
    """
    model = MODELS.get(name.lower().split("/")[-1])
    if model is None:
        raise ProblemError(f"no model '{name}'; known are {', '.join(MODELS)}")
    if phase not in PHASES:
        raise ProblemError(f"phase must be one of {', '.join(PHASES)}; got '{phase}'")
    dims = f"d{model.dim}" + (f"/{model.dim_v}" if model.dim_v else "")
    mask = "" if name == "bert-base" else "causal"
    if model.window and (window or model.every == "every layer"):
        mask = f"window({model.window - 1},0)"
    queries = tokens if phase == "prefill" else 1
    batch = batch if batch is not None else 1 if phase == "prefill" else 8
    return Problem.parse(f"b{batch} h{model.heads}/{model.kv_heads} q{queries} k{tokens} {dims} bf16 {mask}")
