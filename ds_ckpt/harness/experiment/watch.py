"""Shows people how far a launched experiment has come."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Shown:
    """A context, called with every event: a progress bar, without a terminal a line a tenth."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._words: tuple[str, int] = ("", 0)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("starting deepspeed", total=None)

    def __enter__(self) -> Shown:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        words = event.get("words")
        if words is None:
            return
        total, done = event.get("total"), event.get("done", 0)
        self._progress.update(self._task, description=words, total=total, completed=done)
        kind, tenth = words.lstrip("0123456789 "), 10 * done // max(total or 1, 1)
        if self._progress.disable and (kind, tenth) != self._words:
            self._console.print(f"  {words}", highlight=False)
            self._words = (kind, tenth)
