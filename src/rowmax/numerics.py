"""Numbers that every path must agree on: log2(e), and the roundoff and least numbers of each storage type."""

LOG2E = 1.4426950408889634  # exp(x) = exp2(x * LOG2E)
LN2 = 0.6931471805599453

# Storage type -> unit roundoff u (half the spacing at 1) and smallest subnormal. Keys are the spellings of `Problem`.
UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24, "fp64": 2.0**-53}
TINY = {"bf16": 2.0**-133, "fp16": 2.0**-24, "fp32": 2.0**-149, "fp64": 2.0**-1074}

# Storage type -> what weights below may be 0: exponentials on a GPU are fp32 and flush what is no normal number of it.
LEAST_WEIGHT = {"bf16": 2.0**-126, "fp16": 2.0**-126, "fp32": 2.0**-126, "fp64": 0.0}
