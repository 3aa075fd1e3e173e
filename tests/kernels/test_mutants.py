"""Tests of the tests: one-line faults in the walk over tiles, each of which the rule must notice; as `mutants.py` does."""

import pytest
from mutants import (
    ADDRESS,
    BACKWARD,
    CPU_BACKWARD,
    CPU_FORWARD,
    CPU_PLAN,
    FORWARD,
    KERNEL_PLAN,
    LAUNCH,
    TILE,
    interpreted,
    kill,
    live,
    replaced,
)

# name -> (file, old, new, how often old occurs), or a list of them.
# The forward computes rows again whose result is not finite, and so mends some faults.
NOT_AGAIN = (FORWARD, "    if bad > 0:", "    if bad > 1:", 1)

KERNEL_MUTANTS = {
    # what a row sees
    "one key too many": (
        TILE,
        "seen = cols < tl.minimum(end_key(rows, shift, len_k, band), len_k)",
        "seen = cols < tl.minimum(end_key(rows, shift, len_k, band) + 1, len_k)",
        1,
    ),
    "one key too few": (
        TILE,
        "seen = cols < tl.minimum(end_key(rows, shift, len_k, band), len_k)",
        "seen = cols < tl.minimum(end_key(rows, shift, len_k, band) - 1, len_k)",
        1,
    ),
    "window starts one late": (TILE, "(cols >= first_key(rows, shift, band))", "(cols > first_key(rows, shift, band))", 1),
    "window starts one early": (
        TILE,
        "(cols >= first_key(rows, shift, band))",
        "(cols >= first_key(rows, shift, band) - 1)",
        1,
    ),
    "no left side": (TILE, "    elif band.left is not None:\n        seen = seen", "    elif False:\n        seen = seen", 1),
    "tail of the keys is not masked": (
        TILE,
        "seen = cols < tl.minimum(end_key(rows, shift, len_k, band), len_k)",
        "seen = cols < end_key(rows, shift, len_k, band) + 0 * len_k + (len_k == end_key(rows, shift, len_k, band)) * 64",
        1,
    ),
    "aligned to the top left": (FORWARD, "shift = len_k - len_q", "shift = 0", 1),
    # loop ranges
    "first key tile skipped": (
        TILE,
        "0, len_k) // BLOCK_N * BLOCK_N\n    end = tl.maximum(clamp(end_key(last",
        "0, len_k) // BLOCK_N * BLOCK_N + BLOCK_N\n    end = tl.maximum(clamp(end_key(last",
        1,
    ),
    "last key tile skipped": (
        TILE,
        "end = tl.maximum(clamp(end_key(last, shift, len_k, band), 0, len_k), start)",
        "end = tl.maximum(clamp(end_key(last, shift, len_k, band), 0, len_k) // BLOCK_N * BLOCK_N, start)",
        1,
    ),
    "full tiles rounded up": (
        TILE,
        "full_end = clamp(end_key(row, shift, len_k, band), 0, len_k) // BLOCK_N * BLOCK_N",
        "full_end = tl.cdiv(clamp(end_key(row, shift, len_k, band), 0, len_k), BLOCK_N) * BLOCK_N",
        1,
    ),
    "full tiles begin too early": (
        TILE,
        "full_start = tl.cdiv(clamp(first_key(last, shift, band), 0, len_k), BLOCK_N) * BLOCK_N",
        "full_start = clamp(first_key(last, shift, band), 0, len_k) // BLOCK_N * BLOCK_N",
        1,
    ),
    "full tiles measured at the wrong row": (
        TILE,
        "full_end = clamp(end_key(row, shift",
        "full_end = clamp(end_key(last, shift",
        1,
    ),
    "last query tile skipped": (
        TILE,
        "end = tl.maximum(clamp(most, 0, len_q), start)",
        "end = tl.maximum(clamp(most, 0, len_q) // BLOCK_M * BLOCK_M, start)",
        1,
    ),
    "first query tile skipped": (
        TILE,
        "0, len_q) // BLOCK_M * BLOCK_M\n    most",
        "0, len_q) // BLOCK_M * BLOCK_M + BLOCK_M\n    most",
        1,
    ),
    # softmax
    "sum not rescaled": (
        TILE,
        "return p, m_new, l * alpha + tl.sum(p, 1), alpha",
        "return p, m_new, l + tl.sum(p, 1), alpha",
        1,
    ),
    "accumulator not rescaled": (FORWARD, "acc = acc * alpha[:, None]", "acc = acc", 1),
    "maximum of the tile alone": (TILE, "m_new = tl.maximum(m, tl.max(s, 1))", "m_new = tl.max(s, 1)", 1),
    "finite start of the maximum": [
        (FORWARD, 'm = tl.full([BLOCK_M], float("-inf"), tl.float32)', "m = tl.full([BLOCK_M], -30.0, tl.float32)", 1),
        NOT_AGAIN,
    ],
    "no finite pivot": (
        TILE,
        'pivot = tl.where(m_new == float("-inf"), 0.0, m_new * scale_log2)',
        "pivot = m_new * scale_log2",
        1,
    ),
    "natural exponential": (
        TILE,
        "p = tl.exp2(s * scale_log2 - tl.expand_dims(pivot, 1))",
        "p = tl.exp(s * scale_log2 - tl.expand_dims(pivot, 1))",
        1,
    ),
    "LSE in base 2": (TILE, "(m * scale_log2 + tl.log2(l_safe)) * 0.6931471805599453", "(m * scale_log2 + tl.log2(l_safe))", 1),
    "LSE without the sum": (TILE, "(m * scale_log2 + tl.log2(l_safe)) * 0.69", "(m * scale_log2) * 0.69", 1),
    "LSE of an empty row is 0": (TILE, 'lse = tl.where(empty, float("-inf"), ', "lse = tl.where(empty, 0.0, ", 1),
    "empty rows divided by 0": (TILE, "l_safe = tl.where(empty, 1.0, l)", "l_safe = l", 1),
    "output not divided": (TILE, "return acc * tl.expand_dims(1.0 / l_safe, 1), lse", "return acc, lse", 1),
    "scale off by a hundredth": (FORWARD, "    total_k = len_k\n", "    total_k = len_k\n    scale_log2 *= 1.01\n", 1),
    "scale of the padded dimension": (
        FORWARD,
        "    total_k = len_k\n",
        "    total_k = len_k\n    scale_log2 = 1.4426950408889634 * BLOCK_D**-0.5\n",
        1,
    ),
    "negative scale not applied first": [(LAUNCH, "return problem.scale <= 0 or", "return", 1), NOT_AGAIN],
    "16-bit accumulator": (
        FORWARD,
        "acc = acc * alpha[:, None]",
        "acc = (acc * alpha[:, None]).to(tl.float16).to(tl.float32)",
        1,
    ),
    # heads, sequences, memory
    "KV heads taken in turn": (
        FORWARD,
        "k_base = head_base(k_ptr, k_strides, b, begin_k, head // GROUP)",
        "k_base = head_base(k_ptr, k_strides, b, begin_k, head % GROUP)",
        1,
    ),
    "wrong row stride": (
        FORWARD,
        "k_source, v_source, k_strides[1], v_strides[1], ranges",
        "k_source, v_source, k_strides[1], k_strides[1], ranges",
        2,
    ),
    "batch ignored": (ADDRESS, "pointer + b.to(tl.int64) * strides[0]", "pointer + 0 * b.to(tl.int64) * strides[0]", 1),
    "sequence begin ignored": (
        ADDRESS,
        "+ tl.cast(begin, tl.int64) * strides[1]",
        "+ 0 * tl.cast(begin, tl.int64) * strides[1]",
        1,
    ),
    "rows past the end are written": (
        ADDRESS,
        "tl.store(pointers, value.to(base.dtype.element_ty), mask=(rows < length)[:, None] & (dims < DIM)[None, :])",
        "tl.store(pointers, value.to(base.dtype.element_ty), mask=(rows < length + 1)[:, None] & (dims < DIM)[None, :])",
        1,
    ),
    "last row is not written": (
        ADDRESS,
        "value.to(base.dtype.element_ty), mask=(rows < length)[:, None]",
        "value.to(base.dtype.element_ty), mask=(rows < length - 1)[:, None]",
        1,
    ),
    "neighbour's LSE": (
        FORWARD,
        "* heads + head) * total_q + begin_q",
        "* heads + head // GROUP * GROUP) * total_q + begin_q",
        1,
    ),
    "a program too few": (
        LAUNCH,
        "return length // block + problem.batch if problem.packed",
        "return length // block + problem.batch - 1 if problem.packed",
        1,
    ),
    "LSE of no keys is not filled": (LAUNCH, "    lse.fill_(-torch.inf)\n", "    pass\n", 1),
    # gradients
    "delta missing": (TILE, "return p * (dp - delta)", "return p * dp", 1),
    "gradient of the LSE dropped": (BACKWARD, "delta -= tl.load(dlse_ptr", "tl.load(dlse_ptr", 1),
    "gradient of the LSE added": (BACKWARD, "delta -= tl.load(dlse_ptr", "delta += tl.load(dlse_ptr", 1),
    "dQ without the scale": (BACKWARD, "dq * scale", "dq", 2),
    "dK without the scale": (BACKWARD, "dk * scale", "dk", 1),
    "only the first head of a group": (BACKWARD, "tl.range(0, GROUP * tiles", "tl.range(0, tiles", 1),
    "LSE read in base 2": (
        BACKWARD,
        "tl.load(lse_ptr + base + rows, mask=rows < len_q, other=0.0) * LOG2E",
        "tl.load(lse_ptr + base + rows, mask=rows < len_q, other=0.0)",
        1,
    ),
    "huge LSE not rounded up": (BACKWARD, "lse_log2 + tl.abs(lse_log2) * 4.7", "lse_log2 - tl.abs(lse_log2) * 4.7", 1),
    "dS not masked": (BACKWARD, "  ds = tl.where(seen, ds, 0.0)\n        elif GIVEN", "  ds = ds\n        elif GIVEN", 1),
    "P of dV not masked": (BACKWARD, "            p = tl.where(seen, p, 0.0)\n", "", 1),
    "right edge skipped": (
        TILE,
        "edges = tl.cdiv(ranges[1] - ranges[0], BLOCK) + tl.cdiv(ranges[3] - ranges[2], BLOCK)",
        "edges = tl.cdiv(ranges[1] - ranges[0], BLOCK)",
        1,
    ),
    "left edge skipped": (
        TILE,
        "edges = tl.cdiv(ranges[1] - ranges[0], BLOCK) + tl.cdiv(ranges[3] - ranges[2], BLOCK)",
        "edges = tl.cdiv(ranges[3] - ranges[2], BLOCK)",
        1,
    ),
    "interior skipped": (TILE, "return (ranges[2] - ranges[1]) // BLOCK", "return (ranges[2] - ranges[1]) // BLOCK * 0", 1),
    "right edge starts at the left": (TILE, "ranges[2] + (turn - left) * BLOCK", "ranges[0] + turn * BLOCK", 1),
    "heads of a group in the wrong turn": (BACKWARD, "member = turn // tiles", "member = turn % GROUP", 1),
    "dO read with the strides of q": (BACKWARD, "row, do_strides[1], len_q, DIM_V", "row, q_strides[1], len_q, DIM_V", 1),
    "NaN of V spreads over its tile": NOT_AGAIN,
}

# (spelling, kind, layout, lengths): small, and each with the power to show some of the faults.
CASES = [
    ("b1 h1 q20 k20 d16 fp32", "constant(133120)", "contiguous", None),
    ("b2 h2/1 q37 k53 d24/16 fp16 window(9,4)", "probe", "gaps", None),
    ("b1 h4/2 q20 k40 d16 fp32 causal", "normal", "contiguous", None),
    ("b3 h2/1 q50 k50 d16 fp16 packed causal", "normal", "heads_first", ((17, 20), (0, 9), (33, 21))),
    ("b1 h2 q40 k24 d16 fp16 causal", "normal", "contiguous", None),
    ("b1 h1 q20 k72 d16 fp16", "shift(-120)", "contiguous", None),
    ("b1 h2 q37 k40 d24/16 fp16 scale=-0.3", "spiky", "heads_first", None),
    ("b1 h1 q40 k40 d16 fp16 causal", "nan(v)", "contiguous", None),
    ("b1 h1 q16 k72 d16 fp16", "sparse_int", "contiguous", None),
    ("b1 h2 q20 k0 d16 fp16", "normal", "contiguous", None),
]


WALK, HALF, PIECES = "cpu/blocks.py", "cpu/half_scores.py", "cpu/pieces.py"
CPU_MUTANTS = {
    "one key too many": (
        WALK,
        "end = end_key(self.row, shift, len_k, band) - low if",
        "end = end_key(self.row, shift, len_k, band) - low + 1 if",
        1,
    ),
    "one key too few": (
        WALK,
        "end = end_key(self.row, shift, len_k, band) - low if",
        "end = end_key(self.row, shift, len_k, band) - low - 1 if",
        1,
    ),
    "window starts one late": (WALK, "band) - low if band.left is not None", "band) - low + 1 if band.left is not None", 1),
    "window starts one early": (WALK, "band) - low if band.left is not None", "band) - low - 1 if band.left is not None", 1),
    "nothing hidden": (WALK, "part.add_(edge)", "part.add_(0 * edge.clamp(min=0))", 1),
    "aligned to the top left": (WALK, "return self.len_k - self.len_q", "return 0", 1),
    "first tile skipped": (WALK, "range(first, end, width)", "range(first + width, end, width)", 1),
    "first row that sees a key skipped": (WALK, "in reversed(range(", "in reversed(range(1 + ", 1),
    "KV heads taken in turn": (
        WALK,
        "t.unflatten(2, (heads_k, -1)).movedim(1, 3)",
        "t.unflatten(2, (-1, heads_k)).transpose(2, 3).movedim(1, 3)",
        1,
    ),
    "keys of the queries' rows": (WALK, "(cols, bounds_k))", "(cols, bounds_q))", 1),
    "last sequence skipped": (WALK, "for i in range(problem.batch):", "for i in range(problem.batch - 1):", 1),
    "scale off by a hundredth": (CPU_FORWARD, "problem.scale * LOG2E", "problem.scale * 1.01 * LOG2E", 1),
    "LSE in base 2": (CPU_FORWARD, "import LN2, LOG2E", "import LOG2E\n\nLN2 = 1.0", 1),
    "tile not normalised": (CPU_FORWARD, "if blind else 1.0 / l", "if blind else 0 * l + 1.0", 1),
    "merge without weights": (
        CPU_FORWARD,
        "a, b = torch.exp2(lse - pivot), torch.exp2(tile_lse - pivot)",
        "a, b = torch.exp2(lse - pivot), torch.ones_like(lse)",
        1,
    ),
    "LSE without the sum": (CPU_FORWARD, "lse = l.log2() if m is None else m + l.log2()", "lse = 0 * l if m is None else m", 1),
    "LSE without the pivot": (CPU_FORWARD, "l.log2() if m is None else m + l.log2()", "l.log2()", 1),
    "scores never need a pivot": (CPU_FORWARD, "m = None if bounded else", "m = None if True else", 1),
    "delta missing": (CPU_BACKWARD, "-1.0", "0.0", 1),
    "delta missing where products are fp32": (CPU_BACKWARD, "v, beta=-1, out=out)", "v, beta=0, out=out)", 1),
    "pieces of a window see a key too few": (PIECES, "Band(left + right, 0)", "Band(left + right - 1, 0)", 1),
    "gradients of a piece's first keys alone": (PIECES, "range(0, part.shape[2], STEP)", "range(0, STEP, STEP)", 1),
    "pieces not scaled": (PIECES, ", alpha=factor)", ")", 1),
    "gradient of the LSE dropped": (CPU_BACKWARD, "delta -= grad_lse.movedim(-1, -2)", "pass", 1),
    "gradient of the LSE added": (CPU_BACKWARD, "delta -= grad_lse", "delta += grad_lse", 1),
    "dQ without the scale": (CPU_BACKWARD, "beta=0, alpha=chunk.scale / chunk.unit", "beta=0, alpha=1 / chunk.unit", 1),
    "dK without the scale": (CPU_BACKWARD, "(dk, dk_sum, chunk.scale)", "(dk, dk_sum, 1.0)", 1),
    "dK of the last block alone": (CPU_BACKWARD, "self.value()[:, cols].add_(", "self.value().zero_()[:, cols].add_(", 1),
    "dQ of the last tile alone": (
        CPU_BACKWARD,
        "tile_dq if row_dq is None else row_dq.to(",
        "tile_dq if True else row_dq.to(",
        1,
    ),
    "P of the backward not hidden": (CPU_BACKWARD, "        block.hide(x, cols, scratch, exact)\n", "", 1),
    "values that show rounded scores are not looked for": [
        (HALF, 'return bool((error.abs() <= UNIT_ROUNDOFF["bf16"] * terms).all())', "return True", 1),
        (HALF, "return bool((most <= 6 * mean).all())", "return True", 1),
    ],
    "columns of the last tile": (WALK, "part = t[:, cols]", "part = t[:, -len(range(t.shape[1])[cols]) :]", 1),
    "rounded scores not hidden": (
        HALF,
        "    block.hide(s, cols, scratch, exact=False)\n    p = torch.softmax",
        "    p = torch.softmax",
        1,
    ),
    "rounded weights of the backward not hidden": (
        HALF,
        "        block.hide(x, cols, scratch, exact=False)\n        p = x.exp2_()",
        "        p = x.exp2_()",
        1,
    ),
}
# Short sequences take rounded scores too, and so do machines where bf16 products are slow.
CPU_ALWAYS = [
    (WALK, "if not torch.ops.mkldnn._is_mkldnn_bf16_supported():", "if False:", 1),
    (HALF, "_LEAST_SCORES = 6 * 2**20", "_LEAST_SCORES = 0", 1),
    (HALF, "_LEAST_AVERAGE = 640", "_LEAST_AVERAGE = 0", 1),
]
CPU_MUTANTS = {name: [*CPU_ALWAYS, *([edits] if isinstance(edits, tuple) else edits)] for name, edits in CPU_MUTANTS.items()}
# Scores are rounded where rows see at least 256 keys.
CPU_CASES = [
    ("b1 h2 q600 k600 d64 bf16 causal", "normal", "contiguous", None),
    ("b1 h2 q600 k600 d64 bf16 causal", "v_onehot", "contiguous", None),
    ("b1 h8 q500 k500 d8 fp32 window(100,0)", "normal", "contiguous", None),  # cut into pieces
]


@interpreted
@pytest.mark.parametrize("name", KERNEL_MUTANTS)
def test_kernel_mutant_is_killed(name, tmp_path):
    kill(KERNEL_MUTANTS, name, tmp_path, (CASES, KERNEL_PLAN))


@interpreted
def test_the_kernels_themselves_live(tmp_path):
    with replaced("kernels", [], tmp_path):
        live((CASES, KERNEL_PLAN))


@pytest.mark.parametrize("name", CPU_MUTANTS)
def test_cpu_mutant_is_killed(name, tmp_path):
    kill(CPU_MUTANTS, name, tmp_path, (CASES, CPU_PLAN), (CPU_CASES, "tiled"))


def test_the_cpu_path_itself_lives(tmp_path):
    with replaced("cpu", CPU_ALWAYS, tmp_path):
        live((CASES, CPU_PLAN), (CPU_CASES, "tiled"))
