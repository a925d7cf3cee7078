"""The step log: one record per logged step, as JSON lines and as events for DeepSpeed's monitors.

To add a field, register a function with `step_field`; docs/design.md has an example.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, NamedTuple

from ds_ckpt.errors import log
from ds_ckpt.telemetry.counters import Counters, CounterValues
from ds_ckpt.telemetry.timings import EXPOSED, SECTIONS, Spans, step_parts
from ds_ckpt.telemetry.units import MB, number

Event = tuple[str, float, int]
"""Name, value and optimizer step, the arguments of DeepSpeed's monitors."""
Value = float | Mapping[str, float]
MIN_UNCOMPRESSED = 4
"""Uncompressed steps of a run before compressed ones are compared with them."""


class ExchangeSample(NamedTuple):
    """A gradient exchange after the last step; the defaults are those without compression.

    `energies` are squared norms before and after compression, by method; empty if not sampled.
    `saved_bytes` are those that this rank sends less in a compressed step than in a dense one.
    """

    energies: Mapping[str, tuple[float, float]] = MappingProxyType({})
    gradient_norm: float | None = None
    compresses: bool = False
    saved_bytes: float = 0.0


@dataclass(frozen=True)
class Interval:
    """The steps between two records, on one rank; `parameters` have been gathered so far.

    `timed` has (is compressed, `timings.step_parts`) of each step whose parts are known.
    `uncompressed_s` is the median time of the reduction in the run's uncompressed steps.
    """

    steps: int
    seconds: float
    counted: CounterValues
    parameters: int
    exchange: ExchangeSample
    timed: Sequence[tuple[bool, Mapping[str, float]]] = ()
    uncompressed_s: float | None = None

    def part_s(self, name: str) -> float:
        """Return the mean seconds of a part."""
        return fmean(parts[name] for _, parts in self.timed)


ReadField = Callable[[Interval], Value | None]
FIELDS: dict[str, ReadField] = {}


def step_field(read: ReadField) -> ReadField:
    """Register a function as a field of the step log. Records leave a field that is None out."""
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
def exchange_s(interval: Interval) -> Value | None:
    """Return the seconds per step, by section of the exchange; None if it is untimed."""
    found = {name: interval.part_s(name) for name in SECTIONS} if interval.timed else {}
    return found if any(found.values()) else None


@step_field
def compression_error(interval: Interval) -> Value:
    """Return the last step's norm of the residual, relative to gradient plus former residual."""
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


@step_field
def recompute_s(interval: Interval) -> float | None:
    """Return the seconds of recomputation per step, without waits for weights."""
    return interval.part_s("recompute") if interval.timed else None


@step_field
def exposed_s(interval: Interval) -> Value | None:
    """Return the seconds per step of waiting for the network, by reason."""
    return {reason: interval.part_s(reason) for reason in EXPOSED} if interval.timed else None


@step_field
def recompute_paid_share(interval: Interval) -> Value | None:
    """Return the share of the recomputation's time that compression saves.

    `measured`: the time by which the reduction, waits and work, is shorter than in the run's
    uncompressed steps (warm-up, autotune). `estimated`, without such steps: saved bytes times the
    seconds per byte of all exposed collectives, minus the compression's work. None without
    compressed steps, recomputation or time of the exchange.
    """
    compressed_s = [parts["reduction"] for is_compressed, parts in interval.timed if is_compressed]
    if not compressed_s or not interval.part_s("recompute") or not interval.part_s("exchange"):
        return None
    if interval.uncompressed_s is not None:
        saved_s = interval.uncompressed_s - fmean(compressed_s)
        return {"measured": saved_s / interval.part_s("recompute")}
    sent = sum(interval.counted.bytes_sent.values()) / interval.steps
    saved_s = interval.exchange.saved_bytes * sum(map(interval.part_s, EXPOSED)) / max(sent, 1)
    work_s = interval.part_s("reduction") - interval.part_s("exchange")
    return {"estimated": (saved_s - work_s) / interval.part_s("recompute")}


def line_of(record: Mapping[str, Any]) -> str:
    """Describe a record in one line."""
    times = {"a step": record["step_time_s"], "recomputation": record.get("recompute_s", 0.0)}
    times |= {f"exposed {reason}": s for reason, s in record.get("exposed_s", {}).items()}
    facts = [f"{name} {number(s)} s" for name, s in times.items() if s]
    facts.append(f"{number(sum(record['sent_bytes'].values()) / MB)} MB sent")
    for how, share in record.get("recompute_paid_share", {}).items():
        facts.append(f"compression pays for {max(share, 0):.0%} of the recomputation ({how})")
    return f"ds_ckpt: step {record['step']}: {', '.join(facts)}"


@dataclass
class StepLog:
    """Writes a record every `every_n_steps` steps to a JSONL file, and keeps the `last`.

    The rank is put before `.jsonl` in `path`. `monitor` receives each record's numbers, and rank 0
    logs a line. `spans` have the parts of steps. `is_compressing` describes the next step.
    """

    counters: Counters
    every_n_steps: int
    path: str | None
    rank: int
    sample: Callable[[], ExchangeSample] = ExchangeSample
    monitor: Callable[[list[Event]], None] | None = None
    spans: Spans = field(default_factory=Spans)
    is_compressing: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._modes = deque([False] * self.spans.delay + [self.is_compressing()])
        """True for each compressed step, of the steps whose parts come next."""
        self._timed: list[tuple[bool, Mapping[str, float]]] = []
        self._uncompressed_s: deque[float] = deque(maxlen=64)
        self._file: Path | None = None
        if self.path:
            wanted = Path(self.path)
            name = f"{wanted.name.removesuffix('.jsonl')}.{self.rank}.jsonl"
            self._file = wanted.with_name(name)
        self._before = self.counters.snapshot()
        self._time_s, self._steps = time.perf_counter(), 0
        self.last: dict[str, Any] | None = None

    def step_ended(self, step: int) -> None:
        """Count a step; write a record if it is the last one of its interval."""
        self._steps += 1
        self._time_step()
        if step % self.every_n_steps:
            return
        now, now_s = self.counters.snapshot(), time.perf_counter()
        exchange = self.sample()
        took_s, counted = now_s - self._time_s, now - self._before
        has_baseline = len(self._uncompressed_s) >= MIN_UNCOMPRESSED
        uncompressed_s = median(self._uncompressed_s) if has_baseline else None
        about = (len(now.gathers), exchange, self._timed, uncompressed_s)
        interval, self._timed = Interval(self._steps, took_s, counted, *about), []
        found = {name: read(interval) for name, read in FIELDS.items()}
        values = {name: value for name, value in found.items() if value is not None}
        self.last = {"step": step, "steps": self._steps, **values}
        self._before, self._time_s, self._steps = now, now_s, 0
        self.note(self.last)
        if self.rank == 0:
            log.info(line_of(self.last))
        if self.monitor is not None:
            self.monitor(list(_events(step, values)))

    def _time_step(self) -> None:
        is_compressed, spans = self._modes.popleft(), self.spans.take()
        self._modes.append(self.is_compressing())
        if spans:
            parts = step_parts(spans, self.spans.waits)
            self._timed.append((is_compressed, parts))
            if not is_compressed:
                self._uncompressed_s.append(parts["reduction"])

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
        for part, figure in parts.items():
            yield f"ds_ckpt/{name}/{part}".removesuffix("/"), float(figure), step
