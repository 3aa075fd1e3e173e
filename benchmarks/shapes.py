"""The problems that are timed, where each comes from, and the work that each stands for.

`run.py`, `sweep.py`, `memory.py` and `host_time.py` take problems from here, or any other by its spelling.

FLOPs follow the published convention, so that rows compare with the papers' tables: the forward is two products over the
scores, `2 pairs (d_qk + d_v)`; the backward five, `2 pairs (3 d_qk + 2 d_v)`, which is 2.5 forwards at `d_qk = d_v`.
`pairs` counts (query, key) pairs of all heads: `q k` for full attention, `q k / 2` for square causal attention (not
`q (q + 1) / 2`), and for everything else (windows, rectangular causal, packed) exactly the visible ones.
"""

import math
import random
from typing import NamedTuple, Optional

from rowmax.mask import Band, visible_pairs
from rowmax.problem import Problem

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"
PASSES = (FORWARD, BACKWARD, BOTH)
CAUSAL = Band(None, 0)


class Shape(NamedTuple):
    """A problem, where it comes from, and whether FlexAttention is timed there by default (each costs a compilation)."""

    problem: Problem
    source: str
    flex: bool = False
    passes: tuple[str, ...] = ()  # if they are not those of the set
    at_most: Optional[float] = None  # times rowmax's forward without what bends scores: what it may cost


class ShapeSet(NamedTuple):
    """Shapes timed together, and the passes they are for unless the caller says otherwise."""

    shapes: tuple[Shape, ...]
    passes: tuple[str, ...] = (FORWARD,)


# ---- work ------------------------------------------------------------------------------------------------------------


def lengths(problem: Problem, side: str = "q") -> list[int]:
    """Tokens of each sequence. Of a packed problem the spelling says only total, count and longest: the rest is drawn, the
    same for every caller, with lengths spread between nothing and the longest."""
    total, longest = (problem.len_q, problem.max_len_q) if side == "q" else (problem.len_k, problem.max_len_k)
    if not problem.packed:
        return [total] * problem.batch
    count = problem.batch
    cap = min(total, total if longest is None else longest)
    if count * cap < total or (count == 0 and total):
        raise ValueError(f"{count} sequences of at most {cap} tokens hold fewer than {total} in '{problem}'; raise max{side}.")
    if count == 0:
        return []
    draw = random.Random(f"{total} {count} {cap}")
    shares = [draw.random() for _ in range(count - 1)]
    rest = total - cap
    sizes = [cap, *(min(cap, int(rest * share / sum(shares))) for share in shares)]
    left = total - sum(sizes)
    for i in range(1, count):  # what rounding and the cap left over
        extra = min(cap - sizes[i], -(-left // (count - i)))
        sizes[i] += extra
        left -= extra
    for i in range(1, count):
        extra = min(cap - sizes[i], left)
        sizes[i] += extra
        left -= extra
    draw.shuffle(sizes)
    return sizes


def pairs(problem: Problem) -> float:
    """(query, key) pairs over all sequences and heads, in the convention above."""
    band, square = problem.band, problem.len_q == problem.len_k
    if not problem.packed and band == CAUSAL and square:
        return problem.batch * problem.heads_q * problem.len_q * problem.len_k / 2
    both = zip(lengths(problem, "q"), lengths(problem, "k"), strict=True)
    return float(problem.heads_q * sum(visible_pairs(q, k, band) for q, k in both))


def flops(problem: Problem, which: str) -> float:
    """Floating-point operations of one pass, in the convention above."""
    forward = 2 * pairs(problem) * (problem.dim_qk + problem.dim_v)
    backward = 2 * pairs(problem) * (3 * problem.dim_qk + 2 * problem.dim_v)
    return {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}[which]


def bytes_moved(problem: Problem, which: str) -> int:
    """The fewest bytes a pass can move: each operand read once and each result written once."""
    rows_q = problem.len_q * problem.heads_q * (1 if problem.packed else problem.batch)
    rows_k = problem.len_k * problem.heads_k * (1 if problem.packed else problem.batch)
    q, out = rows_q * problem.dim_qk * problem.dtype.itemsize, rows_q * problem.dim_v * problem.dtype.itemsize
    kv = rows_k * (problem.dim_qk + problem.dim_v) * problem.dtype.itemsize
    lse = rows_q * problem.lse_dtype.itemsize
    pairs_read = given_bytes(problem)
    forward = q + kv + out + pairs_read
    bias_out = given_bytes(problem) - given_bytes(problem.with_(bias=""))
    backward = 2 * (q + kv + out) + lse + pairs_read + bias_out  # q k v out dout lse and pairs in, dq dk dv dbias out
    return {FORWARD: forward, BACKWARD: backward, BOTH: forward + lse + backward}[which]


def given_bytes(problem: Problem) -> int:
    """Of a bias and a mask, all of them, whatever the band hides."""
    sizes = dict(zip("bhqk", (problem.batch, problem.heads_q, problem.len_q, problem.len_k), strict=True))
    letters, _, wide = problem.bias.partition(",")
    bias = math.prod(sizes[letter] for letter in letters if letter != "1") * (4 if wide else problem.dtype.itemsize)
    mask = math.prod(sizes[letter] for letter in problem.mask if letter != "1")
    return bias * bool(letters) + mask * bool(problem.mask)


def unbent(problem: Problem) -> Problem:
    """The same without anything that happens to scores beside scale and band."""
    return problem.with_(softcap=0.0, alibi="", sink=False, bias="", mask="", dropout=0.0)


# ---- sets ------------------------------------------------------------------------------------------------------------

TOKENS, WIDTH = 16384, 2048  # batch x length and heads x dim of the papers' speed figures
_PAPERS = "speed figures of FlashAttention-2 and -3: 16384 tokens, heads x d = 2048"


# (dim, length) where FlexAttention was measured on an H200; its forward is the floor for rowmax's.
_FLEX = ((64, 2048), (64, 16384), (128, 16384), (256, 16384))


def _papers(dim: int, length: int, causal: bool) -> Shape:
    batch, heads = TOKENS // length, WIDTH // dim
    spelling = f"b{batch} h{heads} q{length} k{length} d{dim} bf16" + (" causal" if causal else "")
    return Shape(Problem.parse(spelling), _PAPERS, flex=(dim, length) in _FLEX)


def _grid(dims_and_lengths) -> tuple[Shape, ...]:
    return tuple(_papers(dim, length, causal) for dim, length in dims_and_lengths for causal in (False, True))


def _spelled(source: str, *spellings: str) -> tuple[Shape, ...]:
    return tuple(Shape(Problem.parse(spelling), source) for spelling in spellings)


_LONG = "b1 h16 q16384 k16384 d128 bf16 causal"


def _bent(more: str, at_most: Optional[float] = None, **changes) -> Shape:
    source = "what Gemma 2, gpt-oss, MPT and T5 do to scores, at the papers' longest; what it may cost is ours to say"
    return Shape(Problem.parse(f"{_LONG} {more}"), source, **{"flex": True, "at_most": at_most, **changes})


_ANCHORS = _grid((dim, length) for dim in (64, 128, 256) for length in (512, 2048, 8192, 16384))
_PLAIN_CPU = tuple(
    f"b1 h8 q2048 k2048 d{dim} {dtype}{mask}" for dtype in ("bf16", "fp32") for dim in (64, 128) for mask in ("", " causal")
)

SETS: dict[str, ShapeSet] = {
    "anchors-forward": ShapeSet(_ANCHORS),
    "anchors-backward": ShapeSet(_ANCHORS, (BACKWARD,)),
    "flex-forward": ShapeSet(_grid(_FLEX)),
    "flex-backward": ShapeSet(_grid(_FLEX), (BACKWARD,)),
    "gqa": ShapeSet(
        _spelled(
            "64 query and 8 KV heads: cuDNN's published table, Llama-3-70B's attention",
            *(f"b1 h64/8 q{n} k{n} d128 bf16{mask}" for n in (2048, 4096, 8192, 16384, 32768) for mask in ("", " causal")),
        )
    ),
    "packed": ShapeSet(
        _spelled(
            "64 sequences of uneven length, as a packed training batch has",
            "b64 h16 q32739 k32739 d128 bf16 causal packed maxq3859 maxk3859",
        )
    ),
    "cpu": ShapeSet(
        _spelled("one layer of a small model on a laptop", *_PLAIN_CPU)
        + _spelled(
            "the same with what torch's operator has only as a dense mask",
            "b1 h8 q2048 k2048 d64 bf16 window(256,0)",
            "b1 h8 q2048 k2048 d64 fp32 window(256,0)",
            "b1 h8/2 q2048 k2048 d64 bf16 causal",
            "b1 h8/2 q2048 k2048 d64 fp32 causal",
            "b8 h8 q2048 k2048 d64 bf16 causal packed maxq512 maxk512",
            "b8 h8 q2048 k2048 d64 fp32 causal packed maxq512 maxk512",
        ),
        (FORWARD, BOTH),
    ),
    "scores": ShapeSet(
        (
            _bent(""),
            _bent("softcap=50.0", 1.15),
            _bent("sink", 1.02),
            _bent("alibi", 1.10),
            _bent("dropout=0.1", 1.25, flex=False, passes=(FORWARD,)),
            _bent("bias(hqk)", 1.2),
        ),
        (FORWARD, BACKWARD),
    ),
    "smoke": ShapeSet(
        _spelled(
            "one small problem per feature: does the benchmark itself work?",
            "b2 h2 q64 k64 d32 bf16",
            "b1 h4/2 q96 k96 d64 bf16 causal",
            "b1 h2 q33 k70 d16/24 fp32 causal",
            "b1 h2 q128 k128 d32 bf16 window(16,0)",
            "b3 h2 q100 k100 d32 fp32 causal packed maxq50 maxk50",
        ),
        PASSES,
    ),
}
AT_MOST = {shape.problem: shape.at_most for group in SETS.values() for shape in group.shapes if shape.at_most}
LONG_CONTEXT = Problem.parse("b1 h16 q65536 k65536 d128 bf16 causal")  # memory.py: dense scores would take 128 GiB
SMALL = tuple(Problem.parse(f"b1 h16 q128 k128 d{dim} bf16") for dim in (64, 128))  # host_time.py: the host is the cost
