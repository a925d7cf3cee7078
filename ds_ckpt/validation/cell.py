"""One run of a comparison: a config, a seed, its curve and its bytes. Interruptible.

A run saves itself every few hundred steps and goes on from there. Runs of one seed that begin to
compress at the same step are one run until then: the dense run keeps its state at those steps, and
the others start from it, bit-equal to having trained the warm-up themselves.
"""

from __future__ import annotations

import hashlib
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ds_ckpt.exchange.build import ExchangeSettings
from ds_ckpt.files import replacing
from ds_ckpt.validation.candidates import virtual_versions
from ds_ckpt.validation.run import Run, Score
from ds_ckpt.validation.virtual_training import Recipe, VirtualTraining
from ds_ckpt.validation.virtual_workers import VirtualWorkers

logger = logging.getLogger("ds_ckpt")

Progress = Callable[[int, float], None]
"""(steps done, last loss)."""

Hopeless = Callable[[int, float], bool]
"""(steps done, held-out loss) -> whether the run is so far off that it need not go on."""


@dataclass(frozen=True)
class Saving:
    """Where a run keeps its state.

    Attributes:
        folder: for states; made when needed.
        name: of the run, unique in the folder.
        warm_up: names the dense runs that this run may share its warm-up with.
        every: steps from one saved state to the next.
    """

    folder: Path
    name: str
    warm_up: str
    every: int = 200

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
        step_cpu_s, exchange_cpu_s: CPU seconds, medians over the steps.
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


def train_cell(
    run: Run,
    settings: ExchangeSettings,
    recipe: Recipe,
    saving: Saving,
    *,
    evaluate_every: int = 250,
    evaluate_first: bool = False,
    sample_every: int = 0,
    keep_warm: Iterable[int] = (),
    hopeless: Hopeless | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Train `run` to the end of the recipe, from the last state that was saved.

    Args:
        run: begun with the run's seed.
        evaluate_first: evaluate before the first step too.
        sample_every: as `VirtualTraining`.
        keep_warm: steps after which a dense run keeps its state for others.
        hopeless: asked at every evaluation after the warm-up.
        progress: told every tenth step.
    """
    task = run.task
    training = VirtualTraining(
        run.model,
        run.loss,
        recipe,
        settings,
        world=task.world,
        accumulation=task.accumulation,
        sample_every=sample_every,
    )
    dense = settings.lossless
    start = 0 if dense else settings.start_step
    log = _resume(training, saving, start)
    keep = set(keep_warm) if dense else set()
    if evaluate_first and training.step == 0:
        _evaluate(run, 0, log)
    while training.step < recipe.steps and not log["diverged"]:
        started_s = time.process_time()
        report = training.train_step()
        log["step_cpu_s"].append(time.process_time() - started_s)
        log["exchange_cpu_s"].append(report.exchange_cpu_s)
        log["losses"].append(sum(report.losses) / len(report.losses))
        log["bytes"].append(report.sent_bytes)
        log["diverged"] = report.skipped or not math.isfinite(log["losses"][-1])
        log["digest"] = chained(log["digest"], report.losses)
        done = training.step
        if report.left is not None:
            log["left"].append((done, report.left.error, report.left.residual_norm))
        if done % evaluate_every == 0 or done == recipe.steps:
            loss = _evaluate(run, done, log).loss
            if hopeless is not None and done > start:
                log["diverged"] |= not math.isfinite(loss) or hopeless(done, loss)
        if done in keep:
            _save(saving.warm(done), training, log)
        if done % saving.every == 0 and done < recipe.steps:
            _save(saving.partial, training, log)
        if progress is not None and done % 10 == 0:
            progress(done, log["losses"][-1])
    norm = training.workers.residual_norm()
    saving.partial.unlink(missing_ok=True)
    return _outcome(log, start, norm, digest_of(run.model))


def _evaluate(run: Run, done: int, log: dict[str, Any]) -> Score:
    score = run.evaluate()
    log["heldout"].append((done, score.loss))
    if score.accuracy is not None:
        log["accuracy"].append((done, score.accuracy))
    return score


def chained(digest: str, losses: Iterable[float]) -> str:
    """A digest over what came before and these."""
    text = digest + ",".join(loss.hex() for loss in losses)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(model: torch.nn.Module) -> str:
    """Of all weights and buffers, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _resume(training: VirtualTraining, saving: Saving, start: int) -> dict[str, Any]:
    for path in (saving.partial, *([saving.warm(start)] if start else [])):
        if path.exists():
            state = torch.load(path, weights_only=True)
            if not _of_these_versions(path, state.get("versions")):
                continue
            training.load_state_dict(state["training"])
            log: dict[str, Any] = state["log"]
            return log
    lists = ("losses", "bytes", "step_cpu_s", "exchange_cpu_s", "heldout", "accuracy", "left")
    return {"diverged": False, "digest": ""} | {name: [] for name in lists}


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


def _save(path: Path, training: VirtualTraining, log: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        state = {"training": training.state_dict(), "log": log, "versions": virtual_versions()}
        torch.save(state, unfinished)


def _outcome(log: dict[str, Any], start: int, residual_norm: float, weights: str) -> Outcome:
    heldout = [(int(step), float(loss)) for step, loss in log["heldout"]]
    train, before = [], 0
    for step in (step for step, _ in heldout if step):
        train.append(statistics.fmean(log["losses"][before:step]))
        before = step
    warm, rest = log["bytes"][:start], log["bytes"][start:]
    return Outcome(
        heldout=heldout,
        accuracy=[(int(step), float(share)) for step, share in log["accuracy"]],
        left=[(int(step), float(error), float(norm)) for step, error, norm in log["left"]],
        digest=hashlib.sha256(f"{log['digest']}{weights}".encode()).hexdigest(),
        train=train,
        step_bytes=statistics.fmean(rest) if rest else 0.0,
        warm_up_bytes=statistics.fmean(warm) if warm else 0.0,
        residual_norm=residual_norm,
        step_cpu_s=statistics.median(log["step_cpu_s"]),
        exchange_cpu_s=statistics.median(log["exchange_cpu_s"][start:] or [0.0]),
        diverged=bool(log["diverged"]),
    )


def sixteen_bit_step_bytes(
    settings: ExchangeSettings,
    shapes: Sequence[tuple[str, torch.Size]],
    world: int,
    *,
    accumulation: int = 1,
    embeddings: frozenset[str] = frozenset(),
) -> float:
    """Bytes that the busiest of `world` workers sends in a step where gradients are bfloat16.

    Counted on two steps, since a method may alternate. What travels whole then takes 16 bits.

    Args:
        accumulation, embeddings: as `VirtualWorkers`.
    """
    workers = VirtualWorkers(
        replace(settings, start_step=0),
        world,
        [name for name, _ in shapes],
        [shape.numel() for _, shape in shapes],
        accumulation=accumulation,
        embeddings=embeddings,
    )
    for micro in range(2 * accumulation):
        gradients = [
            [torch.randn(shape, dtype=torch.bfloat16) for _, shape in shapes] for _ in range(world)
        ]
        last = (micro + 1) % accumulation == 0
        workers.average(gradients, at_boundary=last)
        if last:
            workers.step_ended(skipped=False)
    return workers.sent_bytes / 2
