"""Run in the worker processes: what virtual training is held against."""

from __future__ import annotations

from typing import Any

import deepspeed

import ds_ckpt
from ds_ckpt.telemetry import Purpose
from tests.distributed import models
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
