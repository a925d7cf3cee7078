"""Timing that the benchmarks share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

Work = Callable[[], object]


def interleaved_medians_s(works: dict[str, Work], repeats: int) -> dict[str, float]:
    """Median seconds of each, taken in turn so that a busy machine slows all of them alike."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            start_s = time.perf_counter()
            work()
            if repeat:  # the first round warms up
                taken[name].append(time.perf_counter() - start_s)
    return {name: statistics.median(times) for name, times in taken.items()}
