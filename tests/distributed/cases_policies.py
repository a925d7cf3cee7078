"""Run in the worker processes: every policy on many architectures, under ZeRO-3."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import parameter_offload

import ds_ckpt
from tests import architectures
from tests.distributed import models
from tests.distributed.pool import fresh

LAYERS = 3
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "block": {"policy": "block"},
    "attention": {"policy": "attention"},
    "mlp": {"policy": "mlp"},
    "every_n": {"policy": "every_n", "every_n": 2},
    "segments": {"policy": "segments", "segment_size": 2},
    "selective": {"policy": "selective"},
    "offload": {"policy": "offload"},
    "rules": {
        "rules": [
            {"match": "0", "policy": "selective", "save_ops": "matmuls"},
            {"match": "1-2", "policy": "segments"},
        ]
    },
}


def _train(engine: Any, kind: str, activation: dict[str, Any], steps: int) -> dict[str, Any]:
    """Gradient partitions of all steps, bit for bit, and what was gathered and left.

    The engine's learning rate is 0: every policy begins and ends with the same weights.
    """
    section = {"activation": activation, "telemetry": {"enabled": True}}
    engine._config._param_dict["ds_ckpt"] = section
    session = ds_ckpt.attach(engine)
    parameters = list(engine.module.named_parameters())
    height = len(parameter_offload.FWD_MODULE_STACK)
    gradients, losses, most, left = [], [], [], []
    for step in range(steps):
        before = session.counters.snapshot()
        torch.manual_seed(step + torch.distributed.get_rank())
        loss = engine(**architectures.batch(kind, 2 * step + torch.distributed.get_rank())).loss
        engine.backward(loss)
        losses.append(float(loss.detach()))
        gradients += models.gradients(engine)
        left += [n for n, p in parameters if p.ds_status.name != "NOT_AVAILABLE"]
        engine.step()
        delta = session.counters.snapshot() - before
        most.append({n: delta.gathers.get(p.ds_id, 0) for n, p in parameters})
    stack = len(parameter_offload.FWD_MODULE_STACK) - height
    summary = session.summary
    out_and_back = None
    if session.offload is not None:
        out_and_back = (dict(session.offload.out), dict(session.offload.back))
    session.detach()
    return {
        "out_and_back": out_and_back,
        "gradients": gradients,
        "losses": losses,
        "gathers": most,
        "left": left,
        "stack": stack,
        "summary": summary,
    }


def compare(
    kinds: list[str], policies: list[tuple[str, bool]], steps: int = 2
) -> dict[str, dict[str, Any]]:
    """By architecture and policy, with and without offload: whether gradients and losses are
    those of no checkpointing."""
    results = {}
    for kind in kinds:
        fresh()
        model = architectures.build(kind, LAYERS)
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=models.zero3_config(reuse=0, lr=0.0),
        )
        engine.train()
        plain = _train(engine, kind, {}, steps)
        again = _train(engine, kind, {}, steps)
        assert all(map(torch.equal, plain["gradients"], again["gradients"])), "it has moved"
        for policy, offload in policies:
            keeping = {"offload": True, "offload_min_bytes": 0} if offload else {}
            ours = _train(engine, kind, POLICIES[policy] | keeping, steps)
            results[f"{kind} {policy}{' offload' * offload}"] = {
                "out_and_back": ours["out_and_back"],
                "equal": models.equal(plain["gradients"], ours["gradients"]),
                "nonzero": any(bool(g.any()) for g in plain["gradients"]),
                "losses": plain["losses"] == ours["losses"],
                "more": _more_gathers(plain["gathers"], ours["gathers"]),
                "left": ours["left"],
                "stack": ours["stack"] - plain["stack"],
                "summary": ours["summary"],
            }
        engine.destroy()
    return results


def _more_gathers(plain: list[dict[str, int]], ours: list[dict[str, int]]) -> dict[str, list[int]]:
    """Parameters gathered more than twice in a step, and more than without checkpointing."""
    limit = {n: max(2, *(step[n] for step in plain)) for n in plain[0]}
    return {n: [s[n] for s in ours] for n in limit if max(s[n] for s in ours) > limit[n]}
