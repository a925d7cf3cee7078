"""What recomputing takes in seconds: products by the device's arithmetic, the rest by its memory.

An operator is bound by arithmetic or by memory (Williams, Waterman, Patterson: Roofline, 2009).
Here products, convolutions and attention cores take `flops / flops_per_s`, every other operator
`bytes read and written / bytes_per_s`. Both rates are measured on the device that trains, in a few
milliseconds; only their ratio decides which plan is best. Launch times are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_TRIES = 3


@dataclass(frozen=True)
class Rates:
    """How fast a device is.

    Attributes:
        bus_bytes_per_s: between device and host memory, one way.
    """

    flops_per_s: float
    bytes_per_s: float
    bus_bytes_per_s: float

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """`moved_bytes` of the operators that are no products."""
        return flops / self.flops_per_s + moved_bytes / self.bytes_per_s

    def __str__(self) -> str:
        return (
            f"{self.flops_per_s / 1e12:.3g} TFLOP/s, {self.bytes_per_s / 1e9:.3g} GB/s, "
            f"bus {self.bus_bytes_per_s / 1e9:.3g} GB/s"
        )


def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Products of this type and copies, the best of a few. Allocates up to 0.3 GB on a GPU."""
    small = device.type == "cpu"
    width = 512 if small else 4096
    a = torch.ones(width, width, dtype=dtype, device=device)
    product_s = _best_s(lambda: torch.mm(a, a), device)
    words = torch.zeros(2**20 * (4 if small else 32), dtype=torch.float32, device=device)
    there = torch.empty_like(words)
    copy_s = _best_s(lambda: there.copy_(words), device)
    host = torch.empty(words.numel(), dtype=torch.float32, pin_memory=device.type == "cuda")
    bus_s = _best_s(lambda: host.copy_(words), device)
    nbytes = words.numel() * words.element_size()
    return Rates(2 * width**3 / product_s, 2 * nbytes / copy_s, nbytes / bus_s)


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    module = torch.get_device_module(device.type)
    best = float("inf")
    for _ in range(_TRIES + 1):  # the first warms up, and is never the best
        module.synchronize()
        start_s = time.perf_counter()
        work()
        module.synchronize()
        best = min(best, time.perf_counter() - start_s)
    return max(best, 1e-9)
