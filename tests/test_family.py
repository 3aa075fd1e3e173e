"""Which call takes which argument: the page is what the signatures say, and what a call does not take it explains."""

from pathlib import Path

import pytest
import torch

import rowmax
from rowmax import Unsupported, family
from rowmax.analysis import calls

PAGE = Path(__file__).parents[1] / "docs" / "arguments.md"
EVERY = sorted({name for call in family.CALLS for name in family.keywords(call)})
X = torch.randn(1, 6, 2, 16)
CU = torch.tensor([0, 6], dtype=torch.int32)
PAGES = (X[:, -1], X, X, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([6], dtype=torch.int32))
TENSORS = {
    "attention_varlen": (X[0], X[0], X[0], CU, CU),
    **dict.fromkeys(("attention_paged", "prepare_paged"), PAGES),
    "attention_shared": (*PAGES, 0),
}


def call(name, **options):
    if name != "PagedKVCache.attend":
        return getattr(rowmax, name)(*TENSORS.get(name, (X, X, X)), **options)
    cache = rowmax.PagedKVCache(1, page_size=16, heads=2, dim=16, dtype=torch.float32)
    step = cache.extend([cache.add()], 6)
    cache.append(step, X, X)
    return cache.attend(step, X, **options)


def test_the_page_is_what_the_signatures_say():
    assert calls.replaced(PAGE.read_text()) == PAGE.read_text(), "python -m rowmax.analysis.calls docs/arguments.md"


@pytest.mark.parametrize("name", family.CALLS)
def test_a_call_says_why_it_does_not_take_what_others_do(name):
    call(name)
    own = family.keywords(name)
    foreign = [word for word in EVERY if word not in own]
    assert set(family.WHY[name]) <= set(foreign), "a reason for what is taken"
    for word in foreign:
        with pytest.raises((Unsupported, TypeError), match=rf"takes no.*{word}") as caught:
            call(name, **{word: None})
        said = str(caught.value)
        assert f"{word}. " in said or "here it is" in said or "it is " in said, said


@pytest.mark.parametrize(
    ("name", "word", "meant"),
    [
        ("attention", "is_causal", "'is_causal'; here it is causal"),
        ("attention", "attn_mask", "mask (boolean) or bias (added)"),
        ("attention_varlen", "softmax_scale", "here it is scale"),
        ("attention", "causl", "did you mean 'causal'?"),
        ("attention", "zzz", "It takes causal, window"),
        ("attention", "cache_seqlens", "here it is seqlens_k"),
        ("sdpa", "causal", "it is is_causal, aligned to the top left"),
        ("sdpa", "window", "It is taken by attention,"),
        ("prepare", "dropout_p", "dropout is for training. It is taken by attention, attention_varlen, explain, sdpa."),
        ("attention_paged", "softcap", "scores are only scaled. It is taken by attention,"),
        ("attention_paged", "key_padding_mask", "here it is seqlens_k."),  # no leftpad_k, no mask
        ("attention_paged", "s_aux", "no s_aux; in rowmax it is sink. Over pages"),
        ("attention_varlen", "attn_mask", "it is mask. It belongs to dense tensors [B, T, H, D]. It is taken by attention,"),
        ("prepare", "cache_seqlens", "it is seqlens_k. Lengths are in cu_seqlens"),
        ("prepare", "enable_gqa", "here it is nothing"),
        ("PagedKVCache.attend", "cu_seqlens_q", "The cache's step has it"),
    ],
)
def test_a_word_of_others_is_led_to_its_own(name, word, meant):
    with pytest.raises((TypeError, Unsupported)) as caught:
        call(name, **{word: 1})
    assert meant in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"softcap": 20.0, "alibi_slopes": torch.ones(2), "sink": torch.ones(2)}, "softcap=20.0 alibi sink"),
        (
            {"window": (3, 0), "sink_tokens": 1, "chunk": 4, "deterministic": True},
            "window(3,0) sink_tokens=1 chunk=4 deterministic",
        ),
        ({"causal": True, "prefix": 2, "dropout_p": 0.5}, "causal prefix=2 dropout=0.5"),
        ({"mask": torch.ones(1, 1, 1, 6, dtype=torch.bool)}, "mask(k)"),
    ],
)
def test_explain_describes_the_call_that_is_made(options, words):
    state = torch.get_rng_state()
    said = rowmax.explain(X, X, X, gpu="H200", **options)["problem"]
    assert rowmax.Problem.parse(said) == rowmax.Problem.parse(f"b1 h2 q6 k6 d16 fp32 {words}")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.isfinite(rowmax.attention(X, X, X, **options)).all()


def test_explain_takes_tensors_without_memory():
    q, cu = torch.empty(6, 2, 16, device="meta"), torch.empty(2, dtype=torch.int32, device="meta")
    assert "packed" in rowmax.explain(q, q, q, cu, cu, causal=True, gpu="H200")["problem"]
