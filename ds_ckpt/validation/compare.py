"""From finished runs to verdicts: paired differences, what it took to get as far, what was left.

A difference is that of two runs of one seed, more than 0 is worse: of held-out losses in units of
the dense loss, of accuracies in points of a hundred. What loses nothing is compared bit for bit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ds_ckpt.validation.candidates import DENSE, Candidate
from ds_ckpt.validation.experiment import Plan
from ds_ckpt.validation.reach import Clock, Reached, curve_of, curves, final, mean, reached
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


@dataclass(frozen=True)
class Margins:
    """What counts as no difference: relative held-out loss, and accuracy as a share."""

    loss: float = 0.005
    accuracy: float = 0.01

    def of(self, metric: str) -> float:
        """The margin of that metric."""
        return self.accuracy if metric == "accuracy" else self.loss


@dataclass(frozen=True)
class Range:
    """The largest values that validation saw after the warm-up in runs that did not diverge; see
    `telemetry.timings`."""

    error: float
    residual_norm: float


@dataclass(frozen=True)
class Comparison:
    """One candidate on one task.

    Attributes:
        more_seeds: see `statistics.judge`.
        differences: by seed; infinite where the run diverged.
        margin: in the same unit.
        dense, ours: mean result at the end over the seeds that both finished: loss or accuracy.
        steps, warm_up: of a run.
        why: no verdict can be given, whatever the numbers; empty where one can.
        fewer_bytes: times fewer that a compressed step sends, 16-bit gradients.
        curves: mean (step, result) of dense and ours at the evaluations that all runs have.
        left: what compression left behind; None where nothing was sampled.
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
    curves: tuple[list[tuple[int, float]], list[tuple[int, float]]]
    left: Range | None
    about: dict[str, object]

    @property
    def metric(self) -> str:
        """`loss` or `accuracy`."""
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
    pairs: dict[int, tuple[Result, Result]] = {}
    for seed in plan.seeds_of(candidate):
        dense = store.find(plan.key(DENSE, seed, mode))
        ours = store.find(plan.key(candidate, seed, mode))
        if dense is not None and ours is not None:
            pairs[seed] = (dense, ours)
    spec = plan.task.spec
    margin = margins.of(spec.metric)
    gaps = {seed: _gap(*pair, spec.metric) for seed, pair in pairs.items()}
    judged = judge(list(gaps.values()), margin)
    verdict: Word = judged.verdict
    if not candidate.lossy:
        same = all(a.outcome.digest == b.outcome.digest for a, b in pairs.values())
        verdict = ("identical" if same else "different") if pairs else "inconclusive"
    finished = [pair for seed, pair in pairs.items() if math.isfinite(gaps[seed])]
    warm_up = candidate.in_run_of(spec.steps).start_step if candidate.lossy else 0
    clock = Clock(warm_up, link_mbit, spec.world)
    some = next(iter(pairs.values()), None)
    sent = some[1].sixteen_bit_bytes if some else 0.0
    why = _no_verdict(list(pairs.values()), spec.metric, margin) if candidate.lossy else ""
    if why:
        verdict = "inconclusive"
    return Comparison(
        candidate=candidate,
        plan=plan,
        mode=mode,
        verdict=verdict,
        more_seeds=judged.more_seeds if candidate.lossy and not why else 0,
        interval=judged.interval if candidate.lossy else None,
        differences=gaps,
        margin=margin,
        dense=mean([final(dense, spec.metric) for dense, _ in finished]),
        ours=mean([final(ours, spec.metric) for _, ours in finished]),
        warm_up=warm_up,
        why=why,
        fewer_bytes=some[0].sixteen_bit_bytes / sent if some and sent else 1.0,
        reached=reached(list(pairs.values()), spec.metric, margin, clock),
        curves=curves(list(pairs.values()), spec.metric),
        left=_range([ours for _, ours in finished], warm_up),
        about=some[1].about if some else {},
    )


def _no_verdict(pairs: Sequence[tuple[Result, Result]], metric: str, margin: float) -> str:
    """What makes the runs useless for a verdict; empty where nothing does."""
    if any(dense.outcome.diverged for dense, _ in pairs):
        return "dense training itself diverged; lower --learning-rate"
    curves_ = [curve_of(dense, metric) for dense, _ in pairs]
    learnt = [_difference(curve[-1][1], curve[0][1], metric) for curve in curves_ if curve]
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


def _difference(dense: float, ours: float, metric: str) -> float:
    return dense - ours if metric == "accuracy" else ours / dense - 1


def _gap(dense: Result, ours: Result, metric: str) -> float:
    if ours.outcome.diverged:
        return math.inf
    return _difference(final(dense, metric), final(ours, metric), metric)


def _range(results: Sequence[Result], warm_up: int) -> Range | None:
    seen = [row for result in results for row in result.outcome.left if row[0] > warm_up]
    if not seen:
        return None
    return Range(max(error for _, error, _ in seen), max(norm for _, _, norm in seen))
