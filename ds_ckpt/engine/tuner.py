"""The tuner: compares candidates by the time of whole steps, and keeps the fastest.

A cycle has `COUNTED_STEPS` of each candidate, after one that is not counted. Ranks sum their
medians and the variances of these, so all choose alike. If the candidates differ too little,
another cycle is added; after `MAX_CYCLES` the baseline wins. After `RECHECK_STEPS` the comparison
is repeated. Nothing is saved: a resumed run measures again.
"""

import math
import time
from collections.abc import Sequence
from statistics import median

import torch

from ds_ckpt.errors import log

COUNTED_STEPS = 8
"""Timed steps of each candidate in a cycle; the first step of each is not counted."""
MAX_CYCLES = 16
MIN_Z = 3.0
"""Standard errors by which medians must differ. Assumes that steps scatter independently."""
DECISIVE_RATIO = 1.2
"""Ratio of medians that needs one cycle only. Consecutive steps are more alike than others."""
RECHECK_STEPS = 1000
"""Steps from a choice to the next comparison."""


def robust_median(times: Sequence[float]) -> tuple[float, float]:
    """Return the median and the variance of its error for normal values; NaN for no values.

    The spread is 1.4826 times the median distance to the median (Rousseeuw and Croux, JASA 1993).
    """
    if not times:
        return math.nan, math.nan
    at = median(times)
    spread = 1.4826 * median(abs(t - at) for t in times)
    return at, math.pi / 2 * spread**2 / len(times)


class Tuner:
    """Chooses between candidates. All ranks of the program get the same choice.

    The last candidate is the baseline, which wins unless another one is shown to be faster. Times
    are summed on `device`. `choice` is None before the first.
    """

    def __init__(self, subject: str, candidates: Sequence[str], device: torch.device) -> None:
        self.candidates = tuple(candidates)
        self._subject, self._device = subject, device
        self._clock, self._ended_s = time.perf_counter, math.nan
        self.restart()

    def restart(self) -> None:
        """Forget everything and compare anew."""
        self.choice: str | None = None
        self._times_in_words = "no steps compared yet"
        self._compare()

    def _compare(self) -> None:
        self.is_comparing, self._cycles, self._steps = True, 0, 0
        self._times: dict[str, list[float]] = {name: [] for name in self.candidates}

    @property
    def current(self) -> str:
        """The candidate of this step; changes at `step_ended` only."""
        if not self.is_comparing:
            assert self.choice is not None
            return self.choice
        return self.candidates[self._steps // (1 + COUNTED_STEPS)]

    def step_ended(self, *, is_counted: bool = True) -> None:
        """Count a step of the current candidate, unless it was skipped.

        Collective at the end of a cycle: all ranks reach it in the same step.
        """
        before, self._ended_s = self._ended_s, self._clock()
        if not is_counted:
            return
        if self.is_comparing and self._steps % (1 + COUNTED_STEPS) and not math.isnan(before):
            self._times[self.current].append(self._ended_s - before)
        self._steps += 1
        if self.is_comparing and self._steps == len(self.candidates) * (1 + COUNTED_STEPS):
            self._judge()
        elif not self.is_comparing and self._steps == RECHECK_STEPS:
            self._compare()

    def pause(self) -> None:
        """Discard the time of the step that ends next; the step still advances the cycle."""
        self._ended_s = math.nan

    def _judge(self) -> None:
        """Make a choice, or begin another cycle. Without times the first candidate stays."""
        own = [robust_median(times) for times in self._times.values()]
        found = torch.tensor(own, dtype=torch.float32, device=self._device)
        torch.distributed.all_reduce(found)
        medians_s, variances = (found / torch.distributed.get_world_size()).T.tolist()
        best = min(range(len(medians_s) - 1), key=medians_s.__getitem__)
        gap_s = abs(medians_s[best] - medians_s[-1])
        # NaN compares as significant and decisive
        is_significant = not gap_s <= MIN_Z * math.sqrt(variances[best] + variances[-1])
        is_decisive = not gap_s < (DECISIVE_RATIO - 1.0) * min(medians_s[best], medians_s[-1])
        times = [f"{n} {1e3 * s:.1f}" for n, s in zip(self.candidates, medians_s, strict=True)]
        doubt = "; no significant difference" * (not is_significant)
        self._times_in_words = f"ms per step: {', '.join(times)}{doubt}"
        self._cycles, self._steps = self._cycles + 1, 0
        if self._cycles < (MAX_CYCLES if not is_significant else 1 if is_decisive else 2):
            return
        keeps_baseline = medians_s[-1] < medians_s[best] or not is_significant
        before, self.choice = self.choice, self.candidates[-1 if keeps_baseline else best]
        self.is_comparing = False
        if torch.distributed.get_rank() == 0 and self.choice != before:
            log.info("ds_ckpt: %s", self.describe())

    def describe(self) -> str:
        """Return the choice, if there is one, and the times that the ranks compared last."""
        return f"autotune: {self._subject}: {self.choice or 'undecided'} ({self._times_in_words})"
