"""Kernels compiled by an earlier process, found without what Triton spends on it.

To find a kernel in its cache Triton hashes its own library of 400 MB and asks ptxas for its version: 0.4 s of a first call that
compiles nothing. Here files of Triton count by size and time, all else as for Triton. The key of that leads to Triton's own:
`kept` in Triton's cache, whose content is the hash under which the kernel lies.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.compiler import CompiledKernel, compiler
from triton.runtime.cache import get_cache_manager

from rowmax.kernels.direct import KNOWN, triton_series

_FILE = "kept"


def find(kernel: Any) -> None:
    """Let a jitted function of ours look here first when it is compiled on the current device."""
    if triton_series() not in KNOWN or knobs.runtime.interpret:
        return
    kernel.device_caches[triton.runtime.driver.active.get_current_device()]  # makes what compiles, once for every device
    kernel.compile = _compile
    _tritons()


def _compile(src: Any, target: Any = None, options: Any = None, **more) -> Any:
    """`triton.compile`."""
    watched = knobs.compilation.listener or getattr(knobs.runtime, "add_stages_inspection_hook", None)
    asked = knobs.compilation.always_compile or knobs.compilation.override or knobs.compilation.dump_ir
    if watched or asked:
        return compiler.compile(src, target=target, options=options, **more)
    key = _key(src, target, options)
    with contextlib.suppress(OSError, ValueError):  # a cache that nobody may write to, or a file that is none of ours
        path = get_cache_manager(key).get_file(_FILE)
        if path is not None:
            name, found = f"{src.name[:150]}.json", Path(path).read_text()
            group = get_cache_manager(found).get_group(name) or {}
            if name in group:
                return CompiledKernel(src, group, found)
    with _in_turn(src):
        compiled = compiler.compile(src, target=target, options=options, **more)
    with contextlib.suppress(OSError):
        get_cache_manager(key).put(compiled.hash, _FILE, binary=False)
    return compiled


_tracing = threading.Lock()


@contextlib.contextmanager
def _in_turn(src: Any) -> Iterator[None]:
    """Kernels that are built side by side are traced one after the other: it is Python, and would take as long for all of them
    together. The rest, in LLVM and ptxas, is not."""
    held, trace = contextlib.ExitStack(), src.make_ir
    held.enter_context(_tracing)

    def traced(*arguments, **options):
        with held:
            return trace(*arguments, **options)

    src.make_ir = traced
    with held:
        yield


def _key(src: Any, target: Any, options: Any) -> str:
    libraries = [(name, *_stat(path)) for name, path in options.get("extern_libs") or ()]
    parts = (
        *(_tritons(), src.fn.module, src.fn.fn.__qualname__, src.hash(), str(target), libraries),
        sorted((name, str(value)) for name, value in options.items()),
        sorted(compiler.get_cache_invalidating_env_vars().items()),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.lru_cache(maxsize=1)
def _tritons() -> tuple:
    """Its version, and of every file that a build depends on name, size and time; a ptxas of one's own likewise."""
    root = Path(triton.__file__).parent
    folders = (root / name for name in ("_C", "compiler", "backends", "experimental", "language", "runtime"))
    files = [
        os.path.join(inner, name)
        for folder in folders
        for inner, _, names in os.walk(folder, followlinks=True)
        if not inner.endswith("__pycache__")
        for name in names
    ]
    own = sorted((name, path) for name, path in os.environ.items() if name.startswith("TRITON_PTXAS"))
    files += [shutil.which(path) or path for _, path in own]
    return triton.__version__, own, [_stat(path) for path in sorted(files)]


def _stat(path: str) -> tuple[str, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return path, -1, -1
    return path, found.st_size, found.st_mtime_ns
