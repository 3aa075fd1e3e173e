"""No two threads of a Hopper kernel meet in a bank of shared memory: every load and store of a tile, counted from its layouts.

Where threads of an instruction meet in a bank at different addresses, it takes more passes than its bytes need. Products and
TMA have their own ways to shared memory and are not counted, nor is what a conversion of layouts moves. `stmatrix` and
`ldmatrix` move matrices of 8 rows of 16 bytes, which are what 32 threads with 4 bytes each would move, from where those would.

Run as a program, with "latent", "forward", "backward" or "wide", problems and tiles, it prints the accesses, a JSON line each.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton.experimental.gluon")

LARGE = "b4 h32/8 q1024 k1024"
PAIRS = ("bias(hqk)", "bias(hqk,fp32)", "mask(bhqk)", "bias(bk)", "mask(bk)")
# Problems and tiles: "" is the plan's own.
BUILDS = {
    "latent": [
        ("b128 h128/1 q1 k8192 d576/512 bf16 causal paged64", "64x64 w4 s8 p132"),
        ("b2 h64/1 q3 k8192 d576/512 fp16 causal paged128", "64x64 w4 s8 x1"),
    ],
    "forward": [
        *((f"{LARGE} d{dim} bf16 causal", "") for dim in ("24/40", 64, 128, "192/128", 256)),
        *((f"{LARGE} d{dim} fp16 {pairs}", "") for dim in (64, 128, 256) for pairs in PAIRS),
    ],
    "backward": [
        *((f"{LARGE} d{dim} bf16 causal", "") for dim in ("24/40", 64, 128)),
        (f"{LARGE} d64 bf16 causal", "128x128 s2 backward ordered"),
        (f"{LARGE} d128 bf16", "64x128 s2 backward g64 ordered"),
        *((f"{LARGE} d64 fp16 {pairs}", "") for pairs in PAIRS if "fp32" not in pairs),
        *((f"{LARGE} d128 fp16 {pairs}", "") for pairs in PAIRS),
    ],
    "wide": [
        *((f"{LARGE} d{dim} bf16 causal", "") for dim in ("192/128", 256)),
        *((f"{LARGE} d{dim} fp16 {pairs}", "") for dim in ("192/128", 256) for pairs in PAIRS),
    ],
}
# Accesses that must be among those of some kernel: what is stored for TMA or others, and what is loaded from there.
EXPECTED = {
    "latent": {"store _give_weights", "load _multiplier"},
    "forward": {"store _store_by_tma", "load take_given"},
    "backward": {"store _consumer", "store _add", "store lay_down", "store _store", "load _take_given"},
    "wide": {"store _weights", "load _key_gradient", "load _take_given", "load _take_given_rows"},
}


def accesses_of(arguments: list[str]) -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", BUILDS)
def test_no_conflicts(kind):
    found = accesses_of([__file__, kind, *(word for build in BUILDS[kind] for word in build)])
    assert {access["access"] for access in found} >= EXPECTED[kind]
    wrong = [access for access in found if access["conflicts"]]
    assert not wrong, f"threads meet in a bank: {wrong}"


@pytest.mark.parametrize(("swizzle", "conflicts"), [(32, 0), (64, 1), (128, 1)])
def test_a_conflict_is_seen(swizzle, conflicts):
    """A bias of 32 bits, whose neighbours in a row are taken together: 32 bytes are what the threads of a row take."""
    program = f"""
import runpy, sys
from triton.experimental.gluon import language as gl
from rowmax.kernels.gluon import given, layouts

layouts.given_layout = lambda *_: gl.NVMMASharedLayout({swizzle}, 32, rank=4)
sys.argv = ["", "forward", "{LARGE} d128 bf16 bias(hqk,fp32)", ""]
sys.path.insert(0, {os.path.dirname(__file__)!r})
runpy.run_path({__file__!r}, run_name="__main__")
"""
    found = accesses_of(["-c", program])
    assert {access["conflicts"] for access in found if access["access"] == "load take_given"} == {conflicts}


# ---- counting ----------------------------------------------------------------------------------------------------------------


def watch(kind: str):
    """`(accesses, main)`: what the program of a test compiles is only brought to a first form, and its accesses are noted."""
    import importlib

    from machine_code import source
    from triton._C.libtriton import ir
    from triton.compiler import make_backend
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language._semantic import GluonSemantic

    accesses: set = set()

    def note(semantic, name, value, buffer):
        if len(value.shape) > 1:  # a slice has the banks of the whole
            whole = gl.shared_memory_descriptor_type(value.element_ty, value.shape, buffer.layout, value.shape)
            shape = f"{value.element_ty} {list(value.shape)}"
            accesses.add((f"{name} {_function()}", shape, semantic.bank_conflicts(value, whole)))

    def load(semantic, buffer, layout, load=GluonSemantic.shared_load):
        value = load(semantic, buffer, layout)
        note(semantic, "load", value.type, buffer.type)
        return value

    def store(semantic, buffer, value, store=GluonSemantic.shared_store):
        note(semantic, "store", value.type, buffer.type)
        return store(semantic, buffer, value)

    def compiled(call, capability):
        built, target, options = source(call, capability)
        backend, context = make_backend(target), ir.context()
        options = backend.parse_options(options)
        ir.load_dialects(context)
        backend.load_dialects(context)
        codegen = backend.get_codegen_implementation(options)
        built.make_ir(target, options, codegen, backend.get_module_map(), context)
        return {}, "R0"

    GluonSemantic.shared_load, GluonSemantic.shared_store = load, store
    tests = {"latent": "latent", "forward": "", "backward": "backward", "wide": "backward_wide"}
    module = importlib.import_module("_".join(filter(None, ("test_gluon", tests[kind], "compile"))))
    module.compiled = compiled
    return accesses, module.main


def _function() -> str:
    """The function whose code is being read."""
    frame = sys._getframe()
    while frame and type(frame.f_locals.get("self")).__name__ != "CodeGenerator":
        frame = frame.f_back
    return frame.f_locals["self"].function_name.split("__")[0].rsplit(".", 1)[-1] if frame else ""


def main(kind: str, *builds: str) -> None:
    import contextlib
    import io

    accesses, compile_all = watch(kind)
    for problem, tile in zip(builds[::2], builds[1::2], strict=True):
        accesses.clear()
        with contextlib.redirect_stdout(io.StringIO()):
            if kind == "wide":
                compile_all(problem)
            else:
                compile_all(problem, tile)
        for access, shape, conflicts in sorted(accesses):
            said = {"problem": problem, "tile": tile, "access": access, "shape": shape, "conflicts": conflicts}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
