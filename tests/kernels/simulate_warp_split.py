"""`warp_split` run on the CPU as Python, with the simulator of the Hopper kernels and cp.async added.

Copies leave NaN in their buffer from the issue on and arrive when their group is awaited, no earlier: what is read too soon, or
written over too soon, is NaN. One thread does the work of all warps; layouts, and the barriers between warps that the compiler
puts in, are not modelled.
"""

import types

import simulate
import torch

from rowmax.kernels import generations, launch
from rowmax.plan.warp_split import WarpTile
from rowmax.problem import Operands, Problem


class Pointer(simulate.Pointer):
    """A pointer to the beginning of a tensor, as an argument of the kernel."""

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=self.tensor.dtype)


class Copies:
    """cp.async."""

    def __init__(self):
        self.group, self.groups = [], []

    def async_copy_global_to_shared(self, buffer, pointers, mask):
        shape = buffer.tensor.shape
        if torch.as_tensor(pointers.offset).shape != shape:
            raise simulate.Wrong("a copy between different shapes")
        pointers._places(torch.broadcast_to(mask, shape))  # an access outside is an error at once
        buffer.tensor.fill_(float("nan"))
        self.group.append(lambda: buffer.tensor.copy_(pointers.load(torch.broadcast_to(mask, shape))))

    def commit_group(self):
        self.groups.append(self.group)
        self.group = []

    def wait_group(self, outstanding):
        while len(self.groups) > outstanding:
            for arrive in self.groups.pop(0):
                arrive()


def language(program: int, programs: int, warps: int) -> tuple[dict, Copies]:
    machine = simulate.Machine(0, False)
    machine.local.index = 0
    names = simulate.language(machine, program, programs)
    copies, gl = Copies(), names["gl"]
    gl.num_warps = lambda: warps
    gl.ravel = lambda x: x.reshape(-1)
    gl.cast = lambda x, dtype: torch.as_tensor(x).to(dtype)
    gl.to_tensor = torch.as_tensor
    for layout in ("NVMMADistributedLayout", "BlockedLayout", "SwizzledSharedLayout", "DotOperandLayout"):
        setattr(gl, layout, lambda *_, **__: None)
    names["async_copy"] = copies
    names["mma_v2"] = lambda a, b, acc: a.float() @ b.float() + acc
    return names, copies


def forward(problem: Problem, operands: Operands, tile: WarpTile, *, need_lse: bool = True, mutants=(), repair: bool = True):
    """`(out, lse, suspect)` of the launcher's two kernels, the second one, where a tile is suspect, in Triton's interpreter."""
    out_shape, lse_shape = problem.outputs()
    out = torch.full(out_shape, torch.nan, dtype=problem.dtype)
    lse = torch.full(lse_shape, torch.nan) if need_lse else None
    if problem.packed:
        launch._launch(out.device, launch.outside_call(operands.cu_seqlens_q, out, lse=lse))
    call, guard = generations.warp_split_calls(problem, operands, tile, out, lse)
    arguments = [None if x is None else Pointer(x) for x in call.tensors] + list(call.numbers)
    code = simulate.sources(*mutants, kernel="warp_split")
    for program in range(call.programs):
        names, copies = language(program, call.programs, tile.warps)
        for part in code:
            exec(part, names)
        names["warp_split_kernel"](*arguments)
        if copies.group or copies.groups:
            raise simulate.Wrong("copies that nobody awaited")
    suspect = call.tensors[5]
    marked = suspect.clone()
    if repair and bool(marked.any()):
        launch._launch(out.device, guard)
        if bool(suspect.any()):
            raise simulate.Wrong("marks are left behind")
    return out, lse, marked
