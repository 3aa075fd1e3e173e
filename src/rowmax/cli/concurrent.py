"""`rowmax demo --concurrent N`: the demo's model answers N prompts at once over one `PagedKVCache`, and each answer is compared
with the one that it gives alone with eager attention."""

import time
from itertools import product

import torch
from rich.console import Console
from rich.markup import escape

from rowmax import Device

PAGE = 16
TOPICS = (
    *("the wind", "winter", "an old clock", "bread", "the moon", "a lighthouse", "rain on a roof", "the number seven", "a fox"),
    *("gravity", "coffee", "the first train", "a lost key", "bees", "the colour blue", "mountains"),
)
QUESTIONS = (
    "Write a haiku about {}.",
    "What is remarkable about {}? One sentence.",
    "Name three words for {}.",
    "Tell me of {}.",
)


def questions(first: str, count: int) -> list[str]:
    """The one that was asked, and others; from 65 on they come again."""
    made = [question.format(topic) for question, topic in product(QUESTIONS, TOPICS)]
    return [first, *(made[i % len(made)] for i in range(count - 1))]


def run(asked: str, count: int, device: str, tokens: int) -> int:
    """Answer, print, compare; the exit code is 1 if an answer differs, 2 if something is not installed."""
    from rowmax.cli import demo

    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # as in `demo`
    if missing := demo.not_installed():
        return missing
    with demo._alive(console, "loading SmolLM2-135M-Instruct (expanding its 4-bit weights)"):
        tokenizer, model = demo._load(device)
    from rowmax.integrations.concurrent import cache_for, stream

    asked_all = questions(asked, count)
    prompts = [demo.prompt_of(tokenizer, question, device) for question in asked_all]
    ids = [prompt["input_ids"][0].tolist() for prompt in prompts]
    pages = sum(-(-(len(prompt) + tokens) // PAGE) + 1 for prompt in ids)
    model.set_attn_implementation("rowmax")
    cache = cache_for(model, pages, page_size=PAGE, max_sequences=count + 1)
    answers: list[list[int]] = [[] for _ in ids]
    used, start = 0, time.perf_counter()
    for prompt, token, last in stream(model, ids, tokens, cache=cache):
        answers[prompt].append(token)
        used = max(used, pages - cache.free_pages)
        if last:
            text = tokenizer.decode(answers[prompt], skip_special_tokens=True)
            console.print(f"[bold]{escape(asked_all[prompt])}[/] {escape(' '.join(text.split()))}")
    seconds = time.perf_counter() - start
    made = sum(map(len, answers))
    where = escape(Device.of(torch.device(device)).name)
    console.print(f"\n{count} prompts at once on {where}: {made} tokens in {seconds:.1f} s, {made / seconds:.1f} tokens/s")
    console.print(f"  at most {used} pages of {PAGE} tokens in use; without shared beginnings {_pages_apart(ids, answers)}")

    alone: list[list[int]] = []
    with demo._alive(console, "each alone with eager attention"):
        start = time.perf_counter()
        alone += (demo._generate(model, prompt, tokens, "eager")[0] for prompt in prompts)
        seconds = time.perf_counter() - start
    made = sum(map(len, alone))
    console.print(f"one by one, eager: {made} tokens in {seconds:.1f} s, {made / seconds:.1f} tokens/s")
    different = [i for i, pair in enumerate(zip(answers, alone, strict=True)) if pair[0] != pair[1]]
    for i in different:
        console.print(f"[bold red]answer {i} differs[/] {_where(model, ids[i], answers[i], alone[i])}")
        console.print(f"  alone: {escape(tokenizer.decode(alone[i], skip_special_tokens=True))}")
    if not different:
        console.print(f"[green]answers equal[/]: all {count} are, token for token, what the model says alone")
    return 1 if different else 0


def _pages_apart(prompts, answers) -> int:
    """Pages at the end if all sequences had their own and none had ended."""
    return sum(-(-(len(prompt) + len(answer)) // PAGE) for prompt, answer in zip(prompts, answers, strict=True))


def _where(model, prompt: list[int], answer: list[int], alone: list[int]) -> str:
    """The first place, and how far apart eager attention finds the two tokens: rounding may decide between near ties."""
    pairs = list(zip(answer, alone, strict=False))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if place == len(pairs):
        return f"in length: {len(answer)} tokens, {len(alone)} alone"
    with torch.no_grad():
        context = torch.tensor([[*prompt, *alone[:place]]], device=model.device)
        logits = model(context).logits[0, -1]
    return f"from token {place} on: logits {logits[answer[place]]:.6f} and, alone, {logits[alone[place]]:.6f}"
