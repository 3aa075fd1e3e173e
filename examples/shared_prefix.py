"""Many answers to one long prompt: attend to its pages once for all of them, to each one's own pages, then merge. Exact.

The plain call reads the prompt's keys and values for every answer; here they are read once, as one sequence whose queries are
those of all answers.
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

    shared = cache.extend([prompt], PROMPT)
    cache.append(shared, tokens(1, PROMPT), tokens(1, PROMPT))
    answers = [cache.add() for _ in range(ANSWERS)]
    own = cache.extend(answers, OWN)
    new_k, new_v = tokens(ANSWERS, OWN), tokens(ANSWERS, OWN)
    cache.append(own, new_k, new_v)

    q = torch.randn(ANSWERS, 1, 4 * HEADS, DIM)  # the last token of each answer
    of_prompt, lse = cache.attend(
        shared, q.transpose(0, 1), causal=False, return_lse=True
    )  # [1, ANSWERS, H, D], [1, H, ANSWERS]
    first = of_prompt.transpose(0, 1), lse.permute(2, 1, 0)
    second = cache.attend(own, q, return_lse=True)
    outs, lses = zip(first, second, strict=True)
    out, _ = rowmax.merge(outs, lses)

    # The same the plain way: every answer a fork of the prompt, which shares its pages but is attended to on its own.
    forks = [cache.fork(prompt) for _ in range(ANSWERS)]
    whole = cache.extend(forks, OWN)
    cache.append(whole, new_k, new_v)
    error = (out - cache.attend(whole, q)).abs().max().item()
    read = PROMPT + ANSWERS * OWN, ANSWERS * (PROMPT + OWN)
    print(f"{read[0]} keys read where the plain call reads {read[1]}; largest difference {error:.1e}")
    return error


if __name__ == "__main__":
    main()
