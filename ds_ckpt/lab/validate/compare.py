"""Judge finished runs: paired differences, verdicts and their records.

A difference is that of two runs of one seed, more than 0 is worse: held-out losses relative to the
dense loss, accuracies as shares. Lossless candidates are compared bit for bit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ds_ckpt.config.verdicts import VerdictRecord, Word, decisive, largest
from ds_ckpt.lab.validate.data import Examples
from ds_ckpt.lab.validate.equivalence import Judgement, judge
from ds_ckpt.lab.validate.experiment import DENSE, Candidate, Plan
from ds_ckpt.lab.validate.runs import Result, Store
from ds_ckpt.lab.validate.task import BETAS, Task
from ds_ckpt.telemetry.timings import ResidualStats

MARGINS = {"loss": 0.005, "accuracy": 0.01}
"""Differences that do not count: a share of the dense held-out loss, and of the examples."""
EXIT_CODES: dict[Word, int] = {
    "identical": 0,
    "equivalent": 0,
    "better": 0,
    "inconclusive": 2,
    "worse": 1,
    "different": 1,
}
Pair = tuple[Result, Result]
"""The dense run of a seed, and the candidate's."""


@dataclass(frozen=True)
class Comparison(Judgement):
    """Verdict on one candidate.

    Attributes:
        candidate: the configuration.
        plan: its runs.
        differences: by seed; infinite if the run diverged.
        margin: in the same unit.
        dense: mean final loss or accuracy of dense training, over the seeds that both finished.
        compressed: mean final loss or accuracy of the candidate, likewise.
        warm_up: uncompressed steps of a run.
        reason: prevents a verdict; empty if there is none.
        fewer_bytes: ratio of the bytes of a step, with 16-bit gradients.
        left: largest residual statistics after the warm-up in runs that did not diverge; None if
            nothing was sampled.
        about: versions and date.
    """

    candidate: Candidate
    plan: Plan
    differences: dict[int, float]
    margin: float
    dense: float
    compressed: float
    warm_up: int
    reason: str
    fewer_bytes: float
    left: ResidualStats | None
    about: dict[str, Any]

    @property
    def metric(self) -> Literal["loss", "accuracy"]:
        """Return the metric of the verdict."""
        return self.plan.task.spec.metric

    @property
    def diverged(self) -> list[int]:
        """Return the seeds whose run was stopped."""
        return [seed for seed, gap in self.differences.items() if not math.isfinite(gap)]

    def describe_verdict(self) -> str:
        """Return the verdict, and the remedy if it is inconclusive."""
        if self.verdict != "inconclusive":
            return self.verdict
        if self.reason:
            return f"inconclusive: {self.reason}"
        side = ""
        if self.interval is not None and self.interval.high < self.margin:
            side = " (not worse by the margin; better by it is not ruled out)"
        if self.more_seeds is None:
            return f"inconclusive{side}: too near the margin for any number of seeds"
        return f"inconclusive{side}: needs about {self.more_seeds} more seeds"


def compare(plan: Plan, candidate: Candidate, store: Store, margin: float) -> Comparison:
    """Judge a candidate by the runs in the store."""
    spec, metric = plan.task.spec, plan.task.spec.metric
    pairs: dict[int, Pair] = {}
    for seed in plan.seeds_of(candidate):
        dense, ours = (store.find(plan.key(one, seed)) for one in (DENSE, candidate))
        if dense is not None and ours is not None:
            pairs[seed] = (dense, ours)
    gaps = {
        seed: math.inf
        if ours.outcome.diverged
        else _difference(dense.outcome.final(metric), ours.outcome.final(metric), metric)
        for seed, (dense, ours) in pairs.items()
    }
    reason = ""
    if candidate.lossy:
        reason = _unusable(list(pairs.values()), metric, margin)
        judged = judge(list(gaps.values()), margin, step=grid_step(plan.task))
        if reason:
            judged = Judgement("inconclusive", judged.interval, 0)
    else:
        same = all(a.outcome.digest == b.outcome.digest for a, b in pairs.values())
        word: Word = ("identical" if same else "different") if pairs else "inconclusive"
        judged = Judgement(word, None, 0)
    finished = [pair for seed, pair in pairs.items() if math.isfinite(gaps[seed])]
    first = next(iter(pairs.values()), None)
    warm_up, fewer_bytes = candidate.warm_up(spec), 1.0
    if first and first[1].sixteen_bit_bytes:
        fewer_bytes = first[0].sixteen_bit_bytes / first[1].sixteen_bit_bytes
    left = [row for _, ours in finished for row in ours.outcome.left if row[0] > warm_up]
    ends = [[one.outcome.final(metric) for one in side] for side in zip(*finished, strict=True)]
    means = [statistics.fmean(side) for side in ends] or [math.nan, math.nan]
    return Comparison(
        **vars(judged),
        candidate=candidate,
        plan=plan,
        differences=gaps,
        margin=margin,
        dense=means[0],
        compressed=means[1],
        warm_up=warm_up,
        reason=reason,
        fewer_bytes=fewer_bytes,
        left=largest(ResidualStats(error, norm) for _, error, norm in left),
        about=first[1].about if first else {},
    )


def grid_step(task: Task) -> float:
    """Return the grid of differences: the share of one held-out example; 0 for losses."""
    data = task.data
    return 1 / data.evaluated if isinstance(data, Examples) else 0.0


def _difference(dense: float, ours: float, metric: str) -> float:
    return dense - ours if metric == "accuracy" else ours / dense - 1


def _unusable(pairs: Sequence[Pair], metric: str, margin: float) -> str:
    """Return the reason why the runs allow no verdict; empty if they do."""
    if any(dense.outcome.diverged for dense, _ in pairs):
        return "dense training itself diverged; lower --learning-rate"
    curves = [dense.outcome.curve(metric) for dense, _ in pairs]
    learnt = [_difference(curve[-1][1], curve[0][1], metric) for curve in curves if curve]
    if any(not more > margin for more in learnt):  # then no training at all would be equivalent
        return "dense training itself has learnt less than the margin; take more --steps"
    if pairs and all(ours.sixteen_bit_bytes >= dense.sixteen_bit_bytes for dense, ours in pairs):
        return "a model of this size has nothing to compress with these settings"
    return ""


def exit_code(comparisons: Sequence[Comparison]) -> int:
    """Return 0 if all verdicts are good, 1 if one is worse, otherwise 2."""
    codes = {EXIT_CODES[one.verdict] for one in comparisons}
    return 1 if 1 in codes else max(codes, default=2)


def records(comparisons: Iterable[Comparison]) -> list[VerdictRecord]:
    """Return the records that `ds-ckpt validate` and guards read, of files with a method."""
    return [
        VerdictRecord(
            preset=one.candidate.name,
            settings=decisive(one.candidate.plugin.compression),
            verdict=one.verdict,
            task=one.plan.task.spec.describe(),
            data=one.plan.task.data.source,
            model=one.plan.task.describe_model(),
            betas=None if one.plan.task.spec.betas == BETAS else one.plan.task.spec.betas,
            metric=one.metric,
            margin=one.margin,
            seeds=len(one.differences),
            interval=(one.interval.low, one.interval.high) if one.interval else None,
            mean=statistics.fmean(one.differences.values())
            if one.differences and not one.diverged
            else None,
            fewer_bytes=one.fewer_bytes,
            steps=one.plan.task.spec.steps,
            warm_up=one.warm_up,
            workers=one.plan.task.spec.world,
            mode=one.plan.mode,
            left=one.left,
            versions=one.about.get("versions", {}),
            date=one.about.get("date", ""),
        )
        for one in comparisons
        if one.candidate.plugin.compression.method != "none"
    ]
