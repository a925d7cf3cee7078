"""Figures of an experiment, one entry each. Pure.

An entry holds a figure's name, title, unit, format and computation; worker, tables and report read
it. To add a figure, add its entry:

    MEASURED    of one configuration at one rate. With `observe` every process contributes a value
                in each trial and `over` combines them; the result is stored in the trial.
    DERIVED     of a policy P, a reference D (`stock` or `dense`) and another exchange C, at one
                rate. `definition` is printed in the report and in docs/measuring.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ds_ckpt.lab.hosts.backends import Sent
from ds_ckpt.lab.measure.parts import COMPUTE, NETWORK
from ds_ckpt.lab.measure.samples import Loss, Memory, StepTime
from ds_ckpt.lab.measure.spec import NO_COMM, STOCK, Configuration
from ds_ckpt.telemetry.units import MB, number


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval; the ends are NaN if there is none."""

    value: float
    low: float
    high: float


Value = Estimate | float | None


@dataclass(frozen=True)
class Figure:
    """Name for files, title and unit for people. Values in MB are stored in bytes."""

    name: str
    title: str
    unit: str = ""
    shown_as: Callable[[float], str] = field(default=number, kw_only=True)

    @property
    def heading(self) -> str:
        """Title with the unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def text(self, value: Value, *, interval: bool = True) -> str:
        """Format a value in its unit, without the unit."""
        if value is None:
            return "-"
        if not isinstance(value, Estimate):
            value = Estimate(value, value, value)
        scale = 1 / MB if self.unit.startswith("MB") else 1.0
        ends = (value.value, value.low, value.high)
        middle, low, high = ("-" if math.isnan(v) else self.shown_as(scale * v) for v in ends)
        exact = value.low == value.high or math.isnan(value.value)
        return middle if exact or not interval else f"{middle} ({low} to {high})"


@dataclass(frozen=True)
class TrialObservation:
    """One process's view of a trial.

    Attributes:
        sent: by the interfaces of its node.
        leads: true for the first process of its node.
        far_bytes: sent to other nodes per step, by purpose.
        weight_bytes: weights stored between forward and backward.
    """

    times: Sequence[StepTime]
    losses: Sequence[float]
    sent: Sent
    leads: bool
    hosts: int
    far_bytes: Mapping[str, float]
    weight_bytes: int


@dataclass(frozen=True)
class Row:
    """A configuration at one rate. Bytes are per step.

    Attributes:
        tokens: per step, of all processes.
        purpose_bytes: of all processes.
        link_bytes: of the node that sends most.
        taken: registered figures that the trials stored.
    """

    configuration: str
    rate_mbit: float | None
    processes: int
    tokens: int
    step_s: Estimate
    parts_s: dict[str, Estimate]
    purpose_bytes: dict[str, float]
    link_bytes: float
    interface_bytes: float
    taken: dict[str, float]
    memory: Memory | None
    loss: Loss | None

    def part_s(self, *names: str) -> float:
        """Sum some parts of the step; all without names."""
        return sum(self.parts_s[name].value for name in names or self.parts_s)

    @property
    def exchange_s(self) -> float:
        """Exposed network time and the exchange's own work."""
        return self.part_s(*NETWORK, "compression")

    def bytes_per_process(self, *prefixes: str) -> float:
        """Sum the purposes with these prefixes."""
        return _total(self.purpose_bytes, *prefixes) / self.processes

    def number(self, name: str) -> float:
        """Return the value of a figure that every configuration has."""
        value = measured(name).value(self)
        assert value is not None, name
        return value.value if isinstance(value, Estimate) else value

    def text(self, name: str, *, interval: bool = False) -> str:
        """Format a figure in its unit."""
        figure = measured(name)
        return figure.text(figure.value(self), interval=interval)


@dataclass(frozen=True)
class Measured(Figure):
    """A figure of one configuration."""

    of: Callable[[Row], Value] | None = field(default=None, kw_only=True)
    observe: Callable[[TrialObservation], float] | None = field(default=None, kw_only=True)
    over: Callable[[Sequence[float]], float] = field(default=max, kw_only=True)

    def value(self, row: Row) -> Value:
        """Compute the figure of a row, or read what its trials stored."""
        return row.taken.get(self.name) if self.of is None else self.of(row)


def _total(values: Mapping[str, float], *prefixes: str) -> float:
    return sum(value for name, value in values.items() if name.startswith(prefixes))


def _far(name: str, title: str, prefix: str) -> Measured:
    """Return the mean over nodes of the bytes sent to other nodes, by purpose."""
    return Measured(
        name, title, "MB/node", observe=lambda t: _total(t.far_bytes, prefix) / t.hosts, over=sum
    )


def _part(name: str, title: str, *parts: str) -> Measured:
    return Measured(f"{name}_s", title, "s", of=lambda r: r.part_s(*(parts or (name,))))


def _memory(name: str, title: str) -> Measured:
    return Measured(name, title, "MB", of=lambda r: getattr(r.memory, name, None))


MEASURED: list[Measured] = [
    Measured("step_s", "step", "s", of=lambda r: r.step_s),
    Measured("tokens_per_s", "tokens", "/s", of=lambda r: r.tokens / r.step_s.value),
    _part("compute", "compute", *COMPUTE),
    _part("recompute", "recomputation"),
    _part("network_forward", "network: forward"),
    _part("network_recompute", "network: recomputation"),
    _part("network_backward", "network: backward"),
    _part("network_update", "network: update"),
    _part("compression", "compression"),
    Measured(
        "parts_over_step",
        "parts / step",
        of=lambda r: r.part_s() / r.step_s.value,
        shown_as="{:.3f}".format,
    ),
    Measured("link_bytes", "link", "MB/node", of=lambda r: r.link_bytes),
    _far("link_gather_bytes", "link: gathers", "gather"),
    _far("link_weight_bytes", "link: changed weights", "weights"),
    _far("link_gradient_bytes", "link: gradients", "reduce"),
    Measured(
        "gradient_bytes", "gradients", "MB/process", of=lambda r: r.bytes_per_process("reduce")
    ),
    Measured(
        "weight_bytes",
        "weights",
        "MB/process",
        of=lambda r: r.bytes_per_process("gather", "weights"),
    ),
    Measured(
        "interface_bytes",
        "interfaces",
        "MB in all",
        of=lambda r: r.interface_bytes,
        observe=lambda t: t.sent.all_bytes / len(t.times) if t.leads else 0.0,
        over=sum,
    ),
    Measured(
        "interface_over_purposes",
        "interfaces / purposes",
        of=lambda r: r.interface_bytes / max(sum(r.purpose_bytes.values()), 1.0),
        shown_as="{:.3f}".format,
    ),
    Measured("kept_weight_bytes", "stored weights", "MB", observe=lambda t: t.weight_bytes),
    _memory("held_bytes", "saved activations"),
    _memory("peak_bytes", "peak activations"),
    Measured(
        "heldout_loss",
        "held-out loss",
        of=lambda r: r.loss.heldout_loss if r.loss else None,
        shown_as="{:.4f}".format,
    ),
]


def measured(name: str) -> Measured:
    """Return the entry of that name."""
    return next(one for one in MEASURED if one.name == name)


def observed(trial: TrialObservation) -> dict[str, float]:
    """Compute this process's values of a trial."""
    return {one.name: one.observe(trial) for one in MEASURED if one.observe is not None}


def combined(everyone: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the processes' values, on rank 0."""
    return {
        one.name: float(one.over([values[one.name] for values in everyone]))
        for one in MEASURED
        if one.observe is not None
    }


@dataclass(frozen=True)
class Comparison:
    """Policy P, reference D and exchange C at one rate, with the rows that they are looked up in.

    Attributes:
        method: `Configuration.exchange` of C.
    """

    rows: Mapping[str, Row]
    rate_mbit: float | None
    policy: str
    baseline: str
    method: str

    def row(self, policy: str, method: str) -> Row:
        """Return the row of one configuration."""
        return self.rows[f"{policy}/{method}"]

    def has(self, policy: str, method: str) -> bool:
        """Return whether a configuration was measured."""
        return f"{policy}/{method}" in self.rows

    @property
    def reference(self) -> Row:
        """Row of P with D."""
        return self.row(self.policy, self.baseline)

    @property
    def compared(self) -> Row:
        """Row of P with C."""
        return self.row(self.policy, self.method)

    def recomputation_s(self, method: str) -> float | None:
        """Return the time that recomputation adds to a step with this exchange."""
        if not self.has("none", method):
            return None
        plain, row = self.row("none", method), self.row(self.policy, method)
        return row.part_s("recompute", *NETWORK) - plain.part_s(*NETWORK)

    @property
    def freed_s(self) -> float:
        """Exchange time that C saves."""
        return self.reference.exchange_s - self.compared.exchange_s

    @property
    def ceiling_s(self) -> float | None:
        """Exchange time saved if no gradient were sent."""
        weights = Configuration.of(f"{self.policy}/{self.method}").weights
        nothing = Configuration(self.policy, NO_COMM, weights).exchange
        if not self.has(self.policy, nothing):
            return None
        return self.reference.exchange_s - self.row(self.policy, nothing).exchange_s

    @property
    def freed_bytes(self) -> float:
        """Link bytes that C saves."""
        return self.reference.link_bytes - self.compared.link_bytes

    @property
    def memory_taken(self) -> float | None:
        """Additional stored weights of C over the activations that P frees."""
        plain, kept = self.row("none", self.baseline).memory, self.reference.memory
        mine, theirs = (r.taken.get("kept_weight_bytes") for r in (self.compared, self.reference))
        stock = Configuration.of(f"{self.policy}/{self.method}").weights == STOCK
        if stock or None in (plain, kept, mine, theirs):
            return None
        return _over(mine - theirs, plain.peak_bytes - kept.peak_bytes)  # type: ignore[union-attr,operator]


@dataclass(frozen=True)
class Derived(Figure):
    """A figure of a comparison, estimated from complete repetitions."""

    of: Callable[[Comparison], float | None] = field(kw_only=True)
    definition: str = field(kw_only=True)


def _over(value: float, by: float | None) -> float | None:
    return None if by is None else value / by if by > 0 else math.nan


DERIVED: list[Derived] = [
    Derived(
        "recompute_dense_s",
        "recomputation adds, uncompressed",
        "s",
        of=lambda c: c.recomputation_s(c.baseline),
        definition="recompute(P, D) + network(P, D) - network(none, D): time that recomputation "
        "adds with uncompressed gradients, including its own gathers, less the gathers that "
        "backward no longer needs",
    ),
    Derived(
        "recompute_compressed_s",
        "recomputation adds, compressed",
        "s",
        of=lambda c: c.recomputation_s(c.method),
        definition="the same with C in place of D; with resident weights its gathers stay inside "
        "the node",
    ),
    Derived(
        "bytes_freed",
        "bytes saved",
        "MB/node",
        of=lambda c: c.freed_bytes,
        definition="link bytes(P, D) - link bytes(P, C), per node and step",
    ),
    Derived(
        "link_seconds_freed_s",
        "link time saved",
        "s",
        of=lambda c: None if c.rate_mbit is None else 8e-6 * c.freed_bytes / c.rate_mbit,
        definition="8 * bytes saved / rate of the link",
    ),
    Derived(
        "time_freed_s",
        "time saved",
        "s",
        of=lambda c: c.freed_s,
        definition="exchange(P, D) - exchange(P, C), with exchange = exposed network + "
        "compression: the net time that compression takes off a step",
    ),
    Derived(
        "share_paid",
        "time saved / recomputation",
        of=lambda c: _over(c.freed_s, c.recomputation_s(c.baseline)),
        definition="time saved / recomputation added with D; at 1 compression pays for all of it",
    ),
    Derived(
        "ceiling_s",
        "upper bound of time saved",
        "s",
        of=lambda c: c.ceiling_s,
        definition=f"exchange(P, D) - exchange(P, {NO_COMM}): time saved if no gradient were sent",
    ),
    Derived(
        "faster",
        "speedup",
        "x",
        of=lambda c: c.reference.step_s.value / c.compared.step_s.value,
        definition="step(P, D) / step(P, C)",
    ),
    Derived(
        "faster_than_no_checkpointing",
        "speedup over no checkpointing",
        "x",
        of=lambda c: c.row("none", c.baseline).step_s.value / c.compared.step_s.value,
        definition="step(none, D) / step(P, C); above 1 checkpointing costs no time",
    ),
    Derived(
        "memory_taken",
        "stored weights / freed activations",
        of=lambda c: c.memory_taken,
        definition="(stored weights(P, C) - stored weights(P, D)) / (peak activations(none) - peak "
        "activations(P)), per process; for weights placed elsewhere than in ZeRO-3",
    ),
]
