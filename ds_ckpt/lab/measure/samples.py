"""Records that a run leaves on disk: one JSON line each, with units in the field names.

`samples.jsonl` only grows, so a stopped run continues where it was. A last line that was not
written to its end is dropped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ds_ckpt.errors import Problem, StateError


class _Record(BaseModel):
    """A record, identified by the fields in `by`; of equal ones the last counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    by: ClassVar[tuple[str, ...]] = ("kind",)

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of the record."""
        return tuple(getattr(self, name) for name in self.by)


class StepTime(_Record):
    """One step of the slowest process; parts as in `parts.PARTS`."""

    step_s: float
    parts_s: dict[str, float]


class Trial(_Record):
    """Consecutive timed steps of one configuration. Bytes are per step.

    `far_bytes` are payload to other nodes (on one node, to other ranks) by purpose, counted at the
    collectives and summed over the ranks. The interface of each node sends `link_bytes`.
    """

    by = ("kind", "configuration", "rate_mbit", "repetition")
    kind: Literal["trial"] = "trial"
    configuration: str
    rate_mbit: float | None
    repetition: int
    steps: tuple[StepTime, ...]
    far_bytes: dict[str, float]
    link_bytes: tuple[float, ...]
    stored_weight_bytes: float


class Memory(_Record):
    """Highest total of a policy's activations, of the process with the highest use."""

    by = ("kind", "policy")
    kind: Literal["memory"] = "memory"
    policy: str
    peak_bytes: int


Sample = Trial | Memory
_LINE: TypeAdapter[Sample] = TypeAdapter(Annotated[Sample, Field(discriminator="kind")])


class Store:
    """The samples of one run, in its folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "samples.jsonl"

    def read(self) -> list[Sample]:
        """Return complete records, the last of equal keys; StateError if a line is no record."""
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        found: dict[tuple[object, ...], Sample] = {}
        for number, line in enumerate(lines, 1):
            try:
                sample = _LINE.validate_json(line)
            except ValidationError as error:
                where, begins = f"{self.path}, line {number}", line[:60].decode(errors="replace")
                remedy = "remove that line; its measurement is repeated"
                problem = Problem(where, begins, error.errors()[0]["msg"], remedy)
                raise StateError(problem, headline="not a record of a measurement") from error
            found[sample.key] = sample
        return list(found.values())

    def truncate_partial(self) -> None:
        """Cut off a last line that was not written to its end."""
        if self.path.exists():
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)

    def append(self, *samples: Sample) -> None:
        """Append records."""
        with self.path.open("a", encoding="utf-8") as sink:
            sink.writelines(sample.model_dump_json() + "\n" for sample in samples)
