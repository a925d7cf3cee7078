"""Dense against every candidate, seed by seed, with virtual workers: who is trained when.

The dense run of a seed comes first: others start from its warm-up, are stopped when they are far
behind it, and are compared with it alone. A candidate of which one run has diverged is worse
whatever the others do, so its other seeds are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from ds_ckpt.exchange.build import ExchangeSettings
from ds_ckpt.exchange.rules import embeddings_of
from ds_ckpt.validation.candidates import DENSE, Candidate, checkpointed, versions
from ds_ckpt.validation.cell import Hopeless, Saving, sixteen_bit_step_bytes, train_cell
from ds_ckpt.validation.store import Key, Mode, Result, Store
from ds_ckpt.validation.tasks import Opened

SAMPLE_EVERY = 10
LOSSLESS_SEEDS = 2
"""Bits either agree or do not: two seeds show it."""
LEAST_PROGRESS = 0.5

Tell = Callable[[str, int, int, float], None]
"""(which run, steps done, steps in all, last loss)."""


@dataclass(frozen=True)
class Plan:
    """What is to be done on one task.

    Attributes:
        seeds: of weights and data.
        device: where virtual workers compute.
    """

    task: Opened
    candidates: Sequence[Candidate]
    seeds: Sequence[int]
    device: str = "cpu"

    def seeds_of(self, candidate: Candidate) -> Sequence[int]:
        """All, but fewer for what loses nothing."""
        every = candidate.lossy or candidate.name == DENSE.name
        return self.seeds if every else self.seeds[:LOSSLESS_SEEDS]

    def key(self, candidate: Candidate, seed: int, mode: Mode = "virtual") -> Key:
        """Where the run's result is kept."""
        digest = candidate.digest(self.task.spec.steps)
        return Key(self.task.digest, digest, seed, mode)

    def missing(self, store: Store, mode: Mode = "virtual") -> list[tuple[int, Candidate]]:
        """Runs that have no result yet and can still change a verdict, dense ones first in each
        seed; one of those that would be equal."""
        wanted: dict[Key, tuple[int, Candidate]] = {}
        for candidate in (DENSE, *self.candidates):
            if candidate.lossy and gave_up(self, candidate, store, mode):
                continue
            for seed in self.seeds_of(candidate):
                key = self.key(candidate, seed, mode)
                if store.find(key) is None:
                    wanted.setdefault(key, (seed, candidate))
        return sorted(wanted.values(), key=lambda run: self.seeds.index(run[0]))


def far_behind(dense: Sequence[tuple[int, float]]) -> Hopeless:
    """Stops runs that have made less than half of the dense run's progress at the same step. Where
    that run is on its way back (too small data are learnt by heart) it says nothing of others.

    Args:
        dense: its held-out losses, (steps done, loss).
    """
    losses = dict(dense)
    first = dense[0][1] if dense else 0.0

    def best(step: int) -> float:
        return min(loss for done, loss in losses.items() if done <= step)

    def hopeless(step: int, loss: float) -> bool:
        reference = losses.get(step)
        if reference is None or reference >= first or reference > best(step):
            return False
        return first - loss < LEAST_PROGRESS * (first - reference)

    return hopeless


def gave_up(plan: Plan, candidate: Candidate, store: Store, mode: Mode = "virtual") -> bool:
    """Whether one of the candidate's runs has diverged."""
    results = (store.find(plan.key(candidate, seed, mode)) for seed in plan.seeds)
    return any(result is not None and result.outcome.diverged for result in results)


def run_virtual(plan: Plan, store: Store, folder: Path, tell: Tell | None = None) -> None:
    """Train what has no result yet, with virtual workers in this process.

    Args:
        folder: for the states of unfinished runs.
        tell: told of progress every tenth step.
    """
    with _denormals_flushed():
        for seed, candidate in plan.missing(store):
            if candidate.lossy and gave_up(plan, candidate, store):
                continue
            result = _train(plan, candidate, seed, store, folder, tell)
            store.add(result)
            if not any(later == seed for later, _ in plan.missing(store)):
                for state in folder.glob(f"dense-{plan.task.digest}-{seed}.*"):
                    state.unlink()


@contextmanager
def _denormals_flushed() -> Iterator[None]:
    """Denormals are slow on many processors. Afterwards as it was: it is the whole thread's."""
    before = bool(torch.tensor(5e-324, dtype=torch.float64) * 1.0 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _train(
    plan: Plan, candidate: Candidate, seed: int, store: Store, folder: Path, tell: Tell | None
) -> Result:
    spec, run = plan.task.spec, plan.task.run
    settings = candidate.in_run_of(spec.steps)
    dense = store.find(plan.key(DENSE, seed))
    shared = f"dense-{plan.task.digest}-{seed}"
    name = f"{candidate.digest(spec.steps)}-{plan.task.digest}-{seed}"

    def progress(done: int, loss: float) -> None:
        if tell is not None:
            tell(f"{spec.kind}, seed {seed}, {candidate.name}", done, spec.steps, loss)

    run.begin(seed)
    with checkpointed(run.model, candidate.plugin, plan.device):
        outcome = train_cell(
            run,
            settings,
            spec.recipe(),
            Saving(folder, name, shared, every=100),
            evaluate_every=spec.evaluate_every,
            evaluate_first=True,
            sample_every=SAMPLE_EVERY if candidate.lossy else 0,
            keep_warm=_warm_ups(plan) if candidate is DENSE else (),
            hopeless=far_behind(dense.outcome.heldout) if dense and candidate.lossy else None,
            progress=progress,
        )
    return Result(
        key=plan.key(candidate, seed),
        names=(spec.kind, candidate.name),
        outcome=outcome,
        sixteen_bit_bytes=sixteen_bit_bytes(plan, settings),
        step_s=0.0,
        about=about(),
    )


def _warm_ups(plan: Plan) -> set[int]:
    """Steps after which a candidate starts from the dense run: that of nobody else, though its
    bits should be the same."""
    steps = plan.task.spec.steps
    return {c.in_run_of(steps).start_step for c in plan.candidates if c.lossy}


_step_bytes = functools.cache(sixteen_bit_step_bytes)


def sixteen_bit_bytes(plan: Plan, settings: ExchangeSettings) -> float:
    """For a result, see `Result`. The same for every seed, so counted once."""
    spec, run = plan.task.spec, plan.task.run
    return _step_bytes(
        settings,
        plan.task.shapes,
        spec.world,
        accumulation=spec.accumulation,
        embeddings=embeddings_of(run.model),
    )


def about() -> dict[str, object]:
    """Versions and the day, for a result."""
    day = datetime.now(timezone.utc).date().isoformat()
    return {"date": day, "versions": versions()}
