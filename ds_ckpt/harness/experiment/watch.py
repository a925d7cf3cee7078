"""Looks after a launched experiment: progress for people, rates, an end to silence."""

from __future__ import annotations

import json
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ds_ckpt.errors import Problem
from ds_ckpt.harness.experiment.folder import ALIVE_EVERY_S, START_S, Folder
from ds_ckpt.hosts.checks import HostError, unreachable
from ds_ckpt.hosts.launcher import Ground


class Watch:
    """Called a few times a second while the launched processes run.

    Raises HostError where process 0 has been silent for `stall_s`, with the hosts that do not
    answer.
    """

    def __init__(self, ground: Ground, folder: Folder, stall_s: float, console: Console) -> None:
        self._ground = ground
        self._folder = folder
        self._stall_s = stall_s
        self._console = console
        self._begun = self._last_s = time.monotonic()
        self._alive_s = 0.0
        self._offset = 0
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

    def __enter__(self) -> Watch:
        self._touch()
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self) -> None:
        self._touch()
        self._folder.serve_rate(self._ground.set_rate)
        beats = self._new_beats()
        if beats:
            self._last_s = time.monotonic()
        for beat in beats:
            self._show(beat)
        limit_s = self._stall_s if self._offset else max(START_S, self._stall_s)
        silent_s = time.monotonic() - self._last_s
        if silent_s > limit_s:
            problems = unreachable(self._ground) or [
                Problem(
                    where=", ".join(self._ground.names),
                    found=f"nothing has come on for {limit_s:.0f} s, and all hosts answer",
                    why="a step or the start takes longer, or a process hangs",
                    remedy=f"look into {self._folder.path / 'launch.log'}; on a slow link raise "
                    "--stall-s",
                )
            ]
            raise HostError(problems, headline="the run has stopped")

    def _touch(self) -> None:
        if time.monotonic() - self._alive_s > ALIVE_EVERY_S:
            self._folder.alive.touch()
            self._alive_s = time.monotonic()

    def _new_beats(self) -> list[dict[str, Any]]:
        try:
            with self._folder.beats.open("rb") as file:
                file.seek(self._offset)
                lines = [line for line in file if line.endswith(b"\n")]
        except FileNotFoundError:
            return []
        self._offset += sum(map(len, lines))
        return [json.loads(line) for line in lines]

    def _show(self, beat: dict[str, Any]) -> None:
        words = beat["words"]
        if words is None:
            return
        self._progress.update(
            self._task, description=words, total=beat.get("total"), completed=beat.get("done", 0)
        )
        kind = words.lstrip("0123456789 ")
        tenth = 10 * beat.get("done", 0) // max(beat.get("total", 1), 1)
        if self._progress.disable and (kind, tenth) != self._words:
            self._console.print(f"  {words}", highlight=False)
            self._words = (kind, tenth)
