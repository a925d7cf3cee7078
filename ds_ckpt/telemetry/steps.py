"""One record a logged step, as JSON lines: bytes by purpose and wall time, with units in names."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ds_ckpt.telemetry.counters import Counters


@dataclass(frozen=True)
class StepRecord:
    """What one process did between two logged steps (means over `steps`)."""

    step: int
    steps: int
    step_time_s: float
    sent_bytes: dict[str, float]
    collectives: dict[str, float]
    gathers_a_parameter: float


class StepLog:
    """Takes the counters every `every_n_steps` steps and appends a record to a JSONL file.

    Args:
        path: the file; the process's index is put before `.jsonl`. None keeps `last` only.
    """

    def __init__(
        self, counters: Counters, *, every_n_steps: int, path: str | None, process: int
    ) -> None:
        self._counters = counters
        self._every = every_n_steps
        self._file = _file_of(Path(path), process) if path else None
        self._before = counters.snapshot()
        self._time_s = time.perf_counter()
        self._steps = 0
        self.last: StepRecord | None = None

    def step_ended(self, step: int) -> None:
        self._steps += 1
        if step % self._every:
            return
        now, now_s = self._counters.snapshot(), time.perf_counter()
        delta, n = now - self._before, self._steps
        parameters = max(len(now.gathers), 1)
        self.last = StepRecord(
            step=step,
            steps=n,
            step_time_s=(now_s - self._time_s) / n,
            sent_bytes={p.value: b / n for p, b in delta.bytes_sent.items()},
            collectives={p.value: c / n for p, c in delta.collectives.items()},
            gathers_a_parameter=sum(delta.gathers.values()) / n / parameters,
        )
        self._before, self._time_s, self._steps = now, now_s, 0
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as sink:
                sink.write(json.dumps(asdict(self.last)) + "\n")


def _file_of(path: Path, process: int) -> Path:
    """`runs/exp.v1.jsonl` and `runs/exp.v1` both become `runs/exp.v1.0.jsonl`."""
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.{process}.jsonl")
