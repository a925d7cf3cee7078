"""Records of a run, one JSON line each in `samples.jsonl`, with units in their names.

The file only grows, so a stopped run continues where it was. Readers drop an incomplete last line.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ds_ckpt.errors import Problem, StateError


class _Record(BaseModel):
    """A record is known by what `by` names: of equal ones the last counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    by: ClassVar[tuple[str, ...]] = ("kind",)

    @property
    def key(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.by)


@dataclass(frozen=True, order=True)
class Key:
    """A configuration with a batch: whose steps."""

    configuration: str
    sequences: int

    def trial(self, rate: float | None, repetition: int) -> tuple[object, ...]:
        """The key of one trial's record."""
        return ("trial", self, rate, repetition)


class StepTime(_Record):
    """One step of the slowest process."""

    step_s: float
    parts_s: dict[str, float]
    """By `parts.PARTS`, of that process."""
    in_collectives_s: float


class Trial(_Record):
    """Some steps of a configuration, one after the other."""

    by = ("kind", "whose", "rate_mbit", "repetition")
    kind: Literal["trial"] = "trial"
    configuration: str
    rate_mbit: float | None
    sequences: int
    """A process and micro-step."""
    repetition: int
    steps: tuple[StepTime, ...]
    purpose_bytes: dict[str, float]
    """Counted where collectives are called, a step, summed over the processes."""
    link_bytes: tuple[float, ...]
    """What each host's interface to the others sent, a step; loopback's own on one machine."""
    interface_bytes: float
    """What all hosts' interfaces sent, loopback included, a step."""
    figures: dict[str, float] = {}
    """Whatever else the registry's figures take, by their names."""

    @property
    def whose(self) -> Key:
        return Key(self.configuration, self.sequences)


class Memory(_Record):
    """Activations of one configuration with one batch, of the process that needs most."""

    by = ("kind", "configuration", "sequences")
    kind: Literal["memory"] = "memory"
    configuration: str
    sequences: int
    held_bytes: int
    """What autograd holds between forward and backward."""
    peak_bytes: int
    """The most that activations took at once, a recompute's own included."""


class Loss(_Record):
    """A training of its own, on a link that is not shaped; rates change no number."""

    by = ("kind", "configuration")
    kind: Literal["loss"] = "loss"
    configuration: str
    steps: int
    start_step: int
    """Steps before it were dense."""
    heldout_loss: float
    """Natural logarithm, a byte."""
    train_losses: tuple[float, ...]
    """Mean over the processes, before each step's update."""
    weights_sha256: str = ""
    """Over the weights of all processes after the last step; empty in older runs."""


class Model(_Record):
    """What was trained."""

    kind: Literal["model"] = "model"
    parameters: int
    text: str
    heldout_bytes: int
    corpus_sha256: str


Sample = Trial | Memory | Loss | Model
_LINE: TypeAdapter[Sample] = TypeAdapter(Annotated[Sample, Field(discriminator="kind")])


class Store:
    """The samples of one run, in its folder. Reading drops what a kill left half-written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "samples.jsonl"

    def read(self) -> list[Sample]:
        """Every whole record; the last one of equal keys.

        Raises StateError where a line that is not the last is no record.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")
        found: dict[tuple[object, ...], Sample] = {}
        for number, line in enumerate(lines[:-1], 1):
            try:
                sample = _LINE.validate_json(line)
            except ValidationError as error:
                raise StateError(
                    Problem(
                        where=f"{self.path}, line {number}",
                        found=line[:60].decode(errors="replace"),
                        why=error.errors()[0]["msg"],
                        remedy="remove that line, and what it measured is measured again",
                    ),
                    headline="this is no record of a measurement",
                ) from error
            found[sample.key] = sample
        return list(found.values())

    def mend(self) -> None:
        """Cut off a last line that was not written to its end."""
        if self.path.exists():
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)

    def append(self, samples: Sequence[Sample]) -> None:
        """Write records behind the others."""
        with self.path.open("a", encoding="utf-8") as sink:
            sink.writelines(sample.model_dump_json() + "\n" for sample in samples)
