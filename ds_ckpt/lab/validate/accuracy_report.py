"""The report of a comparison: table, chart, limits for a guard, conditions."""

import math
import statistics
from collections.abc import Sequence

from ds_ckpt.lab.report.charts import Rows
from ds_ckpt.lab.report.document import Code, Document, Items, Paragraph, Plot, ReportSection, Table
from ds_ckpt.lab.validate.compare import Judgement
from ds_ckpt.telemetry.timings import ResidualStats

TITLE = "Accuracy: dense training against compression"
_OPENING = (
    "Runs of one seed share initial weights, data and their order, and are compared in pairs. "
    "Equivalent: two one-sided t-tests at 5% reject a difference as large as the margin on either "
    "side, so the 90% interval lies inside it. Worse: the interval lies beyond it."
)
_LEEWAY = 1.25
_LIMITS = "Add one of these to the compression section: the largest values seen, plus 25%."
_DIFFERENCES = "Difference to dense training: each seed (circles), mean and 90% interval (bars)."
_HEADS = ("configuration", "verdict", "difference", "dense", "compressed", "fewer bytes")
_COLUMNS = (
    "Difference: mean and 90% interval, more than 0 is worse. Dense and compressed: held-out, at "
    "the end. Fewer bytes: gradients of a compressed step, in 16 bits."
)
_ADVICE = (
    "a verdict holds for this task, model and length: validate your own (--data, --model, --steps)"
)


def accuracy_document(comparisons: Sequence[Judgement]) -> Document:
    """Build the report of all candidates of a task."""
    first = comparisons[0].record
    workers = "virtual workers" if first.mode == "virtual" else "ZeRO-3 ranks"
    title = f"{first.task}: {first.model}; {first.workers} {workers}, {first.steps} steps"
    unit = "% of the dense loss" if first.metric == "loss" else " points of accuracy"
    table = Table(_HEADS, [_cells(one) for one in comparisons], prose=True)
    chart = Rows(
        [one.candidate.name for one in comparisons],
        f"worse than dense by, {unit.strip()}; shaded: the margin",
        spans=[_percent(one) for one in comparisons],
        dots=[[100 * v for v in one.differences if math.isfinite(v)] for one in comparisons],
        notes=["diverged" if math.inf in one.differences else "" for one in comparisons],
        shaded=100 * first.margin,
    )
    margin = Paragraph(f"Margin {100 * first.margin:g}{unit}. {_COLUMNS}")
    limits = [_guard(one, s) for one in comparisons if (s := one.record.residual_stats) is not None]
    sections = [
        ReportSection(title, [margin, table, Plot("differences", [chart], _DIFFERENCES)]),
        ReportSection("Limits for a guard", [Paragraph(_LIMITS), Code(limits)] if limits else []),
        ReportSection("Conditions", [Items(_conditions(comparisons))]),
    ]
    return Document(TITLE, [_OPENING], sections)


def _cells(one: Judgement) -> list[str]:
    finals = [pair for pair in one.finals if all(map(math.isfinite, pair))]
    means = [f"{statistics.fmean(side):.4f}" for side in zip(*finals, strict=True)] or ["", ""]
    fewer = "" if one.candidate.settings.lossless else f"{one.record.fewer_bytes:.2f}x"
    return [one.candidate.name, one.describe_verdict(), _difference(one), *means, fewer]


def _difference(one: Judgement) -> str:
    diverged = sum(map(math.isinf, one.differences))
    if diverged:
        return f"{diverged} of {len(one.differences)} runs diverged"
    if one.candidate.settings.lossless:
        return "losses equal to the bit" if one.record.verdict == "identical" else "bits differ"
    span = _percent(one)
    if span is None:
        return "one seed has no interval"
    unit = "%" if one.record.metric == "loss" else " points"
    return f"{span[1]:+.2f}{unit} ({span[0]:+.2f} to {span[2]:+.2f})"


def _percent(one: Judgement) -> tuple[float, float, float] | None:
    """Return low, mean and high of the interval."""
    if one.interval is None:
        return None
    return 100 * one.interval.low, 100 * one.interval.mean, 100 * one.interval.high


def _guard(one: Judgement, stats: ResidualStats) -> str:
    error, norm = min(1.0, _LEEWAY * stats.error), _LEEWAY * stats.residual_norm
    limits = f'"error": {error:.3g}, "residual_norm": {norm:.3g}'
    return f'{one.candidate.name}: "guard": {{"action": "warn", {limits}}}'


def _conditions(comparisons: Sequence[Judgement]) -> list[str]:
    """Return the conditions of the verdicts, date and versions last."""
    found = []
    for one in comparisons:
        configured, record = one.candidate.settings.warmup_steps, one.record
        if not one.candidate.settings.lossless and configured > record.warm_up:
            found.append(
                f"{one.candidate.name}: the uncompressed warm-up of {configured} steps was cut to "
                f"{record.warm_up} in runs of {record.steps}"
            )
    last = comparisons[0].record
    named = ", ".join(f"{name} {version}" for name, version in last.versions.items())
    return [*found, _ADVICE, f"{last.date}: {named}"]
