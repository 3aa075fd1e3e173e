"""The demo on a tiny random model: it answers, measures and compares. (`make demo` runs the real one.)"""

import pytest
import torch

pytest.importorskip("rich")
transformers = pytest.importorskip("transformers")
for name in ("gguf", "accelerate"):
    pytest.importorskip(name)

from rowmax.cli import concurrent, demo  # noqa: E402

TOKENS, PROMPT = 6, 9


class Tokenizer:
    """What the demo asks of a tokenizer."""

    def apply_chat_template(self, messages, **_):
        assert messages == [{"role": "user", "content": "a question"}]
        ids = torch.arange(2, 2 + PROMPT)[None]
        return transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def decode(self, ids, **_):
        return " ".join(f"<{int(i)}>" for i in torch.as_tensor(ids).flatten()) + " "


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    monkeypatch.setattr(demo, "_load", lambda device: (Tokenizer(), model))
    find_spec = demo.importlib.util.find_spec
    monkeypatch.setattr(
        demo.importlib.util, "find_spec", lambda name, *rest: name if name == demo.PACKAGE else find_spec(name, *rest)
    )


def test_answers_measures_and_agrees(capsys):
    assert demo.run("a question", "cpu", TOKENS) == 0
    printed = capsys.readouterr().out
    assert f"{TOKENS} tokens in" in printed
    assert f"tokens equal: all {TOKENS}" in printed
    assert "2 calls" in printed  # prefill: one per layer
    assert f"{2 * (TOKENS - 1)} calls" in printed  # the last token needs no pass
    assert f"b1 h4/2 q{PROMPT} k{PROMPT} d8 fp32 causal" in printed
    assert f"b1 h4/2 q1 k{PROMPT + TOKENS - 1} d8 fp32 causal" in printed
    assert "KiB held at most by a call" in printed


def test_different_tokens_fail(monkeypatch, capsys):
    answers = iter([([5, 6, 7], 1.0), ([5, 9, 7], 1.0)])
    monkeypatch.setattr(demo, "_generate", lambda *_: next(answers))
    monkeypatch.setattr(demo, "_show", lambda *_: None)
    assert demo.run("a question", "cpu", TOKENS) == 1
    printed = capsys.readouterr().out
    assert "tokens differ from number 1 on" in printed
    assert "<5> <9> <7>" in printed


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name, *_: None)
    assert demo.run("a question", "cpu", TOKENS) == 2
    assert demo.INSTALL in capsys.readouterr().err


def test_the_library_keeps_no_counts():
    """The wrapper is registered under its own name; `rowmax` stays the plain function."""
    from rowmax.integrations.transformers import attend

    demo.Watch().register()
    assert transformers.AttentionInterface()["rowmax"] is attend
    assert transformers.AttentionInterface()[demo.MEASURED] is not attend


# ---- --concurrent ---------------------------------------------------------------------------------------------------


class Chat(Tokenizer):
    """Prompts of different lengths that begin alike."""

    def apply_chat_template(self, messages, **_):
        text = messages[0]["content"]
        ids = torch.tensor([[2, 3, 4, *(5 + ord(c) % 50 for c in text[:12])]])
        return transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


@pytest.fixture
def chat(monkeypatch):
    monkeypatch.setattr(demo, "_load", lambda device, load=demo._load: (Chat(), load(device)[1]))


def test_many_prompts_at_once(chat, capsys):
    assert concurrent.run("a question", 5, "cpu", TOKENS) == 0
    printed = capsys.readouterr().out
    assert f"5 prompts at once on cpu: {5 * TOKENS} tokens in" in printed
    assert "answers equal: all 5" in printed
    assert "pages of 16 tokens in use" in printed
    assert printed.count("Write a haiku about") == 4
    assert "a question <" in printed


def test_a_different_answer_is_shown(chat, monkeypatch, capsys):
    alone = iter([[5, 9, 7], [5]])
    monkeypatch.setattr(demo, "_generate", lambda *_: (next(alone), 1.0))
    monkeypatch.setattr(
        "rowmax.integrations.concurrent.stream",
        lambda *_, **__: iter([(0, 5, False), (1, 5, True), (0, 6, False), (0, 7, True)]),
    )
    assert concurrent.run("a question", 2, "cpu", TOKENS) == 1
    printed = capsys.readouterr().out
    assert "answer 0 differs from token 1 on: logits" in printed
    assert "alone: <5> <9> <7>" in printed
    assert "answer 1" not in printed


def test_questions_differ_until_there_are_no_more():
    assert len(set(concurrent.questions("mine", 65))) == 65
    assert len(concurrent.questions("mine", 100)) == 100
