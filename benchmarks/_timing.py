"""Timing that the benchmarks share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

Work = Callable[[], object]


def interleaved_medians_s(
    works: dict[str, Work], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each, taken in turn so that a busy machine slows all of them alike.

    `time.thread_time` as the clock leaves out what a thread waits for a core that others use; good
    for work that stays on the calling thread.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            start_s = clock()
            work()
            if repeat:  # the first round warms up
                taken[name].append(clock() - start_s)
    return {name: statistics.median(times) for name, times in taken.items()}
