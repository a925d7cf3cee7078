"""Run in the worker processes: an engine whose gradients are not sent."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import ds_ckpt
from ds_ckpt.engine.step import NoCommunication
from ds_ckpt.telemetry import Purpose
from tests.distributed import models
from tests.distributed.pool import fresh


def trained(section: dict[str, Any]) -> dict[str, Any]:
    """Three steps with the silent exchange: bytes by purpose, losses."""
    fresh()
    engine = models.start("llama", models.zero3_config(ds_ckpt=section))
    session = ds_ckpt.session_of(engine) or ds_ckpt.attach(engine)
    session.measure_with(NoCommunication(dist.get_world_size(), dist.get_rank()))
    before = session.counters.snapshot()
    losses = []
    for _ in range(3):
        loss = models.loss_of(engine(**models.batch("llama", 0, dist.get_rank())))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    sent = (session.counters.snapshot() - before).bytes_sent
    engine.destroy()
    return {
        "reduce": sent[Purpose.REDUCE],
        "gather": sent[Purpose.GATHER_FORWARD],
        "losses": losses,
    }
