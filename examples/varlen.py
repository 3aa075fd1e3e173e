"""Sequences of different lengths packed one after another: one call, equal to a loop over the sequences."""

import torch

import rowmax


def main() -> float:
    torch.manual_seed(0)
    lengths = [5, 130, 1, 64]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)  # sequence b: rows cu[b] to cu[b + 1]
    q = torch.randn(sum(lengths), 8, 64)
    k, v = (torch.randn(sum(lengths), 2, 64) for _ in "kv")  # 4 query heads share each KV head

    out = rowmax.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True)

    looped = [
        rowmax.attention(*(tensor[None, start:end] for tensor in (q, k, v)), causal=True)[0]
        for start, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)
    ]
    error = (out - torch.cat(looped)).abs().max().item()
    print(f"{len(lengths)} sequences, {sum(lengths)} tokens, no padding; largest difference from a loop: {error:.1e}")
    return error


if __name__ == "__main__":
    main()
