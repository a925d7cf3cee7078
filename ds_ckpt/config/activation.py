"""The section `ds_ckpt.activation`: which activations are recomputed, and at what cost."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ds_ckpt.activation.inputs import RECOMPUTING, CheckpointedInputsConfig
from ds_ckpt.activation.policies import (
    PLANNED,
    POLICIES,
    BudgetOf,
    Policy,
    RecomputePolicy,
    Rule,
    make_policy,
)
from ds_ckpt.fields import Expects, Name, Requires, Section, list_as_tuple

_ON = Requires("activation.policy", not_in=("none",), suggest="block")
_PLANNED = Requires("policy", values=("budget", "auto"))
_NO_BUDGET = " within 90% of the accelerator's free memory"


class _WithPolicy(Section):
    """Section with a policy and, in its derived models, the settings of all policies."""

    policy: str

    def settings(self) -> RecomputePolicy:
        known = POLICIES.get(self.policy)
        own = known.model_fields if known else {}
        return make_policy(self.policy, **{n: getattr(self, n) for n in own if hasattr(self, n)})


class ActivationRuleConfig(_WithPolicy):
    """Policy for some blocks. The first rule that matches a block decides."""

    match: Annotated[Name, Expects("a pattern over block names, or indices", '"0-15"')] = Field(
        description='Shell pattern (fnmatch) over block names, or indices from 0: "3", "0-15".'
    )
    policy: str = Field(description='Policy of these blocks; "none": plain execution.')


class ActivationConfig(CheckpointedInputsConfig, _WithPolicy):
    """Activation checkpointing: keep few activations, recompute or fetch the others."""

    policy: str = "none"
    modules: Annotated[
        tuple[Name, ...] | None,
        Field(min_length=1),
        BeforeValidator(list_as_tuple),
        Expects("a list of class names or patterns over module names", '["Block", "layers.*"]'),
        _ON,
    ] = Field(
        None,
        description="Blocks (or the parts that the policy names): class names, or shell patterns "
        "over module names. Default: the layers that a Hugging Face model declares.",
    )
    rules: Annotated[
        tuple[ActivationRuleConfig, ...],
        BeforeValidator(list_as_tuple),
        Expects("a list of objects", '[{"match": "0-15", "policy": "selective"}]'),
        Requires("policy", not_in=PLANNED, suggest="block", why="a plan covers every block"),
    ] = Field((), description="Policies for some blocks; the first matching rule decides.")
    check_determinism: Annotated[
        bool | Annotated[int, Field(ge=1)],
        Expects("true, false, or a whole number, 1 or more", "true"),
        RECOMPUTING,
    ] = Field(
        False,
        description="Compare recomputed values with the (every n-th) forward, and stop if they "
        "differ. Costs up to 3% of a step.",
    )
    share_gather: Annotated[bool, RECOMPUTING] = Field(
        True,
        description="Keep weights that a recomputation gathered until the block's backward has "
        "used them. A step then has 2 all-gathers of each parameter instead of 3.",
    )
    budget_gib: Annotated[float | None, Field(gt=0, allow_inf_nan=False), _PLANNED] = Field(
        None,
        description="Memory of each accelerator for what budget_of names, in GiB. Default with "
        '"auto": the whole accelerator.',
    )
    budget_of: Annotated[
        BudgetOf | None,
        _PLANNED,
        Requires(
            "budget_gib",
            not_in=(None,),
            suggest=6.0,
            for_values=("activations",),
            why="without budget_gib the limit is the accelerator's memory",
        ),
    ] = Field(
        None,
        description='Memory that budget_gib limits. "activations": the peak of backward. '
        '"accelerator": everything on it, which is the default without budget_gib.',
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
        """Return whether any block is recomputed or offloaded."""
        return any(policy != "none" for policy in self.policies_used())

    def policies_used(self) -> list[str]:
        """Return the policies of the section and of its rules."""
        return [self.policy, *(rule.policy for rule in self.rules)]

    def summary(self, blocks: str = "") -> str:
        """Describe the active settings in a few words; `blocks` follows the policy."""
        known = POLICIES.get(self.policy)
        of = "activations" if self.budget_is_of == "activations" else "the accelerator"
        detail = f" within {self.budget_gib:g} GiB for {of}" if self.budget_gib else _NO_BUDGET
        words = f"checkpointing {self.policy}"
        words += (self.settings().describe() if known else detail) + blocks
        rules = f", {len(self.rules)} rules" if self.rules else ""
        if "offload" in self.policies_used():
            words += f", saved tensors{self.from_size} in host memory"
        return words + rules + self.describe_input_storage()


def policy_field() -> Any:
    """Return the `Field` of `policy`, with a description of the policies registered now."""
    about = " ".join(f'"{name}": {policy.about}.' for name, policy in POLICIES.items())
    return Field(
        "none",
        description=f'Recomputed modules. {about} "budget": the plan within budget_gib that costs '
        'the least time. "auto": the same, for budget_gib or for 90% of the free memory. Default: '
        '"block" if the section activation_checkpointing is present.',
    )


def activation_policy(config: ActivationConfig) -> Policy:
    """Return the policy for `CheckpointedBlocks`; units of a plan are added at the first batch."""
    return Policy(
        settings=make_policy("none") if config.planned else config.settings(),
        rules=tuple(Rule(rule.match, rule.settings()) for rule in config.rules),
        modules=config.modules,
        check_determinism=int(config.check_determinism),
    )
