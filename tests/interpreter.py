"""Triton's interpreter runs the kernels on the CPU; this mends what version 3.6 gets wrong there, and half of what it costs.

It keeps bf16 as its bit pattern in uint16, multiplies those patterns as integers in `tl.dot`, and cuts fp32 off where a GPU
rounds it to the nearest bf16. Comparisons of bf16 tiles have the same fault, so that cases with NaN run in other types here.
An exponential that is no normal number of fp32 is 0 on a GPU (`ex2.approx.ftz`), and so it is here.

It spends four fifths of its time beside the arithmetic, on what is taken from it here. For every call of a jitted function
within a kernel it looks through the whole of `triton.language` for what to replace, which the kernel's launch has replaced
already; every sum of integers is taken a second time in int64 and compared with the limits of its type, for an assertion that
is off; and types and shapes are made anew for every tile.
"""

import functools
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

    def create_exp2(self, x):
        found = np.exp2(x.data)
        if found.dtype == np.float32:
            found = np.where(x.data < -126, np.float32(0), found)
        return handle(found, x.dtype.scalar)

    builder.create_dot, builder.cast_impl, builder.create_exp2 = create_dot, cast_impl, create_exp2
    _replace_once(interpreter, tl)
    _make_types_once(interpreter, tl.core)
    if not interpreter.interpreter_builder.options.debug:
        object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


def dot_in_order(monkeypatch) -> None:
    """Inside a test, elements of a `tl.dot` of fp16 or fp32 are sums in the order of the inner dimension. A BLAS may add up the
    last rows of a matrix in another order than those before, so that what is beside a row changes its bits; a GPU does not."""
    import numpy as np
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, *rest):
        total = np.zeros_like(d.data)
        for i in range(a.data.shape[-1]):
            total += a.data[..., i, None].astype(total.dtype) * b.data[..., i, None, :]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _replace_once(interpreter, tl) -> None:
    replace, replaced = interpreter._patch_lang, set()

    @functools.cache
    def modules(fn) -> frozenset:
        return frozenset(value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core)

    class Scope:
        def __init__(self, fn):
            self.modules = modules(fn) - replaced
            self.inner = replace(fn) if self.modules or not modules(fn) else None
            replaced.update(self.modules)

        def restore(self):
            if self.inner is not None:
                self.inner.restore()
            replaced.difference_update(self.modules)

    interpreter._patch_lang = Scope


def _make_types_once(interpreter, core) -> None:
    np_dtype, block, tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    np_dtypes, blocks, shapes = {}, {}, {}

    def np_dtype_of(triton_type):
        name = triton_type.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(triton_type)
        return np_dtypes[name]

    def block_init(self, element_ty, shape):
        key = (element_ty.name, tuple(shape))
        if not all(type(size) is int for size in key[1]):
            block(self, element_ty, shape)
        elif key in blocks:
            self.__dict__.update(blocks[key])
        else:
            block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)

    def tensor_init(self, handle, type):
        key = tuple(type.shape) if type.is_block() else ()
        if key in shapes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = shapes[key]
        else:
            tensor(self, handle, type)
            shapes[key] = self.numel, self.shape

    interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__ = np_dtype_of, block_init, tensor_init
