"""The report's plots as inline SVG: told apart by line and marker, not by colour alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ds_ckpt.harness.svg import figure, svg
from ds_ckpt.validation.compare import Comparison

_LINES = ("--", ":", "-.")
_MARKS = "ox^svDP*"
_COLOURS = ("#b3541e", "#1b4f8a", "#3f7d3a", "#7a3f8a", "#8a7a1b", "#444444")


def curves_svg(group: Sequence[Comparison]) -> str:
    """Held-out result over steps, means over seeds, of dense training and every candidate."""
    drawing, axes = figure(height_inches=3.6)
    most = max(group, key=lambda one: len(one.differences))  # lossless ones have fewer seeds
    axes.plot(*_columns(most.curves[0]), label="dense", color="#000000", linewidth=1.8)
    for i, one in enumerate(group):
        axes.plot(
            *_columns(one.curves[1]),
            label=one.candidate.name,
            color=_COLOURS[i % len(_COLOURS)],
            linestyle=_LINES[i % len(_LINES)],
            marker=_MARKS[i % len(_MARKS)],
            markersize=4,
            linewidth=1.2,
        )
    loss = group[0].metric == "loss"
    if loss:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss" if loss else "held-out accuracy")
    axes.legend(frameon=False, fontsize=8)
    return svg(drawing)


def intervals_svg(group: Sequence[Comparison]) -> str:
    """Differences to dense with their 90% intervals, single seeds as dots, the margin shaded."""
    drawing, axes = figure(height_inches=1.0 + 0.4 * len(group))
    margin = 100 * group[0].margin
    axes.axvspan(-margin, margin, color="#e4e4e4", zorder=0)
    axes.axvline(0, color="#555555", linewidth=0.8)
    for place, one in enumerate(group):
        gaps = [100 * gap for gap in one.differences.values() if math.isfinite(gap)]
        axes.plot(gaps, [place] * len(gaps), "o", markersize=3, fillstyle="none", color="#1b4f8a")
        if one.interval is not None:
            low, high = 100 * one.interval.low, 100 * one.interval.high
            axes.plot([low, high], [place, place], color="#b3541e", linewidth=2)
            axes.plot([100 * one.interval.mean], [place], "|", color="#b3541e", markersize=10)
        if one.diverged:
            axes.annotate("diverged", (0, place), fontsize=8, va="center")
    axes.set_yticks(range(len(group)), [one.candidate.name for one in group])
    axes.invert_yaxis()
    unit = "% of the dense loss" if group[0].metric == "loss" else "points of accuracy"
    axes.set_xlabel(f"worse than dense by, {unit}; shaded: the margin")
    return svg(drawing)


def _columns(curve: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in curve], [value for _, value in curve]
