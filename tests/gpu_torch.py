"""What torch asks of an operator on a GPU: other devices than the current one, and Inductor. Checks of `gpu_checks.py`."""

import torch
from torch._dynamo.testing import CompileCounterWithBackend

import paged_cases
import rowmax
from rowmax import Problem, testing
from rowmax.testing.paged import check_paged

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


ON_ANOTHER_DEVICE = {
    "small": "b1 h2 q50 k50 d64 bf16 causal",
    "deterministic": "b2 h4/2 q600 k600 d128 bf16 causal deterministic",
    "wide": "b2 h4/2 q300 k300 d256 bf16 causal",
    "packed": "b3 h4/2 q300 k300 d128 fp16 packed causal",
    "bent": "b3 h4/2 q300 k300 d64 fp32 packed window(50,0) softcap=20.0 sink",
    "decoding": "b2 h8/2 q1 k900 d128 bf16 causal",
}


def _on_another_device(run):
    """Every entry, while another device is current, while their own is, and while another is once more: launches that were kept
    are those of a device. Needs two; their results lie where the operands do, and nothing on the other."""

    def check_device():
        if torch.cuda.device_count() < 2:
            return
        for current in (0, 0, 1, 0):
            with torch.cuda.device(current):
                before = torch.cuda.memory_allocated(0)
                run(f"while cuda:{current} is current")
                assert torch.cuda.current_device() == current
                assert torch.cuda.memory_allocated(0) <= before

    return check_device


def _call(text):
    def run(when):
        report = testing.check(Problem.parse(text), device="cuda:1")
        assert report.ok, f"{when}: {report}"

    return run


# One check each, so that processes side by side build their kernels.
CHECKS |= {f"a_tensor_on_another_device_{name}": _on_another_device(_call(text)) for name, text in ON_ANOTHER_DEVICE.items()}
CHECKS["a_tensor_on_another_device_pages"] = _on_another_device(lambda when: _pages_and_parts_on("cuda:1"))


def _pages_and_parts_on(device):
    """Pages, appending to them, merging, and a prepared call."""
    for case in paged_cases.CASES[:: len(paged_cases.CASES) // 8]:
        options = {"heads_first": case.heads_first, "page_scales": case.page_scales, "device": device}
        report = check_paged(case.problem, case.lengths, case.kind, num_splits=case.splits or None, **options)
        assert report.ok, str(report)
    new = [torch.randn(2, 5, 2, 64).bfloat16() for _ in "kv"]
    pages = [torch.zeros(8, 16, 2, 64, dtype=torch.bfloat16) for _ in "kv"]
    there = [t.to(device) for t in pages]
    places = torch.arange(8).view(2, 4), torch.tensor([20, 5])
    rowmax.append_kv(*pages, *new, *places)
    rowmax.append_kv(*there, *(t.to(device) for t in (*new, *places)))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(there, pages, strict=True)), "append_kv"
    problem = Problem.parse("b1 h4/2 q70 k200 d64 bf16")
    operands = testing.operands(problem, device=device)
    q, k, v = operands[:3]
    parts = [rowmax.attention(q, k[:, keys], v[:, keys], return_lse=True) for keys in (slice(0, 90), slice(90, 200))]
    report = testing.check_forward(problem, operands, *rowmax.merge(*zip(*parts, strict=True)))
    assert report.ok, f"merge: {report}"
    attend, want = rowmax.prepare(q, k, v), rowmax.attention(q, k, v)
    for _ in range(3):
        assert torch.equal(attend(), want), "prepare"


class _Block(torch.nn.Module):
    """Attention of two kinds between projections, with what a compiler likes to fuse around them."""

    def __init__(self):
        super().__init__()
        self.into, self.out = torch.nn.Linear(64, 3 * 64), torch.nn.Linear(64, 64)

    def forward(self, x, cu_seqlens):
        q, k, v = (self.into(torch.nn.functional.gelu(x)) * 0.5).unflatten(-1, (3, 4, 16)).unbind(-3)
        dense = rowmax.attention(q, k, v, causal=True)
        packed = rowmax.attention_varlen(*(t[0] for t in (q, k, v)), cu_seqlens, cu_seqlens, window=(20, 0))
        return x + self.out((dense + packed).flatten(-2))


@check
def inductor_trains_as_eager_does(device="cuda"):
    """A whole graph, for all lengths: a call between exact operations to the bit, a small model by torch's own tolerance."""

    def call(q, k, v):
        out, lse = rowmax.attention(q * 2, k, v, causal=True, deterministic=True, return_lse=True)
        return out * 0.5, lse

    torch._dynamo.reset()
    torch.manual_seed(0)
    counters = [CompileCounterWithBackend("inductor") for _ in range(2)]
    compiled_call = torch.compile(call, fullgraph=True, dynamic=True, backend=counters[0])
    model = _Block().to(device)
    compiled_model = torch.compile(model, fullgraph=True, dynamic=True, backend=counters[1])
    for length in (100, 130, 257):
        given = [torch.randn(2, length, heads, 64, device=device).bfloat16() for heads in (4, 2, 2, 4)]
        results = []
        for run in (call, compiled_call):
            leaves = [t.clone().requires_grad_() for t in given[:3]]
            out, lse = run(*leaves)
            results.append((out, lse, *torch.autograd.grad((out, lse), leaves, (given[3], torch.ones_like(lse)))))
        for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
            assert torch.equal(one, other), f"{name} of length {length}"
        x = torch.randn(1, length, 64, device=device, requires_grad=True)
        cu_seqlens = torch.tensor([0, 40, 40, length], dtype=torch.int32, device=device)
        results = []
        for run in (model, compiled_model):
            y = run(x, cu_seqlens)
            results.append((y, *torch.autograd.grad(y.square().mean(), (x, *model.parameters()))))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(other, one)
    assert all(counter.frame_count <= 2 for counter in counters), [counter.frame_count for counter in counters]
