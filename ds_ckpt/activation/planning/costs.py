"""Costs of operators: launches, floating-point operations, bytes, and seconds on a device.

An operator is bound by arithmetic or by memory (Williams, Waterman, Patterson: Roofline, 2009).
Here products, convolutions and attention cores take `flops / flops_per_s`, every other operator
`bytes read and written / bytes_per_s`. Launch times are left out.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from ds_ckpt.telemetry.memory import Operator

_TRIES = 3
_MEMORY = "empty empty_like empty_strided new_empty new_empty_strided detach lift_fresh set_"
_NO_KERNEL = {f"aten::{n}" for n in (*_MEMORY.split(), "_local_scalar_dense", "is_same_size")}
_FLASH_CPU = "aten._scaled_dot_product_flash_attention_for_cpu"
# formulas of shapes that torch's registry does not have; a grouped product multiplies each group's
# rows by its matrix
_MORE: dict[str, Callable[..., int]] = {
    _FLASH_CPU: lambda q, k, v, *_, **__: sdpa_flop(q, k, v),
    f"{_FLASH_CPU}_backward": lambda g, q, k, v, *_, **__: sdpa_backward_flop(g, q, k, v),
    "aten._grouped_mm": lambda a, b, *_, **__: 2 * a.numel() * b[-1],
}


def flops_of(operator: Operator) -> int:
    """Count multiplications and additions of a product, convolution or attention core."""
    packet, kwargs = operator.func.overloadpacket, operator.kwargs
    more = _MORE.get(str(packet))
    if more is not None:
        return int(more(*(getattr(arg, "shape", arg) for arg in operator.args), **kwargs))
    formula = flop_registry.get(packet)
    return int(formula(*operator.args, **kwargs, out_val=operator.out)) if formula else 0


def moved_bytes(operator: Operator) -> int:
    """Count the bytes of all arguments and results, each object once."""
    tensors = {id(t): t for t in (*operator.given, *operator.made)}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@functools.cache
def launches(func: Any) -> bool:
    """Return whether an operator computes: on an accelerator it starts a kernel."""
    schema = func._schema
    if schema.name in _NO_KERNEL or schema.name.startswith(("prim::", "profiler::")):
        return False
    aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
    view = any(not alias.is_write for alias in aliases)
    return not view and bool(schema.returns or schema.is_mutable)


@dataclass(frozen=True)
class Rates:
    """Rates of a device; `bus_bytes_per_s` is between device and host memory, one way."""

    flops_per_s: float
    bytes_per_s: float
    bus_bytes_per_s: float

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """Return the time of products and of the bytes that all other operators move."""
        return flops / self.flops_per_s + moved_bytes / self.bytes_per_s


def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Time products of this type and copies. Allocates up to 0.3 GB on a GPU."""
    small = device.type == "cpu"
    width = 512 if small else 4096
    a = torch.ones(width, width, dtype=dtype, device=device)
    product_s = _best_s(lambda: torch.mm(a, a), device)
    words = torch.zeros(2**20 * (4 if small else 32), dtype=torch.float32, device=device)
    there = torch.empty_like(words)
    copy_s = _best_s(lambda: there.copy_(words), device)
    host = torch.empty(words.numel(), dtype=torch.float32, pin_memory=device.type == "cuda")
    bus_s = _best_s(lambda: host.copy_(words), device)
    return Rates(2 * width**3 / product_s, 2 * words.nbytes / copy_s, words.nbytes / bus_s)


def _best_s(work: Callable[[], Tensor], device: torch.device) -> float:
    module = torch.get_device_module(device.type)
    best = float("inf")
    for _ in range(_TRIES + 1):  # the first warms up, and is never the best
        module.synchronize()
        start_s = time.perf_counter()
        work()
        module.synchronize()
        best = min(best, time.perf_counter() - start_s)
    return max(best, 1e-9)
