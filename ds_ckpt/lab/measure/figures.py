"""Figures of an experiment, one entry each. Pure.

An entry holds a figure's name, title, unit, format and computation; tables and report read it. To
add a figure, add its entry:

    MEASURED    of one configuration at one rate
    DERIVED     of a policy P with `dense` gradients (D) and with another exchange (C), at one rate;
                docs/measuring.md has the definitions
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ds_ckpt.lab.measure.parts import COMPUTE, NETWORK
from ds_ckpt.lab.measure.spec import DENSE, NO_COMM, STOCK, Configuration
from ds_ckpt.telemetry.units import MB, number

Of = TypeVar("Of")


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval; the ends are NaN if there is none."""

    value: float
    low: float
    high: float


Value = Estimate | float | None


@dataclass(frozen=True)
class Row:
    """A configuration at one rate. Bytes are per step: by purpose of all ranks, else of a node."""

    configuration: str
    rate_mbit: float | None
    tokens: int
    step_s: Estimate
    parts_s: dict[str, float]
    purpose_bytes: dict[str, float]
    far_bytes: dict[str, float]
    link_bytes: float
    interface_bytes: float
    stored_weight_bytes: float
    peak_bytes: float | None

    def part_s(self, *names: str) -> float:
        """Sum some parts of the step."""
        return sum(self.parts_s[name] for name in names)

    @property
    def exchange_s(self) -> float:
        """Exposed network time and the exchange's own work."""
        return self.part_s(*NETWORK, "compression")


@dataclass(frozen=True)
class Figure(Generic[Of]):
    """Name for files, title and unit for people, computation. MB are stored in bytes."""

    name: str
    title: str
    unit: str
    of: Callable[[Of], Value]

    @property
    def heading(self) -> str:
        """Title with the unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def text(self, value: Value) -> str:
        """Format a value in its unit, without the unit."""
        if value is None:
            return "-"
        if not isinstance(value, Estimate):
            value = Estimate(value, value, value)
        scale = 1 / MB if self.unit.startswith("MB") else 1.0
        ends = (value.value, value.low, value.high)
        middle, low, high = ("-" if math.isnan(v) else number(scale * v) for v in ends)
        return middle if low == high else f"{middle} ({low} to {high})"


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
    """Policy P and exchange C at one rate, with the rows that they are looked up in."""

    rows: Mapping[str, Row]
    policy: str
    method: str

    @property
    def compared(self) -> Row:
        """Row of P with C."""
        return self.rows[f"{self.policy}/{self.method}"]

    @property
    def reference(self) -> Row:
        """Row of P with D."""
        return self.rows[f"{self.policy}/{DENSE}"]

    @property
    def plain(self) -> Row:
        """Row of no checkpointing with D."""
        return self.rows[f"none/{DENSE}"]

    @property
    def recomputation_s(self) -> float:
        """Time that recomputation adds to a step with D."""
        return self.reference.part_s("recompute", *NETWORK) - self.plain.part_s(*NETWORK)

    @property
    def freed_s(self) -> float:
        """Exchange time that C saves."""
        return self.reference.exchange_s - self.compared.exchange_s

    @property
    def ceiling_s(self) -> float | None:
        """Exchange time saved if no gradient were sent."""
        weights = Configuration.of(self.compared.configuration).weights
        nothing = self.rows.get(Configuration(self.policy, NO_COMM, weights).name)
        return None if nothing is None else self.reference.exchange_s - nothing.exchange_s

    @property
    def memory_taken(self) -> float | None:
        """Additional stored weights of C over the activations that P frees."""
        stock = Configuration.of(self.compared.configuration).weights == STOCK
        if stock or self.plain.peak_bytes is None or self.reference.peak_bytes is None:
            return None
        more = self.compared.stored_weight_bytes - self.reference.stored_weight_bytes
        return _over(more, self.plain.peak_bytes - self.reference.peak_bytes)


def _over(value: float, by: float) -> float:
    return value / by if by > 0 else math.nan


DERIVED: list[Figure[Comparison]] = [
    Figure("recompute_s", "recomputation adds", "s", lambda c: c.recomputation_s),
    Figure(
        "bytes_freed",
        "bytes saved",
        "MB/node",
        lambda c: c.reference.link_bytes - c.compared.link_bytes,
    ),
    Figure("time_freed_s", "time saved", "s", lambda c: c.freed_s),
    Figure(
        "share_paid",
        "time saved / recomputation",
        "",
        lambda c: _over(c.freed_s, c.recomputation_s),
    ),
    Figure("ceiling_s", "upper bound of time saved", "s", lambda c: c.ceiling_s),
    Figure("faster", "speedup", "x", lambda c: c.reference.step_s.value / c.compared.step_s.value),
    Figure(
        "faster_than_no_checkpointing",
        "speedup over no checkpointing",
        "x",
        lambda c: c.plain.step_s.value / c.compared.step_s.value,
    ),
    Figure("memory_taken", "stored weights / freed activations", "", lambda c: c.memory_taken),
]
