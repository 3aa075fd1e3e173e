"""Direct launches: what reaches the driver is what Triton's own way hands to it, and memory kept between calls is never shared.

Run as a program, it launches through a driver that launches nothing (`fake_driver.py`) and prints what that driver saw.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon")
import torch

from rowmax.kernels import scratch

PROBLEMS = {
    "b1 h8 q512 k512 d128 bf16 causal": "hopper[128x128 s2 q2 pingpong dynamic g8]",
    "b3 h4/2 q300 k300 d128 bf16 packed window(9,inf)": "hopper[128x128 s2 q1 pingpong dynamic g8]",
    "b2 h4/2 q300 k300 d192/128 bf16 alibi sink dropout=0.1": "hopper[128x128 s2 q1 pingpong static]",
    "b2 h4/2 q300 k304 d128 bf16 causal bias(hqk)": "hopper[128x128 s2 q1 pingpong dynamic g8]",
    "b2 h4/2 q300 k304 d64 fp16 mask(bk)": "hopper[128x64 s2 q1 static]",
    "b2 h4/2 q30 k30 d64 fp16 causal": "q_outer[64x64 w4 s2]",
    "b2 h4/2 q30 k30 d64 fp16 causal mod(everything)": "q_outer[64x64 w4 s2]",
}


BACKWARD = (
    "b1 h8 q512 k512 d128 bf16 causal",
    "b3 h4/2 q300 k300 d64 fp16 packed window(9,inf) alibi(batch) sink deterministic",
    "b2 h4/2 q304 k304 d192/128 bf16 causal bias(bhqk)",
    "b3 h2 q300 k300 d256 bf16 packed causal",
)


# ---- launches ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="Triton's launchers need a C compiler, and so does the driver here")
def test_what_reaches_the_driver(tmp_path):
    import fake_driver

    library = fake_driver.build(tmp_path)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"LD_LIBRARY_PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, __file__, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    every = [json.loads(line) for line in done.stdout.splitlines()]
    found = [facts for facts in every if "of backward" not in facts]
    assert [facts["problem"] for facts in every if "of backward" in facts] == list(BACKWARD)
    for facts in every[len(found) :]:
        kernels = 4 if "d192" in facts["problem"] or "d256" in facts["problem"] else 3
        assert facts["direct"] == [True] * kernels, f"Triton's launcher is not known: {facts}"
        assert facts["of backward"] == [kernels] * 3, "launches of a call"
        assert facts["differences"] == [], "a kept launch hands over other parameters than Triton's own"
        assert facts["encoded again"] == 0, "descriptors of known addresses are encoded once more"
        assert facts["forms"] == 1, "tensors at other addresses are another form"
    assert [facts["problem"] for facts in found] == list(PROBLEMS)
    for facts in found:
        packed = "packed" in facts["problem"]  # with a launch that clears the rows outside
        kernels = 1 if "hopper" not in PROBLEMS[facts["problem"]] else 3 if packed else 2
        assert facts["direct"] == [True] * kernels, f"Triton's launcher is not known: {facts}"
        assert facts["launches of a call"] == [kernels + packed] * 3
        assert facts["differences"] == [], "the direct launch hands over other parameters than Triton's own"
        assert facts["early"] == [0] * (kernels - 1) + [int(kernels > 1)], "the guard, and it alone, may start early"
        assert facts["encoded again"] == 0, "descriptors of known addresses are encoded once more"
        assert facts["heard"] == 2 * (kernels + packed), "a hook that was installed later is not called"
        assert facts["kept"] <= 64


def main(library: str) -> None:
    import fake_driver
    import triton

    sys.path.append(str(Path(__file__).parents[1]))
    import score_mods  # noqa: F401, makes the functions that problems name

    fake = fake_driver.install(Path(library))
    torch.set_grad_enabled(False)
    for text, plan in PROBLEMS.items():
        print(json.dumps({"problem": text, **launched(fake, text, plan, triton.knobs.runtime)}), flush=True)
    for text in BACKWARD:
        print(json.dumps({"problem": text, **launched_backward(fake, text)}), flush=True)


def launched(fake, text: str, plan_text: str, runtime) -> dict:
    """What the driver sees of calls on three sets of tensors, directly and by Triton's own way."""
    from rowmax import Device, Problem, plan, testing
    from rowmax.kernels import hopper_forward, launch

    problem = Problem.parse(text)
    chosen = plan(problem, Device.named("H200"), prefer=plan_text)
    forward = launch.Forward(problem, chosen, True)
    given = [testing.operands(problem, seed=seed) for seed in range(3)]
    counts = []
    for operands in given:
        before = fake.launches
        out, lse = forward(*operands)
        counts.append(fake.launches - before)

    # What each launch hands over for the last tensors, as the driver sees it.
    memory = torch.zeros(10_000, dtype=torch.int32)
    tensors = (*given[2][:3], out, lse, *given[2][3 : 5 if problem.plain else 10 if "hopper" in plan_text else None])
    if "hopper" in plan_text:
        *before, first, second = hopper_forward.hopper_calls(problem, given[2], chosen.tiles[0], out, lse)
        (again,) = forward._again.values()
        launches, order = again._launches(memory, *tensors)
        flags, counter = memory[scratch.FLAGS_AT :], memory if first.tensors[9] is not None else None
        first = first._replace(tensors=(*first.tensors[:8], flags, counter, *first.tensors[10:12], order, *first.tensors[13:]))
        second = second._replace(tensors=(*second.tensors[:5], flags, *second.tensors[6:]))
        launchers, direct = zip(*launches, strict=True)
        calls = [*(call._replace(tensors=(*call.tensors[:2], order)) for call in before), first, second]
    else:
        calls = [launch.forward_call(problem, given[2], chosen.tiles[0], out, lse)]
        launchers = [launch._launch(out.device, calls[0])]
        direct = [(*map(launch._address, tensors), *calls[0].numbers)]
    early, differences = [], []
    for launcher, mine, call in zip(launchers, direct, calls, strict=True):
        count = parameters(launcher.compiled.src.signature.values())
        fake.keep(count)
        launcher.enqueue(0, *mine)
        early.append(fake.attributes)
        one = [fake.grid, fake.attributes, *fake.params(count)]
        launcher._public(*call.tensors, *call.numbers)
        other = [fake.grid, fake.attributes, *fake.params(count)]
        fake.keep(0)
        differences += [[i, a, b] for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]

    encoded = fake.encoded
    if "hopper" in plan_text:
        for _ in range(3):
            again(*tensors)
        bound = forward.into(given[2], out, lse)
        bound()
        bound()
    encoded = fake.encoded - encoded
    heard: list = []
    runtime.launch_enter_hook.add(heard.append)
    runtime.launch_exit_hook.add(heard.append)
    forward(*given[0])
    runtime.launch_enter_hook.calls.clear()
    runtime.launch_exit_hook.calls.clear()
    kept = 0
    if "hopper" in plan_text:
        for place in range(100):
            again._sources[0][16 * place]
        kept = len(again._sources[0])
    return {
        "direct": [launcher.is_direct for launcher in launchers],
        "launches of a call": counts,
        "differences": differences,
        "early": early,
        "encoded again": encoded,
        "heard": len(heard),
        "kept": kept,
    }


def launched_backward(fake, text: str) -> dict:
    """The same of gradients, whose launches are kept by the form of a call."""
    from rowmax import Device, Problem, plan, testing
    from rowmax.kernels import hopper_backward
    from rowmax.plan.hopper_wide import HopperWideTile

    problem = Problem.parse(text)
    (tile,) = plan(problem, Device.named("H200"), direction="backward", prefer="hopper").tiles
    calls_of = hopper_backward.hopper_backward_calls
    if isinstance(tile, HopperWideTile):
        calls_of = hopper_backward.wide_backward_calls
    before, counts, used = len(hopper_backward._kept), [], []
    if not problem.packed and problem.dim_qk == problem.dim_v:  # one tensor as K and V first, two later
        operands = testing.operands(problem)
        grad_out, grad_lse = testing.cotangents(problem)
        given = (torch.empty_like(grad_out), torch.empty_like(grad_lse), grad_out, grad_lse)
        grads = (torch.zeros_like(t) for t in operands[:3])
        hopper_backward.run(problem, operands._replace(v=operands.k), tile, *given, *grads)
        before += 1
    for seed in range(3):
        operands = testing.operands(problem, seed=seed)
        grad_out, grad_lse = testing.cotangents(problem)
        out, lse = torch.empty_like(grad_out), torch.empty_like(grad_lse)
        given = (out, lse, grad_out, grad_lse, *(torch.zeros_like(t) for t in operands[:3]))
        used.append((operands, given))  # so that the next ones lie elsewhere
        launches = fake.launches
        hopper_backward.run(problem, operands, tile, *given)
        counts.append(fake.launches - launches)
    (again, _likes), *_ = list(hopper_backward._kept.values())[before:]
    calls = calls_of(problem, operands, tile, *given)
    everything = (*operands[:6], operands.bias, operands.mask, operands.seed, *given, *hopper_backward.handed_on(calls))
    differences, direct = [], []
    for (launcher, mine), call in zip(again.arguments(*everything), calls, strict=True):
        direct.append(launcher.is_direct)
        count = parameters(launcher.compiled.src.signature.values())
        fake.keep(count)
        launcher.enqueue(0, *mine)
        one = [fake.grid, fake.attributes, *fake.params(count)]
        launcher._public(*call.tensors, *call.numbers)
        other = [fake.grid, fake.attributes, *fake.params(count)]
        fake.keep(0)
        differences += [[i, a, b] for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    encoded = fake.encoded
    for _ in range(3):
        again(*everything)
    return {
        "direct": direct,
        "of backward": counts,
        "differences": differences,
        "encoded again": fake.encoded - encoded,
        "forms": len(hopper_backward._kept) - before,
    }


def parameters(signature) -> int:
    """How many the driver is handed: a descriptor comes with size and stride of each of its dimensions."""
    count = 0
    for kind in signature:
        if isinstance(kind, tuple):
            count += parameters(kind)
        elif kind != "constexpr":
            count += 3 + 2 * kind[: kind.index("]")].count(",") if kind.startswith("tensordesc") else 1
    return count


def test_one_cu_seqlens_and_two_keep_launches_of_their_own(monkeypatch):
    """The first takes a loop without masks, which would be wrong for the second, whatever the order, or if building fails."""
    from rowmax import Device, Problem, plan, testing
    from rowmax.kernels import hopper_forward, launch

    problem = Problem.parse("b3 h2 q300 k300 d64 bf16 packed causal")
    two = testing.operands(problem)
    one = two._replace(cu_seqlens_k=two.cu_seqlens_q)
    built, run = [], []

    def build(_problem, operands, *_):
        built.append(operands.cu_seqlens_q is operands.cu_seqlens_k)
        if len(built) == 2:
            raise MemoryError
        return lambda *tensors, own=built[-1]: run.append((own, tensors[5] is tensors[6]))

    monkeypatch.setattr(hopper_forward, "run", build)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    forward = launch.Forward(problem, plan(problem, Device.named("H200"), prefer="hopper"), False)
    forward(*one)
    with pytest.raises(MemoryError):
        forward(*two)
    for operands in (one, two, two, one, two):
        forward(*operands)
    assert built == [True, False, False]
    assert run == [(own, own) for own in (True, False, True, False)]


# ---- memory kept between calls -----------------------------------------------------------------------------------------------

LIKE = torch.empty(0)


@pytest.fixture
def capturing(monkeypatch):
    """`capturing(True)`: the current stream is being captured."""
    state = {"now": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["now"])
    monkeypatch.setattr(scratch, "_kept", {})
    return lambda now: state.update(now=now)


def test_memory_is_kept_for_the_next_call_on_its_stream_alone(capturing):
    key, first = scratch.take(LIKE, 0, 7, 100)
    assert not bool(first.any())
    assert first.numel() >= 100
    _, beside = scratch.take(LIKE, 0, 7, 100)  # another thread, before the first has given back
    assert beside.data_ptr() != first.data_ptr()
    scratch.give_back(key, first)
    for stream, device in ((8, 0), (7, 1)):
        assert scratch.take(LIKE, device, stream, 100)[1] is not first
    assert scratch.take(LIKE, 0, 7, 90)[1] is first


def test_too_little_memory_is_replaced(capturing):
    key, first = scratch.take(LIKE, 0, 7, 100)
    scratch.give_back(key, first)
    key, second = scratch.take(LIKE, 0, 7, 101)
    assert second.numel() >= 101
    assert not bool(second.any())
    scratch.give_back(key, second)
    assert scratch.take(LIKE, 0, 7, 100)[1] is second


def test_lasting_memory_of_a_captured_stream_was_cleared_before_and_is_nobody_elses(capturing, monkeypatch):
    monkeypatch.setattr(scratch, "_reserves", {})
    scratch.give_back(*scratch.take(LIKE, 0, 7, 100, lasting=True))
    reserve, used = scratch._reserves[0]
    assert used == 0
    capturing(True)
    pieces = [scratch.take(LIKE, 0, 7, 100, lasting=True) for _ in range(2)]
    for key, piece in pieces:
        assert key is None, "what a graph has is kept for no other call"
        assert piece.untyped_storage().data_ptr() == reserve.untyped_storage().data_ptr()
        assert piece.data_ptr() % 256 == reserve.data_ptr() % 256
    assert pieces[1][1].data_ptr() >= pieces[0][1].data_ptr() + 400
    _, much = scratch.take(LIKE, 0, 7, scratch.RESERVE, lasting=True)
    assert much.untyped_storage().data_ptr() != reserve.untyped_storage().data_ptr(), "more than the reserve has left"
    scratch.take(LIKE, 0, 7, scratch.RESERVE // 2, lasting=True)
    capturing(False)
    scratch.take(LIKE, 0, 7, 100, lasting=True)
    assert scratch._reserves[0][0] is not reserve, "a reserve half of which is gone is followed by another"
    assert any(reserve is spent for spent in scratch._spent), "graphs have pieces of it"


def test_memory_of_a_captured_stream_or_of_many_streams_is_not_kept(capturing):
    scratch.give_back(*scratch.take(LIKE, 0, 7, 100))
    kept = scratch._kept[0, 7]
    capturing(True)
    key, memory = scratch.take(LIKE, 0, 7, 100)
    assert memory is not kept
    scratch.give_back(key, memory)
    assert scratch._kept[0, 7] is kept
    capturing(False)
    scratch.give_back(*scratch.take(LIKE, 0, scratch.PER_THREAD, 100))
    assert list(scratch._kept) == [(0, 7)]


if __name__ == "__main__":
    main(sys.argv[1])
