"""`ROWMAX_LOG=plan`: every plan as it is made, once for each problem and direction, and why others were passed over.

One line on stderr, for whoever wonders what runs:

    rowmax: 'b1 h8 q4096 k4096 d128 bf16 causal' forward on NVIDIA H200: hopper[...]: <reason>; not aten: <reason>; ...

The variable is read at the first plan. Called by `rowmax.plan`.
"""

import os
import sys
import warnings
from functools import lru_cache

VARIABLE = "ROWMAX_LOG"
WORDS = ("plan",)


@lru_cache(maxsize=1)
def wanted() -> bool:
    """Is it set to "plan"? Any other word is a mistake, of which a warning tells."""
    word = os.environ.get(VARIABLE, "").strip()
    if word and word not in WORDS:
        warnings.warn(f"{VARIABLE}={word} is not known; known is {', '.join(WORDS)}", RuntimeWarning, stacklevel=2)
    return word == "plan"


def told(problem, device, direction: str, plan):
    """The plan, after it was printed if somebody wants that."""
    if wanted():
        others = "".join(f"; not {name}: {reason}" for name, reason in plan.refusals)
        print(f"rowmax: '{problem}' {direction} on {device.name}: {plan}: {plan.reason}{others}", file=sys.stderr, flush=True)
    return plan
