"""The real world: `deepspeed` launches ZeRO-3 processes, which train every run that is missing.

Weights, data, schedule and the loop over runs are those of virtual workers, worker by worker; what
trains is DeepSpeed. Process 0 keeps the results and tells of progress.
"""

from __future__ import annotations

import dataclasses
import gc
import math
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
from ds_ckpt.errors import Problem, UnsupportedError
from ds_ckpt.lab.hosts.backends import Loopback
from ds_ckpt.lab.hosts.heartbeat import begin
from ds_ckpt.lab.hosts.launcher import launch
from ds_ckpt.lab.validate.experiment import Candidate, Plan, Tell, read_candidates, train_missing
from ds_ckpt.lab.validate.store import Store
from ds_ckpt.lab.validate.task import Learner, TaskSpec, open_task
from ds_ckpt.lab.validate.trainer import Hopeless, Outcome, Progress, train
from ds_ckpt.lab.validate.world import Recipe, Step, digest_of
from ds_ckpt.telemetry import Purpose
from ds_ckpt.telemetry.timings import ResidualStats

_STEP_S = 60.0
"""How long a step may take before the launch counts as hung."""
_SILENT_S = 10 * _STEP_S + 600.0
"""From one event to the next: ten steps, an engine that is built, evaluations before and after."""


def run_processes(
    plan: Plan, store: Store, results: Path, folder: Path, tell: Tell | None = None
) -> None:
    """Train what has no result yet in `plan.task.spec.world` processes.

    Args:
        results: the store's file.
        folder: for the job, the events and the log.
        tell: as of `train_missing`.

    Raises:
        LaunchError: the processes failed or hung; what was finished before is kept.
        UnsupportedError: changes of weights travel in few bits in one of the files.
    """
    for one in plan.candidates:
        if one.weight_bits is not None:
            raise UnsupportedError(
                Problem(
                    where=f"{one.file}: $.ds_ckpt.weights.deltas",
                    found=f'"{one.plugin.weights.deltas}"',
                    why="the processes share one host, between hosts alone weights travel",
                    remedy="validate it without --processes: virtual workers hold such weights",
                )
            )
    if not plan.missing(store):
        return
    folder.mkdir(parents=True, exist_ok=True)
    job = {
        "spec": dataclasses.asdict(plan.task.spec),
        "digest": plan.task.digest,
        "files": [one.file for one in plan.candidates],
        "seeds": list(plan.seeds),
        "results": str(results),
        "states": str(folder / "states"),
        "cwd": str(Path.cwd()),
    }

    def heard(event: dict[str, Any]) -> None:
        if tell is not None and event["kind"] == "progress":
            tell(event["name"], event["done"], event["loss"])

    backend = Loopback(plan.task.spec.world, gpus=True)
    launch(backend, __name__, job, folder, stall_s=_SILENT_S, heard=heard)
    store.read()


def main() -> None:
    """Entry point of every process."""
    heartbeat, job = begin("Trains a comparison; started by deepspeed.")
    os.chdir(job["cwd"])  # what the command was given is named from there
    task = open_task(TaskSpec(**job["spec"]), Path(job["states"]), device=_device())
    task = dataclasses.replace(task, digest=job["digest"])  # whatever the device is called
    candidates = read_candidates([Path(file) for file in job["files"]])
    plan = Plan(task, candidates, job["seeds"], "processes")
    store = Store(Path(job["results"]), writes=dist.get_rank() == 0)
    heartbeat.beat(kind="begun")

    def tell(name: str, done: int, loss: float) -> None:
        heartbeat.beat(kind="progress", name=name, done=done, loss=loss)

    train_missing(plan, store, train_zero3, tell)
    dist.barrier()
    dist.destroy_process_group()


def train_zero3(
    plan: Plan,
    candidate: Candidate,
    seed: int,
    hopeless: Hopeless | None = None,
    progress: Progress | None = None,
) -> tuple[Outcome, float]:
    """One run, and wall seconds of a step (median). On every process."""
    spec, learner = plan.task.spec, plan.task.learner
    warm_up = candidate.warm_up(spec.steps)
    recipe = plan.recipe(candidate)
    config = engine_config(spec, recipe, candidate.file, warm_up)
    engine, *_ = ds_ckpt.initialize(model=learner.initial(seed), config=config)
    learner.begin(seed)
    world = Zero3World(engine, learner, recipe, sample_every=candidate.sample_every)
    outcome = train(
        learner,
        world,
        spec.steps,
        warm_up=warm_up,
        evaluate_every=spec.evaluate_every,
        hopeless=hopeless,
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
        for _, kept in sorted(self._session.residuals.items()):
            residual = kept.to(_device())  # NCCL takes none that is kept on the host
            dist.all_reduce(residual)
            owed += float(residual.square().sum())
        return math.sqrt(owed)

    def weights_digest(self) -> str:
        """See `World`."""
        module = self.model.module
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return digest_of(module)


def _device() -> str:
    return str(get_accelerator().current_device_name())


def _everyone(mine: list[float]) -> tuple[float, ...]:
    """Losses of every micro-step and worker, in the order of virtual workers."""
    own = torch.tensor(mine, dtype=torch.float64, device=_device())
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return tuple(float(part[micro]) for micro in range(len(mine)) for part in parts)


def engine_config(spec: TaskSpec, recipe: Recipe, file: str, warmup_steps: int) -> dict[str, Any]:
    """The DeepSpeed configuration of a run: the task's own, with a file's sections of ours.

    Args:
        file: a DeepSpeed JSON file; empty: plain DeepSpeed, counted.
        warmup_steps: the dense warm-up of a lossy method.
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
    ours = {**(theirs.get("ds_ckpt") or {})}
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
