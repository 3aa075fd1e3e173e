"""The kernel of latent attention run on the CPU with the machine of `simulate.py`; the others in Triton's interpreter."""

import random
import types

import simulate
import torch
from simulate import Machine, Shared, Wrong

from rowmax.kernels import decode_launch, latent_launch, launch
from rowmax.paged import PagedOperands, PagedProblem
from rowmax.plan.split_kv import SplitTile


class Pointer(simulate.Pointer):
    """An argument of the kernel."""

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=self.tensor.dtype)


class View(Shared):
    """Shared memory that is written by threads and read by the tensor cores: in between its writer passes a fence."""

    def _other(self, tensor):
        return View(self.machine, tensor)

    def index(self, i):
        return self._other(self.tensor[int(i)])

    def reshape(self, shape):
        return self._other(self.tensor.view(*map(int, shape)))

    def permute(self, order):
        return self._other(self.tensor.permute(*order))

    def slice(self, start, length, dim):
        return self._other(self.tensor.narrow(dim, int(start), int(length)))

    def spans(self, place: int) -> bool:
        """Does it lie around an address? Rows of other views may lie between its own."""
        t = self.tensor
        size = sum((length - 1) * stride for length, stride in zip(t.shape, t.stride(), strict=True)) + 1
        return t.data_ptr() <= place < t.data_ptr() + size * t.element_size()


def language(machine: Machine, program: int, programs: int) -> dict:
    names = simulate.language(machine, program, programs)
    gl, allocate, multiply = names["gl"], names["gl"].allocate_shared_memory, names["warpgroup_mma"]

    def make(dtype, shape, layout):
        made = allocate(dtype, shape, layout)
        return View(machine, made.tensor) if isinstance(made, Shared) else made

    def fenced(a, b, acc, **options):
        for factor in (a, b):
            if isinstance(factor, View) and any(factor.spans(place) for place in machine.unfenced):
                raise Wrong("a product of shared memory that was written without a fence")
        return multiply(a, b, acc, **options)

    gl.allocate_shared_memory, gl.BlockedLayout = make, lambda *_: None
    gl.constexpr_function = lambda function: function
    return names | {"warpgroup_mma": fenced, "share_layout": lambda *_: None}


def attend(problem: PagedProblem, operands: PagedOperands, tile: SplitTile, *, need_lse=True, seed=0, late=False, mutants=()):
    """`(out, lse)` of the launcher's kernels. `mutants`: replacements of text in the source of the one in Gluon."""
    out_shape, lse_shape = problem.outputs()
    out = torch.full(out_shape, 0.0 if problem.packed else torch.nan, dtype=problem.dtype)
    lse = torch.full(lse_shape, -torch.inf if problem.packed else torch.nan) if need_lse else None
    elements = decode_launch.part_elements(problem, tile)
    parts = torch.full((elements,), torch.nan) if elements else None
    work = torch.full((latent_launch.programs_of(problem, tile), latent_launch.FIELDS), 2**40)
    first, call, *combine = latent_launch.calls(problem, operands, tile, out, lse, parts, work)
    launch._launch(out.device, first)
    arguments = [_argument(x) for x in call.tensors] + list(call.numbers)
    code = simulate.sources(*mutants, kernel="latent")
    for program in random.Random(seed).sample(range(call.programs), call.programs):
        names = language(Machine(seed + program, late), program, call.programs)
        for part in code:
            exec(part, names)
        names["latent_kernel"](*arguments)
    for one in combine:
        launch._launch(out.device, one)
    return out, lse


def _argument(x):
    return Pointer(x) if isinstance(x, torch.Tensor) else None if x is None else simulate.Descriptor(x, False)
