"""`docs/faults.md`: every fault has tests that exist, or a reason why it cannot occur; and the tests that no other file has."""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cases
import gpu_checks
import paged_cases
import rowmax
from rowmax import Problem, Unsupported, flash_attn, flash_attn_3, reference, testing

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "faults.md"
# Numbers of the collection that the page covers.
FAULTS = [
    *(1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 18, 19, 21, 22, 24, 25, 27, 28, 30, 31, 33, 34, 36, 37, 39, 40, 42, 43, 45, 46, 48),
    *(49, 51, 52, 54, 55, 57, 58, 60, 61, 63, 64, 66, 67, 69, 70, 72, 73, 75, 76, 78, 79, 81, 82, 84, 85, 87, 88, 90, 91, 93),
    *(94, 96, 97, 99, 100, 102, 103, 105, 106, 108, 109, 111, 112, 114, 115, 117, 118, 120, 121, 123, 124, 126, 127, 129, 130),
    *(132, 133, 135, 136, 138, 139, 141, 142, 144, 145, 147, 148, 150, 151, 153, 154, 156, 157, 159, 160, 162, 163, 165, 166),
    *(168, 169, 171, 172),
]


def rows() -> dict[int, tuple[str, str]]:
    """Number -> (kind, tests) of the page's tables."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if match := re.fullmatch(r"\| B(\d+) \| (.+?) \| (.+) \|", line):
            assert int(match[1]) not in found, f"B{match[1]} twice"
            found[int(match[1])] = match[2], match[3]
    return found


@lru_cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def exists(named: str) -> bool:
    """`tests/file.py::name`, `case <id>`, `gpu <check>`."""
    if match := re.fullmatch(r"tests/([\w/]+\.py)::(\w+)", named):
        return (HERE / match[1]).exists() and match[2] in functions(HERE / match[1])
    kind, _, name = named.partition(" ")
    if kind == "case":
        return name in {case.id for case in (*cases.CASES, *paged_cases.CASES)}
    return kind == "gpu" and name in gpu_checks.CHECKS


def test_every_fault_is_there():
    assert list(rows()) == FAULTS


@pytest.mark.parametrize("number", FAULTS)
def test_its_tests_exist(number):
    kind, tests = rows()[number]
    assert kind
    if tests.startswith("cannot occur: "):
        assert len(tests) > 30, "a reason"
        return
    named = re.findall(r"`([^`]+)`", tests)
    assert named, tests
    for name in named:
        assert exists(name), f"B{number} names {name}, which there is not"


# ---- tests of single faults ----------------------------------------------------------------------------------------


def right(backend, device, text: str, kind: str = "normal", **options) -> None:
    case = cases.Case("faults", Problem.parse(text), kind, **options)
    try:
        report = cases.run(case, backend, device)
    except Unsupported as refused:
        if not cases.may_refuse(case, backend):
            raise
        pytest.skip(str(refused))
    assert report.ok, str(report)


def rule(backend, device, problem: Problem, operands: testing.Operands) -> None:
    """As `right`, of operands that are given."""
    case = cases.Case("faults", problem)
    leaves = [t.detach().requires_grad_() for t in operands[:3]]
    grad, _ = testing.cotangents(problem, device=device)
    try:
        moved = operands._replace(q=leaves[0], k=leaves[1], v=leaves[2])
        out, lse = testing.attend(problem, moved, cases.plan_of(case, backend, device))
    except Unsupported as refused:
        if not cases.may_refuse(case, backend):
            raise
        pytest.skip(str(refused))
    report = testing.check_forward(problem, operands, out.detach(), lse.detach())
    grads = torch.autograd.grad(out, leaves, grad)
    report = report.merged(testing.check_backward(problem, operands, grads, grad, None, out.detach()))
    assert report.ok, str(report)


@pytest.mark.parametrize("order", [1, -1], ids=["growing", "falling"])
@pytest.mark.parametrize("text", ["b1 h2 q20 k150 d64 bf16", "b1 h2 q40 k150 d64 bf16 causal"])
def test_b22_scores_that_grow_by_hundreds_from_tile_to_tile(text, order, backend, device):
    """A rescaling that is put off must be bounded row by row: scores of key j are about 8 j, in one order and in the other, of
    every other query near 0."""
    problem = Problem.parse(text)
    operands = testing.operands(problem, device=device)
    along = torch.zeros_like(operands.k)
    along[..., 0] = 8.0 * torch.arange(problem.len_k, device=device).view(1, -1, 1)
    along = along if order > 0 else along.flip(1)
    q = operands.q.clone()
    q[:, ::2, :, 0], q[:, 1::2, :, 0] = 8.0, 0.01
    rule(backend, device, problem, operands._replace(q=q, k=operands.k + along))


def test_b25_large_masks_are_added_in_fp32():
    """Numbers from -1e4 to -1e9 stand for a mask, beside small ones that count."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 20, 2, 16, generator=generator).bfloat16() for _ in range(3))
    bias = torch.randn(1, 1, 20, 20, generator=generator)
    far = torch.rand(1, 1, 20, 20, generator=generator) < 0.5
    bias = torch.where(far, -(10.0 ** (4 + 5 * torch.rand(1, 1, 20, 20, generator=generator))), bias)
    problem = Problem.parse("b1 h2 q20 k20 d16 bf16 bias(qk)")
    operands = testing.operands(problem)._replace(q=q, k=k, v=v, bias=bias)
    report = testing.check_forward(problem, operands, *testing.attend(problem, operands))
    assert report.ok, str(report)


def test_b30_more_tokens_than_16_bits_count():
    length = 33728
    q = torch.zeros(1, length, 1, 16)
    out, lse = rowmax.attention(q, q, q, window=(7, 0), return_lse=True)
    assert not bool(out.any())
    torch.testing.assert_close(lse[0, 0], torch.arange(1, length + 1).clamp(max=8).log())


def test_b45_keys_stored_sequence_by_sequence(backend, device):
    """`[T, B, H, D]` memory: a row's stride is that of all sequences together. The gradients too."""
    problem = Problem.parse("b3 h2/1 q20 k70 d64 bf16 causal")
    operands = testing.operands(problem, device=device)
    moved = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in operands[:3]]
    rule(backend, device, problem, operands._replace(q=moved[0], k=moved[1], v=moved[2]))


@pytest.mark.parametrize("page", [65535, 65536, 69999])
def test_b46_ids_of_pages_beyond_16_bits(page):
    pages = [torch.randn(70000, 1, 1, 16) for _ in range(2)]
    q, table, lengths = torch.randn(1, 2, 16), torch.tensor([[page]], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    for plan in ("gathered", "split_kv[16x16 w4 s2 x1]"):
        try:
            out = rowmax.attention_paged(q, *pages, table, lengths, plan=plan)
        except Unsupported:
            assert plan != "gathered"  # Triton interprets, or does not
            continue
        torch.testing.assert_close(out, pages[1][page].expand(1, 2, 16))
    new = torch.randn(1, 1, 16)
    rowmax.append_kv(*pages, new, -new, table, lengths)
    assert torch.equal(pages[0][page, 0], new[0])
    assert torch.equal(pages[1][page, 0], -new[0])


class _Flags(TorchDispatchMode):
    """What backwards of rowmax were told about determinism."""

    def __init__(self):
        super().__init__()
        self.flags = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.namespace == "rowmax" and function._schema.name.startswith("rowmax::backward"):
            names = [argument.name for argument in function._schema.arguments]
            self.flags.append(arguments[names.index("deterministic")])
        return function(*arguments, **(keywords or {}))


CU = torch.tensor([0, 6], dtype=torch.int32)
DETERMINISTIC = {
    "attention": lambda q, **flag: rowmax.attention(q, q, q, **flag),
    "attention softcap": lambda q, **flag: rowmax.attention(q, q, q, softcap=2.0, **flag),
    "attention_varlen": lambda q, **flag: rowmax.attention_varlen(*(q[0],) * 3, CU, CU, **flag),
    "flash_attn_func": lambda q, **flag: flash_attn.flash_attn_func(q, q, q, **flag),
    "flash_attn_kvpacked_func": lambda q, **flag: flash_attn.flash_attn_kvpacked_func(q, torch.stack([q, q], 2), **flag),
    "flash_attn_qkvpacked_func": lambda q, **flag: flash_attn.flash_attn_qkvpacked_func(torch.stack([q] * 3, 2), **flag),
    "flash_attn_varlen_func": lambda q, **flag: flash_attn.flash_attn_varlen_func(*(q[0],) * 3, CU, CU, 6, 6, **flag),
    "flash_attn_varlen_kvpacked_func": lambda q, **flag: flash_attn.flash_attn_varlen_kvpacked_func(
        q[0], torch.stack([q[0]] * 2, 1), CU, CU, 6, 6, **flag
    ),
    "flash_attn_varlen_qkvpacked_func": lambda q, **flag: flash_attn.flash_attn_varlen_qkvpacked_func(
        torch.stack([q[0]] * 3, 1), CU, 6, **flag
    ),
    "flash_attn_3.flash_attn_func": lambda q, **flag: flash_attn_3.flash_attn_func(q, q, q, **flag),
    "flash_attn_3.flash_attn_qkvpacked_func": lambda q, **flag: flash_attn_3.flash_attn_qkvpacked_func(
        torch.stack([q] * 3, 2), **flag
    ),
    "flash_attn_3.flash_attn_varlen_func": lambda q, **flag: flash_attn_3.flash_attn_varlen_func(
        *(q[0],) * 3, CU, CU, 6, 6, **flag
    ),
    "flash_attn_3 seqused": lambda q, **flag: flash_attn_3.flash_attn_varlen_func(
        *(q[0],) * 3, CU, CU, 6, 6, seqused_k=CU[1:], **flag
    ),
}


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_b139_deterministic_reaches_the_backward_of_every_entry(name):
    q = torch.randn(1, 6, 2, 8, requires_grad=True)
    for flag in (False, True):
        with _Flags() as seen:
            DETERMINISTIC[name](q, deterministic=flag).sum().backward()
        assert seen.flags == [flag]


@pytest.mark.parametrize("heads_k", range(1, 8))
def test_b163_few_heads_of_keys(heads_k, backend, device):
    right(backend, device, f"b1 h{heads_k} q9 k20 d16 bf16 causal")


def test_b112_appending_behind_the_end_writes_nothing():
    """In every entry that appends; memory behind the cache stays as it was."""
    memory = torch.zeros(2, 20, 1, 8)
    caches = [memory[:1, :16], memory[1:, :16]]
    new = torch.ones(1, 1, 1, 8)
    before = memory.clone()
    for module, name in ((flash_attn, "flash_attn_with_kvcache"), (flash_attn_3, "flash_attn_with_kvcache")):
        with pytest.raises(rowmax.ProblemError, match="do not fit"):
            getattr(module, name)(new, *caches, new, new, cache_seqlens=16)
    with pytest.raises(rowmax.ProblemError, match="room"):
        rowmax.append_kv(*caches, new, new, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([17], dtype=torch.int32))
    assert torch.equal(memory, before)


def test_b13_b18_the_definition_itself_survives_huge_scores():
    """What everything is compared with: logits near -2.45e5 in fp64."""
    problem = Problem.parse("b1 h1 q4 k6 d16 fp64")
    operands = testing.operands(problem, "shift(-245000)")
    out, lse = reference.attention(*operands[:3])
    assert bool(torch.isfinite(out).all())
    assert bool((lse < -2.4e5).all())


def test_b127_every_entry_counts_distances_from_the_last_key():
    """Of the last rows of a whole sequence, without a mask and with one. The LSE too: where all distances of a causal row are
    off by one number the output is the same."""
    len_q, len_k, heads = 3, 40, 4
    q, k, v = (torch.randn(1, n, h, 16).half() for n, h in ((len_k, heads), (len_k, 2), (len_k, 2)))
    slopes, few = torch.tensor([0.5, 0.25, 0.125, 0.0625]), q[:, -len_q:]
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (len_q, len_k))
    room = [torch.cat([t, torch.full_like(t, torch.nan)], 1) for t in (k, v)]
    pages = [t.view(8, 10, 2, 16) for t in room]
    lengths, table = torch.tensor([len_k], dtype=torch.int32), torch.arange(8, dtype=torch.int32).view(1, 8)
    for causal in (True, False):
        wide = [t.double() for t in (q, k, v)]
        whole, whole_lse = rowmax.attention(*wide, causal=causal, alibi_slopes=slopes, return_lse=True)
        given = {"causal": causal, "alibi_slopes": slopes}
        packed, more = (few[0], k[0], v[0], cu_q, cu_k), {**given, "return_attn_probs": True}
        cached = {"cache_seqlens": lengths, "return_softmax_lse": True, **given}
        found = {
            "attention": rowmax.attention(few, k, v, return_lse=True, **given),
            "attention_varlen": rowmax.attention_varlen(*packed, return_lse=True, **given),
            "padded": rowmax.attention(few, *room, seqlens_k=lengths, return_lse=True, **given),
            "flash_attn_func": flash_attn.flash_attn_func(few, k, v, **more),
            "flash_attn_varlen_func": flash_attn.flash_attn_varlen_func(*packed, len_q, len_k, **more),
            "flash_attn_with_kvcache": flash_attn.flash_attn_with_kvcache(few, *room, **cached),
            "pages": flash_attn.flash_attn_with_kvcache(few, *pages, block_table=table, **cached),
        }
        for name, (out, lse, *_) in found.items():
            torch.testing.assert_close(
                out.view(few.shape), whole[:, -len_q:].half(), msg=lambda text, name=name: f"{name}: {text}"
            )
            torch.testing.assert_close(lse.view(1, heads, len_q), whole_lse[..., -len_q:].float())
