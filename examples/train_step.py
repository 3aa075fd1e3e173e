"""Train a tiny transformer block to copy: each token of the second half repeats the one half a sequence before."""

import torch
from torch import nn

import rowmax

VOCABULARY, WIDTH, HEADS, HALF = 16, 64, 4, 12


class Block(nn.Module):
    """One pre-norm block; rowmax takes `[B, T, H, D]`, so nothing is transposed."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(rowmax.attention(q, k, v, causal=True).flatten(2))
        return x + self.mlp(self.norm2(x))


def main(steps: int = 80) -> tuple[float, float]:
    torch.manual_seed(0)
    embed, position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2 * HALF, WIDTH)
    block, head = Block(), nn.Linear(WIDTH, VOCABULARY)
    parameters = [p for module in (embed, position, block, head) for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    losses = []
    for step in range(steps):
        tokens = torch.randint(VOCABULARY, (32, HALF)).repeat(1, 2)
        logits = head(block(embed(tokens[:, :-1]) + position.weight[:-1]))
        loss = nn.functional.cross_entropy(logits[:, HALF - 1 :].flatten(0, 1), tokens[:, HALF:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3}: loss {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
