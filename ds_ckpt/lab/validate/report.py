"""What was found, for people. Nothing is judged here; `compare` has done that."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from ds_ckpt.config.verdicts import largest, with_leeway
from ds_ckpt.errors import UnsupportedError
from ds_ckpt.lab.report.charts import Line, Lines, Rows, Span
from ds_ckpt.lab.report.document import (
    Block,
    Code,
    Document,
    Items,
    Paragraph,
    Plot,
    Section,
    Table,
)
from ds_ckpt.lab.validate.compare import EXIT_CODES, Comparison
from ds_ckpt.lab.validate.statistics import Interval

TITLE = "Accuracy: dense training against compression"
_OPENING = (
    "Runs of one seed share initial weights, data and their order, and are compared in pairs. "
    "Equivalent: two one-sided t-tests at 5% reject a difference as large as the margin on either "
    "side, so the 90% interval lies inside it. Worse: the interval lies beyond it."
)
_LIMITS = (
    "The largest values seen, and a quarter more, for the compression section of a run like these:"
)
_DIFFERENCES = "Difference to dense training: each seed (circles), mean and 90% interval (bars)."
_CURVES = "Held-out result over steps, means over the seeds."


def write_report(folder: Path, comparisons: Sequence[Comparison], checks: Sequence[str]) -> Path:
    """Write `report.md`, and `report.html` where matplotlib and Jinja2 are installed.

    Args:
        checks: a sentence for each task on dense training against itself.

    Returns:
        The HTML file, or the Markdown file without those.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return document(comparisons, checks).write(folder)[0]
    except UnsupportedError:
        return folder / "report.md"


def document(comparisons: Sequence[Comparison], checks: Sequence[str]) -> Document:
    """All of it."""
    sections = []
    by_task = itertools.groupby(comparisons, key=heading)
    for place, (task, group) in enumerate((task, [*group]) for task, group in by_task):
        blocks: list[Block] = [
            Paragraph(f"Margin {100 * group[0].margin:g}{_unit(group[0])}."),
            _table(group),
            Plot(f"differences-{place}", [differences(group)], _DIFFERENCES),
            Plot(f"curves-{place}", [curves(group)], _CURVES),
        ]
        sections.append(Section(task, blocks))
    limits, holds = guards(comparisons), notes(comparisons) if comparisons else []
    sections += [
        Section("Limits for a guard", [Paragraph(_LIMITS), Code(limits)] if limits else []),
        Section("Dense against itself", [Items(checks)] if checks else []),
        Section("What this holds for", [Items(holds)] if holds else []),
    ]
    return Document(TITLE, [_OPENING], sections)


def _unit(one: Comparison) -> str:
    return "% of the dense loss" if one.metric == "loss" else " points of accuracy"


def _table(group: Sequence[Comparison]) -> Table:
    heads, meanings, cells = zip(*_COLUMNS, strict=True)
    rows = [[cell(one) for cell in cells] for one in group]
    words = {0: "good", 1: "bad", 2: ""}
    tones = [words[EXIT_CODES[one.verdict]] for one in group]
    narrow = ("compressed", "left behind")
    return Table(heads, rows, prose=True, meanings=meanings, tones=tones, page_only=narrow)


def heading(one: Comparison) -> str:
    """The task with what runs were made of."""
    spec, task = one.plan.task.spec, one.plan.task
    who = "virtual workers" if one.plan.mode == "virtual" else "ZeRO-3 processes"
    return (
        f"{spec.words()}: {task.model}; {spec.world} {who}, {spec.steps} steps, "
        f"AdamW {spec.learning_rate:g}"
    )


# A comparison in words


def _difference(one: Comparison) -> str:
    if one.diverged:
        return f"{len(one.diverged)} of {len(one.differences)} runs diverged"
    if not one.candidate.lossy:
        same = one.verdict == "identical"
        return "losses and weights equal to the bit" if same else "bits differ"
    if one.interval is None:
        return "one seed has no interval"
    unit = "%" if one.metric == "loss" else " points"
    low, mean, high = _percent(one.interval)
    return f"{mean:+.2f}{unit} ({low:+.2f} to {high:+.2f})"


def _percent(interval: Interval) -> Span:
    return 100 * interval.low, 100 * interval.mean, 100 * interval.high


def _result(one: Comparison, value: float) -> str:
    if not math.isfinite(value):
        return ""
    if one.metric == "accuracy":
        return f"{value:.1%}"
    return f"{value:.4f} (perplexity {math.exp(min(value, 700)):.3f})"


def _reached(one: Comparison) -> str:
    if not one.candidate.lossy:
        return ""
    there, of = len(one.reached), len(one.differences)
    if there < of or not there:
        return f"not reached in {of - there} of {of} runs"
    return ", ".join(f"{statistics.fmean(shares):.2f}" for shares in zip(*one.reached, strict=True))


_COLUMNS: tuple[tuple[str, str, Callable[[Comparison], str]], ...] = (
    ("configuration", "file", lambda one: one.candidate.name),
    ("verdict", "against dense training of the same seeds", Comparison.verdict_words),
    ("difference", "mean and 90% interval; more than 0 is worse", _difference),
    ("dense", "held-out, at the end", lambda one: _result(one, one.dense)),
    ("compressed", "held-out, at the end", lambda one: _result(one, one.ours)),
    (
        "fewer bytes",
        "of gradients a compressed step, 16 bits",
        lambda one: f"{one.fewer_bytes:.2f}x" if one.candidate.lossy else "",
    ),
    ("to dense's end", "steps and bytes in shares of dense training's", _reached),
    (
        "left behind",
        "largest compression error and residual norm seen",
        lambda one: f"{one.left.error:.3f}, {one.left.residual_norm:.2f}" if one.left else "",
    ),
)


def guards(comparisons: Sequence[Comparison]) -> list[str]:
    """The limits to write into a configuration, by candidate."""
    lines = []
    for name in dict.fromkeys(one.candidate.name for one in comparisons):
        lefts = (one.left for one in comparisons if one.candidate.name == name)
        seen = largest(left for left in lefts if left is not None)
        if seen is not None:
            limit = with_leeway(seen)
            lines.append(
                f'{name}: "guard": {{"action": "warn", "error": {limit.error:.3g}, '
                f'"residual_norm": {limit.residual_norm:.3g}}}'
            )
    return lines


def notes(comparisons: Sequence[Comparison]) -> list[str]:
    """What the numbers hold for, day and versions last."""
    found = []
    for one in comparisons:
        configured = one.candidate.settings.warmup_steps
        if one.candidate.lossy and configured > one.warm_up:
            found.append(
                f"{one.candidate.name}: its dense warm-up of {configured} steps was cut to "
                f"{one.warm_up} in runs of {one.plan.task.spec.steps}"
            )
        try:
            one.candidate.settings.choose().check(one.plan.task.shapes)
        except UnsupportedError as error:  # rules that took nothing, so nothing is said of them
            name = f"{one.candidate.name} in {one.plan.task.model}"
            found += [f"{name}: {p.where}: {p.why}" for p in error.problems]
    found.append(
        "a verdict holds for this task, model and length of run; validate your own with --data, "
        "--model, --steps"
    )
    versions = comparisons[0].about.get("versions", {})
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    found.append(f"{comparisons[0].about.get('date', '')}: {named}")
    return list(dict.fromkeys(found))


# Charts


def curves(group: Sequence[Comparison]) -> Lines:
    """Held-out result over steps, means over seeds, of dense training and every candidate."""
    most = max(group, key=lambda one: len(one.differences))  # lossless ones have fewer seeds
    lines = [Line("dense", most.curves[0], shown="line")]
    lines += [Line(one.candidate.name, one.curves[1]) for one in group]
    loss = group[0].metric == "loss"
    y = "held-out loss" if loss else "held-out accuracy"
    return Lines(lines, "step", y, logarithmic="y" if loss else "")


def differences(group: Sequence[Comparison]) -> Rows:
    """Differences to dense with their 90% intervals, single seeds as dots, the margin shaded."""
    return Rows(
        [one.candidate.name for one in group],
        f"worse than dense by, {_unit(group[0]).strip()}; shaded: the margin",
        spans=[_percent(one.interval) if one.interval else None for one in group],
        dots=[[100 * v for v in one.differences.values() if math.isfinite(v)] for one in group],
        notes=["diverged" if one.diverged else "" for one in group],
        shaded=100 * group[0].margin,
    )
