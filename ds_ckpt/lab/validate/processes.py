"""The comparison with real ranks: `deepspeed` launches ZeRO-3, which trains every missing run.

Weights, data, schedule and the loop over runs are those of virtual workers. Rank 0 writes the
results and reports progress.
"""

from __future__ import annotations

import dataclasses
import gc
import os
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
from ds_ckpt.lab.hosts.backends import Loopback
from ds_ckpt.lab.hosts.heartbeat import begin
from ds_ckpt.lab.hosts.launcher import launch
from ds_ckpt.lab.validate.experiment import Candidate, Plan, Report, read_candidates, train_missing
from ds_ckpt.lab.validate.runs import Outcome, Progress, Store, train
from ds_ckpt.lab.validate.task import Task, TaskSpec, open_task
from ds_ckpt.lab.validate.world import Recipe, Step, digest_of
from ds_ckpt.telemetry import Purpose
from ds_ckpt.telemetry.timings import ResidualStats

_STALL_S = 1200.0
"""Longest time between two events: ten slow steps, building an engine, two evaluations."""


def run_processes(
    plan: Plan, store: Store, results: Path, folder: Path, report: Report | None = None
) -> None:
    """Train all runs without a result on `plan.task.spec.world` ranks.

    Args:
        plan: the runs.
        store: is read again at the end.
        results: the store's file.
        folder: for the job, the events and the log.
        report: called at every tenth step.

    Raises:
        LaunchError: the ranks failed or hung; finished runs are kept.
    """
    if not plan.missing(store):
        return
    folder.mkdir(parents=True, exist_ok=True)
    job = {
        "spec": dataclasses.asdict(plan.task.spec),
        "digest": plan.task.digest,
        "files": [one.file for one in plan.candidates],
        "seeds": list(plan.seeds),
        "results": str(results),
        "cwd": str(Path.cwd()),
    }

    def on_event(event: dict[str, Any]) -> None:
        if report is not None and event["kind"] == "progress":
            report(event["name"], event["done"], event["loss"])

    backend = Loopback(plan.task.spec.world, gpus=True)
    launch(backend, __name__, job, folder, stall_s=_STALL_S, on_event=on_event)
    store.read()


def main() -> None:
    """Run a launched rank."""
    heartbeat, job = begin("Trains a comparison; started by deepspeed.")
    os.chdir(job["cwd"])  # the job's paths are relative to it
    task = open_task(TaskSpec(**job["spec"]), device=_device())
    task.digest = job["digest"]  # the same on every device
    candidates = read_candidates([Path(file) for file in job["files"]])
    plan = Plan(task, candidates, job["seeds"], "processes")
    store = Store(Path(job["results"]), writes=dist.get_rank() == 0)
    heartbeat.beat(kind="begun")

    def report(name: str, done: int, loss: float) -> None:
        heartbeat.beat(kind="progress", name=name, done=done, loss=loss)

    train_missing(plan, store, train_zero3, report)
    dist.barrier()
    dist.destroy_process_group()


def train_zero3(
    plan: Plan, candidate: Candidate, seed: int, progress: Progress | None = None
) -> tuple[Outcome, float]:
    """Train one run, on every rank. See `experiment.TrainOne`."""
    spec, task = plan.task.spec, plan.task
    warm_up = candidate.warm_up(spec)
    recipe = spec.recipe()
    config = engine_config(spec, recipe, candidate.file, warm_up)
    engine, *_ = ds_ckpt.initialize(model=task.initial(seed), config=config)
    task.begin(seed)
    world = Zero3World(engine, task, recipe, sample_every=candidate.sample_every)
    every = max(1, spec.steps // spec.evaluations)
    outcome = train(task, world, spec.steps, evaluate_every=every, progress=progress)
    engine.destroy()
    gc.collect()
    return outcome, statistics.median(world.seconds[warm_up:] or world.seconds)


class Zero3World:
    """A ZeRO-3 engine on every rank of a `deepspeed` launch; a `World`.

    Args:
        engine: made by `ds_ckpt.initialize`, with telemetry.
        task: provides the micro-batches.
        recipe: of the learning rate.
        sample_every: see `InProcessWorld`.

    Attributes:
        seconds: wall time of each step.
    """

    def __init__(self, engine: Any, task: Task, recipe: Recipe, *, sample_every: int = 0) -> None:
        self.model, self._task, self._recipe = engine, task, recipe
        self.seconds: list[float] = []
        self._left: ResidualStats | None = None
        session = ds_ckpt.session_of(engine)
        assert session is not None, "telemetry is on"
        self._session = session
        if sample_every:
            session.observe(sample_every, self._observe)

    def _observe(self, step: int, left: ResidualStats) -> None:
        self._left = left

    @property
    def step(self) -> int:
        """Implement `World`."""
        return len(self.seconds)

    def train_step(self) -> Step:
        """Implement `World`."""
        engine, counters = self.model, self._session.counters
        for group in engine.optimizer.param_groups:
            group["lr"] = self._recipe.rate(self.step)
        self._left = None
        skipped, sent = engine.skipped_steps, counters.bytes_sent[Purpose.REDUCE]
        started_s = time.perf_counter()
        losses = []
        for micro in range(self._task.spec.accumulation):
            loss = engine(**self._task.inputs(self.step, micro, dist.get_rank())).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        self.seconds.append(time.perf_counter() - started_s)
        sent = counters.bytes_sent[Purpose.REDUCE] - sent
        return Step(_all_ranks(losses), sent, engine.skipped_steps > skipped, self._left)

    def weights_digest(self) -> str:
        """Implement `World`."""
        module = self.model.module
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return digest_of(module)


def _device() -> str:
    return str(get_accelerator().current_device_name())


def _all_ranks(losses: list[float]) -> tuple[float, ...]:
    """Gather the losses of every micro-step and rank, in the order of virtual workers."""
    own = torch.tensor(losses, dtype=torch.float64, device=_device())
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return tuple(float(part[micro]) for micro in range(len(losses)) for part in parts)


def engine_config(spec: TaskSpec, recipe: Recipe, file: str, warmup_steps: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a run: the task's, with a file's sections.

    Args:
        spec: of the task.
        recipe: of the optimizer.
        file: a DeepSpeed JSON file; empty for DeepSpeed without compression.
        warmup_steps: uncompressed steps of a lossy method.
    """
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
    theirs = load_file(file) if file else {}
    section = {**(theirs.get("ds_ckpt") or {}), "telemetry": {"enabled": True}}
    compression = {**(section.get("compression") or {})}
    if compression.get("method", "none") not in ("none", "dense") or compression.get("rules"):
        compression |= {
            "warmup_steps": warmup_steps,
            # the tuner would let a clock decide what is sent
            "exchange": {**(compression.get("exchange") or {}), "autotune": False},
        }
    compression.pop("guard", None)  # its limits come from validation
    if compression:
        section["compression"] = compression
    config["ds_ckpt"] = section
    if theirs.get("activation_checkpointing") is not None:
        config["activation_checkpointing"] = theirs["activation_checkpointing"]
    return config


if __name__ == "__main__":
    main()
