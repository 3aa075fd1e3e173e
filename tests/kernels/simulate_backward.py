"""The Hopper backward, run on the CPU as Python with the machine of `simulate.py`, to which are added:

* TMA's addition to global memory: the buffer is read at the latest moment, `store_wait`.
* products of what was written to shared memory without a fence are an error.
"""

import random
import types

import simulate
import simulate_order
import torch
from simulate import Machine, Pointer, Shared, Wrong

from rowmax import testing
from rowmax.kernels import backward_launch, launch
from rowmax.plan.hopper_backward import HopperBackwardTile
from rowmax.problem import Operands, Problem

LAYOUTS = ("share_layout", "sum_layout", "line_layout", "axis_layout", "tile_layout")


class _Shared(Shared):
    def slice(self, start, length, dim=0):
        return _Shared(self.machine, self.tensor.narrow(dim, int(start), int(length)))

    def index(self, i):
        return _Shared(self.machine, self.tensor[int(i)])

    def reshape(self, shape):
        return _Shared(self.machine, self.tensor.view(*map(int, shape)))

    def permute(self, order):
        return _Shared(self.machine, self.tensor.permute(*order))

    def unfenced(self) -> bool:
        first = self.tensor.data_ptr()
        size = sum((n - 1) * s for n, s in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        return any(first <= place <= first + size * self.tensor.element_size() for place in self.machine.unfenced)


class _Descriptor(simulate.Descriptor):
    def __init__(self, host):
        self.tensor = host.base.as_strided(host.shape, host.strides)
        self.box, self.dtype, self.layout = list(host.block_shape), host.base.dtype, None
        self.block_type = types.SimpleNamespace(nbytes=torch.Size(self.box).numel() * host.base.element_size())

    def store(self, place, box) -> None:
        inside, within = self._overlap(place)
        self.tensor[inside] = box.reshape(self.box)[within]

    def add(self, place, box) -> None:
        inside, within = self._overlap(place)
        self.tensor[inside] += box.reshape(self.box)[within]


def language(machine: Machine, program: int, programs: int) -> dict:
    names = simulate.language(machine, program, programs)
    gl, multiply, allocate = names["gl"], names["warpgroup_mma"], names["gl"].allocate_shared_memory
    machine.local.index = -1  # what is written before the warps part

    def own_allocate(dtype, shape, layout):
        made = allocate(dtype, shape, layout)
        return _Shared(machine, made.tensor) if isinstance(made, Shared) else made

    def own_multiply(a, b, acc, use_acc=True, is_async=False):
        if any(isinstance(x, _Shared) and x.unfenced() for x in (a, b)):
            raise Wrong("a product of shared memory that was written without a fence")
        return multiply(a, b, acc, use_acc=use_acc, is_async=is_async)

    def tma_add(target, place, source):
        if source.unfenced():
            raise Wrong("a TMA addition of shared memory that was written without a fence")
        where = [int(x) for x in place]
        if min(where) < 0:  # found on an H200; past the end is left out, as everywhere
            raise Wrong(f"a TMA addition at {where}: before the first element it is an illegal instruction")
        machine.local.stores.append(lambda: target.add(where, source.tensor))

    gl.allocate_shared_memory = own_allocate
    layouts = {name: (lambda *_: None) for name in LAYOUTS}
    return {**names, "warpgroup_mma": own_multiply, "tma_add": tma_add, **layouts}


def backward(
    problem: Problem, operands: Operands, tile: HopperBackwardTile, out, lse, grad_out, grad_lse=None, *, seed=0, late=False,
    mutants=(), repair=True, running=3, any_order=False,
):  # fmt: skip
    """`(dq, dk, dv, suspect)` of the launcher's three kernels; the first and the last in Triton's interpreter.

    `mutants`: replacements of text in the source. `repair`: run the last kernel, which computes once more what is
    suspect; else round dQ and no more. `suspect`: 1 where one
    of 64 keys is, else 0. Where blocks wait for each other, `running` of them are side by side; else they run one by one.
    `any_order`: of their sums is then no error.
    """
    like = operands[:3]
    dq, dk, dv = (torch.full(t.shape, torch.nan, dtype=t.dtype) for t in like)
    if problem.packed:
        launch._launch(dq.device, launch.outside_call(operands.cu_seqlens_q, dq))
        launch._launch(dq.device, launch.outside_call(operands.cu_seqlens_k, dk, dv))
    with testing.poisoned():
        calls = backward_launch.hopper_backward_calls(problem, operands, tile, out, lse, grad_out, grad_lse, dq, dk, dv)
    prepare, call, finish = calls
    launch._launch(out.device, prepare)
    arguments = [_argument(x) for x in call.tensors] + list(call.numbers)
    build = types.SimpleNamespace(**{name: getattr(value, "value", value) for name, value in vars(call.numbers[-1]).items()})
    suspect = call.tensors[11]
    code = simulate.sources(*mutants, kernel="backward")

    def run(program: int, machine: Machine) -> None:
        names = language(machine, program, call.programs)
        if isinstance(machine, simulate_order.Block):
            names = simulate_order.language(machine, names)
        for part in code:
            exec(part, names)
        names["backward_kernel"](*arguments[:-1], build)

    if tile.ordered:
        simulate_order.Together(seed, late, running, any_order).run(call.programs, run)
    else:
        for program in random.Random(seed).sample(range(call.programs), call.programs):
            run(program, Machine(seed + program, late))
    marked = suspect.clone()
    if repair:
        launch._launch(out.device, finish)
    else:
        sums = finish.tensors[4]  # [B, H, T, D] or [H, T, D]
        sums = sums if problem.packed else sums.view(problem.batch, problem.heads_q, problem.len_q, problem.dim_qk)
        dq.copy_(sums.transpose(-3, -2) * problem.scale)
    return dq, dk, dv, marked


def _argument(x):
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    return None if x is None else _Descriptor(x)
