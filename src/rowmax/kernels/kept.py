"""Kernels compiled by an earlier process, found without what Triton spends on it.

To find a kernel in its cache Triton hashes its own library of 400 MB and the source of every function that the kernel may call,
and asks ptxas for its version: 0.4 s of a first call that compiles nothing. Here a key of the same things, worked out in
15 ms, leads to Triton's: `kept` in Triton's cache, whose content is the hash under which the kernel lies.

A kernel whose constants are changed in a running process, not in their file, has the same key here: TRITON_ALWAYS_COMPILE=1.
"""

import contextlib
import functools
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.compiler import CompiledKernel, compiler
from triton.runtime.cache import get_cache_manager

_KNOWN = ("3.6", "3.8")
_FILE = "kept"


def find(kernel: Any) -> None:
    """Let a jitted function of ours look here first when it is compiled on the current device."""
    if ".".join(triton.__version__.split(".")[:2]) not in _KNOWN or knobs.runtime.interpret:
        return
    kernel.device_caches[triton.runtime.driver.active.get_current_device()]  # makes what compiles, once for every device
    kernel.compile = _compile
    _ours(), _tritons()


def _compile(src: Any, target: Any = None, options: Any = None, **more) -> Any:
    """`triton.compile`."""
    watched = knobs.compilation.listener or getattr(knobs.runtime, "add_stages_inspection_hook", None)
    asked = knobs.compilation.always_compile or knobs.compilation.override or knobs.compilation.dump_ir
    if watched or asked:
        return compiler.compile(src, target=target, options=options, **more)
    index = get_cache_manager(_key(src, target, options))
    path = index.get_file(_FILE)
    if path is not None:
        name, found = f"{src.name[:150]}.json", Path(path).read_text()
        group = get_cache_manager(found).get_group(name) or {}
        if name in group:
            return CompiledKernel(src, group, found)
    with _in_turn(src):
        compiled = compiler.compile(src, target=target, options=options, **more)
    index.put(compiled.hash, _FILE, binary=False)
    return compiled


_tracing = threading.Lock()


@contextlib.contextmanager
def _in_turn(src: Any) -> Iterator[None]:
    """Kernels that are built side by side are traced one after the other: it is Python, and would take as long for all of them
    together. The rest, in LLVM and ptxas, is not."""
    _tracing.acquire()
    held = contextlib.ExitStack()
    held.callback(_tracing.release)
    trace = src.make_ir

    def traced(*arguments, **options):
        with held:
            return trace(*arguments, **options)

    src.make_ir = traced
    with held:
        yield


def _key(src: Any, target: Any, options: Any) -> str:
    constants = [(place, getattr(value, "cache_key", None) or str(value)) for place, value in sorted(src.constants.items())]
    parts = (
        *(_ours(), _tritons(), src.fn.module, src.fn.fn.__qualname__, str(target), sorted(src.signature.items())),
        *(constants, str(src.attrs), sorted((name, str(value)) for name, value in options.items())),
        sorted(compiler.get_cache_invalidating_env_vars().items()),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.lru_cache(maxsize=1)
def _ours() -> str:
    """The contents of this package: kernels take constants from anywhere in it."""
    root, content = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return content.hexdigest()


@functools.lru_cache(maxsize=1)
def _tritons() -> tuple:
    """Its version, and of every file that a build depends on size and time; a ptxas of one's own likewise."""
    root = Path(triton.__file__).parent
    files = [path for folder in ("_C", "compiler", "backends", "experimental", "language", "runtime")
             for path in (root / folder).rglob("*") if path.suffix in ("", ".py", ".so", ".bc")]  # fmt: skip
    files += [Path(path) for name, path in os.environ.items() if name.startswith("TRITON_PTXAS") and path]
    stats = [(str(path), path.stat()) for path in sorted(files) if path.is_file()]
    return triton.__version__, str(root), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
