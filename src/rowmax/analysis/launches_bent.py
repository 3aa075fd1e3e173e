"""What comes to a forward's work where scores are bent, or hidden by what a call gives: soft-cap, ALiBi, dropout, bias and
mask; and in words what is not counted.

`launches.launches` counts a plain call and asks for this behind it. Operations are those of the code, but for those in whose
time the rows of `benchmarks/results/scores` were measured, one row each: on Hopper few of them hide behind products. Dropout's
is of d128; of d64 it says 1.89 times a plain call where 1.73 was measured, of d256, causal, 1.19 where it was 1.39.
"""

from typing import Optional

from rowmax.analysis.cost import pairs_of
from rowmax.analysis.launches import Launch, _element
from rowmax.paged import PagedProblem
from rowmax.problem import Problem

# fp32 operations for each score.
HOPPER_CAP, HOPPER_ALIBI = 20.6, 8.3  # 1.57 and 1.19 times a plain call
CAP, ALIBI = 16.0, 4.0  # `tile_ops.soft_cap` has besides an exponential and a reciprocal, which is as slow
# Seven rounds of Philox for eight scores, and what is kept: 2.08 and 1.54 times a plain call. Of the 4.4 instructions on Hopper
# 1.3 multiply 32 bits by 32.
DROPOUT, HOPPER_DROPOUT = 26.1, 20.8
GIVEN = 6.0  # of a bias and of a mask: where it lies, whether it is there, adding or choosing


def bent(problem: Problem, launch: Launch, ops: float) -> Launch:
    """A kernel of a forward that has so many operations for each score."""
    turn = launch.turn
    if problem.plain or launch.joins or not turn.tensor_flops or not turn.score_ops:
        return launch
    scores, exps, hopper = turn.score_ops / ops, turn.exps, launch.persistent
    more = 0.0
    if problem.softcap:
        more += HOPPER_CAP if hopper else CAP
        exps += 0.0 if hopper else 2.0 * scores
    if problem.alibi:
        more += HOPPER_ALIBI if hopper else ALIBI
    more += (HOPPER_DROPOUT if hopper else DROPOUT) * bool(problem.dropout)
    more += GIVEN * (bool(problem.bias) + bool(problem.mask))
    each, size = _given_bytes(problem)
    turn = turn._replace(score_ops=turn.score_ops + more * scores, exps=exps)
    turn = turn._replace(waited_bytes=turn.waited_bytes + (0.0 if hopper else each * scores))
    return launch._replace(
        turn=turn, hbm_bytes=launch.hbm_bytes + size, l2_bytes=launch.l2_bytes + each * scores * launch.turns
    )


def _given_bytes(problem: Problem) -> tuple[float, float]:
    """`(bytes for each score, bytes of what is read)` of a bias and a mask with queries and keys of their own; what is
    broadcast over either is small."""
    sizes = {"b": problem.batch, "h": problem.heads_q}
    all_pairs = max(problem.batch * problem.heads_q * problem.len_q * problem.len_k, 1)
    each = size = 0.0
    bias, _, wide = problem.bias.partition(",")
    for letters, width in ((bias, 4.0 if wide else float(_element(problem))), (problem.mask, 1.0)):
        if "q" in letters and "k" in letters:
            copies = 1
            for letter, number in sizes.items():
                copies *= number if letter in letters else 1
            each += width
            size += width * copies * problem.len_q * problem.len_k * pairs_of(problem) / all_pairs
    return each, size


def uncounted(problem: Problem, algorithm: Optional[str]) -> Optional[str]:
    """What a prediction leaves out, in words."""
    if problem.plain or algorithm is None:
        return None
    found = []
    if algorithm in ("aten", "tiled", "gathered"):
        found.append("what bends or hides scores, on a CPU")
    else:
        found += ["what score_mod computes"] * bool(problem.score_mod)
        if problem.pairs and algorithm == "q_outer":
            found.append("of a bias or a mask more than its bytes and operations: one took three times as long")
        found += ["what bends or hides scores, in the backward"] * (not isinstance(problem, PagedProblem))
    return "; ".join(found) or None
