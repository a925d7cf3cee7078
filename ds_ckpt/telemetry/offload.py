"""What left the device, what came back, and how much of what is kept lies on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class OffloadCounters:
    """Counts storages, not tensors: two tensors that share a storage leave once.

    The counters by block are keyed by the block that kept the tensor first, and grow until
    `reset()`. Bytes of the device are those of what checkpointing keeps, nothing else's.
    """

    out: Counter[str] = field(default_factory=Counter)
    """Storages that left for host memory, by block."""
    out_bytes: Counter[str] = field(default_factory=Counter)
    back: Counter[str] = field(default_factory=Counter)
    """Storages that were brought back, by block; with `retain_graph` more than have left."""
    back_bytes: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    """Storages that were still on the device when backward asked for them, by block."""
    left: Counter[str] = field(default_factory=Counter)
    """Tensors that were let be, by reason."""
    late: int = 0
    """Of those brought back: not prefetched, so that the recompute waited for the whole copy."""
    in_vain: int = 0
    """Of those brought back: never asked for by that backward."""
    device_bytes: int = 0
    """Bytes on the device now."""
    peak_device_bytes: int = 0

    def on_device(self, change_bytes: int) -> None:
        self.device_bytes += change_bytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)

    def reset(self) -> None:
        """Start counting again; what lies on the device goes on lying there."""
        for counter in (
            self.out,
            self.out_bytes,
            self.back,
            self.back_bytes,
            self.kept,
            self.left,
        ):
            counter.clear()
        self.late = self.in_vain = 0
        self.peak_device_bytes = self.device_bytes
