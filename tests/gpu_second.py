"""Second order on a GPU, as checks of `gpu_checks.py`: against fp64, with kernels for the first order, in linear memory."""

import torch

import rowmax
import score_mods  # noqa: F401, makes the functions that problems name
from rowmax import Problem, reference, testing
from rowmax.numerics import UNIT_ROUNDOFF

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def backward_through_backward(attend, inputs, direction):
    leaves = [t.detach().requires_grad_() for t in inputs]
    grads = torch.autograd.grad(curved(attend(*leaves)), leaves, create_graph=True)
    return torch.autograd.grad(sum((grad * t).sum() for grad, t in zip(grads, direction, strict=True)), leaves)


def forward_mode(attend, inputs, direction):
    return torch.func.jvp(attend, inputs, direction)[1]


def forward_mode_of_gradient(attend, inputs, direction):
    return torch.func.jvp(torch.func.grad(lambda *x: curved(attend(*x)), (0, 1, 2)), inputs, direction)[1]


def mean_flow(attend, inputs, direction):
    leaves = [t.detach().requires_grad_() for t in inputs]
    (out, lse), (t_out, t_lse) = torch.func.jvp(attend, tuple(leaves), direction)
    return torch.autograd.grad((out - 0.3 * t_out.detach()).square().sum() + (lse * t_lse).sum(), leaves)


def curved(results):
    return sum((t * 1.3).sin().sum() for t in results)


def compared(text: str) -> None:
    """Errors at most twice those of dense attention in the same type, and rounding (fp32: the rule's 16 units)."""
    problem = Problem.parse(text)
    operands = testing.operands(problem, device="cuda")
    cu, given = operands[3:5], {"left": problem.band.left, "right": problem.band.right, "scale": problem.scale}

    def finite(out, lse):
        return out, torch.where(torch.isneginf(lse), 0.0, lse)

    def ours(q, k, v):
        return finite(*testing.attend(problem, operands._replace(q=q, k=k, v=v)))

    def definition(q, k, v):
        found = reference.attention(q, k, v, **given) if cu[0] is None else reference.attention_varlen(q, k, v, *cu, **given)
        return finite(*found)

    generator = torch.Generator(device="cuda").manual_seed(7)
    direction = tuple(torch.randn(t.shape, device="cuda", generator=generator).to(t.dtype) for t in operands[:3])
    unit = UNIT_ROUNDOFF[problem.dtype_name] * (16 if problem.dtype_name == "fp32" else 1)
    for mixture in (forward_mode, backward_through_backward, forward_mode_of_gradient, mean_flow):
        exact = mixture(definition, tuple(t.double() for t in operands[:3]), tuple(t.double() for t in direction))
        found, same = (mixture(attend, tuple(operands[:3]), direction) for attend in (ours, definition))
        for number, (got, dense, want) in enumerate(zip(found, same, exact, strict=True)):
            error, allowed = (float((t.double() - want).abs().max()) for t in (got, dense))
            bound = 2 * allowed + unit * float(want.abs().max())
            assert error <= bound, f"'{text}' {mixture.__name__} {number}: {error:.3g}, allowed {bound:.3g}"


@check
def second_order_is_the_definition():
    for text in (
        "b2 h4/2 q300 k330 d64 bf16 causal",
        "b1 h2 q200 k200 d128 fp16 window(60,5)",
        "b2 h2/1 q130 k257 d80 fp32 causal",
        "b3 h4/2 q300 k300 d64 bf16 packed causal",
        "b1 h2 q300 k100 d64 bf16 causal",
        "b1 h2 q100 k120 d256 bf16",
    ):
        compared(text)


@check
def second_order_of_biases_masks_dropout_and_mods_is_the_cpu_s(device="cuda"):
    """In fp32, where kernels compute the first order, beside fp64 on the CPU, which `test_second_order.py` holds to the
    definition; errors at most twice those of fp32 on the CPU, and 16 units of the largest number."""
    for text in (
        "b2 h4/2 q200 k230 d64 {} causal bias(hqk) mask(bk)",
        "b1 h2 q200 k200 d64 {} causal bias(1) dropout=0.2",
        "b2 h4/2 q150 k150 d64 {} causal softcap=3.0 mod(everything)",
        "b3 h4/2 q200 k200 d64 {} packed causal dropout=0.1 mod(everything)",
    ):
        operands = testing.operands(Problem.parse(text.format("fp32")))
        found, same, exact = (
            second_order(text, operands, *where) for where in ((device, "fp32"), ("cpu", "fp32"), ("cpu", "fp64"))
        )
        for number, (got, other, want) in enumerate(zip(found, same, exact, strict=True)):
            error, allowed = (float((t - want).abs().max()) for t in (got, other))
            bound = 2 * allowed + 16 * UNIT_ROUNDOFF["fp32"] * float(want.abs().max())
            assert error <= bound, f"'{text}' {number}: {error:.3g}, allowed {bound:.3g}"


def second_order(text: str, operands, device: str, dtype: str) -> list:
    """Tangents, and gradients of gradients, by q, k, v and the bias, as fp64 on the CPU."""
    problem, wide = Problem.parse(text.format(dtype)), {"fp32": torch.float32, "fp64": torch.float64}[dtype]
    moved = [None if t is None else t.to(device) for t in operands]
    moved = [t.to(wide) if t is not None and t.is_floating_point() else t for t in moved]
    tensors = type(operands)(*moved)
    names = ("q", "k", "v", *["bias"] * (tensors.bias is not None))
    inputs = tuple(torch.nan_to_num(getattr(tensors, name), neginf=0.0) for name in names)
    generator = torch.Generator().manual_seed(7)
    direction = tuple(torch.randn(t.shape, generator=generator).to(device, wide) for t in inputs)

    def attend(*x):
        out, lse = testing.attend(problem, tensors._replace(**dict(zip(names, x, strict=True))))
        return out, torch.where(torch.isneginf(lse), 0.0, lse)

    mixtures = (forward_mode, backward_through_backward)
    return [t.detach().double().cpu() for mixture in mixtures for t in mixture(attend, inputs, direction)]


@check
def second_order_of_fp32_is_not_tf32():
    """Also where matmuls of the program may use TF32, which is put back afterwards."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        matmul.allow_tf32 = True
        problem = Problem.parse("b1 h2 q128 k128 d64 fp32 causal")
        operands = testing.operands(problem, device="cuda")
        direction = tuple(torch.ones_like(t) for t in operands[:3])
        found = forward_mode(lambda *x: rowmax.attention(*x, causal=True, return_lse=True), tuple(operands[:3]), direction)
        assert matmul.allow_tf32, "what was allowed before"
        wide = tuple(t.double() for t in operands[:3])
        exact = forward_mode(lambda *x: reference.attention(*x, right=0), wide, tuple(t.double() for t in direction))
    finally:
        matmul.allow_tf32 = before
    for got, want in zip(found, exact, strict=True):
        error, size = float((got.double() - want).abs().max()), float(want.abs().max())
        assert error < 2.0**-24 * 64 * (1 + size), f"off by {error:.3g} of {size:.3g}: TF32 is off by 2^-11"


@check
def second_order_memory_is_linear_in_the_length():
    """A step of a mean flow, and a gradient of a gradient: twice the tokens take at most 2.3 times as much."""
    most = {}
    for mixture in (mean_flow, backward_through_backward):
        for length in (4096, 8192, 16384):
            problem = Problem.parse(f"b1 h4 q{length} k{length} d64 bf16 causal")
            operands = testing.operands(problem, device="cuda")
            direction = tuple(torch.ones_like(t) for t in operands[:3])

            def attend(*x):
                return rowmax.attention(*x, causal=True, return_lse=True)

            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            mixture(attend, tuple(operands[:3]), direction)
            most[length] = torch.cuda.max_memory_allocated() - before
        assert most[16384] < 2 * 4 * 16384**2, f"{mixture.__name__}: {most}, less than half of the scores in fp32"
        for length in (4096, 8192):  # where tiles are as large as they get, it hardly grows
            assert most[2 * length] < 2.3 * most[length], f"{mixture.__name__}: {most}"
