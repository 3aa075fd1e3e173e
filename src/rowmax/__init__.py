"""rowmax: exact attention for PyTorch in pure Python, as fast as the chip allows, and it tells you why."""

from rowmax import reference
from rowmax.api import attention, attention_varlen, merge, prepare
from rowmax.device import Device
from rowmax.errors import ProblemError, Unsupported
from rowmax.mask import Band
from rowmax.plan import Plan, plan
from rowmax.problem import Problem

__version__ = "0.1.0"
__all__ = [
    "Band",
    "Device",
    "Plan",
    "Problem",
    "ProblemError",
    "Unsupported",
    "attention",
    "attention_varlen",
    "merge",
    "plan",
    "prepare",
    "reference",
]
