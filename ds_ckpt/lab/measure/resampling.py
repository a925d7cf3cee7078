"""From trials to medians, and intervals by resampling repetitions. Pure.

Steps of one trial run one after the other and share what disturbs them; repetitions are apart in
time. So the repetitions are what is drawn with replacement, all configurations of one together: a
slow one then is slow for both sides of a difference. An interval is the middle 95% of what the
draws give, made wider about the value: drawing from n repetitions understates their spread by
sqrt((n - 1) / n), and its percentiles are the normal's where Student's t is due (Hesterberg, The
American Statistician 69, 2015, on the narrowness of bootstrap intervals from few samples).
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_ckpt.lab.measure.parts import NETWORK, PARTS
from ds_ckpt.lab.measure.samples import Key, StepTime, Trial

DRAWS = 400
_SHARE = 0.95
_NORMAL = 1.960
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5% quantiles of the normal and of Student's t with 1, 2, ... 10 degrees of freedom."""


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval of 95%; NaN where a draw has none."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """The longer side of the interval over the value; infinite at 0, NaN without interval."""
        longer = max(self.high - self.value, self.value - self.low)
        return longer / abs(self.value) if self.value else float("inf")


@dataclass(frozen=True)
class Point:
    """A configuration's steps in short.

    Attributes:
        step_s: median.
        parts_s: means over the steps in the middle half by their length, so that they add up.
    """

    step_s: float
    parts_s: Mapping[str, float]
    in_collectives_s: float

    @property
    def network_s(self) -> float:
        return sum(self.parts_s[name] for name in NETWORK)

    @property
    def exchange_s(self) -> float:
        """Exposed network and the exchange's own work: what another exchange changes."""
        return self.network_s + self.parts_s["compression"]


Lookup = Callable[[Key], Point]


class Repetitions:
    """The trials of every configuration at one rate, by repetition."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        self.trials: dict[Key, dict[int, Trial]] = {}
        for trial in trials:
            self.trials.setdefault(trial.whose, {})[trial.repetition] = trial
        every = [set(numbered) for numbered in self.trials.values()]
        self.numbers = sorted(set.intersection(*every)) if every else []
        """Those that every configuration has taken part in."""
        self._lookups: dict[tuple[int, ...], Lookup] = {}

    def lookup(self, numbers: Sequence[int] | None = None) -> Lookup:
        """Points from these repetitions, which may stand there more than once; all without."""
        chosen = tuple(sorted(self.numbers if numbers is None else numbers))

        @functools.cache
        def at(key: Key) -> Point:
            return _point([step for n in chosen for step in self.trials[key][n].steps])

        return self._lookups.setdefault(chosen, at)

    def estimate(
        self, figures: Callable[[Lookup], Mapping[str, float]], *, seed: int = 0
    ) -> dict[str, Estimate]:
        """Every figure with its interval; those of one draw come from the same repetitions.

        With a single repetition the interval is the value.
        """
        values = figures(self.lookup())
        count, draw = len(self.numbers), random.Random(seed)
        draws = [
            tuple(sorted(draw.choices(self.numbers, k=count)))
            for _ in range(DRAWS if count > 1 else 0)
        ]
        # of few repetitions most draws are alike
        found = {numbers: figures(self.lookup(numbers)) for numbers in set(draws)}
        drawn = [found[numbers] for numbers in draws]
        wider = widening(count)
        return {
            name: _interval(value, [one[name] for one in drawn], wider)
            for name, value in values.items()
        }


def _point(steps: Sequence[StepTime]) -> Point:
    ordered = sorted(steps, key=lambda step: step.step_s)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    return Point(
        statistics.median(step.step_s for step in steps),
        {name: statistics.fmean([s.parts_s[name] for s in middle]) for name in PARTS},
        statistics.fmean([step.in_collectives_s for step in middle]),
    )


def widening(repetitions: int) -> float:
    """The factor by which the ends of the middle 95% of draws move away from the value."""
    free = repetitions - 1
    if free < 1:
        return 1.0
    if free <= len(_STUDENT):
        student = _STUDENT[free - 1]
    else:  # Cornish and Fisher's expansion, its first terms: within 2%
        student = _NORMAL * (1 + (_NORMAL**2 + 1) / (4 * free))
    return student / _NORMAL * math.sqrt(repetitions / free)


def _interval(value: float, drawn: Sequence[float], wider: float) -> Estimate:
    if not drawn:
        return Estimate(value, value, value)
    if any(map(math.isnan, drawn)):
        return Estimate(value, math.nan, math.nan)
    ordered = sorted(drawn)
    cut = round((1 - _SHARE) / 2 * (len(ordered) - 1))
    low, high = ordered[cut], ordered[-1 - cut]
    return Estimate(value, value - wider * (value - low), value + wider * (high - value))
