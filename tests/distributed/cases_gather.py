"""Run in the worker processes: what the gather hook does on real engines."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero import parameter_offload

import ds_ckpt
from tests.distributed import models
from tests.distributed.pool import fresh, once

COUNTING = {"telemetry": {"enabled": True}}


def _engine(kind: str, reuse: float, mode: str, **options: Any) -> Any:
    activation: dict[str, Any] = {}
    if mode == "ours":
        activation = {"activation": {"policy": "block"}}
        if kind in models.PLAIN:
            activation["activation"]["modules"] = [models.PLAIN[kind]]
    config = models.zero3_config(reuse=reuse, ds_ckpt={**COUNTING, **activation}, **options)
    engine = models.start(kind, config)
    if mode == "transformers":  # what a user gets from transformers and DeepSpeed alone
        for module in engine.module.modules():
            older = getattr(module, "gradient_checkpointing_enable", None)
            enable = getattr(module, "_activation_checkpointing_enable", older)
            if enable is not None:
                enable({"use_reentrant": False})
                break
    return engine


@once(when=lambda kind, reuse, mode, *_: mode == "none")
def gathers(kind: str, reuse: float, mode: str, steps: int, accumulation: int) -> dict[str, Any]:
    """Gathers of each parameter in each micro-step, and what is left behind."""
    fresh()
    engine = _engine(kind, reuse, mode, accumulation=accumulation)
    session = ds_ckpt.session_of(engine)
    assert session is not None
    parameters = list(engine.module.named_parameters())
    most, mean, left, stack = [], [], [], []
    for micro in range(steps * accumulation):
        before = session.counters.snapshot()
        data = models.batch(kind, micro, torch.distributed.get_rank())
        engine.backward(models.loss_of(engine(**data)))
        left.append([n for n, p in parameters if p.ds_status.name != "NOT_AVAILABLE"])
        engine.step()
        left[-1] += [n for n, p in parameters if p.ds_status.name != "NOT_AVAILABLE"]
        delta = session.counters.snapshot() - before
        counts = [delta.gathers.get(p.ds_id, 0) for _, p in parameters]
        most.append(max(counts))
        mean.append(sum(counts) / len(counts))
        stack.append(len(parameter_offload.FWD_MODULE_STACK))
    sent = {p.value: n for p, n in delta.bytes_sent.items()}
    engine.destroy()
    return {"most": most, "mean": mean, "left": left, "stack": stack, "sent": sent}


def gradients(kind: str, activation: dict[str, Any], accumulation: int = 1) -> dict[str, Any]:
    """Gradient partitions of two steps, bit for bit, and the losses."""
    fresh()
    sections: dict[str, Any] = {"ds_ckpt": {"activation": activation}} if activation else {}
    config = models.zero3_config(reuse=0, accumulation=accumulation, **sections)
    engine = models.start(kind, config)
    seen: list[torch.Tensor] = []
    losses = []
    for step in range(2):
        for micro in range(accumulation):
            torch.manual_seed(step + torch.distributed.get_rank())
            data = models.batch(kind, step * accumulation + micro, torch.distributed.get_rank())
            loss = models.loss_of(engine(**data))
            engine.backward(loss)
            losses.append(float(loss))
            if engine.is_gradient_accumulation_boundary():
                seen += models.gradients(engine)
            engine.step()
    active = ds_ckpt.session_of(engine) is not None
    engine.destroy()
    return {"gradients": seen, "losses": losses, "active": active}


def many_steps(steps: int) -> dict[str, Any]:
    """Height of DeepSpeed's module stack, and objects kept, over a long run."""
    fresh()
    engine = _engine("plain", 0, "ours")
    session = ds_ckpt.session_of(engine)
    assert session is not None
    heights = []
    for step in range(steps):
        data = models.batch("plain", step, torch.distributed.get_rank())
        engine.backward(models.loss_of(engine(**data)))
        engine.step()
        if step in (0, steps - 1):
            heights.append(len(parameter_offload.FWD_MODULE_STACK))
    kept = len(session._gather._kept)
    engine.destroy()
    return {"heights": heights, "kept": kept}
