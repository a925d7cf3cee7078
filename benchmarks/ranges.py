"""Cost of a range of profilers and of a span, where hooks open one: nanoseconds, one thread.

    python benchmarks/ranges.py [--calls 200000]

Medians of nine rounds of thread time, taken in turns, with the loop's own time. Rows:

    nullcontext       an empty context manager, made anew
    off               no telemetry and no profiler
    telemetry         recorded as a span; on a CPU
    record_function   torch's own range while no profiler runs
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext

import torch
from _timing import Work, interleaved_medians_s

from ds_ckpt.telemetry.timings import Spans, timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=200_000)
    calls = parser.parse_args().calls
    spans = Spans()
    contexts = {
        "nullcontext": nullcontext,
        "off": lambda: timed("gather", None),
        "telemetry": lambda: timed("gather", spans),
        "record_function": lambda: torch.profiler.record_function("ds_ckpt/gather"),
    }

    def loop(name: str) -> Work:
        def run() -> None:
            for _ in range(calls):
                with contexts[name]():
                    pass
            spans.take()

        return run

    works = {name: loop(name) for name in contexts}
    medians_s = interleaved_medians_s(works, 9, time.thread_time)
    for name, median_s in medians_s.items():
        print(f"{name:16s} {median_s / calls * 1e9:7.0f} ns")


if __name__ == "__main__":
    main()
