"""Runs that something outside ends: kill -9 of all processes, and the faults of `cases_killed`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed import cases_killed
from tests.distributed.models import topk_section
from tests.distributed.pool import Pool, PoolError

LIMIT_S = 240.0
SECTION = topk_section(topk={"density": 0.05})
STEPS = 6
WAIT_S = 20.0
"""Timeout of every process group in these runs."""
ENDS_S = dict.fromkeys(cases_killed.FAULTS, 10.0) | {
    "stopped": WAIT_S + 10,
    "link down for good": WAIT_S + 10,
}
"""From the fault to the end of the last of the others, at most."""
ROOM = {"disk full at our files": 1.85, "disk full at DeepSpeed's files": 1.3}
"""Of the checkpoint's folder, in saves."""


@dataclass(frozen=True)
class Ending:
    """How a run with a fault ended, and what the next one made of it.

    Attributes:
        ended_s: from the fault to the end of the last other process; None: all went on.
        said: the last lines of the others.
        lost: steps that were done and had to be done again.
        equal: losses, weights and residuals are in the end those of a run without the fault.
    """

    ended_s: float | None
    said: tuple[str, ...]
    lost: int
    equal: bool


def smooth(pool: Pool, folder: Path) -> tuple[list[Any], int]:
    """The run without a fault, and the bytes of one of its saves."""
    folder.mkdir()
    results = pool.run(cases_killed.trained, str(folder), str(folder), SECTION, STEPS)
    return results, sum(path.stat().st_size for path in folder.glob("global_step2/*"))


def meet(fault: str, pool: Pool, folder: Path, without: tuple[list[Any], int]) -> Ending:
    """Run with the fault in two processes of its own, and go on in those of `pool`."""
    checkpoint, notes = folder / "checkpoint", folder / "notes"
    checkpoint.mkdir(parents=True)
    notes.mkdir()
    expected, save_bytes = without
    with contextlib.ExitStack() as stack:
        if fault in ROOM:
            stack.enter_context(_small(checkpoint, round(ROOM[fault] * save_bytes)))
        own = Pool(2)
        stack.callback(own.stop)
        arguments = (str(checkpoint), str(notes), SECTION, STEPS)
        try:
            results = own.run(cases_killed.trained, *arguments, fault, WAIT_S, timeout=LIMIT_S)
        except PoolError:
            own.stop()
        else:
            return Ending(None, (), 0, results == expected)
        told = {path.stem: json.loads(path.read_text()) for path in notes.iterdir()}
        happened_s = told.pop("happened")["time_s"]
        if fault in ROOM:  # the user makes room
            subprocess.run(["mount", "-o", "remount,size=100%", str(checkpoint)], check=True)
        results = pool.run(cases_killed.trained, *arguments)
    began = results[0]["began"]
    equal = all(
        process["losses"] == {s: loss for s, loss in whole["losses"].items() if s >= began}
        and all(process[key] == whole[key] for key in ("weights", "state"))
        for process, whole in zip(results, expected, strict=True)
    )
    ended_s = max((each["time_s"] for each in told.values()), default=0.0) - happened_s
    said = tuple(each["said"] for each in told.values())
    return Ending(ended_s, said, cases_killed.AT - began, equal)


@contextlib.contextmanager
def _small(folder: Path, size: int) -> Iterator[None]:
    """A file system of so many bytes there; needs root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


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
