"""The policies that a profile compares: the configuration of each, and the plan of a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ds_ckpt.activation import Policy, find_blocks
from ds_ckpt.activation.blocks import Block, repeated_classes
from ds_ckpt.activation.policies import policies, policy_named
from ds_ckpt.config import parse
from ds_ckpt.config.activation import ActivationConfig
from ds_ckpt.config.policy import activation_policy
from ds_ckpt.errors import ConfigError, DsCkptError, Problem
from ds_ckpt.planner.budget import ActivationPlan, Allowance, MemoryWatch, Planner
from ds_ckpt.planner.costs import measured_rates
from ds_ckpt.planner.survey import survey
from ds_ckpt.profile.subject import arguments_of
from ds_ckpt.telemetry.memory import tensors_in
from ds_ckpt.telemetry.units import GIB

NONE = "none"
CONFIGURED = "configured"
ZERO3 = {"zero_optimization": {"stage": 3}}
_COMPARED: dict[str, dict[str, Any]] = {
    " ".join([policy.name, *map(str, options.values())]): {"policy": policy.name, **options}
    for policy in policies()
    for options in policy.compared
}
NAMES = (NONE, *_COMPARED)


@dataclass(frozen=True)
class ComparedPolicy:
    """A policy under a name, and the activation section that asks for it (None: no section).

    Attributes:
        plan: of the policies "budget" and "auto", once the model is known (`with_plan`).
        resident_bytes: what ZeRO keeps beside activations, for budgets of the accelerator.
        limit_bytes: what the accelerator has, where that is known.
    """

    name: str
    section: dict[str, Any] | None
    plan: ActivationPlan | None = None
    resident_bytes: int = 0
    limit_bytes: int | None = None

    def activation(self) -> ActivationConfig | None:
        """Raises ConfigError, as training would."""
        if self.section is None:
            return None
        plugin = parse({**ZERO3, "ds_ckpt": {"activation": self.section}}, source=self.name)
        return plugin.activation

    def policy(self) -> Policy | None:
        """Raises ConfigError, as training would."""
        activation = self.activation()
        return None if activation is None else activation_policy(activation)


def compared(
    names: Sequence[str], modules: Sequence[str] | None, configured: dict[str, Any] | None
) -> list[ComparedPolicy]:
    """What is compared: no policy first, then the configured one, then the named ones.

    Args:
        names: of NAMES; "none" is always in it.
        modules: of a plain model's blocks; they go into every section but those of parts.
        configured: the activation section of the user's file.
    """
    unknown = [n for n in names if n not in NAMES]
    if unknown:
        raise ConfigError(
            Problem(
                where="--policies",
                found=", ".join(f'"{n}"' for n in unknown),
                why="no policy has this name here",
                remedy="write names of: " + ", ".join(NAMES) + "; others go into --config",
            ),
            headline="the policies cannot be compared",
        )
    found = [ComparedPolicy(NONE, None)]
    if configured is not None:
        found.append(ComparedPolicy(CONFIGURED, configured))
    for name in names:
        if name == NONE or _COMPARED[name] == configured:
            continue
        section = dict(_COMPARED[name])
        if modules is not None:
            policy = policy_named(section["policy"])
            if policy is not None and policy.of_parts:  # there they name the parts themselves
                continue
            section["modules"] = list(modules)
        found.append(ComparedPolicy(name, section))
    return found


def blocks_of(
    model: nn.Module, modules: Sequence[str] | None
) -> tuple[list[Block], Sequence[str] | None]:
    """The blocks that bytes are told apart by, and the patterns that a configuration must name.

    A plain model's are found by the class that is repeated; a model without any is one block less:
    all of it counts as outside.
    """
    if modules is not None:
        return find_blocks(model, modules), modules
    try:
        return find_blocks(model, None), None
    except DsCkptError:
        likely = repeated_classes(model)[:1]
        return (find_blocks(model, likely), likely) if likely else ([], None)


def with_plan(
    policy: ComparedPolicy, model: nn.Module, batch: Any, device: torch.device
) -> ComparedPolicy:
    """The policy with the plan that training would begin with; others as they are.

    Of a budget for the accelerator what ZeRO keeps (`ComparedPolicy.resident_bytes`) is taken off.
    Temporaries are not known here, so training may recompute a little more.

    Args:
        model, batch: real, or fake with the values that are known.
        device: whose rates weigh products against memory.

    Raises:
        ConfigError: "auto" has no limit here.
        UnsupportedError: nothing fits, or the model cannot be measured.
    """
    config = policy.activation()
    if config is None or not config.planned:
        return policy
    args, kwargs = arguments_of(batch)
    found = survey(model, args, kwargs, modules=config.modules)
    dtype = next((p.dtype for p in model.parameters() if p.numel()), torch.float32)
    tokens = max((t.numel() for t in tensors_in(batch)), default=0)
    planner = Planner(found, measured_rates(device, dtype), tokens)
    of = config.budget_is_of
    resident = {"what ZeRO keeps": policy.resident_bytes} if of == "accelerator" else {}
    budget = _budget(config, policy.limit_bytes)
    allowance = Allowance(
        budget,
        of,
        resident,
        config.offload,
        config.offload_prefetch,
        config.offload_min_bytes,
    )
    return replace(policy, plan=planner.plan(allowance))


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
    return MemoryWatch(limit_bytes).budget_bytes if config.policy == "auto" else limit_bytes


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
