"""Keys in two parts (two devices, two caches, a prefix shared by many): attend to each, then merge. The result is exact."""

import torch

import rowmax


def main() -> float:
    torch.manual_seed(0)
    q = torch.randn(2, 100, 4, 64)
    k, v = (torch.randn(2, 300, 4, 64) for _ in "kv")

    first = rowmax.attention(q, k[:, :200], v[:, :200], return_lse=True)  # all of these keys come before every query
    second = rowmax.attention(q, k[:, 200:], v[:, 200:], causal=True, return_lse=True)
    outs, lses = zip(first, second, strict=True)
    out, lse = rowmax.merge(outs, lses)

    whole, whole_lse = rowmax.attention(q, k, v, causal=True, return_lse=True)
    error = (out - whole).abs().max().item()
    print(f"200 + 100 keys merged; largest difference: output {error:.1e}, LSE {(lse - whole_lse).abs().max():.1e}")
    return error


if __name__ == "__main__":
    main()
