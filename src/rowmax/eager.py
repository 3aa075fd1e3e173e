"""Eager calls without gradients: the second call of a kind goes straight to its launch.

The dispatcher, the checks and the plan cost several times what enqueueing the kernel does, which is what a small or a decoding
call waits for. They depend on everything about a call but the addresses and contents of its tensors, so their result is kept.
"""

import torch

from rowmax.ops import ON_CPU, forward_below_autograd, kernels, plan_forward

MOST = 4096  # a key holds lengths, and a server may meet any number of them
_prepared: dict = {}  # form of a call -> its launch; None: no kernel of ours runs it
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView).raw_repr()  # taken away by inference mode
_USUAL_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect).raw_repr() | _VIEWS


def forward_without_gradient(need_lse, q, k, v, cu_seqlens_q, cu_seqlens_k, *numbers):
    """`rowmax::forward` when no input needs a gradient. `numbers` are its other arguments, in order."""
    operands = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    if _somebody_listens(q, k, v) or torch.autograd._profiler_enabled() or not _plain_lengths(cu_seqlens_q, cu_seqlens_k):
        return forward_below_autograd(need_lse, *operands, *numbers)
    form = (
        *(need_lse, numbers, None if cu_seqlens_q is None else (_form(cu_seqlens_q), _form(cu_seqlens_k))),
        *(q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % 16),
        *(k.shape, k.stride(), k.dtype, k.device, k.data_ptr() % 16),
        *(v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % 16),
    )
    launch = _prepared.get(form, False)
    if launch is False:
        problem, _, plan = plan_forward(*operands, *numbers)
        launch = kernels().Forward(problem, plan, need_lse) if plan.algorithm not in ON_CPU else None
        if len(_prepared) >= MOST:
            _prepared.clear()
        _prepared[form] = launch
    return forward_below_autograd(need_lse, *operands, *numbers) if launch is None else launch(*operands)


class Prepared:
    """A call on tensors that stay where they are: calling it computes their attention into the same outputs again.

    Attributes:
        problem: what is computed, spelled out; plan: how.
    """

    def __init__(self, return_lse: bool, need_lse: bool, *call):
        self.problem, operands, self.plan = plan_forward(*call)
        q, k, v = operands[:3]
        out_shape, lse_shape = self.problem.outputs()
        with torch.inference_mode(False), torch.no_grad():  # a tensor of inference mode could not be written outside of it
            out = torch.empty(out_shape, dtype=q.dtype, device=q.device)
            lse = torch.empty(lse_shape, dtype=self.problem.lse_dtype, device=q.device) if need_lse else None
        self._written = [out] if lse is None else [out, lse]
        self._result = (out, lse) if return_lse else out
        if self.plan.algorithm in ON_CPU or _somebody_listens(q, k, v):

            def run():
                with torch.no_grad():
                    for result, made in zip(self._written, forward_below_autograd(need_lse, *call), strict=False):
                        result.copy_(made)

            self._run = run
        else:
            self._run = kernels().Forward(self.problem, self.plan, need_lse).into(operands, out, lse)

    def __call__(self):
        """The output, or output and LSE: the same tensors every time."""
        self._run()
        torch._C._increment_version(self._written)  # a graph of autograd that saved them notices that they changed
        return self._result

    def __repr__(self) -> str:
        return f"<prepared '{self.problem}' by {self.plan}>"


def _plain_lengths(cu_seqlens_q, cu_seqlens_k) -> bool:
    """Are they absent, or as the kernels read them? Values on the CPU are checked by the operator."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return cu_seqlens_q is cu_seqlens_k
    return all(type(cu) in _PLAIN and not cu.is_cpu and cu.is_contiguous() for cu in (cu_seqlens_q, cu_seqlens_k))


def _somebody_listens(q, k, v) -> bool:
    """Does a tensor subclass, a dispatch mode, a functorch transform or a trace want to see the operator, or has a tensor no
    memory of its own to read (meta) or one to be read with the other sign?"""
    return (
        not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN)
        or (q.is_meta or q.is_neg() or k.is_neg() or v.is_neg())
        or torch._C._dispatch_tls_local_include_set().raw_repr() | _VIEWS != _USUAL_KEYS
        or torch._C._len_torch_function_stack() > 0
    )


def _form(t: torch.Tensor):
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16
