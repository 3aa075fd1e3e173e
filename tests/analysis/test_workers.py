"""Jobs in child processes: one that raises, hangs or dies costs its own result and nothing else."""

import os
import time

from rowmax.analysis import workers


def behave(how: str, value: int = 0) -> int:
    """What the children of these tests run."""
    if how == "raise":
        raise ValueError("first line\nsecond line")
    if how == "hang":
        time.sleep(600)
    if how == "die":
        os._exit(7)
    return 2 * value


def test_every_job_is_answered_in_order():
    jobs = [{"how": "return", "value": 1}, {"how": "raise"}, {"how": "die"}, {"how": "hang"}, {"how": "return", "value": 21}]
    outcomes = workers.run_all(behave, jobs, workers=2, job_seconds=3, total_seconds=200)
    assert [outcome.error for outcome in outcomes] == [
        "",
        "ValueError: first line",
        "process ended with code 7",
        "took over 3 s",
        "",
    ]
    assert [outcome.value for outcome in outcomes] == [2, None, None, None, 42]


def test_the_whole_has_a_limit():
    started = time.monotonic()
    outcomes = workers.run_all(behave, [{"how": "hang"}] * 3, workers=1, job_seconds=100, total_seconds=2)
    assert [outcome.error for outcome in outcomes] == ["out of time"] * 3
    assert time.monotonic() - started < 60


def test_no_jobs_no_processes():
    assert workers.run_all(behave, [], workers=4, job_seconds=1, total_seconds=1) == []


def test_compilers_put_the_cause_last():
    assert workers.brief(RuntimeError("at 12:3:\n  x = y\n  ^\nshapes differ")) == "RuntimeError: shapes differ"
