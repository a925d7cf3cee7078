"""Judge finished runs: paired differences and verdicts.

A difference is that of two runs of one seed, and more than 0 is worse. Held-out losses are relative
to the dense loss, accuracies are shares. Lossless candidates are compared bit for bit.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ds_ckpt.config.verdicts import Verdict, VerdictRecord, decisive
from ds_ckpt.lab.validate.data import Examples
from ds_ckpt.lab.validate.equivalence import ConfidenceInterval, judge, more_seeds
from ds_ckpt.lab.validate.experiment import DENSE_CONTENDER, Contender, Result, Results, RunPlan
from ds_ckpt.lab.validate.task import BETAS, Task
from ds_ckpt.telemetry.timings import ResidualStats

MARGINS = {"loss": 0.005, "accuracy": 0.01}
"""Differences that do not count: a share of the dense held-out loss, and of the examples."""
EXIT_CODES: dict[Verdict, int] = {"inconclusive": 2, "worse": 1, "different": 1}
"""By verdict; 0 for all others."""


@dataclass(frozen=True)
class Judgement:
    """Verdict on one candidate; `record` is what `ds-ckpt validate` reads.

    `differences`, one a seed, are infinite for a run that diverged. `finals` are losses or
    accuracies, dense and compressed. `reason` prevents a verdict.
    """

    candidate: Contender
    record: VerdictRecord
    interval: ConfidenceInterval | None
    differences: list[float]
    finals: list[tuple[float, float]]
    reason: str

    def describe_verdict(self) -> str:
        """Return the verdict, and the remedy if it is inconclusive."""
        if self.record.verdict != "inconclusive" or self.interval is None or self.reason:
            return f"{self.record.verdict}: {self.reason}" if self.reason else self.record.verdict
        more = more_seeds(self.interval, self.record.margin)
        if more is None:
            return "inconclusive: too near the margin for any number of seeds"
        return f"inconclusive: needs about {more} more seed{'s' * (more > 1)}"


def compare(plan: RunPlan, candidate: Contender, results: Results, margin: float) -> Judgement:
    """Judge a candidate by finished runs."""
    task, spec = plan.task, plan.task.spec
    keys = [(plan.key(DENSE_CONTENDER, s), plan.key(candidate, s)) for s in plan.seeds]
    pairs = [(results[dense], results[ours]) for dense, ours in keys]
    gaps = [_difference(dense, ours, spec.metric) for dense, ours in pairs]
    verdict: Verdict
    interval, reason = None, ""
    if not candidate.settings.lossless:
        verdict, interval = judge(gaps, margin, step=grid_step(task))
        reason = _unusable(pairs, spec.metric, margin)
        verdict = "inconclusive" if reason else verdict
    else:
        same = all(dense.outcome.digest == ours.outcome.digest for dense, ours in pairs)
        verdict = "identical" if same else "different"
    finished = [ours for (_, ours), gap in zip(pairs, gaps, strict=True) if math.isfinite(gap)]
    warm_up, (dense, ours) = candidate.warm_up(spec), pairs[0]
    rows = [row[1:] for run in finished for row in run.outcome.residual_stats if row[0] > warm_up]
    record = VerdictRecord(
        preset=candidate.name,
        settings=decisive(candidate.plugin.compression),
        verdict=verdict,
        task=spec.describe(),
        data=task.data.source,
        model=task.describe_model(),
        betas=None if spec.betas == BETAS else spec.betas,
        metric=spec.metric,
        margin=margin,
        seeds=len(gaps),
        interval=(interval.low, interval.high) if interval else None,
        mean=statistics.fmean(gaps) if len(finished) == len(gaps) else None,
        fewer_bytes=dense.sixteen_bit_bytes / ours.sixteen_bit_bytes,
        steps=spec.steps,
        warm_up=warm_up,
        workers=spec.world,
        mode=plan.mode,
        residual_stats=ResidualStats(*map(max, zip(*rows, strict=True))) if rows else None,
        versions=ours.versions,
        date=ours.date,
    )
    finals = [(a.outcome.heldout[-1][1], b.outcome.heldout[-1][1]) for a, b in pairs]
    return Judgement(candidate, record, interval, gaps, finals, reason)


def grid_step(task: Task) -> float:
    """Return the grid of differences: the share of one held-out example; 0 for losses."""
    data = task.data
    return 1 / len(data.heldout["labels"]) if isinstance(data, Examples) else 0.0


def _difference(dense: Result, ours: Result, metric: str) -> float:
    if ours.outcome.diverged:
        return math.inf
    a, b = dense.outcome.heldout[-1][1], ours.outcome.heldout[-1][1]
    return a - b if metric == "accuracy" else b / a - 1


def _unusable(pairs: Sequence[tuple[Result, Result]], metric: str, margin: float) -> str:
    """Return the reason why the runs allow no verdict; empty if they do."""
    if any(dense.outcome.diverged for dense, _ in pairs):
        return "dense training itself diverged; lower --learning-rate"
    ends = [(run.outcome.heldout[0][1], run.outcome.heldout[-1][1]) for run, _ in pairs]
    learnt = [b - a if metric == "accuracy" else a / b - 1 for a, b in ends]
    if not min(learnt) > margin:  # then no training at all would be equivalent
        return "dense training itself has learnt less than the margin; take more --steps"
    if all(ours.sixteen_bit_bytes >= dense.sixteen_bit_bytes for dense, ours in pairs):
        return "a model of this size has nothing to compress with these settings"
    return ""


def exit_code(comparisons: Sequence[Judgement]) -> int:
    """Return 0 if all verdicts are good, 1 if one is worse, otherwise 2."""
    codes = {EXIT_CODES.get(one.record.verdict, 0) for one in comparisons}
    return 1 if 1 in codes else max(codes)
