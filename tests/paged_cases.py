"""Calls over a paged cache: problems, the lengths of their sequences and the kinds of their operands.

`test_paged.py` runs them on every backend present, `gpu_checks.py` on a GPU. `len_k` of a spelling is
the room of the block table.
"""

from typing import NamedTuple

import torch

from rowmax import PagedProblem
from rowmax.testing import paged


class PagedCase(NamedTuple):
    """`lengths`: queries and keys of each sequence. `splits`: parts that are asked for; 0: as the plan has it."""

    problem: PagedProblem
    lengths: tuple[tuple[int, int], ...]
    kind: str = "normal"
    splits: int = 0
    heads_first: bool = False
    page_scales: bool = False

    @property
    def id(self) -> str:
        words = (self.kind, f"splits{self.splits}" if self.splits else "", "hnd" if self.heads_first else "")
        words = (*words, "scales of pages" if self.page_scales else "")
        return " ".join([str(self.problem), str(self.lengths), *(word for word in words if word and word != "normal")])


def _cases() -> list[PagedCase]:
    found: list[PagedCase] = []

    def add(text: str, lengths, *kinds: str, **options) -> None:
        for kind in kinds or ("normal",):
            found.append(PagedCase(PagedProblem.parse(text), tuple(lengths), kind, **options))

    def decode(*keys):
        return [(1, length) for length in keys]

    for page, room, parts in ((16, 112, (0, 1, 3)), (1, 100, (0,)), (7, 105, (0, 3)), (64, 128, (0, 3)), (128, 128, (0,))):
        for splits in parts:
            add(f"b4 h4/2 q1 k{room} d64 bf16 causal paged{page}", decode(70, 0, 33, 100), splits=splits)
    for size in (320, 288, 299):  # large pages: a contiguous cache is one page a sequence
        add(f"b2 h2 q1 k{size} d64 bf16 causal paged{size}", decode(size, 70), splits=2)
    for splits in (2, 9):  # empty parts
        add("b2 h4/2 q1 k80 d64 fp16 causal paged16", decode(80, 17), "probe", splits=splits)
    add("b2 h8/1 q1 k64 d64 fp16 causal paged16", decode(50, 64), "probe", splits=2)
    for heads in ("6/2", "3", "20/1"):
        add(f"b2 h{heads} q5 k64 d64 fp16 causal paged16", [(5, 50), (5, 3)], "probe", splits=2)
    for dims in ("8", "40/24", "80", "192/128", "64/256"):
        add(f"b2 h4/2 q1 k64 d{dims} fp16 causal paged16", decode(50, 31), splits=2)
    add("b2 h16/1 q1 k64 d576/512 bf16 causal paged16", decode(50, 31), "normal", "v_onehot", splits=2)
    add("b2 h4/2 q2 k64 d72 fp32 causal paged16", [(2, 50), (2, 1)], "normal", "spiky", splits=2)
    for window in ("5,0", "0,0", "20,3"):
        add(f"b2 h4/2 q3 k96 d64 bf16 window({window}) paged16", [(3, 90), (3, 2)], "probe", splits=3)
    add("b2 h4/2 q4 k96 d64 bf16 paged16", [(4, 90), (4, 2)], splits=3)
    for kind in ("spiky", "shift(-120)", "shift(-30000)", "constant(133120)", "v_onehot", "sparse_int"):
        add("b2 h4/2 q2 k80 d64 bf16 causal paged16", [(2, 75), (2, 16)], kind, splits=3)
    for kind in ("nan(v)", "inf(v)", "nan(k)", "nan(q)"):
        add("b2 h2/2 q6 k80 d64 fp16 causal paged16", [(6, 75), (6, 16)], kind, splits=3)
    for kind in ("nan(v)", "nan(k)"):
        add("b3 h4/2 q30 k80 d64 fp16 causal packed paged16", [(20, 75), (1, 30), (6, 6)], kind)
    add("b2 h4/2 q2 k80 d64 fp16 causal paged16 scale=0.0", [(2, 75), (2, 16)], splits=2)
    add("b2 h4/2 q2 k80 d64 fp16 causal paged16 scale=-0.2", [(2, 75), (2, 16)], splits=2)
    mixed = [(1, 70), (30, 30), (0, 12), (17, 60), (1, 1), (3, 0)]
    add("b6 h4/2 q60 k80 d64 bf16 causal packed paged16", mixed, "normal", "probe")
    add("b6 h4/2 q60 k80 d64 bf16 causal packed paged5", mixed, splits=2, heads_first=True)
    add("b6 h4/2 q60 k80 d64 bf16 window(9,1) packed paged16 maxq30", mixed, "probe")
    add("b2 h4/2 q1 k80 d64 bf16 causal paged16", decode(75, 16), heads_first=True)
    for text in ("q3 k80 d64 bf16", "q1 k80 d96/40 fp16"):
        queries = int(text[1])
        for kind in ("normal", "spiky(3)"):
            add(f"b2 h4/2 {text} causal paged16 e4m3", [(queries, 75), (queries, 9)], kind, splits=2)
    for page in (16, 5):
        add(f"b2 h4/2 q2 k80 d64 fp16 causal paged{page} e4m3", [(2, 75), (2, 9)], "normal", splits=2, page_scales=True)
    add("b2 h4/2 q2 k80 d64/48 bf16 causal paged16 e4m3", [(2, 75), (2, 9)], "normal", splits=2, page_scales=True)
    add("b3 h4/2 q2 k0 d64 bf16 causal paged16", [(2, 0)] * 3)
    add("b0 h4/2 q0 k16 d64 bf16 causal packed paged16", [])
    add("b0 h4/2 q1 k16 d64 bf16 causal paged16", [])
    add("b2 h4/2 q0 k16 d64 bf16 causal packed paged16", [(0, 0), (0, 10)])
    return found


CASES = _cases()

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
LIES = {
    "ids too large": {"block_table": INT_MAX},
    "ids negative": {"block_table": INT_MIN},
    "lengths too large": {"seqlens_k": INT_MAX},
    "lengths negative": {"seqlens_k": [-1, INT_MIN, 20]},
    "everything": {"block_table": -7, "seqlens_k": INT_MAX},
    "bounds decrease": {"cu_seqlens_q": [0, 12, 4, INT_MAX]},
    "bounds and lengths": {"cu_seqlens_q": [INT_MIN, INT_MAX, INT_MIN, INT_MAX], "seqlens_k": INT_MAX},
}


def lying(text: str, lengths, device="cpu", **lies):
    """Operands of a call whose lengths, ids or bounds are replaced."""
    problem = PagedProblem.parse(text)
    given = paged.paged_operands(problem, lengths, device=device, page_scales=True)[0]
    finite = {name: getattr(given, name) for name in ("k_pages", "v_pages", "k_scale", "v_scale")}
    finite = {name: t if t is None else t.float().nan_to_num().to(t.dtype) for name, t in finite.items()}
    garbage = dict(given._asdict(), **finite)
    for name, values in lies.items():
        garbage[name] = torch.tensor(values, dtype=torch.int32, device=device).expand_as(given._asdict()[name]).clone()
    return problem, type(given)(**garbage)
