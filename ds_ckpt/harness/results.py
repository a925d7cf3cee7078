"""The demo's results as typed records. Every number carries its unit in its name.

Written as `results.json` by the orchestrator; `Results.load` reads it back and refuses a file
that is not one. Bytes are per process, averaged over the processes, unless a name says otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ds_ckpt.errors import Problem, StateError
from ds_ckpt.harness.cells import Method


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Traffic(_Record):
    """Bytes that leave one process in one training step, counted at each collective."""

    gather_forward_bytes: float = 0.0
    gather_recompute_bytes: float = 0.0
    gather_backward_bytes: float = 0.0
    reduce_bytes: float = 0.0
    partition_bytes: float = 0.0
    """Of activations, between tensor-parallel processes."""
    other_bytes: float = 0.0

    @property
    def weight_bytes(self) -> float:
        return self.gather_forward_bytes + self.gather_recompute_bytes + self.gather_backward_bytes

    @property
    def gradient_bytes(self) -> float:
        return self.reduce_bytes

    @property
    def total_bytes(self) -> float:
        return self.weight_bytes + self.reduce_bytes + self.partition_bytes + self.other_bytes


class CellResult(_Record):
    """What one cell showed. Steps are numbered from 0."""

    name: str
    title: str
    method: Method
    checkpointing: bool
    reference: bool
    config_file: str
    steps: int
    timed_from_step: int
    """Times and bytes are taken from this step on: after the dense warm-up of Top-K."""
    step_time_median_s: float
    """Over the timed steps, each as long as its slowest process."""
    step_times_s: tuple[float, ...]
    """Of every step, the untimed ones too."""
    held_activation_bytes: int
    """On process 0, after the forward of the first step."""
    traffic: Traffic
    warmup_traffic: Traffic | None = None
    """Of Top-K's dense warm-up steps; None for other methods and where there were none."""
    interface_bytes: float | None = None
    """Bytes a process put on the interface to the others in a step, as the kernel counts them."""
    heldout_loss: float | None
    """Natural logarithm, mean over the held-out bytes looked at; None for a reference."""
    train_losses: tuple[float, ...]
    """Mean over the processes, before each step's update."""
    weights_sha256: str
    """Over the weights of all processes after the last step."""


class Machine(_Record):
    """The machine without its name."""

    cpu_model: str
    cpu_cores: int
    memory_gib: float
    accelerator: str
    system: str


class RunInfo(_Record):
    """What was run, with what, on what."""

    started_utc: str
    command: str
    seed: int
    steps: int
    topk_start_step: int
    processes: int
    rate_mbit: float | None = None
    """Of the link between two emulated hosts in the timed steps; None on loopback, not shaped."""
    sequences_per_process: int
    sequence_length: int
    parameters: int
    text: str
    train_bytes: int
    heldout_bytes: int
    corpus_sha256: str
    versions: dict[str, str]
    machine: Machine
    wall_time_s: float


class Measurements(_Record):
    """What the launched processes hand to the orchestrator."""

    cells: tuple[CellResult, ...]
    parameters: int


class Results(_Record):
    """One run of the demo."""

    format: Literal["ds_ckpt demo 1"] = "ds_ckpt demo 1"
    run: RunInfo
    cells: tuple[CellResult, ...]

    def cell(self, name: str) -> CellResult:
        """The cell of that name. Raises KeyError if the run had none."""
        for cell in self.cells:
            if cell.name == name:
                return cell
        raise KeyError(name)

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Raises StateError, naming the first field that does not fit, if it is no such file."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except ValidationError as error:
            first = error.errors()[0]
            place = "".join(f".{part}" for part in first["loc"])
            raise StateError(
                Problem(
                    where=f"{path.name}: ${place}",
                    found=f"{first['input']!r}"[:80],
                    why=first["msg"],
                    remedy="give a results.json that this version of the demo has written",
                ),
                headline="this is not a result of the demo",
            ) from error
