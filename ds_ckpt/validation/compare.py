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

from ds_ckpt.config.verdicts import VerdictRecord, decisive
from ds_ckpt.telemetry.timings import ResidualStats
from ds_ckpt.validation.experiment import DENSE, Candidate, Plan
from ds_ckpt.validation.statistics import ALPHA, Interval, judge
from ds_ckpt.validation.store import Mode, Result, Store

Word = Literal["identical", "equivalent", "better", "worse", "different", "inconclusive"]
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
Curve = list[tuple[int, float]]
"""(steps done, held-out loss or accuracy)."""


@dataclass(frozen=True)
class Margins:
    """What counts as no difference: relative held-out loss, and accuracy as a share."""

    loss: float = 0.005
    accuracy: float = 0.01

    def of(self, metric: str) -> float:
        """The margin of that metric."""
        return self.accuracy if metric == "accuracy" else self.loss


@dataclass(frozen=True)
class Reached:
    """What it took to come within the margin of where dense training ends, means over seeds, in
    shares of what dense training took to come there.

    Attributes:
        runs: how many came there, and of how many.
        steps, sent_bytes, seconds: None where not all runs came there.
    """

    runs: tuple[int, int]
    steps: float | None = None
    sent_bytes: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One candidate on one task.

    Attributes:
        more_seeds: see `statistics.judge`.
        differences: by seed; infinite where the run diverged.
        margin: in the same unit.
        dense, ours: mean result at the end over the seeds that both finished: loss or accuracy.
        warm_up: steps of a run that were dense.
        why: no verdict can be given, whatever the numbers; empty where one can.
        fewer_bytes: times fewer that a compressed step sends, 16-bit gradients.
        curves: means of dense and ours at the evaluations that all runs have.
        left: the largest of what compression left behind after the warm-up in runs that did not
            diverge; None where nothing was sampled.
    """

    candidate: Candidate
    plan: Plan
    mode: Mode
    verdict: Word
    more_seeds: int | None
    interval: Interval | None
    differences: dict[int, float]
    margin: float
    dense: float
    ours: float
    warm_up: int
    why: str
    fewer_bytes: float
    reached: Reached
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


def compare(
    plan: Plan,
    candidate: Candidate,
    store: Store,
    margins: Margins,
    *,
    mode: Mode = "virtual",
    link_mbit: float = 1000.0,
) -> Comparison:
    """Judge a candidate by the runs that are in the store.

    Args:
        link_mbit: of the network that times are reckoned for with virtual workers, which have none.
    """
    by_seed: dict[int, Pair] = {}
    for seed in plan.seeds_of(candidate):
        dense = store.find(plan.key(DENSE, seed, mode))
        ours = store.find(plan.key(candidate, seed, mode))
        if dense is not None and ours is not None:
            by_seed[seed] = (dense, ours)
    pairs = list(by_seed.values())
    spec = plan.task.spec
    metric, margin = spec.metric, margins.of(spec.metric)
    gaps = {
        seed: math.inf
        if ours.outcome.diverged
        else _difference(_final(dense, metric), _final(ours, metric), metric)
        for seed, (dense, ours) in by_seed.items()
    }
    judged = judge(list(gaps.values()), margin)
    verdict: Word = judged.verdict
    interval, more_seeds, why = judged.interval, judged.more_seeds, ""
    warm_up = candidate.warm_up(spec.steps)
    if candidate.lossy:
        why = _no_verdict(pairs, metric, margin)
        if why:
            verdict, more_seeds = "inconclusive", 0
    else:
        same = all(a.outcome.digest == b.outcome.digest for a, b in pairs)
        verdict = ("identical" if same else "different") if pairs else "inconclusive"
        interval, more_seeds = None, 0
    finished = [pair for seed, pair in by_seed.items() if math.isfinite(gaps[seed])]
    fewer_bytes = 1.0
    if pairs and pairs[0][1].sixteen_bit_bytes:
        fewer_bytes = pairs[0][0].sixteen_bit_bytes / pairs[0][1].sixteen_bit_bytes
    return Comparison(
        candidate=candidate,
        plan=plan,
        mode=mode,
        verdict=verdict,
        more_seeds=more_seeds,
        interval=interval,
        differences=gaps,
        margin=margin,
        dense=_mean([_final(dense, metric) for dense, _ in finished]),
        ours=_mean([_final(ours, metric) for _, ours in finished]),
        warm_up=warm_up,
        why=why,
        fewer_bytes=fewer_bytes,
        reached=_reached(pairs, metric, margin, _Clock(warm_up, link_mbit, spec.world)),
        curves=(
            _mean_curve([dense for dense, _ in pairs], metric),
            _mean_curve([ours for _, ours in pairs], metric),
        ),
        left=_largest_left([ours for _, ours in finished], warm_up),
        about=pairs[0][1].about if pairs else {},
    )


def _no_verdict(pairs: Sequence[Pair], metric: str, margin: float) -> str:
    """What makes the runs useless for a verdict; empty where nothing does."""
    if any(dense.outcome.diverged for dense, _ in pairs):
        return "dense training itself diverged; lower --learning-rate"
    curves = [curve_of(dense, metric) for dense, _ in pairs]
    learnt = [_difference(curve[-1][1], curve[0][1], metric) for curve in curves if curve]
    if any(not more > margin for more in learnt):  # then no training at all would be equivalent
        return "dense training itself has learnt less than the margin; take more --steps"
    if all(ours.sixteen_bit_bytes >= dense.sixteen_bit_bytes for dense, ours in pairs) and pairs:
        return "a model of this size has nothing to compress with these settings"
    return ""


def exit_code(comparisons: Sequence[Comparison]) -> int:
    """0 where all is well, 1 where one is worse, else 2 where one is undecided."""
    codes = {EXIT_CODES[one.verdict] for one in comparisons}
    return 1 if 1 in codes else max(codes, default=2)


def false_alarms(
    values: Sequence[float], seeds: int, margin: float, *, metric: str, rounds: int = 2000
) -> dict[str, float]:
    """Dense training against itself: the share of each verdict where there is no difference.

    Args:
        values: results of dense runs with different seeds, at least twice `seeds`.
        seeds: pairs of a trial; runs are paired at random, none with itself.
    """
    draw = random.Random(0)
    counts = dict.fromkeys(("equivalent", "better", "worse", "inconclusive"), 0)
    for _ in range(rounds):
        chosen = draw.sample(list(values), 2 * seeds)
        gaps = [_difference(a, b, metric) for a, b in zip(chosen[::2], chosen[1::2], strict=True)]
        counts[judge(gaps, margin, alpha=ALPHA).verdict] += 1
    return {word: count / rounds for word, count in counts.items()}


def records(comparisons: Iterable[Comparison]) -> list[VerdictRecord]:
    """What `ds-ckpt validate` and guards read: one for each comparison of a file with a method."""
    with_method = (one for one in comparisons if one.candidate.plugin.compression.method != "none")
    return [_record(one) for one in with_method]


def _record(one: Comparison) -> VerdictRecord:
    spec = one.plan.task.spec
    return VerdictRecord(
        preset=one.candidate.name,
        settings=decisive(one.candidate.plugin.compression),
        verdict=one.verdict,
        task=spec.words(),
        data=one.plan.task.source,
        model=one.plan.task.model,
        metric=one.metric,
        margin=one.margin,
        seeds=len(one.differences),
        interval=(one.interval.low, one.interval.high) if one.interval else None,
        mean=sum(one.differences.values()) / len(one.differences)
        if one.differences and not one.diverged
        else None,
        fewer_bytes=one.fewer_bytes,
        steps=spec.steps,
        warm_up=one.warm_up,
        workers=spec.world,
        mode=one.mode,
        left=one.left,
        versions=one.about.get("versions", {}),
        date=one.about.get("date", ""),
    )


# Of single runs: where they ended, how far they had come when, what they left


def curve_of(result: Result, metric: str) -> Curve:
    """Held-out loss or accuracy over steps."""
    return result.outcome.accuracy if metric == "accuracy" else result.outcome.heldout


def _final(result: Result, metric: str) -> float:
    """At the end; NaN where there is nothing."""
    curve = curve_of(result, metric)
    return curve[-1][1] if curve else math.nan


def _difference(dense: float, ours: float, metric: str) -> float:
    return dense - ours if metric == "accuracy" else ours / dense - 1


def _mean(values: Sequence[float]) -> float:
    """NaN of none."""
    return statistics.fmean(values) if values else math.nan


def _mean_curve(results: Sequence[Result], metric: str) -> Curve:
    """At the evaluations that all have."""
    curves = [dict(curve_of(result, metric)) for result in results]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    return [(step, _mean([curve[step] for curve in curves])) for step in steps]


def _largest_left(results: Sequence[Result], warm_up: int) -> ResidualStats | None:
    seen = [row for result in results for row in result.outcome.left if row[0] > warm_up]
    if not seen:
        return None
    return ResidualStats(
        error=max(error for _, error, _ in seen), residual_norm=max(norm for _, _, norm in seen)
    )


@dataclass(frozen=True)
class _Clock:
    """What a run has sent and how long it has taken after so many steps.

    Attributes:
        link_mbit: of the network that times are reckoned for where none was measured.
    """

    warm_up: int
    link_mbit: float
    world: int

    def _warm(self, dense: Result, ours: Result, steps: float) -> float:
        return steps if ours is dense else min(steps, self.warm_up)

    def sent_bytes(self, dense: Result, ours: Result, steps: float) -> float:
        """Of gradients, by the busiest worker, 16 bits an element where nothing is compressed."""
        before = self._warm(dense, ours, steps)
        return before * dense.sixteen_bit_bytes + (steps - before) * ours.sixteen_bit_bytes

    def seconds(self, dense: Result, ours: Result, steps: float) -> float:
        """Measured, or one worker's computing and its bytes over the link."""
        if ours.step_s and dense.step_s:  # measured, with a wire
            before = self._warm(dense, ours, steps)
            return before * dense.step_s + (steps - before) * ours.step_s
        computing = steps * ours.outcome.step_cpu_s / self.world
        return computing + 8 * self.sent_bytes(dense, ours, steps) / (1e6 * self.link_mbit)


def _reached(pairs: Sequence[Pair], metric: str, margin: float, clock: _Clock) -> Reached:
    shares: list[tuple[float, float, float]] = []
    for dense, ours in pairs:
        end = _final(dense, metric)
        target = end - margin if metric == "accuracy" else end * (1 + margin)
        sign = -1 if metric == "accuracy" else 1
        theirs = _first(curve_of(dense, metric), target, sign)
        mine = None if ours.outcome.diverged else _first(curve_of(ours, metric), target, sign)
        if theirs and mine:
            sent = clock.sent_bytes(dense, dense, theirs) or math.inf
            seconds = clock.seconds(dense, dense, theirs)
            shares.append(
                (
                    mine / theirs,
                    clock.sent_bytes(dense, ours, mine) / sent,
                    clock.seconds(dense, ours, mine) / seconds,
                )
            )
    runs = (len(shares), len(pairs))
    if not shares or len(shares) < len(pairs):
        return Reached(runs)
    return Reached(runs, *map(_mean, zip(*shares, strict=True)))


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
