"""The policies that a profile compares: the configuration of each, and the plan of a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ds_ckpt.activation import Policy, find_blocks
from ds_ckpt.activation.blocks import Block, repeated_classes
from ds_ckpt.activation.planning.budget import AUTO_SHARE, ActivationPlan, Allowance, plan_within
from ds_ckpt.activation.planning.costs import measured_rates
from ds_ckpt.activation.policies import policies, policy_named
from ds_ckpt.config import parse
from ds_ckpt.config.activation import ActivationConfig, activation_policy
from ds_ckpt.errors import ConfigError, DsCkptError, Problem
from ds_ckpt.lab.estimate.profiles import NONE
from ds_ckpt.lab.subject import arguments_of
from ds_ckpt.telemetry.memory import tensors_in
from ds_ckpt.telemetry.units import GIB
from ds_ckpt.zero3.resident import OPTIONAL

_COMPARED: dict[str, dict[str, Any]] = {
    " ".join([policy.name, *map(str, options.values())]): {"policy": policy.name, **options}
    for policy in policies()
    for options in policy.compared
}


@dataclass(frozen=True)
class ComparedPolicy:
    """A policy under a name, and the activation section that asks for it (None: no section).

    Attributes:
        plan: of the policies "budget" and "auto", once the model is known (`with_plan`).
        resident: bytes beside activations by what they are, for budgets of the accelerator.
        limit_bytes: what the accelerator has, where that is known.
    """

    name: str
    section: dict[str, Any] | None
    plan: ActivationPlan | None = None
    resident: Mapping[str, int] = field(default_factory=dict)
    limit_bytes: int | None = None

    def activation(self) -> ActivationConfig | None:
        """Raises ConfigError, as training would."""
        if self.section is None:
            return None
        config = {"zero_optimization": {"stage": 3}, "ds_ckpt": {"activation": self.section}}
        return parse(config, source=self.name).activation

    def policy(self) -> Policy | None:
        """Raises ConfigError, as training would."""
        activation = self.activation()
        return None if activation is None else activation_policy(activation)


def compared(
    names: Sequence[str], modules: Sequence[str] | None, configured: dict[str, Any] | None
) -> list[ComparedPolicy]:
    """What is compared: no policy first, then the configured one, then the named ones.

    Args:
        names: "none", which is always in it, and what the registered policies compare.
        modules: of a plain model's blocks; they go into every section but those of parts.
        configured: the activation section of the user's file.
    """
    known = (NONE, *_COMPARED)
    unknown = [n for n in names if n not in known]
    if unknown:
        raise ConfigError(
            Problem(
                where="--policies",
                found=", ".join(f'"{n}"' for n in unknown),
                why="no policy has this name here",
                remedy="write names of: " + ", ".join(known) + "; others go into --config",
            ),
            headline="the policies cannot be compared",
        )
    found = [ComparedPolicy(NONE, None)]
    if configured is not None:
        found.append(ComparedPolicy("configured", configured))
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

    Of a budget for the accelerator what ZeRO keeps (`ComparedPolicy.resident`) is taken off.

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
    limit = policy.limit_bytes if config.budget_gib is None else int(config.budget_gib * GIB)
    if limit is None:
        raise ConfigError(
            Problem(
                where="--limit-gib",
                found="nothing",
                why='policy "auto" without budget_gib takes what the accelerator has, and a '
                "profile does not know which one that will be",
                remedy="write --limit-gib, for example 80",
            )
        )
    args, kwargs = arguments_of(batch)
    dtype = next((p.dtype for p in model.parameters() if p.numel()), torch.float32)
    allowance = Allowance(
        limit,
        config.budget_is_of,
        policy.resident if config.budget_is_of == "accelerator" else {},
        config.offload,
        config.offload_prefetch,
        config.offload_min_bytes,
        optional=OPTIONAL,
        aim=AUTO_SHARE if config.policy == "auto" else 1.0,
    )
    plan = plan_within(
        allowance,
        model,
        args,
        kwargs,
        rates=measured_rates(device, dtype),
        tokens=max((t.numel() for t in tensors_in(batch)), default=0),
        modules=config.modules,
    )
    return replace(policy, plan=plan)


def not_counted(activation: ActivationConfig) -> list[str]:
    """Where a policy's tensors go is not seen here: all of them count as saved whole."""
    ways = {
        "offload": "move to host memory",
        "partition": "split over the tensor-parallel group",
        "contiguous": "keep in one buffer",
    }
    return [
        f"{key}: what it would {does} counts as saved whole, in one process"
        for key, does in ways.items()
        if getattr(activation, key)
    ]
