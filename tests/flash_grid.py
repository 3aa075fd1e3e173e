"""The grid of FlashAttention's public tests, in terms of shapes: cases drawn from a number, run through `rowmax.flash_attn`.

Its criterion: the largest error at most twice that of dense attention in the inputs' own type, for gradients three times, both
against fp64. It rejects right results where the other computation is exact by luck, as of one visible key: what it rejects must
pass the rule of `rowmax.testing`, and `held` tells how many there were.

`test_flash_attn.py` runs 300 cases on the CPU, mostly small ones; `gpu_grid.py` thousands on a GPU.
"""

import itertools
import math
import random
from typing import NamedTuple, Optional

import torch

from rowmax import Problem, flash_attn, reference, testing
from rowmax.flash_attn import flash_attn_with_kvcache
from rowmax.problem import Operands

DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
FORMS = {"func": 4, "kvpacked": 1, "qkvpacked": 2, "varlen": 4, "varlen_kvpacked": 1, "varlen_qkvpacked": 2, "pages": 2}
CACHES = {"kvcache": 2, "kvcache_pages": 2, "kvcache_index": 1, "kvcache_leftpad": 1}
LONGEST = 2048


class Case(NamedTuple):
    """`window`: -1 is no limit. Of caches: new tokens, rotated pairs, whether those are neighbours, parts of keys."""

    number: int
    form: str
    dtype: str
    batch: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    dim: int
    causal: bool
    window: tuple[int, int]
    softcap: float
    alibi: str
    deterministic: bool
    page: int = 0
    new: int = 0
    pairs: int = 0
    interleaved: bool = False
    splits: int = 0
    dropout: float = 0.0


class Outcome(NamedTuple):
    """`ratios`: error over what the criterion allows. `held`: none is above 1. `error`: what is wrong, or nothing."""

    ratios: dict[str, float]
    held: bool
    error: str


def draw(number: int, small: bool = False) -> Case:
    """Case `number`. `small`: for a CPU; long sequences are rare, and have few heads."""
    rnd = random.Random(f"flash {number} {small}")
    forms = {**FORMS, **CACHES}
    form = rnd.choices(list(forms), list(forms.values()))[0]
    cache, same = form in CACHES, form.endswith("qkvpacked")

    def length() -> int:
        return min(int(2 ** (11 * rnd.random() ** (1.4 if small else 0.6))), LONGEST)

    dim, batch, heads_k = rnd.choice(DIMS), rnd.choice((1, 2, 3, 4)), rnd.choice((1, 2, 3))
    group = 1 if same else rnd.choice((1, 1, 2, 3))
    len_k = length() if rnd.random() < 0.93 else rnd.choice((1024, 2047, 2048))
    len_q = len_k if same or rnd.random() < 0.3 else length()
    if cache:
        len_k, len_q = max(len_k, 16), rnd.choice((1, 1, 1, 2, 5, min(len_q, 600)))
    most = 2**33 if not small else 2**29 if rnd.random() < 0.05 else 2**25
    while batch * heads_k * group * len_q * len_k * (dim if small else 256) > most:  # on a GPU 2^25 scores, for their memory
        if batch > 1:
            batch = 1
        elif heads_k * group > 2:
            heads_k, group = 1, min(group, 2)
        elif len_q >= len_k or cache:
            len_q, len_k = len_q // 2 if not same else len_k // 2, len_k if not same else len_k // 2
        else:
            len_k //= 2
    local = rnd.random() < 0.3
    case = Case(
        number,
        form,
        rnd.choice(("fp16", "bf16")),
        batch,
        (heads_k * group, heads_k),
        (len_q, len_k),
        dim,
        causal=rnd.random() < 0.5,
        window=(rnd.randint(0, len_k), rnd.randint(0, len_k)) if local else (-1, -1),
        softcap=rnd.choice((0.0, 0.0, 15.0, 50.0)),
        alibi=rnd.choice(("", "", "head", "batch")),
        deterministic=rnd.random() < 0.5,
    )
    if form == "pages":
        return case._replace(page=rnd.choice((16, 64, 256)))
    if not cache:
        dropped = not case.softcap and rnd.random() < 0.3
        return case._replace(dropout=0.17) if dropped else case
    new = rnd.choice((0, 0, 1, len_q, min(7, len_k)))
    pairs = rnd.choice((0, dim // 8 * 4, min(dim // 2, 8))) if new else 0
    page = rnd.choice((16, 64, 256)) if form == "kvcache_pages" else 0
    return case._replace(
        new=min(new, len_k), pairs=pairs, page=page, interleaved=rnd.random() < 0.5, splits=rnd.choice((0, 0, 1, 3))
    )


def check(case: Case, device: str) -> Outcome:
    return (_check_cache if case.form in CACHES else _check_call)(case, device)


# ---- the definition ------------------------------------------------------------------------------------------------


def _product(a, b):
    """In the type of both; a CPU multiplies fp16 forty times slower than fp32, which rounds once as well."""
    slow = a.dtype == torch.float16 and a.device.type == "cpu"
    return (a.float() @ b.float()).to(a.dtype) if slow else a @ b


def dense(case: Case, q, k, v, slopes, kept=None):
    """`(out [Tq, H, D], lse [H, Tq])` of one sequence, q `[Tq, H, D]`, in their type. `kept`: by dropout, `[H, Tq, Tk]`."""
    group = case.heads[0] // case.heads[1]
    q, k, v = q.transpose(0, 1), *(t.transpose(0, 1).repeat_interleave(group, 0) for t in (k, v))
    scores = _product(q * case.dim**-0.5, k.mT)
    if case.softcap:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    len_q, len_k = q.shape[1], k.shape[1]
    distance = torch.arange(len_k, device=q.device) - torch.arange(len_q, device=q.device).unsqueeze(1) - (len_k - len_q)
    if slopes is not None:
        scores = scores - (slopes[:, None, None] * distance.abs()).to(scores.dtype)
    left, right = case.window
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if case.causal or right >= 0:
        seen &= distance <= (0 if case.causal else right)
    dead = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(dead, 0.0)
    p = torch.softmax(scores, -1).masked_fill(dead, 0.0) if len_k else scores
    lse = torch.logsumexp(scores, -1).masked_fill(dead.squeeze(-1), torch.inf) if len_k else scores.new_full(
        scores.shape[:-1], torch.inf
    )  # fmt: skip
    if kept is not None:
        p = torch.where(kept, p * reference.dropout_factor(case.dropout), 0.0)
    return _product(p, v).transpose(0, 1), lse


def _dense_all(case: Case, q, k, v, slopes, kept=None):
    """Of lists of sequences: both results as lists."""
    pairs = []
    for b in range(len(q)):
        own = None if slopes is None else slopes if slopes.dim() == 1 else slopes[b]
        left = None if kept is None else kept[b, :, : q[b].shape[0], : k[b].shape[0]]
        pairs.append(dense(case, q[b], k[b], v[b], own, left))
    return [out for out, _ in pairs], [lse for _, lse in pairs]


# ---- the public functions, but that of caches ----------------------------------------------------------------------


def _tensors(case: Case, device: str):
    """q, k, v as lists of sequences, gradients of the outputs, slopes, and the generator."""
    rnd, generator = random.Random(f"lengths {case.number}"), torch.Generator().manual_seed(case.number)
    (len_q, len_k), (heads_q, heads_k) = case.lengths, case.heads
    own = [case.lengths] * case.batch
    if "varlen" in case.form or case.form == "pages":
        own = [(rnd.randint(0, len_q), rnd.randint(0, len_k)) for _ in range(case.batch)]
        own = [(a, a) for a, _ in own] if case.form.endswith("qkvpacked") else own
        if case.form == "pages":  # keys behind queries, as in a cache
            own = [(min(a, b), b) for a, b in own]

    def normal(length, heads, factor=1.0):
        values = torch.randn(length, heads, case.dim, generator=generator) * factor
        return values.to(getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[case.dtype])).to(device)

    q = [normal(a, heads_q, case.softcap / 4 or 1.0) for a, _ in own]  # scores that the cap bends
    k, v = ([normal(b, heads_k) for _, b in own] for _ in range(2))
    grads = [normal(a, heads_q) for a, _ in own]
    slopes = None
    if case.alibi:
        shape = (heads_q,) if case.alibi == "head" else (case.batch, heads_q)
        slopes = (torch.rand(shape, generator=generator) * 0.3).to(device)
    return q, k, v, grads, slopes, own


def _check_call(case: Case, device: str) -> Outcome:
    q, k, v, grads, slopes, own = _tensors(case, device)
    inputs = (q, k, v)
    seed = _seeded(case, device)
    with testing.poisoned():
        out, lse, mask, mine = _attend(case, *inputs, grads, slopes, own)
    kept = None if not case.dropout else ~torch.signbit(mask)  # negative where dropped, and a weight of -0 is
    rows = [a for a, _ in own]
    found = [list(out.split(rows)) if out.dim() == 3 else list(out), *mine]
    lses = list(lse.split(rows, 1)) if lse.dim() == 2 else list(lse)
    results: list = []
    for wide in (True, False):
        leaves = [[(t.double() if wide else t).detach().requires_grad_(case.form != "pages") for t in ts] for ts in inputs]
        outs, exact_lses = _dense_all(case, *leaves, slopes, kept)
        results.append([outs])
        if case.form != "pages":
            flat = [t for ts in leaves for t in ts]
            given = [g.to(o.dtype) for o, g in zip(outs, grads, strict=True)]
            found_grads = torch.autograd.grad(outs, flat, given, allow_unused=True, materialize_grads=True)
            results[-1] += [list(found_grads[i * case.batch : (i + 1) * case.batch]) for i in range(3)]
        if wide:
            error = _wrong_lse(lses, exact_lses)
    names = ("out", "dq", "dk", "dv")[: len(found)]
    ratios = {name: _ratio(name, *three) for name, *three in zip(names, found, *results, strict=True)}
    held = all(ratio <= 1.0 for ratio in ratios.values())
    if not held and not error:
        error = _by_the_rule(case, inputs, slopes, own, found, grads, seed)
    return Outcome(ratios, held, error)


def _attend(case: Case, q, k, v, grads, slopes, own):
    """`(out, lse, S_dmask, [dq, dk, dv])`: gradients as lists of sequences; none for pages."""
    tail = {"causal": case.causal, "window_size": case.window, "softcap": case.softcap, "alibi_slopes": slopes}
    tail |= {"deterministic": case.deterministic, "return_attn_probs": True, "dropout_p": case.dropout}
    packed, device = "varlen" in case.form or case.form == "pages", q[0].device
    q, k, v, grad = (torch.cat(ts) if packed else torch.stack(ts) for ts in (q, k, v, grads))
    if case.form == "pages":
        return _attend_pages(case, q, k, v, own, tail)
    leaves, most = [t.requires_grad_() for t in (q, k, v)], case.lengths
    cu = _cu_seqlens(own, device)
    axis = 1 if packed else 2
    if case.form == "func":
        found = flash_attn.flash_attn_func(q, k, v, **tail)
    elif case.form == "kvpacked":
        found = flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], axis), **tail)
    elif case.form == "qkvpacked":
        found = flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], axis), **tail)
    elif case.form == "varlen":
        found = flash_attn.flash_attn_varlen_func(q, k, v, *cu, *most, **tail)
    elif case.form == "varlen_kvpacked":
        found = flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], axis), *cu, *most, **tail)
    else:
        found = flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], axis), cu[0], most[0], **tail)
    assert case.dropout or found[2].numel() == 0
    mine = torch.autograd.grad(found[0], leaves, grad)
    rows = [[n[which] for n in own] for which in (0, 1, 1)]
    split = [list(t.split(n)) if packed else list(t) for t, n in zip(mine, rows, strict=True)]
    return found[0].detach(), found[1].detach(), found[2], split


def _attend_pages(case: Case, q, k, v, own, tail):
    """Keys in pages in any order, NaN around them."""
    rnd, device, size = random.Random(f"pages {case.number}"), q.device, case.page
    columns = max(-(-max((b for _, b in own), default=0) // size), 1)
    order = rnd.sample(range(case.batch * columns + 3), case.batch * columns)
    table = torch.tensor(order, dtype=torch.int32, device=device).view(case.batch, columns)
    pages = [torch.full((len(order) + 3, size, *t.shape[1:]), torch.nan, dtype=t.dtype, device=device) for t in (k, v)]
    begin = 0
    for b, (_, length) in enumerate(own):
        at = torch.arange(length, device=device)
        for t, page in zip((k, v), pages, strict=True):
            page[table[b, at // size].long(), at % size] = t[begin : begin + length]
        begin += length
    cu = _cu_seqlens(own, device)
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, *pages, *cu, *case.lengths, block_table=table, **tail)
    return out, lse, None, []


def _seeded(case: Case, device: str) -> torch.Tensor:
    """The seed of dropout that the call is going to draw."""
    torch.manual_seed(case.number)
    seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=device)
    torch.manual_seed(case.number)
    return seed


def _cu_seqlens(own, device) -> list[torch.Tensor]:
    """Of queries, and of keys."""
    columns = zip(*own, strict=True)
    return [torch.tensor([0, *itertools.accumulate(column)], dtype=torch.int32, device=device) for column in columns]


def _ratio(name: str, mine: list, exact: list, same: list) -> float:
    """Largest error over what the criterion allows it to be."""

    def worst(results):
        pairs = zip(results, exact, strict=True)
        return max((float((x.detach().double() - y.detach()).abs().max()) for x, y in pairs if x.numel()), default=0.0)

    if any(not bool(torch.isfinite(t).all()) for t in mine):
        return math.inf
    return worst(mine) / ((2 if name == "out" else 3) * worst(same) + 1e-5)


def _wrong_lse(mine: list, exact: list) -> str:
    for one, other in zip(mine, exact, strict=True):
        one, other = one.detach().double(), other.detach().double()
        if not torch.equal(torch.isposinf(one), torch.isposinf(other)):
            return "lse: +inf elsewhere than where a row sees nothing"
        error = (one - other).nan_to_num(0.0, 0.0, 0.0).abs()
        if bool((error > 2e-4 + 2.0**-20 * (other.nan_to_num(0.0, 0.0, 0.0).abs() + 100)).any()):
            return f"lse: off by {float(error.max()):.3g}"
    return ""


def _by_the_rule(case: Case, inputs, slopes, own, found, grads, seed) -> str:
    """What the rule of `rowmax.testing` finds wrong."""
    device = inputs[0][0].device
    cu = _cu_seqlens(own, device)
    operands = Operands(*(torch.cat(ts) for ts in inputs), *cu, slopes)
    left, right = (None if side < 0 else side for side in case.window)
    numbers = {"softcap": case.softcap}
    if case.dropout:
        operands, numbers = operands._replace(seed=seed), {**numbers, "dropout": case.dropout}
    problem = Problem.describe(operands, left=left, right=0 if case.causal else right, **numbers)
    out = torch.cat(found[0]).detach()
    report = testing.check_forward(problem, operands, out)
    if len(found) > 1:
        mine = [torch.cat(ts) for ts in found[1:]]
        report = report.merged(testing.check_backward(problem, operands, mine, torch.cat(grads), None, out))
    return "" if report.ok else str(report)


# ---- caches --------------------------------------------------------------------------------------------------------


def _check_cache(case: Case, device: str) -> Outcome:
    rnd, generator = random.Random(f"cache {case.number}"), torch.Generator().manual_seed(case.number)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[case.dtype]
    (len_q, room), (heads_q, heads_k), batch = case.lengths, case.heads, case.batch

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    room = -(-room // case.page) * case.page if case.page else room
    before = [rnd.randint(0, room - case.new) for _ in range(batch)]
    index = rnd.sample(range(batch + 2), batch) if case.form == "kvcache_index" else list(range(batch))
    leftpad = [rnd.randint(0, n) for n in before] if case.form == "kvcache_leftpad" else [0] * batch
    whole = [normal(batch + 2 * (case.form == "kvcache_index"), room, heads_k, case.dim) for _ in range(2)]
    options: dict = {}
    table = None
    if case.form == "kvcache_index":
        options["cache_batch_idx"] = torch.tensor(index, dtype=torch.int32, device=device)
    if case.form == "kvcache_leftpad":
        options["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32, device=device)
    if case.page:
        columns = room // case.page
        table = torch.tensor(rnd.sample(range(batch * columns + 3), batch * columns), device=device).view(batch, columns)
        shape = (batch * columns + 3, case.page, heads_k, case.dim)
        caches = [torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in "kv"]
        for cache, source in zip(caches, whole, strict=True):
            cache[table.flatten()] = source.view(-1, case.page, heads_k, case.dim)
        options["block_table"] = table.int()
    else:
        caches = [t.clone() for t in whole]
    q, fresh = normal(batch, len_q, heads_q, case.dim), [normal(batch, case.new, heads_k, case.dim) for _ in range(2)]
    angles = (torch.rand(room + len_q, max(case.pairs, 1), generator=generator) * 6).to(device)
    if case.new:
        options |= {"k": fresh[0], "v": fresh[1]}
    if case.pairs:
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": case.interleaved}
    slopes = None
    if case.alibi:
        slopes = (torch.rand((heads_q,) if case.alibi == "head" else (batch, heads_q), generator=generator) * 0.3).to(device)
    lengths = torch.tensor(before, dtype=torch.int32, device=device)
    with testing.poisoned():
        out, lse = flash_attn_with_kvcache(
            *(q, *caches), cache_seqlens=before[0] if batch == 1 and rnd.random() < 0.5 else lengths, causal=case.causal,
            window_size=case.window, softcap=case.softcap, alibi_slopes=slopes, num_splits=case.splits,
            return_softmax_lse=True, **options,
        )  # fmt: skip
    stored = caches if table is None else [t[table].flatten(1, 2) for t in caches]

    exact_q, same_q, own = [], [], [[], []]
    for b, (start, row, pad) in enumerate(zip(before, index, leftpad, strict=True)):
        new = fresh[0][b].double()
        wide_q = q[b].double()
        if case.pairs:
            along = case.causal or case.window != (-1, -1)
            new = _turned(new, cos, sin, torch.arange(case.new, device=device) + start, case.interleaved)
            wide_q = _turned(wide_q, cos, sin, torch.arange(len_q, device=device) * along + start, case.interleaved)
        whole[0][row, start : start + case.new] = new.to(dtype)
        whole[1][row, start : start + case.new] = fresh[1][b]
        exact_q.append(wide_q)
        same_q.append(wide_q.to(dtype))
        for side in range(2):
            own[side].append(stored[side][row, pad : start + case.new])
    for name, cache, want in zip("kv", stored, whole, strict=True):
        error, allowed = (cache.double() - want.double()).abs(), 0.0
        if case.pairs and name == "k":  # one unit in the last place, of a pair's size
            allowed = torch.finfo(dtype).eps * 2 * want.double().abs().amax(-1, keepdim=True).clamp(min=1.0)
        if bool((error > allowed).any()):
            return Outcome({}, False, f"{name}_cache: off by {float(error.max()):.3g}")
    exact, exact_lse = _dense_all(case, exact_q, *([t.double() for t in ts] for ts in own), slopes)
    same, _ = _dense_all(case, same_q, *own, slopes)
    error = _wrong_lse(list(lse), exact_lse) if not case.pairs else ""
    ratio = _ratio("out", list(out), exact, same)
    held = ratio <= 1.0
    if not held and not error:
        error = _cache_by_the_rule(case, same_q, own, slopes, list(out))
    return Outcome({"out": ratio}, held, error)


def _cache_by_the_rule(case: Case, q: list, own: list, slopes: Optional[torch.Tensor], out: list) -> str:
    sizes = [(a.shape[0], b.shape[0]) for a, b in zip(q, own[0], strict=True)]
    return _by_the_rule(case, (q, *own), slopes, sizes, [out], [], None)


def _turned(x, cos, sin, positions, interleaved: bool):
    """x `[T, H, D]` in fp64, its pairs turned as complex numbers."""
    cos, sin = (t[positions.clamp(max=t.shape[0] - 1)].double().unsqueeze(1) for t in (cos, sin))
    pairs, (part, rest) = cos.shape[-1], (x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :])
    numbers = part.unflatten(-1, (pairs, 2)) if interleaved else torch.stack(part.chunk(2, -1), -1)
    turned = torch.view_as_real(torch.view_as_complex(numbers.contiguous()) * torch.complex(cos, sin))
    return torch.cat([turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), -1), rest], -1)
