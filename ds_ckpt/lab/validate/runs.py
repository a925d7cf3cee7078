"""One training run, and the file of finished runs.

Runs are JSON lines, appended one by one, so that a killed comparison continues.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError

from ds_ckpt.errors import Problem, StateError
from ds_ckpt.lab.validate.task import Task
from ds_ckpt.lab.validate.world import StepResult

Progress = Callable[[int, float], object]
"""(steps done, last loss)."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run: (steps done, value) of held-out loss or accuracy, before and after training.

    `left` has (steps done, compression error, residual norm) of the sampled steps; `digest` is of
    every micro-step's loss and of the final evaluation, bit for bit.
    """

    heldout: list[tuple[int, float]]
    left: list[tuple[int, float, float]]
    digest: str
    diverged: bool


def train(
    task: Task,
    model: torch.nn.Module,
    train_step: Callable[[], StepResult],
    steps: int,
    progress: Progress | None = None,
) -> Outcome:
    """Train to the end, or until the loss is not finite.

    `task` is reset to the run's seed and evaluates `model`, or an engine. `progress` is called at
    every tenth step and the last.
    """
    heldout = [(0, task.evaluate(model))]
    left: list[tuple[int, float, float]] = []
    digest, diverged, done = hashlib.sha256(), False, 0
    while done < steps and not diverged:
        step = train_step()
        done, loss = done + 1, sum(step.losses) / len(step.losses)
        digest.update(",".join(each.hex() for each in step.losses).encode())
        if step.left is not None:
            left.append((done, step.left.error, step.left.residual_norm))
        diverged = step.skipped or not math.isfinite(loss)
        if progress is not None and (done % 10 == 0 or done == steps):
            progress(done, loss)
    heldout.append((done, task.evaluate(model)))
    diverged |= not math.isfinite(heldout[-1][1])
    digest.update(heldout[-1][1].hex().encode())
    return Outcome(heldout, left, digest.hexdigest(), diverged)


@dataclass(frozen=True)
class Result:
    """A finished run.

    `key` is `Plan.key`, `name` is for readers, and `sixteen_bit_bytes` are those that the busiest
    worker sends in a compressed step with bf16 gradients.
    """

    key: str
    name: str
    outcome: Outcome
    sixteen_bit_bytes: float
    versions: dict[str, str]
    date: str


_RESULT = TypeAdapter(Result)


def read_results(path: Path) -> dict[str, Result]:
    """Return results by key; cut off a last line that a kill has torn. Raises StateError."""
    if not path.exists():
        return {}
    complete, _, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        with path.open("r+b") as file:
            file.truncate(len(complete) + bool(complete))
    found = {}
    for number, line in enumerate(complete.splitlines(), 1):
        try:
            result = _RESULT.validate_json(line)
        except ValidationError as error:
            why = "it is not a result of this version"
            remedy = "name another --output, or remove the file"
            problem = Problem(f"{path}:{number}", line[:60].decode(), why, remedy)
            raise StateError(problem, headline="the results cannot be read") from error
        found[result.key] = result
    return found


def add_result(path: Path, result: Result) -> None:
    """Append a result to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(result)) + "\n")
