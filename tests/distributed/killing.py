"""Kill -9 of all processes in the middle of a case."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.distributed.pool import Pool, PoolError

LIMIT_S = 240.0


def kill_amid(progress: str, case: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run a case that goes on for ever in two processes of its own, and kill them.

    Args:
        progress: each process adds a line to `<progress>.<process>` with every step; both are
            killed when there are two of each.

    Raises:
        AssertionError: they ended by themselves, or took too long.
    """
    pool, ended = Pool(2), list[PoolError]()

    def run() -> None:
        try:
            pool.run(case, *args, timeout=LIMIT_S, **kwargs)
        except PoolError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        limit = time.monotonic() + LIMIT_S
        while not all(_lines(f"{progress}.{process}") >= 2 for process in range(2)):
            assert thread.is_alive(), "the processes ended by themselves"
            assert time.monotonic() < limit
            time.sleep(0.02)
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        thread.join(60)
        assert "ended without an answer" in str(ended[0])
    finally:
        pool.stop()
        thread.join()


def _lines(path: str) -> int:
    return len(Path(path).read_text().splitlines()) if Path(path).exists() else 0
