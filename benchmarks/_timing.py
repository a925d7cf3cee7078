"""Timing that the benchmarks share."""

import statistics
import time
from collections.abc import Callable

Work = Callable[[], object]


def interleaved_s(
    works: dict[str, Work], repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each, taken in turn so that a busy machine slows all of them alike."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            start_s = clock()
            work()
            if repeat:  # the first round warms up
                taken[name].append(clock() - start_s)
    return taken


def interleaved_medians_s(works: dict[str, Work], repeats: int) -> dict[str, float]:
    """Median seconds of each, for work that stays on the calling thread.

    The thread's clock leaves out what it waits for a core that others use.
    """
    taken = interleaved_s(works, repeats, time.thread_time)
    return {name: statistics.median(times) for name, times in taken.items()}
