"""The real path: `deepspeed` launches ZeRO-3 processes, which train every run that is missing.

This side writes the job, follows the events, and keeps the results as they come; what trains is
`train_processes`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ds_ckpt.errors import Problem
from ds_ckpt.harness import cpu_op
from ds_ckpt.harness.follow import Lines
from ds_ckpt.harness.launch import (
    LaunchError,
    check_running,
    deepspeed_command,
    free_port,
    launched,
    log_tail,
)
from ds_ckpt.validation.experiment import (
    DENSE,
    SAMPLE_EVERY,
    Plan,
    Tell,
    about,
    sixteen_bit_bytes,
)
from ds_ckpt.validation.store import Result, Store, outcome_of

_LOOPBACK = Path("/sys/class/net/lo")
_POLL_S = 0.2
_START_S, _STEP_S = 600.0, 60.0
"""How long starting, and a step, may take before the launch counts as hung."""
_SILENT_S = 10 * _STEP_S + 600.0
"""From one event to the next: ten steps, an engine that is built, evaluations before and after."""


def run_processes(plan: Plan, store: Store, folder: Path, tell: Tell | None = None) -> None:
    """Train what has no result yet in `plan.task.spec.world` processes.

    Args:
        folder: for the job, the events and the log.
        tell: as `run_virtual`.

    Raises:
        LaunchError: the processes failed; what was finished before is kept.
    """
    missing = plan.missing(store, "processes")
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    job, events, log = (folder / name for name in ("job.json", "events.jsonl", "training.log"))
    events.unlink(missing_ok=True)
    job.write_text(json.dumps(_job(plan, store, folder, events)), encoding="utf-8")
    environment = _environment()
    port = free_port()
    command = deepspeed_command(
        "ds_ckpt.validation.train_processes",
        ["--job", str(job)],
        processes=plan.task.spec.world,
        master_port=port,
    )
    started = heard = time.monotonic()
    with (
        cpu_op.shared_buffers_removed(port),
        cpu_op.lock_cleared_on_failure(environment),
        launched(command, environment=environment, log=log) as process,
    ):
        lines = Lines(events)
        running, begun = True, False
        try:
            while running:
                running = check_running(process, started=started, time_limit_s=math.inf, log=log)
                if _take(lines.new(), plan, store, tell):
                    heard, begun = time.monotonic(), True
                elif running:
                    _check_heard(heard, begun=begun, log=log)
                time.sleep(_POLL_S if running else 0)
        finally:
            _take(lines.new(), plan, store, tell)


def _check_heard(heard: float, *, begun: bool, log: Path) -> None:
    """Raises LaunchError where nothing has come since `heard` for longer than it may take."""
    limit_s = _SILENT_S if begun else _START_S
    if time.monotonic() - heard <= limit_s:
        return
    what = "the next event of training" if begun else "the processes to begin"
    takes = "ten steps with an evaluation take" if begun else "starting takes"
    raise LaunchError(
        Problem(
            where=str(log),
            found=f"waited {limit_s:.0f} s for {what}; the log ends with\n{log_tail(log)}",
            why=f"{takes} far less where all is well: a process hangs, or waits for another",
            remedy="look at the log's last lines and at whether the machine is busy with something "
            "else, then give the same command again: finished runs are kept",
        )
    )


def _job(plan: Plan, store: Store, folder: Path, events: Path) -> dict[str, Any]:
    steps = plan.task.spec.steps
    runs = [
        {
            "seed": seed,
            "name": candidate.name,
            "file": candidate.file or None,
            "lossy": candidate.lossy,
            "start_step": candidate.in_run_of(steps).start_step,
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
        "folder": str(folder / "states"),
        "events": str(events),
        "sample_every": SAMPLE_EVERY,
        "runs": runs,
        "dense_curves": curves,
    }


def _take(lines: Iterator[dict[str, Any]], plan: Plan, store: Store, tell: Tell | None) -> bool:
    """Keep and tell what has come; whether there was anything."""
    spec, came = plan.task.spec, False
    for line in lines:
        came = True
        if line["kind"] == "begun":
            continue
        if line["kind"] == "progress":
            if tell is not None:
                words = f"{spec.kind}, seed {line['seed']}, {line['name']}"
                tell(words, line["done"], spec.steps, line["loss"])
            continue
        (candidate,) = (c for c in (DENSE, *plan.candidates) if c.name == line["name"])
        settings = candidate.in_run_of(spec.steps)
        store.add(
            Result(
                key=plan.key(candidate, line["seed"], "processes"),
                names=(spec.kind, candidate.name),
                outcome=outcome_of(line["outcome"]),
                sixteen_bit_bytes=sixteen_bit_bytes(plan, settings),
                step_s=line["step_s"],
                about=about(),
            )
        )
    return came


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # DeepSpeed compiles with the ninja of its own environment, activated or not.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if torch.cuda.device_count() == 0:
        environment.setdefault("DS_ACCELERATOR", "cpu")
    if environment.get("DS_ACCELERATOR") == "cpu":
        environment["OMP_NUM_THREADS"] = "1"  # sums in one order, whatever the machine
        if _LOOPBACK.exists():
            environment.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK.name)
    return environment
