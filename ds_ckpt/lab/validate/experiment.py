"""Dense against every candidate, seed by seed: what is compared, and who is trained when.

Candidates are read from DeepSpeed JSON files. What is taken from a file is its `ds_ckpt` section.
Optimizer, batch and schedule are the task's, the same for all, so that nothing but compression or
checkpointing differs.

The dense run of a seed comes first: others are stopped when they are far behind it, and are
compared with it alone. A candidate of which one run has diverged is worse whatever the others do,
so its other seeds are left out. Whether virtual workers or ZeRO-3 processes train, the loop over
runs is `train_missing`.
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
from typing import Any

import torch

from ds_ckpt.config import PluginConfig, load_file, parse
from ds_ckpt.config.activation import activation_policy
from ds_ckpt.config.compression import exchange_settings
from ds_ckpt.config.paths import lookup
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.exchange.rules import ExchangeSettings, embeddings_of
from ds_ckpt.lab.validate.store import Key, Mode, Result, Store
from ds_ckpt.lab.validate.task import BETAS, Task, longest_warm_up
from ds_ckpt.lab.validate.trainer import Curve, Hopeless, Outcome, Progress, train
from ds_ckpt.lab.validate.world import (
    DENSE_SETTINGS,
    InProcessWorld,
    Recipe,
    sixteen_bit_step_bytes,
)
from ds_ckpt.lab.workload import versions


@dataclass(frozen=True)
class Candidate:
    """One configuration.

    Attributes:
        name: the file's without its suffix, or `dense`.
        file: as it was given; empty for dense.
        plugin: its `ds_ckpt` section.
        settings: of the exchange; dense where the section has no method.
    """

    name: str
    file: str
    plugin: PluginConfig
    settings: ExchangeSettings

    @property
    def compresses(self) -> bool:
        """Whether gradients may differ from dense ones."""
        return not self.settings.lossless

    @property
    def lossy(self) -> bool:
        """Whether gradients or weights may differ; if not, every bit of a run is the same."""
        return self.compresses or self.weight_bits is not None

    @property
    def sample_every(self) -> int:
        """Steps from one look at what compression leaves behind to the next; 0: never."""
        return SAMPLE_EVERY if self.compresses else 0

    @property
    def weight_bits(self) -> int | None:
        """Bits in which the changes of weights travel; None: without loss."""
        weights = self.plugin.weights
        return weights.few_bits if weights.resident else None

    def in_run_of(self, steps: int) -> ExchangeSettings:
        """The settings with the dense warm-up that a run of so many steps has."""
        warm_up = min(self.settings.warmup_steps, longest_warm_up(steps))
        return dataclasses.replace(self.settings, warmup_steps=warm_up)

    def warm_up(self, steps: int) -> int:
        """Dense steps at the beginning of a run of so many; 0 for what loses nothing."""
        return self.in_run_of(steps).warmup_steps if self.compresses else 0

    def digest(self, steps: int) -> str:
        """Of all that a run of so many steps depends on: equal digests are equal runs."""
        activation = self.plugin.activation
        recomputed = activation.model_dump(mode="json") if activation.active else None
        method = self.plugin.compression.method
        settings = _as_recorded(self.in_run_of(steps))
        weights = [f"weights in {self.weight_bits} bits"] if self.weight_bits else []
        said = json.dumps([method, settings, recomputed, *weights], sort_keys=True, default=str)
        return hashlib.sha256(said.encode()).hexdigest()[:16]


def _as_recorded(settings: ExchangeSettings) -> dict[str, Any]:
    """What of the settings decides the numbers, under the names by which runs on record are found
    again: a field of another name keeps its old one here."""

    recorded = {
        "default": settings.default.looked_at(),
        "rules": [
            dataclasses.asdict(r) | {"settings": r.settings.looked_at()} for r in settings.rules
        ],
        "error_feedback": settings.error_feedback,
        "residual_dtype": settings.residual_dtype,
        "residual_device": settings.residual_device,
        "start_step": settings.warmup_steps,
        "min_numel": settings.min_numel,
    }
    if settings.warmup_bits is not None:
        recorded["warmup_bits"] = settings.warmup_bits
    if settings.momentum != "none":
        recorded["momentum"] = settings.momentum
    usual = dataclasses.replace(settings, when="auto")
    if settings.holds_back(2) != usual.holds_back(2):  # else as where a run knows of nothing else
        recorded["when"] = settings.when
    return recorded


DENSE = Candidate("dense", "", PluginConfig(), DENSE_SETTINGS)


def read_candidates(files: Sequence[Path]) -> list[Candidate]:
    """Candidates of these files, names made different where files share one.

    Raises:
        ConfigError: a file cannot be used, or would do nothing that could be judged.
    """
    found: list[Candidate] = []
    for path in files:
        config = load_file(path)
        compression = lookup(config, ("ds_ckpt", "compression"))
        if isinstance(compression, dict):
            compression.pop("guard", None)  # validation is what limits come from
        plugin = parse(config, source=str(path))
        if not plugin.active:
            raise ConfigError(
                Problem(
                    where=str(path),
                    found="neither compression nor checkpointing",
                    why="it is plain DeepSpeed, which it would be compared with",
                    remedy="give a file with a ds_ckpt section that switches something on",
                )
            )
        method = plugin.compression.method
        weights_alone = method == "none" and not plugin.activation.active
        if weights_alone and plugin.weights.resident and not plugin.weights.few_bits:
            raise ConfigError(
                Problem(
                    where=f"{path}: $.ds_ckpt.weights",
                    found="resident weights alone, whose changes lose nothing",
                    why="they travel between hosts, and all workers of a validation share one: "
                    "dense training would be held against itself",
                    remedy="hold it against stock on hosts: ds-ckpt measure --weights",
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
    """The model with the section's checkpointing and offload, as a session would have it.

    Raises:
        ConfigError, UnsupportedError: the policy does not fit the model, or needs an engine.
    """
    config = plugin.activation
    if not config.active:
        yield
        return
    from ds_ckpt.activation import CheckpointedBlocks
    from ds_ckpt.activation.inputs import build_inputs
    from ds_ckpt.activation.policies import make_plan

    if config.planned:
        raise ConfigError(
            Problem(
                where="$.ds_ckpt.activation.policy",
                found=f'"{config.policy}"',
                why="its plan is made from a batch of an engine, which virtual workers have not",
                remedy="validate with --processes 2; the plan changes no number",
            )
        )
    policy = activation_policy(config)
    if config.partition:
        raise ConfigError(
            Problem(
                where="$.ds_ckpt.activation.partition",
                found="true",
                why="virtual workers have no tensor-parallel group",
                remedy="validate the file without it, it changes no number",
            )
        )
    units = make_plan(model, policy)
    inputs = build_inputs(config, model, units, torch.device(device))
    blocks = CheckpointedBlocks(
        model, policy=policy, units=units, around=inputs.around if inputs else None
    )
    try:
        yield
    finally:
        blocks.remove()


SAMPLE_EVERY = 10
LOSSLESS_SEEDS = 2
"""Bits either agree or do not: two seeds show it."""
LEAST_PROGRESS = 0.5
FAR = 0.1
"""Of the loss: what no margin comes near."""
_AGAINST = "against"
"""About a run that did not come to its end: the dense one beside which it had no hope."""

Tell = Callable[[str, int, float], object]
"""(which run, steps done, last loss)."""


@dataclass(frozen=True)
class Plan:
    """What is to be done on one task.

    Attributes:
        seeds: of weights and data.
        mode: who trains.
        device: where virtual workers compute.
    """

    task: Task
    candidates: Sequence[Candidate]
    seeds: Sequence[int]
    mode: Mode = "virtual"
    device: str = "cpu"

    def seeds_of(self, candidate: Candidate) -> Sequence[int]:
        """All, but fewer for what loses nothing."""
        every = candidate.lossy or candidate.name == DENSE.name
        return self.seeds if every else self.seeds[:LOSSLESS_SEEDS]

    def key(self, candidate: Candidate, seed: int) -> Key:
        """Where the run's result is kept."""
        settings, recipe = candidate.digest(self.task.spec.steps), self.recipe(candidate)
        if recipe.betas != BETAS:
            settings += f", betas {recipe.betas[0]:g}, {recipe.betas[1]:g}"
        if recipe.lead:
            settings += f", lead {recipe.lead:g} after {recipe.lead_after}"
        return Key(self.task.digest, settings, seed, self.mode)

    def find(self, candidate: Candidate, seed: int, store: Store) -> Result | None:
        """The run's result. One that was stopped for being far behind another dense run is none."""
        result = store.find(self.key(candidate, seed))
        if result is None or not result.outcome.diverged:
            return result
        against = self.key(DENSE, seed).settings
        return result if result.about.get(_AGAINST, against) == against else None

    def recipe(self, candidate: Candidate) -> Recipe:
        """What the candidate's runs are trained by."""
        return self.task.spec.recipe(dense=candidate.name == DENSE.name)

    def missing(self, store: Store) -> list[tuple[int, Candidate]]:
        """Runs that have no result yet and can still change a verdict, dense ones first in each
        seed; one of those that would be equal."""
        wanted: dict[Key, tuple[int, Candidate]] = {}
        for candidate in (DENSE, *self.candidates):
            if self.gave_up(candidate, store):
                continue
            for seed in self.seeds_of(candidate):
                if self.find(candidate, seed, store) is None:
                    wanted.setdefault(self.key(candidate, seed), (seed, candidate))
        return sorted(wanted.values(), key=lambda run: self.seeds.index(run[0]))

    def gave_up(self, candidate: Candidate, store: Store) -> bool:
        """Whether one of a lossy candidate's runs has diverged."""
        results = (self.find(candidate, seed, store) for seed in self.seeds)
        return candidate.lossy and any(r is not None and r.outcome.diverged for r in results)


def far_behind(dense: Curve) -> Hopeless:
    """Stops runs that have made less than half of the dense run's progress at the same step and are
    a tenth of its loss behind. Where that run is on its way back (too small data are learnt by
    heart) it says nothing of others.

    Args:
        dense: its held-out losses.
    """
    losses = dict(dense)
    first = dense[0][1] if dense else 0.0

    def hopeless(step: int, loss: float) -> bool:
        reference = losses.get(step)
        best = min((value for done, value in losses.items() if done <= step), default=first)
        if reference is None or reference >= first or reference > best:
            return False
        half = first - loss < LEAST_PROGRESS * (first - reference)
        return half and loss > (1 + FAR) * reference

    return hopeless


def train_missing(
    plan: Plan,
    store: Store,
    train_one: Callable[..., tuple[Outcome, float]],
    tell: Tell | None = None,
) -> None:
    """Train what has no result yet.

    Args:
        train_one: as `train_virtual`.
        tell: told of progress every tenth step.
    """
    spec = plan.task.spec
    for seed, candidate in plan.missing(store):
        if plan.gave_up(candidate, store):
            continue
        dense = plan.find(DENSE, seed, store)
        name = f"{spec.kind}, seed {seed}, {candidate.name}"

        def progress(done: int, loss: float, name: str = name) -> None:
            if tell is not None:
                tell(name, done, loss)

        outcome, step_s = train_one(
            plan,
            candidate,
            seed,
            far_behind(dense.outcome.heldout) if dense and candidate.lossy else None,
            progress,
        )
        sixteen_bit_bytes = sixteen_bit_step_bytes(
            candidate.in_run_of(spec.steps),
            plan.task.shapes,
            spec.world,
            accumulation=spec.accumulation,
            embeddings=embeddings_of(plan.task.learner.model),
        )
        key, names = plan.key(candidate, seed), (spec.kind, candidate.name)
        day = datetime.now(timezone.utc).date().isoformat()
        about: dict[str, Any] = {"date": day, "versions": surroundings(plan.mode)}
        if outcome.diverged and dense is not None:
            about[_AGAINST] = dense.key.settings
        store.add(Result(key, names, outcome, sixteen_bit_bytes, step_s, about))


def surroundings(mode: Mode) -> dict[str, str]:
    """What a result depends on beside its key. The device of virtual workers is part of that."""
    found = versions()
    if mode == "processes":
        available = torch.cuda.is_available()
        found["accelerator"] = torch.cuda.get_device_name() if available else "cpu"
    return found


def train_virtual(
    plan: Plan,
    candidate: Candidate,
    seed: int,
    hopeless: Hopeless | None = None,
    progress: Progress | None = None,
) -> tuple[Outcome, float]:
    """One run, with virtual workers in this process, and 0: nobody waits for a wire."""
    spec, learner = plan.task.spec, plan.task.learner
    learner.begin(seed)
    with checkpointed(learner.model, candidate.plugin, plan.device), _denormals_flushed():
        world = InProcessWorld(
            learner.model,
            learner.loss,
            plan.recipe(candidate),
            candidate.in_run_of(spec.steps),
            workers=spec.world,
            accumulation=spec.accumulation,
            sample_every=candidate.sample_every,
            weight_bits=candidate.weight_bits,
        )
        outcome = train(
            learner,
            world,
            spec.steps,
            warm_up=candidate.warm_up(spec.steps),
            evaluate_every=spec.evaluate_every,
            hopeless=hopeless,
            progress=progress,
        )
    return outcome, 0.0


@contextmanager
def _denormals_flushed() -> Iterator[None]:
    """Denormals are slow on many processors. Afterwards as it was: it is the whole thread's."""
    before = bool(torch.tensor(5e-324, dtype=torch.float64) * 1.0 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
