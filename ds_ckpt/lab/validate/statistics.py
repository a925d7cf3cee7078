"""What paired differences allow to say: intervals, equivalence within a margin, seeds still needed.

A difference is that of two runs which share seed, weights and data: compressed less dense, in
units of the margin (here: of the dense loss). More than 0 is worse. Differences are taken as normal
and independent from seed to seed.

Equivalence is shown by two one-sided t-tests (TOST: Schuirmann, J. Pharmacokinet. Biopharm. 15,
1987): both "worse by the margin or more" and "better by the margin or more" are rejected at level
alpha, which is the same as an interval of confidence 1 - 2 alpha inside the margin. No difference
found in a test for difference would show nothing: with few seeds everything passes that.

Accuracies are counts, so their differences stand on a grid. Two that fall on the same point would
have no spread, and a verdict that two seeds cannot carry: their spread is at least half a step.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import special

from ds_ckpt.config.verdicts import Word

MARGIN = 0.005
"""Half a percent of the dense loss."""
ALPHA = 0.05
POWER = 0.8
MOST_SEEDS = 1000
_FIRST_SEEDS = 3


@dataclass(frozen=True)
class Interval:
    """Student's t interval around the mean of `count` differences.

    Attributes:
        spread: standard deviation of one difference, at least half a step of their grid.
    """

    mean: float
    low: float
    high: float
    spread: float
    count: int


@dataclass(frozen=True)
class Judgement:
    """What differences allow to say.

    Attributes:
        verdict: see `judge`.
        interval: of confidence 1 - 2 alpha; None with fewer than two finite differences.
        more_seeds: how many more are likely to decide where the verdict is inconclusive; 0 where it
            is not; None where not even MOST_SEEDS would.
    """

    verdict: Word
    interval: Interval | None
    more_seeds: int | None


def paired(
    differences: Sequence[float], confidence: float = 0.95, *, step: float = 0.0
) -> Interval:
    """The interval that holds the true mean difference with the given confidence.

    Args:
        step: of the grid on which differences stand; 0 where there is none.

    Raises:
        ValueError: fewer than two differences, one that is not finite, or a confidence outside
            (0, 1).
    """
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        raise ValueError(f"an interval takes two or more finite differences, not {differences}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), not {confidence}")
    mean, spread = statistics.fmean(differences), max(statistics.stdev(differences), step / 2)
    half = _quantile((1 + confidence) / 2, len(differences)) * spread / len(differences) ** 0.5
    return Interval(mean, mean - half, mean + half, spread, len(differences))


def judge(
    differences: Sequence[float],
    margin: float = MARGIN,
    *,
    alpha: float = ALPHA,
    step: float = 0.0,
) -> Judgement:
    """Is the compressed run as good as the dense one?

    equivalent: within the margin on both sides. Said of a config whose true difference is the
    margin or more in at most a share alpha of all trials. worse: by more than the margin; wrong in
    at most a share alpha. better: likewise on the other side. inconclusive: none of these. A
    difference that is not finite (a run that diverged) is worse, whatever the others are.

    Args:
        step: see `paired`.

    Raises:
        ValueError: margin not above 0, alpha outside (0, 0.5).
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
    interval: Interval, margin: float = MARGIN, *, alpha: float = ALPHA, power: float = POWER
) -> int | None:
    """Seeds to add so that a verdict falls with probability `power`, if mean and spread hold.

    None where MOST_SEEDS in all would not do: the mean lies too near the margin.
    """
    near, far = abs(margin - abs(interval.mean)), margin + abs(interval.mean)
    both = abs(interval.mean) < margin  # for equivalence either side can fail

    def enough(count: int) -> bool:
        error = interval.spread / math.sqrt(count)
        missed = _missed(near, error, count, alpha)
        if both:
            missed += _missed(far, error, count, alpha)
        return missed <= 1 - power

    counts = range(interval.count + 1, MOST_SEEDS + 1)
    place = bisect.bisect_left(counts, True, key=enough)
    return place + 1 if place < len(counts) else None


def _missed(distance: float, error: float, count: int, alpha: float) -> float:
    """Chance that a one-sided t-test of `count` at `alpha` does not reject, `distance` away.

    The t-distribution moved by `distance`, in place of the non-central one: close enough to plan.
    """
    if error == 0:
        return 0.0 if distance > 0 else 1.0
    return 1 - float(special.stdtr(count - 1, distance / error - _quantile(1 - alpha, count)))


def _quantile(probability: float, count: int) -> float:
    """Of Student's t for `count` differences."""
    return float(special.stdtrit(count - 1, probability))
