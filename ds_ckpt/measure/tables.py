"""The report's tables, computed from the findings. Nothing here measures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ds_ckpt.harness.words import megabytes
from ds_ckpt.measure.derive import DEFINITIONS, HEADLINES, Figures
from ds_ckpt.measure.parts import COMPUTE
from ds_ckpt.measure.rows import Row
from ds_ckpt.measure.spec import DENSE, SILENT, STOCK, Spec, link
from ds_ckpt.measure.statistics import Estimate

Table = tuple[list[str], list[list[str]]]
"""Heads and rows of text."""
FIGURE_WORDS = {
    "recompute_dense_s": ("recomputing adds, dense", "s"),
    "recompute_compressed_s": ("recomputing adds, compressed", "s"),
    "recompute_dense_by_difference_s": ("the same by difference of steps", "s"),
    "bytes_freed": ("bytes freed, a host and step", "MB"),
    "link_seconds_freed_s": ("link seconds freed", "s"),
    "time_freed_s": ("time freed", "s"),
    "time_freed_by_difference_s": ("the same by difference of steps", "s"),
    "share_paid": ("share of recomputing that is paid for", ""),
    "ceiling_s": ("ceiling: time freed if nothing were sent", "s"),
    "share_of_ceiling": ("share of the ceiling", ""),
    "faster": ("faster than dense, both checkpointed", "x"),
    "faster_than_no_checkpointing": ("faster than dense without checkpointing", "x"),
    "tokens_per_s_none": ("tokens a second, dense, no checkpointing", "/s"),
    "tokens_per_s_equal_memory": ("tokens a second at equal memory", "/s"),
    "equal_memory_gain": ("tokens a second at equal memory over those without checkpointing", "x"),
}


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(decimals, 4)}f}"


def with_interval(estimate: Estimate) -> str:
    if estimate.low == estimate.high or math.isnan(estimate.value):
        return number(estimate.value)
    return f"{number(estimate.value)} ({number(estimate.low)} to {number(estimate.high)})"


def square(spec: Spec, rows: Sequence[Row], rate: float | None, policy: str, method: str) -> Table:
    """The two-by-two: checkpointing off and on, dense and compressed, one rate, usual batch."""
    batch = min(spec.batches)
    by_cell = {
        r.cell: r
        for r in rows
        if r.rate_mbit == rate and r.sequences == batch and not r.equal_memory
    }
    heads = ["", STOCK, f"{DENSE} (best dense exchange)", method, f"{SILENT} (ceiling)"]
    table = []
    for name in ("none", policy):
        cells = [by_cell.get(f"{name}/{m}") for m in (STOCK, DENSE, method, SILENT)]
        row = [f"checkpointing {name}: step, s"]
        row += [with_interval(c.step_s) if c else "-" for c in cells]
        table.append(row)
        for words, text in (
            ("peak activations, MB", lambda c: _bytes(c.peak_bytes)),
            ("link, MB a host", lambda c: _bytes(c.link_bytes)),
            ("held-out loss", lambda c: _loss(c.heldout_loss)),
        ):
            table.append([f"   {words}", *(text(c) if c else "-" for c in cells)])
    return heads, table


def cells_table(rows: Sequence[Row]) -> Table:
    """Every cell of one rate with the parts of its step."""
    heads = [
        "cell",
        "sequences",
        "step, s",
        "compute, s",
        "recompute, s",
        "network: forward, s",
        "in recompute, s",
        "in backward, s",
        "in update, s",
        "compression, s",
        "parts / step",
        "in collectives, s",
        "link busy, s",
        "link, MB a host",
        "interfaces / purposes",
        "held, MB",
        "peak, MB",
        "held-out loss",
    ]
    table = []
    for row in rows:
        part = {name: e.value for name, e in row.parts_s.items()}
        table.append(
            [
                row.cell,
                f"{row.sequences}{' (equal memory)' if row.equal_memory else ''}",
                with_interval(row.step_s),
                number(sum(part[name] for name in COMPUTE)),
                number(part["recompute"]),
                number(part["network_forward"]),
                number(part["network_recompute"]),
                number(part["network_backward"]),
                number(part["network_update"]),
                number(part["compression"]),
                f"{row.parts_over_step:.3f}",
                number(row.in_collectives_s),
                "-" if row.link_busy_s is None else number(row.link_busy_s),
                megabytes(row.link_bytes),
                f"{row.interface_over_purposes:.3f}",
                _bytes(row.held_bytes),
                _bytes(row.peak_bytes),
                _loss(row.heldout_loss),
            ]
        )
    return heads, table


def bytes_table(rows: Sequence[Row]) -> Table:
    """Bytes by purpose, of all processes, and the interfaces' own count."""
    purposes = list(rows[0].purpose_bytes) if rows else []
    names = labels(rows)
    heads = ["cell", *(f"{p.replace('_', ' ')}, MB" for p in purposes), "sum, MB", "interfaces, MB"]
    table = [
        [
            name,
            *(megabytes(row.purpose_bytes[p]) for p in purposes),
            megabytes(sum(row.purpose_bytes.values())),
            megabytes(row.interface_bytes),
        ]
        for name, row in zip(names, rows, strict=True)
    ]
    return heads, table


def labels(rows: Sequence[Row]) -> list[str]:
    """A name for each row of one rate, with the batch where cells have several."""
    several = len({row.sequences for row in rows if not row.equal_memory}) > 1
    found = []
    for row in rows:
        batch = f", {row.sequences} sequences" if several or row.equal_memory else ""
        again = " (equal memory)" if several and row.equal_memory else ""
        found.append(f"{row.cell}{batch}{again}")
    return found


def title(one: Figures, figures: Sequence[Figures]) -> str:
    """Whose figures, told apart from all others of the same rate."""
    batch = f", {one.sequences} sequences" if len({f.sequences for f in figures}) > 1 else ""
    return f"{one.policy}, {one.method} against {one.baseline}{batch}"


def figures_table(figures: Sequence[Figures]) -> Table:
    """Derived figures over the rates, of one policy, baseline and method."""
    heads = ["", *(link(f.rate_mbit) for f in figures)]
    table = []
    for name, (words, unit) in FIGURE_WORDS.items():
        if not any(name in f.values for f in figures):
            continue
        row = [f"{words}{f', {unit}' if unit else ''}"]
        for one in figures:
            estimate = one.values.get(name)
            if estimate is None:
                row.append("-")
                continue
            mark = " *" if name in HEADLINES and one.settled(name) else ""
            row.append(with_interval(in_unit(estimate, unit)) + mark)
        table.append(row)
    return heads, table


def definitions() -> list[tuple[str, str]]:
    """What each derived figure is, in the order of the tables."""
    return [(FIGURE_WORDS[name][0], text) for name, text in DEFINITIONS.items()]


def as_markdown(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def in_unit(estimate: Estimate, unit: str) -> Estimate:
    """Bytes become megabytes where the unit says so."""
    if unit != "MB":
        return estimate
    return Estimate(estimate.value / 1e6, estimate.low / 1e6, estimate.high / 1e6)


def without_nan(content: Any) -> Any:
    """JSON has no NaN: what has no value is null."""
    if isinstance(content, dict):
        return {name: without_nan(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [without_nan(value) for value in content]
    return None if isinstance(content, float) and math.isnan(content) else content


def _bytes(value: float | None) -> str:
    return "-" if value is None else megabytes(value)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
