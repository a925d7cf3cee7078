"""The report's charts from what a run shows. How they are drawn is `ds_ckpt.report.charts`'."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ds_ckpt.measure.figures import Row
from ds_ckpt.measure.findings import BreakEven, Comparison
from ds_ckpt.measure.parts import COMPUTE, NETWORK
from ds_ckpt.measure.records import Loss
from ds_ckpt.measure.statistics import Estimate
from ds_ckpt.report.charts import Band, Line, Lines, Rows, Span
from ds_ckpt.telemetry.units import MB

PARTS = {
    "compute": COMPUTE,
    "recompute": ("recompute",),
    "network, forward": NETWORK[:1],
    "network, recompute": NETWORK[1:2],
    "network, backward": NETWORK[2:3],
    "network, update": NETWORK[3:],
    "compression": ("compression",),
}
"""Bands of a bar, and what is summed up in them."""
PURPOSES = {
    "weights, forward": ("gather_forward",),
    "weights, recompute": ("gather_recompute",),
    "weights, backward": ("gather_backward",),
    "gradients": ("reduce",),
    "activations": ("partition",),
    "other": ("other",),
}
_OVER_RATES: Any = {"x": "rate of each link, Mbit/s"}


def parts(rows: Sequence[Row]) -> Rows:
    """Where the step's time goes, one bar a configuration."""
    seconds = [{name: part.value for name, part in row.parts_s.items()} for row in rows]
    spans = [_span(row.step_s) for row in rows]
    x = "s a step (black: the median step with its interval)"
    return Rows(labels(rows), x, _bands(PARTS, seconds), spans)


def purposes(rows: Sequence[Row]) -> Rows:
    """Bytes by purpose, one bar a configuration."""
    megabytes = [{name: v / MB for name, v in row.purpose_bytes.items()} for row in rows]
    counted = [(row.number("interface_bytes") / MB,) * 3 for row in rows]
    x = "MB a step, all processes"
    return Rows(labels(rows), x, _bands(PURPOSES, megabytes), counted, "at the interfaces")


def losses(trained: Sequence[Loss]) -> Lines:
    """Training losses over the steps; those of checkpointing are marks on the lines without."""
    lines = [
        Line(
            one.configuration,
            list(enumerate(one.train_losses)),
            shown="line" if one.configuration.startswith("none/") else "marks",
        )
        for one in trained
    ]
    return Lines(lines, "step", "training loss")


def steps_over_rates(rows: Sequence[Row]) -> Lines:
    """The median step over the links' rates, one line a configuration."""
    names = dict.fromkeys(row.configuration for row in rows)
    lines = [
        _line(name, ((r.rate_mbit, r.step_s) for r in rows if r.configuration == name))
        for name in names
    ]
    return Lines(lines, y="s a step", logarithmic="xy", **_OVER_RATES)


def paid_over_rates(comparisons: Sequence[Comparison], even: Sequence[BreakEven]) -> Lines:
    """The share of recomputation's cost that compression pays for, over the links' rates."""
    lines = [
        _line(
            f"{key[0]}: {key[2]} against {key[1]}",
            ((c.rate_mbit, c.values["share_paid"]) for c in comparisons if c.line == key),
        )
        for key in dict.fromkeys(one.line for one in comparisons)
    ]
    found = [(one.pays_for_recompute_mbit, one.baseline) for one in even]
    notes = [(at, 1.0, f"break-even {at:.0f} Mbit/s ({who})") for at, who in found if at]
    levels = ((1.0, ""), (0.0, ""))
    y = "time freed / recomputing"
    return Lines(lines, y=y, logarithmic="x", levels=levels, notes=notes, **_OVER_RATES)


def labels(rows: Sequence[Row]) -> list[str]:
    """A name for each row of one rate, with the batch where there are several."""
    several = len({row.sequences for row in rows if not row.equal_memory}) > 1
    found = []
    for row in rows:
        batch = f", {row.sequences} sequences" if several or row.equal_memory else ""
        again = " (equal memory)" if several and row.equal_memory else ""
        found.append(f"{row.configuration}{batch}{again}")
    return found


def _bands(parts: Mapping[str, Sequence[str]], values: Sequence[Mapping[str, float]]) -> list[Band]:
    return [
        Band(label, [sum(one.get(name, 0.0) for name in names) for one in values])
        for label, names in parts.items()
    ]


def _line(label: str, values: Iterable[tuple[float | None, Estimate]]) -> Line:
    """Those without a rate or a value are left out."""
    known = [(rate, v) for rate, v in values if rate and not math.isnan(v.value)]
    known.sort(key=lambda pair: pair[0])
    return Line(label, [(rate, v.value) for rate, v in known], [_span(v) for _, v in known])


def _span(value: Estimate) -> Span:
    return value.low, value.value, value.high
