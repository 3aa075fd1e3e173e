"""Triton's interpreter runs the kernels on the CPU; this mends what version 3.6 gets wrong there.

It keeps bf16 as its bit pattern in uint16, multiplies those patterns as integers in `tl.dot`, and cuts fp32 off where a GPU
rounds it to the nearest bf16. Comparisons of bf16 tiles have the same fault, so that cases with NaN run in other types here.
"""

import os


def enable() -> None:
    """Must run before anything imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, cast = builder.create_dot, builder.cast_impl

    def widened(tensor):
        if tensor.dtype.scalar != tl.bfloat16:
            return tensor
        return handle((tensor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return dot(self, widened(a), widened(b), *rest)

    def cast_impl(self, source, to):
        if source.dtype.scalar == tl.bfloat16 and to.scalar != tl.bfloat16:
            return cast(self, widened(source), to) if to.scalar != tl.float32 else widened(source)
        if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, source, to)
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # ties to even
        return handle(np.where(np.isnan(source.data), np.uint16(0x7FC0), nearest), tl.bfloat16)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
