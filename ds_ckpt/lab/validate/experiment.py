"""Compare dense training with every candidate, seed by seed: candidates and missing runs.

Candidates are read from DeepSpeed JSON files, of which the `ds_ckpt` section counts. Optimizer,
batch and schedule are the task's, so that pairs differ in compression or checkpointing alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from ds_ckpt.config import PluginConfig, load_file, parse
from ds_ckpt.config.activation import activation_policy
from ds_ckpt.config.compression import exchange_settings
from ds_ckpt.config.paths import lookup
from ds_ckpt.config.verdicts import decisive
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.exchange.rules import ExchangeSettings, embeddings_of
from ds_ckpt.lab.validate.runs import Key, Mode, Outcome, Progress, Result, Store, train
from ds_ckpt.lab.validate.task import BETAS, Task, TaskSpec
from ds_ckpt.lab.validate.world import DENSE_SETTINGS, InProcessWorld, sixteen_bit_step_bytes
from ds_ckpt.lab.workload import versions

SAMPLE_EVERY = 10
"""Steps between two measurements of the residuals."""
LOSSLESS_SEEDS = 2
"""Bits either agree or differ: two seeds show it."""

Report = Callable[[str, int, float], object]
"""(name of the run, steps done, last loss)."""


@dataclass(frozen=True)
class Candidate:
    """One configuration.

    Attributes:
        name: stem of the file, or `dense`.
        file: path as given; empty for dense.
        plugin: its `ds_ckpt` section.
        settings: of the exchange; uncompressed if the section has no method.
    """

    name: str
    file: str
    plugin: PluginConfig
    settings: ExchangeSettings

    @property
    def lossy(self) -> bool:
        """Return True if gradients may differ; otherwise every bit of a run must be equal."""
        return not self.settings.lossless

    @property
    def sample_every(self) -> int:
        """Return the steps between two measurements of the residuals; 0 disables them."""
        return SAMPLE_EVERY if self.lossy else 0

    def settings_for(self, spec: TaskSpec) -> ExchangeSettings:
        """Return the settings with the uncompressed warm-up cut for the length of the run."""
        warm_up = min(self.settings.warmup_steps, spec.longest_warm_up)
        return dataclasses.replace(self.settings, warmup_steps=warm_up)

    def warm_up(self, spec: TaskSpec) -> int:
        """Return the number of uncompressed steps of a run; 0 if nothing is lossy."""
        return self.settings_for(spec).warmup_steps if self.lossy else 0

    def digest(self, spec: TaskSpec) -> str:
        """Return a digest of everything that decides a run's numbers."""
        activation, warm_up = self.plugin.activation, {"warmup_steps": self.warm_up(spec)}
        recomputed = activation.model_dump(mode="json") if activation.active else None
        settings = decisive(self.plugin.compression.model_copy(update=warm_up))
        text = json.dumps([settings, recomputed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


DENSE = Candidate("dense", "", PluginConfig(), DENSE_SETTINGS)


def read_candidates(files: Sequence[Path]) -> list[Candidate]:
    """Read the candidates of these files, with unique names.

    Raises:
        ConfigError: a file is invalid, or has nothing that can be judged.
    """
    found: list[Candidate] = []
    for path in files:
        config = load_file(path)
        compression = lookup(config, ("ds_ckpt", "compression"))
        if isinstance(compression, dict):
            compression.pop("guard", None)  # its limits come from validation
        plugin = parse(config, source=str(path))
        method = plugin.compression.method
        if method == "none" and not plugin.activation.active:
            raise ConfigError(
                Problem(
                    where=str(path),
                    found="neither compression nor checkpointing",
                    why="dense training would be compared with itself: resident weights lose "
                    "nothing, and all workers share one node",
                    remedy="give a file that enables compression or checkpointing, or compare "
                    "weights between nodes: ds-ckpt measure --weights",
                )
            )
        settings = DENSE_SETTINGS if method == "none" else exchange_settings(plugin.compression)
        name, taken = path.stem, {c.name for c in found} | {DENSE.name}
        if name in taken:
            name = next(f"{name}-{i}" for i in range(2, 999) if f"{name}-{i}" not in taken)
        found.append(Candidate(name, str(path), plugin, settings))
    return found


@contextmanager
def checkpointed(model: torch.nn.Module, plugin: PluginConfig, device: str) -> Iterator[None]:
    """Apply the section's checkpointing and offload to a model, as an engine would.

    Raises:
        ConfigError: the policy does not fit the model, or requires an engine.
        UnsupportedError: the model is not supported.
    """
    config = plugin.activation
    if not config.active:
        yield
        return
    from ds_ckpt.activation import CheckpointedBlocks
    from ds_ckpt.activation.inputs import build_inputs
    from ds_ckpt.activation.policies import make_plan

    for key, needed in (("policy", config.planned), ("partition", config.partition)):
        if needed:
            raise ConfigError(
                Problem(
                    where=f"$.ds_ckpt.activation.{key}",
                    found=json.dumps(getattr(config, key)),
                    why="virtual workers have neither an engine to plan with nor a tensor-parallel "
                    "group",
                    remedy="change no number: validate the file without it, or with --processes 2",
                )
            )
    policy = activation_policy(config)
    units = make_plan(model, policy)
    inputs = build_inputs(config, model, units, torch.device(device))
    blocks = CheckpointedBlocks(
        model, policy=policy, units=units, around=inputs.around if inputs else None
    )
    try:
        yield
    finally:
        blocks.remove()


@dataclass(frozen=True)
class Plan:
    """All runs of a task.

    Attributes:
        task: what is trained.
        candidates: to compare with dense training.
        seeds: of weights and data.
        mode: virtual workers or ZeRO-3 ranks.
        device: of virtual workers.
    """

    task: Task
    candidates: Sequence[Candidate]
    seeds: Sequence[int]
    mode: Mode = "virtual"
    device: str = "cpu"

    def seeds_of(self, candidate: Candidate) -> Sequence[int]:
        """Return all seeds, or fewer if a candidate is lossless."""
        every = candidate.lossy or candidate.name == DENSE.name
        return self.seeds if every else self.seeds[:LOSSLESS_SEEDS]

    def key(self, candidate: Candidate, seed: int) -> Key:
        """Return the key of a run."""
        settings, betas = candidate.digest(self.task.spec), tuple(self.task.spec.betas)
        if betas != BETAS:
            settings += f", betas {betas[0]:g}, {betas[1]:g}"
        return Key(self.task.digest, settings, seed, self.mode)

    def missing(self, store: Store) -> list[tuple[int, Candidate]]:
        """Return the runs without a result, by seed and dense ones first, equal ones once."""
        wanted: dict[Key, tuple[int, Candidate]] = {}
        for candidate in (DENSE, *self.candidates):
            for seed in self.seeds_of(candidate):
                key = self.key(candidate, seed)
                if store.find(key) is None:
                    wanted.setdefault(key, (seed, candidate))
        return sorted(wanted.values(), key=lambda run: self.seeds.index(run[0]))


TrainOne = Callable[[Plan, Candidate, int, Progress], tuple[Outcome, float]]
"""Train one run; return its outcome and the median wall time of a step."""


def train_missing(
    plan: Plan, store: Store, train_one: TrainOne, report: Report | None = None
) -> None:
    """Train all runs without a result; `report` is called at every tenth step."""
    spec = plan.task.spec
    for seed, candidate in plan.missing(store):
        name = f"{spec.kind}, seed {seed}, {candidate.name}"

        def progress(done: int, loss: float, name: str = name) -> None:
            if report is not None:
                report(name, done, loss)

        outcome, step_s = train_one(plan, candidate, seed, progress)
        sixteen_bit_bytes = sixteen_bit_step_bytes(
            candidate.settings_for(spec),
            plan.task.shapes,
            spec.world,
            accumulation=spec.accumulation,
            embeddings=embeddings_of(plan.task.model),
        )
        day = datetime.now(timezone.utc).date().isoformat()
        about = {"date": day, "versions": environment(plan.mode)}
        names = spec.kind, candidate.name
        store.add(
            Result(plan.key(candidate, seed), names, outcome, sixteen_bit_bytes, step_s, about)
        )


def environment(mode: Mode) -> dict[str, str]:
    """Return the versions, and for ZeRO-3 ranks the accelerator, that a result depends on."""
    found = versions()
    if mode == "processes":
        available = torch.cuda.is_available()
        found["accelerator"] = torch.cuda.get_device_name() if available else "cpu"
    return found


def train_virtual(
    plan: Plan, candidate: Candidate, seed: int, progress: Progress | None = None
) -> tuple[Outcome, float]:
    """Train one run with virtual workers in this process. See `TrainOne`; the time is 0."""
    spec, task = plan.task.spec, plan.task
    task.begin(seed)
    with checkpointed(task.model, candidate.plugin, plan.device), _denormals_flushed():
        world = InProcessWorld(
            task.model,
            task.loss,
            spec.recipe(),
            candidate.settings_for(spec),
            workers=spec.world,
            accumulation=spec.accumulation,
            sample_every=candidate.sample_every,
        )
        every = max(1, spec.steps // spec.evaluations)
        outcome = train(task, world, spec.steps, evaluate_every=every, progress=progress)
    return outcome, 0.0


@contextmanager
def _denormals_flushed() -> Iterator[None]:
    """Flush denormals, which are slow on many processors, and restore the thread's setting."""
    before = bool(torch.tensor(5e-324, dtype=torch.float64) * 1.0 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
