"""Momentum correction on real ZeRO-3 engines: when it is active, on which groups, what is left."""

from typing import Any

import pytest
import torch

import ds_ckpt
from tests.distributed import models
from tests.distributed.models import topk_section
from tests.distributed.pool import fresh, ranks
from tests.distributed.training import of_all_ranks, trained

OWN = 0.9


def section_of(momentum: Any = 0.4, **compression: Any) -> dict[str, Any]:
    feedback = {"momentum": momentum}
    return topk_section(topk={"density": 0.05}, error_feedback=feedback, **compression)


def _start(section: dict[str, Any], optimizer: Any, **options: Any) -> Any:
    """An engine with an optimizer of ours, matrices and the rest in groups of their own."""
    fresh()
    config = models.zero3_config(ds_ckpt=section, **options)
    del config["optimizer"]
    model = models.build("llama")
    matrices, vectors = (
        [p for p in model.parameters() if (p.ndim > 1) == large] for large in (True, False)
    )
    engine, *_ = ds_ckpt.initialize(
        model=model,
        optimizer=optimizer([{"params": matrices}, {"params": vectors}], lr=1e-3),
        config=config,
    )
    engine.train()
    return engine


@pytest.mark.parametrize(
    "options",
    [{"accumulation": 2}, {"offload_optimizer": True, "clip": 0.1}, {"bf16": {"enabled": True}}],
    ids=["accumulation", "offload", "bf16"],
)
@pytest.mark.sampled(2)
@ranks(2)
def test_the_first_moment_is_corrected_from_the_warm_ups_end(options: dict[str, Any]) -> None:
    engine = _start(section_of(warmup_steps=2), torch.optim.AdamW, **options)
    optimizer, groups = engine.optimizer.optimizer, engine.optimizer.param_groups
    seen: list[list[tuple[int, float]]] = []
    step, own = optimizer.step, [group["betas"] for group in groups]

    def watched(*args: Any, **kwargs: Any) -> Any:
        found = [(i, g["betas"][0]) for i, g in enumerate(optimizer.param_groups) if g["params"]]
        seen[-1] += found
        return step(*args, **kwargs)

    optimizer.step = watched
    for number in range(4):
        seen.append([])
        models.train(engine, "llama", 1, first=number)
        assert all(g["betas"] is b for g, b in zip(groups, own, strict=True))
    for betas in seen[:2]:
        assert all(b1 == OWN for _, b1 in betas)
    for betas in seen[2:]:
        assert {group for group, _ in betas} == {0, 1}
        assert all(b1 < OWN if group == 0 else b1 == OWN for group, b1 in betas)  # norms: dense
    summary = ds_ckpt.session_of(engine).summary
    assert "momentum correction 0.4" in summary
    one, other = of_all_ranks((seen, summary))
    assert one == other
    engine.destroy()


@ranks(2)
def test_it_is_off_by_default() -> None:
    off, on = (trained("llama", section_of(how), 3) for how in ("none", 0.4))
    plain = trained("llama", topk_section(topk={"density": 0.05}), 3)
    assert off.losses == plain.losses
    assert off.weights == plain.weights
    assert on.losses[:1] == off.losses[:1]
    assert on.losses != off.losses


@ranks(2)
def test_another_optimizer_is_not_corrected() -> None:
    engine = _start(section_of(), torch.optim.SGD)
    models.train(engine, "llama", 2)
    summary = ds_ckpt.session_of(engine).summary
    assert "SGD is not" in summary.partition("no momentum correction: ")[2]
    engine.destroy()
