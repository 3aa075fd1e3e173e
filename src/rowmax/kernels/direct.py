"""Launches with little between the call and the driver: the one place that knows how Triton's launchers look inside.

`compiled[grid](*arguments)` builds a dictionary, calls two empty chains of hooks and encodes every descriptor on every call.
Here Triton's C function is called with what was worked out once, and encoded descriptors are kept by address: they hold nothing
else that differs between calls of one form. A Triton that is not known here is launched in its own way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import triton

MOST = 64  # encoded descriptors kept for one argument: as many addresses as a program's buffers take in turn
KNOWN = ("3.6", "3.8")  # of which the inner parts are known


class _At(NamedTuple):
    """What Triton reads of a descriptor's tensor."""

    address: int
    dtype: Any

    def data_ptr(self) -> int:
        return self.address


def moved(descriptor: Any, address: int) -> Any:
    """The descriptor for another address, which must be as aligned; it keeps no memory alive."""
    other = object.__new__(type(descriptor))  # without the constructor, whose other checks do not depend on the address
    other.__dict__ = {**descriptor.__dict__, "base": _At(address, descriptor.base.dtype)}
    return other


class Launcher:
    """A compiled kernel and its grid, on the device that is current when it is made."""

    def __init__(self, compiled: Any, programs: int):
        self.compiled = compiled
        self._public = compiled[(programs, 1, 1)]
        self._metas = getattr(compiled.metadata, "tensordesc_meta", None) or ()
        device = triton.runtime.driver.active.get_current_device()
        stream_of = triton.runtime.driver.active.get_current_stream
        self.stream: Callable[[], int] = lambda: stream_of(device)
        direct = _direct(compiled, programs)
        self.is_direct = direct is not None
        self.enqueue: Callable = direct or self._publicly  # (stream, *arguments), descriptors as by `descriptors`

    def __call__(self, *arguments) -> None:
        """On the current stream; tensors may be addresses, descriptors are as the kernel takes them."""
        if self._metas:
            self._public(*arguments)
        else:
            self.enqueue(self.stream(), *arguments)

    def _publicly(self, stream: int, *arguments) -> None:
        self._public(*arguments, stream=stream)

    def descriptors(self, given: "tuple[Any, ...]") -> list:
        """For each of the kernel's descriptors in turn: `[address]` gives the arguments of `enqueue` for it there."""
        if not self.is_direct:
            return [_Plain(one) for one in given]
        return [_Encoded(one, meta) for one, meta in zip(given, self._metas, strict=True)]


class _Plain:
    """The descriptor itself, which Triton encodes."""

    def __init__(self, descriptor: Any):
        self._descriptor = moved(descriptor, 0)

    def __getitem__(self, address: int) -> tuple:
        return (moved(self._descriptor, address),)


class _Encoded(dict):
    """The arguments for one descriptor, kept by address. Threads may share it: what it gives is never changed."""

    def __init__(self, descriptor: Any, meta: Any):
        self._descriptor, self._meta = moved(descriptor, 0), meta

    def __missing__(self, address: int) -> tuple:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        more = () if triton_series() == "3.6" else (None,)
        made = tuple(make_tensordesc_arg(moved(self._descriptor, address), self._meta, *more))
        if len(self) >= MOST:
            self.clear()
        self[address] = made
        return made


def triton_series() -> str:
    """The first two parts of its version."""
    return ".".join(triton.__version__.split(".")[:2])


def _direct(compiled: Any, programs: int) -> Optional[Callable]:
    """Triton's C launch behind `(stream, *arguments)`; None where it would need more than is known here."""
    run, metadata = compiled.run, compiled.metadata
    if triton_series() not in KNOWN or type(run).__name__ != "CudaLauncher" or getattr(run, "gsan_enabled", False):
        return None
    if metadata.global_scratch_size or metadata.profile_scratch_size:  # memory from an allocator, for every launch
        return None
    launch = run.launch
    if getattr(launch, "__name__", "") == "inner":  # Python that takes descriptors apart
        launch = launch.__closure__[launch.__code__.co_freevars.index("launcher")].cell_contents
    front = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    packed, scratch, runtime = compiled.packed_metadata, (None, None), triton.knobs.runtime
    old = triton_series() == "3.6"
    quiet = (*scratch, packed, None, None, None) if old else (packed, None, None, None, *scratch)

    def enqueue(stream, *arguments):
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # chains, or None
        middle = quiet
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            heard = (packed, compiled.launch_metadata((programs, 1, 1), stream), enter, leave)
            middle = (*scratch, *heard) if old else (*heard, *scratch)
        if old:
            launch(programs, 1, 1, stream, *front, *middle, *arguments)
        else:
            launch(programs, 1, 1, stream, *front, *middle, run.arg_annotations, run.kernel_signature, arguments)

    return enqueue
