"""Gluon's names that differ between Triton 3.6, 3.8 and 3.9, and three instructions that it has no name for.

No other file asks which Triton is here.
"""

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait


@_core.builtin
def _tma_add(target, place, buffer, _semantic=None):
    """Adds a buffer to a box of global memory, element by element; awaited like a store. Named from 3.8 on."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, target.handle, place, buffer.handle)


tma_add = getattr(tma, "async_atomic_add", None) or _tma_add


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


@_core.builtin
def scale_unless_one(acc, factor, count, _semantic=None, _generator=None):
    """`acc * factor`, of one shape, skipped by a warp whose factors are all 1. `count`: elements of a thread.

    A thread holds two rows of an accumulator, elements 0 and 1, 4 and 5, ... of one and the others of the other.
    """
    count = _core._unwrap_if_constexpr(count)
    lines = [
        "{ .reg .pred here, other;",
        f"setp.neu.f32 here, ${2 * count}, 0f3F800000;",
        f"setp.neu.f32 other, ${2 * count + 2}, 0f3F800000;",
        "or.pred here, here, other;",
        "vote.sync.any.pred here, here, 0xffffffff;",
        "@!here bra UNCHANGED_${:uid};",
        *(f"mul.f32 ${i}, ${count + i}, ${2 * count + i % 4};" for i in range(count)),
        "UNCHANGED_${:uid}: }",
    ]
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)
    options = {"dtype": gl.float32, "is_pure": True, "pack": count, "_semantic": _semantic}
    return gl.inline_asm_elementwise("\n".join(lines), constraints, [acc, factor], **options)
