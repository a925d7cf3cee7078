"""The tuner: compares candidates by the time of whole steps, and keeps the fastest.

A short exchange does not make a short step: on a fast link DeepSpeed's own reduction can give the
shorter step. So whole steps are timed. A cycle has `COUNTED_STEPS` of each candidate, after one
that is not counted. Ranks add up their medians and the variances of these, so all choose alike. If
the candidates differ too little, another cycle is added. After `MAX_CYCLES` the baseline wins.
After `RECHECK_STEPS` the comparison is repeated. Nothing is saved: a resumed run measures again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger("ds_ckpt")
COUNTED_STEPS = 8
"""Timed steps of each candidate in a cycle; the first step of each is not counted."""
MAX_CYCLES = 16
MIN_Z = 3.0
"""Standard errors by which medians must differ. Assumes that steps scatter independently."""
DECISIVE_RATIO = 1.2
"""Ratio of medians that needs one cycle only. Consecutive steps are more alike than others, which a
standard error does not show and another cycle does."""
RECHECK_STEPS = 1000
"""Steps from a choice to the next comparison."""


class Subject(NamedTuple):
    """Words for the log.

    Attributes:
        title: begins the sentence: "gradients are sent".
        phrases: continues it, by candidate.
        setting: what to write in the configuration instead.
    """

    title: str
    phrases: Mapping[str, str]
    setting: str


def robust_median(times: Sequence[float]) -> tuple[float, float]:
    """Return the median and the variance of its error, for values that are about normal.

    The variance is pi / 2 times that of a mean. The spread is 1.4826 times the median distance to
    the median (Rousseeuw and Croux, JASA 1993), so one pause does not count. NaN for no values.
    """
    if not times:
        return math.nan, math.nan
    at = median(times)
    spread = 1.4826 * median(abs(t - at) for t in times)
    return at, math.pi / 2 * spread**2 / len(times)


class Tuner:
    """Chooses between candidates, alike on all ranks of a group.

    Args:
        candidates: names; the last one is the baseline, which wins unless another one is shown to
            be faster.
        all_reduce: sums a small fp32 tensor over the ranks in place.
        world: number of ranks.
        device: of that tensor.
        subject: words for the log.
        is_logging_rank: whether this rank logs.
        clock: seconds.

    Attributes:
        choice: the last choice; None before the first.
    """

    def __init__(
        self,
        candidates: Sequence[str],
        all_reduce: Callable[[Tensor], object],
        *,
        world: int,
        device: torch.device,
        subject: Subject,
        is_logging_rank: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.candidates = tuple(candidates)
        self._all_reduce, self._world, self._device = all_reduce, world, device
        self._subject, self._is_logging_rank, self._clock = subject, is_logging_rank, clock
        self._ended_s: float | None = None
        self.restart()

    def restart(self) -> None:
        """Forget everything and compare anew."""
        self.choice: str | None = None
        self._compare()

    def _compare(self) -> None:
        self._is_comparing, self._cycles, self._steps = True, 0, 0
        self._times: dict[str, list[float]] = {name: [] for name in self.candidates}

    @property
    def is_comparing(self) -> bool:
        """Return whether steps are being timed."""
        return self._is_comparing

    @property
    def cycle_steps(self) -> int:
        """Steps of a cycle."""
        return len(self.candidates) * (1 + COUNTED_STEPS)

    @property
    def current(self) -> str:
        """The candidate of this step; changes at `step_ended` only."""
        if not self._is_comparing:
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
        if self._is_comparing and self._steps % (1 + COUNTED_STEPS) and before is not None:
            self._times[self.current].append(self._ended_s - before)
        self._steps += 1
        if self._is_comparing and self._steps == self.cycle_steps:
            self._judge()
        elif not self._is_comparing and self._steps == RECHECK_STEPS:
            self._compare()

    def pause(self) -> None:
        """Discard the time of the step that ends next; the step still advances the cycle."""
        self._ended_s = None

    def _judge(self) -> None:
        """Make a choice, or begin another cycle. Without times the first candidate stays."""
        own = torch.tensor(
            [robust_median(times) for times in self._times.values()],
            dtype=torch.float32,
            device=self._device,
        )
        self._all_reduce(own)
        rows = (own / self._world).tolist()
        found = {name: tuple(row) for name, row in zip(self.candidates, rows, strict=True)}
        baseline = self.candidates[-1]
        best = min(self.candidates[:-1], key=lambda name: found[name][0])
        (best_s, best_variance), (baseline_s, baseline_variance) = found[best], found[baseline]
        gap_s = abs(best_s - baseline_s)
        # NaN compares as significant and decisive
        is_significant = not gap_s <= MIN_Z * math.sqrt(best_variance + baseline_variance)
        is_decisive = not gap_s < (DECISIVE_RATIO - 1.0) * min(best_s, baseline_s)
        self._cycles, self._steps = self._cycles + 1, 0
        if self._cycles < (MAX_CYCLES if not is_significant else 1 if is_decisive else 2):
            return
        before = self.choice
        self.choice = baseline if baseline_s < best_s or not is_significant else best
        self._is_comparing = False
        if self._is_logging_rank and self.choice != before:
            phrases = self._subject.phrases
            times = ", ".join(f"{1e3 * s:.1f} ms {phrases[name]}" for name, (s, _) in found.items())
            log.info(
                "ds_ckpt: autotune: %s %s: a step takes %s%s (%s)",
                self._subject.title,
                phrases[self.choice],
                times,
                "" if is_significant else ", no significant difference",
                self._subject.setting,
            )
