"""Many answers to one long prompt: its pages are attended to once for all, each one's own pages apart, and merged. Exact.

The plain call reads the prompt's keys and values for every answer.
"""

import torch

import rowmax

PROMPT, OWN, ANSWERS, HEADS, DIM = 200, 24, 6, 2, 32


def main() -> float:
    torch.manual_seed(0)
    cache = rowmax.PagedKVCache(64, page_size=16, heads=HEADS, dim=DIM, dtype=torch.float32)
    prompt = cache.add()

    def tokens(*shape):
        return torch.randn(*shape, HEADS, DIM)

    cache.append(cache.extend([prompt], PROMPT), tokens(1, PROMPT), tokens(1, PROMPT))
    answers = [cache.fork(prompt) for _ in range(ANSWERS)]  # they share its pages until they grow
    step = cache.extend(answers, OWN)
    cache.append(step, tokens(ANSWERS, OWN), tokens(ANSWERS, OWN))
    q = torch.randn(ANSWERS, OWN, 4 * HEADS, DIM)

    pages = cache.shared_pages(answers)
    out = cache.attend_shared(step, q, pages)
    error = (out - cache.attend(step, q)).abs().max().item()

    shared = pages * cache.page_size
    read = shared + ANSWERS * (PROMPT + OWN - shared), ANSWERS * (PROMPT + OWN)
    print(f"{read[0]} keys read where the plain call reads {read[1]}; largest difference {error:.1e}")
    return error


if __name__ == "__main__":
    main()
