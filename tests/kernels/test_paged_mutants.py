"""One-line faults put into the kernels of serving, each of which the suite's cases must notice; as `mutants.py` does."""

import pytest
import torch
from mutants import interpreted, replaced

import rowmax
from rowmax import PagedProblem, Problem, ops_paged, testing
from rowmax.paged import AppendOperands
from rowmax.testing import check_forward, paged
from rowmax.testing.memory import poisoned

pytestmark = interpreted

DECODE, COMBINE, PARTS = (f"kernels/triton/{name}.py" for name in ("decode", "combine", "parts"))
APPEND, MERGE = "kernels/triton/append.py", "kernels/triton/merge.py"

CASES = {  # spelling, queries and keys of each sequence, kind, tile, scales of pages
    "one": ("b2 h4/2 q1 k48 d16 fp32 causal paged16", [(1, 40), (1, 17)], "normal", "16x16 w4 s1 x3", False),
    "shares": ("b2 h2/2 q1 k288 d16 fp32 causal paged32", [(1, 17), (1, 280)], "normal", "16x16 w4 s1 p8", False),
    "once": ("b2 h4/2 q1 k48 d16 fp32 causal paged16", [(1, 40), (1, 17)], "normal", "16x16 w4 s1 x3 once", False),
    "few": ("b1 h4/2 q3 k48 d16 fp32 causal paged8", [(3, 45)], "probe", "16x16 w4 s1 x2", False),
    "packed": ("b3 h2/1 q8 k32 d16 fp32 causal packed paged16", [(5, 20), (0, 5), (3, 18)], "probe", "16x16 w4 s1 x1", False),
    "window": ("b1 h2/1 q3 k48 d16 fp32 window(10,3) paged16", [(3, 45)], "probe", "16x16 w4 s1 x1", False),
    "nan": ("b2 h1 q20 k32 d16 fp16 causal paged16", [(20, 30), (20, 25)], "nan(v)", "16x16 w4 s1 x1", False),
    "heads": ("b1 h4/2 q1 k32 d16 fp16 causal paged16 e4m3", [(1, 30)], "normal", "16x16 w4 s1 x1", False),
    "pages": ("b1 h4/2 q1 k32 d16 fp16 causal paged16 e4m3", [(1, 30)], "normal", "16x16 w4 s1 x1", True),
    "small pages": ("b1 h4/2 q1 k30 d16 fp16 causal paged5 e4m3", [(1, 28)], "normal", "16x16 w4 s1 x1", True),
    "halves": ("b1 h4/2 q1 k32 d16 bf16 causal paged16 e4m3", [(1, 30)], "normal", "16x16 w4 s1 x1", False),
    "halves of pages": ("b1 h4/2 q1 k32 d16 bf16 causal paged16 e4m3", [(1, 30)], "normal", "16x16 w4 s1 x1", True),
    "pairs": ("b1 h4/2 q1 k32 d32 bf16 causal paged16 e4m3", [(1, 30)], "normal", "16x16 w4 s1 x1", False),
    "pairs of pages": ("b1 h4/2 q1 k32 d32 bf16 causal paged16 e4m3", [(1, 30)], "normal", "16x16 w4 s1 x1", True),
    "fixed": ("b1 h2 q1 k48 d16 fp32 causal paged16 invariant", [(1, 43)], "normal", "16x16 w4 s1 c2", False),
    "doubling": ("b1 h2 q1 k80 d16 fp32 causal paged16 invariant", [(1, 75)], "normal", "16x16 w4 s1 c1d1", False),
}

SCORES = {"sink": "b1 h4/2 q1 k40 d16 fp32 softcap=2.0 sink", "alibi": "b2 h4/2 q1 k20 d16 fp32 alibi(batch)"}

MUTANTS = {  # name -> case, file, old, new, how often old occurs
    # where a key lies
    "page of the first key": ("one", DECODE, "tl.load(table + col // size,", "tl.load(table + col * 0,", 1),
    "slots of large tiles counted on": (
        "one",
        DECODE,
        "(col % size + tl.arange(0, BLOCK_N))",
        "(col + tl.arange(0, BLOCK_N))",
        1,
    ),
    "slots of small pages counted on": ("few", DECODE, "(cols % size).to(tl.int64)", "cols.to(tl.int64)", 1),
    "values of the first head": ("one", DECODE, "v_base = v_ptr + of_head * v_strides[2]", "v_base = v_ptr", 1),
    # whose rows
    "one head of the group": ("one", DECODE, "heads = head * GROUP + row % GROUP", "heads = head * GROUP", 1),
    "heads for tokens": ("few", DECODE, "tokens = row // GROUP", "tokens = row % 3", 1),
    "bounds of the packed": ("packed", DECODE, "(begin + tokens).to(tl.int64)", "tokens.to(tl.int64)", 2),
    "aligned to the top left": ("few", DECODE, "keys - queries, band", "keys * 0, band", 2),
    "tile's last row sees as its first": (
        "few",
        PARTS,
        "end_key(last, shift, keys, band)",
        "end_key(first, shift, keys, band)",
        1,
    ),
    "window begins a tile late": (
        "window",
        PARTS,
        "0, keys) // BLOCK_N * BLOCK_N\n",
        "0, keys) // BLOCK_N * BLOCK_N + BLOCK_N\n",
        1,
    ),
    "all lengths are the table's": (
        "one",
        PARTS,
        "return clamp(tl.load(seqlens + b), 0, most).to(tl.int32)",
        "return most + 0 * tl.load(seqlens + b)",
        1,
    ),
    # parts
    "part begins late": ("one", DECODE, "low = tl.minimum(part * each, turns)", "low = tl.minimum(part * each + 1, turns)", 1),
    "part goes on": ("one", DECODE, "high = tl.minimum(low + each, turns)", "high = turns", 1),
    "accumulator not rescaled": ("few", DECODE, "acc = acc * alpha[:, None]", "acc = acc", 1),
    "sum stored for maximum": (
        "one",
        DECODE,
        "tl.store(part_ptr + line, m, mask=kept)",
        "tl.store(part_ptr + line, l, mask=kept)",
        1,
    ),
    "slots of parts run on": ("shares", PARTS, "(slots + line - before).to(tl.int64)", "line.to(tl.int64)", 1),
    "the last but one to end combines": ("once", DECODE, "== here - 1:", "== here - 2:", 1),
    "last parts alone": ("one", COMBINE, "range(0, here,", "range(1, here,", 1),
    "parts of another head": ("one", COMBINE, "tl.int64) * heads_k, 0", "tl.int64), 0", 1),
    "maximum for sum": ("one", COMBINE, "tl.load(part_ptr + line + behind,", "tl.load(part_ptr + line,", 1),
    "combined rows of one token": ("few", COMBINE, "tokens = begin + row // GROUP", "tokens = begin + row * 0", 1),
    "sum not rescaled": ("one", PARTS, "tl.fma(l_j, other, l * mine)", "tl.fma(l_j, other, l)", 1),
    "last fixed part": ("fixed", PARTS, "tl.cdiv(end, BLOCK_N) - 1, 0)", "end // BLOCK_N - 1, 0)", 1),
    "one fixed part fewer": ("fixed", PARTS, "last + 1, first)", "last, first)", 1),
    "all end as the first": ("doubling", DECODE, "first_tile(number + 1, FIXED, DOUBLES)", "FIXED * (number + 1)", 1),
    "a fixed part twice": ("doubling", DECODE, "part = back\n", "part = back * 0\n", 1),
    "fixed parts joined backwards": ("in turn", DECODE, "slot += tl.cast(back - part,", "slot += 0 * tl.cast(back - part,", 1),
    # numbers
    "what one row does not see": ("nan", DECODE, "if any_of(acc != acc) > 0:", "if any_of(acc != acc) > 1000000:", 1),
    "scale of the first head": (
        "heads",
        DECODE,
        "scale_log2 *= tl.load(k_scale_ptr + head)",
        "scale_log2 *= tl.load(k_scale_ptr)",
        1,
    ),
    "scales of the page behind": ("pages", DECODE, "scales + ids * heads_k, mask=col <", "scales + ids, mask=col <", 1),
    "scales of small pages": ("small pages", DECODE, "scales + ids * heads_k, mask=col +", "scales + ids, mask=col +", 1),
    "odd columns of keys by even ones of queries": ("pairs", DECODE, "tl.dot(odd, k_odd.T, s)", "tl.dot(even, k_odd.T, s)", 1),
    "odd columns behind even ones": ("pairs", DECODE, "tl.join(acc, acc_odd)", "tl.join(acc_odd, acc)", 1),
    "pairs not scaled back": ("pairs", DECODE, "by = row_scale * scale_log2", "by = scale_log2", 1),
    "keys in pairs not scaled": ("pairs of pages", DECODE, "by *= scales_of", "by = by + 0.0 * scales_of", 1),
    "values in pairs not scaled": ("pairs of pages", DECODE, "tl.dot(p, v) * by_v", "tl.dot(p, v)", 1),
    "queries in fp16 not scaled back": ("halves", DECODE, "s *= row_scale", "s *= 1.0", 1),
    "weights in fp16 not scaled back": ("halves", DECODE, "acc += o * (1.0 / HALVES)", "acc += o", 1),
    "values under halves not scaled": (
        "halves of pages",
        DECODE,
        "(scales_of(v_scales, ids,",
        "1.0 / (scales_of(v_scales, ids,",
        1,
    ),
    "values not scaled": ("pages", DECODE, "p *= scales_of(", "p *= 1.0 + 0.0 * scales_of(", 1),
    "sink of another head": (
        *("sink", COMBINE, "tl.load(sink_ptr + heads, mask=real, other=0.0)"),
        *("tl.load(sink_ptr + heads * 0, mask=real, other=0.0)", 1),
    ),
    "no soft-cap": ("sink", DECODE, "scale_log2, cap, slopes_log2)", "scale_log2, None, slopes_log2)", 1),
    "slopes of the first sequence": ("alibi", DECODE, "slopes_ptr + b64 * slope_stride", "slopes_ptr", 1),
    # what is written
    "new tokens lie late": ("append", APPEND, "- count + place", "- count + place + 1", 1),
    "turned the other way": ("append", APPEND, "tl.where(second, partner, -partner)", "tl.where(second, -partner, partner)", 1),
    "weight of the other part": ("merge", MERGE, "of_b = tl.exp(b_lse - pivot)", "of_b = tl.exp(a_lse - pivot)", 1),
    "LSE of the other layout": ("merge", MERGE, "(row // len_q * heads + head) * len_q + row % len_q", "head * rows + row", 1),
}


def noticed(case: str):
    """What a case says is wrong, or None."""
    ops_paged._launches.clear()
    try:
        if case == "append":
            return _append()
        if case == "merge":
            return _merge()
        if case == "in turn":
            return _in_turn()
        if case in SCORES:
            report = testing.check(Problem.parse(SCORES[case]), plan="split_kv[16x16 w4 s1 x2]", backward=False)
            return None if report.ok else str(report)
        text, lengths, kind, tile, page_scales = CASES[case]
        problem = PagedProblem.parse(text)
        given, flat, packed = paged.paged_operands(problem, lengths, kind, page_scales=page_scales)
        with poisoned():
            results = paged.attend_paged(problem, given, f"split_kv[{tile}]")
        report = check_forward(flat, packed, *paged.as_packed(problem, *results))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ops_paged._launches.clear()
    return None if report.ok else str(report)


def _in_turn():
    text, lengths, kind, tile, _ = CASES["doubling"]
    problem = PagedProblem.parse(text)
    given = paged.paged_operands(problem, lengths, kind)[0]
    with poisoned():
        both = [paged.attend_paged(problem, given, f"split_kv[{one}]") for one in (tile, tile.replace("c1", "r1"))]
    return None if all(map(torch.equal, *both)) else "other bits than by one program"


def _append():
    from rowmax.kernels.decode_launch import append

    pages = [torch.zeros(4, 4, 2, dim) for dim in (8, 6)]
    on_cpu = [t.clone() for t in pages]
    new = [torch.randn(3, 2, dim) for dim in (8, 6)]
    rest = (torch.tensor([[2, 0], [3, 1]]), torch.tensor([7, 4]), torch.tensor([0, 2, 3]))
    angles = torch.rand(8, 3).cos(), torch.rand(8, 3).sin()
    append(AppendOperands(*pages, *new, *rest, *angles), False)
    rowmax.append_kv(*on_cpu, *new, *rest[:2], cu_seqlens=rest[2], rotary_cos=angles[0], rotary_sin=angles[1])
    same = all(torch.allclose(one, other, rtol=1e-6, atol=1e-6) for one, other in zip(pages, on_cpu, strict=True))
    return None if same else "other numbers than on the CPU"


def _merge():
    from rowmax.kernels.decode_launch import merge_into

    a, b = torch.randn(2, 6, 2, 8)
    a_lse, lse = torch.randn(2, 6), torch.randn(3, 2, 2)
    want, _ = rowmax.merge((a, b), (a_lse, lse.transpose(0, 1).reshape(2, 6)))
    merge_into(a, a_lse, b, lse, 2)
    return None if torch.allclose(b, want, rtol=1e-6, atol=1e-6) else "another union"


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name, tmp_path):
    case, *patch = MUTANTS[name]
    with replaced("kernels", [tuple(patch)], tmp_path):
        assert noticed(case), f"the mutant '{name}' lives"


def test_the_kernels_themselves_live():
    for case in (*CASES, *SCORES, "in turn", "append", "merge"):
        assert noticed(case) is None, case
