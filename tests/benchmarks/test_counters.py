"""What ncu prints is read, and what counters say is put beside the model; ncu itself needs a GPU."""

import json

import pytest

import counters
from rowmax import Device, Problem
from rowmax.analysis import ncu
from rowmax.analysis.verdict import verdict_of
from rowmax.device import Rates

H200 = Device.named("H200")
HEAD = ["ID", "Process ID", "Kernel Name", "Grid Size"]
UNITS = ["", "", "", ""]
NAMES = [alternatives[0] for alternatives in ncu.METRICS.values()]
OF_NAMES = ["ns", "byte", "byte", "byte", "%", "%", "%", "%", ""]


def line(words) -> str:
    return ",".join(f'"{word}"' for word in words)


def printed(*kernels: tuple[str, dict]) -> str:
    """As `ncu --csv --page raw --print-units base` prints: notes, names, units, kernels."""
    rows = [line([*HEAD, *NAMES]), line([*UNITS, *OF_NAMES])]
    for number, (name, values) in enumerate(kernels):
        numbers = [f"{values.get(key, 0):,}" for key in ncu.METRICS]
        rows.append(line([number, 77, name, "(132, 1, 1)", *numbers]))
    return "\n".join(["==PROF== Connected to process 77", '==PROF== Profiling "forward": 0%....100%', *rows, ""])


SPIN = ("at::cuda::(anonymous namespace)::spin_kernel(long)", {"seconds": 700})


def test_a_table_is_read():
    text = printed(SPIN, ("forward_kernel", {"seconds": 1_234_567, "read": 2_500_000_000, "written": 12, "tensor": 45.5}), SPIN)
    marker, kernel, _ = ncu.kernels_of(text)
    assert marker["kernel"] == SPIN[0]
    assert kernel["seconds"] == pytest.approx(1.234567e-3)
    assert (kernel["read"], kernel["written"]) == (2.5e9, 12)
    assert kernel["tensor"] == pytest.approx(0.455)
    assert ncu.by_job(ncu.kernels_of(text)) == [[kernel], []]


def test_names_of_another_chip_and_numbers_that_are_missing():
    text = "\n".join(
        [
            line([*HEAD, ncu.METRICS["tensor"][1], ncu.METRICS["exps"][0]]),
            line([*UNITS, "%", "%"]),
            line([0, 77, "forward", "(1, 1, 1)", "50.0", "n/a"]),
        ]
    )
    (kernel,) = ncu.kernels_of(text)
    assert kernel == {"kernel": "forward", "tensor": 0.5}


def test_what_ncu_said_instead():
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        ncu.kernels_of("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n")
    with pytest.raises(ValueError, match="no table"):
        ncu.kernels_of("")


@pytest.mark.parametrize(
    ("kernel", "verdict"),
    [
        ({"seconds": 1e-3, "read": 4e9, "written": 1e8, "sms_busy": 1.0}, "HBM"),
        ({"seconds": 3e-6, "read": 1e6, "sms_busy": 0.9}, "launch"),
        ({"seconds": 1e-3, "read": 1e8, "sms_busy": 0.2, "tensor": 0.1}, "parallelism"),
        ({"seconds": 1e-3, "read": 1e8, "sms_busy": 0.98, "tensor": 0.75, "exps": 0.4}, "tensor"),
        ({"seconds": 1e-3, "read": 1e8, "sms_busy": 0.98, "tensor": 0.55, "exps": 0.6}, "non-matmul"),
        ({"seconds": 1e-3, "read": 1e8, "sms_busy": 0.98, "tensor": 0.45, "exps": 0.4}, "non-matmul"),
    ],
)
def test_verdicts(kernel, verdict):
    guard = {"kernel": "guard", "seconds": 2e-6}
    assert verdict_of(counters.shares_of([{"kernel": "forward", **kernel}, guard], Rates.of(H200))) == verdict


def test_jobs_beside_the_model(tmp_path, capsys):
    jobs = [
        counters.Job("b16 h16 q4096 k4096 d64 bf16", "q_outer", True),
        counters.Job("b1 h8 q64 k64 d64 bf16", "q_outer", False),
    ]
    once = 4 * 16 * 16 * 4096 * 64 * 2 + 16 * 16 * 4096 * 4
    fast = {"seconds": 2_000_000, "read": int(0.8 * once), "written": int(0.2 * once), "sms_busy": 99.0, "tensor": 45.0}
    text = printed(SPIN, ("forward_kernel", fast), SPIN, ("forward_kernel", {"seconds": 3000, "sms_busy": 50.0}))
    first, second = counters.compared(jobs, ncu.by_job(ncu.kernels_of(text)), H200)
    assert abs(first["off"]) < 0.001
    assert (first["verdict"], second["verdict"], second["model_verdict"]) == ("non-matmul", "launch", "launch")
    (tmp_path / "printed.csv").write_text(text)
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    assert counters.main(["--csv", str(tmp_path / "printed.csv"), "--jobs", str(tmp_path / "jobs.json")]) == 0
    assert "HBM bytes within 10%: 1 of 1" in capsys.readouterr().out


def test_shapes_are_larger_than_the_cache_and_dense_fits():
    jobs = counters.byte_jobs()
    assert len(jobs) == 36
    for job in jobs:
        problem = Problem.parse(job.problem)
        scores = problem.batch * problem.heads_q * problem.len_q * problem.len_k
        if job.plan == "dense":
            assert 6 * scores <= counters.DENSE_BYTES
        else:
            assert problem.batch * problem.heads_q * problem.len_q * problem.dim_qk * 2 > 2.5 * Rates.of(H200).l2_bytes
        assert counters._runs(job, H200)
    assert len(counters.verdict_jobs(H200, 12, 1)) >= 8
    assert counters.verdict_jobs(H200, 4, 1) != counters.verdict_jobs(H200, 4, 2)


def test_ncu_is_asked_for_what_the_chip_has(tmp_path):
    """A shell script in its place: it knows the tensor cores by an older name, and prints what it was asked."""
    fake = tmp_path / "ncu"
    older = ncu.METRICS["tensor"][1].split(".")[0]
    names = [*(name.split(".")[0] for name in NAMES if "tensor" not in name), older]
    listed = "\n".join(f"{name}   unit   what it counts" for name in names)
    fake.write_text(f'#!/bin/sh\ncase "$1" in --query-metrics) cat <<END\n{listed}\nEND\n;; *) echo "$@";; esac\n')
    fake.chmod(0o755)
    asked = counters.profile(str(fake), [counters.Job("b1 h8 q64 k64 d64 bf16", "q_outer", True)], 4.0).split()
    metrics = asked[asked.index("--metrics") + 1].split(",")
    assert len(metrics) == len(ncu.METRICS)
    assert ncu.METRICS["tensor"][1] in metrics
    assert asked[asked.index("--time-limit") + 1] == "3.0"
    assert asked[asked.index("--profile-from-start") + 1] == "off"


def test_bytes_of_plans(tmp_path, monkeypatch):
    """As `rowmax lessons` asks for them: of each plan the kernels behind its marker."""
    names = [ncu.METRICS[kind][0] for kind in ("read", "written")]
    rows = [line([*HEAD, *names]), line([*UNITS, "byte", "byte"])]
    kernels = [(SPIN[0], 0, 0), ("scores", 3, 4), ("softmax", 10, 20), (SPIN[0], 0, 0), ("forward", 1000, 7)]
    rows += [line([n, 77, name, "(1, 1, 1)", f"{read:,}", written]) for n, (name, read, written) in enumerate(kernels)]
    (tmp_path / "printed").write_text("\n".join(rows) + "\n")
    fake = tmp_path / "ncu"
    fake.write_text(f'#!/bin/sh\ncase "$1" in --query-metrics) ;; *) cat {tmp_path / "printed"};; esac\n')
    fake.chmod(0o755)
    monkeypatch.setattr(ncu, "find_ncu", lambda: str(fake))
    problem = Problem.parse("b1 h8 q64 k64 d64 bf16")
    assert ncu.hbm_bytes(problem, ["dense", "q_outer"]) == {"dense": 37.0, "q_outer": 1007.0}
    with pytest.raises(ValueError, match="2 of 3 plans"):
        ncu.hbm_bytes(problem, ["dense", "q_outer", "hopper"])
    (tmp_path / "printed").write_text("==ERROR== ERR_NVGPUCTRPERM\n")
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        ncu.hbm_bytes(problem, ["q_outer"])
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    with pytest.raises(ValueError, match="comes with the CUDA toolkit"):
        ncu.hbm_bytes(problem, ["q_outer"])


def test_without_a_gpu_or_ncu(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert counters.main([]) == 1
    assert "no CUDA GPU" in capsys.readouterr().err
