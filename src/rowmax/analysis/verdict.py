"""What holds a call back, by one rule for the model's shares (`predict.py`) and a profiler's (`benchmarks/counters.py`).

    launch        share of the call's time between two events that an empty call of as many kernels takes
    of the longest kernel's time:
    HBM           in which memory moves bytes, at the bandwidth that a copy reaches
    tensor        in which the tensor cores are busy
    non-matmul    in which the units of the exponentials are busy
    parallelism   in which multiprocessors have no block, of all of them

If half of the time goes to launching, that is the verdict. Otherwise the unit that is busy longest, or idleness, if it is half
of the time at least. If nothing is, no unit is the limit: blocks wait, between products, for each other and for memory to
answer; that too is `non-matmul`.
"""

VERDICTS = ("HBM", "parallelism", "non-matmul", "tensor", "launch")
UNITS = ("HBM", "parallelism", "non-matmul", "tensor")
HALF, NEAR = 0.5, 0.05
COLD_S = 0.8e-6  # that any kernel takes longer under ncu, which empties all caches before it, those of instructions too
EMPTY_S = 1.7e-6  # that a kernel without work takes under ncu, while no multiprocessor has a block; a part of launching


def verdict_of(shares: dict[str, float]) -> str:
    """Of shares by verdict."""
    if shares["launch"] >= HALF:
        return "launch"
    most = max(UNITS, key=lambda name: shares[name])
    return most if shares[most] >= HALF else "non-matmul"


def nearly(shares: dict[str, float]) -> set[str]:
    """The verdict, and those that it would be if shares were `NEAR` larger or smaller."""
    found = {"launch"} if shares["launch"] >= HALF - NEAR else set()
    if shares["launch"] < HALF + NEAR:
        most = max(shares[name] for name in UNITS)
        found |= {name for name in UNITS if shares[name] >= max(most, HALF) - NEAR}
        found |= {"non-matmul"} if most < HALF + NEAR else set()
    return found
