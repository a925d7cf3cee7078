"""The comparison with real ranks: `deepspeed` launches ZeRO-3, which trains every missing run.

Weights, data, schedule and the loop over runs are those of virtual workers. Rank 0 writes the
results and reports progress.
"""

import dataclasses
import gc
import itertools
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_ckpt
from ds_ckpt.config import load_file
from ds_ckpt.exchange.transport import gather_objects
from ds_ckpt.lab.hosts.backends import Loopback
from ds_ckpt.lab.hosts.heartbeat import begin
from ds_ckpt.lab.hosts.launcher import launch
from ds_ckpt.lab.validate.experiment import (
    SAMPLE_EVERY,
    Contender,
    Outcome,
    Progress,
    RunPlan,
    RunProgress,
    add_result,
    read_candidates,
    read_results,
    train,
    train_missing,
)
from ds_ckpt.lab.validate.task import TaskSpec, open_task
from ds_ckpt.lab.validate.world import StepResult
from ds_ckpt.telemetry.timings import ResidualStats

_STALL_S = 1200.0
"""Longest time between two events: ten slow steps, building an engine, two evaluations."""


def run_processes(plan: RunPlan, results: Path, folder: Path, report: RunProgress) -> None:
    """Train all runs without a result on `plan.task.spec.world` ranks, which add to `results`.

    Raises LaunchError if the ranks failed or hung; finished runs are kept.
    """
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
        if event["kind"] == "progress":
            report(event["name"], event["done"], event["loss"])

    backend = Loopback(plan.task.spec.world, gpus=True)
    launch(backend, __name__, job, folder, stall_s=_STALL_S, on_event=on_event)


def main() -> None:
    """Run a launched rank."""
    heartbeat, job = begin("Trains a comparison; started by deepspeed.")
    os.chdir(job["cwd"])  # the job's paths are relative to it
    task = open_task(TaskSpec(**job["spec"]), device=get_accelerator().current_device_name())
    task.digest = job["digest"]  # the same on every device
    candidates = read_candidates([Path(file) for file in job["files"]], "processes")
    plan, path = RunPlan(task, candidates, job["seeds"], "processes"), Path(job["results"])
    heartbeat.beat(kind="begun")

    def report(name: str, done: int, loss: float) -> None:
        heartbeat.beat(kind="progress", name=name, done=done, loss=loss)

    for result in train_missing(plan, read_results(path), train_zero3, report):
        if dist.get_rank() == 0:
            add_result(path, result)
    dist.barrier()
    dist.destroy_process_group()


def train_zero3(plan: RunPlan, candidate: Contender, seed: int, progress: Progress) -> Outcome:
    """Train one run, on every rank. See `experiment.TrainOne`."""
    spec, task, recipe = plan.task.spec, plan.task, plan.task.spec.recipe()
    config = engine_config(spec, candidate.file, candidate.warm_up(spec))
    engine, *_ = ds_ckpt.initialize(model=task.initial(seed), config=config)
    task.begin(seed)
    sampled: list[ResidualStats] = []
    if not candidate.settings.lossless:
        session = ds_ckpt.session_of(engine)
        assert session is not None, "telemetry is on"
        session.observe(SAMPLE_EVERY, lambda step, stats: sampled.append(stats))

    def train_step() -> StepResult:
        step, skipped = engine.global_steps, engine.skipped_steps
        for group in engine.optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        losses = []
        for micro in range(spec.accumulation):
            loss = engine(**task.inputs(step, micro, dist.get_rank())).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        stats = sampled.pop() if sampled else None
        by_micro_step = zip(*gather_objects(losses), strict=True)
        every = tuple(itertools.chain(*by_micro_step))  # in the order of virtual workers
        return StepResult(every, engine.skipped_steps > skipped, stats)

    outcome = train(task, engine, train_step, spec.steps, progress)
    engine.destroy()
    gc.collect()
    return outcome


def engine_config(spec: TaskSpec, file: str, warmup_steps: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a run: the task's, with a file's sections.

    Without a `file` it is uncompressed. `warmup_steps` is for lossy methods.
    """
    recipe, theirs = spec.recipe(), load_file(file) if file else {}
    section = {**(theirs.get("ds_ckpt") or {}), "telemetry": {"enabled": True}}
    compression = {**(section.get("compression") or {})}
    compression.pop("guard", None)  # its limits come from validation
    if compression.get("method", "none") not in ("none", "dense") or compression.get("rules"):
        # the tuner would let a clock decide what is sent
        exchange = {**(compression.get("exchange") or {}), "autotune": False}
        compression |= {"warmup_steps": warmup_steps, "exchange": exchange}
    if compression:
        section["compression"] = compression
    params = {"lr": recipe.learning_rate, "betas": list(recipe.betas), "torch_adam": True}
    params["weight_decay"] = recipe.weight_decay
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.batch,
        "gradient_accumulation_steps": spec.accumulation,
        "gradient_clipping": recipe.clip,
        "steps_per_print": 1_000_000,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": params},
        "ds_ckpt": section,
    }
    if theirs.get("activation_checkpointing") is not None:
        config["activation_checkpointing"] = theirs["activation_checkpointing"]
    return config


if __name__ == "__main__":
    main()
