"""Gluon's names that differ between Triton 3.6, 3.8 and 3.9, and two instructions that it has no name for.

No other file asks which Triton is here.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait


@_core.builtin
def named_barrier(op, number, threads, _semantic=None, _generator=None):
    """`bar.sync` or `bar.arrive` on a barrier of the hardware. Triton takes numbers from 0 up for itself: use 8 and more."""
    op, number, threads = (_core._unwrap_if_constexpr(x) for x in (op, number, threads))
    gl.inline_asm_elementwise(
        f"{op} {number}, {threads}; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1, _semantic=_semantic
    )


@_core.builtin
def opaque(x, _semantic=None, _generator=None):
    """x, through a shuffle with itself, which ptxas does not move to another basic block: what needs x stays below it."""
    code = "{ .reg .u32 lane; mov.u32 lane, %laneid; shfl.sync.idx.b32 $0, $1, lane, 31, 0xffffffff; }"
    return gl.inline_asm_elementwise(code, "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1, _semantic=_semantic)
