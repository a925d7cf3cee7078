"""A short soak is flat, and finds what grows. `benchmarks/soak.py` has the long one."""

import os
import threading
from pathlib import Path

import pytest
import torch

from benchmarks import soak
from tests.distributed.pool import ranks


@pytest.mark.slow
@pytest.mark.parametrize("leaks", [False, True])
@ranks(2)
def test_growth_is_found_and_nothing_else(tmp_path: Path, leaks: bool) -> None:
    held: list[torch.Tensor] = []
    handles: list[int] = []
    threads: list[threading.Thread] = []
    ended, steps = threading.Event(), 40

    def grow(step: int) -> None:
        if leaks:
            held.append(torch.ones(1 << 18, dtype=torch.float32))
            handles.append(os.dup(1))
            if step % 10 == 0:
                threads.append(threading.Thread(target=ended.wait))
                threads[-1].start()

    try:
        records = soak.soak(steps, tmp_path, save_every=16, records=20, each_step=grow)
    finally:
        ended.set()
        for handle in handles:
            os.close(handle)
        for thread in threads:
            thread.join()
    assert [r.step for r in records] == list(range(2, steps + 1, 2))
    # processor time is for long runs: a process that shares a core with others is uneven
    grown = {line.partition(":")[0] for line in soak.verdict(records)}
    grown -= {"processor time of a step"}
    assert grown == ({"resident memory", "handles", "threads"} if leaks else set())
    assert len(list(tmp_path.glob("step*"))) == 2  # the others are gone
