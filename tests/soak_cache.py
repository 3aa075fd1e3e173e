"""A long random walk of `PagedKVCache`: append, fork, truncate, free and attend, on the CPU.

    python tests/soak_cache.py                 20,000 steps, a minute

The steps are the rules of the state machine in `test_cache.py`, every one followed by its invariants; at the end of each
stretch all sequences are freed and memory is looked at. `test_cache.py` runs a short one.
"""

import argparse
import functools
import gc
import random
import sys
import time
import tracemalloc
from pathlib import Path
from typing import NamedTuple

import torch

from rowmax.cpu import blocks

STRETCHES = 20


class Memory(NamedTuple):
    """Of an empty cache, all else being freed."""

    python: int  # bytes
    tensors: int


def walk(machine, steps: int, seed: int = 0, stretches: int = STRETCHES) -> list[Memory]:
    """Memory after each of the stretches."""
    rnd, seen = random.Random(seed), []
    tracemalloc.start()
    try:
        for stretch in range(stretches):
            for _ in range(steps // stretches):
                _step(machine, rnd)
                machine.promises()
            for sequence in list(machine.model):
                machine.free(sequence)
            machine.promises()
            assert machine.cache.free_pages == len(machine.cache._users), f"stretch {stretch}: pages are missing"
            _forget_shapes()
            gc.collect()
            tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
            seen.append(Memory(tracemalloc.get_traced_memory()[0], tensors))
    finally:
        tracemalloc.stop()
    return seen


def growth(seen: list[Memory]) -> Memory:
    """Of the last half over the quarter before: what is made once has been made by then."""
    half = len(seen) // 2
    before, after = seen[half // 2 : half], seen[half:]
    most = [[max(getattr(memory, field) for memory in part) for field in Memory._fields] for part in (before, after)]
    return Memory(*(late - early for early, late in zip(*most, strict=True)))


def _forget_shapes() -> None:
    """rowmax keeps what it worked out for the shapes of calls, so much and no more."""
    for thing in gc.get_objects():
        if type(thing) is functools._lru_cache_wrapper and (thing.__module__ or "").startswith("rowmax"):
            thing.cache_clear()
    vars(blocks._of_thread).clear()


def _step(machine, rnd: random.Random) -> None:
    live = sorted(machine.model)
    kind = rnd.choices(("grow", "add", "fork", "truncate", "free"), (6, 2, 2, 1, 2))[0] if live else "add"
    if kind == "add":
        machine.add()
    elif kind == "grow":
        chosen = rnd.sample(live, rnd.randint(1, min(4, len(live))))
        machine.grow(chosen=chosen, counts=[rnd.randint(0, 7) for _ in range(4)], same=rnd.random() < 0.5)
    elif kind == "truncate":
        machine.truncate(sequence=rnd.choice(live), share=rnd.random())
    else:
        getattr(machine, kind)(sequence=rnd.choice(live))


def main(arguments: "list[str] | None" = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(Path(__file__).parent))
    import test_cache

    torch.set_num_threads(1)
    machine, start = test_cache.Serving(), time.perf_counter()
    seen = walk(machine, options.steps, options.seed)
    more = growth(seen)
    print(
        f"{options.steps} steps, {machine.written} tokens, {time.perf_counter() - start:.0f} s: every invariant held; growth "
        f"in the last half {more.python} bytes and {more.tensors} tensors (of {seen[-1].python} and {seen[-1].tensors})"
    )
    return int(more.tensors > 0 or more.python > max(options.steps, 4096))  # a byte for each step


if __name__ == "__main__":
    sys.exit(main())
