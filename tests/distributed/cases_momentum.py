"""Run in the worker processes: momentum correction."""

from __future__ import annotations

from typing import Any

import torch

import ds_ckpt
from tests.distributed import models
from tests.distributed.pool import fresh


class _Watched:
    """Tells which betas an optimizer steps with, by step, of each of its groups with members."""

    def __init__(self, optimizer: Any) -> None:
        self.seen: list[tuple[int, float]] = []
        step = optimizer.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.seen += [
                (number, group["betas"][0])
                for number, group in enumerate(optimizer.param_groups)
                if group["params"]
            ]
            return step(*args, **kwargs)

        optimizer.step = watched

    def take(self) -> list[tuple[int, float]]:
        seen, self.seen = self.seen, []
        return seen


def _start(section: dict[str, Any], *, optimizer: Any = None, **options: Any) -> Any:
    """An engine; its parameters in two groups, matrices and the rest, where it has an optimizer of
    ours."""
    fresh()
    config = models.zero3_config(ds_ckpt=section, **options)
    model = models.build("llama")
    parameters: Any = [p for p in model.parameters() if p.requires_grad]
    if optimizer is not None:
        del config["optimizer"]
        matrices = [p for p in parameters if p.ndim > 1]
        vectors = [p for p in parameters if p.ndim == 1]
        parameters = None
        optimizer = optimizer([{"params": matrices}, {"params": vectors}])
    engine, *_ = ds_ckpt.initialize(
        model=model, model_parameters=parameters, optimizer=optimizer, config=config
    )
    engine.train()
    return engine


def stepped(section: dict[str, Any], steps: int, **options: Any) -> dict[str, Any]:
    """The b1 that every step was called with by parameter group, whether groups say the same
    outside of steps, and what all processes must agree on."""
    engine = _start(section, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3), **options)
    session = ds_ckpt.session_of(engine)
    watched = _Watched(engine.optimizer.optimizer)
    own = [group["betas"] for group in engine.optimizer.param_groups]
    seen, outside = [], True
    for step in range(steps):
        models.train(engine, "llama", 1, first=step)
        seen.append(watched.take())
        groups = engine.optimizer.param_groups
        outside &= all(g["betas"] is b for g, b in zip(groups, own, strict=True))
    result = {"seen": seen, "outside": outside, "summary": session.summary}
    engine.destroy()
    return result


def left_alone(section: dict[str, Any]) -> str:
    """The summary with an optimizer that cannot be corrected."""
    engine = _start(section, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    models.train(engine, "llama", 2)
    session = ds_ckpt.session_of(engine)
    engine.destroy()
    return session.summary
