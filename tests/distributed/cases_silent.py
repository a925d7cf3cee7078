"""Run in the worker processes: engines whose gradients are not sent."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_local_grad

import ds_ckpt
from ds_ckpt.telemetry import Purpose
from tests.distributed import cases_parallel, models
from tests.distributed.pool import fresh


def trained(section: dict[str, Any]) -> dict[str, Any]:
    """Three steps with the silent exchange: bytes by purpose, losses."""
    fresh()
    engine = models.start("llama", models.zero3_config(ds_ckpt=section))
    session = ds_ckpt.session_of(engine) or ds_ckpt.attach(engine)
    session.send_no_gradients()
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


def foreign_gradients() -> list[str]:
    """Parameters whose shard has another gradient than this rank's own, with tensor parallelism."""
    own: dict[str, torch.Tensor] = {}
    sections = {"ds_ckpt": {"compression": {"method": "dense"}}}
    with cases_parallel.engine_of("tp", sections) as engine:
        ds_ckpt.session_of(engine).send_no_gradients()
        named = dict(engine.module.named_parameters())
        me = dist.get_rank(engine.optimizer.dp_process_group)
        for name, parameter in named.items():
            parameter.register_hook(functools.partial(own.__setitem__, name))
        engine.backward(cases_parallel.loss_at(engine, "tp", 0))
        found = []
        for name, parameter in named.items():
            shard = safe_get_local_grad(parameter).flatten()
            part = own[name].flatten()[me * len(shard) :][: len(shard)]
            if not torch.equal(shard[: len(part)], part):
                found.append(name)
        return found
