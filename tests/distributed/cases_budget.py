"""Run in the worker processes: budgets, planned for at the first batch, under ZeRO-3."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

import ds_ckpt
from ds_ckpt.telemetry.memory import SavedActivations
from tests import architectures
from tests.distributed import models
from tests.distributed.log_capture import captured_log
from tests.distributed.pool import fresh, once
from tests.unit.offload_models import device_bytes

LAYERS = 4
GIB = 2**30


def _batch(kind: str, seed: int, length: int) -> dict[str, Any]:
    if kind == "vit":
        return architectures.batch(kind, seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, architectures.VOCAB, (2, length), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def _engine(kind: str, **options: Any) -> Any:
    fresh()
    model = architectures.build(kind, LAYERS, **options)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=models.zero3_config(reuse=0, lr=0.0),
    )
    engine.train()
    return engine


def _train(
    engine: Any,
    kind: str,
    activation: dict[str, Any],
    lengths: list[int],
    telemetry: dict[str, Any] | None = None,
    uneven: int = 0,
) -> dict[str, Any]:
    """One step for each length; process 1's sequences are longer by `uneven`."""
    section = {"activation": activation, "telemetry": telemetry or {}}
    engine._config._param_dict["ds_ckpt"] = section
    with captured_log() as logged:
        session = ds_ckpt.attach(engine)
        dp_rank = torch.distributed.get_rank()
        gradients, held, offloaded = [], [], []
        try:
            for step, length in enumerate(lengths):
                torch.manual_seed(step + dp_rank)
                data = _batch(kind, 2 * step + dp_rank, length + uneven * dp_rank)
                with SavedActivations(engine.module) as measured:
                    loss = engine(**data).loss
                store = session._inputs.store if session._inputs else None
                offloaded.append(device_bytes(store) if store else 0)
                held.append(measured.bytes)
                engine.backward(loss)
                gradients += models.gradients(engine)
                engine.step()
            plan = session.activation_plan
            summary = session.summary
            hooks = len(engine.module._forward_pre_hooks)
        finally:
            session.detach()
    return {
        "gradients": gradients,
        "held": held,
        "on_device": offloaded,
        "plan": repr(plan) if plan else "",
        "choices": plan.choices if plan else [],
        "recompute": plan.recompute_s if plan else 0.0,
        "planned_held": plan.held_bytes if plan else 0,
        "none_bytes": plan.none_bytes if plan else 0,
        "needed": plan.needed_bytes if plan else 0,
        "resident": dict(plan.resident) if plan else {},
        "lines": logged,
        "summary": summary,
        "left_hooks": len(engine.module._forward_pre_hooks) - hooks,
        "tokens": plan.tokens if plan else 0,
    }


@once
def budgets(kind: str, shares: list[float], of: str = "activations", **extra: Any) -> Any:
    """By share of what no recompute holds: what was planned and measured, gradients compared."""
    engine = _engine(kind)
    plain = _train(engine, kind, {}, [12, 12])
    results = {}
    for share in shares:
        gib = share * max(plain["held"]) / GIB
        section = {"policy": "budget", "budget_gib": gib, "budget_of": of, **extra}
        ours = _train(engine, kind, section, [12, 12])
        ours["equal"] = models.equal(plain["gradients"], ours.pop("gradients"))
        ours["budget"] = gib * GIB
        results[share] = ours
    results["plain"] = {"held": plain["held"], "plan": plain["plan"], "choices": plain["choices"]}
    engine.destroy()
    return results


def lengths(
    activation: dict[str, Any],
    lengths: list[int],
    share_of: int,
    share: float,
    uneven: int = 0,
    telemetry: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Sequences that change; the budget is a share of what `share_of` tokens hold."""
    engine = _engine("llama", max_position_embeddings=128)
    gib = share * max(_train(engine, "llama", {}, [share_of])["held"]) / GIB
    plain = _train(engine, "llama", {}, lengths, uneven=uneven)
    section = {"budget_gib": gib, **activation}
    ours = _train(engine, "llama", section, lengths, telemetry, uneven)
    ours["equal"] = models.equal(plain["gradients"], ours.pop("gradients"))
    ours["budget"] = gib * GIB
    engine.destroy()
    return ours


def refused(activation: dict[str, Any], length: int = 12) -> str:
    """The words of the error at attach or at the first forward."""
    engine = _engine("llama")
    plain = len(engine.module._forward_pre_hooks)
    words = ""
    try:
        _train(engine, "llama", activation, [length])
    except ds_ckpt.DsCkptError as error:
        words = str(error)
    assert len(engine.module._forward_pre_hooks) == plain
    engine.destroy()
    return words


def _planned_engine(section: dict[str, Any], share: float, length: int) -> tuple[Any, Any]:
    """An engine with a budget of this share of what `length` tokens hold, and its session."""
    engine = _engine("llama", max_position_embeddings=128)
    held = max(_train(engine, "llama", {}, [length])["held"])
    engine._config._param_dict["ds_ckpt"] = {
        "activation": {"policy": "budget", "budget_gib": share * held / GIB, **section}
    }
    return engine, ds_ckpt.attach(engine)


def _step(engine: Any, data: dict[str, Any]) -> int:
    """One optimizer step; bytes that wait for backward."""
    with SavedActivations(engine.module) as measured:
        loss = engine(**data).loss
    engine.backward(loss)
    engine.step()
    return measured.bytes


def _sized(rows: int, length: int) -> dict[str, Any]:
    tokens = torch.arange(rows * length).remainder(architectures.VOCAB - 3).add(3)
    tokens = tokens.view(rows, length)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def one_cannot_plan() -> str:
    """The words of every process where the one whose plan holds fails."""
    engine, session = _planned_engine({}, 0.6, 12)
    if torch.distributed.get_rank() == 0:

        def fails(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("the search broke")

        session._planning._make = fails
    words = ""
    try:
        _step(engine, _sized(2, 12))
    except (ds_ckpt.DsCkptError, RuntimeError) as error:
        words = f"{type(error).__name__}: {error}"
    engine.destroy()
    return words
