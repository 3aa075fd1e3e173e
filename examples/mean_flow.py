"""A one-step generator trained as a mean flow: its loss needs how the model changes along its input, `torch.func.jvp`.

    u(z, r, t) should be v - (t - r) du/dt,  along dz/dt = v = noise - data;  a sample is noise - u(noise, 0, 1)

Method: Geng et al., "Mean Flows for One-step Generative Modeling" (2025). Data: tokens that are all +1, or all -1.
"""

import torch
from torch import nn

import rowmax

TOKENS, WIDTH, HEADS, BATCH = 6, 32, 2, 64


class Model(nn.Module):
    """Two attention blocks over tokens of one number each, and the two times."""

    def __init__(self):
        super().__init__()
        self.embed, self.times, self.head = nn.Linear(1, WIDTH), nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)) for _ in range(2))

    def forward(self, z, r, t):
        x = self.embed(z) + self.times(torch.cat([r, t], -1))
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
            x = x + rowmax.attention(q, k, v).flatten(2)
            x = x + mlp(x)
        return self.head(x)


def main(steps: int = 150) -> tuple[float, float]:
    """How far one-step samples are from the data, before and after."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    distances = []
    for step in range(steps + 1):
        data = (2.0 * torch.randint(2, (BATCH, 1, 1)) - 1).expand(BATCH, TOKENS, 1)
        noise = torch.randn(BATCH, TOKENS, 1)
        r, t = torch.rand(2, BATCH, 1, 1).sort(0).values
        r = torch.where(torch.rand(BATCH, 1, 1) < 0.5, t, r)  # half of them plain flow matching
        z, v = (1 - t) * data + t * noise, noise - data
        u, du_dt = torch.func.jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
        if step in (0, steps):
            with torch.no_grad():
                sample = noise - model(noise, torch.zeros_like(r), torch.ones_like(t))
            distances.append(float((sample - sample.mean(1, keepdim=True).sign()).abs().mean()))
        loss = (u - (v - (t - r) * du_dt).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return distances[0], distances[1]


if __name__ == "__main__":
    print("distance of one-step samples from the data, and after training:", *main())
