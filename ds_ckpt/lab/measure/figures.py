"""The figures of an experiment, one entry each. Pure.

An entry owns a figure's name, words, unit, format and how it is got; worker, tables, report and the
comparison of runs ask it. To add a figure is to add its entry (and its tests):

    MEASURED    of one configuration at a rate: from its trials, its memory, its training. With
                `take` every process of the worker takes it in each trial, and `over` puts the
                processes' values together; what is got so stands in the trials' records.
    DERIVED     of a policy P, a dense baseline D (`stock` or `dense`) and another exchange C at a
                rate: a method of gradients and where the weights are.
                `definition` says what it is; docs/measuring.md and the report print it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ds_ckpt.lab.hosts.interfaces import Sent
from ds_ckpt.lab.measure.parts import COMPUTE
from ds_ckpt.lab.measure.resampling import Estimate, Lookup, Point
from ds_ckpt.lab.measure.samples import Key, Loss, Memory, StepTime
from ds_ckpt.lab.measure.spec import SILENT, STOCK, Configuration, Spec
from ds_ckpt.telemetry.units import MB, number

Value = Estimate | float | None


@dataclass(frozen=True)
class Figure:
    """What all figures have: a name with its unit for files, words and a unit for people.

    Bytes are kept in bytes; a unit that begins with MB shows them in 10^6.
    """

    name: str
    words: str
    unit: str = ""
    shown_as: Callable[[float], str] = field(default=number, kw_only=True)

    @property
    def heading(self) -> str:
        return f"{self.words}, {self.unit}" if self.unit else self.words

    def text(self, value: Value, *, interval: bool = True) -> str:
        """The value in its unit, without the unit; `-` where there is none."""
        if value is None:
            return "-"
        if not isinstance(value, Estimate):
            value = Estimate(value, value, value)
        scale = 1 / MB if self.unit.startswith("MB") else 1.0
        middle, low, high = (
            self.shown_as(scale * v) if not math.isnan(v) else "-"
            for v in (value.value, value.low, value.high)
        )
        exact = value.low == value.high or math.isnan(value.value)
        return middle if exact or not interval else f"{middle} ({low} to {high})"

    def with_unit(self, value: Value) -> str:
        """The value alone with its unit, for a sentence."""
        return f"{self.text(value, interval=False)} {self.unit}".rstrip()


@dataclass(frozen=True)
class Take:
    """What one process has seen of a trial: its steps, and what its host has sent meanwhile.

    Attributes:
        leads: whether it is the first process of its host.
        far_bytes: that it sent to other hosts in a step, by purpose.
        weight_bytes: of weights that it keeps.
    """

    times: Sequence[StepTime]
    losses: Sequence[float]
    sent: Sent
    leads: bool
    hosts: int
    far_bytes: Mapping[str, float]
    weight_bytes: int

    def far_bytes_a_host(self, beginning: str) -> float:
        """This process's share of the mean over hosts, of the purposes that begin so."""
        return _total(self.far_bytes, beginning) / self.hosts


@dataclass(frozen=True)
class Row:
    """A configuration at a rate with a batch. Bytes are a step's."""

    configuration: str
    rate_mbit: float | None
    sequences: int
    usual: bool
    """Whether its batch is the smallest measured one."""
    processes: int
    tokens: int
    """Of a step, all processes."""
    step_s: Estimate
    parts_s: dict[str, Estimate]
    in_collectives_s: float
    purpose_bytes: dict[str, float]
    """Of all processes."""
    link_bytes: float
    """Of the host that sends most."""
    interface_bytes: float
    taken: dict[str, float]
    memory: Memory | None
    loss: Loss | None

    def part_s(self, *names: str) -> float:
        return sum(self.parts_s[name].value for name in names or self.parts_s)

    def bytes_a_process(self, *beginnings: str) -> float:
        """Of the purposes that begin so."""
        return _total(self.purpose_bytes, *beginnings) / self.processes

    def number(self, name: str) -> float:
        """The value alone of a figure that every configuration has."""
        value = measured(name).value(self)
        assert value is not None, name
        return value.value if isinstance(value, Estimate) else value

    def text(self, name: str, *, interval: bool = False) -> str:
        """A figure's value in its unit."""
        figure = measured(name)
        return figure.text(figure.value(self), interval=interval)


@dataclass(frozen=True)
class Measured(Figure):
    """A figure of one configuration."""

    of: Callable[[Row], Value] | None = field(default=None, kw_only=True)
    take: Callable[[Take], float] | None = field(default=None, kw_only=True)
    over: Callable[[Sequence[float]], float] = field(default=max, kw_only=True)

    def value(self, row: Row) -> Value:
        return row.taken.get(self.name) if self.of is None else self.of(row)


def _total(values: Mapping[str, float], *beginnings: str) -> float:
    return sum(value for name, value in values.items() if name.startswith(beginnings))


def _far(name: str, words: str, beginning: str) -> Measured:
    return Measured(
        name, words, "MB a host", take=lambda t: t.far_bytes_a_host(beginning), over=sum
    )


def _part(name: str, words: str, *parts: str) -> Measured:
    return Measured(f"{name}_s", words, "s", of=lambda r: r.part_s(*(parts or (name,))))


MEASURED: list[Measured] = [
    Measured("step_s", "step", "s", of=lambda r: r.step_s),
    Measured("tokens_per_s", "tokens", "/s", of=lambda r: r.tokens / r.step_s.value),
    _part("compute", "compute", *COMPUTE),
    _part("recompute", "recompute"),
    _part("network_forward", "network: forward"),
    _part("network_recompute", "in recompute"),
    _part("network_backward", "in backward"),
    _part("network_update", "in update"),
    _part("compression", "compression"),
    Measured(
        "parts_over_step",
        "parts / step",
        of=lambda r: r.part_s() / r.step_s.value,
        shown_as="{:.3f}".format,
    ),
    Measured("in_collectives_s", "in collectives", "s", of=lambda r: r.in_collectives_s),
    Measured(
        "link_busy_s",
        "link busy",
        "s",
        of=lambda r: None if r.rate_mbit is None else 8e-6 * r.link_bytes / r.rate_mbit,
    ),
    Measured("link_bytes", "link", "MB a host", of=lambda r: r.link_bytes),
    _far("link_gather_bytes", "link: gathers", "gather"),
    _far("link_weight_bytes", "link: changed weights", "weights"),
    _far("link_gradient_bytes", "link: gradients", "reduce"),
    Measured(
        "gradient_bytes", "gradients", "MB a process", of=lambda r: r.bytes_a_process("reduce")
    ),
    Measured(
        "weight_bytes",
        "weights",
        "MB a process",
        of=lambda r: r.bytes_a_process("gather", "weights"),
    ),
    Measured(
        "interface_bytes",
        "interfaces",
        "MB in all",
        of=lambda r: r.interface_bytes,
        take=lambda t: t.sent.all_bytes / len(t.times) if t.leads else 0.0,
        over=sum,
    ),
    Measured(
        "interface_over_purposes",
        "interfaces / purposes",
        of=lambda r: r.interface_bytes / max(sum(r.purpose_bytes.values()), 1.0),
        shown_as="{:.3f}".format,
    ),
    Measured("kept_weight_bytes", "kept weights", "MB", take=lambda t: t.weight_bytes),
    Measured(
        "held_bytes",
        "held activations",
        "MB",
        of=lambda r: r.memory.held_bytes if r.memory else None,
    ),
    Measured(
        "peak_bytes",
        "peak activations",
        "MB",
        of=lambda r: r.memory.peak_bytes if r.memory else None,
    ),
    Measured(
        "heldout_loss",
        "held-out loss",
        of=lambda r: r.loss.heldout_loss if r.loss else None,
        shown_as="{:.4f}".format,
    ),
]


def measured(name: str) -> Measured:
    """The entry of that name."""
    return next(one for one in MEASURED if one.name == name)


def taken(take: Take) -> dict[str, float]:
    """On every process: what the registry takes of a trial."""
    return {one.name: one.take(take) for one in MEASURED if one.take is not None}


def put_together(everyone: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """On process 0: the processes' values as one."""
    return {
        one.name: float(one.over([values[one.name] for values in everyone]))
        for one in MEASURED
        if one.take is not None
    }


@dataclass(frozen=True)
class Sides:
    """What a derived figure compares: policy P, dense baseline D, exchange C at one rate."""

    at: Lookup
    spec: Spec
    rows: Mapping[Key, Row]
    """Of every configuration with every batch that was measured."""
    rate_mbit: float | None
    policy: str
    baseline: str
    method: str
    batch: int

    def point(self, policy: str, method: str) -> Point:
        return self.at(Key(f"{policy}/{method}", self.batch))

    def row(self, policy: str, method: str) -> Row:
        return self.rows[Key(f"{policy}/{method}", self.batch)]

    @property
    def dense(self) -> Point:
        return self.point(self.policy, self.baseline)

    @property
    def compressed(self) -> Point:
        return self.point(self.policy, self.method)

    @property
    def plain(self) -> Point:
        """No checkpointing, D."""
        return self.point("none", self.baseline)

    def recomputing_s(self, method: str) -> float | None:
        if Configuration.of(f"none/{method}") not in self.spec.configurations:
            return None
        point = self.point(self.policy, method)
        return point.parts_s["recompute"] + point.network_s - self.point("none", method).network_s

    @property
    def freed_s(self) -> float:
        return self.dense.exchange_s - self.compressed.exchange_s

    @property
    def ceiling_s(self) -> float | None:
        silent = replace(Configuration.of(f"{self.policy}/{self.method}"), method=SILENT)
        if silent not in self.spec.configurations:
            return None
        return self.dense.exchange_s - self.point(self.policy, silent.exchange).exchange_s

    @property
    def freed_bytes(self) -> float:
        dense, compressed = (self.row(self.policy, m) for m in (self.baseline, self.method))
        return dense.link_bytes - compressed.link_bytes

    @property
    def taken_memory(self) -> float | None:
        """What C's weights take more than D's, over what activations take less than `none`'s."""
        if Configuration.of(f"{self.policy}/{self.method}").weights == STOCK:
            return None
        mine, stock = (self.row(self.policy, m) for m in (self.method, self.baseline))
        plain, kept = self.row("none", self.baseline).memory, stock.memory
        name = "kept_weight_bytes"
        if plain is None or kept is None or not mine.taken.keys() & stock.taken.keys() >= {name}:
            return None
        taken = mine.taken[name] - stock.taken[name]
        return _over(taken, plain.peak_bytes - kept.peak_bytes)


@dataclass(frozen=True)
class Derived(Figure):
    """A figure of a comparison, estimated from whole draws of repetitions."""

    of: Callable[[Sides], float | None] = field(kw_only=True)
    definition: str = field(kw_only=True)
    headline: bool = field(default=False, kw_only=True)


def _over(value: float, by: float | None) -> float | None:
    return None if by is None else value / by if by > 0 else math.nan


DERIVED: list[Derived] = [
    Derived(
        "recompute_dense_s",
        "recomputing adds, dense",
        "s",
        of=lambda s: s.recomputing_s(s.baseline),
        definition="recompute(P, D) + network(P, D) - network(none, D): what recomputing adds to a "
        "step with dense gradients, its own gathers included and those that backward is spared "
        "taken off",
        headline=True,
    ),
    Derived(
        "recompute_compressed_s",
        "recomputing adds, compressed",
        "s",
        of=lambda s: s.recomputing_s(s.method),
        definition="the same with C in the place of D; where weights are resident its gathers stay "
        "inside the host",
    ),
    Derived(
        "recompute_dense_by_difference_s",
        "the same by difference of steps",
        "s",
        of=lambda s: s.dense.step_s - s.plain.step_s,
        definition="step(P, D) - step(none, D): the same from whole steps, which carry the noise "
        "of all their parts",
    ),
    Derived(
        "bytes_freed",
        "bytes freed, a host and step",
        "MB",
        of=lambda s: s.freed_bytes,
        definition="link bytes(P, D) - link bytes(P, C): what a host's interface need not send in "
        "a step",
        headline=True,
    ),
    Derived(
        "link_seconds_freed_s",
        "link seconds freed",
        "s",
        of=lambda s: None if s.rate_mbit is None else 8e-6 * s.freed_bytes / s.rate_mbit,
        definition="8 * bytes freed / rate of the link",
        headline=True,
    ),
    Derived(
        "time_freed_s",
        "time freed",
        "s",
        of=lambda s: s.freed_s,
        definition="exchange(P, D) - exchange(P, C), exchange = exposed network + compression: "
        "what compression takes off a step after its own work is paid",
        headline=True,
    ),
    Derived(
        "time_freed_by_difference_s",
        "the same by difference of steps",
        "s",
        of=lambda s: s.dense.step_s - s.compressed.step_s,
        definition="step(P, D) - step(P, C): the same from whole steps",
    ),
    Derived(
        "share_paid",
        "share of recomputing that is paid for",
        of=lambda s: _over(s.freed_s, s.recomputing_s(s.baseline)),
        definition="time freed / what recomputing adds with dense gradients: 1 means that "
        "compression pays for all of it",
        headline=True,
    ),
    Derived(
        "ceiling_s",
        "ceiling: time freed if nothing were sent",
        "s",
        of=lambda s: s.ceiling_s,
        definition="exchange(P, D) - exchange(P, silent): the time freed if no gradient were sent",
        headline=True,
    ),
    Derived(
        "share_of_ceiling",
        "share of the ceiling",
        of=lambda s: _over(s.freed_s, s.ceiling_s),
        definition="time freed / ceiling",
    ),
    Derived(
        "faster",
        "faster than dense, both checkpointed",
        "x",
        of=lambda s: s.dense.step_s / s.compressed.step_s,
        definition="step(P, D) / step(P, C)",
        headline=True,
    ),
    Derived(
        "faster_than_no_checkpointing",
        "faster than dense without checkpointing",
        "x",
        of=lambda s: s.plain.step_s / s.compressed.step_s,
        definition="step(none, D) / step(P, C): above 1, memory is saved for nothing",
    ),
    Derived(
        "memory_taken",
        "share of the freed memory that kept weights take",
        of=lambda s: s.taken_memory,
        definition="(weights kept(P, C) - weights kept(P, D)) / (peak activations(none) - peak "
        "activations(P)), a process; where C has the weights elsewhere than ZeRO-3 has them",
        headline=True,
    ),
]
