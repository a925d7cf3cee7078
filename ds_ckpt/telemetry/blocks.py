"""What recomputing each block takes: seconds and kept bytes, as a table after some steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class BlockCost:
    """Sums over the calls of one block since counting began."""

    calls: int = 0
    kept_bytes: int = 0
    """Of the storages that its calls kept for their recompute, each once a call."""
    forward_s: float = 0.0
    recomputes: int = 0
    recompute_s: float = 0.0


class BlockProfile:
    """Times each block's forward and recompute.

    A recompute ends where torch stops it early: when everything that backward needs is there.

    Args:
        synchronize: called before each reading of the clock; on an accelerator without it the time
            to launch the work is measured, not the work.
    """

    def __init__(self, synchronize: Callable[[], object] = lambda: None) -> None:
        self.costs: dict[str, BlockCost] = {}
        self._synchronize = synchronize
        self._steps = 0

    def kept(self, label: str, nbytes: int) -> None:
        self.costs.setdefault(label, BlockCost()).kept_bytes += nbytes

    @contextmanager
    def timed(self, label: str, *, forward: bool) -> Iterator[None]:
        cost = self.costs.setdefault(label, BlockCost())
        self._synchronize()
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            taken_s = time.perf_counter() - start_s
            if forward:
                cost.calls += 1
                cost.forward_s += taken_s
            else:
                cost.recomputes += 1
                cost.recompute_s += taken_s

    def step_ended(self) -> None:
        self._steps += 1

    def reset(self) -> None:
        self.costs.clear()
        self._steps = 0

    def table(self) -> str:
        """One line a block, means over the steps that have ended since the last reset."""
        steps = max(self._steps, 1)
        names = [*self.costs, "all blocks"]
        width = max(len(name) for name in names)
        whole = BlockCost()
        for cost in self.costs.values():
            whole.calls += cost.calls
            whole.kept_bytes += cost.kept_bytes
            whole.forward_s += cost.forward_s
            whole.recomputes += cost.recomputes
            whole.recompute_s += cost.recompute_s
        head = f"{'block':<{width}}  calls  kept MiB  forward ms  recomputes  recompute ms"
        lines = [f"means of {steps} step{'s' if steps > 1 else ''}", head]
        for name, cost in zip(names, [*self.costs.values(), whole], strict=True):
            kept_mib = cost.kept_bytes / 2**20
            forward_ms, recompute_ms = 1e3 * cost.forward_s, 1e3 * cost.recompute_s
            lines.append(
                f"{name:<{width}}  {cost.calls / steps:5.1f}  {kept_mib / steps:8.3f}"
                f"  {forward_ms / steps:10.2f}  {cost.recomputes / steps:10.1f}"
                f"  {recompute_ms / steps:12.2f}"
            )
        return "\n".join(lines)
