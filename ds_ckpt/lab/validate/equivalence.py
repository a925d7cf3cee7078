"""Statistics of paired differences: intervals, equivalence within a margin, seeds still needed.

A difference is that of two runs with the same seed, weights and data: compressed less dense, in
units of the margin. More than 0 is worse. Differences are taken as normal and independent.

Equivalence is shown by two one-sided t-tests (TOST: Schuirmann, J. Pharmacokinet. Biopharm. 15,
1987): "worse by the margin or more" and "better by the margin or more" are both rejected at level
alpha. This is the same as an interval of confidence 1 - 2 alpha inside the margin. A test for a
difference would show nothing: with few seeds everything passes it.

Accuracies are counts, so their differences lie on a grid. Two equal ones would have no spread, and
two seeds would be enough for a verdict: their spread is at least half a step of the grid.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import special

from ds_ckpt.config.verdicts import Word

ALPHA = 0.05
POWER = 0.8
MAX_SEEDS = 1000
_FIRST_SEEDS = 3


@dataclass(frozen=True)
class Interval:
    """Student's t interval around the mean of `count` differences.

    Attributes:
        mean: of the differences.
        low: lower end.
        high: upper end.
        spread: standard deviation of one difference, at least half a step of the grid.
        count: number of differences.
    """

    mean: float
    low: float
    high: float
    spread: float
    count: int


@dataclass(frozen=True)
class Judgement:
    """Verdict on differences.

    Attributes:
        verdict: see `judge`.
        interval: of confidence 1 - 2 alpha; None with fewer than two finite differences.
        more_seeds: number of seeds likely to decide an inconclusive verdict, otherwise 0; None if
            MAX_SEEDS would not decide it.
    """

    verdict: Word
    interval: Interval | None
    more_seeds: int | None


def paired(
    differences: Sequence[float], confidence: float = 0.95, *, step: float = 0.0
) -> Interval:
    """Return the interval that contains the true mean difference with the given confidence.

    Args:
        differences: two or more, finite.
        confidence: between 0 and 1.
        step: of the grid of the differences; 0 without one.

    Raises:
        ValueError: an argument is out of range.
    """
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        raise ValueError(f"an interval takes two or more finite differences, not {differences}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), not {confidence}")
    mean, spread = statistics.fmean(differences), max(statistics.stdev(differences), step / 2)
    half = _quantile((1 + confidence) / 2, len(differences)) * spread / len(differences) ** 0.5
    return Interval(mean, mean - half, mean + half, spread, len(differences))


def judge(
    differences: Sequence[float], margin: float, *, alpha: float = ALPHA, step: float = 0.0
) -> Judgement:
    """Compare a compressed configuration with dense training.

    `equivalent`: within the margin on both sides; a configuration whose true difference is the
    margin passes in at most a share alpha of all trials. `worse`, `better`: by more than the
    margin, wrong in at most a share alpha. `inconclusive`: none of these. A difference that is not
    finite (a run that diverged) is worse.

    Args:
        differences: one for each seed.
        margin: above 0.
        alpha: level of each test.
        step: see `paired`.

    Raises:
        ValueError: an argument is out of range.
    """
    if not margin > 0:
        raise ValueError(f"margin must be above 0, not {margin}")
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha must be in (0, 0.5), not {alpha}")
    if not all(map(math.isfinite, differences)):
        return Judgement("worse", None, 0)
    if len(differences) < 2:
        return Judgement("inconclusive", None, _FIRST_SEEDS - len(differences))
    interval = paired(differences, 1 - 2 * alpha, step=step)
    if -margin < interval.low and interval.high < margin:
        return Judgement("equivalent", interval, 0)
    if interval.low > margin:
        return Judgement("worse", interval, 0)
    if interval.high < -margin:
        return Judgement("better", interval, 0)
    return Judgement("inconclusive", interval, more_seeds(interval, margin, alpha=alpha))


def more_seeds(
    interval: Interval, margin: float, *, alpha: float = ALPHA, power: float = POWER
) -> int | None:
    """Return the seeds to add for a verdict with probability `power`, if mean and spread hold.

    None if MAX_SEEDS are not enough: the mean lies too near the margin.
    """
    near, far = abs(margin - abs(interval.mean)), margin + abs(interval.mean)
    two_sided = abs(interval.mean) < margin

    def enough(count: int) -> bool:
        error = interval.spread / math.sqrt(count)
        missed = _missed(near, error, count, alpha)
        if two_sided:
            missed += _missed(far, error, count, alpha)
        return missed <= 1 - power

    counts = range(interval.count + 1, MAX_SEEDS + 1)
    place = bisect.bisect_left(counts, True, key=enough)
    return place + 1 if place < len(counts) else None


def _missed(distance: float, error: float, count: int, alpha: float) -> float:
    """Return the chance that a one-sided t-test does not reject a value `distance` away.

    The shifted t-distribution replaces the non-central one: close enough for planning.
    """
    if error == 0:
        return 0.0 if distance > 0 else 1.0
    return 1 - float(special.stdtr(count - 1, distance / error - _quantile(1 - alpha, count)))


def _quantile(probability: float, count: int) -> float:
    """Return a quantile of Student's t for `count` differences."""
    return float(special.stdtrit(count - 1, probability))
