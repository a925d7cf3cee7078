"""Follows the launched training: reads its events as they are written, shows a progress bar."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ds_ckpt.harness.cells import CELLS, cell_steps

_POLL_S = 0.2
_TITLES = {cell.name: cell.title for cell in CELLS}


def follow(events: Path, *, steps: int, console: Console, running: Callable[[], bool]) -> None:
    """Show progress until `running()` is False. What `running` raises goes through.

    Args:
        events: JSON lines that process 0 of the training appends to; may not be there yet.
        steps: training steps a cell.
        console: where the bar goes; without a terminal a line a tenth is printed instead.
        running: asked a few times a second.
    """
    with following(events, steps=steps, console=console) as look:
        while running():
            look()
            time.sleep(_POLL_S)


@contextmanager
def following(events: Path, *, steps: int, console: Console) -> Iterator[Callable[[], None]]:
    """Gives what has to be called a few times a second, and calls it a last time."""
    total = sum(cell_steps(cell, steps) for cell in CELLS)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with progress:
        shown = _Shown(progress, progress.add_task("starting deepspeed", total=total), console)
        reader = Lines(events)
        yield lambda: shown.take(reader.new())
        shown.take(reader.new())


class _Shown:
    """What the person sees."""

    def __init__(self, progress: Progress, task: TaskID, console: Console) -> None:
        self._progress, self._task, self._console = progress, task, console
        self._done = 0
        self._printed_tenths = 0
        self._phase = ""

    def take(self, events: Iterator[dict[str, Any]]) -> None:
        for event in events:
            phase, title = event["phase"], _TITLES.get(event.get("cell", ""), "")
            if phase == "training":
                self._done += 1
                words = f"{title}: loss {event['loss']:.3f}"
            else:
                words = f"{phase} {title}".strip()
            self._progress.update(self._task, description=words, completed=self._done)
            if self._progress.disable:
                self._print(phase)

    def _print(self, phase: str) -> None:
        total = self._progress.tasks[0].total or 1
        tenths = int(10 * self._done / total)
        if phase != self._phase or tenths > self._printed_tenths:
            self._console.print(f"  {phase}: {self._done} of {total:.0f} steps")
        self._phase, self._printed_tenths = phase, tenths


class Lines:
    """The whole lines that a growing file of JSON lines has got since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return  # Half-written: next time.
                    self._offset += len(line)
                    yield json.loads(line)
        except FileNotFoundError:
            return
