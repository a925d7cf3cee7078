"""Run in the worker processes: a short soak, with and without something that grows."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch

from benchmarks import soak
from tests.distributed.pool import fresh


def short(folder: str, steps: int, *, leaks: bool) -> list[str]:
    """Return the quantities that have grown in a short soak."""
    fresh()
    held: list[Any] = []
    ended = threading.Event()

    def grow(step: int) -> None:
        if leaks:
            held.append(torch.ones(1 << 18, dtype=torch.float32))
            held.append(os.dup(1))
            if step % 10 == 0:
                held.append(threading.Thread(target=ended.wait))
                held[-1].start()

    try:
        records = soak.soak(steps, Path(folder), save_every=16, records=20, each_step=grow)
    finally:
        ended.set()
        for each in held:
            if isinstance(each, int):
                os.close(each)
            elif isinstance(each, threading.Thread):
                each.join()
    assert [r.step for r in records] == list(range(2, steps + 1, 2))
    return soak.verdict(records)
