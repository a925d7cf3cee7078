"""The loop of a run, over a world that is virtual or real: steps, evaluations, when to stop.

Data order and learning rate belong to the step that the world takes; everything about a run that is
no optimizer step is here. A run of virtual workers saves itself every few hundred steps and goes on
from there. Runs of one seed that begin to compress at the same step are one run until then: the
dense run keeps its state at those steps, and the others start from it, bit-equal to having trained
the warm-up themselves.
"""

from __future__ import annotations

import hashlib
import logging
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_ckpt.files import replacing
from ds_ckpt.validation.task import Learner
from ds_ckpt.validation.world import InProcessWorld, World
from ds_ckpt.workload import versions

logger = logging.getLogger("ds_ckpt")

Progress = Callable[[int, float], None]
"""(steps done, last loss)."""

Hopeless = Callable[[int, float], bool]
"""(steps done, held-out loss) -> whether the run is so far off that it need not go on."""

_CURVES = ("losses", "bytes", "step_cpu_s", "exchange_cpu_s", "heldout", "accuracy", "left")


@dataclass(frozen=True)
class Saving:
    """Where a run of virtual workers keeps its state.

    Attributes:
        folder: for states; made when needed.
        name: of the run, unique in the folder.
        warm_up: names the dense runs that this run may share its warm-up with.
        every: steps from one saved state to the next.
        keep_after: steps after which a dense run keeps its state for others.
    """

    folder: Path
    name: str
    warm_up: str
    every: int = 200
    keep_after: frozenset[int] = frozenset()

    @property
    def partial(self) -> Path:
        return self.folder / f"{self.name}.partial.pt"

    def warm(self, step: int) -> Path:
        """The dense run's state after `step` steps."""
        return self.folder / f"{self.warm_up}.after-{step}.pt"


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        heldout: (steps done, held-out loss) at intervals; the last one is the result.
        accuracy: (steps done, held-out accuracy) likewise; empty for tasks without.
        left: (steps done, compression error, residual norm) where sampled, see `telemetry.timings`.
        digest: of every micro-step's loss and of the weights at the end, bit for bit.
        train: mean training loss of each interval between two of them.
        step_bytes: that the busiest worker sent in a step after the warm-up, gradients in fp32.
        warm_up_bytes: the same, of a step in the warm-up; 0 without.
        step_cpu_s, exchange_cpu_s: CPU seconds, medians over the steps; 0 in processes.
        diverged: the loss left the finite numbers or was hopeless, and the run was stopped.
    """

    heldout: list[tuple[int, float]]
    accuracy: list[tuple[int, float]]
    left: list[tuple[int, float, float]]
    digest: str
    train: list[float]
    step_bytes: float
    warm_up_bytes: float
    residual_norm: float
    step_cpu_s: float
    exchange_cpu_s: float
    diverged: bool


def train(
    learner: Learner,
    world: World,
    steps: int,
    *,
    warm_up: int = 0,
    saving: Saving | None = None,
    evaluate_every: int = 250,
    evaluate_first: bool = True,
    hopeless: Hopeless | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Train to the end, from the last state that was saved.

    Args:
        learner: begun with the run's seed; what `world` trains.
        warm_up: steps at the beginning in which nothing is compressed.
        evaluate_first: evaluate before the first step too.
        hopeless: asked at every evaluation after the warm-up.
        progress: told every tenth step and the last.
    """
    log: dict[str, Any] = {"diverged": False, "digest": ""} | {name: [] for name in _CURVES}
    if saving is not None:
        log = _resumed(world, saving, warm_up) or log

    def evaluate(done: int) -> float:
        score = learner.evaluate(world.model)
        log["heldout"].append((done, score.loss))
        if score.accuracy is not None:
            log["accuracy"].append((done, score.accuracy))
        return score.loss

    if evaluate_first and world.step == 0:
        evaluate(0)
    while world.step < steps and not log["diverged"]:
        step = world.train_step()
        done, loss = world.step, sum(step.losses) / len(step.losses)
        log["losses"].append(loss)
        log["bytes"].append(step.sent_bytes)
        log["step_cpu_s"].append(step.cpu_s)
        log["exchange_cpu_s"].append(step.exchange_cpu_s)
        log["diverged"] = step.skipped or not math.isfinite(loss)
        log["digest"] = chained(log["digest"], step.losses)
        if step.left is not None:
            log["left"].append((done, step.left.error, step.left.residual_norm))
        if done % evaluate_every == 0 or done == steps:
            heldout = evaluate(done)
            if hopeless is not None and done > warm_up:
                log["diverged"] |= not math.isfinite(heldout) or hopeless(done, heldout)
        if saving is not None:
            if done in saving.keep_after:
                _save(saving.warm(done), world, log)
            if done % saving.every == 0 and done < steps:
                _save(saving.partial, world, log)
        if progress is not None and (done % 10 == 0 or done == steps):
            progress(done, loss)
    if saving is not None:
        saving.partial.unlink(missing_ok=True)
    return _outcome(log, warm_up, world)


def chained(digest: str, losses: Iterable[float]) -> str:
    """A digest over what came before and these."""
    text = digest + ",".join(loss.hex() for loss in losses)
    return hashlib.sha256(text.encode()).hexdigest()


def _outcome(log: dict[str, Any], warm_up: int, world: World) -> Outcome:
    heldout = [(int(step), float(loss)) for step, loss in log["heldout"]]
    train, before = [], 0
    for step in (step for step, _ in heldout if step):
        train.append(statistics.fmean(log["losses"][before:step]))
        before = step
    warm, rest = log["bytes"][:warm_up], log["bytes"][warm_up:]
    said = f"{log['digest']}{world.weights_digest()}"
    return Outcome(
        heldout=heldout,
        accuracy=[(int(step), float(share)) for step, share in log["accuracy"]],
        left=[(int(step), float(error), float(norm)) for step, error, norm in log["left"]],
        digest=hashlib.sha256(said.encode()).hexdigest(),
        train=train,
        step_bytes=statistics.fmean(rest) if rest else 0.0,
        warm_up_bytes=statistics.fmean(warm) if warm else 0.0,
        residual_norm=world.residual_norm(),
        step_cpu_s=statistics.median(log["step_cpu_s"]),
        exchange_cpu_s=statistics.median(log["exchange_cpu_s"][warm_up:] or [0.0]),
        diverged=bool(log["diverged"]),
    )


# States of unfinished runs, and of warm-ups that are shared


def _save(path: Path, world: World, log: dict[str, Any]) -> None:
    assert isinstance(world, InProcessWorld), "processes do not save themselves"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        state = {"training": world.state_dict(), "log": log, "versions": virtual_versions()}
        torch.save(state, unfinished)


def _resumed(world: World, saving: Saving, warm_up: int) -> dict[str, Any] | None:
    assert isinstance(world, InProcessWorld), "processes do not save themselves"
    for path in (saving.partial, *([saving.warm(warm_up)] if warm_up else [])):
        if path.exists():
            state = torch.load(path, weights_only=True)
            if _of_these_versions(path, state.get("versions")):
                world.load_state_dict(state["training"])
                log: dict[str, Any] = state["log"]
                return log
    return None


def _of_these_versions(path: Path, then: dict[str, str] | None) -> bool:
    """Whether a run may go on from a state: its first steps would be of other packages than its
    record says."""
    now = virtual_versions()
    if then == now:
        return True
    others = [f"{n} {then.get(n)}" for n in now if then.get(n) != now[n]] if then else []
    made_with = ", ".join(others) or "unknown versions"
    logger.warning("%s is of %s: the run does not go on from it but begins anew", path, made_with)
    return False


def virtual_versions() -> dict[str, Any]:
    """Of what runs of virtual workers depend on: DeepSpeed has no part in them."""
    return {name: found for name, found in versions().items() if name != "deepspeed"}
