"""Run in the worker processes: the reference of virtual training, and guards."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import deepspeed
import torch

import ds_ckpt
from ds_ckpt.telemetry import Purpose
from tests.distributed import models
from tests.distributed.log_capture import captured_log
from tests.distributed.pool import fresh


def train(
    kind: str, section: dict[str, Any], steps: int, lr: float, clip: float, accumulation: int
) -> dict[str, Any]:
    """Losses of this process, bytes sent for gradients, and all weights at the end."""
    fresh()
    config = models.zero3_config(lr=lr, clip=clip, accumulation=accumulation, ds_ckpt=section)
    engine = models.start(kind, config)
    session = ds_ckpt.session_of(engine)
    assert session is not None
    losses = models.train(engine, kind, steps)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    sent = session.counters.bytes_sent[Purpose.REDUCE]
    engine.destroy()
    return {"losses": losses, "weights": weights, "sent": sent}


def guarded(section: dict[str, Any], steps: int, folder: str, accumulation: int = 1) -> Any:
    """Train under a guard; return for each step whether compression is disabled and the observed
    values, then the log, and whether a checkpoint keeps the state."""
    fresh()
    config = models.zero3_config(accumulation=accumulation, ds_ckpt=section)
    with captured_log() as logged:
        engine = models.start("llama", config)
        session = ds_ckpt.session_of(engine)
        assert session is not None
        assert session.exchange.guard is not None
        back, seen = [], []
        for step in range(steps):
            models.train(engine, "llama", 1, first=step)
            back.append(session.exchange.step.is_disabled)
            last = session.exchange.guard.last
            seen.append(None if last is None else (last.error, last.residual_norm))
        unsent = sum(float(r.abs().sum()) for r in session.residuals.values())
        engine.save_checkpoint(folder, tag="mine")
        engine.destroy()
        fresh()
        engine = models.start("llama", config)
        engine.load_checkpoint(folder, tag="mine")
        session = ds_ckpt.session_of(engine)
        assert session is not None
        assert session.exchange.guard is not None
        resumed = session.exchange.step.is_disabled
        engine.destroy()
    warnings = [line for line in logged if "guard: step" in line]
    return {"back": back, "seen": seen, "messages": warnings, "unsent": unsent, "kept": resumed}


def validated(spec: dict[str, Any], files: list[str]) -> Any:
    """Return the outcomes of the runs that `validate-accuracy --processes` launches."""
    from unittest.mock import patch

    from ds_ckpt.lab.validate import experiment, processes
    from ds_ckpt.lab.validate.task import TaskSpec, open_task

    torch.set_num_threads(1)
    candidates = experiment.read_candidates([Path(file) for file in files], "processes")
    plan = experiment.Plan(open_task(TaskSpec(**spec)), candidates, range(1), "processes")

    def train_one(*arguments: Any) -> Any:
        fresh()
        return processes.train_zero3(*arguments)

    with patch.object(processes, "SAMPLE_EVERY", 2):
        results = experiment.train_missing(plan, {}, train_one, lambda *_: None)
        return [dataclasses.asdict(result.outcome) for result in results]
