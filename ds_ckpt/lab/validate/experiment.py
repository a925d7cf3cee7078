"""Compare dense training with every candidate, seed by seed: candidates, runs and their results.

Candidates are read from DeepSpeed JSON files, of which the `ds_ckpt` section counts. Optimizer,
batch and schedule are the task's, so that pairs differ in that section alone. Finished runs are
JSON lines, appended one by one, so that a killed comparison continues.
"""

import dataclasses
import functools
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import AliasChoices, Field, TypeAdapter, ValidationError

from ds_ckpt.compression import methods
from ds_ckpt.config import PluginConfig, load_file, parse
from ds_ckpt.config.compression import exchange_settings
from ds_ckpt.config.paths import lookup
from ds_ckpt.config.verdicts import decisive
from ds_ckpt.errors import ConfigError, Problem, StateError
from ds_ckpt.exchange.method_rules import ExchangeSettings, embeddings_of
from ds_ckpt.lab.validate.task import Task, TaskSpec
from ds_ckpt.lab.validate.world import (
    DENSE_SETTINGS,
    InProcessWorld,
    StepResult,
    sixteen_bit_step_bytes,
)
from ds_ckpt.lab.workload import versions

Mode = Literal["virtual", "processes"]
SAMPLE_EVERY = 10
"""Steps between two measurements of the residuals."""
Progress = Callable[[int, float], object]
"""(steps done, last loss)."""
RunProgress = Callable[[str, int, float], object]
"""(name of the run, steps done, last loss)."""
_FORMER_KEY = Field(validation_alias=AliasChoices("residual_stats", "left"))


@dataclass(frozen=True)
class Outcome:
    """Result of a run: (steps done, value) of held-out loss or accuracy, before and after training.

    `residual_stats` has (steps done, compression error, residual norm) of the sampled steps.
    `digest` is of every micro-step's loss and of the final evaluation, bit for bit.
    """

    heldout: list[tuple[int, float]]
    residual_stats: Annotated[list[tuple[int, float, float]], _FORMER_KEY]
    digest: str
    diverged: bool


def train(
    task: Task,
    model: torch.nn.Module,
    train_step: Callable[[], StepResult],
    steps: int,
    progress: Progress | None = None,
) -> Outcome:
    """Train to the end, or until the loss is not finite.

    `task` is reset to the run's seed and evaluates `model`, or an engine. `progress` is called at
    every tenth step and the last.
    """
    heldout = [(0, task.evaluate(model))]
    sampled: list[tuple[int, float, float]] = []
    digest, diverged, done = hashlib.sha256(), False, 0
    while done < steps and not diverged:
        step = train_step()
        done, loss = done + 1, sum(step.losses) / len(step.losses)
        digest.update(",".join(each.hex() for each in step.losses).encode())
        if (stats := step.residual_stats) is not None:
            sampled.append((done, stats.error, stats.residual_norm))
        diverged = step.skipped or not math.isfinite(loss)
        if progress is not None and (done % 10 == 0 or done == steps):
            progress(done, loss)
    heldout.append((done, task.evaluate(model)))
    diverged |= not math.isfinite(heldout[-1][1])
    digest.update(heldout[-1][1].hex().encode())
    return Outcome(heldout, sampled, digest.hexdigest(), diverged)


@dataclass(frozen=True)
class Result:
    """A finished run.

    `key` is `RunPlan.key`, `name` is for readers. `sixteen_bit_bytes` are those that the busiest
    worker sends in a compressed step with bf16 gradients.
    """

    key: str
    name: str
    outcome: Outcome
    sixteen_bit_bytes: float
    versions: dict[str, str]
    date: str


_RESULT = TypeAdapter(Result)


def read_results(path: Path) -> dict[str, Result]:
    """Return results by key; cut off a last line that a kill has torn. Raises StateError."""
    if not path.exists():
        return {}
    complete, _, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        with path.open("r+b") as file:
            file.truncate(len(complete) + bool(complete))
    found = {}
    for number, line in enumerate(complete.splitlines(), 1):
        try:
            result = _RESULT.validate_json(line)
        except ValidationError as error:
            why = "it is not a result of this version"
            remedy = "name another --output, or remove the file"
            problem = Problem(f"{path}:{number}", line[:60].decode(), why, remedy)
            raise StateError(problem, headline="the results cannot be read") from error
        found[result.key] = result
    return found


def add_result(path: Path, result: Result) -> None:
    """Append a result to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(result)) + "\n")


Results = Mapping[str, Result]
"""By `RunPlan.key`."""


@dataclass(frozen=True)
class Contender:
    """One configuration: `dense`, or a file with the settings of its exchange."""

    name: str
    file: str
    plugin: PluginConfig
    settings: ExchangeSettings

    def settings_for(self, spec: TaskSpec) -> ExchangeSettings:
        """Return the settings with the warm-up cut to a quarter of the run, or little is judged."""
        warm_up = min(self.settings.warmup_steps, spec.steps // 4)
        return dataclasses.replace(self.settings, warmup_steps=warm_up)

    def warm_up(self, spec: TaskSpec) -> int:
        """Return the number of uncompressed steps of a run; 0 if nothing is lossy."""
        return 0 if self.settings.lossless else self.settings_for(spec).warmup_steps


DENSE_CONTENDER = Contender("dense", "", PluginConfig(), DENSE_SETTINGS)


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
        taken = path.stem in (DENSE_CONTENDER.name, *(one.name for one in found))
        name = str(path.with_suffix("")) if taken else path.stem
        candidate = Contender(name, str(path), plugin, settings)
        changes_anything = method != "none" or plugin.activation.active
        if candidate.settings.lossless and not (mode == "processes" and changes_anything):
            why = (
                "uncompressed training would be compared with itself: virtual workers only compress"
            )
            remedy = (
                "leave this file out: the uncompressed runs are made for you. Compare "
                "checkpointing and the method dense with --processes 2, weights between nodes "
                "with ds-ckpt measure --weights"
            )
            raise ConfigError(Problem(str(path), "no lossy compression", why, remedy))
        found.append(candidate)
    return found


@dataclass(frozen=True)
class RunPlan:
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
        about = run_versions(self.mode)
        for name in candidate.plugin.compression.methods_used():
            module = methods()[name].__module__ if name in methods() else "ds_ckpt."
            if not module.startswith("ds_ckpt."):  # its changes are in no version above
                file = getattr(sys.modules[module], "__file__", None)
                about[module] = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
        run = self.task.digest, settings, recomputed, seed, self.mode, about
        return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:16]

    def missing(self, results: Results) -> list[tuple[int, Contender]]:
        """Return the runs without a result, by seed and dense ones first, equal ones once."""
        wanted: dict[str, tuple[int, Contender]] = {}
        for candidate in (DENSE_CONTENDER, *self.candidates):
            for seed in self.seeds:
                if (key := self.key(candidate, seed)) not in results:
                    wanted.setdefault(key, (seed, candidate))
        return sorted(wanted.values(), key=lambda run: self.seeds.index(run[0]))


TrainOne = Callable[[RunPlan, Contender, int, Progress], Outcome]


def train_missing(
    plan: RunPlan, results: Results, train_one: TrainOne, report: RunProgress
) -> Iterator[Result]:
    """Train all runs without a result and yield theirs. `report` is called at every tenth step."""
    spec, about = plan.task.spec, run_versions(plan.mode)
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


def run_versions(mode: Mode) -> dict[str, str]:
    """Return the versions, and for ZeRO-3 ranks the accelerator, that a result depends on."""
    found = versions()
    if mode == "processes":
        available = torch.cuda.is_available()
        found["accelerator"] = torch.cuda.get_device_name() if available else "cpu"
    return found


def train_virtual(plan: RunPlan, candidate: Contender, seed: int, progress: Progress) -> Outcome:
    """Train one run with virtual workers in this process. See `TrainOne`."""
    spec, task = plan.task.spec, plan.task
    task.begin(seed)
    world = InProcessWorld(
        task.model,
        task.loss,
        spec.recipe(dense=candidate.name == DENSE_CONTENDER.name),
        candidate.settings_for(spec),
        workers=spec.world,
        accumulation=spec.accumulation,
        sample_every=0 if candidate.settings.lossless else SAMPLE_EVERY,
    )
    torch.set_flush_denormal(True)  # denormals are slow on many processors
    try:
        return train(task, world.model, world.train_step, spec.steps, progress)
    finally:
        torch.set_flush_denormal(False)
