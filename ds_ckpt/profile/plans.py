"""The plan that the policies "budget" and "auto" would make: of the profiled model and batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_ckpt.config.activation import ActivationConfig
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.planner.budget import Allowance, Planner
from ds_ckpt.planner.costs import measured_rates
from ds_ckpt.planner.plan import GIB
from ds_ckpt.planner.survey import survey
from ds_ckpt.planner.watch import Watch
from ds_ckpt.profile.policies import Choice


def with_plan(choice: Choice, model: nn.Module, batch: Any, device: torch.device) -> Choice:
    """The choice with the plan that training would begin with; others as they are.

    Of a budget for the accelerator what ZeRO keeps (`Choice.resident_bytes`) is taken off.
    Temporaries are not known here, so training may recompute a little more.

    Args:
        model, batch: real, or fake with the values that are known.
        device: whose rates weigh products against memory.

    Raises:
        ConfigError: "auto" has no limit here.
        UnsupportedError: nothing fits, or the model cannot be measured.
    """
    config = choice.activation()
    if config is None or not config.planned:
        return choice
    args, kwargs = _called(batch)
    found = survey(model, args, kwargs, modules=config.modules)
    dtype = next((p.dtype for p in model.parameters() if p.numel()), torch.float32)
    whole = [t.numel() for t in tree_leaves(batch) if isinstance(t, Tensor)]
    planner = Planner(found, measured_rates(device, dtype), max(whole, default=0))
    of = config.budget_is_of
    resident = {"what ZeRO keeps": choice.resident_bytes} if of == "accelerator" else {}
    budget = _budget(config, choice.limit_bytes)
    allowance = Allowance(
        budget,
        of,
        resident,
        config.offload,
        config.offload_prefetch,
        config.offload_min_bytes,
    )
    return replace(choice, plan=planner.plan(allowance))


def _budget(config: ActivationConfig, limit_bytes: int | None) -> int:
    if config.budget_gib is not None:
        limit_bytes = int(config.budget_gib * GIB)
    if limit_bytes is None:
        raise ConfigError(
            Problem(
                where="--limit-gib",
                found="nothing",
                why='policy "auto" without budget_gib takes what the accelerator has, and a '
                "profile does not know which one that will be",
                remedy="write --limit-gib, for example 80",
            )
        )
    return Watch(limit_bytes).budget_bytes if config.policy == "auto" else limit_bytes


def _called(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def not_counted(activation: ActivationConfig) -> list[str]:
    """Where a policy's tensors go is not seen here: all of them count as held."""
    ways = {
        "offload": "move to host memory",
        "partition": "split over the tensor-parallel group",
        "contiguous": "keep in one buffer",
    }
    return [
        f"{key}: what it would {does} counts as held whole, in one process"
        for key, does in ways.items()
        if getattr(activation, key)
    ]
