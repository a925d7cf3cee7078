"""Copies between the device and host memory, behind one small interface.

`SideStream` is for accelerators: copies run on a stream of their own, beside the compute stream.
`HostCopies` is for machines whose accelerator is the CPU: there the "device" is ordinary memory, a
copy is made at once, and everything else that leans on copies runs and is tested unchanged.

A side-stream copy reads and writes memory that the compute stream's allocator may hand out again.
`record_stream` would leave that to the allocator, at the price of memory that is freed at an
unknown time. Here the rule is: hold a reference to both ends until `Ticket.wait()`, after which
whatever the compute stream does next comes behind the copy. Then let go.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Ticket(Protocol):
    """One copy that has been asked for."""

    def done(self) -> bool:
        """Whether the copy has ended. Does not wait."""

    def wait(self) -> None:
        """What the compute stream is given from now on comes after the copy. Holds up no host."""


class Copies(Protocol):
    """Makes copies between two flat uint8 tensors of the same size."""

    def copy(self, source: Tensor, target: Tensor) -> Ticket:
        """Start to copy what `source` holds after everything asked of the compute stream so far."""

    def synchronize(self) -> None:
        """Hold up the host until the device has nothing left to do."""


class _Made:
    """The ticket of a copy that has ended."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class HostCopies:
    """The stand-in: both ends are in host memory, and a copy has ended when it returns."""

    def copy(self, source: Tensor, target: Tensor) -> Ticket:
        target.copy_(source)
        return _Made()

    def synchronize(self) -> None:
        return None


class _OnStream:
    def __init__(self, event: Any, side: SideStream) -> None:
        self._event, self._side = event, side

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._side.compute_stream().wait_event(self._event)


class SideStream:
    """Copies on one stream beside the compute stream; pinned host memory lets both run at once.

    One stream for both directions: a part of an arena that is filled again is filled behind the
    copy that read it last.

    Args:
        device: of an accelerator whose torch module has streams and events (CUDA, XPU, NPU).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def compute_stream(self) -> Any:
        return self._module.current_stream(self._device)

    def copy(self, source: Tensor, target: Tensor) -> Ticket:
        self._stream.wait_stream(self.compute_stream())
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._module.Event()
            event.record(self._stream)
        return _OnStream(event, self)

    def synchronize(self) -> None:
        self._module.synchronize(self._device)


def copies_for(device: torch.device) -> Copies:
    """A side stream where the device has one, the stand-in where the device is the CPU."""
    return HostCopies() if device.type == "cpu" else SideStream(device)
