"""rowmax: exact attention for PyTorch in pure Python, as fast as the chip allows, and it tells you why."""

from rowmax import reference
from rowmax.api import attention, attention_varlen, merge, prepare
from rowmax.cache import CacheFull, PagedKVCache
from rowmax.device import Device
from rowmax.errors import ProblemError, Unsupported
from rowmax.explain import explain
from rowmax.integrations.sdpa import sdpa
from rowmax.mask import Band
from rowmax.paged import PagedProblem, rotate
from rowmax.plan import Plan, plan
from rowmax.problem import Problem
from rowmax.score_mod import ScoreMod
from rowmax.serving import append_kv, attention_paged, attention_shared, prepare_paged

__version__ = "0.1.0"
__all__ = [
    "Band",
    "CacheFull",
    "Device",
    "PagedKVCache",
    "PagedProblem",
    "Plan",
    "Problem",
    "ProblemError",
    "ScoreMod",
    "Unsupported",
    "append_kv",
    "attention",
    "attention_paged",
    "attention_shared",
    "attention_varlen",
    "explain",
    "merge",
    "plan",
    "prepare",
    "prepare_paged",
    "reference",
    "rotate",
    "sdpa",
]
