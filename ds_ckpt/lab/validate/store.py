"""Finished runs as JSON lines: appended one by one, so that a killed comparison goes on.

A line is found again by what it depends on: task, settings, seed, and who trained.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from ds_ckpt.errors import Problem, StateError
from ds_ckpt.lab.validate.trainer import Outcome

Mode = Literal["virtual", "processes"]


@dataclass(frozen=True)
class Key:
    """What a run depends on.

    Attributes:
        task: `Task.digest`.
        settings: `Candidate.digest`.
        mode: virtual workers, or ZeRO-3 processes.
    """

    task: str
    settings: str
    seed: int
    mode: Mode


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        names: task and candidate, for people.
        sixteen_bit_bytes: that the busiest worker sends in a compressed step with bf16 gradients.
        step_s: wall seconds of a step, median, where processes trained; 0 with virtual workers.
        about: versions and the day.
    """

    key: Key
    names: tuple[str, str]
    outcome: Outcome
    sixteen_bit_bytes: float
    step_s: float
    about: dict[str, Any]


_RESULT = TypeAdapter(Result)


class Store:
    """The file of results. A line that was cut off by a kill is overwritten.

    Args:
        writes: whether this process adds to the file; all processes that train know the results.

    Raises:
        StateError: the file holds something else.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self._path, self._writes = path, writes
        self._results: dict[Key, Result] = {}
        self.read()

    def read(self) -> None:
        """Take what is in the file by now. Raises StateError."""
        if not self._path.exists():
            return
        whole, _, torn = self._path.read_bytes().rpartition(b"\n")
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                result = _RESULT.validate_python(json.loads(line))
            except ValueError as error:
                found = str(error).splitlines()[0]
                raise StateError(
                    Problem(
                        where=f"{self._path}:{number}",
                        found=f"a line that is no result of this version ({found})",
                        why="results are added to the file and read back from it",
                        remedy="name another --output, or remove the file",
                    ),
                    headline="the results cannot be read",
                ) from error
            self._results[result.key] = result
        if torn and self._writes:
            with self._path.open("r+b") as file:
                file.truncate(len(whole) + bool(whole))

    def find(self, key: Key) -> Result | None:
        """The result of an earlier run, if there is one."""
        return self._results.get(key)

    def add(self, result: Result) -> None:
        """Keep it, on disk first."""
        if self._writes:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(result)) + "\n")
        self._results[result.key] = result
