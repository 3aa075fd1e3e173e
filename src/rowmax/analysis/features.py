"""Which backend runs what, in which direction: a table made by asking the plan, for `docs/features.md`.

    python -m rowmax.analysis.features docs/features.md     writes the table between the marks in that file

`tests/analysis/test_features.py` fails where the file says something else than the plan.
"""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

from rowmax.analysis.calls import put
from rowmax.device import Device
from rowmax.errors import Unsupported
from rowmax.paged import PagedProblem
from rowmax.plan import CANDIDATES, PAGED, by_table
from rowmax.problem import Problem
from rowmax.score_mod import ScoreMod


def _same(score, batch, head, row, col):
    return score


def _one(score, batch, head, row, col):
    return 1.0


# Stands for every `ScoreMod` that has all its functions. Nothing runs it, so that these need not be Triton's.
ScoreMod(*(SimpleNamespace(fn=one, arg_names=()) for one in (_same, _one)), name="feature", reference=_same)
BASE = "b4 h32/8 q4096 k4096 d128"
# What -> the words of a problem that has it.
FEATURES = {
    "bf16, fp16": "bf16",
    "fp32": "fp32",
    "fp64": "fp64",
    "causal": "bf16 causal",
    "window": "bf16 window(1023,0)",
    "sink tokens beside a window": "bf16 window(1023,0) sink_tokens=4",
    "a prefix that all see": "bf16 causal prefix=256",
    "chunks": "bf16 causal chunk=1024",
    "packed sequences": "bf16 causal packed",
    "`dim_v` other than `dim_qk`": "d192/128 bf16 causal",
    "dims that are no multiples of 8": "d59 bf16 causal",
    "soft-cap": "bf16 causal softcap=30.0",
    "ALiBi, slopes `[H]` or `[B, H]`": "bf16 causal alibi(batch)",
    "sink logits": "bf16 causal sink",
    "an added bias, with its gradient": "bf16 causal bias(hqk)",
    "a boolean mask": "bf16 causal mask(bqk)",
    "dropout": "bf16 causal dropout=0.1",
    "a function of scores, `score_mod`": "bf16 causal mod(feature)",
    "gradients equal bit by bit, `deterministic=True`": "bf16 causal deterministic",
    "a paged cache": "bf16 causal paged16",
    "latent attention, pages of 64": "h128/1 d576/512 bf16 causal paged64",
}
BEGIN, END = "<!-- table -->\n", "<!-- end -->\n"
DEVICES = {"H200": Device.named("H200"), "A100": Device.named("A100"), "CPU": Device("CPU", "cpu")}
ON_CPU = ("aten", "tiled", "gathered")


def problem_of(words: str) -> Problem:
    base = " ".join(word for word in BASE.split() if not (word[0] in "dh" and re.search(rf"\b{word[0]}\d", words)))
    return (PagedProblem if "paged" in words else Problem).parse(f"{base} {words}")


def runs(problem: Problem, name: str) -> str:
    """Directions that the backend can run the problem in, on a device of its own: "F", "F B" or ""."""
    device = DEVICES["CPU" if name in ON_CPU else "H200"]
    if isinstance(problem, PagedProblem) and name not in PAGED:
        return ""
    found = [word for word in ("forward", "backward") if CANDIDATES[name].refuses(problem, device, word) is None]
    if isinstance(problem, PagedProblem):  # the call gives no gradients
        found = found[:1]
    return " ".join(word[0].upper() for word in found)


def taken(problem: Problem, device: Device) -> str:
    """`forward / backward`: what the plan takes, by its tables."""
    names = []
    for direction in ("forward", "backward"):
        try:
            if isinstance(problem, PagedProblem) and direction == "backward":
                raise Unsupported("no gradients")
            names.append(by_table(problem, device, direction=direction).algorithm)  # type: ignore[arg-type]
        except Unsupported:
            names.append("none")
    return " / ".join(names)


def table() -> str:
    """Two tables in Markdown: what each backend can run, and what the plan takes."""
    problems = {name: problem_of(words) for name, words in FEATURES.items()}
    lines = ["| | " + " | ".join(f"`{name}`" for name in CANDIDATES) + " |", "|---" * (len(CANDIDATES) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(runs(p, each) for each in CANDIDATES) + " |" for name, p in problems.items()]
    lines += ["", "| forward / backward | " + " | ".join(DEVICES) + " |", "|---" * (len(DEVICES) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(taken(p, each) for each in DEVICES.values()) + " |" for name, p in problems.items()]
    return "\n".join(lines) + "\n"


def replaced(text: str) -> str:
    """The file's text with the table as it should be."""
    return put(text, BEGIN, table(), END)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(replaced(path.read_text()))
