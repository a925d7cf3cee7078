"""What `deepspeed` launches for a comparison: trains every run of a job with ZeRO-3, one by one.

The processes tell of their progress and of each finished run's result. Weights, data, schedule and
the loop are those of virtual workers, worker by worker; what trains is DeepSpeed.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_ckpt
from ds_ckpt.config import load_file
from ds_ckpt.hosts.heartbeat import begin
from ds_ckpt.telemetry import Purpose
from ds_ckpt.telemetry.timings import ResidualStats
from ds_ckpt.validation.experiment import far_behind
from ds_ckpt.validation.task import Learner, Task, TaskSpec, open_task
from ds_ckpt.validation.trainer import Outcome, Progress, train
from ds_ckpt.validation.world import Recipe, Step, digest_of


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
        named = {"seed": run["seed"], "name": run["name"]}

        def progress(done: int, loss: float, named: dict[str, Any] = named) -> None:
            heartbeat.beat(kind="progress", **named, done=done, loss=loss)

        outcome, step_s = train_run(
            task, run, curves.get(run["seed"]), job["sample_every"], progress
        )
        if run["file"] is None:
            curves[run["seed"]] = outcome.heldout
        if outcome.diverged and run["lossy"]:
            given_up.add(run["name"])
        heartbeat.beat(kind="result", **named, outcome=dataclasses.asdict(outcome), step_s=step_s)
    dist.barrier()
    dist.destroy_process_group()


def train_run(
    task: Task,
    run: dict[str, Any],
    dense: list[tuple[int, float]] | None,
    sample_every: int,
    progress: Progress | None = None,
) -> tuple[Outcome, float]:
    """One run of a job: its outcome, and wall seconds of a step (median). On every process.

    Args:
        dense: held-out losses of the seed's dense run.
    """
    spec, seed = task.spec, run["seed"]
    warm_up = run["start_step"] if run["lossy"] else 0
    model = task.learner.initial(seed)
    config = engine_config(spec, run["file"], warm_up)
    engine, *_ = ds_ckpt.initialize(model=model, config=config)
    task.learner.begin(seed)
    world = Zero3World(
        engine, task.learner, spec.recipe(), sample_every=sample_every if run["lossy"] else 0
    )
    outcome = train(
        task.learner,
        world,
        spec.steps,
        warm_up=warm_up,
        evaluate_every=spec.evaluate_every,
        hopeless=far_behind(dense) if dense and run["lossy"] else None,
        progress=progress,
    )
    engine.destroy()
    gc.collect()
    return outcome, statistics.median(world.seconds[warm_up:] or world.seconds)


class Zero3World:
    """The processes of a `deepspeed` launch, each with an engine; a `World`, on every one of them.

    Args:
        engine: made by `ds_ckpt.initialize`, with telemetry.
        learner: whose micro-batches are trained on.
        sample_every: as `InProcessWorld`.

    Attributes:
        seconds: of each step, by the clock.
    """

    def __init__(
        self, engine: Any, learner: Learner, recipe: Recipe, *, sample_every: int = 0
    ) -> None:
        self.model, self._learner, self._recipe = engine, learner, recipe
        self.seconds: list[float] = []
        self._left: ResidualStats | None = None
        session = ds_ckpt.session_of(engine)
        assert session is not None, "telemetry is on"
        self._session = session
        if sample_every:
            session.observe(sample_every, self._look)

    def _look(self, step: int, left: ResidualStats) -> None:
        self._left = left

    @property
    def step(self) -> int:
        """See `World`."""
        return len(self.seconds)

    def train_step(self) -> Step:
        """See `World`."""
        engine, counters = self.model, self._session.counters
        for group in engine.optimizer.param_groups:
            group["lr"] = self._recipe.rate(self.step)
        self._left = None
        skipped, sent = engine.skipped_steps, counters.bytes_sent[Purpose.REDUCE]
        started_s = time.perf_counter()
        mine = []
        for micro in range(self._learner.accumulation):
            loss = engine(**self._learner.inputs(self.step, micro, dist.get_rank())).loss
            engine.backward(loss)
            engine.step()
            mine.append(float(loss))
        self.seconds.append(time.perf_counter() - started_s)
        sent = counters.bytes_sent[Purpose.REDUCE] - sent
        return Step(_everyone(mine), sent, engine.skipped_steps > skipped, self._left)

    def residual_norm(self) -> float:
        """See `World`."""
        owed = 0.0
        device = get_accelerator().current_device_name()
        for _, kept in sorted(self._session.residuals.items()):
            residual = kept.to(device)  # NCCL takes none that is kept on the host
            dist.all_reduce(residual)
            owed += float(residual.square().sum())
        return math.sqrt(owed)

    def weights_digest(self) -> str:
        """See `World`."""
        module = self.model.module
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return digest_of(module)


def _everyone(mine: list[float]) -> tuple[float, ...]:
    """Losses of every micro-step and worker, in the order of virtual workers."""
    own = torch.tensor(mine, dtype=torch.float64, device=get_accelerator().current_device_name())
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return tuple(float(part[micro]) for micro in range(len(mine)) for part in parts)


def engine_config(spec: TaskSpec, file: str | None, warmup_steps: int) -> dict[str, Any]:
    """The DeepSpeed configuration of a run: the task's own, with a file's sections of ours.

    Args:
        file: a DeepSpeed JSON file; None: plain DeepSpeed, counted.
        warmup_steps: the dense warm-up of a lossy method.
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
            "warmup_steps": warmup_steps,
            # what is sent must not depend on a clock
            "exchange": {**(compression.get("exchange") or {}), "autotune": False},
        }
    compression.pop("guard", None)  # validation is what limits come from
    if compression:
        ours["compression"] = compression
    ours["telemetry"] = {"enabled": True}
    config["ds_ckpt"] = ours
    if theirs.get("activation_checkpointing") is not None:
        config["activation_checkpointing"] = theirs["activation_checkpointing"]
    return config


if __name__ == "__main__":
    main()
