"""Figures of an experiment, one entry each. Pure.

An entry holds a figure's name, title, unit, format and computation; tables and report read it. To
add a figure, add its entry:

    MEASURED    of one configuration at one rate
    DERIVED     of a policy P with `dense` gradients (D) and with another exchange (C), at one rate
                (docs/measuring.md)

Differences of steps are paired: each step with the step of the same repetition and place in its
trial. Bytes are the collectives' own counts; the interfaces' counters check them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from ds_ckpt.lab.measure.samples import COMPUTE
from ds_ckpt.lab.measure.spec import NO_COMM, Configuration
from ds_ckpt.lab.workload import DENSE, STOCK
from ds_ckpt.telemetry.units import MB, number

Of = TypeVar("Of")
TOLERANCE = 0.02
"""Largest difference of the interfaces' bytes from the collectives', as a share."""


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval; the ends are NaN if there is none."""

    value: float
    low: float
    high: float


class Ratio(NamedTuple):
    """A quotient, which exists if the interval of its denominator is above zero."""

    numerator: float
    denominator: float


FigureValue = Estimate | Ratio | float | None


@dataclass(frozen=True)
class Row:
    """A configuration at one rate. `far_bytes` by purpose and `link_bytes` are of a node and step.

    `steps_s` are in the order of repetitions and trials, equal in every row. `interface_excess` is
    the share that the interfaces count above the collectives; None if they count next to nothing.
    """

    configuration: str
    rate_mbit: float | None
    tokens: int
    step_s: Estimate
    steps_s: tuple[float, ...]
    parts_s: dict[str, float]
    far_bytes: dict[str, float]
    link_bytes: Estimate
    interface_excess: float | None
    stored_weight_bytes: float
    peak_bytes: float | None

    def part_s(self, *names: str) -> float:
        """Sum some parts of the step."""
        return sum(self.parts_s[name] for name in names)

    @property
    def is_checked(self) -> bool:
        """False if the interfaces contradict the collectives' bytes."""
        return abs(self.interface_excess or 0.0) <= TOLERANCE


@dataclass(frozen=True)
class Figure(Generic[Of]):
    """Name for files, title and unit for people, computation. MB are stored in bytes.

    `is_paired`: a difference of paired steps, which may be negative and needs an interval.
    """

    name: str
    title: str
    unit: str
    of: Callable[[Of], FigureValue]
    is_paired: bool = False

    @property
    def heading(self) -> str:
        """Title with the unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def bounded(self, found: Estimate) -> Estimate:
        """Leave out differences without an interval; no other interval has both signs."""
        if not self.is_paired:
            return found if found.value < 0 else replace(found, low=max(found.low, 0.0))
        return Estimate(math.nan, math.nan, math.nan) if math.isnan(found.low) else found

    def text(self, value: FigureValue) -> str:
        """Format a value in its unit, without the unit."""
        if value is None or isinstance(value, Ratio):
            return "-"
        if not isinstance(value, Estimate):
            value = Estimate(value, value, value)
        scale = 1 / MB if self.unit.startswith("MB") else 1.0
        ends = (value.value, value.low, value.high)
        middle, low, high = ("-" if math.isnan(v) else number(scale * v) for v in ends)
        if low == high:
            return middle
        below, above = (number(scale * abs(end - value.value)) for end in ends[1:])
        return f"{middle} ± {above}" if below == above else f"{middle} ({low} to {high})"


def middle_half(ordered: Sequence[Of]) -> Sequence[Of]:
    """Leave out a quarter at each end."""
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut]


def paired_s(longer: Row, shorter: Row) -> float:
    """Return by how much steps are longer than those of the same repetition and place."""
    pairs = zip(longer.steps_s, shorter.steps_s, strict=True)
    return statistics.fmean(middle_half(sorted(one - other for one, other in pairs)))


def _part(name: str, title: str, *parts: str) -> Figure[Row]:
    return Figure(f"{name}_s", title, "s", lambda r: r.part_s(*(parts or (name,))))


def _far(name: str, title: str, prefix: str) -> Figure[Row]:
    def total(row: Row) -> float:
        return sum(n for purpose, n in row.far_bytes.items() if purpose.startswith(prefix))

    return Figure(name, title, "MB/node", total)


MEASURED: list[Figure[Row]] = [
    Figure("step_s", "step", "s", lambda r: r.step_s),
    Figure("tokens_per_s", "tokens", "/s", lambda r: r.tokens / r.step_s.value),
    _part("compute", "compute", *COMPUTE),
    _part("recompute", "recomputation"),
    _part("network_forward", "network: forward"),
    _part("network_recompute", "network: recomputation"),
    _part("network_backward", "network: backward"),
    _part("network_update", "network: update"),
    _part("compression", "compression"),
    Figure("link_bytes", "link", "MB/node", lambda r: r.link_bytes),
    _far("link_gather_bytes", "link: gathers", "gather"),
    _far("link_weight_bytes", "link: changed weights", "weights"),
    _far("link_gradient_bytes", "link: gradients", "reduce"),
    Figure("stored_weight_bytes", "stored weights", "MB", lambda r: r.stored_weight_bytes),
    Figure("peak_bytes", "peak activations", "MB", lambda r: r.peak_bytes),
]


@dataclass(frozen=True)
class Comparison:
    """Policy P and exchange C at one rate.

    `compared` is the row of P with C, `reference` of P with D, and `plain` of no checkpointing with
    D. `no_comm` is the row of P that sends no gradient, if that was measured.
    """

    compared: Row
    reference: Row
    plain: Row
    no_comm: Row | None

    @classmethod
    def of(cls, rows: Mapping[str, Row], one: Configuration) -> Comparison:
        """Look up the rows of a configuration."""
        no_comm = Configuration(one.policy, NO_COMM, one.weights).name
        reference, plain = rows[f"{one.policy}/{DENSE}"], rows[f"none/{DENSE}"]
        return cls(rows[one.name], reference, plain, rows.get(no_comm))

    @property
    def cost_s(self) -> float:
        """Time that P adds to a step with D."""
        return paired_s(self.reference, self.plain)

    @property
    def shorter_s(self) -> float:
        """Time by which C shortens a step with P."""
        return paired_s(self.reference, self.compared)

    @property
    def ceiling_s(self) -> float | None:
        """Time by which steps are shorter if no gradient is sent."""
        return None if self.no_comm is None else paired_s(self.reference, self.no_comm)

    @property
    def freed_bytes(self) -> float:
        """Bytes per step that a node sends less to others, by the collectives' counts."""
        return self.reference.link_bytes.value - self.compared.link_bytes.value

    @property
    def freed_s(self) -> float | None:
        """Time for sending the freed bytes at the link's rate."""
        rate = self.compared.rate_mbit
        return None if rate is None else 8e-6 * self.freed_bytes / rate

    @property
    def memory_taken(self) -> Ratio | None:
        """Additional stored weights of C over the activations that P frees."""
        stock = Configuration.of(self.compared.configuration).weights == STOCK
        if stock or self.plain.peak_bytes is None or self.reference.peak_bytes is None:
            return None
        more = self.compared.stored_weight_bytes - self.reference.stored_weight_bytes
        return Ratio(more, self.plain.peak_bytes - self.reference.peak_bytes)


def _speedup(before: Row, after: Row) -> Ratio:
    return Ratio(before.step_s.value, after.step_s.value)


DERIVED: list[Figure[Comparison]] = [
    Figure("cost_s", "recomputation costs", "s", lambda c: c.cost_s, is_paired=True),
    Figure("work_s", "recomputation's own work", "s", lambda c: c.reference.part_s("recompute")),
    Figure("freed_bytes", "bytes freed", "MB/node", lambda c: c.freed_bytes),
    Figure("freed_s", "link time freed", "s", lambda c: c.freed_s),
    Figure("shorter_s", "step shortened by", "s", lambda c: c.shorter_s, is_paired=True),
    Figure("share_paid", "share paid", "", lambda c: Ratio(c.shorter_s, c.cost_s), is_paired=True),
    Figure("change_s", "both together", "s", lambda c: c.cost_s - c.shorter_s, is_paired=True),
    Figure(
        "ceiling_s", "upper bound of step shortened by", "s", lambda c: c.ceiling_s, is_paired=True
    ),
    Figure("faster", "speedup", "x", lambda c: _speedup(c.reference, c.compared)),
    Figure(
        "faster_than_no_checkpointing",
        "speedup over no checkpointing",
        "x",
        lambda c: _speedup(c.plain, c.compared),
    ),
    Figure("memory_taken", "stored weights / freed activations", "", lambda c: c.memory_taken),
]
