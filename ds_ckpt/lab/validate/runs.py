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
from ds_ckpt.lab.validate.world import Step

Progress = Callable[[int, float], object]
"""(steps done, last loss)."""
Curve = list[tuple[int, float]]
"""(steps done, held-out loss or accuracy), before and after training."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        heldout: held-out losses.
        accuracy: held-out accuracies; empty for language modelling.
        left: (steps done, compression error, residual norm) of the sampled steps.
        digest: of every micro-step's loss and of the final evaluation, bit for bit.
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
        """Return the last value of a metric."""
        return self.curve(metric)[-1][1]


def train(
    task: Task,
    model: torch.nn.Module,
    train_step: Callable[[], Step],
    steps: int,
    progress: Progress | None = None,
) -> Outcome:
    """Train to the end, or until the loss is not finite.

    Args:
        task: evaluates; reset to the run's seed.
        model: or engine to evaluate.
        train_step: takes an optimizer step.
        steps: length of the run.
        progress: called at every tenth step and the last.
    """
    heldout: Curve = []
    accuracy: Curve = []
    left: list[tuple[int, float, float]] = []
    digest, diverged, done = hashlib.sha256(), False, 0

    def evaluate() -> None:
        loss, share = task.evaluate(model)
        heldout.append((done, loss))
        if share is not None:
            accuracy.append((done, share))

    evaluate()
    while done < steps and not diverged:
        step = train_step()
        done, loss = done + 1, sum(step.losses) / len(step.losses)
        digest.update(",".join(each.hex() for each in step.losses).encode())
        if step.left is not None:
            left.append((done, step.left.error, step.left.residual_norm))
        diverged = step.skipped or not math.isfinite(loss)
        if progress is not None and (done % 10 == 0 or done == steps):
            progress(done, loss)
    evaluate()
    diverged |= not math.isfinite(heldout[-1][1])
    digest.update(heldout[-1][1].hex().encode())
    return Outcome(heldout, accuracy, left, digest.hexdigest(), diverged)


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        key: digest of everything that the run depends on, see `Plan.key`.
        name: candidate and seed, for readers.
        outcome: of the training.
        sixteen_bit_bytes: bytes that the busiest worker sends in a compressed step with bf16.
        versions: of the packages.
        date: of the run.
    """

    key: str
    name: str
    outcome: Outcome
    sixteen_bit_bytes: float
    versions: dict[str, str]
    date: str


_RESULT = TypeAdapter(Result)


def read_results(path: Path) -> dict[str, Result]:
    """Return the results of a file by key, and cut off a last line that a kill has torn.

    Raises:
        StateError: the file has another content.
    """
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
