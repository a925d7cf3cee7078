"""The report's plots as `<svg>` elements. Told apart by hatching, line style, marker and labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ds_ckpt.harness.svg import figure, svg
from ds_ckpt.measure.break_even import BreakEven
from ds_ckpt.measure.derive import Figures
from ds_ckpt.measure.parts import COMPUTE, NETWORK
from ds_ckpt.measure.records import Stretch, Timeline
from ds_ckpt.measure.rows import Row
from ds_ckpt.measure.tables import labels

BANDS: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("compute", COMPUTE, "#e8e8e8", ""),
    ("recompute", ("recompute",), "#b9b9b9", "//"),
    ("network, forward", NETWORK[:1], "#dbe7f3", ".."),
    ("network, recompute", NETWORK[1:2], "#9fc0de", "xx"),
    ("network, backward", NETWORK[2:3], "#5f8fbf", "\\\\"),
    ("network, update", NETWORK[3:], "#2f5f8f", "--"),
    ("compression", ("compression",), "#e6a76b", "oo"),
)
PURPOSES = (
    ("weights, forward", "gather_forward", "#dbe7f3", ".."),
    ("weights, recompute", "gather_recompute", "#9fc0de", "xx"),
    ("weights, backward", "gather_backward", "#5f8fbf", "\\\\"),
    ("gradients", "reduce", "#e6a76b", "oo"),
    ("activations", "partition", "#b7d3b0", "**"),
    ("other", "other", "#777777", ""),
)
_LANES = ("compute", "recompute", "gathers", "reduction", "compression", "beside: reduction")
_LANE_LOOKS = {
    "compute": ("#d0d0d0", ""),
    "recompute": ("#909090", "//"),
    "gathers": ("#5f8fbf", "\\\\"),
    "reduction": ("#e6a76b", "oo"),
    "compression": ("#c0602b", "xx"),
    "beside: reduction": ("#f3d5bb", ".."),
}
_MARKS = "osD^vPX*<>phd"
_LINES = ("-", "--", "-.", ":")
"""13 marks and 4 kinds of line: 52 cells before two look alike."""


def parts_svg(rows: Sequence[Row]) -> str:
    """Where the step's time goes, one bar a cell."""
    drawing, axes = figure(height_inches=1.3 + 0.36 * len(rows))
    names = labels(rows)
    left = [0.0] * len(rows)
    for label, parts, colour, hatch in BANDS:
        widths = [sum(row.parts_s[part].value for part in parts) for row in rows]
        axes.barh(
            names, widths, left=left, label=label, color=colour, hatch=hatch, edgecolor="#333333"
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, row in enumerate(rows):
        low, high = row.step_s.low, row.step_s.high
        axes.plot([low, high], [place, place], color="black", linewidth=1.6)
        axes.plot([row.step_s.value], [place], color="black", marker="|", markersize=12)
    axes.invert_yaxis()
    axes.set_xlabel("s a step (black: the median step with its interval)")
    _legend_above(axes, 4)
    return svg(drawing)


def bytes_svg(rows: Sequence[Row]) -> str:
    """Bytes by purpose, one bar a cell."""
    drawing, axes = figure(height_inches=1.3 + 0.36 * len(rows))
    names = labels(rows)
    left = [0.0] * len(rows)
    for label, purpose, colour, hatch in PURPOSES:
        widths = [row.purpose_bytes.get(purpose, 0.0) / 1e6 for row in rows]
        if not any(widths):
            continue
        axes.barh(
            names, widths, left=left, label=label, color=colour, hatch=hatch, edgecolor="#333333"
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    seen = [row.interface_bytes / 1e6 for row in rows]
    axes.plot(
        seen,
        range(len(rows)),
        linestyle="",
        marker="|",
        markersize=14,
        color="black",
        label="at the interfaces",
    )
    axes.invert_yaxis()
    axes.set_xlabel("MB a step, all processes")
    _legend_above(axes, 3)
    return svg(drawing)


def timeline_svg(timelines: Sequence[Timeline]) -> str:
    """One step each, on one scale: what DeepSpeed's thread did, and the exchange's beside it."""
    drawing, all_axes = figure(height_inches=0.6 + 1.9 * len(timelines), rows=len(timelines))
    until_s = max(timeline.step_s for timeline in timelines)
    for axes, timeline in zip(all_axes, timelines, strict=True):
        lanes = _lanes(timeline)
        for place, lane in enumerate(_LANES):
            colour, hatch = _LANE_LOOKS[lane]
            stretches = [(s.start_s, s.end_s - s.start_s) for s in lanes[lane]]
            axes.broken_barh(
                stretches,
                (place - 0.4, 0.8),
                facecolor=colour,
                hatch=hatch,
                edgecolor="#333333",
                linewidth=0.3,
            )
        axes.set_yticks(range(len(_LANES)), _LANES, fontsize=8)
        axes.set_ylim(len(_LANES) - 0.5, -0.5)
        axes.set_xlim(0, until_s)
        axes.set_title(f"{timeline.cell}: {timeline.step_s:.3f} s", fontsize=9, loc="left")
    all_axes[-1].set_xlabel("s")
    return svg(drawing)


def sweep_svg(rows: Sequence[Row]) -> str:
    """The median step over the links' rates, one line a cell."""
    drawing, axes = figure(height_inches=3.8)
    cells = list(dict.fromkeys(row.cell for row in rows))
    for place, cell in enumerate(cells):
        mine = sorted(
            (r for r in rows if r.cell == cell and r.rate_mbit), key=lambda r: r.rate_mbit or 0
        )
        low = [r.step_s.value - r.step_s.low for r in mine]
        high = [r.step_s.high - r.step_s.value for r in mine]
        axes.errorbar(
            [r.rate_mbit for r in mine],
            [r.step_s.value for r in mine],
            yerr=[[max(v, 0) for v in low], [max(v, 0) for v in high]],
            label=cell,
            marker=look(place)[0],
            linestyle=look(place)[1],
            linewidth=1.2,
            fillstyle="none",
            color="#222222" if place % 2 else "#1b4f8a",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rate of each link, Mbit/s")
    axes.set_ylabel("s a step")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    return svg(drawing)


def look(place: int) -> tuple[str, str]:
    """Mark and line of the so-manieth line of a plot; no two of the first 52 are alike."""
    return _MARKS[place % len(_MARKS)], _LINES[place % len(_LINES)]


def paid_svg(figures: Sequence[Figures], break_even: Sequence[BreakEven]) -> str:
    """The share of recomputation's cost that compression pays for, over the links' rates."""
    drawing, axes = figure(height_inches=3.4)
    lines = list(dict.fromkeys((f.policy, f.baseline, f.method) for f in figures))
    for place, line in enumerate(lines):
        mine = sorted(
            (f for f in figures if (f.policy, f.baseline, f.method) == line and f.rate_mbit),
            key=lambda f: f.rate_mbit or 0,
        )
        mine = [f for f in mine if not math.isnan(f.values["share_paid"].value)]
        if not mine:
            continue
        paid = [f.values["share_paid"] for f in mine]
        axes.errorbar(
            [f.rate_mbit for f in mine],
            [p.value for p in paid],
            yerr=[
                [max(p.value - p.low, 0) for p in paid],
                [max(p.high - p.value, 0) for p in paid],
            ],
            label=f"{line[0]}: {line[2]} against {line[1]}",
            marker=look(place)[0],
            linestyle=look(place)[1],
            fillstyle="none",
            color="#222222" if place % 2 else "#1b4f8a",
        )
    axes.axhline(1, color="#555555", linewidth=1)
    axes.axhline(0, color="#999999", linewidth=0.6)
    for one in break_even:
        if one.pays_for_recompute_mbit:
            axes.annotate(
                f"break-even {one.pays_for_recompute_mbit:.0f} Mbit/s ({one.baseline})",
                (one.pays_for_recompute_mbit, 1),
                xytext=(4, 8 if one.baseline == "stock" else -14),
                textcoords="offset points",
                fontsize=8,
            )
    axes.set_xscale("log")
    axes.set_xlabel("rate of each link, Mbit/s")
    axes.set_ylabel("time freed / recomputing")
    axes.legend(frameon=False, fontsize=8)
    return svg(drawing)


def _lanes(timeline: Timeline) -> dict[str, list[Stretch]]:
    lanes: dict[str, list[Stretch]] = {lane: [] for lane in _LANES}
    for stretch in timeline.main:
        if stretch.part.startswith("network"):
            gathers = stretch.purpose.startswith("gather")
            lanes["gathers" if gathers else "reduction"].append(stretch)
        elif stretch.part.startswith("compute"):
            lanes["compute"].append(stretch)
        else:
            lanes[stretch.part].append(stretch)
    lanes["beside: reduction"] = list(timeline.beside)
    return lanes


def _legend_above(axes: Any, columns: int) -> None:
    axes.legend(
        frameon=False, fontsize=8, ncols=columns, loc="lower left", bbox_to_anchor=(-0.15, 1.0)
    )
