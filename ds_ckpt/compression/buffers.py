"""Where residuals and working tensors get their memory, and how a share of the mean is added up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ds_ckpt.compression.storage import Storage, Stored


class HostMemory(Protocol):
    """Where host tensors come from; `ds_ckpt.memory.HostPool` is one."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...

    def give_back(self, tensor: Tensor) -> None: ...


class Buffers:
    """Flat tensors: host ones from `host` where given, others from torch."""

    def __init__(self, storage: Storage, host: HostMemory | None) -> None:
        self._storage = storage
        self._host = host

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type == "cpu" and self._host is not None:
            return self._host.take((numel,), dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def new(self, numel: int, device: torch.device) -> Stored:
        """Room for one residual, as it is kept."""
        return Stored(*(self.empty(n, t, device) for n, t in self._storage.shapes(numel)))

    def copy_of(self, source: Stored, device: torch.device) -> Stored:
        """On `device`, in the dtype of `source`."""
        copy = Stored(*(self.empty(t.numel(), t.dtype, device) for t in source.tensors))
        copy.copy_(source)
        return copy

    def release(self, *tensors: Tensor) -> None:
        """Give back what came from here and is used no more."""
        for tensor in tensors:
            if self._host is not None and tensor.device.type == "cpu":
                self._host.give_back(tensor)


def divide(grad: Tensor, divisor: float, out: Tensor) -> Tensor:
    """`out = grad / divisor`, fp32."""
    # Widen first: fp16 / divisor would round, and underflow under a large loss scale.
    return torch.div(grad.float(), divisor, out=out)


def add_divided(source: Tensor, grad: Tensor, divisor: float, out: Tensor) -> Tensor:
    """`out = source + grad / divisor`, fp32; `out` may be `source`."""
    if is_power_of_two(divisor):
        # The reciprocal is exact, so one fused pass rounds exactly as a division would.
        return torch.add(source, grad.float(), alpha=1.0 / divisor, out=out)
    return torch.addcdiv(source, grad.float(), torch.full((), divisor, device=grad.device), out=out)


def is_power_of_two(x: float) -> bool:
    return math.frexp(x)[0] == 0.5
