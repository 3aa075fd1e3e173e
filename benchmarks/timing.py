"""The rate that no attention exceeds, and `samples_ms`, the times of several calls side by side (`rowmax.analysis.timing`)."""

import torch

from rowmax.analysis.timing import samples_ms

__all__ = ["peak_tflops", "samples_ms"]


def peak_tflops(dtype: torch.dtype, device: torch.device) -> float:
    """The best of a few large matrix products of random numbers: no attention is faster, and a row that claims so is wrong.

    On a CPU the best over fp32 and the type itself, because torch's fp16 product there is slower than fp32.
    """
    if device.type == "cuda":
        return max(_matmul_tflops(dtype, device, n) for n in (4096, 8192))
    return max(_matmul_tflops(kind, device, 2048) for kind in {dtype, torch.float32})


def _matmul_tflops(dtype: torch.dtype, device: torch.device, n: int) -> float:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        times, _ = samples_ms({"mm": lambda: torch.mm(a, b)}, device, 0.1)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    return 2 * n**3 / min(times["mm"]) / 1e9
