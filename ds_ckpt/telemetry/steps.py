"""One record a logged step, as JSON lines: bytes by purpose and wall time, with units in names."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ds_ckpt.telemetry.counters import Counters
from ds_ckpt.telemetry.timings import Timings

log = logging.getLogger("ds_ckpt")
Event = tuple[str, float, int]
"""Name, value, optimizer step: what DeepSpeed's monitors take."""


@dataclass(frozen=True)
class StepRecord:
    """What one process did between two logged steps (means over `steps`).

    `reduce_s` is that of `Counters`.

    Attributes:
        exchange_s: host seconds a step by section of the exchange (`timings.SECTIONS`).
        compression_error: of this process in the last step, by method: norm of what stays behind
            over norm of what there was to send, 0 to 1.
        residual_norm: norm of what stays behind for other processes, of this process in the last
            step, by method, in norms of the averaged gradient; empty where that is not known.
        compresses: whether gradients go compressed after it; not in the warm-up, and not where that
            was found to make no shorter steps.
    """

    step: int
    steps: int
    step_time_s: float
    sent_bytes: dict[str, float]
    collectives: dict[str, float]
    gathers_a_parameter: float
    reduce_s: float
    exchange_s: dict[str, float] = field(default_factory=dict)
    compression_error: dict[str, float] = field(default_factory=dict)
    residual_norm: dict[str, float] = field(default_factory=dict)
    compresses: bool = False

    def events(self) -> list[Event]:
        """The record as numbers with names, for DeepSpeed's monitors."""
        found: list[Event] = []
        for name, value in asdict(self).items():
            if name in ("step", "steps"):
                continue
            parts = value.items() if isinstance(value, dict) else [("", value)]
            for part, number in parts:
                full = f"ds_ckpt/{name}/{part}" if part else f"ds_ckpt/{name}"
                found.append((full, float(number), self.step))
        return found


@dataclass
class ExchangeProbe:
    """What a gradient exchange can tell.

    Attributes:
        errors: returns squared norms of what the last step's exchange was given and left out, by
            method; empty if it was not sampled.
        compresses: tells whether gradients go compressed now.
        gradient_norm: tells the norm of the last step's averaged gradient; None: not known.
        plan: one JSON-able record a tensor, written before the first step's record.
    """

    timings: Timings
    errors: Callable[[], Mapping[str, tuple[float, float]]]
    compresses: Callable[[], bool]
    gradient_norm: Callable[[], float | None]
    plan: list[dict[str, Any]]


class StepLog:
    """Takes the counters every `every_n_steps` steps and appends a record to a JSONL file.

    Args:
        path: the file; the process's index is put before `.jsonl`. None keeps `last` only.
        exchange: None without compression.
        monitor: takes each record's numbers too; None: nobody does.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        every_n_steps: int,
        path: str | None,
        process: int,
        exchange: ExchangeProbe | None = None,
        monitor: Callable[[list[Event]], None] | None = None,
    ) -> None:
        self._exchange = exchange
        self._exchange_s: dict[str, float] = {}
        self._monitor = monitor
        self._counters = counters
        self._every = every_n_steps
        self._file: Path | None = None
        if path:  # `runs/exp.v1.jsonl` and `runs/exp.v1` both become `runs/exp.v1.0.jsonl`
            wanted = Path(path)
            stem = wanted.name.removesuffix(".jsonl")
            self._file = wanted.with_name(f"{stem}.{process}.jsonl")
        self._before = counters.snapshot()
        self._time_s = time.perf_counter()
        self._steps = 0
        self.last: StepRecord | None = None
        if exchange is not None:
            self.note({"plan": exchange.plan})

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
            reduce_s=delta.reduce_s / n,
            **self._of_exchange(n),
        )
        self._before, self._time_s, self._steps = now, now_s, 0
        self.note(asdict(self.last))
        if self._monitor is not None:
            self._monitor(self.last.events())

    def _of_exchange(self, steps: int) -> dict[str, Any]:
        if self._exchange is None:
            return {}
        seconds = dict(self._exchange.timings.seconds)
        before, self._exchange_s = self._exchange_s, seconds
        energies = self._exchange.errors().items()
        gradient_norm = self._exchange.gradient_norm()
        return {
            "exchange_s": {k: (s - before.get(k, 0.0)) / steps for k, s in seconds.items()},
            "compression_error": {m: (b and a / b) ** 0.5 for m, (b, a) in energies},
            "residual_norm": {m: after**0.5 / gradient_norm for m, (_, after) in energies}
            if gradient_norm
            else {},
            "compresses": self._exchange.compresses(),
        }

    def note(self, record: dict[str, Any]) -> None:
        """Append a record, which may be of another kind, at once. A file that cannot be written is
        left with a warning: training goes on."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as sink:
                sink.write(json.dumps(record) + "\n")
        except OSError as error:
            log.warning("ds_ckpt: no telemetry is written any more: %s", error)
            self._file = None
