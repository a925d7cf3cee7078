"""Plots as inline SVG, for pages that load nothing."""

from __future__ import annotations

import io
from typing import Any

from ds_ckpt.errors import Problem, UnsupportedError


def figure(*, height_inches: float, rows: int | None = None) -> tuple[Any, Any]:
    """A figure and its axes; with `rows` a list of axes above one another.

    Raises UnsupportedError where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing("matplotlib") from error
    # No pyplot: it would look for a display.
    drawing = Figure(figsize=(8.2, height_inches), layout="constrained")
    all_axes = [drawing.add_subplot(rows or 1, 1, i + 1) for i in range(rows or 1)]
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
    return drawing, all_axes if rows else all_axes[0]


def svg(drawing: Any) -> str:
    """The figure as an `<svg>` element."""
    import matplotlib

    target = io.StringIO()
    # Text stays text, and equal numbers give equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ds_ckpt"}):
        drawing.savefig(target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    return text[text.index("<svg") :]


def missing(package: str) -> UnsupportedError:
    """The error for a package of the `report` extra that is not there."""
    return UnsupportedError(
        Problem(
            where=package,
            found="not installed",
            why="the HTML report is made with it",
            remedy="install the extra: pip install 'ds_ckpt[report]'",
        ),
        headline="the report cannot be written",
    )
