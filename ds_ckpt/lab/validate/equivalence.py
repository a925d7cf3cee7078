"""Statistics of paired differences: intervals, equivalence within a margin, seeds still needed.

A difference is that of two runs with the same seed, weights and data. It is compressed less dense,
in units of the margin. More than 0 is worse. Differences are taken as normal and independent.

Equivalence is shown by two one-sided t-tests (TOST: Schuirmann, J. Pharmacokinet. Biopharm. 15,
1987). They reject "worse by the margin or more" and "better by the margin or more", both at level
ALPHA. This is the same as an interval of confidence 1 - 2 ALPHA inside the margin. A test for a
difference would show nothing: with few seeds everything passes it.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import special

from ds_ckpt.config.verdicts import Verdict

ALPHA = 0.05
MAX_SEEDS = 1000
_SHIFT = 2.93
"""Standard errors between mean and margin that decide in eight of ten experiments. It is the sum of
the quantiles of 1 - ALPHA and of 0.9, since each of two tests may miss."""


@dataclass(frozen=True)
class ConfidenceInterval:
    """Student's t interval around the mean of differences with standard deviation `spread`."""

    mean: float
    low: float
    high: float
    spread: float
    count: int


def paired(
    differences: Sequence[float], confidence: float = 0.95, *, step: float = 0.0
) -> ConfidenceInterval:
    """Return the interval that contains the true mean difference with the given confidence.

    Accuracies are counts: equal differences would have no spread, so it is at least half a `step`
    of their grid. Raises ValueError without two finite differences, or with a wrong confidence.
    """
    count = len(differences)
    if count < 2 or not all(map(math.isfinite, differences)) or not 0 < confidence < 1:
        raise ValueError(f"no interval of confidence {confidence} for {differences}")
    mean, spread = statistics.fmean(differences), max(statistics.stdev(differences), step / 2)
    quantile = float(special.stdtrit(count - 1, (1 + confidence) / 2))
    half = quantile * spread / math.sqrt(count)
    return ConfidenceInterval(mean, mean - half, mean + half, spread, count)


def judge(
    differences: Sequence[float], margin: float, *, step: float = 0.0
) -> tuple[Verdict, ConfidenceInterval | None]:
    """Compare a compressed configuration with dense training.

    `equivalent`: within the margin on both sides. If the true difference is the margin, a
    configuration passes in at most a share ALPHA of all trials. `worse`, `better`: by more than the
    margin, wrong in at most a share ALPHA. `inconclusive`: none of these. A difference that is not
    finite (a run that diverged) is worse. The interval has confidence 1 - 2 ALPHA.
    """
    if not all(map(math.isfinite, differences)):
        return "worse", None
    if len(differences) < 2:
        return "inconclusive", None
    interval = paired(differences, 1 - 2 * ALPHA, step=step)
    if -margin < interval.low and interval.high < margin:
        return "equivalent", interval
    if interval.low > margin:
        return "worse", interval
    return ("better" if interval.high < -margin else "inconclusive"), interval


def more_seeds(interval: ConfidenceInterval, margin: float) -> int | None:
    """Estimate the seeds to add for a verdict, if mean and spread hold; None above MAX_SEEDS."""
    distance, needed = abs(margin - abs(interval.mean)), _SHIFT * interval.spread
    if needed > distance * math.sqrt(MAX_SEEDS):
        return None
    # Student's t of few differences needs two more than the normal distribution
    return max(1, math.ceil((needed / distance) ** 2) + 2 - interval.count)
