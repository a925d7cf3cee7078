"""The real path: `deepspeed` launches ZeRO-3 processes, which train every run that is missing.

This side names the job and keeps the results as they come; what trains is `train_processes`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ds_ckpt.hosts.backends import Loopback
from ds_ckpt.hosts.launcher import launch
from ds_ckpt.validation.experiment import (
    DENSE,
    SAMPLE_EVERY,
    Plan,
    Tell,
    about,
    sixteen_bit_bytes,
)
from ds_ckpt.validation.store import Result, Store, outcome_of

_STEP_S = 60.0
"""How long a step may take before the launch counts as hung."""
_SILENT_S = 10 * _STEP_S + 600.0
"""From one event to the next: ten steps, an engine that is built, evaluations before and after."""


def run_processes(plan: Plan, store: Store, folder: Path, tell: Tell | None = None) -> None:
    """Train what has no result yet in `plan.task.spec.world` processes.

    Args:
        folder: for the job, the events and the log.
        tell: as `run_virtual`.

    Raises:
        LaunchError: the processes failed or hung; what was finished before is kept.
    """
    if not plan.missing(store, "processes"):
        return
    folder.mkdir(parents=True, exist_ok=True)
    launch(
        Loopback(plan.task.spec.world, gpus=True),
        "ds_ckpt.validation.train_processes",
        _job(plan, store, folder),
        folder,
        stall_s=_SILENT_S,
        heard=lambda event: _take(event, plan, store, tell),
    )


def _job(plan: Plan, store: Store, folder: Path) -> dict[str, Any]:
    steps = plan.task.spec.steps
    runs = [
        {
            "seed": seed,
            "name": candidate.name,
            "file": candidate.file or None,
            "lossy": candidate.lossy,
            "start_step": candidate.in_run_of(steps).warmup_steps,
        }
        for seed, candidate in plan.missing(store, "processes")
    ]
    curves = {}
    for seed in plan.seeds:
        dense = store.find(plan.key(DENSE, seed, "processes"))
        if dense is not None:
            curves[str(seed)] = dense.outcome.heldout
    return {
        "spec": dataclasses.asdict(plan.task.spec),
        "folder": str(folder.absolute() / "states"),
        "sample_every": SAMPLE_EVERY,
        "runs": runs,
        "dense_curves": curves,
    }


def _take(event: dict[str, Any], plan: Plan, store: Store, tell: Tell | None) -> None:
    """Keep or tell what has come."""
    spec = plan.task.spec
    if event["kind"] == "progress" and tell is not None:
        words = f"{spec.kind}, seed {event['seed']}, {event['name']}"
        tell(words, event["done"], spec.steps, event["loss"])
    if event["kind"] != "result":
        return
    (candidate,) = (c for c in (DENSE, *plan.candidates) if c.name == event["name"])
    settings = candidate.in_run_of(spec.steps)
    store.add(
        Result(
            key=plan.key(candidate, event["seed"], "processes"),
            names=(spec.kind, candidate.name),
            outcome=outcome_of(event["outcome"]),
            sixteen_bit_bytes=sixteen_bit_bytes(plan, settings),
            step_s=event["step_s"],
            about=about(),
        )
    )
