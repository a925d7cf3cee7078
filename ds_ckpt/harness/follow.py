"""Shows the launched training's events as a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

_TITLES = {cell.name: cell.title for cell in CELLS}


@contextmanager
def following(*, steps: int, console: Console) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Gives what has to be called with every event; without a terminal a line a tenth is printed.

    Args:
        steps: training steps a cell.
    """
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
        task = progress.add_task("starting deepspeed", total=total)
        yield _Shown(progress, task, console).take


class _Shown:
    """What the person sees."""

    def __init__(self, progress: Progress, task: TaskID, console: Console) -> None:
        self._progress, self._task, self._console = progress, task, console
        self._done = 0
        self._printed_tenths = 0
        self._phase = ""

    def take(self, event: dict[str, Any]) -> None:
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
