"""What `deepspeed` launches for a comparison: trains every run of a job with ZeRO-3, one by one.

Process 0 writes events: that it has begun, progress, and each finished run's result. Weights, data
and schedule are those of virtual workers, worker by worker; what trains is DeepSpeed.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import math
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_ckpt
from ds_ckpt.config import load_file
from ds_ckpt.hosts.heartbeat import Heartbeat, begin
from ds_ckpt.telemetry import Purpose
from ds_ckpt.telemetry.left import Left
from ds_ckpt.validation.cell import Outcome, chained, digest_of
from ds_ckpt.validation.experiment import far_behind
from ds_ckpt.validation.run import moved
from ds_ckpt.validation.tasks import Opened, TaskSpec, open_task


def main() -> None:
    """Entry point of every process."""
    heartbeat, job = begin("Trains a comparison; started by deepspeed.")
    device = get_accelerator().current_device_name()
    task = open_task(TaskSpec(**job["spec"]), Path(job["folder"]), device=str(device))
    heartbeat.beat(kind="begun")
    curves = {int(seed): curve for seed, curve in job["dense_curves"].items()}
    given_up: set[str] = set()
    for run in job["runs"]:
        if run["name"] in given_up:
            continue
        outcome, step_s = _train(task, run, curves.get(run["seed"]), job["sample_every"], heartbeat)
        if run["file"] is None:
            curves[run["seed"]] = outcome.heldout
        if outcome.diverged and run["lossy"]:
            given_up.add(run["name"])
        heartbeat.beat(
            kind="result",
            seed=run["seed"],
            name=run["name"],
            outcome=dataclasses.asdict(outcome),
            step_s=step_s,
        )
    dist.barrier()
    dist.destroy_process_group()


def engine_config(spec: TaskSpec, file: str | None, start_step: int) -> dict[str, Any]:
    """The DeepSpeed configuration of a run: the task's own, with a file's sections of ours.

    Args:
        file: a DeepSpeed JSON file; None: plain DeepSpeed, counted.
        start_step: the dense warm-up of a lossy method.
    """
    recipe = spec.recipe()
    optimizer = {
        "lr": recipe.learning_rate,
        "betas": list(recipe.betas),
        "weight_decay": recipe.weight_decay,
        "torch_adam": True,
    }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.batch,
        "gradient_accumulation_steps": spec.accumulation,
        "gradient_clipping": recipe.clip,
        "steps_per_print": 1_000_000,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": optimizer},
    }
    theirs = load_file(file) if file is not None else {}
    ours = {**theirs.get("ds_ckpt", {})}
    compression = {**(ours.get("compression") or {})}
    if compression.get("method", "none") not in ("none", "dense") or compression.get("rules"):
        compression |= {
            "start_step": start_step,
            # what is sent must not depend on a clock
            "exchange": {**(compression.get("exchange") or {}), "gate": False},
        }
    compression.pop("guard", None)  # validation is what limits come from
    if compression:
        ours["compression"] = compression
    ours["telemetry"] = {"enabled": True}
    config["ds_ckpt"] = ours
    if theirs.get("activation_checkpointing") is not None:
        config["activation_checkpointing"] = theirs["activation_checkpointing"]
    return config


@dataclass
class _Log:
    """What a run has come to so far, the same on every process."""

    digest: str = ""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)
    accuracy: list[tuple[int, float]] = field(default_factory=list)
    left: list[tuple[int, float, float]] = field(default_factory=list)
    diverged: bool = False

    def look(self, step: int, left: Left) -> None:
        self.left.append((step, left.error, left.residual_norm))


def _train(
    task: Opened,
    run: dict[str, Any],
    dense: list[tuple[int, float]] | None,
    sample_every: int,
    heartbeat: Heartbeat,
) -> tuple[Outcome, float]:
    spec, seed = task.spec, run["seed"]
    start = run["start_step"] if run["lossy"] else 0
    model = task.run.initial(seed)
    config = engine_config(spec, run["file"], start)
    engine, *_ = ds_ckpt.initialize(model=model, config=config)
    session = ds_ckpt.session_of(engine)
    assert session is not None, "telemetry is on"
    task.run.begin(seed)
    log = _Log()
    if run["lossy"]:
        session.observe(sample_every, log.look)
    hopeless = far_behind(dense) if dense and run["lossy"] else None
    recipe = spec.recipe()
    _evaluate(task, engine, 0, log)
    while len(log.losses) < spec.steps and not log.diverged:
        step = len(log.losses)
        for group in engine.optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        skipped, sent = engine.skipped_steps, session.counters.bytes_sent[Purpose.REDUCE]
        started_s = time.perf_counter()
        mine = _step(task, engine, step)
        log.seconds.append(time.perf_counter() - started_s)
        log.sent.append(session.counters.bytes_sent[Purpose.REDUCE] - sent)
        everyone = _everyone(mine)
        log.losses.append(sum(everyone) / len(everyone))
        log.digest = chained(log.digest, everyone)
        log.diverged = engine.skipped_steps > skipped or not math.isfinite(log.losses[-1])
        done = step + 1
        if done % spec.evaluate_every == 0 or done == spec.steps:
            loss = _evaluate(task, engine, done, log)
            if hopeless is not None and done > start:
                log.diverged |= not math.isfinite(loss) or hopeless(done, loss)
        if done % 10 == 0 or done == spec.steps:
            heartbeat.beat(
                kind="progress", seed=seed, name=run["name"], done=done, loss=log.losses[-1]
            )
    outcome = _outcome(log, start, engine)
    engine.destroy()
    gc.collect()
    return outcome, statistics.median(log.seconds[start:] or log.seconds)


def _step(task: Opened, engine: Any, step: int) -> list[float]:
    """Losses of this process's micro-batches."""
    device, losses = get_accelerator().current_device_name(), []
    for micro in range(task.spec.accumulation):
        inputs = moved(task.run.inputs(step, micro, dist.get_rank()), device)
        loss = engine(**inputs).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def _everyone(mine: list[float]) -> list[float]:
    """Losses of every micro-step and worker, in the order of virtual workers."""
    world = dist.get_world_size()
    device = get_accelerator().current_device_name()
    own = torch.tensor(mine, dtype=torch.float64, device=device)
    parts = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(parts, own)
    return [float(part[micro]) for micro in range(len(mine)) for part in parts]


def _evaluate(task: Opened, engine: Any, done: int, log: _Log) -> float:
    engine.eval()
    score = task.run.evaluate(engine)
    engine.train()
    log.heldout.append((done, score.loss))
    if score.accuracy is not None:
        log.accuracy.append((done, score.accuracy))
    return score.loss


def _outcome(log: _Log, start: int, engine: Any) -> Outcome:
    session = ds_ckpt.session_of(engine)
    owed = 0.0
    device = get_accelerator().current_device_name()
    for _, kept in sorted(session.residuals.items() if session else ()):
        residual = kept.to(device)  # NCCL takes none that is kept on the host
        dist.all_reduce(residual)
        owed += float(residual.square().sum())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = digest_of(engine.module)
    rest = log.sent[start:]
    return Outcome(
        heldout=log.heldout,
        accuracy=log.accuracy,
        left=log.left,
        digest=hashlib.sha256(f"{log.digest}{weights}".encode()).hexdigest(),
        train=[],
        step_bytes=statistics.fmean(rest) if rest else 0.0,
        warm_up_bytes=statistics.fmean(log.sent[:start]) if start else 0.0,
        residual_norm=math.sqrt(owed),
        step_cpu_s=0.0,
        exchange_cpu_s=0.0,
        diverged=log.diverged,
    )


if __name__ == "__main__":
    main()
