"""`attention_paged` on every backend present: cases under the acceptance rule, what it refuses, and that it is one operator."""

import os

import pytest
import torch

import paged_cases
import rowmax
from rowmax import Device, PagedProblem, Problem, ProblemError, Unsupported, attention_paged
from rowmax.testing import paged

BACKENDS = ["gathered", *(["split_kv"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]


def plan_of(case: paged_cases.PagedCase, backend: str) -> str:
    """Small tiles, so that short lengths have several; shared out by the lengths on the device unless parts are asked for."""
    if backend == "gathered":
        return backend
    block_m = 16 if case.problem.len_q * case.problem.group <= 16 else 32
    return f"split_kv[{block_m}x16 w4 s2 p6]"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", paged_cases.CASES, ids=lambda case: case.id)
def test_case(case, backend):
    options = {"num_splits": case.splits or None, "heads_first": case.heads_first, "page_scales": case.page_scales}
    report = paged.check_paged(case.problem, case.lengths, case.kind, plan=plan_of(case, backend), **options)
    assert report.ok, str(report)


# ---- what arrives, what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lies", "says"),
    [
        ({"seqlens_k": [40, 9, 20]}, r"seqlens_k\[0\] is 40; the block table has room for 0 to 32 keys"),
        ({"seqlens_k": [4, -9, 20]}, r"seqlens_k\[1\] is -9"),
        ({"block_table": 99}, r"block_table\[0, 0\] is 99, but there are pages 0 to"),
        ({"cu_seqlens_q": [0, 12, 4, 12]}, "cu_seqlens_q must start at 0, never decrease"),
    ],
)
def test_the_cpu_names_the_entry_that_is_wrong(lies, says):
    _, operands = paged_cases.lying("b3 h4/2 q12 k32 d16 fp32 causal packed paged8", [(4, 30), (1, 9), (7, 20)], **lies)
    *tensors, cu = operands[:6]
    for debug in (False, True):
        with pytest.raises(ProblemError, match=says):
            attention_paged(*tensors, cu_seqlens_q=cu, plan="gathered", debug=debug)


def call(**changes):
    """A good call of two sequences, changed."""
    given = {
        "q": torch.randn(2, 4, 16),
        "k_pages": torch.randn(5, 8, 2, 16),
        "v_pages": torch.randn(5, 8, 2, 16),
        "block_table": torch.tensor([[1, 3], [0, 0]]),
        "seqlens_k": torch.tensor([12, 5]),
        **changes,
    }
    return attention_paged(**given)


WRONG = [
    ({"q": torch.randn(3, 4, 16)}, "one entry for each of the 2 sequences"),
    ({"q": torch.randn(2, 3, 16)}, "multiple of KV heads; got 3 and 2"),
    ({"q": torch.randn(2, 4, 24)}, "same head dimension; got 24 and 16"),
    ({"q": torch.randn(2, 4, 16).half()}, "must have one dtype"),
    ({"q": torch.randn(4, 16)}, "layout"),
    ({"q": torch.randn(2, 2, 4, 16), "cu_seqlens_q": torch.tensor([0, 1, 2])}, "beside cu_seqlens_q"),
    ({"q": "text"}, "q must be a torch.Tensor"),
    ({"q": torch.randn(2, 4, 16, requires_grad=True)}, "has no gradients"),
    ({"k_pages": torch.randn(5, 8, 32)}, r"layout \[page, slot, H, D\]"),
    ({"k_pages": torch.randn(5, 8, 16, 2).transpose(2, 3)}, "stride 1 in its last dimension"),
    ({"k_pages": torch.randn(5, 2, 8, 16), "v_pages": torch.randn(5, 2, 8, 16), "q": torch.randn(2, 4, 16)}, "transpose"),
    ({"v_pages": torch.randn(5, 4, 2, 16)}, "agree in all but the last"),
    ({"block_table": torch.zeros(2, 2)}, "block_table must be int32 or int64"),
    ({"block_table": torch.zeros(2, dtype=torch.int32)}, "block_table must have shape"),
    ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, "name the same sequences"),
    ({"seqlens_k": torch.zeros(2, 1, dtype=torch.int32)}, "seqlens_k must have shape"),
    ({"cu_seqlens_q": torch.tensor([0, 1])}, "one element more than seqlens_k"),
    ({"window": (-1, 0)}, "at least 0; got -1"),
    ({"num_splits": 0}, "num_splits must be at least 1"),
    ({"num_splits": 1.5}, "must be an integer"),
    ({"scale": float("nan")}, "finite"),
    ({"causal": 1}, "causal must be True or False"),
    ({"out": torch.empty(2, 4, 8)}, "out must be torch.float32"),
]


@pytest.mark.parametrize(("changes", "says"), WRONG, ids=[says for _, says in WRONG])
def test_wrong_calls_are_told_what_is_wrong(changes, says):
    with pytest.raises(ProblemError, match=says):
        call(**changes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_forms_of_q_say_the_same(backend):
    """One token a sequence as `[B, H, D]`, as `[B, 1, H, D]` and packed; and into a strided tensor that is given."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 16), torch.randn(5, 8, 2, 16), torch.randn(5, 8, 2, 24)
    plan = backend if backend == "gathered" else "split_kv[16x16 w4 s1 x2]"
    same = {"k_pages": k, "v_pages": v, "return_lse": True, "plan": plan}
    out, lse = call(q=q, **same)
    assert (out.shape, lse.shape) == ((2, 4, 24), (2, 4))
    for other, where in (({"q": q[:, None]}, lambda t: t.squeeze(1)), ({"q": q, "cu_seqlens_q": torch.arange(3)}, lambda t: t)):
        again, again_lse = call(**same, **other)
        assert torch.equal(where(again), out)
        assert torch.equal(again_lse.view(2, 4) if "cu_seqlens_q" not in other else again_lse.T, lse)
    given = torch.full((2, 4, 30), 7.0)
    assert call(q=q, **{**same, "return_lse": False}, out=given[..., :24]) is not None
    assert torch.equal(given[..., :24], out)
    assert bool((given[..., 24:] == 7).all())


def test_the_operators_keep_their_word():
    given = (
        torch.randn(2, 4, 16),
        *(torch.randn(5, 8, 2, 16) for _ in "kv"),
        torch.tensor([[1, 3], [0, 0]]),
        torch.tensor([12, 5]),
    )
    numbers = (None, None, None, None, None, None, 0, None, False, "gathered")
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for need_lse in (False, True):
        torch.library.opcheck(torch.ops.rowmax.paged.default, (need_lse, *given, *numbers), test_utils=tests)
        out = torch.empty(2, 4, 16)
        torch.library.opcheck(torch.ops.rowmax.paged_into.default, (out, need_lse, *given, *numbers), test_utils=tests)


def test_numbers_read_in_a_compiled_call_are_hints_and_sides():
    problem, lengths = PagedProblem.parse("b2 h4/2 q2 k32 d16 fp32 causal paged8"), ((2, 20), (2, 30))
    q, *pages = paged.paged_operands(problem, lengths)[0][:5]

    def attend(n):
        return rowmax.attention_paged(q, *pages, max_seqlen_q=n.item(), window=(n.item(), 0), num_splits=n.item())

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        for number in (3, 1):
            assert torch.equal(compiled(torch.tensor(number)), attend(torch.tensor(number)))


def test_a_compiled_call_is_one_operator():
    def step(q, k, v, table, lengths):
        return attention_paged(q, k, v, table, lengths, return_lse=True)

    given = (
        torch.randn(2, 4, 16),
        *(torch.randn(5, 8, 2, 16) for _ in "kv"),
        torch.tensor([[1, 3], [0, 0]]),
        torch.tensor([12, 5]),
    )
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for one, other in zip(compiled(*given), step(*given), strict=True):
        assert torch.equal(one, other)


# ---- the problem and the plan ---------------------------------------------------------------------------------------


def test_a_paged_problem_is_spelled_and_hashed():
    for text in ("b4 h32/8 q1 k8192 d128 bf16 causal paged16", "b2 h128/1 q9 k640 d576/512 bf16 window(3,0) packed paged64"):
        problem = PagedProblem.parse(text)
        assert str(problem) == text
        assert len({problem, PagedProblem.parse(text), problem.with_(page_size=1)}) == 2
    assert PagedProblem.parse("h4 q1 k32 d64 bf16 paged16") != Problem.parse("h4 q1 k32 d64 bf16")
    for wrong in ("h4 q1 k32 d577 bf16 paged16", "h4 q1 k32 d64 bf16 paged0", "h4 q1 k32 d64 bf16 paged"):
        with pytest.raises(ProblemError):
            PagedProblem.parse(wrong)


H200 = Device.named("H200")
DECODE = (  # what is planned, and how many programs share the work
    ("b1 h32/8 q1 k8192 d128 bf16", 128),
    ("b1 h32/8 q1 k131072 d128 bf16", 264),
    ("b128 h32/8 q1 k4096 d128 bf16", 1024),
    ("b64 h64/8 q1 k8192 d64 bf16", 512),
    ("b8 h32/8 q1 k1024 d128 bf16", 128),
)


@pytest.mark.parametrize(("text", "programs"), DECODE)
def test_one_query_and_many_keys_are_shared_out(text, programs):
    problem = Problem.parse(text)
    plan = rowmax.plan(problem, H200)
    assert plan.algorithm == "split_kv"
    assert rowmax.plan(problem, H200, direction="backward").algorithm == "q_outer"
    assert rowmax.plan(problem, H200, direction="backward", prefer="split_kv").algorithm == "q_outer"
    assert plan.tiles[0].parts * problem.batch * problem.heads_k == programs
    assert rowmax.Plan.parse(str(plan)).tiles == plan.tiles


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("b2 h32/8 q512 k8192 d128 bf16", "tiles of queries reuse keys as well"),
        ("b2 h32/8 q1 k100 d128 bf16", "not worth sharing out"),
        ("b2 h32/8 q64 k8192 d128 bf16 packed maxq1", "packed keys in pages only"),
    ],
)
def test_other_calls_are_not(text, says):
    plan = rowmax.plan(Problem.parse(text), H200)
    assert plan.algorithm != "split_kv"
    assert says in dict(plan.refusals)["split_kv"]


def test_lengths_on_the_device_are_shared_out_there():
    tile = rowmax.plan(PagedProblem.parse("b64 h32/8 q1 k131072 d128 bf16 causal paged16"), H200).tiles[0]
    assert str(tile).endswith(f"p{2 * H200.sms}")
    many = rowmax.plan(PagedProblem.parse("b4096 h32/8 q1 k8192 d128 bf16 causal paged16"), H200).tiles[0]
    assert str(many).endswith("x1")  # one launch: no combine kernel


def test_nothing_else_reads_pages():
    problem = PagedProblem.parse("b2 h4/2 q1 k64 d64 bf16 causal paged16")
    with pytest.raises(Unsupported) as refused:
        rowmax.plan(problem, H200, prefer="hopper")
    assert refused.value.refusals["hopper"] == refused.value.refusals["q_outer"] == "reads no pages"
    with pytest.raises(Unsupported, match="at most 4096 parts"):
        rowmax.plan(problem, H200, prefer="split_kv[16x64 w4 s3 x9999]")


def test_a_tile_is_spelled():
    for text in ("16x64 w4 s3 x8", "64x32 w8 s2 p264", "64x32 w8 s2 c32", "16x64 w4 s4 r8d24", "16x64 w4 s4 c8d3 once"):
        assert str(rowmax.Plan.parse(f"split_kv[{text}]").tiles[0]) == text
    for wrong in ("16x64 w4 s3", "16x64 w4 s3 y8", "16x64 x8", "16x64 w4 s3 x8d2"):
        with pytest.raises(ProblemError, match="no tile of split_kv"):
            rowmax.Plan.parse(f"split_kv[{wrong}]")
