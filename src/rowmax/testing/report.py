"""The verdict: bounds per storage type, the comparison of one tensor, and what a person reads about it."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

import torch

from rowmax.numerics import LEAST_WEIGHT, TINY, UNIT_ROUNDOFF
from rowmax.problem import Problem

# c, and the coefficient of S A in units of the accumulator's roundoff. 16 bits: P is rounded to the type before P V. fp32 and
# fp64: c covers products and exponential; the worst seen was 4.9 of 16 (fp32, 120 random cases up to 4001 keys). In fp64 the
# oracle may err as much again.
_ELEMENT = {"bf16": (2.0, 4.0), "fp16": (2.0, 4.0), "fp32": (16.0, 16.0), "fp64": (32.0, 32.0)}
# A score is a sum of dim_qk products. Where they have one sign its rounding is 0.33 sqrt(dim_qk) roundoffs of the sum on
# average and 4.5 times that among the thousands of scores of a case: 1.05 times a bound of 4 was seen at dim_qk 128 with logits
# of 10^4.
# It weighs nothing at ordinary logits.
_SUM_OF_PRODUCTS = 1.5
# RMS error over that of the textbook computation, and slack in units of u RMS(A): the gate, and where a person should look.
RMS_OUT, RMS_OUT_WARN = (1.1, 0.02), (1.1, 0.02)
RMS_GRAD, RMS_GRAD_WARN = (1.25, 0.25), (1.1, 0.05)


@dataclass(frozen=True)
class Report:
    """Attributes:
    ratios: error over its bound for each part of the rule; right when all are at most 1; inf where NaNs or infinities differ.
    broken: the parts that fail, in words.
    warnings: gradients whose RMS error passes but deserves a look.
    sampled: some sequences and rows were compared, the rest by sums and by being finite.
    """

    problem: Problem
    ratios: dict[str, float] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    sampled: bool = False

    @property
    def ok(self) -> bool:
        return not self.broken

    @property
    def worst(self) -> float:
        return max(self.ratios.values(), default=0.0)

    def __str__(self) -> str:
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in self.ratios.items())
        rows = " (a sample and sums)" if self.sampled else ""
        head = f"'{self.problem}': {'right' if self.ok else 'WRONG'}{rows}; error over bound: {ratios}"
        return "\n  ".join([head, *self.broken, *(f"warning: {text}" for text in self.warnings)])

    def merged(self, other: "Report") -> "Report":
        """Both reports of one problem as one."""
        ratios = {**self.ratios, **other.ratios}
        sampled = self.sampled or other.sampled
        return Report(self.problem, ratios, self.broken + other.broken, self.warnings + other.warnings, sampled)


class Sums(NamedTuple):
    """A result of one piece, and what bounds its error; those of dk and dv add up over pieces."""

    expected: torch.Tensor
    naive: torch.Tensor
    terms: torch.Tensor  # A
    weighted: torch.Tensor  # the same sum, each term times c u + g S of its row
    floor: torch.Tensor  # the error that the smallest numbers leave, however small the terms are


class Tally:
    """Collects one tensor's comparison piece by piece: worst element, sums of squares, differing non-finite sets."""

    def __init__(self, name: str, problem: Problem, rms: Optional[tuple] = None, warn: Optional[tuple] = None):
        self.name, self.problem, self.rms, self.warn = name, problem, rms, warn
        self.worst, self.where, self.sets, self.seen = 0.0, "", 0, False
        self.squares = torch.zeros(4, dtype=torch.float64)  # error, error of the textbook, A, that of S A
        self.count = 0

    def add_sums(self, where: str, actual: torch.Tensor, sums: Sums) -> None:
        """Compare by element, and remember what the RMS rule needs."""
        bound = sums.weighted + roundoff(self.problem) * sums.expected.abs() + tiny(self.problem) + sums.floor
        error, both = self.add(where, actual, sums.expected, bound)
        drift = sums.weighted - _ELEMENT[self.problem.dtype_name][0] * roundoff(self.problem) * sums.terms
        parts = (error, sums.naive - sums.expected, sums.terms, drift)
        self.squares += torch.stack([torch.where(both, x, 0.0).square().sum() for x in parts]).cpu()
        self.count += error.numel()

    def add(self, where: str, actual, expected, bound) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare by element; returns the errors, and where both are finite."""
        actual = actual.double()
        both = torch.isfinite(expected) & torch.isfinite(actual)
        error = torch.where(both, (actual - expected).abs(), 0.0)
        if actual.numel() == 0:
            return error, both
        self.seen = True
        differ = torch.isfinite(expected) != torch.isfinite(actual)
        if self.rms is None:  # an LSE: -inf means that a row saw nothing. In outputs NaN may stand for an infinity times 0
            differ |= torch.isneginf(expected) != torch.isneginf(actual)
        self.sets += int(differ.sum())
        ratio = torch.nan_to_num(torch.where(both, error / bound, 0.0), nan=math.inf)
        if float(ratio.max()) > self.worst:
            place = [int(x) for x in torch.unravel_index(ratio.argmax().cpu(), ratio.shape)]
            self.worst, self.where = float(ratio.max()), f"{where}, element {place} of them"
        return error, both

    def into(self, report: Report) -> Report:
        """The report with this tensor's verdict added."""
        ratios = {self.name: math.inf if self.sets else self.worst}
        broken, warnings = [], []
        if self.sets:
            broken.append(f"{self.name}: {self.sets} elements are NaN or infinite where the definition is not, or the reverse")
        if self.worst > 1:
            broken.append(f"{self.name}: an element is {self.worst:.2f} times its bound off ({self.where})")
        if self.rms and self.warn and self.count and self.problem.dtype in (torch.float16, torch.bfloat16):
            error, naive, terms, drift = (self.squares / self.count).sqrt().tolist()
            floor = drift + tiny(self.problem)
            gate, look = (a * naive + b * roundoff(self.problem) * terms + floor for a, b in (self.rms, self.warn))
            if math.isfinite(gate):  # a textbook computation that overflows bounds nothing; the element rule remains
                ratios[f"{self.name} rms"] = error / gate
                if error > gate:
                    broken.append(f"{self.name}: RMS error {error:.3g} exceeds {gate:.3g} (textbook {naive:.3g})")
                elif error > look:
                    warnings.append(f"{self.name}: RMS error {error:.3g}, textbook {naive:.3g}")
        return report.merged(Report(self.problem, ratios, tuple(broken), tuple(warnings)))


def roundoff(problem: Problem) -> float:
    return UNIT_ROUNDOFF[problem.dtype_name]


def tiny(problem: Problem) -> float:
    return TINY[problem.dtype_name]


def least_weight(problem: Problem) -> float:
    """Smaller weights may be 0."""
    return LEAST_WEIGHT[problem.dtype_name]


def score_roundoff(problem: Problem) -> float:
    """Error of a score relative to the size S of its terms."""
    unit = 2.0**-53 if problem.dtype == torch.float64 else 2.0**-24
    return max(_ELEMENT[problem.dtype_name][1], _SUM_OF_PRODUCTS * math.sqrt(problem.dim_qk)) * unit


def error_factor(problem: Problem, logits: torch.Tensor) -> torch.Tensor:
    """Relative error that rounding may cause in a weight of a row whose score terms have size `logits`."""
    return _ELEMENT[problem.dtype_name][0] * roundoff(problem) + score_roundoff(problem) * logits
