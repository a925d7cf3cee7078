"""The loop of a run, over a world that is virtual or real: steps, evaluations, when to stop.

Data order and learning rate belong to the step that the world takes; everything about a run that is
no optimizer step is here.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ds_ckpt.lab.validate.task import Learner
from ds_ckpt.lab.validate.world import World

Progress = Callable[[int, float], None]
"""(steps done, last loss)."""

Hopeless = Callable[[int, float], bool]
"""(steps done, held-out loss) -> whether the run is so far off that it need not go on."""

Curve = list[tuple[int, float]]
"""(steps done, held-out loss or accuracy)."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        heldout: held-out loss at intervals; the last one is the result.
        accuracy: held-out accuracy likewise; empty for tasks without.
        left: (steps done, compression error, residual norm) where sampled, see `telemetry.timings`.
        digest: of every micro-step's loss and of the weights at the end, bit for bit.
        train: mean training loss of each interval between two of them.
        step_bytes: that the busiest worker sent in a step after the warm-up, gradients in fp32.
        warm_up_bytes: the same, of a step in the warm-up; 0 without.
        step_cpu_s, exchange_cpu_s: CPU seconds, medians over the steps; 0 in processes.
        diverged: the loss left the finite numbers or was hopeless, and the run was stopped.
    """

    heldout: Curve
    accuracy: Curve
    left: list[tuple[int, float, float]]
    digest: str
    train: list[float]
    step_bytes: float
    warm_up_bytes: float
    residual_norm: float
    step_cpu_s: float
    exchange_cpu_s: float
    diverged: bool

    def curve(self, metric: str) -> Curve:
        """Held-out loss or accuracy over steps."""
        return self.accuracy if metric == "accuracy" else self.heldout

    def final(self, metric: str) -> float:
        """At the end; NaN where there is nothing."""
        curve = self.curve(metric)
        return curve[-1][1] if curve else math.nan


def train(
    learner: Learner,
    world: World,
    steps: int,
    *,
    warm_up: int = 0,
    evaluate_every: int = 250,
    evaluate_first: bool = True,
    hopeless: Hopeless | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Train to the end.

    Args:
        learner: begun with the run's seed; what `world` trains.
        warm_up: steps at the beginning in which nothing is compressed.
        evaluate_first: evaluate before the first step too.
        hopeless: asked at every evaluation after the warm-up.
        progress: told every tenth step and the last.
    """
    heldout: Curve = []
    accuracy: Curve = []
    left: list[tuple[int, float, float]] = []
    means: list[float] = []
    interval: list[float] = []
    sent_bytes: list[int] = []
    cpu_s: list[float] = []
    exchange_cpu_s: list[float] = []
    digest, diverged = "", False

    def evaluate(done: int) -> float:
        score = learner.evaluate(world.model)
        heldout.append((done, score.loss))
        if score.accuracy is not None:
            accuracy.append((done, score.accuracy))
        return score.loss

    if evaluate_first:
        evaluate(0)
    while world.step < steps and not diverged:
        step = world.train_step()
        done, loss = world.step, sum(step.losses) / len(step.losses)
        interval.append(loss)
        sent_bytes.append(step.sent_bytes)
        cpu_s.append(step.cpu_s)
        exchange_cpu_s.append(step.exchange_cpu_s)
        diverged = step.skipped or not math.isfinite(loss)
        digest = chained(digest, step.losses)
        if step.left is not None:
            left.append((done, step.left.error, step.left.residual_norm))
        if done % evaluate_every == 0 or done == steps:
            now = evaluate(done)
            means.append(statistics.fmean(interval))
            interval.clear()
            if hopeless is not None and done > warm_up:
                diverged |= not math.isfinite(now) or hopeless(done, now)
        if progress is not None and (done % 10 == 0 or done == steps):
            progress(done, loss)
    warm, rest = sent_bytes[:warm_up], sent_bytes[warm_up:]
    return Outcome(
        heldout=heldout,
        accuracy=accuracy,
        left=left,
        digest=hashlib.sha256(f"{digest}{world.weights_digest()}".encode()).hexdigest(),
        train=means,
        step_bytes=statistics.fmean(rest) if rest else 0.0,
        warm_up_bytes=statistics.fmean(warm) if warm else 0.0,
        residual_norm=world.residual_norm(),
        step_cpu_s=statistics.median(cpu_s),
        exchange_cpu_s=statistics.median(exchange_cpu_s[warm_up:] or [0.0]),
        diverged=diverged,
    )


def chained(digest: str, losses: Iterable[float]) -> str:
    """A digest over what came before and these."""
    text = digest + ",".join(loss.hex() for loss in losses)
    return hashlib.sha256(text.encode()).hexdigest()
