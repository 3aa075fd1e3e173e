"""Every case of the one suite: a problem, the kind and the layout of its operands, and the family that it belongs to.

`test_cases.py` runs each on every backend present; `run_gpu.py` does so without pytest. Families name what they look for. A
letter with a number is a failure seen in the field, in some attention library.
"""

import os
from typing import NamedTuple, Optional

import torch

import score_mods  # noqa: F401, makes the functions that problems name
from rowmax import Problem, testing


class Case(NamedTuple):
    """`lengths`: (queries, keys) of packed sequences. `large`: only on a GPU."""

    family: str
    problem: Problem
    kind: str = "normal"
    layout: str = "contiguous"
    lengths: Optional[tuple[tuple[int, int], ...]] = None
    backward: bool = True
    large: bool = False

    @property
    def id(self) -> str:
        words = [str(self.problem), self.kind, self.layout if self.layout != "contiguous" else ""]
        return " ".join(word for word in words if word and word != "normal")


def _cases() -> list[Case]:
    found: list[Case] = []

    def add(family: str, text: str, *kinds: str, **options) -> None:
        for kind in kinds or ("normal",):
            found.append(Case(family, Problem.parse(text), kind, **options))

    for dtype in ("fp16", "bf16", "fp32", "fp64"):
        add("types", f"b2 h4/2 q64 k64 d64 {dtype} causal", "normal", "spiky", "sparse_int")
        add("types", f"b1 h2 q113 k203 d64 {dtype}", "normal", "v_onehot")
        add("types", f"b1 h4/2 q90 k90 d128 {dtype} causal")
    for dims in ("1", "8", "16", "24", "40", "72", "80", "96", "160", "256"):
        add("dims", f"b1 h2 q49 k70 d{dims} bf16 causal")
    for dims in ("40/24", "64/128", "128/96", "192/128", "16/80", "8/256"):
        add("dims", f"b1 h2 q49 k70 d{dims} fp16")
    add("dims", "b1 h2 q49 k70 d72/40 fp32 window(20,4)")

    for heads in ("8/1", "6/2", "3", "7/1"):
        add("heads", f"b1 h{heads} q33 k65 d64 bf16 causal", "normal", "probe")

    for lengths in ((1, 1), (1, 2), (1, 130), (2, 1), (3, 128), (128, 3), (63, 65), (65, 63), (33, 97), (97, 33)):
        add("geometry", "b1 h2 q{} k{} d64 fp16 causal".format(*lengths), "probe")
    for window in ("0,0", "5,3", "16,0", "0,inf", "inf,5", "200,200", "3,0"):
        for lengths in ((80, 80), (40, 101), (101, 40)):
            add("geometry", f"b1 h2 q{lengths[0]} k{lengths[1]} d64 bf16 window({window})", "probe")
    add("geometry", "b1 h2 q101 k40 d64 fp32 window(7,2)", "normal", "v_index")
    for length in (15, 16, 17, 31, 32, 33, 47, 48, 49, 127, 128, 129, 191, 192, 255, 256, 257):
        add("remainders", f"b1 h1 q{length} k{length} d64 fp16 causal")
        add("remainders", f"b1 h1 q{length} k{length} d64 fp16", "shift(-120)")

    for text in ("b0 h2 q5 k5 d64", "b2 h2 q0 k5 d64", "b2 h4/2 q5 k0 d64", "b2 h2 q0 k0 d64", "b2 h0/1 q3 k5 d64"):
        add("empty", f"{text} bf16")
        add("empty", f"{text} fp32 causal")
    add("empty", "b0 h2 q0 k0 d64 bf16 packed", lengths=())
    add("empty", "b2 h2 q0 k0 d64 bf16 packed", lengths=((0, 0), (0, 0)))
    add("empty", "b3 h2 q40 k24 d64 bf16 packed causal", lengths=((20, 0), (0, 24), (20, 0)))
    add("empty", "b3 h9/3 q2 k8 d64 fp16 packed causal", lengths=((1, 3), (0, 0), (1, 5)))  # B31
    add("empty", "b4 h2 q40 k80 d256 bf16 packed", lengths=((0, 25), (12, 17), (8, 9), (20, 29)))  # B33

    for text in ("causal", "window(9,0)", "window(3,7)", ""):
        add("packed", f"b5 h4/2 q130 k130 d64 bf16 packed {text}", "normal", "probe")
    add("packed", "b4 h2 q60 k140 d64 fp16 packed causal", "normal", "spiky")
    add("packed", "b4 h2 q140 k60 d64 fp32 packed causal")
    add("packed", "b1 h2 q70 k70 d128 bf16 packed causal", lengths=((70, 70),))
    add("packed", "b3 h2 q100 k100 d64 bf16 packed causal", lengths=((33, 33), (1, 1), (56, 56)))  # B82: rows of no sequence
    add("packed", "b24 h2 q24 k24 d64 bf16 packed causal", lengths=((1, 1),) * 24)
    add("packed", "b3 h2 q90 k90 d80 fp16 packed window(16,0) maxq8 maxk8", lengths=((40, 50), (0, 10), (50, 30)))  # wrong hint

    add("extreme", "b1 h1 q1 k1 d16 fp16", "spiky(3)", "normal")  # B01
    add("extreme", "b1 h1 q1 k1 d64 bf16", "constant(133120)")  # B21
    add("extreme", "b1 h2 q40 k70 d64 bf16 causal", "constant", "constant(1000)", "constant(133120)")
    for shift in ("-60", "-120", "-1000", "-30000", "60", "1000", "30000"):
        add("extreme", "b1 h2 q40 k72 d64 fp16 causal", f"shift({shift})")
    add("extreme", "b1 h2 q40 k72 d128 bf16", "shift(-245000)", "shift(245000)")  # B13
    add("extreme", "b1 h7/1 q22 k112 d64 bf16 causal", "shift(-200)")  # B12
    add("extreme", "b1 h1 q1 k128 d64 bf16", "shift(-128)")  # B19
    add("extreme", "b1 h1 q192 k192 d64 bf16", "shift(-120)")  # B18
    add("extreme", "b1 h1 q64 k64 d128 fp16 causal", "overflow", "spiky(9)", "subnormal")  # B24
    add("extreme", "b1 h2 q160 k160 d64 fp32 window(9,0)", "shift(-1000)")  # B10
    for scale in ("0.0", "-0.1", "3.0"):
        add("extreme", f"b1 h2 q40 k72 d64 bf16 causal scale={scale}", "normal", "shift(-120)")  # B27
    add("extreme", "b1 h2 q80 k40 d64 fp16 window(9,3) scale=-0.2")

    for layout in ("heads_first", "gaps", "odd", "fused", "broadcast"):
        add("layouts", "b2 h4/2 q50 k50 d64 bf16 causal", layout=layout)
        add("layouts", "b3 h4/2 q70 k70 d64 fp16 packed causal", layout=layout)
        add("layouts", "b1 h2 q33 k33 d80 fp32", layout=layout)
    add("layouts", "b2 h4/2 q50 k65 d64 bf16 bias(hqk)", layout="broadcast")  # B60

    for kind in ("nan(q)", "nan(k)", "nan(v)", "inf(v)"):
        add("non-finite", "b2 h4/2 q50 k70 d64 fp16 causal", kind)
        add("non-finite", "b1 h2 q80 k50 d64 fp32 window(9,2)", kind)
        add("non-finite", "b3 h2 q70 k70 d64 fp16 packed causal", kind)
        add("non-finite", "b2 h4/2 q200 k200 d64 bf16 causal", kind, large=True)

    for dtype in ("fp16", "bf16", "fp32", "fp64"):
        add("scores", f"b2 h2/1 q20 k40 d16 {dtype} causal softcap=2.0 alibi(batch) sink", "spiky")
    add("scores", "b1 h2 q40 k40 d64 bf16 softcap=30.0", "spiky(9)", "shift(-120)", "nan(k)")  # B123
    add("scores", "b1 h2 q40 k40 d64 fp32 softcap=5.0", "normal", "shift(-120)")
    add("scores", "b1 h2 q30 k50 d32 fp16 causal softcap=1e+30", "spiky")
    add("scores", "b3 h4/2 q60 k70 d16 bf16 packed causal softcap=15.0", "spiky(9)")  # B124
    add("scores", "b1 h2/1 q1 k100 d32 fp16 causal alibi")  # B127
    add("scores", "b1 h4 q40 k70 d32 fp16 alibi", "normal", "shift(-120)")
    add("scores", "b1 h4/2 q70 k40 d32 fp32 window(9,3) alibi scale=-0.3")
    add("scores", "b3 h4/2 q60 k70 d16 fp16 packed causal alibi(batch)", "normal", "v_onehot")  # B126
    add("scores", "b2 h4/2 q20 k7 d16 fp16 causal sink", "normal", "shift(-120)", "nan(v)")  # B129
    add("scores", "b1 h2 q40 k50 d64 bf16 sink", "normal", "v_ones", "shift(60)")
    add("scores", "b2 h2 q5 k0 d16 fp32 sink")  # B105
    add("scores", "b3 h2 q12 k12 d16 bf16 packed causal sink", lengths=((4, 0), (0, 7), (6, 5)))  # two rows of no sequence
    add("scores", "b2 h2 q6 k0 d16 fp16 packed sink", lengths=((4, 0), (1, 0)))
    add("scores", "b1 h2 q80 k50 d32 fp16 window(9,2) softcap=3.0 alibi sink", "normal", "nan(v)", "inf(v)", layout="gaps")
    for words in ("softcap=30.0", "alibi", "sink", "softcap=50.0 alibi sink"):
        add("scores", f"b1 h4/2 q600 k600 d64 bf16 causal {words}", "normal", "v_onehot")
        add("scores", f"b2 h8/2 q1024 k1024 d128 bf16 causal {words}", "normal", "spiky", large=True)
        add("scores", f"b2 h8/2 q1000 k1000 d256 fp16 causal {words}", large=True)
        add("scores", f"b16 h8/2 q8000 k8000 d64 bf16 packed causal {words}", large=True)
    add("scores", "b1 h8/2 q8192 k8192 d128 bf16 causal softcap=30.0 sink", large=True)

    for dtype in ("fp16", "fp32"):
        add("masks", f"b2 h2/1 q20 k33 d16 {dtype} causal softcap=2.0 alibi(batch) sink bias(bhqk) mask(bqk)", "spiky")
    for letters in ("k", "q", "bh"):
        add("masks", f"b2 h2/1 q18 k17 d16 fp16 bias({letters}) mask({letters})")
    add("masks", "b1 h2/1 q33 k20 d16 bf16 causal bias(qk,fp32)")
    add("masks", "b1 h2/1 q20 k20 d32 fp32 window(9,3) bias(bk) scale=-0.3")
    add("masks", "b1 h2 q20 k40 d64 bf16 causal mask(qk)", "shift(-120)", "v_onehot")
    add("masks", "b1 h2/1 q20 k40 d16 fp16 mask(hqk)", "nan(k)", "nan(v)")
    add("masks", "b1 h2/1 q20 k40 d16 fp16 causal bias(k)", "nan(v)")
    add("masks", "b2 h2 q5 k0 d16 fp32 bias(q) mask(b) sink")
    add("masks", "b2 h2 q0 k5 d16 bf16 bias(k) mask(k)")
    add("masks", "b1 h1 q1 k1 d16 fp16 bias(1) mask(1)")
    add("masks", "b2 h2/1 q16 k17 d64 fp16 causal bias(bhqk) mask(bk)", "spiky(2)", layout="gaps")
    for words in ("bias(hqk)", "mask(bqk)", "bias(bk,fp32) mask(qk)"):
        add("masks", f"b1 h4/2 q600 k600 d64 bf16 causal {words}")
        add("masks", f"b2 h8/2 q1000 k1024 d128 bf16 causal {words}", "normal", "spiky", large=True)
        add("masks", f"b2 h8/2 q1000 k1000 d256 fp16 {words}", large=True)
    add("masks", "b2 h4/2 q70 k90 d72/40 bf16 window(30,9) bias(bqk) sink")
    # Rows that TMA takes: an even number of keys.
    more = "causal bias(bhqk)", "bias(hqk,fp32)", "window(200,40) bias(qk)", "causal mask(bk)", "bias(bk) sink", "mask(qk)"
    for words in more:
        add("masks", f"b2 h4/2 q777 k900 d64 bf16 {words}", "normal", "probe", large=True)
        add("masks", f"b2 h4/1 q900 k778 d192/128 fp16 {words}", "normal", "nan(v)", large=True, backward=False)
        add("masks", f"b3 h4/2 q640 k1040 d128 bf16 {words}", "shift(-120)", "inf(v)", large=True, backward=False)
    for words in ("causal alibi(batch) bias(bqk)", "alibi mask(bk)", "softcap=30.0 bias(hqk)", "softcap=9.0 mask(qk)"):
        add("masks", f"b2 h8/2 q700 k900 d128 bf16 {words}", large=True)
    add("masks", "b1 h8/2 q4001 k4100 d96 bf16 causal bias(hqk)", "v_ones", large=True, backward=False)

    for dtype in ("bf16", "fp32", "fp64"):
        add("mods", f"b2 h4/2 q20 k33 d16 {dtype} causal mod(everything)")
    add("mods", "b2 h2/1 q18 k16 d16 bf16 softcap=2.0 alibi(batch) sink bias(hqk) mask(bk) mod(everything)", "spiky")
    add("mods", "b3 h4/2 q24 k28 d16 fp16 packed causal mod(everything) dropout=0.2")
    add("mods", "b1 h2/1 q20 k37 d16 fp32 window(9,2) mod(own_cap) scale=-0.3", "spiky")
    add("mods", "b1 h2/1 q16 k20 d16 fp16 causal mod(distance)", "nan(k)", "nan(v)")
    add("mods", "b1 h2 q19 k20 d16 bf16 mod(every_other)")
    add("mods", "b1 h2/1 q20 k20 d16 fp32 window(6,0) sink_tokens=2 mod(everything)")
    for size in ("q600 k600 d64", "q1000 k1024 d128"):
        for name in ("distance", "own_cap", "everything", "every_other"):
            add("mods", f"b2 h8/2 {size} bf16 causal mod({name})", "normal", "spiky", large=True)
    add("mods", "b2 h8/2 q1000 k1000 d256 fp16 mod(everything) bias(hqk)", large=True)
    for dtype in ("bf16", "fp64"):
        add("dropout", f"b1 h2/1 q20 k33 d16 {dtype} causal softcap=2.0 sink bias(hqk) mask(k) dropout=0.2", "spiky")
    add("dropout", "b1 h2/1 q33 k20 d64 fp16 dropout=0.5", "v_onehot")
    add("dropout", "b3 h4/2 q60 k70 d16 fp16 packed causal dropout=0.1", "v_ones")  # B133
    add("dropout", "b1 h2 q20 k40 d16 fp32 window(9,2) dropout=0.9", "shift(-120)")
    add("dropout", "b1 h4/2 q600 k600 d64 bf16 causal dropout=0.1", "normal", "v_onehot")
    for size in ("d64 bf16", "d128 bf16", "d256 fp16"):
        add("dropout", f"b2 h8/2 q1000 k1024 {size} causal dropout=0.1", "normal", "v_onehot", large=True)
    add("dropout", "b16 h8/2 q8000 k8000 d64 bf16 packed causal dropout=0.2", large=True)

    add("patterns", "b1 h2/1 q20 k40 d16 fp16 window(5,0) sink_tokens=3", "probe", "nan(k)", "nan(v)")
    add("patterns", "b1 h2/1 q20 k33 d16 fp32 causal chunk=7", "probe", "nan(q)")
    add("patterns", "b1 h2/1 q33 k20 d16 fp16 causal prefix=9", "probe", "nan(v)")
    add("patterns", "b1 h1 q33 k20 d16 fp16 chunk=6 sink", "probe")
    add("patterns", "b1 h2/1 q24 k40 d16 fp16 window(4,2) sink_tokens=18 prefix=6 chunk=11 softcap=9.0", "probe")
    add("patterns", "b3 h2/1 q40 k40 d16 fp16 packed window(4,0) sink_tokens=2 chunk=9", "probe")
    add("patterns", "b2 h1 q20 k24 d16 fp32 window(4,0) sink_tokens=3 bias(k) mask(bk) dropout=0.2", "v_onehot")
    add("patterns", "b2 h2/1 q40 k33 d16 fp64 window(5,0) sink_tokens=3 chunk=12", "spiky", "probe")
    add("patterns", "b2 h2 q5 k0 d16 fp32 causal prefix=4 chunk=3")
    for words in ("window(64,0) sink_tokens=4", "causal chunk=128", "causal prefix=200", "window(99,0) prefix=150 chunk=200"):
        add("patterns", f"b1 h4/2 q300 k300 d64 bf16 {words}", "v_onehot")
        add("patterns", f"b2 h8/2 q1000 k1024 d128 bf16 {words}", "normal", "probe", large=True)
        add("patterns", f"b2 h8/2 q1024 k1000 d256 fp16 {words}", "probe", large=True)
        add("patterns", f"b2 h8/2 q1024 k1024 d64 fp16 {words} softcap=30.0 alibi sink", large=True)
        add("patterns", f"b16 h8/2 q8000 k8000 d64 bf16 packed {words}", "normal", "probe", large=True)
    add("patterns", "b1 h8/2 q8192 k8192 d128 bf16 window(1023,0) sink_tokens=4", large=True)

    # Enough keys that the CPU path may round scores, where it thinks that nobody can see it.
    for kind in (
        "normal",
        "sparse_int",
        "v_onehot",
        "v_ones",
        "v_index",
        "probe",
        "spiky(2)",
        "spiky",
        "shift(-60)",
        "constant",
    ):
        add("many keys", "b1 h4/2 q600 k600 d64 bf16 causal", kind)
    add("many keys", "b1 h2 q600 k600 d64/16 bf16 causal", "v_onehot")
    for kind in ("v_outlier(10)", "v_outlier(100)"):
        add("many keys", "b1 h4 q1024 k1024 d64 bf16", kind)
    add("many keys", "b1 h2 q300 k800 d128 bf16", "normal", "v_onehot", "probe")
    add("many keys", "b2 h2 q700 k700 d64 bf16 window(600,0)", "normal", "probe")
    add("many keys", "b3 h2 q1700 k1700 d32 bf16 packed causal", "normal", "v_onehot")
    add("many keys", "b1 h2 q40 k1500 d64 bf16 scale=0.02", "normal", "nan(v)")

    for dtype in ("bf16", "fp16"):
        add("large", f"b2 h8/2 q1024 k1024 d128 {dtype} causal", "normal", "spiky", large=True)
        add("large", f"b1 h4/2 q1000 k3001 d64 {dtype} causal", "normal", "probe", large=True)
        add("large", f"b1 h4 q2048 k2048 d64 {dtype} window(256,0)", "normal", "probe", large=True)
    add("large", "b1 h2 q1024 k1024 d128 fp32 causal", large=True)
    add("large", "b1 h1 q1024 k1024 d128 fp16 causal", "spiky(3)", large=True)  # B03
    add("large", "b1 h1 q704 k704 d64 bf16", "shift(-120)", large=True)  # B18
    add("large", "b1 h7/1 q88 k448 d64 bf16 causal", "shift(-200)", large=True)  # B12
    add("large", "b16 h8/2 q8000 k8000 d128 bf16 packed causal", large=True)
    add("large", "b1 h8/2 q8192 k8192 d128 bf16 causal", large=True)
    add("large", "b1 h4 q512 k512 d256 bf16 causal", large=True)
    add("large", "b1 h1 q64 k1024 d128 bf16", "v_ones", large=True)
    add("large", "b1 h1 q64 k32768 d128 bf16", "v_ones", "normal", large=True)  # growth with the number of keys
    add("large", "b70000 h8 q1 k1 d64 bf16", large=True)  # B54: grid limit of 65,535
    add("large", "b1 h71280 q3 k3 d64 bf16 causal", large=True)  # B55
    add("large", "b12288 h16 q49152 k49152 d64 bf16 packed causal", large=True)  # B43
    add("large", "b1 h56 q99968 k99968 d128 bf16 window(127,0)", layout="fused", backward=False, large=True)  # B49: 2^31
    return found


CASES = _cases()

# What may be refused. Anything else that a plan refuses is a failure, not a skip.
ATEN_RUNS = ("b2 h4/2 q64 k64 d64 fp32 causal", "b1 h2 q113 k203 d64 fp32", "b1 h2 q113 k203 d64 fp64")
INTERPRETED_PAIRS = 2**17  # query-key-head triples that the interpreter finishes in a few seconds


def backends(device: str) -> list[str]:
    """Algorithms that a device has; on the CPU the Triton kernels only where Triton interprets."""
    if device == "cuda":
        return ["q_outer", *(["hopper"] if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else [])]
    return ["aten", "tiled", *(["q_outer"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]


def forward_backends(device: str) -> list[str]:
    """Algorithms that have no backward of their own."""
    return (
        ["kv_outer", "dense", "warp_split"] if device == "cuda" and torch.cuda.is_available() else []
    )  # interpreted: `test_generations.py`


def may_refuse(case: Case, backend: str) -> bool:
    if backend == "aten":
        return str(case.problem) not in ATEN_RUNS
    backend = backend.partition("[")[0]
    plain = case.problem.plain and case.problem.windowed
    if backend == "hopper":  # 16 bits; `tests/kernels/test_gluon_plan.py`, `_scores.py` and `_given.py` pin what it takes
        return (
            bool(case.problem.score_mod)
            or (case.problem.dropout > 0 and case.problem.pairs)
            or _pairs_elsewhere(case.problem)
            or case.problem.softcap > 1000
            or case.problem.dtype_name not in ("fp16", "bf16")
            or case.layout in ("odd", "broadcast")
            or _odd_dims(case.problem)
        )
    if backend == "warp_split":  # `tests/kernels/test_warp_split.py` pins what it takes
        wide = max(case.problem.dim_qk, case.problem.dim_v) > 128
        half = case.problem.dtype_name in ("fp16", "bf16")
        return wide or not half or not plain or case.layout in ("odd", "broadcast") or _odd_dims(case.problem)
    if backend in ("kv_outer", "dense") and not plain:
        return True
    if backend == "dense" and (case.problem.packed or case.family == "large"):
        return True
    if backend == "split_kv" and (case.problem.packed or not plain):  # packed keys: in pages (`paged_cases.py`)
        return True
    return backend in ("q_outer", "kv_outer", "dense", "split_kv") and case.problem.dtype_name == "fp64"


def _pairs_elsewhere(problem: Problem) -> bool:
    """A bias and a mask, one for all keys, or one whose rows begin anywhere."""
    letters = (problem.bias or problem.mask).split(",")[0]
    return problem.pairs and bool((problem.bias and problem.mask) or "k" not in letters or problem.len_k % 2)


def _odd_dims(problem: Problem) -> bool:
    """Rows that are not multiples of 16 bytes, which TMA does not take."""
    return bool(problem.dim_qk % 8 or problem.dim_v % 8)


def interpreted(backend: str, device: str) -> bool:
    return device == "cpu" and backend not in ("aten", "tiled") and os.environ.get("TRITON_INTERPRET") == "1"


def too_slow(case: Case, backend: str, device: str) -> bool:
    """Left to the GPU: sizes that take too long here, and what the interpreter cannot represent."""
    problem = case.problem
    triples = problem.len_q * problem.len_k * max(problem.batch if not problem.packed else 1, 1) * problem.heads_q
    if device == "cpu" and (case.large or triples > 2**24):
        return True
    return interpreted(backend, device) and triples > INTERPRETED_PAIRS


def plan_of(case: Case, backend: str, device: str) -> str:
    """The plan's spelling: the backend's own tiles on a device; small ones, so that short lengths have several, interpreted."""
    if not interpreted(backend, device):
        return backend
    small = max(case.problem.len_q, case.problem.len_k) <= 50
    return f"{backend}[{'16x32 w4 s2, 16x32 w4 s2, 32x16 w4 s2' if small else '32x64 w4 s2, 64x32 w4 s2, 32x64 w4 s2'}]"


def run(case: Case, backend: str, device: str) -> testing.Report:
    options = {"layout": case.layout, "lengths": case.lengths, "backward": case.backward}
    return testing.check(case.problem, case.kind, device=device, plan=plan_of(case, backend, device), **options)
