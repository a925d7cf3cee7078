"""Run in the worker processes: cases that fail, for the pool's own tests."""

from __future__ import annotations

import subprocess
import time

import torch.distributed as dist


def rank() -> int:
    return dist.get_rank()


def raise_in(victim: int) -> int:
    """One process raises; the others wait for it."""
    if dist.get_rank() == victim:
        raise ValueError(f"wrong in process {victim}")
    dist.barrier()
    return dist.get_rank()


def hang_in_a_loop() -> None:
    """Each process hangs, with a child beside it that is in another process group."""
    print("about to hang", flush=True)
    with subprocess.Popen(["sleep", "600"], start_new_session=True):
        while True:
            time.sleep(0.01)
