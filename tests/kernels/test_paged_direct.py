"""Direct launches of calls over pages: what reaches the driver is what Triton's own way hands to it, for prepared calls too.

Run as a program, it launches through a driver that launches nothing (`fake_driver.py`) and prints what that driver saw.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROBLEMS = {  # launches of a call
    "b3 h32/8 q1 k4096 d128 bf16 causal paged16": 2,
    "b3 h8/2 q40 k64 d64 fp16 causal packed paged16": 1,
    "b3 h64/1 q1 k4096 d576/512 bf16 causal paged64": 3,  # by `latent`
}
LENGTHS = {"b3 h32": [(1, 4000), (1, 17), (1, 0)], "b3 h8/": [(20, 60), (1, 17), (9, 9)], "b3 h64": [(1, 4000), (1, 7), (1, 0)]}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="Triton's launchers need a C compiler, and so does the driver here")
def test_what_reaches_the_driver(tmp_path):
    import fake_driver

    library = fake_driver.build(tmp_path)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"LD_LIBRARY_PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, __file__, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [facts["problem"] for facts in found] == list(PROBLEMS)
    for facts in found:
        kernels = PROBLEMS[facts["problem"]]
        assert facts["launches of a call"] == [kernels] * 4, "of eager calls, into a given tensor, and prepared"
        assert facts["forms"] == 2, "tensors at other addresses are another form"
        assert facts["planned"] == 3, "a call of a known form was planned once more"
        assert facts["differences"] == [], "a kept launch hands over other parameters than Triton's own"


def main(library: str) -> None:
    import fake_driver

    fake = fake_driver.install(Path(library))
    torch.set_grad_enabled(False)
    for text in PROBLEMS:
        print(json.dumps({"problem": text, **launched(fake, text)}), flush=True)


def launched(fake, text: str) -> dict:
    """What the driver sees of calls on several sets of tensors, directly and by Triton's own way."""
    from test_direct import parameters

    import rowmax
    from rowmax import Device, PagedProblem, ops_paged
    from rowmax.kernels import decode_launch, latent_launch, launch
    from rowmax.testing import paged

    problem, planned = PagedProblem.parse(text), []
    latent = problem.dim_qk == 576
    prefer = "latent" if latent else ""
    ops_paged.plan = lambda *call, **_: planned.append(1) or rowmax.plan(call[0], Device.named("H200"), prefer=prefer)
    ops_paged._launches.clear()
    ops_paged.kernels = lambda: launch
    given = [paged.paged_operands(problem, LENGTHS[text[:6]], seed=seed, shared=latent)[0] for seed in range(4)]
    counts, kept_out = [], torch.empty(ops_paged.shapes_of(problem, given[0].q)[0], dtype=problem.dtype)

    def count(call):
        before = fake.launches
        call()
        counts.append(fake.launches - before)

    for one in given[:2]:
        count(lambda one=one: rowmax.attention_paged(*one[:5], cu_seqlens_q=one.cu_seqlens_q))
    for _ in range(2):
        rowmax.attention_paged(*given[2][:5], cu_seqlens_q=given[2].cu_seqlens_q, out=kept_out)
    count(lambda: rowmax.attention_paged(*given[2][:5], cu_seqlens_q=given[2].cu_seqlens_q, out=kept_out))
    prepared = rowmax.prepare_paged(*given[3][:5], cu_seqlens_q=given[3].cu_seqlens_q)
    prepared()
    count(prepared)

    # What each launch hands over, for tensors that were not those of the first call.
    one, (kept, *_) = given[1], ops_paged._launches.values()
    out = torch.empty_like(kept_out)
    parts = torch.empty(kept._elements) if kept._elements else None
    q, k, v, *rest = map(launch._address, one)
    results = (out.data_ptr(), None, launch._address(parts))
    direct = [(q, k, v, *results, *rest), (*results, *rest[1:3])]
    if latent:
        work = torch.empty(latent_launch.programs_of(problem, kept._tile) * latent_launch.FIELDS, dtype=torch.int64)
        calls = latent_launch.calls(problem, one, kept._tile, out, None, parts, work)
        launches = kept._again.arguments(work.data_ptr(), *direct[0])
    else:
        calls = decode_launch.calls(problem, one, kept._tile, out, None, parts)
        pairs = zip(kept._again.launches, direct, strict=False)
        launches = [(launcher, (*mine, *numbers)) for (launcher, numbers), mine in pairs]
    differences = []
    for call, (launcher, mine) in zip(calls, launches, strict=True):
        size = parameters(launcher.compiled.src.signature.values())
        fake.keep(size)
        launcher.enqueue(0, *mine)
        by_hand = [fake.grid, *fake.params(size)]
        launcher._public(*call.tensors, *call.numbers)
        by_triton = [fake.grid, *fake.params(size)]
        fake.keep(0)
        differences += [[i, a, b] for i, (a, b) in enumerate(zip(by_hand, by_triton, strict=True)) if a != b]
    return {
        "launches of a call": counts,
        "forms": len(ops_paged._launches),
        "planned": len(planned),
        "differences": differences,
    }


if __name__ == "__main__":
    main(sys.argv[1])
