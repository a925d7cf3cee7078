"""The step log: one record per logged step, as JSON lines and as events for DeepSpeed's monitors.

To add a field, write a function here and register it with `step_field`. Its name is the field's
name and has the unit; it returns a number, or numbers by name:

    @step_field
    def gathers_per_step(interval: Interval) -> float:
        return sum(interval.counted.gathers.values()) / interval.steps
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_ckpt.telemetry.counters import Counters, Snapshot

log = logging.getLogger("ds_ckpt")
Event = tuple[str, float, int]
"""Name, value and optimizer step, the arguments of DeepSpeed's monitors."""
Value = float | Mapping[str, float]


@dataclass(frozen=True)
class ExchangeSample:
    """A gradient exchange after the last step.

    Attributes:
        seconds: by section, since attach.
        energies: squared norms before and after compression, by method; empty if not sampled.
        gradient_norm: of the averaged gradient; None if not known.
    """

    seconds: Mapping[str, float]
    energies: Mapping[str, tuple[float, float]]
    gradient_norm: float | None
    compresses: bool


@dataclass(frozen=True)
class Interval:
    """The steps between two records, on one rank.

    Attributes:
        seconds: wall time of all `steps`.
        parameters: number of parameters gathered so far.
        exchange_s: host seconds by section of the exchange.
    """

    steps: int
    seconds: float
    counted: Snapshot
    parameters: int
    exchange_s: Mapping[str, float]
    exchange: ExchangeSample | None


FIELDS: dict[str, Callable[[Interval], Value]] = {}


def step_field(read: Callable[[Interval], Value]) -> Callable[[Interval], Value]:
    """Register a function as a field of the step log."""
    FIELDS[read.__name__] = read
    return read


@step_field
def step_time_s(interval: Interval) -> float:
    """Return the mean wall time of a step."""
    return interval.seconds / interval.steps


@step_field
def sent_bytes(interval: Interval) -> Value:
    """Return the bytes sent per step, by purpose."""
    return {p.value: n / interval.steps for p, n in interval.counted.bytes_sent.items()}


@step_field
def gathers_a_parameter(interval: Interval) -> float:
    """Return the all-gathers per parameter and step."""
    return sum(interval.counted.gathers.values()) / interval.steps / max(interval.parameters, 1)


@step_field
def exchange_s(interval: Interval) -> Value:
    """Return the host seconds per step, by section of the exchange (`timings.SECTIONS`)."""
    return {name: seconds / interval.steps for name, seconds in interval.exchange_s.items()}


@step_field
def compression_error(interval: Interval) -> Value:
    """Return the last step's norm of the residual over that of what there was to send."""
    energies = interval.exchange.energies if interval.exchange else {}
    return {method: (b and after / b) ** 0.5 for method, (b, after) in energies.items()}


@step_field
def residual_norm(interval: Interval) -> Value:
    """Return the last step's norm of the residual, in norms of the averaged gradient."""
    exchange = interval.exchange
    if exchange is None or not exchange.gradient_norm:
        return {}
    return {m: after**0.5 / exchange.gradient_norm for m, (_, after) in exchange.energies.items()}


@step_field
def compresses(interval: Interval) -> bool:
    """Return whether gradients are compressed after this step."""
    return interval.exchange is not None and interval.exchange.compresses


class StepLog:
    """Writes a record every `every_n_steps` steps, and keeps the `last`.

    Args:
        counters: of this rank.
        path: JSONL file; the rank is put before `.jsonl`. None writes no file.
        sample: reads the exchange; None without compression.
        monitor: receives each record's numbers.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        every_n_steps: int,
        path: str | None,
        rank: int,
        sample: Callable[[], ExchangeSample] | None = None,
        monitor: Callable[[list[Event]], None] | None = None,
    ) -> None:
        self._counters, self._every = counters, every_n_steps
        self._sample, self._monitor = sample, monitor
        self._file: Path | None = None
        if path:
            wanted = Path(path)
            self._file = wanted.with_name(f"{wanted.name.removesuffix('.jsonl')}.{rank}.jsonl")
        self._before, self._exchange_s = counters.snapshot(), Counter[str]()
        self._time_s, self._steps = time.perf_counter(), 0
        self.last: dict[str, Any] | None = None

    def step_ended(self, step: int) -> None:
        """Count a step; write a record if it is the last one of its interval."""
        self._steps += 1
        if step % self._every:
            return
        now, now_s = self._counters.snapshot(), time.perf_counter()
        exchange = self._sample() if self._sample else None
        seconds = Counter(exchange.seconds if exchange else {})
        interval = Interval(
            steps=self._steps,
            seconds=now_s - self._time_s,
            counted=now - self._before,
            parameters=len(now.gathers),
            exchange_s={name: s - self._exchange_s[name] for name, s in seconds.items()},
            exchange=exchange,
        )
        values = {name: read(interval) for name, read in FIELDS.items()}
        self.last = {"step": step, "steps": self._steps, **values}
        self._before, self._exchange_s = now, seconds
        self._time_s, self._steps = now_s, 0
        self.note(self.last)
        if self._monitor is not None:
            self._monitor(_events(step, values))

    def note(self, record: dict[str, Any]) -> None:
        """Append a record of any kind. If that fails, warn and write nothing from then on."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as sink:
                sink.write(json.dumps(record) + "\n")
        except OSError as error:
            log.warning("ds_ckpt: telemetry is no longer written: %s", error)
            self._file = None


def _events(step: int, values: Mapping[str, Value]) -> list[Event]:
    """Flatten a record for DeepSpeed's monitors."""
    found: list[Event] = []
    for name, value in values.items():
        parts = value if isinstance(value, Mapping) else {"": value}
        for part, number in parts.items():
            found.append((f"ds_ckpt/{name}/{part}".removesuffix("/"), float(number), step))
    return found
