"""One training step of a Llama-shaped block, compiled, with rowmax and with torch SDPA in the same run; and their loss curves.

    python benchmarks/training.py                     # 4 layers, hidden 4096, 32/8 heads of 128, 8k tokens, bf16
    python benchmarks/training.py --hidden 128 --heads 4/2 --tokens 256 --steps 3 --device cpu

A step is forward, backward and AdamW, timed by turns. The losses are of `--steps` steps on the same tokens from the same
weights: a random walk on a graph, of which the second half repeats the first, with gradients clipped and the learning rate
warmed up, so that curves show differences of the arithmetic and not of an unstable optimisation. They agree if rowmax's curve
is no farther from a peer's than twice what the peers are from each other: bf16 noise.
With one peer alone there is nothing to measure that by, and the distance is printed. A curve that is off writes no row, and the
exit code is 1.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import baselines
import record
import timing
from calls import device_of, plan_of
from rowmax.problem import Operands, Problem
from shapes import BOTH

VOCABULARY = 4096
SUCCESSORS = 4  # of a token in the walk
WARMUP, RATE, CLIP = 10, 1e-4, 1.0


class Layer(nn.Module):
    """Llama's: RMSNorm, rotary attention with grouped KV heads, RMSNorm, SwiGLU. `attend` takes q, k, v of `[B, T, H, D]`."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, attend):
        super().__init__()
        dim = hidden // heads
        self.dim, self.attend = dim, attend
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * dim, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * (inner := hidden * 7 // 2), bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.sizes = (heads, kv_heads, kv_heads)

    def forward(self, x, rotation):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.dim)).split(self.sizes, 2)
        x = x + self.out(self.attend(_rotated(q, rotation), _rotated(k, rotation), v).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, options, attend):
        super().__init__()
        heads, kv_heads = _heads(options)
        self.embed = nn.Embedding(VOCABULARY, options.hidden)
        self.layers = nn.ModuleList(Layer(options.hidden, heads, kv_heads, attend) for _ in range(options.layers))
        self.head = nn.Linear(options.hidden, VOCABULARY, bias=False)

    def forward(self, tokens, rotation):
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, rotation)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


def main(arguments: "list[str] | None" = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", default="32/8", help="query/KV")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=50, help="of the loss curves")
    parser.add_argument("--who", default="", help="default: rowmax, cudnn, fa2 on a GPU; rowmax, sdpa on a CPU")
    parser.add_argument("--seconds", type=float, default=5.0, help="of timing")
    parser.add_argument("--device", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    device = device_of(options.device)
    names = (options.who or ("rowmax,cudnn,fa2" if device.type == "cuda" else "rowmax,sdpa")).split(",")
    facts, problem = record.machine(device), _problem(options)
    steps, curves = {}, {}
    for name in names:
        try:
            attend = baselines.build(name, problem, _operands(problem, device))
        except baselines.Refused as refused:
            print(f"  {name} not timed: {refused}", file=sys.stderr)
            continue
        steps[name] = step = make_step(options, attend, device)
        curves[name] = [step() for _ in range(options.steps)]
        print(f"{name}: loss {curves[name][0]:.4f} to {curves[name][-1]:.4f} in {options.steps} steps", flush=True)
    if wrong := disagreement(curves):
        print(wrong, file=sys.stderr)
        return 1
    samples, _ = timing.samples_ms(steps, device, options.seconds)
    rows = []
    for name, times in samples.items():
        ms = statistics.median(times)
        figures = {"ms": record.figures(ms), "ms_min": record.figures(min(times)), "samples": len(times)}
        speed = {"tokens_per_s": record.figures(options.tokens / ms * 1e3), "losses": [round(x, 5) for x in curves[name]]}
        plan = plan_of(problem, device, BOTH) if name == "rowmax" else None
        rows.append(
            {"problem": str(problem), "pass": "training", "who": name, "plan": plan, "checked": True, **figures, **speed}
        )
        print(f"{name:8} {ms:9.3f} ms a step, {speed['tokens_per_s']:.6g} tokens/s")
    record.append(options.out or record.default_path(facts), [{**row, **facts} for row in rows])
    return 0


def make_step(options, attend, device):
    """A function that trains for one step and returns the loss; weights, tokens and their order are the same for everyone."""
    torch.manual_seed(0)
    tokens = walk(options.tokens + 1)[None].to(device)
    with torch.device(device):
        model = Model(options, attend).to(torch.bfloat16)
        for weight in model.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
        positions = torch.arange(options.tokens, dtype=torch.float32)
        dim = model.layers[0].dim
        angles = positions[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    rotation = torch.polar(torch.ones_like(angles), angles)
    rotation = torch.stack([rotation.real, rotation.imag])
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), fused=device.type == "cuda")
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP, total_iters=WARMUP)

    def step() -> float:
        loss = compiled(tokens, rotation)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def walk(count: int) -> torch.Tensor:
    """Tokens: each one of the few successors of the one before; the second half is the first once more."""
    generator = torch.Generator().manual_seed(0)
    graph = torch.randint(VOCABULARY, (VOCABULARY, SUCCESSORS), generator=generator).tolist()
    found = [0]
    for choice in torch.randint(SUCCESSORS, (-(-count // 2),), generator=generator).tolist():
        found.append(graph[found[-1]][choice])
    return torch.tensor((found * 2)[:count])


def disagreement(curves: dict[str, list[float]]) -> str:
    """What is wrong with the curves, or ""."""
    peers = [name for name in curves if name != "rowmax"]
    if "rowmax" not in curves or not peers:
        return ""
    if not all(torch.tensor(curve).isfinite().all() for curve in curves.values()):
        return "a loss is not finite"
    distance = min(_distance(curves["rowmax"], curves[name]) for name in peers)
    noise = max((_distance(curves[a], curves[b]) for a in peers for b in peers if a < b), default=None)
    print(
        f"rowmax's losses are within {distance:.3g} of a peer's"
        + (f", the peers within {noise:.3g}" if noise is not None else "")
    )
    return f"rowmax's losses are {distance:.3g} from every peer's" if noise is not None and distance > 2 * noise else ""


def _distance(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def _rotated(x, rotation):
    real, imaginary = rotation[:, None, :, None]
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * real - b * imaginary, a * imaginary + b * real], -1).to(x.dtype)


def _heads(options) -> tuple[int, int]:
    heads, _, kv_heads = options.heads.partition("/")
    return int(heads), int(kv_heads or heads)


def _problem(options) -> Problem:
    heads, _ = _heads(options)
    tokens, dim = options.tokens, options.hidden // heads
    return Problem.parse(f"b1 h{options.heads} q{tokens} k{tokens} d{dim} bf16 causal")


def _operands(problem: Problem, device) -> Operands:
    """Whose forms `baselines.build` looks at; their numbers are not used."""
    shapes = [(problem.heads_q, problem.dim_qk), (problem.heads_k, problem.dim_qk), (problem.heads_k, problem.dim_v)]
    tensors = (torch.empty(1, problem.len_q, heads, dim, dtype=problem.dtype, device=device) for heads, dim in shapes)
    return Operands(*tensors)


if __name__ == "__main__":
    sys.exit(main())
