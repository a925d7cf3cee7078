"""Charts of a report, drawn by matplotlib from data. One chart has one or more panels.

    Rows    one row per name: stacked bars, an interval, single values, a note
    Lines   values over x, with or without intervals

Hatching, line style, mark and words differ, never colour alone. Equal data give equal files.
Drawing needs matplotlib, importing this does not.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ds_ckpt.errors import Problem, UnsupportedError

_MARKS = "osD^vPX*<>phd"
_DASHES = ("-", "--", "-.", ":")
_COLOURS = ("#000000", "#b3541e", "#1b4f8a", "#3f7d3a", "#7a3f8a", "#8a7a1b", "#666666")
_FILLS = ("#e8e8e8", "#b9b9b9", "#dbe7f3", "#9fc0de", "#5f8fbf", "#2f5f8f", "#e6a76b", "#c0602b")
_HATCHES = ("//", "..", "xx", "\\\\", "--", "oo", "**", "")
ErrorBar = tuple[float, float, float]
"""Low end, middle and high end."""


@dataclass(frozen=True)
class Band:
    """One part of every row's bar."""

    label: str
    widths: Sequence[float]


@dataclass(frozen=True)
class Rows:
    """Rows from the top down, with stacked bands, and grey up to `shaded` on both sides of zero."""

    names: Sequence[str]
    x: str
    bands: Sequence[Band] = ()
    spans: Sequence[ErrorBar | None] = ()
    dots: Sequence[Sequence[float]] = ()
    notes: Sequence[str] = ()
    shaded: float = 0.0

    @property
    def inches(self) -> float:
        """Height."""
        return 1.3 + 0.36 * len(self.names)

    def draw(self, axes: Any) -> None:
        """Draw onto matplotlib's axes."""
        left = [0.0] * len(self.names)
        if self.shaded:
            axes.axvspan(-self.shaded, self.shaded, color="#e4e4e4", zorder=0)
            axes.axvline(0, color="#555555", linewidth=0.8)
        for place, band in enumerate(self.bands):
            if any(band.widths):
                bars = {"left": left, "label": band.label, **_fill(place)}
                axes.barh(range(len(left)), band.widths, **bars)
                left = [a + b for a, b in zip(left, band.widths, strict=True)]
        for place, dots in enumerate(self.dots):
            axes.plot(dots, [place] * len(dots), "o", ms=3, fillstyle="none", color=_COLOURS[2])
        for place, span in enumerate(self.spans):
            if span is not None:
                axes.plot(span[::2], [place] * 2, color="black", linewidth=1.6)
                axes.plot(span[1], place, "|", color="black", markersize=12)
        for place, note in enumerate(self.notes):
            if note:
                side = "right" if left[place] > 0.55 * max(left) else "left"
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
                style: dict[str, Any] = {"va": "center", "ha": side, "fontsize": 7, "bbox": box}
                axes.text(left[place], place, f" {note} ", **style)
        axes.set_yticks(range(len(self.names)), self.names)
        axes.invert_yaxis()
        axes.set_xlabel(self.x)
        if any(band.label for band in self.bands):
            above = {"loc": "lower left", "bbox_to_anchor": (-0.15, 1.0)}
            axes.legend(frameon=False, fontsize=8, ncols=4, **above)


@dataclass(frozen=True)
class Line:
    """Points in the order of x, with an interval each or none."""

    label: str
    points: Sequence[tuple[float, float]]
    spans: Sequence[ErrorBar] = ()
    shown: Literal["both", "line", "marks"] = "both"


@dataclass(frozen=True)
class Lines:
    """Lines over one x; lines without points are left out.

    `levels` are labelled values of y, `names` those of x = 0, 1, ...
    """

    lines: Sequence[Line]
    x: str
    y: str
    logarithmic: Literal["", "x", "y", "xy"] = ""
    levels: Sequence[tuple[float, str]] = ()
    names: Sequence[str] = ()
    inches: float = 3.6

    def draw(self, axes: Any) -> None:
        """Draw onto matplotlib's axes."""
        for place, line in enumerate(self.lines):
            if line.points:
                mark, dashes = look(place)
                xs, ys = zip(*line.points, strict=True)
                low = [max(middle - low, 0) for low, middle, _ in line.spans]
                high = [max(high - middle, 0) for _, middle, high in line.spans]
                axes.errorbar(
                    xs,
                    ys,
                    yerr=[low, high] if line.spans else None,
                    label=line.label,
                    color=_COLOURS[place % len(_COLOURS)],
                    linestyle="" if line.shown == "marks" else dashes,
                    marker="" if line.shown == "line" else mark,
                    markevery=max(1, len(xs) // 14),
                    markersize=5,
                    linewidth=1.3,
                    fillstyle="none",
                )
        for height, words in self.levels:
            axes.axhline(height, color="#777777", linewidth=0.8)
            across = axes.get_yaxis_transform()
            axes.text(0.01, height, words, transform=across, va="bottom", fontsize=8)
        for axis in self.logarithmic:
            axes.set(**{f"{axis}scale": "log"})
        if self.names:
            axes.set_xticks(range(len(self.names)), self.names)
            axes.set_xlim(-0.5, len(self.names) - 0.5)
        axes.set_xlabel(self.x)
        axes.set_ylabel(self.y)
        axes.legend(frameon=False, fontsize=8, ncols=2)


Panel = Rows | Lines


def look(place: int) -> tuple[str, str]:
    """Return mark and line style of a line; the first 52 differ."""
    return _MARKS[place % len(_MARKS)], _DASHES[place % len(_DASHES)]


def svg(panels: Sequence[Panel]) -> str:
    """Return an `<svg>` element; UnsupportedError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_package_error("matplotlib") from error
    heights = [panel.inches for panel in panels]
    # pyplot would need a display
    figure = Figure(figsize=(8.2, sum(heights)), layout="constrained")
    grid = {"height_ratios": heights}
    all_axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw=grid)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        panel.draw(axes)
    target = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ds_ckpt"}):
        figure.savefig(target, format="svg", metadata={"Date": None}, dpi=150)
    text = target.getvalue()
    return text[text.index("<svg") :]


def missing_package_error(package: str) -> UnsupportedError:
    """Return the error for a missing package of the `report` extra."""
    remedy = "install the extra: pip install 'ds_ckpt[report]'"
    problem = Problem(package, "not installed", "reports and plots need it", remedy)
    return UnsupportedError(problem, headline="the report cannot be written")


def _fill(place: int) -> dict[str, str]:
    return {"facecolor": _FILLS[place % 8], "hatch": _HATCHES[place % 8], "edgecolor": "#333333"}
