"""The report of a comparison: table, charts, limits for a guard, conditions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ds_ckpt.config.verdicts import with_leeway
from ds_ckpt.errors import UnsupportedError
from ds_ckpt.lab.report.charts import Rows, Span
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
from ds_ckpt.lab.validate.equivalence import Interval

TITLE = "Accuracy: dense training against compression"
_OPENING = (
    "Runs of one seed share initial weights, data and their order, and are compared in pairs. "
    "Equivalent: two one-sided t-tests at 5% reject a difference as large as the margin on either "
    "side, so the 90% interval lies inside it. Worse: the interval lies beyond it."
)
_LIMITS = "Add one of these to the compression section: the largest values seen, plus 25%."
_DIFFERENCES = "Difference to dense training: each seed (circles), mean and 90% interval (bars)."


def document(comparisons: Sequence[Comparison]) -> Document:
    """Build the report of all candidates of a task."""
    margin = f"Margin {100 * comparisons[0].margin:g}{_unit(comparisons[0])}."
    blocks: list[Block] = [
        Paragraph(margin),
        _table(comparisons),
        Plot("differences", [differences(comparisons)], _DIFFERENCES),
    ]
    limits = guards(comparisons)
    sections = [
        Section(heading(comparisons[0]), blocks),
        Section("Limits for a guard", [Paragraph(_LIMITS), Code(limits)] if limits else []),
        Section("Conditions", [Items(conditions(comparisons))]),
    ]
    return Document(TITLE, [_OPENING], sections)


def _unit(one: Comparison) -> str:
    return "% of the dense loss" if one.metric == "loss" else " points of accuracy"


def _table(comparisons: Sequence[Comparison]) -> Table:
    heads, meanings, cells = zip(*_COLUMNS, strict=True)
    rows = [[cell(one) for cell in cells] for one in comparisons]
    words = {0: "good", 1: "bad", 2: ""}
    tones = [words[EXIT_CODES[one.verdict]] for one in comparisons]
    narrow = ("compressed", "residuals")
    return Table(heads, rows, prose=True, meanings=meanings, tones=tones, page_only=narrow)


def heading(one: Comparison) -> str:
    """Describe the task and its runs."""
    spec, task = one.plan.task.spec, one.plan.task
    workers = "virtual workers" if one.plan.mode == "virtual" else "ZeRO-3 ranks"
    return (
        f"{spec.describe()}: {task.describe_model()}; {spec.world} {workers}, {spec.steps} steps, "
        f"AdamW {spec.learning_rate:g}"
    )


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


_COLUMNS: tuple[tuple[str, str, Callable[[Comparison], str]], ...] = (
    ("configuration", "file", lambda one: one.candidate.name),
    ("verdict", "against dense training of the same seeds", Comparison.describe_verdict),
    ("difference", "mean and 90% interval; more than 0 is worse", _difference),
    ("dense", "held-out, at the end", lambda one: _result(one, one.dense)),
    ("compressed", "held-out, at the end", lambda one: _result(one, one.compressed)),
    (
        "fewer bytes",
        "gradient bytes of a compressed step, 16 bits",
        lambda one: f"{one.fewer_bytes:.2f}x" if one.candidate.lossy else "",
    ),
    (
        "residuals",
        "largest compression error and residual norm",
        lambda one: f"{one.left.error:.3f}, {one.left.residual_norm:.2f}" if one.left else "",
    ),
)


def guards(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a guard with limits for each candidate."""
    lines = []
    for one in comparisons:
        if one.left is not None:
            limit = with_leeway(one.left)
            lines.append(
                f'{one.candidate.name}: "guard": {{"action": "warn", "error": {limit.error:.3g}, '
                f'"residual_norm": {limit.residual_norm:.3g}}}'
            )
    return lines


def conditions(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the conditions of the verdicts, date and versions last."""
    found = []
    for one in comparisons:
        configured = one.candidate.settings.warmup_steps
        if one.candidate.lossy and configured > one.warm_up:
            found.append(
                f"{one.candidate.name}: the uncompressed warm-up of {configured} steps was cut to "
                f"{one.warm_up} in runs of {one.plan.task.spec.steps}"
            )
        try:
            one.candidate.settings.choose().check(one.plan.task.shapes)
        except UnsupportedError as error:  # rules that match no parameter of this model
            name = f"{one.candidate.name} in {one.plan.task.describe_model()}"
            found += [f"{name}: {p.where}: {p.why}" for p in error.problems]
    found.append(
        "a verdict holds for this task, model and length of run; validate your own with --data, "
        "--model, --steps"
    )
    versions = comparisons[0].about.get("versions", {})
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    found.append(f"{comparisons[0].about.get('date', '')}: {named}")
    return found


def differences(comparisons: Sequence[Comparison]) -> Rows:
    """Plot the differences to dense training with their intervals and the margin."""
    return Rows(
        [one.candidate.name for one in comparisons],
        f"worse than dense by, {_unit(comparisons[0]).strip()}; shaded: the margin",
        spans=[_percent(one.interval) if one.interval else None for one in comparisons],
        dots=[
            [100 * v for v in one.differences.values() if math.isfinite(v)] for one in comparisons
        ],
        notes=["diverged" if one.diverged else "" for one in comparisons],
        shaded=100 * comparisons[0].margin,
    )
