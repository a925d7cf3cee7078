"""Where an exchange spends its time and how much of a gradient it leaves behind."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from ds_ckpt.telemetry.spans import Spans

SECTIONS = ("in_host", "residual", "select", "pack", "wire", "unpack")
"""In-host sum; adding to the residual and checking it; choosing entries (Top-K); factoring and
encoding; waiting for other processes and their bytes; decoding and summing."""


@dataclass
class Timings:
    """Host seconds by section, without those of a section inside it. On an accelerator that runs
    behind, only `wire` means what it says. For one thread at a time.

    Attributes:
        seconds: by section, since the start.
        spans: where sections are recorded as stretches of time, too; None: nowhere.
    """

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: Spans | None = None
    _inside_s: float = 0.0
    """Of the sections that have ended inside the one that is open."""

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        outside_s, self._inside_s = self._inside_s, 0.0
        start_s = time.perf_counter()
        try:
            with nullcontext() if self.spans is None else self.spans.span(name):
                yield
        finally:
            took_s = time.perf_counter() - start_s
            self.seconds[name] += took_s - self._inside_s
            self._inside_s = outside_s + took_s


@dataclass
class Errors:
    """What compression left behind of what it was given, by method, over the sampled buckets.

    Attributes:
        sampling: whether buckets are measured now; it costs two passes over each.
        listeners: others that sample at times of their own; each takes what it was given.
    """

    sampling: bool = False
    listeners: list[Errors] = field(default_factory=list)
    _energy: dict[str, list[float]] = field(default_factory=dict)

    @property
    def wanted(self) -> bool:
        """Whether anybody samples now."""
        return self.sampling or any(listener.sampling for listener in self.listeners)

    def add(self, method: str, before: float, after: float) -> None:
        """Squared norms of the entries for other processes, before and after compression."""
        for listener in self.listeners:
            if listener.sampling:
                listener.add(method, before, after)
        if self.listeners and not self.sampling:
            return
        sums = self._energy.setdefault(method, [0.0, 0.0])
        sums[0] += before
        sums[1] += after

    def take(self) -> dict[str, tuple[float, float]]:
        """Relative error and norm of what was left, by method; starts anew.

        The error is `sqrt(left energy / given energy)`, residual of earlier steps included: 0 is
        lossless, 1 sends nothing. Both are of this process alone.
        """
        taken = {
            method: ((after / before) ** 0.5 if before > 0 else 0.0, after**0.5)
            for method, (before, after) in self._energy.items()
        }
        self._energy.clear()
        return taken

    def take_energies(self) -> tuple[float, float]:
        """Squared norms of what was given and of what was left, all methods; starts anew."""
        before = sum(sums[0] for sums in self._energy.values())
        after = sum(sums[1] for sums in self._energy.values())
        self._energy.clear()
        return before, after
