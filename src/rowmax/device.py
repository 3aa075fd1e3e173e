"""Facts about a device, by name or read from the one present. Plans and predictions take a `Device`, never a torch.device."""

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
    """

    name: str
    kind: str
    capability: tuple[int, int] = (0, 0)
    sms: int = 1
    shared_bytes: int = 0

    @classmethod
    def of(cls, device: "torch.device | torch.Tensor") -> "Device":
        """The device a tensor lies on; CUDA properties are read once."""
        device = device.device if isinstance(device, torch.Tensor) else device
        return _query(device.type, device.index)

    @classmethod
    def named(cls, name: str) -> "Device":
        """A device of the table, for plans without the hardware: `Device.named("H200")`."""
        try:
            return _NAMED[name.lower().replace("nvidia", "").strip()]
        except KeyError:
            raise KeyError(f"no device '{name}'; known are {', '.join(sorted(_NAMED))}") from None


# Public data sheets and the CUDA programming guide (shared memory per block by compute capability).
_NAMED = {
    "cpu": Device("cpu", "cpu"),
    "a100": Device("NVIDIA A100", "cuda", (8, 0), 108, 166_912),
    "l4": Device("NVIDIA L4", "cuda", (8, 9), 58, 101_376),
    "l40s": Device("NVIDIA L40S", "cuda", (8, 9), 142, 101_376),
    "h100": Device("NVIDIA H100", "cuda", (9, 0), 132, 232_448),
    "h200": Device("NVIDIA H200", "cuda", (9, 0), 132, 232_448),
    "b200": Device("NVIDIA B200", "cuda", (10, 0), 148, 232_448),
}


@cache
def _query(kind: str, index: "int | None") -> Device:
    if kind != "cuda":
        return Device(kind, kind, sms=torch.get_num_threads())
    facts = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    shared = getattr(facts, "shared_memory_per_block_optin", 0) or 101_376
    return Device(facts.name, "cuda", (facts.major, facts.minor), facts.multi_processor_count, shared)
