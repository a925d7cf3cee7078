"""One training run, and the file of finished runs.

Runs are JSON lines, appended one by one, so that a killed comparison continues. A line is found
again by what the run depends on: task, settings, seed, and virtual workers or ZeRO-3 ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from ds_ckpt.errors import Problem, StateError
from ds_ckpt.lab.validate.task import Task
from ds_ckpt.lab.validate.world import World

Mode = Literal["virtual", "processes"]
Progress = Callable[[int, float], object]
"""(steps done, last loss)."""
Curve = list[tuple[int, float]]
"""(steps done, held-out loss or accuracy)."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        heldout: held-out losses; the last one is the result.
        accuracy: held-out accuracies; empty for language modelling.
        left: (steps done, compression error, residual norm) of the sampled steps.
        digest: of every micro-step's loss and of the final weights, bit for bit.
        diverged: the loss was not finite, and the run was stopped.
    """

    heldout: Curve
    accuracy: Curve
    left: list[tuple[int, float, float]]
    digest: str
    diverged: bool

    def curve(self, metric: str) -> Curve:
        """Return held-out loss or accuracy over steps."""
        return self.accuracy if metric == "accuracy" else self.heldout

    def final(self, metric: str) -> float:
        """Return the last value of a metric; NaN without one."""
        curve = self.curve(metric)
        return curve[-1][1] if curve else math.nan


def train(
    task: Task,
    world: World,
    steps: int,
    *,
    evaluate_every: int = 250,
    progress: Progress | None = None,
) -> Outcome:
    """Train to the end, or until the loss is not finite.

    Args:
        task: reset to the run's seed; what `world` trains.
        world: takes the steps.
        steps: length of the run.
        evaluate_every: steps between two evaluations.
        progress: called at every tenth step and the last.
    """
    heldout: Curve = []
    accuracy: Curve = []
    left: list[tuple[int, float, float]] = []
    digest, diverged = "", False

    def evaluate(done: int) -> None:
        loss, share = task.evaluate(world.model)
        heldout.append((done, loss))
        if share is not None:
            accuracy.append((done, share))

    evaluate(0)
    while world.step < steps and not diverged:
        step = world.train_step()
        done, loss = world.step, sum(step.losses) / len(step.losses)
        text = digest + ",".join(each.hex() for each in step.losses)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if step.left is not None:
            left.append((done, step.left.error, step.left.residual_norm))
        diverged = step.skipped or not math.isfinite(loss)
        if done % evaluate_every == 0 or done == steps:
            evaluate(done)
            diverged |= not math.isfinite(heldout[-1][1])
        if progress is not None and (done % 10 == 0 or done == steps):
            progress(done, loss)
    digest = hashlib.sha256(f"{digest}{world.weights_digest()}".encode()).hexdigest()
    return Outcome(heldout, accuracy, left, digest, diverged)


@dataclass(frozen=True)
class Key:
    """Everything that a run depends on.

    Attributes:
        task: `Task.digest`.
        settings: `Candidate.digest`, and the optimizer's betas.
        seed: of weights and data.
        mode: virtual workers or ZeRO-3 ranks.
    """

    task: str
    settings: str
    seed: int
    mode: Mode


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        key: identifies it.
        names: task and candidate, for readers.
        outcome: of the training.
        sixteen_bit_bytes: bytes that the busiest worker sends in a compressed step with bf16.
        step_s: median wall time of a step of ZeRO-3 ranks; 0 for virtual workers.
        about: versions and date.
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
        path: of the file.
        writes: this process adds to the file; False on all ranks but the first.

    Raises:
        StateError: the file has another content.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self._path, self._writes = path, writes
        self._results: dict[Key, Result] = {}
        self.read()

    def read(self) -> None:
        """Read the file again. Raises StateError."""
        if not self._path.exists():
            return
        complete, _, torn = self._path.read_bytes().rpartition(b"\n")
        for number, line in enumerate(complete.splitlines(), 1):
            try:
                result = _RESULT.validate_python(json.loads(line))
            except ValueError as error:
                found = str(error).splitlines()[0]
                raise StateError(
                    Problem(
                        where=f"{self._path}:{number}",
                        found=f"a line that is not a result of this version ({found})",
                        why="results are added to the file and read back from it",
                        remedy="name another --output, or remove the file",
                    ),
                    headline="the results cannot be read",
                ) from error
            self._results[result.key] = result
        if torn and self._writes:
            with self._path.open("r+b") as file:
                file.truncate(len(complete) + bool(complete))

    def find(self, key: Key) -> Result | None:
        """Return the result of an earlier run, if there is one."""
        return self._results.get(key)

    def add(self, result: Result) -> None:
        """Add a result, to the file first."""
        if self._writes:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(result)) + "\n")
        self._results[result.key] = result
