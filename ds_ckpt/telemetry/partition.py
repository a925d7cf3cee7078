"""What partitioned checkpoints keep, leave whole and gather."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class PartitionCounters:
    """Counts storages by the block that kept them first; grows until `reset()`."""

    whole_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of what was split."""
    kept_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of this process's parts of it."""
    left: Counter[str] = field(default_factory=Counter)
    """Tensors that were not split, by reason."""
    gathers: int = 0
    received_bytes: int = 0
    """Of other processes' parts, in gathers."""
    late: int = 0
    """Of those: begun when the part was needed, and not before."""
    in_vain: int = 0
    """Of those: never asked for by that backward."""

    def reset(self) -> None:
        for counter in (self.whole_bytes, self.kept_bytes, self.left):
            counter.clear()
        self.gathers = self.received_bytes = self.late = self.in_vain = 0

    def line(self) -> str:
        """What this process keeps and receives, in words."""
        kept, whole = sum(self.kept_bytes.values()), sum(self.whole_bytes.values())
        words = (
            f"{kept / 2**20:.2f} of {whole / 2**20:.2f} MiB of boundaries kept by this process, "
            f"{self.received_bytes / 2**20:.2f} MiB received in {self.gathers} all-gathers"
        )
        left = ", ".join(f"{count} {reason}" for reason, count in sorted(self.left.items()))
        return words + (f"; tensors kept whole: {left}" if left else "")
