"""Eager calls without gradients: the second call of a kind goes straight to its launch.

The dispatcher, the checks and the plan cost several times what enqueueing the kernel does, which is what a small or a decoding
call waits for. `ops` keeps what they gave, by the form of the call.
"""

import torch

from rowmax.arguments import check_tensors
from rowmax.ops import FORWARD, ON_CPU, PLAIN, below_autograd, forward_below_autograd, kernels, launch_of

_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView).raw_repr()  # taken away by inference mode
_USUAL_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect).raw_repr() | _VIEWS


def forward_without_gradient(need_lse, *call):
    """`rowmax::forward` when no input needs a gradient. `call`: its other arguments, in order."""
    try:
        if not (_somebody_listens(*call[:3]) or torch.autograd._profiler_enabled()):
            launch = launch_of(need_lse, *call)
            if launch is not None:
                return launch(*call[:5])
        if torch._C._are_functorch_transforms_active():  # a level below may need gradients, and for them the LSE
            return FORWARD(True, *call)
        return forward_below_autograd(need_lse, *call)
    except RuntimeError:  # NotImplementedError is one
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
        check_tensors(**{name: tensor for name, tensor in zip(names, call, strict=False) if tensor is not None})
        raise


class Prepared:
    """A call on tensors that stay where they are: calling it computes their attention into the same outputs again.

    Attributes:
        problem: what is computed, spelled out; plan: how.
    """

    def __init__(self, operator, planned, return_lse: bool, *call):
        """`planned`: gives problem, operands and plan of a call of the operator."""
        self.problem, operands, self.plan = planned(*call)
        q, k, v = operands[:3]
        out_shape, lse_shape = self.problem.outputs()
        with torch.inference_mode(False), torch.no_grad():  # a tensor of inference mode could not be written outside of it
            out = torch.empty(out_shape, dtype=q.dtype, device=q.device)
            lse = torch.empty(lse_shape, dtype=self.problem.lse_dtype, device=q.device) if return_lse else None
        self._written = written = [out] if lse is None else [out, lse]
        self._result = (out, lse) if return_lse else out
        if self.plan.algorithm in ON_CPU or _somebody_listens(q, k, v):

            def run():
                with torch.no_grad():
                    for result, made in zip(written, below_autograd(operator, return_lse, *call), strict=False):
                        result.copy_(made)

            self._run = run
        else:
            self._run = kernels().Forward(self.problem, self.plan, return_lse).into(operands, out, lse)

    def __call__(self):
        """The output, or output and LSE: the same tensors every time."""
        self._run()
        torch._C._increment_version(self._written)  # a graph of autograd that saved them notices that they changed
        return self._result

    def __reduce_ex__(self, protocol):
        raise TypeError("a prepared call is bound to its tensors and cannot be copied or pickled: prepare the copies anew")

    def __repr__(self) -> str:
        return f"<prepared '{self.problem}' by {self.plan}>"


def _somebody_listens(q, k, v) -> bool:
    """Does a tensor subclass, a dispatch mode, a functorch transform or a trace want to see the operator, or has a tensor no
    memory of its own to read (meta) or one to be read with the other sign?"""
    return (
        not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN)
        or (q.is_meta or q.is_neg() or k.is_neg() or v.is_neg())
        or torch._C._dispatch_tls_local_include_set().raw_repr() | _VIEWS != _USUAL_KEYS
        or torch._C._len_torch_function_stack() > 0
    )
