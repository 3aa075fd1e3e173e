"""The peers that rowmax is timed beside, each behind the same call: `out = forward(q, k, v)` in rowmax's layout.

`build(who, problem, operands, ...)` returns that call, or raises `Refused` with the reason: not installed, or a problem the
peer has no kernel for. Nothing here falls back: a peer runs with the back-end its name says or not at all.

    rowmax  this package                     cudnn  torch SDPA, cuDNN back-end       fa2  torch SDPA, flash back-end
    sdpa    torch SDPA as it dispatches      flex   FlexAttention, compiled          fa3, fa4  FlashAttention-3 and -4

With a soft-cap or slopes fa2 is the package flash_attn: torch's copy has neither.
Nobody but rowmax is timed with dropout: others draw by generators of their own, so that no check says whether they are right.
"""

import functools
import importlib
import math
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import rowmax
from rowmax.mask import Band
from rowmax.problem import Operands, Problem

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
CAUSAL = Band(None, 0)
MAX_MASK_BYTES = 2**31  # of a dense mask made for a peer that has no better way


class Refused(Exception):
    """This peer does not run this problem here; the text says why."""


def installed(device: torch.device) -> list[str]:
    """Everyone who can be timed on this device, FlexAttention excepted: it is asked for by name, as it compiles each shape."""
    if device.type == "cpu":
        return ["rowmax", "sdpa"]
    return ["rowmax", "cudnn", "fa2", *(name for name, find in (("fa3", _fa3), ("fa4", _fa4)) if find() is not None)]


def build(who: str, problem: Problem, operands: Operands, *, plan: str = "") -> Forward:
    """The call to time. `operands`: what `as_taken` returned; `plan`: rowmax's forced plan, as in `rowmax.attention(plan=...)`.

    Raises:
        Refused: says why.
    """
    make = {
        "rowmax": functools.partial(_rowmax, plan=plan),
        "cudnn": functools.partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
        "fa2": _flash2,
        "sdpa": functools.partial(_sdpa, backend=None),
        "flex": _flex,
        "fa3": _flash3,
        "fa4": _flash4,
    }.get(who)
    if make is None:
        raise Refused(f"nobody is called '{who}'; known are rowmax, cudnn, fa2, sdpa, flex, fa3, fa4")
    if problem.dropout and who != "rowmax":
        raise Refused("it drops other weights than the seed says, and the check knows those of the seed")
    return make(problem, operands)


def as_taken(who: str, problem: Problem, operands: Operands) -> Operands:
    """The operands as this peer takes them, made before anything is timed: torch's operator has one additive mask, so that its
    bias is one with the band and the mask in it. Their gradients are those of the bias: 0 where nothing is seen."""
    if who not in ("sdpa", "cudnn") or not problem.bias or (problem.band == Band() and not problem.mask):
        return operands
    seen = dense_mask(problem, operands)
    shape = torch.broadcast_shapes(operands.bias.shape, seen.shape)
    if math.prod(shape) > max(MAX_MASK_BYTES, operands.bias.numel()):
        raise Refused(f"a dense bias of {list(shape)} would be needed")
    return operands._replace(bias=operands.bias.masked_fill(~seen, -torch.inf), mask=None)


# ---- rowmax ----------------------------------------------------------------------------------------------------------


def _rowmax(problem: Problem, operands: Operands, plan: str) -> Forward:
    common = {
        "window": tuple(problem.band),
        "scale": problem.scale,
        "deterministic": problem.deterministic,
        "plan": plan or None,
    }
    common |= {"softcap": problem.softcap or None, "alibi_slopes": operands.slopes, "sink": operands.sink}
    if problem.dropout:
        common |= {"dropout_p": problem.dropout, "seed": operands.seed}
    if not problem.packed:
        common |= {"bias": operands.bias, "mask": operands.mask}
        return lambda q, k, v: rowmax.attention(q, k, v, **common)
    cu_q, cu_k = operands[3:5]
    common |= {"max_seqlen_q": problem.max_len_q, "max_seqlen_k": problem.max_len_k}
    return lambda q, k, v: rowmax.attention_varlen(q, k, v, cu_q, cu_k, **common)


# ---- torch SDPA ------------------------------------------------------------------------------------------------------


def dense_mask(problem: Problem, operands: Operands) -> torch.Tensor:
    """Boolean, true where query i sees key j: `[len_q, len_k]`, or of the shape that a mask makes of it. Packed sequences
    become blocks on the diagonal."""
    device = operands.q.device
    if problem.len_q * problem.len_k > MAX_MASK_BYTES:
        raise Refused(f"a dense mask of {problem.len_q} x {problem.len_k} bytes would be needed")
    i = torch.arange(problem.len_q, device=device)[:, None]
    j = torch.arange(problem.len_k, device=device)[None, :]
    if not problem.packed:
        distance = j - (i + problem.len_k - problem.len_q)
        seen = torch.ones_like(distance, dtype=torch.bool)
    else:
        begin_q, begin_k = operands.cu_seqlens_q.long(), operands.cu_seqlens_k.long()
        of_i, of_j = (torch.searchsorted(begin[1:], t, right=True) for begin, t in ((begin_q, i), (begin_k, j)))
        seen = of_i == of_j
        last = problem.batch - 1
        ends = begin_k[1:][of_i.clamp(max=last)] - begin_q[1:][of_i.clamp(max=last)]
        distance = j - (i + ends)
    left, right = problem.band
    if left is not None:
        seen = seen & (distance >= -left)
    if right is not None:
        seen = seen & (distance <= right)
    if operands.mask is None:
        return seen
    shape = torch.broadcast_shapes(operands.mask.shape, seen.shape)
    if math.prod(shape) > max(MAX_MASK_BYTES, operands.mask.numel()):
        raise Refused(f"a dense mask of {list(shape)} bytes would be needed")
    return seen & operands.mask


def _sdpa(problem: Problem, operands: Operands, backend) -> Forward:
    for there, what in ((problem.softcap, "soft-cap"), (problem.sink, "sink")):
        if there:
            raise Refused(f"torch's operator has no {what}")
    if problem.alibi:
        raise Refused("torch's operator has ALiBi only as a dense bias of q's type, which rounds distances: another result")
    if problem.pairs and backend is SDPBackend.FLASH_ATTENTION:
        raise Refused("torch's flash back-end takes no bias and no mask")
    if problem.bias.endswith(",fp32"):
        raise Refused("torch's operator takes a bias of q's type only")
    plain = problem.band == Band() and not problem.packed and not problem.pairs
    square_causal = problem.band == CAUSAL and problem.len_q == problem.len_k and not (problem.packed or problem.pairs)
    if backend is not None and not (plain or square_causal or problem.pairs):
        raise Refused("torch's fused back-ends take full and square causal attention only; the rest needs a dense mask")
    if problem.heads_q != problem.heads_k and backend is None and operands.q.device.type == "cuda":
        raise Refused("torch may repeat K and V here; 'fa2' and 'cudnn' show the fused kernels")
    mask = None if plain or square_causal else operands.bias if problem.bias else dense_mask(problem, operands)
    arguments = {
        "attn_mask": mask,
        "is_causal": square_causal,
        "scale": problem.scale,
        "enable_gqa": problem.heads_q != problem.heads_k,
    }

    def forward(q, k, v):
        if problem.packed:
            q, k, v = q[None], k[None], v[None]
        # [B, T, H, D] storage seen as torch's [B, H, T, D]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if backend is None:
            out = F.scaled_dot_product_attention(q, k, v, **arguments)
        else:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v, **arguments)
        out = out.transpose(1, 2)
        return out[0] if problem.packed else out

    return forward


# ---- FlexAttention ---------------------------------------------------------------------------------------------------


def _flex(problem: Problem, operands: Operands) -> Forward:
    import torch._dynamo
    import torch._functorch.config

    if operands.q.device.type != "cuda":
        raise Refused("FlexAttention on a CPU has no backward; it is timed on GPUs")
    # A shape beyond the recompile limit would silently run unfused; a fresh start per shape keeps every one compiled.
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # the backward is timed several times over one graph
    return flex_call(problem, operands, torch.compile(_flex_attend, dynamic=False, fullgraph=True))


def _flex_attend(q, k, v, sink, **common):
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    if sink is None:
        return flex_attention(q, k, v, **common)
    # A sink belongs to no key: it takes its part of the weights afterwards.
    out, extra = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **common)
    return (out * torch.sigmoid(extra.lse - sink[:, None]).unsqueeze(-1)).to(out.dtype)


def flex_call(problem: Problem, operands: Operands, attend=_flex_attend) -> Forward:
    """The call by FlexAttention, `attend` compiled; as it is, it computes the same from dense scores."""
    if problem.packed:
        raise Refused("packed sequences would need a document mask per batch of lengths; not timed here")
    common = {
        "score_mod": _flex_score_mod(problem, operands),
        "block_mask": _flex_block_mask(problem, operands),
        "scale": problem.scale,
        "enable_gqa": problem.heads_q != problem.heads_k,
    }

    def forward(q, k, v):
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), operands.sink, **common).transpose(1, 2)

    return forward


def _flex_score_mod(problem: Problem, operands: Operands):
    if not (problem.softcap or problem.alibi or problem.bias):
        return None
    slopes, bias, cap, shift = operands.slopes, operands.bias, problem.softcap, problem.len_k - problem.len_q
    # Sizes of 1 are left out, so that the index needs no zeros.
    given = () if bias is None else tuple(size > 1 for size in bias.shape)
    own = None if bias is None else bias.squeeze()

    def bend(score, batch, head, i, j):
        if cap:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            slope = slopes[head] if problem.alibi == "head" else slopes[batch, head]
            score = score - slope * (i + shift - j).abs()
        if own is not None:
            score = score + own[tuple(at for at, there in zip((batch, head, i, j), given, strict=True) if there)]
        return score

    return bend


def _flex_block_mask(problem: Problem, operands: Operands):
    from torch.nn.attention.flex_attention import create_block_mask

    if problem.band == Band() and not problem.mask:
        return None
    left, right = problem.band
    shift, mask = problem.len_k - problem.len_q, operands.mask
    given = () if mask is None else tuple(size > 1 for size in mask.shape)
    own = None if mask is None else mask.squeeze()

    def sees(batch, head, i, j):
        seen = j >= 0
        if left is not None:
            seen = seen & (j >= i + (shift - left))
        if right is not None:
            seen = seen & (j <= i + (shift + right))
        if own is not None:
            seen = seen & own[tuple(at for at, there in zip((batch, head, i, j), given, strict=True) if there)]
        return seen

    batch, heads = (size if letter in problem.mask else None for letter, size in (("b", problem.batch), ("h", problem.heads_q)))
    # The same BlockMask either way: compiled where the dense mask behind it would not fit, eager where that is quicker.
    compiled = (batch or 1) * (heads or 1) * problem.len_q * problem.len_k > MAX_MASK_BYTES // 4
    return create_block_mask(sees, batch, heads, problem.len_q, problem.len_k, device=str(operands.q.device), _compile=compiled)


# ---- FlashAttention-2, -3 and -4 -------------------------------------------------------------------------------------


@functools.cache
def _first_importable(*names: str):
    """The first module of `names` that imports. A wheel built for another torch fails to load: that too is "not installed"."""
    for name in names:
        try:
            return importlib.import_module(name)
        except Exception:
            continue
    return None


def _fa3():
    # The PyPI wheel `fa3-fwd` (forward only), then the names that builds from source have had.
    return _first_importable("fa3_fwd_interface", "flash_attn_interface", "flash_attn_3.flash_attn_interface")


def _fa4():
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # read at import: compiled ahead by other processes
    return _first_importable("flash_attn.cute.interface", "flash_attn.cute")


def _fa2():
    """The package of FlashAttention-2: FlashAttention-4 lives in one of its name."""
    module = _first_importable("flash_attn")
    return module if hasattr(module, "flash_attn_func") else None


def _flash2(problem: Problem, operands: Operands) -> Forward:
    """Torch's copy of its kernels, which has neither a soft-cap nor slopes: with these the package itself."""
    if problem.softcap or problem.alibi:
        return _flash(_fa2(), "FlashAttention-2 (package flash_attn)", problem, operands, -1, ("softcap", "alibi_slopes"))
    return _sdpa(problem, operands, SDPBackend.FLASH_ATTENTION)


def _flash3(problem: Problem, operands: Operands) -> Forward:
    name = "FlashAttention-3 (module fa3_fwd_interface or flash_attn_interface)"
    return _flash(_fa3(), name, problem, operands, -1, ("softcap",))


def _flash4(problem: Problem, operands: Operands) -> Forward:
    name = "FlashAttention-4 (module flash_attn.cute.interface)"
    return _flash(_fa4(), name, problem, operands, None, ("softcap", "learnable_sink"))


def _flash(module, name: str, problem: Problem, operands: Operands, no_limit, has: tuple[str, ...]) -> Forward:
    """`has`: the arguments of the functions of `module` that bend scores."""
    if module is None:
        raise Refused(f"{name} is not installed")
    bent = {"softcap": problem.softcap or None, "alibi_slopes": operands.slopes, "learnable_sink": operands.sink}
    bent = {argument: value for argument, value in bent.items() if value is not None}
    for argument in bent:
        if argument not in has:
            raise Refused(f"{name} has no {argument}")
    if problem.pairs:
        raise Refused(f"{name} takes no bias and no mask")
    if operands.sink is not None:
        bent["learnable_sink"] = operands.sink.bfloat16()  # the type it is asked for in; `scores.draw` rounds to it
    arguments: dict = {"softmax_scale": problem.scale, "causal": problem.band == CAUSAL, **bent}
    if problem.band not in (Band(), CAUSAL):
        arguments["window_size"] = tuple(no_limit if side is None else side for side in problem.band)
    if not problem.packed:
        return lambda q, k, v: _first(module.flash_attn_func(q, k, v, **arguments))
    arguments |= {"cu_seqlens_q": operands.cu_seqlens_q, "cu_seqlens_k": operands.cu_seqlens_k}
    arguments |= {"max_seqlen_q": problem.max_len_q or problem.len_q, "max_seqlen_k": problem.max_len_k or problem.len_k}
    return lambda q, k, v: _first(module.flash_attn_varlen_func(q, k, v, **arguments))


def _first(result) -> torch.Tensor:
    """These return `out` or `(out, lse, ...)`, depending on the release."""
    return result[0] if isinstance(result, tuple) else result
