"""Compare dense training with every candidate, seed by seed: candidates and missing runs.

Candidates are read from DeepSpeed JSON files, of which the `ds_ckpt` section counts. Optimizer,
batch and schedule are the task's, so that pairs differ in that section alone.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import torch

from ds_ckpt.config import PluginConfig, load_file, parse
from ds_ckpt.config.compression import exchange_settings
from ds_ckpt.config.paths import lookup
from ds_ckpt.config.verdicts import decisive
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.exchange.method_rules import ExchangeSettings, embeddings_of
from ds_ckpt.lab.validate.runs import Outcome, Progress, Result, train
from ds_ckpt.lab.validate.task import Task, TaskSpec
from ds_ckpt.lab.validate.world import DENSE_SETTINGS, InProcessWorld, sixteen_bit_step_bytes
from ds_ckpt.lab.workload import versions

Mode = Literal["virtual", "processes"]
SAMPLE_EVERY = 10
"""Steps between two measurements of the residuals."""
Results = Mapping[str, Result]
"""By `Plan.key`."""
Report = Callable[[str, int, float], object]
"""(name of the run, steps done, last loss)."""


@dataclass(frozen=True)
class Contender:
    """One configuration: `dense`, or a file with the settings of its exchange."""

    name: str
    file: str
    plugin: PluginConfig
    settings: ExchangeSettings

    @property
    def lossy(self) -> bool:
        """Return True if gradients may differ; otherwise every bit of a run must be equal."""
        return not self.settings.lossless

    def settings_for(self, spec: TaskSpec) -> ExchangeSettings:
        """Return the settings with the warm-up cut to a quarter of the run, or little is judged."""
        warm_up = min(self.settings.warmup_steps, spec.steps // 4)
        return dataclasses.replace(self.settings, warmup_steps=warm_up)

    def warm_up(self, spec: TaskSpec) -> int:
        """Return the number of uncompressed steps of a run; 0 if nothing is lossy."""
        return self.settings_for(spec).warmup_steps if self.lossy else 0


DENSE = Contender("dense", "", PluginConfig(), DENSE_SETTINGS)


def read_candidates(files: Sequence[Path], mode: Mode = "virtual") -> list[Contender]:
    """Read the candidates of these files, with unique names.

    Raises ConfigError if a file is invalid, or has nothing that can be judged.
    """
    found: list[Contender] = []
    for path in files:
        config = load_file(path)
        compression = lookup(config, ("ds_ckpt", "compression"))
        if isinstance(compression, dict):
            compression.pop("guard", None)  # its limits come from validation
        plugin = parse(config, source=str(path))
        method = plugin.compression.method
        settings = DENSE_SETTINGS if method == "none" else exchange_settings(plugin.compression)
        taken = path.stem in (DENSE.name, *(one.name for one in found))
        name = str(path.with_suffix("")) if taken else path.stem
        candidate = Contender(name, str(path), plugin, settings)
        changes_anything = method != "none" or plugin.activation.active
        if not (candidate.lossy or (mode == "processes" and changes_anything)):
            why = (
                "uncompressed training would be compared with itself: virtual workers only compress"
            )
            remedy = (
                "compare checkpointing and the method dense with --processes 2, weights between "
                "nodes with ds-ckpt measure --weights"
            )
            raise ConfigError(Problem(str(path), "no lossy compression", why, remedy))
        found.append(candidate)
    return found


@dataclass(frozen=True)
class Plan:
    """All runs of a task: every candidate and dense training, for every seed."""

    task: Task
    candidates: Sequence[Contender]
    seeds: Sequence[int]
    mode: Mode = "virtual"

    def key(self, candidate: Contender, seed: int) -> str:
        """Return a digest of everything that a run's numbers depend on."""
        warm_up = {"warmup_steps": candidate.warm_up(self.task.spec)}
        settings = decisive(candidate.plugin.compression.model_copy(update=warm_up))
        activation = candidate.plugin.activation
        recomputed = activation.model_dump(mode="json") if activation.active else None
        run = self.task.digest, settings, recomputed, seed, self.mode, environment(self.mode)
        return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:16]

    def missing(self, results: Results) -> list[tuple[int, Contender]]:
        """Return the runs without a result, by seed and dense ones first, equal ones once."""
        wanted: dict[str, tuple[int, Contender]] = {}
        for candidate in (DENSE, *self.candidates):
            for seed in self.seeds:
                if (key := self.key(candidate, seed)) not in results:
                    wanted.setdefault(key, (seed, candidate))
        return sorted(wanted.values(), key=lambda run: self.seeds.index(run[0]))


TrainOne = Callable[[Plan, Contender, int, Progress], Outcome]
"""Train one run."""


def train_missing(
    plan: Plan, results: Results, train_one: TrainOne, report: Report
) -> Iterator[Result]:
    """Train all runs without a result and yield theirs. `report` is called at every tenth step."""
    spec, about = plan.task.spec, environment(plan.mode)
    for seed, candidate in plan.missing(results):
        name = f"seed {seed}, {candidate.name}"
        outcome = train_one(plan, candidate, seed, functools.partial(report, name))
        sent_bytes = sixteen_bit_step_bytes(
            candidate.settings_for(spec),
            plan.task.shapes,
            spec.world,
            accumulation=spec.accumulation,
            embeddings=embeddings_of(plan.task.model),
        )
        day = datetime.now(timezone.utc).date().isoformat()
        yield Result(plan.key(candidate, seed), name, outcome, sent_bytes, about, day)


def environment(mode: Mode) -> dict[str, str]:
    """Return the versions, and for ZeRO-3 ranks the accelerator, that a result depends on."""
    found = versions()
    if mode == "processes":
        available = torch.cuda.is_available()
        found["accelerator"] = torch.cuda.get_device_name() if available else "cpu"
    return found


def train_virtual(plan: Plan, candidate: Contender, seed: int, progress: Progress) -> Outcome:
    """Train one run with virtual workers in this process. See `TrainOne`."""
    spec, task = plan.task.spec, plan.task
    task.begin(seed)
    world = InProcessWorld(
        task.model,
        task.loss,
        spec.recipe(dense=candidate.name == DENSE.name),
        candidate.settings_for(spec),
        workers=spec.world,
        accumulation=spec.accumulation,
        sample_every=SAMPLE_EVERY if candidate.lossy else 0,
    )
    torch.set_flush_denormal(True)  # denormals are slow on many processors
    try:
        return train(task, world.model, world.train_step, spec.steps, progress)
    finally:
        torch.set_flush_denormal(False)
