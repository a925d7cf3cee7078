"""How much memory a step took: from the accelerator's allocator, or from what autograd saved."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch

from ds_ckpt.patch import Patches
from ds_ckpt.telemetry.device import capacity_of
from ds_ckpt.telemetry.memory import SavedActivations


class MemoryGauge(Protocol):
    """Tells the most that was in use since it was asked last."""

    def take(self) -> int: ...


class SavedGauge:
    """What autograd held after the largest forward, measured where it saves.

    Measuring costs a hook for every saved tensor.
    """

    def __init__(self, engine: Any, patches: Patches) -> None:
        self._most = 0
        forward = engine.forward

        @functools.wraps(forward)
        def measured_forward(*args: Any, **kwargs: Any) -> Any:
            if not engine.module.training or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            with SavedActivations(engine.module) as held:
                result = forward(*args, **kwargs)
            self._most = max(self._most, held.bytes)
            return result

        patches.set(engine, "forward", measured_forward)

    def take(self) -> int:
        most, self._most = self._most, 0
        return most


class AllocatorGauge:
    """The CUDA allocator's peak of a step; all of the capacity where it had to look for room.

    It resets the allocator's peak after every step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries = self._failures()
        torch.cuda.reset_peak_memory_stats(device)

    def _failures(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def take(self) -> int:
        peak = int(torch.cuda.max_memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)
        retries = self._failures()
        if retries > self._retries:  # it gave its cache back to find room: fragmentation
            peak = max(peak, capacity_of(self._device))
        self._retries = retries
        return peak


def gauge_for(engine: Any, of: str, patches: Patches) -> MemoryGauge:
    """What watches the memory that a budget is of."""
    if of == "accelerator":
        return AllocatorGauge(torch.device(engine.device))
    return SavedGauge(engine, patches)
