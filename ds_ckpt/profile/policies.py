"""The policies that a profile compares, and the configuration that stands for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_ckpt.activation import Policy, find_blocks
from ds_ckpt.activation.blocks import Block, repeated_classes
from ds_ckpt.activation.policies import policies, policy_named
from ds_ckpt.config import parse
from ds_ckpt.config.activation import ActivationConfig
from ds_ckpt.config.policy import activation_policy
from ds_ckpt.errors import ConfigError, DsCkptError, Problem
from ds_ckpt.planner.plan import ActivationPlan

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
class Choice:
    """A policy under a name, and the activation section that asks for it (None: no section).

    Attributes:
        plan: of the policies "budget" and "auto", once the model is known (`plans.with_plan`).
        resident_bytes: what ZeRO keeps beside activations, for budgets of the accelerator.
        limit_bytes: what the accelerator has, where that is known.
    """

    name: str
    section: dict[str, Any] | None
    plan: ActivationPlan | None = None
    resident_bytes: int = 0
    limit_bytes: int | None = None

    @property
    def config(self) -> dict[str, Any] | None:
        """To be merged into a DeepSpeed file."""
        return None if self.section is None else {"ds_ckpt": {"activation": self.section}}

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


def choices(
    names: Sequence[str], modules: Sequence[str] | None, configured: dict[str, Any] | None
) -> list[Choice]:
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
    found = [Choice(NONE, None)]
    if configured is not None:
        found.append(Choice(CONFIGURED, configured))
    for name in names:
        if name == NONE or _COMPARED[name] == configured:
            continue
        section = dict(_COMPARED[name])
        if modules is not None:
            policy = policy_named(section["policy"])
            if policy is not None and policy.of_parts:  # there they name the parts themselves
                continue
            section["modules"] = list(modules)
        found.append(Choice(name, section))
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
