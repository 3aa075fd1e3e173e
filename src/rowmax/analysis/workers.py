"""Jobs in child processes, several at a time, each with its own time limit: for compiling ahead and for trying variants
that may hang, run out of memory or take the GPU's context down with them. None of that reaches the parent.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Optional

OUT_OF_TIME = "out of time"


class Outcome(NamedTuple):
    """`error` is "" when the job returned; `value` is then what it returned."""

    error: str
    value: Any
    seconds: float


class _Worker:
    """One child process and the job it is at."""

    def __init__(self, context, function: Callable):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function), daemon=True)
        self.process.start()
        theirs.close()
        self.job: Optional[int] = None
        self.started = 0.0

    def give(self, job: int, arguments: dict) -> None:
        self.job, self.started = job, time.monotonic()
        self.pipe.send(arguments)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run_all(
    function: Callable, jobs: Sequence[dict], *, workers: int, job_seconds: float, total_seconds: float
) -> list[Outcome]:
    """`function(**job)` for every job, in child processes; `function` must be importable by name and its results picklable.

    Args:
        job_seconds: limit of one job, the start of its process not counted.
        total_seconds: limit of the whole; jobs that were not finished by then end with the error `OUT_OF_TIME`.
    """
    context = multiprocessing.get_context("spawn")
    outcomes = [Outcome(OUT_OF_TIME, None, 0.0)] * len(jobs)
    waiting = list(range(len(jobs)))[::-1]
    deadline = time.monotonic() + total_seconds
    pool = [_Worker(context, function) for _ in range(min(workers, len(jobs)))]
    dead_on_arrival = 0
    try:
        while pool and time.monotonic() < deadline:
            by_pipe = {worker.pipe: worker for worker in pool}
            for pipe in wait(list(by_pipe), timeout=0.2):
                worker = by_pipe[pipe]
                message = _receive(pipe)
                if message is None:  # the process died
                    worker.process.join(1)
                    if worker.job is not None:
                        said = f"process ended with code {worker.process.exitcode}"
                        outcomes[worker.job] = Outcome(said, None, _since(worker))
                    else:
                        dead_on_arrival += 1
                        if dead_on_arrival > len(jobs):
                            raise RuntimeError(f"child processes die before their first job, code {worker.process.exitcode}")
                    _replace(pool, worker, context, function, waiting)
                    continue
                if worker.job is not None:
                    outcomes[worker.job] = message
                worker.job = None
                if context_lost(message.error):
                    _replace(pool, worker, context, function, waiting)
                elif waiting:
                    job = waiting.pop()
                    worker.give(job, dict(jobs[job]))
                else:
                    worker.end()
                    pool.remove(worker)
            for worker in list(pool):
                if worker.job is not None and _since(worker) > job_seconds:
                    outcomes[worker.job] = Outcome(f"took over {job_seconds:.0f} s", None, _since(worker))
                    _replace(pool, worker, context, function, waiting)
    finally:
        for worker in pool:
            worker.end()
    return outcomes


def _since(worker: _Worker) -> float:
    return time.monotonic() - worker.started


def _replace(pool: list, worker: _Worker, context, function: Callable, waiting: list) -> None:
    worker.end()
    pool.remove(worker)
    if waiting:
        pool.append(_Worker(context, function))


def _receive(pipe: Any) -> Optional[Outcome]:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _serve(pipe: Connection, function: Callable) -> None:
    """The child: say that it is there, then answer jobs until the parent goes away."""
    # One compiling thread a process: the processes are the parallelism.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    pipe.send(Outcome("", None, 0.0))
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            return
        started = time.monotonic()
        try:
            error, value = "", function(**arguments)
        except Exception as caught:
            error, value = brief(caught), None
        pipe.send(Outcome(error, value, time.monotonic() - started))


def brief(caught: BaseException) -> str:
    """One line: the type, and the first line of the message; its last where it begins with source, as Triton's do."""
    lines = [line.strip() for line in str(caught).splitlines() if line.strip()] or [""]
    return f"{type(caught).__name__}: {lines[-1] if lines[0].startswith('at ') else lines[0]}"[:200]


def context_lost(error: str) -> bool:
    """After such an error every further call on the GPU from this process fails too."""
    return any(
        words in error for words in ("illegal memory access", "AcceleratorError", "misaligned address", "launch failure")
    )
