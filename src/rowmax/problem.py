"""One attention call, described without its tensors.

    O[i] = sum_j softmax_j(scale * q[i].k[j]) v[j]   over the keys j that query i sees (`mask.Band`)

A `Problem` is frozen, hashable, validated once and has one spelling, `b2 h32/8 q4096 k4096 d128 bf16 causal`, which is
the argument at the shell, the test id, the benchmark row and the log line. `Operands` are the tensors of the same call.
All validation of public calls is in this file and, of what bends scores, in `scores`.
"""

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, NamedTuple, Optional

import torch

from rowmax.errors import ProblemError
from rowmax.mask import AnyBand, Band, Pattern, pattern
from rowmax.score_mod import KEY
from rowmax.scores import GIVEN_FOR, check_numbers, check_scores, check_seed, given_for

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MIN_DIM, MAX_DIM = 1, 256
MAX_SCALE = 1e38  # times log2(e) it is still a finite fp32 number
MAX_SOFTCAP = 1e30  # a score over it is still a normal fp32 number
_SIZES = ("batch", "heads_q", "heads_k", "len_q", "len_k", "dim_qk", "dim_v")
ALIBI = {"": "", "head": "alibi", "batch": "alibi(batch)"}  # slopes of what -> its spelling


class Operands(NamedTuple):
    """The tensors of one call. Dense: q `[B, T, H, D]`. Packed: q `[T, H, D]` and `cu_seqlens` int32/int64 `[B + 1]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: Optional[torch.Tensor] = None
    cu_seqlens_k: Optional[torch.Tensor] = None
    slopes: Optional[torch.Tensor] = None  # of ALiBi, `[H]` or `[B, H]`, in the LSE's type
    sink: Optional[torch.Tensor] = None  # one logit a query head, `[H]`, in the LSE's type
    bias: Optional[torch.Tensor] = None  # added to scores, `[B|1, H|1, Q|1, K|1]`, fp32 or q's type
    mask: Optional[torch.Tensor] = None  # bool of such a shape: False hides a key from a query
    seed: Optional[torch.Tensor] = None  # of dropout, int64 `[1]`
    numbers: Optional[torch.Tensor] = None  # of a score_mod, `[how many, H]`, in the LSE's type


def aligned(*tensors: Optional[torch.Tensor]) -> bool:
    """Do all rows start at multiples of 16 bytes, and is no tensor broadcast? `None` counts as aligned."""
    for tensor in tensors:
        if tensor is None:
            continue
        size = tensor.element_size()
        if tensor.data_ptr() % 16 or any(stride * size % 16 or stride == 0 for stride in tensor.stride()[:-1]):
            return False
    return True


def aligned_pairs(*tensors: Optional[torch.Tensor]) -> bool:
    """Do the rows of a bias and a mask start at multiples of 16 bytes, their keys side by side? What is shared may be."""
    for tensor in tensors:
        if tensor is None:
            continue
        *outer, step = zip(tensor.shape, tensor.stride(), strict=True)
        apart = [stride * tensor.element_size() for size, stride in outer if size > 1]
        if tensor.data_ptr() % 16 or any(stride % 16 for stride in apart) or step[1] != 1:
            return False
    return True


@dataclass(frozen=True)
class Problem:
    """What is known of an attention call without reading its tensors.

    Attributes:
        batch: sequences; for a packed problem, `len(cu_seqlens) - 1`.
        heads_q, heads_k: query heads and key/value heads; `heads_q` is a multiple of `heads_k`, and consecutive query
            heads share one KV head.
        len_q, len_k: tokens a sequence; for a packed problem, tokens of all sequences together.
        dim_qk, dim_v: head dimension of q and k, and of v and the output (1 to 256).
        dtype: of q, k, v and the output.
        band: what each query sees; a `mask.Pattern` where a window does not say it.
        scale: factor on the scores before the softmax; any finite number.
        packed: sequences of different lengths stored one after another.
        max_len_q, max_len_k: hints for the plan of a packed problem. A wrong hint costs time, never correctness.
        deterministic: the backward must be bitwise repeatable.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is none.
        alibi: a bias of `-slope * |i + shift - j|`, with slopes for each "head" or for each head of each "batch"; "" is none.
        sink: every head has one more logit, in the denominator and the LSE, that no value belongs to.
        bias: what an added bias is given for, letters of "bhqk" (batch, query head, query, key); the others are broadcast. "1"
            is one number, "" is none; with ",fp32" behind where it is fp32 and q is not.
        mask: the same of a boolean mask.
        dropout: probability with which a weight is dropped, to the next 2^-15; those kept are multiplied by `drop_factor`.
        score_mod: the key of a `ScoreMod`, which bends scores behind the soft-cap; "" is none.
    """

    batch: int
    heads_q: int
    heads_k: int
    len_q: int
    len_k: int
    dim_qk: int
    dim_v: int
    dtype: torch.dtype
    band: AnyBand = Band()
    scale: float = math.nan  # replaced by 1/sqrt(dim_qk)
    packed: bool = False
    max_len_q: Optional[int] = None
    max_len_k: Optional[int] = None
    deterministic: bool = False
    softcap: float = 0.0
    alibi: str = ""
    sink: bool = False
    bias: str = ""
    mask: str = ""
    dropout: float = 0.0
    score_mod: str = ""

    max_dim: ClassVar[int] = MAX_DIM
    more_words: ClassVar[tuple] = ()  # of the spelling of a kind of problem, in the form of `_WORDS`

    def __post_init__(self):
        for name in _SIZES:
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)) or (type(size) is int and size < 0):
                raise ProblemError(f"{name} must be an integer, at least 0; got {size!r}.")
        if isinstance(self.scale, bool) or not isinstance(self.scale, (int, float, torch.SymFloat)):
            raise ProblemError(f"scale must be a number; got {self.scale!r}.")
        if self.scale != self.scale and self.dim_qk > 0:
            object.__setattr__(self, "scale", self.dim_qk**-0.5)
        if len(self.band) > 2:
            for name, value, least in zip(self.band._fields[2:], self.band[2:], (0, 0, 1), strict=True):
                if value is not None and value < least:
                    raise ProblemError(f"{name} must be at least {least}, or None for none; got {value}.")
            object.__setattr__(self, "band", pattern(*self.band))
        if self.heads_k < 1 or self.heads_q % self.heads_k:
            raise ProblemError(
                f"heads_q must be a multiple of heads_k, at least 1; got heads_q={self.heads_q}, heads_k={self.heads_k} "
                f"in '{self}'. Each KV head serves heads_q / heads_k consecutive query heads."
            )
        for name, dim in (("dim_qk", self.dim_qk), ("dim_v", self.dim_v)):
            if not MIN_DIM <= dim <= self.max_dim:
                raise ProblemError(f"{name} must be in {MIN_DIM}..{self.max_dim}; got {dim} with heads_q={self.heads_q}.")
        if not abs(self.scale) <= MAX_SCALE:
            raise ProblemError(f"scale must be a finite number, at most {MAX_SCALE:g} in size; got {self.scale}.")
        if not 0 <= self.softcap <= MAX_SOFTCAP:
            raise ProblemError(
                f"softcap must be a positive number, at most {MAX_SOFTCAP:g}, or 0 for none; got {self.softcap}."
            )
        if self.alibi not in ALIBI:
            raise ProblemError(f"alibi must be one of {', '.join(map(repr, ALIBI))}; got {self.alibi!r}.")
        for name, letters in (("bias", self.bias.removesuffix(",fp32")), ("mask", self.mask)):
            if letters not in GIVEN_FOR:
                raise ProblemError(f"{name} must be '1' or some of the letters 'bhqk', in this order; got {letters!r}.")
            if letters and self.packed:
                raise ProblemError(f"a {name} belongs to dense tensors [B, T, H, D]; got packed ones in '{self}'.")
        if not 0 <= self.dropout < 1:
            raise ProblemError(f"dropout_p must be at least 0 and below 1; got {self.dropout}.")
        if self.score_mod and not re.fullmatch(KEY, self.score_mod):
            raise ProblemError(f"score_mod must be the key of a rowmax.ScoreMod, its name; got {self.score_mod!r}.")
        if self.dtype not in DTYPE_NAMES:
            raise ProblemError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype}.")

    def __hash__(self) -> int:  # computed once: caches look a problem up several times a call
        known = self.__dict__.get("_hash")
        if known is None:
            known = hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))
            object.__setattr__(self, "_hash", known)
        return known

    def __getstate__(self) -> dict:  # hashes of dtypes differ between processes
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads_q // self.heads_k

    @property
    def plain(self) -> bool:
        """Nothing happens to scores but the scale, the band and the softmax."""
        return not (self.softcap or self.alibi or self.sink or self.pairs or self.dropout or self.score_mod)

    @property
    def windowed(self) -> bool:
        """A query sees one window around itself: there are no sink tokens, no prefix and no chunks."""
        return len(self.band) == 2

    @property
    def pairs(self) -> bool:
        """Something is read for every pair of a query and a key."""
        return bool(self.bias or self.mask)

    @property
    def drop_below(self) -> int:
        """A weight is dropped where its draw of 15 bits is below this: not never or always, where it may be dropped at all."""
        return min(max(round(self.dropout * 2**15), 1), 2**15 - 1) if self.dropout else 0

    @property
    def drop_factor(self) -> float:
        """Of weights that are kept: one over how often they are, so that the expected output is that without dropout."""
        return 2**15 / (2**15 - self.drop_below)

    @property
    def dtype_name(self) -> str:
        return DTYPE_NAMES[self.dtype]

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def outputs(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the output and of the log-sum-exp; both are contiguous."""
        if self.packed:
            return (self.len_q, self.heads_q, self.dim_v), (self.heads_q, self.len_q)
        return (self.batch, self.len_q, self.heads_q, self.dim_v), (self.batch, self.heads_q, self.len_q)

    def __str__(self) -> str:
        heads = f"h{self.heads_q}" + (f"/{self.heads_k}" if self.heads_k != self.heads_q else "")
        dims = f"d{self.dim_qk}" + (f"/{self.dim_v}" if self.dim_v != self.dim_qk else "")
        words = [f"b{self.batch}", heads, f"q{self.len_q}", f"k{self.len_k}", dims]
        words.append(DTYPE_NAMES.get(self.dtype, str(self.dtype)))
        if self.band[:2] == (None, 0):
            words.append("causal")
        elif self.band[:2] != (None, None):
            left, right = ("inf" if side is None else side for side in self.band[:2])
            words.append(f"window({left},{right})")
        words += [f"{name}={n}" for name, n in zip(self.band._fields[2:], self.band[2:], strict=True) if n is not None]
        if self.packed:
            words.append("packed")
        if self.max_len_q is not None:
            words.append(f"maxq{self.max_len_q}")
        if self.max_len_k is not None:
            words.append(f"maxk{self.max_len_k}")
        if self.scale != self.dim_qk**-0.5:
            words.append(f"scale={self.scale!r}")
        if self.softcap:
            words.append(f"softcap={self.softcap!r}")
        if self.alibi:
            words.append(ALIBI[self.alibi])
        if self.sink:
            words.append("sink")
        words += [f"{name}({letters})" for name, letters in (("bias", self.bias), ("mask", self.mask)) if letters]
        if self.dropout:
            words.append(f"dropout={self.dropout!r}")
        if self.score_mod:
            words.append(f"mod({self.score_mod})")
        if self.deterministic:
            words.append("deterministic")
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> "Problem":
        """The problem spelled by `text`; the inverse of `str`. Words may come in any order; `k` defaults to `q`.

        Raises:
            ProblemError: a word that is not part of the spelling, or a missing one.
        """
        if not isinstance(text, str):
            raise ProblemError(f"a problem is spelled in text, {_EXAMPLE}; got {type(text).__name__}.")
        found: dict = {}
        more: dict = {}
        for word in text.split():
            if match := re.fullmatch(r"(sink_tokens|prefix|chunk)=(\d{1,18})", word):
                if match[1] in more:
                    raise ProblemError(f"'{word}' gives {match[1]} a second time in '{text}'.")
                more[match[1]] = int(match[2])
                continue
            for form, read in (*_WORDS, *cls.more_words):
                if match := re.fullmatch(form, word):
                    for name, value in read(match).items():
                        other = found.get(name)
                        if isinstance(value, Band) and isinstance(other, Band) and Band(None, 0) in (value, other):
                            value = Band(other.left if value.left is None else value.left, 0)
                        elif name in found:
                            raise ProblemError(f"'{word}' gives {name} a second time in '{text}'.")
                        found[name] = value
                    break
            else:
                raise ProblemError(
                    f"'{word}' is not part of a problem's spelling in '{text}'. An example with every word: " + _EXAMPLE
                )
        for name, default in (("batch", 1), ("len_k", found.get("len_q")), ("heads_k", found.get("heads_q"))):
            if found.get(name) is None:
                found[name] = default
        if found.get("dim_v") is None:
            found["dim_v"] = found.get("dim_qk")
        missing = [word for word, name in _REQUIRED.items() if found.get(name) is None]
        if missing:
            raise ProblemError(f"'{text}' lacks {', '.join(missing)}. An example with every word: {_EXAMPLE}")
        if more:
            found["band"] = Pattern(*found.get("band", Band()), **more)
        return cls(**found)

    def with_(self, **changes) -> "Problem":
        """A copy with some fields changed; the default scale follows `dim_qk`."""
        if "dim_qk" in changes and "scale" not in changes and self.scale == self.dim_qk**-0.5:
            changes["scale"] = math.nan
        return replace(self, **changes)

    @classmethod
    def describe(
        cls,
        operands: Operands,
        *,
        left: Optional[int] = None,
        right: Optional[int] = None,
        scale: Optional[float] = None,
        max_len_q: Optional[int] = None,
        max_len_k: Optional[int] = None,
        deterministic: bool = False,
        softcap: float = 0.0,
        dropout: float = 0.0,
        score_mod: str = "",
        sink_tokens: Optional[int] = None,
        prefix: Optional[int] = None,
        chunk: Optional[int] = None,
    ) -> "Problem":
        """Validate tensors and arguments and name every dimension. Keeps no tensor and reads no device memory.

        Raises:
            ProblemError: says what arrived, what is required and the fix.
        """
        q, k, v, cu_seqlens_q = operands[:4]
        if cu_seqlens_q is not None or operands.cu_seqlens_k is not None:
            _check_tensors(q, k, v, rank=3)
            _check_cu_seqlens(operands)
        else:
            _check_tensors(q, k, v, rank=4)
        batch = None if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        alibi = "" if operands.slopes is None else "head" if operands.slopes.dim() == 1 else "batch"
        numbers = (left, right, scale, max_len_q, max_len_k, deterministic, softcap, alibi, operands.sink is not None)
        call: tuple = (cls, q.shape, k.shape, v.shape, batch, q.dtype, *numbers)
        if alibi or operands.sink is not None:
            check_scores(operands, q.shape[0] if batch is None else batch)
        if operands.bias is not None or operands.mask is not None:
            call = (*call, *(given_for(name, operands, batch is not None) for name in ("bias", "mask")), dropout)
        elif dropout or score_mod:
            call = (*call, "", "", dropout)
        if score_mod or operands.numbers is not None:
            check_numbers(operands, score_mod)
            call = (*call, score_mod)
        if dropout or operands.seed is not None:
            check_seed(operands, dropout)
        more = {} if sink_tokens is prefix is chunk is None else {"more": (sink_tokens, prefix, chunk)}
        try:
            return _describe(*call, **more)  # type: ignore[arg-type]
        except TypeError:  # symbolic sizes cannot be hashed
            return _describe.__wrapped__(*call, **more)


_EXAMPLE = (
    "'b2 h32/8 q4096 k4096 d192/128 bf16 window(1024,0) sink_tokens=4 prefix=64 chunk=8192 packed maxq512 maxk512 scale=0.1 "
    "softcap=30.0 alibi sink dropout=0.1 deterministic', if not packed also 'bias(hqk) mask(bk)', with a rowmax.ScoreMod "
    "'mod(its_name)'"
)
_REQUIRED = {"h<heads>": "heads_q", "q<len>": "len_q", "d<dim>": "dim_qk", "<dtype>": "dtype"}


def _side(text: str) -> Optional[int]:
    return None if text == "inf" else int(text)


def _optional_int(text: Optional[str]) -> Optional[int]:
    return None if text is None else int(text)


_WORDS = (
    (r"b(\d+)", lambda m: {"batch": int(m[1])}),
    (r"h(\d+)(?:/(\d+))?", lambda m: {"heads_q": int(m[1]), "heads_k": _optional_int(m[2])}),
    (r"q(\d+)", lambda m: {"len_q": int(m[1])}),
    (r"k(\d+)", lambda m: {"len_k": int(m[1])}),
    (r"d(\d+)(?:/(\d+))?", lambda m: {"dim_qk": int(m[1]), "dim_v": _optional_int(m[2])}),
    ("|".join(DTYPES), lambda m: {"dtype": DTYPES[m[0]]}),
    (r"causal", lambda m: {"band": Band(None, 0)}),
    (r"window\((\d+|inf),(\d+|inf)\)", lambda m: {"band": Band(_side(m[1]), _side(m[2]))}),
    (r"packed", lambda m: {"packed": True}),
    (r"maxq(\d+)", lambda m: {"max_len_q": int(m[1])}),
    (r"maxk(\d+)", lambda m: {"max_len_k": int(m[1])}),
    (r"scale=([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", lambda m: {"scale": float(m[1])}),
    (r"softcap=(\d+\.?\d*(?:e[-+]?\d+)?)", lambda m: {"softcap": float(m[1])}),
    (r"alibi", lambda m: {"alibi": "head"}),
    (r"alibi\(batch\)", lambda m: {"alibi": "batch"}),
    (r"sink", lambda m: {"sink": True}),
    (r"bias\((1|[bhqk]+)(,fp32)?\)", lambda m: {"bias": m[1] + (m[2] or "")}),
    (r"dropout=(\d*\.?\d+(?:e[-+]?\d+)?)", lambda m: {"dropout": float(m[1])}),
    (r"mask\((1|[bhqk]+)\)", lambda m: {"mask": m[1]}),
    (rf"mod\(({KEY})\)", lambda m: {"score_mod": m[1]}),
    (r"deterministic", lambda m: {"deterministic": True}),
)


@lru_cache(maxsize=4096)
def _describe(
    cls, q_shape, k_shape, v_shape, batch, dtype, left, right, scale, max_len_q, max_len_k, deterministic, softcap, alibi, sink,
    bias="", mask="", dropout=0.0, score_mod="", more=(),
) -> Problem:  # fmt: skip
    """The part of `describe` that depends on shapes and numbers only, so that repeated calls are a dictionary lookup."""
    packed = batch is not None
    if packed:
        (len_q, heads_q, dim_qk), (len_k, heads_k, _), dim_v = q_shape, k_shape, v_shape[2]
    else:
        (batch, len_q, heads_q, dim_qk), (_, len_k, heads_k, _), dim_v = q_shape, k_shape, v_shape[3]
    shapes = f"q {list(q_shape)}, k {list(k_shape)}, v {list(v_shape)}"
    layout = "[T, H, D]" if packed else "[B, T, H, D]"
    if not packed and q_shape[0] != k_shape[0]:
        raise ProblemError(f"q and k must have the same batch; got {shapes} (layout {layout}).")
    if k_shape[:-1] != v_shape[:-1]:
        raise ProblemError(f"k and v must agree in all but the last dimension; got {shapes} (layout {layout}).")
    if q_shape[-1] != k_shape[-1]:
        raise ProblemError(
            f"q and k must have the same head dimension; got {q_shape[-1]} and {k_shape[-1]} in {shapes} (layout {layout})."
        )
    if heads_k == 0 or heads_q % heads_k or _looks_transposed(q_shape, k_shape, right):
        hint = ""
        if not packed and 0 < k_shape[1] <= k_shape[2] and q_shape[1] % k_shape[1] == 0:  # read so, no fewer keys than heads
            hint = " These look like [B, H, T, D] tensors: pass q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)."
        raise ProblemError(
            f"query heads must be a multiple of KV heads in layout {layout}; got {heads_q} and {heads_k} heads over "
            f"{len_q} queries and {len_k} keys in {shapes}.{hint}"
        )
    for name, value in (("left", left), ("right", right)):
        if negative(value):
            raise ProblemError(
                f"window ({name} side) must be None for no limit or a distance of at least 0; got {value}. "
                "A window of w keys that ends at the query itself is window=(w - 1, 0)."
            )
    if scale is not None and not abs(scale) <= MAX_SCALE:
        raise ProblemError(
            f"scale must be a finite number, at most {MAX_SCALE:g} in size, or None for 1/sqrt(dim_qk); got {scale} with "
            f"{shapes}."
        )
    for name, value in (("max_seqlen_q", max_len_q), ("max_seqlen_k", max_len_k)):
        if negative(value):
            raise ProblemError(f"{name} must be at least 0; got {value}.")
    return cls(
        batch,
        heads_q,
        heads_k,
        len_q,
        len_k,
        dim_qk,
        dim_v,
        dtype,
        Pattern(left, right, *more) if more else Band(left, right),
        math.nan if scale is None else float(scale),
        packed,
        max_len_q,
        max_len_k,
        deterministic,
        float(softcap),
        alibi,
        sink,
        bias,
        mask,
        float(dropout),
        score_mod,
    )


def negative(value) -> bool:
    """Of an integer or None; not of one that a trace knows nothing about (`.item()` under `torch.compile`)."""
    if value is None or type(value) is int:
        return value is not None and value < 0
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(value < 0)


def _looks_transposed(q_shape, k_shape, right) -> bool:
    """[B, H, T, D] tensors with grouped heads, read as [B, T, H, D]: many equal 'heads', a causal mask, and fewer 'keys'
    than 'queries' by a whole factor, so that most queries would see nothing."""
    if len(q_shape) != 4 or type(right) is not int or right != 0:
        return False
    (_, len_q, heads_q, _), (_, len_k, heads_k, _) = q_shape, k_shape
    return heads_q == heads_k >= 256 > len_q > len_k > 0 and len_q % len_k == 0


_RANK_FIX = {
    (4, 3): " For packed [T, H, D] tensors call attention_varlen with cu_seqlens.",
    (3, 4): " For dense [B, T, H, D] tensors call attention.",
}


def _check_tensors(q, k, v, rank: int) -> None:
    if (
        q.dim() == k.dim() == v.dim() == rank
        and q.dtype == k.dtype == v.dtype
        and q.dtype in DTYPE_NAMES
        and q.device == k.device == v.device
        and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    ):
        return
    layout = "[B, T, H, D]" if rank == 4 else "[T, H, D]"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != rank:
            raise ProblemError(
                f"{name} must have rank {rank}, layout {layout}; got rank {tensor.dim()}, shape {list(tensor.shape)}."
                + _RANK_FIX.get((rank, tensor.dim()), "")
            )
        if tensor.dtype not in DTYPE_NAMES:
            raise ProblemError(
                f"{name} has dtype {tensor.dtype}; required is one of {', '.join(str(d) for d in DTYPE_NAMES)}. "
                "Convert it first, for example q.to(torch.bfloat16)."
            )
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ProblemError(
                f"{name} must have stride 1 in its last dimension; got strides {tensor.stride()} for shape "
                f"{list(tensor.shape)}. Call {name}.contiguous()."
            )
    if not q.dtype == k.dtype == v.dtype:
        raise ProblemError(
            f"q, k and v must have one dtype; got {q.dtype}, {k.dtype}, {v.dtype}. Convert them, or call under torch.autocast."
        )
    if not q.device == k.device == v.device:
        raise ProblemError(
            f"q, k and v must be on one device; got {q.device}, {k.device}, {v.device}. Move them with .to(device)."
        )


def _check_cu_seqlens(operands: Operands) -> None:
    q, k, _, cu_seqlens_q, cu_seqlens_k = operands[:5]
    if cu_seqlens_q is None or cu_seqlens_k is None:
        there, missing = ("cu_seqlens_q", "cu_seqlens_k") if cu_seqlens_k is None else ("cu_seqlens_k", "cu_seqlens_q")
        raise ProblemError(f"{there} came without {missing}; a packed call needs both.")
    for name, cu, tensor in (("cu_seqlens_q", cu_seqlens_q, q), ("cu_seqlens_k", cu_seqlens_k, k)):
        if cu.dtype not in (torch.int32, torch.int64):
            raise ProblemError(f"{name} must be int32 or int64; got {cu.dtype}. Convert it with .to(torch.int32).")
        if cu.dim() != 1 or cu.shape[0] < 1:
            raise ProblemError(
                f"{name} must have shape [B + 1]: the first row of each sequence and, last, one past the end; "
                f"got {list(cu.shape)}."
            )
        if cu.device != q.device:
            raise ProblemError(f"{name} is on {cu.device} and q on {q.device}; move it with .to(q.device).")
        if cu.device.type == "cpu" and not torch.compiler.is_compiling() and type(cu) in (torch.Tensor, torch.nn.Parameter):
            _check_cu_values(name, cu, tensor)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ProblemError(
            f"cu_seqlens_q and cu_seqlens_k must name the same number of sequences; got shapes "
            f"{list(cu_seqlens_q.shape)} and {list(cu_seqlens_k.shape)}."
        )


def _check_cu_values(name: str, cu, tensor) -> None:
    """Only for tensors on the CPU, where reading costs nothing; the kernels clamp instead."""
    values = cu.tolist()
    if values[0] != 0 or any(b < a for a, b in pairwise(values)) or values[-1] > tensor.shape[0]:
        raise ProblemError(
            f"{name} must start at 0, never decrease and end at most at {tensor.shape[0]} (the rows that arrived); "
            f"got {values if len(values) <= 8 else str(values[:4])[:-1] + ', ..., ' + str(values[-1]) + ']'}."
        )
