"""Which backends this machine has. Without a GPU the Triton kernels run in Triton's interpreter, small sizes only."""

import os

import pytest
import torch

os.environ["ROWMAX_TUNED"] = ""  # what somebody tuned on this machine is none of the tests' business

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    import interpreter

    interpreter.enable()

# One thread: the tensors here are small, and many threads on a busy machine only wait for each other.
torch.set_num_threads(1)

import cases  # noqa: E402, after the interpreter is on


def pytest_addoption(parser):
    parser.addoption("--require-gpu", action="store_true", help="a missing CUDA device is a failure, not a skip")


def pytest_generate_tests(metafunc):
    """`backend, device`: every backend of this machine; those on a GPU carry the mark `gpu`."""
    own = any("backend" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if {"backend", "device"} <= set(metafunc.fixturenames) and not own:
        here = [pytest.param(name, "cpu", id=name) for name in cases.backends("cpu")]
        gpu = [pytest.param(name, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu) for name in cases.backends("cuda")]
        metafunc.parametrize(("backend", "device"), here + gpu)


def pytest_collection_modifyitems(config, items):
    """Long tests come first, so that no process is left with one at the end. Without a GPU its tests are not collected as skips
    by the hundred: they are left out, and one line says so."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if HAS_GPU or config.getoption("--require-gpu"):
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_report_header(config):
    if HAS_GPU:
        return f"GPU tier: {torch.cuda.get_device_name()}"
    return "GPU tier: " + ("required" if config.getoption("--require-gpu") else "skipped, no CUDA device")


def pytest_sessionfinish(session, exitstatus):
    if session.config.getoption("--require-gpu") and not HAS_GPU:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if not HAS_GPU:
        terminalreporter.write_line(pytest_report_header(config))
