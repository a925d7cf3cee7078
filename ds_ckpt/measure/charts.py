"""The report's plots as `<svg>` elements. Told apart by hatching, line style, marker and labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ds_ckpt.harness.svg import figure, svg
from ds_ckpt.measure.findings import BreakEven, Comparison, Row
from ds_ckpt.measure.parts import COMPUTE, NETWORK
from ds_ckpt.measure.records import Loss, Stretch, Timeline
from ds_ckpt.measure.statistics import Estimate

Band = tuple[str, tuple[str, ...], str, str]
"""Label, what is summed up, colour, hatching."""
PARTS: tuple[Band, ...] = (
    ("compute", COMPUTE, "#e8e8e8", ""),
    ("recompute", ("recompute",), "#b9b9b9", "//"),
    ("network, forward", NETWORK[:1], "#dbe7f3", ".."),
    ("network, recompute", NETWORK[1:2], "#9fc0de", "xx"),
    ("network, backward", NETWORK[2:3], "#5f8fbf", "\\\\"),
    ("network, update", NETWORK[3:], "#2f5f8f", "--"),
    ("compression", ("compression",), "#e6a76b", "oo"),
)
PURPOSES: tuple[Band, ...] = (
    ("weights, forward", ("gather_forward",), "#dbe7f3", ".."),
    ("weights, recompute", ("gather_recompute",), "#9fc0de", "xx"),
    ("weights, backward", ("gather_backward",), "#5f8fbf", "\\\\"),
    ("gradients", ("reduce",), "#e6a76b", "oo"),
    ("activations", ("partition",), "#b7d3b0", "**"),
    ("other", ("other",), "#777777", ""),
)
_LANES = {
    "compute": ("#d0d0d0", ""),
    "recompute": ("#909090", "//"),
    "gathers": ("#5f8fbf", "\\\\"),
    "reduction": ("#e6a76b", "oo"),
    "compression": ("#c0602b", "xx"),
    "beside: reduction": ("#f3d5bb", ".."),
}
_MARKS = "osD^vPX*<>phd"
_LINES = ("-", "--", "-.", ":")
"""13 marks and 4 kinds of line: 52 before two look alike."""


def parts_svg(rows: Sequence[Row]) -> str:
    """Where the step's time goes, one bar a configuration."""
    seconds = [{name: part.value for name, part in row.parts_s.items()} for row in rows]
    drawing, axes = _bars(labels(rows), seconds, PARTS)
    for place, row in enumerate(rows):
        axes.plot([row.step_s.low, row.step_s.high], [place] * 2, color="black", linewidth=1.6)
        axes.plot([row.step_s.value], [place], color="black", marker="|", markersize=12)
    axes.set_xlabel("s a step (black: the median step with its interval)")
    return _with_legend_above(drawing, axes, 4)


def bytes_svg(rows: Sequence[Row]) -> str:
    """Bytes by purpose, one bar a configuration."""
    megabytes = [{name: v / 1e6 for name, v in row.purpose_bytes.items()} for row in rows]
    drawing, axes = _bars(labels(rows), megabytes, PURPOSES)
    axes.plot(
        [row.number("interface_bytes") / 1e6 for row in rows],
        range(len(rows)),
        linestyle="",
        marker="|",
        markersize=14,
        color="black",
        label="at the interfaces",
    )
    axes.set_xlabel("MB a step, all processes")
    return _with_legend_above(drawing, axes, 3)


def timeline_svg(timelines: Sequence[Timeline]) -> str:
    """One step each, on one scale: what DeepSpeed's thread did, and the exchange's beside it."""
    drawing, all_axes = figure(height_inches=0.6 + 1.9 * len(timelines), rows=len(timelines))
    for axes, timeline in zip(all_axes, timelines, strict=True):
        lanes = _lanes(timeline)
        for place, (lane, (colour, hatch)) in enumerate(_LANES.items()):
            axes.broken_barh(
                [(s.start_s, s.end_s - s.start_s) for s in lanes[lane]],
                (place - 0.4, 0.8),
                facecolor=colour,
                hatch=hatch,
                edgecolor="#333333",
                linewidth=0.3,
            )
        axes.set_yticks(range(len(_LANES)), _LANES, fontsize=8)
        axes.set_ylim(len(_LANES) - 0.5, -0.5)
        axes.set_xlim(0, max(one.step_s for one in timelines))
        title = f"{timeline.configuration}: {timeline.step_s:.3f} s"
        axes.set_title(title, fontsize=9, loc="left")
    all_axes[-1].set_xlabel("s")
    return svg(drawing)


def losses_svg(losses: Sequence[Loss]) -> str:
    """Training losses over the steps; those of checkpointing are marks on the lines without."""
    drawing, axes = figure(height_inches=3.6)
    for place, one in enumerate(losses):
        steps = range(len(one.train_losses))
        mark, line = look(place)
        style: dict[str, Any] = {"linestyle": line, "linewidth": 1.6}
        if not one.configuration.startswith("none/"):
            sparse = max(1, len(steps) // 14)
            style = {"linestyle": "", "marker": mark, "markevery": sparse, "fillstyle": "none"}
        axes.plot(steps, one.train_losses, label=one.configuration, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    return svg(drawing)


def sweep_svg(rows: Sequence[Row]) -> str:
    """The median step over the links' rates, one line a configuration."""
    drawing, axes = figure(height_inches=3.8)
    for place, name in enumerate(dict.fromkeys(row.configuration for row in rows)):
        mine = ((r.rate_mbit, r.step_s) for r in rows if r.configuration == name)
        _line(axes, place, name, mine)
    axes.set_yscale("log")
    axes.set_ylabel("s a step")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    return _over_rates(drawing, axes)


def paid_svg(comparisons: Sequence[Comparison], break_even: Sequence[BreakEven]) -> str:
    """The share of recomputation's cost that compression pays for, over the links' rates."""
    drawing, axes = figure(height_inches=3.4)
    for place, line in enumerate(dict.fromkeys(one.line for one in comparisons)):
        mine = ((c.rate_mbit, c.values["share_paid"]) for c in comparisons if c.line == line)
        _line(axes, place, f"{line[0]}: {line[2]} against {line[1]}", mine)
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
    axes.set_ylabel("time freed / recomputing")
    axes.legend(frameon=False, fontsize=8)
    return _over_rates(drawing, axes)


def look(place: int) -> tuple[str, str]:
    """Mark and line of the so-manieth line of a plot; no two of the first 52 are alike."""
    return _MARKS[place % len(_MARKS)], _LINES[place % len(_LINES)]


def labels(rows: Sequence[Row]) -> list[str]:
    """A name for each row of one rate, with the batch where there are several."""
    several = len({row.sequences for row in rows if not row.equal_memory}) > 1
    found = []
    for row in rows:
        batch = f", {row.sequences} sequences" if several or row.equal_memory else ""
        again = " (equal memory)" if several and row.equal_memory else ""
        found.append(f"{row.configuration}{batch}{again}")
    return found


def _bars(
    names: Sequence[str], values: Sequence[dict[str, float]], bands: Sequence[Band]
) -> tuple[Any, Any]:
    """Bars from the top down, each of the bands that have something in them."""
    drawing, axes = figure(height_inches=1.3 + 0.36 * len(names))
    left = [0.0] * len(names)
    for label, summed, colour, hatch in bands:
        widths = [sum(one.get(name, 0.0) for name in summed) for one in values]
        if any(widths):
            look_of = {"color": colour, "hatch": hatch, "edgecolor": "#333333"}
            axes.barh(names, widths, left=left, label=label, **look_of)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    return drawing, axes


def _line(
    axes: Any, place: int, label: str, values: Iterable[tuple[float | None, Estimate]]
) -> None:
    """Values with intervals over the rates; those without a rate or a value are left out."""
    mine = sorted(
        ((rate, v) for rate, v in values if rate and not math.isnan(v.value)), key=lambda p: p[0]
    )
    if not mine:
        return
    mark, line = look(place)
    axes.errorbar(
        [rate for rate, _ in mine],
        [v.value for _, v in mine],
        yerr=[
            [max(v.value - v.low, 0) for _, v in mine],
            [max(v.high - v.value, 0) for _, v in mine],
        ],
        label=label,
        marker=mark,
        linestyle=line,
        linewidth=1.2,
        fillstyle="none",
        color="#222222" if place % 2 else "#1b4f8a",
    )


def _over_rates(drawing: Any, axes: Any) -> str:
    axes.set_xscale("log")
    axes.set_xlabel("rate of each link, Mbit/s")
    return svg(drawing)


def _with_legend_above(drawing: Any, axes: Any, columns: int) -> str:
    place = {"loc": "lower left", "bbox_to_anchor": (-0.15, 1.0)}
    axes.legend(frameon=False, fontsize=8, ncols=columns, **place)
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
