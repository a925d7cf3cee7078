"""What was found, for people: a table in the terminal, Markdown, and one HTML file without network.

Nothing is judged here; `compare` has done that. Plots are inline SVG, told apart by line and marker
and not by colour alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from ds_ckpt.config.verdicts import with_leeway
from ds_ckpt.errors import UnsupportedError
from ds_ckpt.harness.svg import figure, missing, svg
from ds_ckpt.telemetry.timings import ResidualStats
from ds_ckpt.validation.compare import Comparison, Curve

COLUMNS = (
    ("configuration", "file"),
    ("verdict", "against dense training of the same seeds"),
    ("difference", "mean and 90% interval; more than 0 is worse"),
    ("dense", "held-out, at the end"),
    ("compressed", "held-out, at the end"),
    ("fewer bytes", "of gradients a compressed step, 16 bits"),
    ("to dense's end", "steps, bytes and time in shares of dense training's"),
    ("left behind", "largest compression error and residual norm seen"),
)
_LIMITS = (
    "The largest values seen, and a quarter more, for the compression section of a run like these:"
)
_LINES = ("--", ":", "-.")
_MARKS = "ox^svDP*"
_COLOURS = ("#b3541e", "#1b4f8a", "#3f7d3a", "#7a3f8a", "#8a7a1b", "#444444")


@dataclass(frozen=True)
class SelfCheck:
    """Dense training against itself, other seeds.

    Attributes:
        values: results of the dense runs.
        seeds: pairs of a trial.
        shares: of each verdict.
    """

    task: str
    values: tuple[float, ...]
    seeds: int
    margin: float
    shares: dict[str, float]

    def words(self) -> str:
        """One sentence."""
        shares = ", ".join(f"{word} {share:.1%}" for word, share in self.shares.items())
        return (
            f"{self.task}: dense against dense, {len(self.values)} runs paired at random, "
            f"{self.seeds} pairs a trial, margin {100 * self.margin:g}%: {shares}. "
            '"worse" and "better" may each be wrong in 5% of trials.'
        )


def table(comparisons: Sequence[Comparison], checks: Sequence[SelfCheck]) -> Iterator[Any]:
    """What the terminal shows."""
    for task, group in _by_task(comparisons):
        shown = Table(title=task, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name, _ in COLUMNS[:4] + COLUMNS[5:7]:
            shown.add_column(name, overflow="fold")
        for one in group:
            cells = row(one)
            shown.add_row(*cells[:4], *cells[5:7])
        yield shown
    for line in guards(comparisons):
        yield Text(line)
    for check in checks:
        yield check.words()


def _by_task(comparisons: Sequence[Comparison]) -> Iterator[tuple[str, list[Comparison]]]:
    for task, group in itertools.groupby(comparisons, key=heading):
        yield task, list(group)


def _margin(group: Sequence[Comparison]) -> str:
    unit = "% of the dense loss" if group[0].metric == "loss" else " points of accuracy"
    return f"{100 * group[0].margin:g}{unit}"


def markdown(comparisons: Sequence[Comparison], checks: Sequence[SelfCheck]) -> str:
    """The report as Markdown."""
    lines = ["# Accuracy: dense training against compression", ""]
    for task, group in _by_task(comparisons):
        lines += [f"## {task}", "", f"Margin {_margin(group)}.", ""]
        lines += ["| " + " | ".join(name for name, _ in COLUMNS) + " |"]
        lines += ["|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(row(one)) + " |" for one in group]
        lines += [""]
    if limits := guards(comparisons):
        lines += ["## Limits for a guard", "", _LIMITS, ""]
        lines += [*(f"- `{line}`" for line in limits), ""]
    if checks:
        lines += ["## Dense against itself", "", *(f"- {c.words()}" for c in checks), ""]
    if comparisons:
        lines += ["## What this holds for", "", *(f"- {note}" for note in notes(comparisons))]
        lines += ["- " + about(comparisons[0]), ""]
    return "\n".join(lines)


def write_report(
    folder: Path, comparisons: Sequence[Comparison], checks: Sequence[SelfCheck]
) -> Path:
    """Write `report.md`, and `report.html` where matplotlib and Jinja2 are installed.

    Returns:
        The HTML file, or the Markdown file without those.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plain = folder / "report.md"
    plain.write_text(markdown(comparisons, checks), encoding="utf-8")
    try:
        page = _html(comparisons, checks)
    except UnsupportedError:
        return plain
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _html(comparisons: Sequence[Comparison], checks: Sequence[SelfCheck]) -> str:
    try:
        import jinja2
    except ImportError as error:
        raise missing("jinja2") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ds_ckpt", "validation"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    groups = [
        {
            "task": task,
            "margin": _margin(group),
            "rows": [(one.verdict, row(one)) for one in group],
            "curves": curves_svg(group),
            "intervals": intervals_svg(group),
        }
        for task, group in _by_task(comparisons)
    ]
    page: str = environment.get_template("report.html.j2").render(
        groups=groups,
        columns=COLUMNS,
        limits=guards(comparisons),
        limits_words=_LIMITS,
        checks=[check.words() for check in checks],
        notes=notes(comparisons) if comparisons else [],
        about=about(comparisons[0]) if comparisons else "",
    )
    return page


# A comparison in words


def row(one: Comparison) -> list[str]:
    """The cells of COLUMNS."""
    return [
        one.candidate.name,
        one.verdict_words(),
        _difference(one),
        _result(one, one.dense),
        _result(one, one.ours),
        f"{one.fewer_bytes:.2f}x" if one.candidate.lossy else "",
        _reached(one),
        f"{one.left.error:.3f}, {one.left.residual_norm:.2f}" if one.left else "",
    ]


def heading(one: Comparison) -> str:
    """The task with what runs were made of."""
    spec, task = one.plan.task.spec, one.plan.task
    who = "virtual workers" if one.mode == "virtual" else "ZeRO-3 processes"
    return (
        f"{spec.words()}: {task.model}; {spec.world} {who}, {spec.steps} steps, "
        f"AdamW {spec.learning_rate:g}"
    )


def _difference(one: Comparison) -> str:
    if one.diverged:
        count = len(one.diverged)
        return f"{count} of {len(one.differences)} runs diverged"
    if not one.candidate.lossy:
        return (
            "losses and weights equal to the bit" if one.verdict == "identical" else "bits differ"
        )
    if one.interval is None:
        return "one seed has no interval"
    unit = "%" if one.metric == "loss" else " points"
    mean, low, high = (100 * v for v in (one.interval.mean, one.interval.low, one.interval.high))
    return f"{mean:+.2f}{unit} ({low:+.2f} to {high:+.2f})"


def _result(one: Comparison, value: float) -> str:
    if not math.isfinite(value):
        return ""
    if one.metric == "accuracy":
        return f"{value:.1%}"
    return f"{value:.4f} (perplexity {math.exp(min(value, 700)):.3f})"


def _reached(one: Comparison) -> str:
    if not one.candidate.lossy:
        return ""
    there, of = one.reached.runs
    found = one.reached
    if found.steps is None or found.sent_bytes is None or found.seconds is None:
        return f"not reached in {of - there} of {of} runs"
    return f"{found.steps:.2f}, {found.sent_bytes:.2f}, {found.seconds:.2f}"


def guards(comparisons: Sequence[Comparison]) -> list[str]:
    """The limits to write into a configuration, by candidate."""
    found: dict[str, list[ResidualStats]] = {}
    for one in comparisons:
        if one.left is not None:
            found.setdefault(one.candidate.name, []).append(one.left)
    lines = []
    for name, lefts in found.items():
        limit = with_leeway(
            ResidualStats(
                error=max(left.error for left in lefts),
                residual_norm=max(left.residual_norm for left in lefts),
            )
        )
        lines.append(
            f'{name}: "guard": {{"action": "warn", "error": {limit.error:.3g}, '
            f'"residual_norm": {limit.residual_norm:.3g}}}'
        )
    return lines


def notes(comparisons: Sequence[Comparison]) -> list[str]:
    """What the numbers hold for."""
    found = []
    for one in comparisons:
        configured = one.candidate.settings.warmup_steps
        if one.candidate.lossy and configured > one.warm_up:
            found.append(
                f"{one.candidate.name}: its dense warm-up of {configured} steps was cut to "
                f"{one.warm_up} in runs of {one.plan.task.spec.steps}"
            )
        found += _idle_rules(one)
    if any(one.mode == "virtual" for one in comparisons):
        found.append(
            "virtual workers have no network: time is their own CPU seconds, one worker's share, "
            "and the bytes of gradients over the link that was named"
        )
    found.append(
        "a verdict holds for this task, model and length of run; validate your own with --data, "
        "--model, --steps"
    )
    return sorted(set(found), key=found.index)


def _idle_rules(one: Comparison) -> list[str]:
    """Rules that took no parameter of the task's model, so that nothing was found out of them."""
    try:
        one.candidate.settings.choose().check(one.plan.task.shapes)
    except UnsupportedError as error:
        model = one.plan.task.model
        return [f"{one.candidate.name} in {model}: {p.where}: {p.why}" for p in error.problems]
    return []


def about(one: Comparison) -> str:
    """Day and versions."""
    named = ", ".join(f"{name} {v}" for name, v in one.about.get("versions", {}).items())
    return f"{one.about.get('date', '')}: {named}"


# Plots


def curves_svg(group: Sequence[Comparison]) -> str:
    """Held-out result over steps, means over seeds, of dense training and every candidate."""

    def columns(curve: Curve) -> tuple[list[int], list[float]]:
        return [step for step, _ in curve], [value for _, value in curve]

    drawing, axes = figure(height_inches=3.6)
    most = max(group, key=lambda one: len(one.differences))  # lossless ones have fewer seeds
    axes.plot(*columns(most.curves[0]), label="dense", color="#000000", linewidth=1.8)
    for i, one in enumerate(group):
        axes.plot(
            *columns(one.curves[1]),
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
