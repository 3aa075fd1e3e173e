"""The peers that rowmax is timed beside, each behind the same call: `out = forward(q, k, v)` in rowmax's layout.

`build(who, problem, operands, ...)` returns that call, or raises `Refused` with the reason: not installed, or a problem the
peer has no kernel for. Nothing here falls back: a peer runs with the back-end its name says or not at all.

    rowmax  this package                     cudnn  torch SDPA, cuDNN back-end       fa2  torch SDPA, flash back-end
    sdpa    torch SDPA as it dispatches      flex   FlexAttention, compiled          fa3, fa4  FlashAttention-3 and -4
"""

import functools
import importlib
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
    """The call to time. `plan`: rowmax's forced plan, as in `rowmax.attention(plan=...)`.

    Raises:
        Refused: says why.
    """
    make = {
        "rowmax": functools.partial(_rowmax, plan=plan),
        "cudnn": functools.partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
        "fa2": functools.partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION),
        "sdpa": functools.partial(_sdpa, backend=None),
        "flex": _flex,
        "fa3": _flash3,
        "fa4": _flash4,
    }.get(who)
    if make is None:
        raise Refused(f"nobody is called '{who}'; known are rowmax, cudnn, fa2, sdpa, flex, fa3, fa4")
    return make(problem, operands)


# ---- rowmax ----------------------------------------------------------------------------------------------------------


def _rowmax(problem: Problem, operands: Operands, plan: str) -> Forward:
    common = {
        "window": tuple(problem.band),
        "scale": problem.scale,
        "deterministic": problem.deterministic,
        "plan": plan or None,
    }
    if not problem.packed:
        return lambda q, k, v: rowmax.attention(q, k, v, **common)
    cu_q, cu_k = operands[3:5]
    common |= {"max_seqlen_q": problem.max_len_q, "max_seqlen_k": problem.max_len_k}
    return lambda q, k, v: rowmax.attention_varlen(q, k, v, cu_q, cu_k, **common)


# ---- torch SDPA ------------------------------------------------------------------------------------------------------


def dense_mask(problem: Problem, operands: Operands) -> torch.Tensor:
    """Boolean `[len_q, len_k]`, true where query i sees key j; packed sequences become blocks on the diagonal."""
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
    return seen


def _sdpa(problem: Problem, operands: Operands, backend) -> Forward:
    plain = problem.band == Band() and not problem.packed
    square_causal = problem.band == CAUSAL and problem.len_q == problem.len_k and not problem.packed
    if backend is not None and not (plain or square_causal):
        raise Refused("torch's fused back-ends take full and square causal attention only; the rest needs a dense mask")
    if problem.heads_q != problem.heads_k and backend is None and operands.q.device.type == "cuda":
        raise Refused("torch may repeat K and V here; 'fa2' and 'cudnn' show the fused kernels")
    mask = None if plain or square_causal else dense_mask(problem, operands)
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
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if operands.q.device.type != "cuda":
        raise Refused("FlexAttention on a CPU has no backward; it is timed on GPUs")
    if problem.packed:
        raise Refused("packed sequences would need a document mask per batch of lengths; not timed here")
    block_mask = None
    if problem.band != Band():
        left, right = problem.band
        shift = problem.len_k - problem.len_q

        def sees(batch, head, i, j):
            seen = j >= 0
            if left is not None:
                seen = seen & (j >= i + (shift - left))
            if right is not None:
                seen = seen & (j <= i + (shift + right))
            return seen

        # The same BlockMask either way: compiled where the dense mask behind it would not fit, eager where that is quicker.
        compiled = problem.len_q * problem.len_k > MAX_MASK_BYTES // 4
        block_mask = create_block_mask(
            sees, None, None, problem.len_q, problem.len_k, device=operands.q.device, _compile=compiled
        )
    # A shape beyond the recompile limit would silently run unfused; a fresh start per shape keeps every one compiled.
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # the backward is timed several times over one graph
    compiled_flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def forward(q, k, v):
        out = compiled_flex(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            block_mask=block_mask,
            scale=problem.scale,
            enable_gqa=problem.heads_q != problem.heads_k,
        )
        return out.transpose(1, 2)

    return forward


# ---- FlashAttention-3 and -4 -----------------------------------------------------------------------------------------


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
    return _first_importable("flash_attn.cute.interface", "flash_attn.cute")


def _flash3(problem: Problem, operands: Operands) -> Forward:
    return _flash(_fa3(), "FlashAttention-3 (module fa3_fwd_interface or flash_attn_interface)", problem, operands, -1)


def _flash4(problem: Problem, operands: Operands) -> Forward:
    return _flash(_fa4(), "FlashAttention-4 (module flash_attn.cute.interface)", problem, operands, None)


def _flash(module, name: str, problem: Problem, operands: Operands, no_limit) -> Forward:
    if module is None:
        raise Refused(f"{name} is not installed")
    arguments: dict = {"softmax_scale": problem.scale, "causal": problem.band == CAUSAL}
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
