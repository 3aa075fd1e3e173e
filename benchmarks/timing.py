"""The rate that no attention exceeds, and `samples_ms`, the times of several calls side by side (`rowmax.analysis.timing`)."""

import torch

from rowmax import Device
from rowmax.analysis.timing import samples_ms
from rowmax.device import Rates

__all__ = ["most_tflops", "peak_tflops", "samples_ms"]


def most_tflops(dtype: torch.dtype, device: torch.device, product: float) -> float:
    """The bound that a row may not exceed: what all tensor cores do at the highest clock there is.

    A matrix product is no bound on a GPU: the limit of power lowers its clock by more than that of attention, of which 256
    dimensions reach 800 TFLOP/s on an H200 where a product of 8192 x 8192 then reaches 783. `product` is the bound on a CPU,
    whose peak is in no table, and where a chip does more than the table knows of.
    """
    if device.type != "cuda":
        return product
    here = Device.of(device)
    rates = Rates.of(here)
    clock_hz = max(rates.clock_hz, 1e3 * getattr(torch.cuda.get_device_properties(device), "clock_rate", 0))
    flops = rates.tensor_flops / (2 if dtype == torch.float32 else 1)  # TF32, at least as many as those of fp32 lanes
    return max(flops * here.sms * clock_hz / 1e12, product)


def peak_tflops(dtype: torch.dtype, device: torch.device) -> float:
    """The best of a few large matrix products of random numbers.

    On a CPU of fp32 and the type itself the faster, because torch's fp16 product there is slower than fp32, and so is that of
    bf16 without AVX-512.
    """
    if device.type == "cuda":
        return max(_matmul_tflops(dtype, device, n) for n in (4096, 8192))
    kind = max((dtype, torch.float32), key=lambda kind: _matmul_tflops(kind, device, 256))
    return _matmul_tflops(kind, device, 2048)


def _matmul_tflops(dtype: torch.dtype, device: torch.device, n: int) -> float:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        times, _ = samples_ms({"mm": lambda: torch.mm(a, b)}, device, 0.1)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    return 2 * n**3 / min(times["mm"]) / 1e9
