"""Parts of a step, and the records of a run: one JSON line each, with units in the field names.

`samples.jsonl` only grows, so a stopped run continues where it was. A last line that was not
written to its end is dropped.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ds_ckpt.errors import Problem, StateError
from ds_ckpt.telemetry.timings import Span, innermost

PHASES = ("forward", "backward", "update")
NETWORK = ("network_forward", "network_recompute", "network_backward", "network_update")
COMPUTE = ("compute_forward", "compute_backward", "compute_update")
PARTS = (*COMPUTE, "recompute", *NETWORK, "compression")
_BYTES_KEYS = AliasChoices("interface_bytes", "link_bytes")
_WIRE = {"collective", "wire"}
_EXCHANGE = {"reduce", "weights", "in_host", "residual", "pack", "unpack"}


def parts(spans: Sequence[Span], main: int) -> dict[str, float]:
    """Return seconds by part of one step, from the spans of the thread that runs DeepSpeed.

    That thread decides how long a step takes, so each moment of it belongs to one part:

        network     inside a collective, waiting for one, or in an exchange's `wire` section, by
                    phase: forward, recomputation, backward, update
        compression the exchange's own work for gradients and resident weights: residuals, packing,
                    unpacking, summing. In default DeepSpeed it is the reduction's work beside the
                    collective
        recompute   inside a recomputation, none of the above
        compute     forward, backward, update: the rest of each

    Time between phases is in no part: a test compares the sum with the step's own clock.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    for start_s, end_s, kinds in innermost([s for s in spans if s.thread == main]):
        phase = next((kind for kind in kinds if kind in PHASES), None)
        where = "recompute" if "recompute" in kinds else phase
        if where is None:
            continue
        if _WIRE & set(kinds):
            part = f"network_{where}"
        elif _EXCHANGE & set(kinds):
            part = "compression"
        else:
            part = "recompute" if where == "recompute" else f"compute_{where}"
        seconds[part] += end_s - start_s
    return seconds


class _Record(BaseModel):
    """A record, identified by the fields in `by`; of equal ones the last counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    by: ClassVar[tuple[str, ...]] = ("kind",)

    @property
    def key(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.by)


class StepTime(_Record):
    """One step of the slowest process; parts as in `PARTS`."""

    step_s: float
    parts_s: dict[str, float]


class Trial(_Record):
    """Consecutive timed steps of one configuration. Bytes are per step.

    `far_bytes` are payload to other nodes (on one node, to other ranks) by purpose. They are
    counted at the collectives and summed over ranks. Each node's interface sends `interface_bytes`.
    """

    by = ("kind", "configuration", "rate_mbit", "repetition")
    kind: Literal["trial"] = "trial"
    configuration: str
    rate_mbit: float | None
    repetition: int
    steps: tuple[StepTime, ...]
    far_bytes: dict[str, float]
    interface_bytes: tuple[float, ...] = Field(validation_alias=_BYTES_KEYS)
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
