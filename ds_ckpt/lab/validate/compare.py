"""From finished runs to verdicts and their records: paired differences, what it took to come as far
as dense training, what was left behind.

A difference is that of two runs of one seed, more than 0 is worse: of held-out losses in units of
the dense loss, of accuracies in points of a hundred. What loses nothing is compared bit for bit.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ds_ckpt.config.verdicts import VerdictRecord, Word, decisive, largest
from ds_ckpt.lab.validate.data import Examples
from ds_ckpt.lab.validate.experiment import DENSE, Candidate, Plan
from ds_ckpt.lab.validate.statistics import Judgement, judge
from ds_ckpt.lab.validate.store import Result, Store
from ds_ckpt.lab.validate.task import BETAS, Task
from ds_ckpt.lab.validate.trainer import Curve
from ds_ckpt.telemetry.timings import ResidualStats

MARGINS = {"loss": 0.005, "accuracy": 0.01}
"""What counts as no difference: a share of the dense held-out loss, accuracy as a share."""
EXIT_CODES: dict[Word, int] = {
    "identical": 0,
    "equivalent": 0,
    "better": 0,
    "inconclusive": 2,
    "worse": 1,
    "different": 1,
}
Pair = tuple[Result, Result]
"""The dense run of a seed, and ours."""


@dataclass(frozen=True)
class Comparison(Judgement):
    """One candidate on one task.

    Attributes:
        differences: by seed; infinite where the run diverged.
        margin: in the same unit.
        dense, ours: mean result at the end over the seeds that both finished: loss or accuracy.
        warm_up: steps of a run that were dense.
        why: no verdict can be given, whatever the numbers; empty where one can.
        fewer_bytes: times fewer that a compressed step sends, 16-bit gradients.
        reached: of each run that came within the margin of where dense training ends: steps and
            sent bytes, in shares of what dense training took to come there.
        curves: means of dense and ours at the evaluations that all runs have.
        left: the largest of what compression left behind after the warm-up in runs that did not
            diverge; None where nothing was sampled.
    """

    candidate: Candidate
    plan: Plan
    differences: dict[int, float]
    margin: float
    dense: float
    ours: float
    warm_up: int
    why: str
    fewer_bytes: float
    reached: list[tuple[float, float]]
    curves: tuple[Curve, Curve]
    left: ResidualStats | None
    about: dict[str, Any]

    @property
    def metric(self) -> Literal["loss", "accuracy"]:
        """What the verdict is on."""
        return self.plan.task.spec.metric

    @property
    def diverged(self) -> list[int]:
        """Seeds whose run was stopped."""
        return [seed for seed, gap in self.differences.items() if not math.isfinite(gap)]

    def verdict_words(self) -> str:
        """The verdict, and what to do where there is none."""
        if self.verdict != "inconclusive":
            return self.verdict
        if self.why:
            return f"inconclusive: {self.why}"
        open_side = ""
        if self.interval is not None and self.interval.high < self.margin:
            open_side = " (not worse by the margin; better by it is not ruled out)"
        if self.more_seeds is None:
            return f"inconclusive{open_side}: too near the margin for any number of seeds"
        return f"inconclusive{open_side}: needs about {self.more_seeds} more seeds"


def compare(plan: Plan, candidate: Candidate, store: Store, margin: float) -> Comparison:
    """Judge a candidate by the runs that are in the store."""
    by_seed: dict[int, Pair] = {}
    for seed in plan.seeds_of(candidate):
        dense, ours = (plan.find(one, seed, store) for one in (DENSE, candidate))
        if dense is not None and ours is not None:
            by_seed[seed] = (dense, ours)
    pairs = list(by_seed.values())
    metric, warm_up = plan.task.spec.metric, candidate.warm_up(plan.task.spec.steps)
    gaps = {
        seed: math.inf
        if ours.outcome.diverged
        else _difference(dense.outcome.final(metric), ours.outcome.final(metric), metric)
        for seed, (dense, ours) in by_seed.items()
    }
    why = _no_verdict(candidate, pairs, metric, margin) if candidate.lossy else ""
    judged = judge(list(gaps.values()), margin, step=grid_step(plan.task))
    if why:
        judged = Judgement("inconclusive", judged.interval, 0)
    elif not candidate.lossy:
        same = all(a.outcome.digest == b.outcome.digest for a, b in pairs)
        word: Word = ("identical" if same else "different") if pairs else "inconclusive"
        judged = Judgement(word, None, 0)
    finished = [pair for seed, pair in by_seed.items() if math.isfinite(gaps[seed])]
    fewer_bytes = 1.0
    if pairs and pairs[0][1].sixteen_bit_bytes:
        fewer_bytes = pairs[0][0].sixteen_bit_bytes / pairs[0][1].sixteen_bit_bytes
    left = [row for _, ours in finished for row in ours.outcome.left if row[0] > warm_up]
    return Comparison(
        **vars(judged),
        candidate=candidate,
        plan=plan,
        differences=gaps,
        margin=margin,
        dense=_mean([dense.outcome.final(metric) for dense, _ in finished]),
        ours=_mean([ours.outcome.final(metric) for _, ours in finished]),
        warm_up=warm_up,
        why=why,
        fewer_bytes=fewer_bytes,
        reached=[found for pair in pairs if (found := _reached(*pair, metric, margin, warm_up))],
        curves=(
            _mean_curve([dense.outcome.curve(metric) for dense, _ in pairs]),
            _mean_curve([ours.outcome.curve(metric) for _, ours in pairs]),
        ),
        left=largest(ResidualStats(error, norm) for _, error, norm in left),
        about=pairs[0][1].about if pairs else {},
    )


def grid_step(task: Task) -> float:
    """Of the grid on which differences stand: one held-out example; 0 for losses."""
    data = task.learner.data
    return 1 / data.held_out if isinstance(data, Examples) else 0.0


def _no_verdict(candidate: Candidate, pairs: Sequence[Pair], metric: str, margin: float) -> str:
    """What makes the runs useless for a verdict; empty where nothing does."""
    if any(dense.outcome.diverged for dense, _ in pairs):
        return "dense training itself diverged; lower --learning-rate"
    curves = [dense.outcome.curve(metric) for dense, _ in pairs]
    learnt = [_difference(curve[-1][1], curve[0][1], metric) for curve in curves if curve]
    if any(not more > margin for more in learnt):  # then no training at all would be equivalent
        return "dense training itself has learnt less than the margin; take more --steps"
    nothing = all(ours.sixteen_bit_bytes >= dense.sixteen_bit_bytes for dense, ours in pairs)
    if candidate.compresses and nothing and pairs:
        return "a model of this size has nothing to compress with these settings"
    return ""


def exit_code(comparisons: Sequence[Comparison]) -> int:
    """0 where all is well, 1 where one is worse, else 2 where one is inconclusive."""
    codes = {EXIT_CODES[one.verdict] for one in comparisons}
    return 1 if 1 in codes else max(codes, default=2)


def false_alarms(
    values: Sequence[float],
    seeds: int,
    margin: float,
    *,
    metric: str,
    step: float = 0.0,
    rounds: int = 2000,
) -> dict[str, float]:
    """Dense training against itself: the share of each verdict where there is no difference.

    Args:
        values: results of dense runs with different seeds, at least twice `seeds`.
        seeds: pairs of a trial; runs are paired at random, none with itself.
        step: see `judge`.
    """
    draw = random.Random(0)
    counts: dict[str, float] = dict.fromkeys(("equivalent", "better", "worse", "inconclusive"), 0)
    for _ in range(rounds):
        chosen = draw.sample(list(values), 2 * seeds)
        gaps = [_difference(a, b, metric) for a, b in zip(chosen[::2], chosen[1::2], strict=True)]
        counts[judge(gaps, margin, step=step).verdict] += 1 / rounds
    return counts


def records(comparisons: Iterable[Comparison]) -> list[VerdictRecord]:
    """What `ds-ckpt validate` and guards read: one for each file with a method, or with weights
    whose changes travel in few bits."""
    return [
        VerdictRecord(
            preset=one.candidate.name,
            settings=decisive(one.candidate.plugin.compression, one.candidate.plugin.weights),
            verdict=one.verdict,
            task=one.plan.task.spec.words(),
            data=one.plan.task.source,
            model=one.plan.task.model,
            betas=None if one.plan.task.spec.betas == BETAS else one.plan.task.spec.betas,
            metric=one.metric,
            margin=one.margin,
            seeds=len(one.differences),
            interval=(one.interval.low, one.interval.high) if one.interval else None,
            mean=_mean([*one.differences.values()])
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
        if one.candidate.plugin.compression.method != "none" or one.candidate.weight_bits
    ]


# Of single runs: how far they had come when


def _difference(dense: float, ours: float, metric: str) -> float:
    return dense - ours if metric == "accuracy" else ours / dense - 1


def _mean(values: Sequence[float]) -> float:
    """NaN of none."""
    return statistics.fmean(values) if values else math.nan


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    """At the evaluations that all have."""
    each = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*map(set, each))) if each else []
    return [(step, _mean([curve[step] for curve in each])) for step in steps]


def _reached(
    dense: Result, ours: Result, metric: str, margin: float, warm_up: int
) -> tuple[float, float] | None:
    """Steps and bytes, see `Comparison`; None where the run did not come there."""
    end = dense.outcome.final(metric)
    target, sign = (end - margin, -1) if metric == "accuracy" else (end * (1 + margin), 1)
    theirs = _first(dense.outcome.curve(metric), target, sign)
    mine = _first(ours.outcome.curve(metric), target, sign)
    if ours.outcome.diverged or not theirs or not mine:
        return None
    whole = min(mine, warm_up)
    # a dense step took twice these bytes here, one in few bits as many as with 16-bit gradients
    in_warm_up = min(dense.sixteen_bit_bytes, ours.outcome.warm_up_bytes or dense.sixteen_bit_bytes)
    sent = whole * in_warm_up + (mine - whole) * ours.sixteen_bit_bytes
    return mine / theirs, sent / (theirs * dense.sixteen_bit_bytes or math.inf)


def _first(curve: Curve, target: float, sign: int) -> float | None:
    """The step at which a curve first comes down (sign 1) or up (-1) to the target, straight lines
    between evaluations."""
    before: tuple[int, float] | None = None
    for step, value in curve:
        if sign * (value - target) <= 0:
            if before is None or before[1] == value:
                return float(step)
            share = (before[1] - target) / (before[1] - value)
            return before[0] + share * (step - before[0])
        before = (step, value)
    return None
