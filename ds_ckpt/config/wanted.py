"""What a raw section asks for, told even where some of its values are wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_ckpt.activation.policies import policy_names
from ds_ckpt.compression import methods
from ds_ckpt.config.paths import lookup, nearest


def _resolve(value: object, choices: tuple[str, ...]) -> str | None:
    """The choice that stands there, or that was meant; None where nobody can tell."""
    if value is None:
        return "none"
    if not isinstance(value, str):
        return None
    return value if value in choices else nearest(value, choices)


def _checkpointing_rules(ours: object) -> bool:
    rules = lookup(ours, ("activation", "rules"))
    policies = [lookup(r, ("policy",)) for r in rules] if isinstance(rules, list | tuple) else []
    return any(p not in (None, "none") for p in policies)


@dataclass(frozen=True)
class Wanted:
    """What the raw section asks for, as far as it can be told; None: cannot be told.

    `policy` is "rules" where the policy is "none" and rules checkpoint some blocks.
    """

    ours: Any
    policy: str | None
    method: str | None

    @classmethod
    def of(cls, ours: Any) -> Wanted:
        policy = _resolve(lookup(ours, ("activation", "policy")), policy_names())
        if policy == "none" and _checkpointing_rules(ours):
            policy = "rules"
        method = _resolve(lookup(ours, ("compression", "method")), ("none", *methods()))
        return cls(ours, policy, method)

    @property
    def checkpointing(self) -> bool:
        return self.policy not in (None, "none")

    @property
    def compressing(self) -> bool:
        return self.method not in (None, "none")
