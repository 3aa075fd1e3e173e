"""A score function of your own: the farther a key, the lower its score, by the logarithm of the distance, each head at its own
rate. As a pair of Triton functions it runs on a GPU without a bias of N x N numbers; its twin in torch serves the CPU."""

import torch
import triton
import triton.language as tl

import rowmax


@triton.jit
def nearer(score, batch, head, row, col, rate):
    return score - rate * tl.log2(1.0 + tl.abs(row - col).to(tl.float32))


@triton.jit
def nearer_slope(score, batch, head, row, col, rate):
    return 1.0  # the derivative by the score


def nearer_in_torch(score, batch, head, row, col, rate):
    return score - rate * torch.log2(1 + (row - col).abs().to(score.dtype))


NEARER = rowmax.ScoreMod(nearer, nearer_slope, name="nearer", reference=nearer_in_torch)


def main() -> float:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(2, 100, heads, 64, device=device, requires_grad=True) for heads in (8, 2, 2))
    rates = torch.linspace(0.1, 1.0, 8, device=device)  # one for each query head

    out = rowmax.attention(q, k, v, causal=True, score_mod=NEARER(rates))
    grads = torch.autograd.grad(out.sin().sum(), (q, k, v))

    place = torch.arange(100, device=device)  # the same as a bias in memory
    bias = -rates[:, None, None] * torch.log2(1 + (place[:, None] - place).abs())
    want = rowmax.attention(q, k, v, causal=True, bias=bias[None])
    wanted = torch.autograd.grad(want.sin().sum(), (q, k, v))
    error = max((a - b).abs().max().item() for a, b in zip((out, *grads), (want, *wanted), strict=True))
    print(f"as a function and as a bias: largest difference of outputs and gradients {error:.1e}")
    return error


if __name__ == "__main__":
    main()
