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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ds_ckpt.telemetry.counters import Counters, Snapshot

log = logging.getLogger("ds_ckpt")
Event = tuple[str, float, int]
"""Name, value and optimizer step, the arguments of DeepSpeed's monitors."""
Value = float | Mapping[str, float]


class ExchangeSample(NamedTuple):
    """A gradient exchange after the last step; the defaults are those without compression.

    `energies` are squared norms before and after compression, by method; empty if not sampled.
    """

    seconds: Mapping[str, float] = MappingProxyType({})
    energies: Mapping[str, tuple[float, float]] = MappingProxyType({})
    gradient_norm: float | None = None
    compresses: bool = False


@dataclass(frozen=True)
class Interval:
    """The steps between two records, on one rank; `parameters` have been gathered so far."""

    steps: int
    seconds: float
    counted: Snapshot
    parameters: int
    exchange_s: Mapping[str, float]
    exchange: ExchangeSample


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
    """Return the host seconds per step, by section of the exchange (`timings.Timings`)."""
    return {name: seconds / interval.steps for name, seconds in interval.exchange_s.items()}


@step_field
def compression_error(interval: Interval) -> Value:
    """Return the last step's norm of the residual over that of what there was to send."""
    energies = interval.exchange.energies.items()
    return {method: (before and after / before) ** 0.5 for method, (before, after) in energies}


@step_field
def residual_norm(interval: Interval) -> Value:
    """Return the last step's norm of the residual, in norms of the averaged gradient."""
    norm, energies = interval.exchange.gradient_norm, interval.exchange.energies.items()
    return {method: after**0.5 / norm for method, (_, after) in energies} if norm else {}


@step_field
def compresses(interval: Interval) -> bool:
    """Return whether gradients are compressed after this step."""
    return interval.exchange.compresses


class StepLog:
    """Writes a record every `every_n_steps` steps to a JSONL file, and keeps the `last`.

    The rank is put before `.jsonl` in `path`. `monitor` receives each record's numbers.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        every_n_steps: int,
        path: str | None,
        rank: int,
        sample: Callable[[], ExchangeSample] = ExchangeSample,
        monitor: Callable[[list[Event]], None] | None = None,
    ) -> None:
        self._counters, self._every = counters, every_n_steps
        self._sample, self._monitor = sample, monitor
        self._file: Path | None = None
        if path:
            wanted = Path(path)
            self._file = wanted.with_name(f"{wanted.name.removesuffix('.jsonl')}.{rank}.jsonl")
        self._before, self._exchange_s = counters.snapshot(), Counter(sample().seconds)
        self._time_s, self._steps = time.perf_counter(), 0
        self.last: dict[str, Any] | None = None

    def step_ended(self, step: int) -> None:
        """Count a step; write a record if it is the last one of its interval."""
        self._steps += 1
        if step % self._every:
            return
        now, now_s = self._counters.snapshot(), time.perf_counter()
        exchange = self._sample()
        exchange_s = {name: s - self._exchange_s[name] for name, s in exchange.seconds.items()}
        took_s, counted = now_s - self._time_s, now - self._before
        interval = Interval(self._steps, took_s, counted, len(now.gathers), exchange_s, exchange)
        values = {name: read(interval) for name, read in FIELDS.items()}
        self.last = {"step": step, "steps": self._steps, **values}
        self._before, self._exchange_s = now, Counter(exchange.seconds)
        self._time_s, self._steps = now_s, 0
        self.note(self.last)
        if self._monitor is not None:
            self._monitor(list(_events(step, values)))

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


def _events(step: int, values: Mapping[str, Value]) -> Iterator[Event]:
    """Flatten a record for DeepSpeed's monitors."""
    for name, value in values.items():
        parts = value if isinstance(value, Mapping) else {"": value}
        for part, number in parts.items():
            yield f"ds_ckpt/{name}/{part}".removesuffix("/"), float(number), step
