"""The section `ds_ckpt.activation`: which activations are recomputed, and at what cost."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from ds_ckpt.activation.inputs import Keeping
from ds_ckpt.activation.policies import (
    PLANNED,
    Policy,
    PolicySettings,
    Rule,
    policy_named,
)
from ds_ckpt.fields import Expects, Name, Requires, Section, list_as_tuple

BudgetOf = Literal["activations", "saved", "accelerator"]
_ON = Requires("activation.policy", not_in=("none",), suggest="block")
_PLANNED = Requires("policy", values=("budget", "auto"))


def _every(value: Any) -> bool | int:
    if isinstance(value, bool) or (isinstance(value, int) and value >= 1):
        return value
    raise ValueError("expected a boolean or a count")


class _WithPolicy(Section):
    """Section with a policy and, in its derived models, the settings of all policies."""

    policy: str

    def settings(self) -> PolicySettings:
        """Return the policy with its settings."""
        known = policy_named(self.policy)
        own = known.settings.model_fields if known else {}
        here = type(self).model_fields
        return PolicySettings(self.policy, **{n: getattr(self, n) for n in own if n in here})


class ActivationRuleConfig(_WithPolicy):
    """Policy for some blocks. The first rule that matches a block decides."""

    aliases = {"pattern": "match", "blocks": "match", "name": "match"}

    match: Annotated[Name, Expects("a pattern over block names, or indices", '"0-15"')] = Field(
        description='Shell pattern (fnmatch) over block names, or indices from 0: "3", "0-15".'
    )
    policy: str = Field(description='Policy of these blocks; "none": no recomputation.')


class ActivationConfig(Keeping, _WithPolicy):
    """Activation checkpointing: keep few activations, recompute the others in backward."""

    aliases = {"type": "policy", "mode": "policy", "classes": "modules", "blocks": "modules"}

    policy: str = Field(
        default="none",
        description='Recomputed modules; gradients are equal to the bit. "none": nothing. "block": '
        "every block keeps its input and runs again in backward: 26% more compute, 5% of the "
        'activations kept. "attention", "mlp": these parts of every block: 12% more compute each, '
        '82% and 53% kept. "every_n": some of the blocks. "segments": several blocks in one '
        'recomputation, with a higher peak. "selective": blocks, but results of chosen operators '
        "are kept: no repeated products and 50% kept by default. (A Llama of 7B, 4,096 tokens: "
        'benchmarks/results/policies.txt.) "budget": the plan within budget_gib that recomputes '
        'least, made at the first batch. "auto": the same, for 90% of budget_gib or of the memory '
        'that is free at the first batch. Default: "block" if the section '
        'activation_checkpointing is present, else "none".',
    )
    modules: Annotated[
        tuple[Name, ...] | None,
        Field(min_length=1),
        BeforeValidator(list_as_tuple),
        Expects("a list of class names or patterns over module names", '["Block", "layers.*"]'),
        _ON,
    ] = Field(
        default=None,
        description="Modules that are blocks: class names, or shell patterns (fnmatch) over module "
        "names. Default: the layers that a Hugging Face model declares; required for other models. "
        'With policy "attention" or "mlp" and no rules: names of these parts themselves.',
    )
    rules: Annotated[
        tuple[ActivationRuleConfig, ...],
        BeforeValidator(list_as_tuple),
        Expects("a list of objects", '[{"match": "0-15", "policy": "selective"}]'),
        Requires("policy", not_in=PLANNED, suggest="block", why="a plan covers every block"),
    ] = Field(
        default=(),
        description="Policies for some blocks. The first matching rule decides; other blocks "
        "follow the policy above.",
    )
    check_determinism: Annotated[
        bool | int,
        PlainValidator(_every),
        WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 1}]}),
        Expects("true, false, or a whole number, 1 or more", "true"),
        _ON,
    ] = Field(
        default=False,
        description="Comparison of recomputed values with those of the forward; training stops "
        "with the block's name if they differ. Reads every saved tensor twice (an eighth of "
        "those above 64 KiB): 3% of a step at width 512, 0.5% at 2048 on one CPU core. n: every "
        "n-th forward only, for an n-th of the cost. Shapes and types are always compared.",
    )
    share_gather: Annotated[
        bool,
        _ON,
        Requires(
            "$.zero_optimization.stage", (3,), why="weights are gathered by ZeRO stage 3 only"
        ),
    ] = Field(
        default=True,
        description="Keep weights that a recomputation gathered until the block's backward has "
        "used them: 2 all-gathers of each parameter per step instead of 3; one block's (segment's) "
        "weights stay in memory a little longer. ZeRO stage 3 only.",
    )
    budget_gib: Annotated[
        float | None,
        Field(gt=0, allow_inf_nan=False),
        _PLANNED,
    ] = Field(
        default=None,
        description='Policies "budget" and "auto": memory of each accelerator, in GiB, for what '
        'budget_of names. Default with "auto": the whole accelerator; required on the CPU.',
    )
    budget_of: Annotated[
        BudgetOf | None,
        _PLANNED,
        Requires(
            "budget_gib",
            not_in=(None,),
            suggest=6.0,
            for_values=("activations", "saved"),
            why="without budget_gib the limit is the accelerator's memory, for everything on it",
        ),
    ] = Field(
        default=None,
        description='Memory that budget_gib limits. "activations": tensors that autograd holds at '
        'the peak of backward, recomputed ones included. "saved": tensors kept between forward and '
        'backward, as published tables count. "accelerator": activations, temporaries, weights, '
        'gradients, optimizer states and buckets. Default: "activations" if budget_gib is set, '
        'else "accelerator".',
    )

    @property
    def planned(self) -> bool:
        """Return whether a plan decides for every block."""
        return self.policy in PLANNED

    @property
    def budget_is_of(self) -> BudgetOf:
        """Return `budget_of` with its default."""
        return self.budget_of or ("accelerator" if self.budget_gib is None else "activations")

    @property
    def active(self) -> bool:
        """Return whether any block is recomputed."""
        return self.policy != "none" or any(rule.policy != "none" for rule in self.rules)

    @property
    def check_every(self) -> int:
        """Return the number of forwards from one comparison to the next; 0: no comparison."""
        return int(self.check_determinism)

    def summary(self) -> str:
        """Describe the active settings in a few words."""
        known = policy_named(self.policy)
        if known is not None:
            detail = known.words(self.settings().values)
        elif self.policy == "budget":
            detail = f" of {self.budget_gib} GiB for {self.budget_is_of}"
        else:
            detail = f" within {self.budget_gib or 'all'} GiB for {self.budget_is_of}"
        modules = f" of {', '.join(self.modules)}" if self.modules else ""
        words = f"checkpointing {self.policy}{detail}{modules}"
        if self.rules:
            words += f", {len(self.rules)} rules"
        if self.check_every:
            words += ", determinism checked"
        return words + self.keeping() + ("" if self.share_gather else ", gathers not shared")


def activation_policy(config: ActivationConfig) -> Policy:
    """Return the policy for `CheckpointedBlocks`; units of a plan are added at the first batch."""
    return Policy(
        settings=PolicySettings("none") if config.planned else config.settings(),
        rules=tuple(Rule(rule.match, rule.settings()) for rule in config.rules),
        modules=config.modules,
        check_determinism=config.check_every,
    )
