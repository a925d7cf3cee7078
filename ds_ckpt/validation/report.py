"""What was found, for people. Nothing is judged here; `compare` has done that."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_ckpt.config.verdicts import with_leeway
from ds_ckpt.errors import UnsupportedError
from ds_ckpt.report.charts import Line, Lines, Rows, Span
from ds_ckpt.report.document import Block, Code, Document, Items, Paragraph, Plot, Section, Table
from ds_ckpt.telemetry.timings import ResidualStats
from ds_ckpt.validation.compare import EXIT_CODES, Comparison
from ds_ckpt.validation.statistics import Interval

TITLE = "Accuracy: dense training against compression"
_OPENING = (
    "Runs of one seed share initial weights, data and their order, and are compared in pairs. "
    "Equivalent: two one-sided t-tests at 5% reject a difference as large as the margin on either "
    "side, so the 90% interval lies inside it. Worse: the interval lies beyond it."
)
_LIMITS = (
    "The largest values seen, and a quarter more, for the compression section of a run like these:"
)


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


def write_report(
    folder: Path, comparisons: Sequence[Comparison], checks: Sequence[SelfCheck]
) -> Path:
    """Write `report.md`, and `report.html` where matplotlib and Jinja2 are installed.

    Returns:
        The HTML file, or the Markdown file without those.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return document(comparisons, checks).write(folder)[0]
    except UnsupportedError:
        return folder / "report.md"


def document(comparisons: Sequence[Comparison], checks: Sequence[SelfCheck]) -> Document:
    """All of it."""
    sections = []
    by_task = itertools.groupby(comparisons, key=heading)
    for place, (task, group) in enumerate((task, [*group]) for task, group in by_task):
        blocks = [Paragraph(f"Margin {_margin(group)}."), _table(group), *_plots(place, group)]
        sections.append(Section(task, blocks))
    limits, holds = guards(comparisons), notes(comparisons) if comparisons else []
    against_itself = [Items([check.words() for check in checks])] if checks else []
    sections += [
        Section("Limits for a guard", [Paragraph(_LIMITS), Code(limits)] if limits else []),
        Section("Dense against itself", against_itself),
        Section("What this holds for", [Items(holds)] if holds else []),
    ]
    return Document(TITLE, [_OPENING], sections)


def _margin(group: Sequence[Comparison]) -> str:
    unit = "% of the dense loss" if group[0].metric == "loss" else " points of accuracy"
    return f"{100 * group[0].margin:g}{unit}"


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
    who = "virtual workers" if one.mode == "virtual" else "ZeRO-3 processes"
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
    there, of = one.reached.runs
    found = one.reached
    if found.steps is None or found.sent_bytes is None or found.seconds is None:
        return f"not reached in {of - there} of {of} runs"
    return f"{found.steps:.2f}, {found.sent_bytes:.2f}, {found.seconds:.2f}"


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
    ("to dense's end", "steps, bytes and time in shares of dense training's", _reached),
    (
        "left behind",
        "largest compression error and residual norm seen",
        lambda one: f"{one.left.error:.3f}, {one.left.residual_norm:.2f}" if one.left else "",
    ),
)


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
    """What the numbers hold for, day and versions last."""
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
    versions = comparisons[0].about.get("versions", {})
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    found.append(f"{comparisons[0].about.get('date', '')}: {named}")
    return list(dict.fromkeys(found))


def _idle_rules(one: Comparison) -> list[str]:
    """Rules that took no parameter of the task's model, so that nothing was found out of them."""
    try:
        one.candidate.settings.choose().check(one.plan.task.shapes)
    except UnsupportedError as error:
        model = one.plan.task.model
        return [f"{one.candidate.name} in {model}: {p.where}: {p.why}" for p in error.problems]
    return []


# Charts


def _plots(place: int, group: Sequence[Comparison]) -> list[Block]:
    caption = "Difference to dense training: each seed (circles), mean and 90% interval (bars)."
    over = "Held-out result over steps, means over the seeds."
    return [
        Plot(f"differences-{place}", [differences(group)], caption),
        Plot(f"curves-{place}", [curves(group)], over),
    ]


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
    unit = "% of the dense loss" if group[0].metric == "loss" else "points of accuracy"
    return Rows(
        [one.candidate.name for one in group],
        f"worse than dense by, {unit}; shaded: the margin",
        spans=[_percent(one.interval) if one.interval else None for one in group],
        dots=[[100 * v for v in one.differences.values() if math.isfinite(v)] for one in group],
        notes=["diverged" if one.diverged else "" for one in group],
        shaded=100 * group[0].margin,
    )
