"""How far runs came, and what it took: steps, bytes and time to where dense training ends."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ds_ckpt.validation.store import Result


@dataclass(frozen=True)
class Reached:
    """What it took to come within the margin of where dense training ends, means over seeds, in
    shares of what dense training took to come there.

    Attributes:
        runs: how many came there, and of how many.
        steps, sent_bytes, seconds: None where not all runs came there.
    """

    runs: tuple[int, int]
    steps: float | None
    sent_bytes: float | None
    seconds: float | None


def curve_of(result: Result, metric: str) -> list[tuple[int, float]]:
    """Held-out loss or accuracy over steps."""
    outcome = result.outcome
    return outcome.accuracy if metric == "accuracy" else outcome.heldout


def final(result: Result, metric: str) -> float:
    """At the end; NaN where there is nothing."""
    curve = curve_of(result, metric)
    return curve[-1][1] if curve else math.nan


def mean(values: Sequence[float]) -> float:
    """NaN of none."""
    return statistics.fmean(values) if values else math.nan


def curves(
    pairs: Sequence[tuple[Result, Result]], metric: str
) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Means over the pairs, of dense runs and of ours, at the evaluations that all have."""
    found = []
    for which in (0, 1):
        curves = [dict(curve_of(pair[which], metric)) for pair in pairs]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        found.append([(step, mean([curve[step] for curve in curves])) for step in steps])
    return found[0], found[1]


@dataclass(frozen=True)
class Clock:
    """What a run has sent and how long it has taken after so many steps.

    Attributes:
        link_mbit: of the network that times are reckoned for where none was measured.
    """

    warm_up: int
    link_mbit: float
    world: int

    def sent_bytes(self, dense: Result, ours: Result, steps: float) -> float:
        """Of gradients, by the busiest worker, 16 bits an element where nothing is compressed."""
        before = min(steps, self.warm_up) if ours is not dense else steps
        after = steps - before
        return before * dense.sixteen_bit_bytes + after * ours.sixteen_bit_bytes

    def seconds(self, dense: Result, ours: Result, steps: float) -> float:
        """Measured, or one worker's computing and its bytes over the link."""
        if ours.step_s and dense.step_s:  # measured, with a wire
            before = min(steps, self.warm_up) if ours is not dense else steps
            return before * dense.step_s + (steps - before) * ours.step_s
        computing = steps * ours.outcome.step_cpu_s / self.world
        return computing + 8 * self.sent_bytes(dense, ours, steps) / (1e6 * self.link_mbit)


def reached(
    pairs: Sequence[tuple[Result, Result]], metric: str, margin: float, clock: Clock
) -> Reached:
    """See `Reached`; pairs are (dense, ours)."""
    shares: list[tuple[float, float, float]] = []
    for dense, ours in pairs:
        end = final(dense, metric)
        target = end - margin if metric == "accuracy" else end * (1 + margin)
        sign = -1 if metric == "accuracy" else 1
        theirs = _first(curve_of(dense, metric), target, sign)
        mine = None if ours.outcome.diverged else _first(curve_of(ours, metric), target, sign)
        if theirs and mine:
            shares.append(
                (
                    mine / theirs,
                    clock.sent_bytes(dense, ours, mine)
                    / (clock.sent_bytes(dense, dense, theirs) or math.inf),
                    clock.seconds(dense, ours, mine) / clock.seconds(dense, dense, theirs),
                )
            )
    runs = (len(shares), len(pairs))
    if not shares or len(shares) < len(pairs):
        return Reached(runs, None, None, None)
    return Reached(runs, *(mean([share[i] for share in shares]) for i in range(3)))


def _first(curve: Sequence[tuple[int, float]], target: float, sign: int) -> float | None:
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
