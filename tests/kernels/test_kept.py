"""Kernels of an earlier process are found, and only those that would be built again the same.

Run as a program, with a folder, it compiles a kernel there as a launch would, and prints what it did of `CHANGES`.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CHANGES = ("nothing", "a source", "a file of Triton", "an environment variable", "a constant", "an option", "gone")


def ran(folder) -> dict:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_what_an_earlier_process_compiled_is_found(tmp_path):
    first, second = ran(tmp_path), ran(tmp_path)
    assert first["compiled"] == [True, *(change != "nothing" for change in CHANGES)]
    assert second["compiled"] == [False, *(change == "gone" for change in CHANGES)]
    assert second["binaries"] == first["binaries"]
    same = first["binaries"][0]
    assert [binary == same for binary in first["binaries"][1:]] == [
        change not in ("a constant", "an option") for change in CHANGES
    ]
    assert (first["one at a time"], second["one at a time"]) == (True, True)
    assert first["hashed"] == 1, "Triton was asked"
    assert second["hashed"] == 1, "Triton is asked for what is gone alone"


def main() -> None:
    import hashlib
    import shutil
    import time
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path

    import triton
    import triton.language as tl
    from compile_only import calls
    from machine_code import source

    from rowmax import Device, Problem
    from rowmax.kernels import kept
    from rowmax.kernels.triton import forward

    compile_, key, asked = triton.compile, triton.runtime.cache.triton_key, []
    compiled, binaries = [], []

    def build(call, **more):
        before = len(asked)
        made, target, options = source(call, (9, 0))
        kernel = kept._compile(made, target=target, options={**options, **more})
        compiled.append(len(asked) > before)
        binaries.append(hashlib.sha256(kernel.asm["cubin"]).hexdigest())
        return kernel

    def counted(*arguments, **options):
        asked.append(1)
        return compile_(*arguments, **options)

    kept.compiler.compile = counted
    busy, most = [], []

    def traced(self, *arguments, **options):
        busy.append(1)
        most.append(len(busy))
        time.sleep(0.2)
        busy.pop()
        raise RuntimeError("a fault while it is traced")

    problem = Problem.parse("b1 h1 q64 k64 d16 fp16")
    ((_, call),) = calls(problem, Device.named("H200"), "forward")
    plain, triton.compiler.ASTSource.make_ir = triton.compiler.ASTSource.make_ir, traced
    with ThreadPoolExecutor(3) as pool:
        faults = [pool.submit(build, call, num_warps=warps).exception() for warps in (1, 2, 16)]
    triton.compiler.ASTSource.make_ir = plain
    asked.clear()
    in_turn = max(most) == 1 and all(isinstance(fault, RuntimeError) for fault in faults)
    build(call)
    for change in CHANGES:
        held = kept._tritons, forward.LOG2E
        if change == "a source":  # a number that it takes from its file
            forward.LOG2E, call.kernel.hash = tl.constexpr(1.5), None
        elif change == "a file of Triton":
            kept._tritons = lambda: ("other",)
        elif change == "an environment variable":
            os.environ["TRITON_F32_DEFAULT"] = "tf32x3"
        if change == "a constant":
            ((_, other),) = calls(problem.with_(dim_v=8), Device.named("H200"), "forward")
            build(other)
        elif change == "an option":
            build(call, num_warps=8)
        elif change == "gone":  # the kernel, not the word where it lay
            shutil.rmtree(Path(next(iter(build(call).metadata_group.values()))).parent)
            del compiled[-1], binaries[-1]
            build(call)
        else:
            build(call)
        os.environ.pop("TRITON_F32_DEFAULT", None)
        kept._tritons, forward.LOG2E = held
        call.kernel.hash = None
    print(json.dumps({"compiled": compiled, "binaries": binaries, "hashed": key.cache_info().misses, "one at a time": in_turn}))


if __name__ == "__main__":
    main()
