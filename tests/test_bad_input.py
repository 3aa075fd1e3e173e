"""Each argument of each public call replaced by what it should not be, one at a time: the call succeeds, or says what is wrong.

Beside `test_errors.py`, which holds what the messages say, and draws at random. Here nothing is drawn: a table of things times
a table of calls. What torch itself refuses, such as to write to a tensor of inference mode, is left to torch.
"""

import contextlib
import inspect
import math

import numpy as np
import pytest
import torch

import rowmax
from rowmax import CacheFull, ProblemError, Unsupported, flash_attn, flash_attn_3

torch.manual_seed(0)
X, P, H = torch.randn(2, 6, 2, 16), torch.randn(6, 2, 16), torch.randn(2, 6, 2, 16).half()
CU = torch.tensor([0, 2, 6], dtype=torch.int32)
LENGTHS, TABLE = torch.tensor([9, 16], dtype=torch.int32), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
PAGES = torch.randn(4, 8, 2, 16)
THINGS = [
    *(None, 3, -3, 0, 2**31, 2**70, -(2**70), 0.5, math.nan, math.inf, True, "x", "", [1, 2], (1, 2), (-1, -1), (math.nan, 0)),
    *((2**70, -(2**70)), (1, 2, 3), {}, {1, 2}, 1j, b"x", object(), int, len, torch.float32, torch.device("cpu"), range(2)),
    *(np.int64(3), np.float32(0.5), np.bool_(True), np.ones(2), np.array(3), torch.tensor(3), torch.tensor([3, 4])),
]


def bent(t: torch.Tensor):
    """Tensors somewhat like this one."""
    yield from (
        torch.tensor(1.0),
        t[None],
        t[:0],
        t[..., :0],
        t.to("meta"),
        torch.ones([n + 1 for n in t.shape], dtype=t.dtype),
    )
    types = (torch.int64, torch.int8, torch.bool, torch.complex64, torch.float64, torch.bfloat16, torch.float8_e4m3fn)
    yield from (t.to(dtype) for dtype in (*types, torch.uint16))
    yield from (t[:1].expand_as(t), t[..., :1].expand_as(t), torch.stack([t, t], -1)[..., 0], t.clone().to_sparse())
    yield from (torch.nested.nested_tensor([t]), t[0], t.transpose(0, -1), torch.full_like(t, 100), torch.full_like(t, -7))
    if t.is_floating_point():
        yield from (
            t.clone().requires_grad_(),
            torch.full_like(t, math.nan),
            torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
        )


def filled():
    cache = rowmax.PagedKVCache(8, page_size=8, heads=2, dim=16, dtype=torch.float32)
    return cache, cache.extend([cache.add(), cache.add()], 3)


def of_cache(name):
    """A method of a cache that has two sequences, whose own part must be right afterwards."""

    def call(**given):
        cache, step = filled()
        cache.append(step, X[:, :3], X[:, :3])
        try:
            return getattr(cache, name)(**({"step": step} if "step" in METHODS[name] else {}), **given)
        finally:
            cache.check()

    return call


NEW = X[:, :3]
METHODS = {
    "length": {"sequence": 0},
    "fork": {"sequence": 1},
    "free": {"sequence": 1},
    "truncate": {"sequence": 0, "length": 1},
    "extend": {"sequences": [0, 1], "tokens": [1, 2]},
    "append": {"step": None, "k": NEW, "v": NEW, "layer": 0, "rotary_cos": None, "rotary_sin": None, "interleaved": False},
    "attend": {"step": None, "q": NEW, "layer": 0, "window": None},
    "attend_shared": {"step": None, "q": NEW, "shared_pages": 0},
    "shared_pages": {"sequences": [0, 1]},
}
DENSE, PACKED = dict.fromkeys("qkv", X), {**dict.fromkeys("qkv", P), "cu_seqlens_q": CU, "cu_seqlens_k": CU}
HALVES, OF_PAGES = dict.fromkeys("qkv", H), {"k_pages": PAGES, "v_pages": PAGES, "block_table": TABLE, "seqlens_k": LENGTHS}
MAXIMA = {"max_seqlen_q": 4, "max_seqlen_k": 4}
CACHES = {"k_cache": H, "v_cache": H, "cache_seqlens": torch.tensor([1, 2], dtype=torch.int32)}
TURNS = {"k": H[:, :2], "v": H[:, :2], "rotary_cos": torch.randn(9, 8).half(), "rotary_sin": torch.randn(9, 8).half()}
SEQUENCES = {"cache_batch_idx": torch.tensor([1, 0]), "cache_leftpad": torch.tensor([1, 2])}
PADDED = {**DENSE, "seqlens_k": torch.tensor([3, 6]), "prefix": torch.tensor([1, 2]), "causal": True}
PACKED_HALVES = {name: t.half() if name in "qkv" else t for name, t in PACKED.items()}
ALONE = {name: {key: value for key, value in given.items() if key != "step"} for name, given in METHODS.items()}
CALLS = {
    "attention": (rowmax.attention, DENSE),
    "attention of padded": (rowmax.attention, PADDED),
    "attention_varlen": (rowmax.attention_varlen, PACKED),
    "prepare": (lambda **given: rowmax.prepare(**given)(), DENSE),
    "explain": (rowmax.explain, DENSE),
    "sdpa": (rowmax.sdpa, {"query": X, "key": X, "value": X}),
    "merge": (rowmax.merge, {"outs": [X, X], "lses": [X[..., 0].transpose(1, 2)] * 2}),
    "rotate": (rowmax.rotate, {"x": X, "cos": torch.randn(6, 8), "sin": torch.randn(6, 8)}),
    "attention_paged": (rowmax.attention_paged, {"q": P[:2], **OF_PAGES}),
    "prepare_paged": (lambda **given: rowmax.prepare_paged(**given)(), {"q": P[:2], **OF_PAGES}),
    "attention_shared": (rowmax.attention_shared, {"q": P[:2], **OF_PAGES, "block_table": TABLE[[0, 0]], "shared_pages": 1}),
    "append_kv": (rowmax.append_kv, {**OF_PAGES, "k": P[:2], "v": P[:2]}),
    "PagedKVCache": (rowmax.PagedKVCache, {"pages": 4, "page_size": 8, "heads": 2, "dim": 16}),
    **{f"PagedKVCache.{name}": (of_cache(name), given) for name, given in ALONE.items()},
    "flash_attn": (flash_attn.flash_attn_func, HALVES),
    "flash_attn kvpacked": (flash_attn.flash_attn_kvpacked_func, {"q": H, "kv": torch.stack([H, H], 2)}),
    "flash_attn varlen": (flash_attn.flash_attn_varlen_func, {**PACKED_HALVES, **MAXIMA}),
    "flash_attn kvcache": (flash_attn.flash_attn_with_kvcache, {"q": H[:, :2], **CACHES, **TURNS}),
    "flash_attn kvcache of some": (flash_attn.flash_attn_with_kvcache, {"q": H[:, :2], **CACHES, **SEQUENCES}),
    "flash_attn_3": (flash_attn_3.flash_attn_func, {**HALVES, "qv": H}),
    "flash_attn_3 varlen": (
        flash_attn_3.flash_attn_varlen_func,
        {**PACKED, **MAXIMA, "seqused_q": torch.tensor([1, 2]), "seqused_k": torch.tensor([2, 1])},
    ),
    "flash_attn_3 kvcache": (
        flash_attn_3.flash_attn_with_kvcache,
        {"q": P.half(), **CACHES, "cu_seqlens_q": CU, "cu_seqlens_k_new": CU, **TURNS, "k": P.half(), "v": P.half()},
    ),
}  # fmt: skip
SKIPPED = {"device", "out", "scheduler_metadata"}  # torch's own; what is written to


DESCRIBED = {
    "Problem.parse": rowmax.Problem.parse,
    "PagedProblem.parse": rowmax.PagedProblem.parse,
    "Plan.parse": rowmax.Plan.parse,
    "plan of a problem": lambda given: rowmax.plan(given, rowmax.Device.named("H200")),
    "plan on a device": lambda given: rowmax.plan(PROBLEM, given),
    "plan of a direction": lambda given: rowmax.plan(PROBLEM, rowmax.Device.named("H200"), direction=given),
    **{name: lambda given, name=name: PROBLEM.with_(**{name: given}) for name in ("batch", "len_q", "dim_qk", "scale")},
}
PROBLEM = rowmax.Problem.parse("b1 h1 q4 d8 fp32")


@pytest.mark.parametrize("name", DESCRIBED)
def test_what_describes_a_call(name):
    for thing in THINGS:
        if type(thing).__hash__ is not None:  # the plan is looked up, which takes what can be
            with contextlib.suppress(ProblemError, Unsupported):
                made = DESCRIBED[name](thing)
                assert name == "Plan.parse" or type(thing) in (int, float), f"{thing!r} made {made}"
    assert PROBLEM.with_(len_q=3).len_q == 3
    with pytest.raises(ProblemError, match="len_q must be an integer, at least 0; got -5"):
        PROBLEM.with_(len_q=-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_each_argument_in_turn(name):
    function, good = CALLS[name]
    shown = getattr(rowmax, name, function) if name in ("prepare", "prepare_paged") else function
    parameters = inspect.signature(shown).parameters.values()
    more = [
        p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in (*good, "given") and p.name not in SKIPPED
    ]

    def fresh():
        return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in good.items()}

    function(**fresh())
    survived = []
    for argument in (*good, *more):
        value = good.get(argument)
        for thing in (*THINGS, *bent(value if isinstance(value, torch.Tensor) else X)):
            try:
                with contextlib.suppress(ProblemError, Unsupported, CacheFull):
                    function(**{**fresh(), argument: thing})
            except Exception as error:
                if not ("ALiBi slopes" in str(error) or "can't allocate memory" in str(error)):
                    survived.append(
                        f"{argument}={thing!r:.60} ({type(thing).__name__}): {type(error).__name__}: {error!s:.200}"
                    )
    assert not survived, "\n".join(survived)
