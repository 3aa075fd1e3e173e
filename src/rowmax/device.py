"""Facts about a device, by name or read from the one present. Plans and predictions take a `Device`, never a torch.device.

A plan needs a `Device`; a prediction also its `Rates`: how much of each kind of work a multiprocessor does in a clock cycle.
"""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Device:
    """Attributes:
    name: as the vendor spells it.
    kind: "cpu" or "cuda".
    capability: CUDA compute capability, (9, 0) for Hopper; (0, 0) on a CPU.
    sms: streaming multiprocessors (CPU: threads).
    shared_bytes: shared memory one block may take.
    fast_bf16: bf16 products are faster than fp32's; on a CPU torch says so (AVX-512 and newer), else they are far slower.
    """

    name: str
    kind: str
    capability: tuple[int, int] = (0, 0)
    sms: int = 1
    shared_bytes: int = 0
    fast_bf16: bool = True

    @classmethod
    def of(cls, device: "torch.device | torch.Tensor | str") -> "Device":
        """The device a tensor lies on, or by torch's name, "cuda:1"; CUDA properties are read once."""
        device = device.device if isinstance(device, torch.Tensor) else torch.device(device)
        return _query(device.type, device.index)

    @classmethod
    def named(cls, name: str) -> "Device":
        """A device of the table, for plans without the hardware: `Device.named("H200")`.

        Raises:
            KeyError: there is none of that name; says which there are.
        """
        try:
            return _NAMED[str(name).lower().replace("nvidia", "").strip()]
        except KeyError:
            raise KeyError(f"no device '{name}'; known are {', '.join(sorted(_NAMED))}") from None


# Public data sheets and the CUDA programming guide (shared memory per block by compute capability).
_NAMED = {
    "cpu": Device("cpu", "cpu"),
    "v100": Device("Tesla V100", "cuda", (7, 0), 80, 98_304),
    "a100": Device("NVIDIA A100", "cuda", (8, 0), 108, 166_912),
    "l4": Device("NVIDIA L4", "cuda", (8, 9), 58, 101_376),
    "4090": Device("NVIDIA GeForce RTX 4090", "cuda", (8, 9), 128, 101_376),
    "l40s": Device("NVIDIA L40S", "cuda", (8, 9), 142, 101_376),
    "h100": Device("NVIDIA H100", "cuda", (9, 0), 132, 232_448),
    "h200": Device("NVIDIA H200", "cuda", (9, 0), 132, 232_448),
    "b200": Device("NVIDIA B200", "cuda", (10, 0), 148, 232_448),
}


@cache
def _query(kind: str, index: "int | None") -> Device:
    if kind != "cuda":
        fast_bf16 = kind != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return Device(kind, kind, sms=torch.get_num_threads(), fast_bf16=fast_bf16)
    facts = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    shared = getattr(facts, "shared_memory_per_block_optin", 0) or 101_376
    return Device(facts.name, "cuda", (facts.major, facts.minor), facts.multi_processor_count, shared)


@dataclass(frozen=True)
class Rates:
    """Attributes:
    clock_hz: highest clock of the multiprocessors.
    tensor_flops: of 16-bit matrix products with fp32 sums, a clock and a multiprocessor.
    lanes: fp32 operations (an FMA is one) a clock and a multiprocessor; exponentials are `EXPONENTIALS` everywhere.
    hbm_bytes_per_s: of the data sheet.
    l2_bytes: of the second-level cache.
    shared_bytes, threads, blocks: of a multiprocessor; it has `REGISTERS` registers.
    hbm_share: of the data sheet's bandwidth that a copy reaches.
    source: "measured" where a results file of this repository decided `hbm_share`, otherwise "data sheet".
    """

    clock_hz: float
    tensor_flops: int
    lanes: int
    hbm_bytes_per_s: float
    l2_bytes: float
    shared_bytes: int
    threads: int = 2048
    blocks: int = 32
    hbm_share: float = 0.9
    source: str = "data sheet"

    @classmethod
    def of(cls, device: Device) -> "Rates":
        """Those of a named device; for another GPU those of the largest chip here that is no newer.

        Raises:
            KeyError: a device without CUDA.
        """
        if device.kind != "cuda":
            raise KeyError(f"no rates are known of a {device.kind}")
        words = device.name.lower().replace("-", " ").split()
        for key, rates in _RATES.items():
            if key in words:
                return rates
        newest = max((key for key in _RATES if _NAMED[key].capability <= device.capability), default="v100", key=_generation)
        return _RATES[newest]


def _generation(key: str) -> tuple:
    return _NAMED[key].capability, _NAMED[key].sms


EXPONENTIALS, REGISTERS = 16, 65_536
_MB = 2**20
# Data sheets: highest clock, dense 16-bit FLOP a clock and multiprocessor, memory; CUDA programming guide: the limits.
_RATES = {
    "v100": Rates(1.53e9, 1024, 64, 0.9e12, 6 * _MB, 98_304),
    "a100": Rates(1.41e9, 2048, 64, 2.039e12, 40 * _MB, 167_936),
    "l4": Rates(2.04e9, 1024, 128, 0.3e12, 48 * _MB, 102_400, 1536, 24),
    "4090": Rates(2.52e9, 512, 128, 1.008e12, 72 * _MB, 102_400, 1536, 24),  # fp32 sums at half the rate of fp16 ones
    "l40s": Rates(2.52e9, 1024, 128, 0.864e12, 96 * _MB, 102_400, 1536, 24),
    "h100": Rates(1.98e9, 4096, 128, 3.35e12, 50 * _MB, 233_472),
    "h200": Rates(1.98e9, 4096, 128, 4.8e12, 50 * _MB, 233_472, source="measured"),  # a copy reaches 4.3 TB/s
    "b200": Rates(1.85e9, 8192, 128, 8.0e12, 126 * _MB, 233_472),
}
