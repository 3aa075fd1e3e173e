"""The Hopper backward for head dimensions above 128, run on the CPU with the machine of `simulate_backward.py`."""

import random
import types

import simulate
import simulate_backward
import torch
from simulate import Machine

from rowmax import testing
from rowmax.kernels import backward_wide_launch, launch
from rowmax.plan.hopper_wide import HopperWideTile
from rowmax.problem import Operands, Problem

LAYOUTS = ("own_layout", "own_shared_layout")
KERNELS = {"key_kernel": "backward_wide_keys", "query_kernel": "backward_wide_queries"}


def backward(
    problem: Problem, operands: Operands, tile: HopperWideTile, out, lse, grad_out, grad_lse=None, *, seed=0, late=False,
    mutants=(), repair=True, kernels=tuple(KERNELS),
):  # fmt: skip
    """`(dq, dk, dv, key marks, row marks)` of the launcher's four kernels; the first and the last in Triton's interpreter.

    `mutants`: replacements of text in the source. `repair`: run the last kernel. `kernels`: those of the two that run, each
    with the mutants.
    """
    like = operands[:3]
    dq, dk, dv = (torch.full(t.shape, torch.nan, dtype=t.dtype) for t in like)
    if problem.packed:
        launch._launch(dq.device, launch.outside_call(operands.cu_seqlens_q, dq))
        launch._launch(dq.device, launch.outside_call(operands.cu_seqlens_k, dk, dv))
    with testing.poisoned():
        calls = backward_wide_launch.wide_backward_calls(problem, operands, tile, out, lse, grad_out, grad_lse, dq, dk, dv)
    prepare, *main, finish = calls
    launch._launch(out.device, prepare)
    for (name, module), call in zip(KERNELS.items(), main, strict=True):
        if name not in kernels:
            continue
        arguments = [simulate_backward._argument(x) for x in call.tensors] + list(call.numbers)
        build = types.SimpleNamespace(**{key: getattr(value, "value", value) for key, value in vars(call.numbers[-1]).items()})
        code = simulate.sources(*mutants, kernel=module, lender="backward")
        for program in random.Random(seed).sample(range(call.programs), call.programs):
            names = simulate_backward.language(Machine(seed + program, late), program, call.programs)
            names.update({layout: (lambda *_: None) for layout in LAYOUTS})
            for part in code:
                exec(part, names)
            names[name](*arguments[:-1], build)
    key_marks, row_marks = main[0].tensors[10].clone(), main[1].tensors[8].clone()
    if repair:
        launch._launch(out.device, finish)
    return dq, dk, dv, key_marks, row_marks
