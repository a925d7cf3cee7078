"""The section `ds_ckpt.activation`: what is recomputed, and what that costs."""

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
    policy_names,
)
from ds_ckpt.fields import SWITCH, Expects, ModuleName, Section, list_as_tuple


class _PolicyName(Expects):
    """A name of the registry, as it stands when somebody asks."""

    planned: bool

    def __init__(self, *, planned: bool) -> None:
        object.__setattr__(self, "example", '"block"')
        object.__setattr__(self, "planned", planned)

    @property
    def words(self) -> str:  # type: ignore[override]
        *first, last = (f'"{name}"' for name in policy_names(planned=self.planned))
        return f"{', '.join(first)} or {last}"

    def check(self, value: object) -> str:
        if not isinstance(value, str) or value not in policy_names(planned=self.planned):
            raise ValueError("no policy has this name")
        return value

    @property
    def schema(self) -> WithJsonSchema:
        return WithJsonSchema({"enum": list(policy_names(planned=self.planned)), "type": "string"})


_POLICY, _RULE_POLICY = _PolicyName(planned=True), _PolicyName(planned=False)
PolicyName = Annotated[str, PlainValidator(_POLICY.check), _POLICY.schema, _POLICY]
RulePolicyName = Annotated[
    str, PlainValidator(_RULE_POLICY.check), _RULE_POLICY.schema, _RULE_POLICY
]
BudgetOf = Literal["activations", "saved", "accelerator"]
_COUNT = Expects("a whole number, 2 or more", "2")


def _names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else list_as_tuple(value)


def _every(value: Any) -> bool | int:
    if isinstance(value, bool) or (isinstance(value, int) and value >= 1):
        return value
    raise ValueError("neither a switch nor a count")


_Ops = Annotated[
    tuple[ModuleName, ...],
    Field(min_length=1),
    BeforeValidator(_names),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                {"type": "string", "minLength": 1},
                {"type": "null"},
            ]
        }
    ),
    Expects("sets and operators, in a list or joined by +", '"attention+qkvo"'),
]
_EVERY_N = (
    'Policy "every_n": the first block and every n-th after it are recomputed. 2 keeps half of the '
    "activations for 13% more compute, 4 three quarters for 7% (a Llama of 7B)."
)
_SEGMENT_SIZE = (
    'Policy "segments": neighbouring blocks in one recompute. Only the input of the first is kept '
    "(2: half of what block keeps, for 3% more compute than block), but in backward the inner "
    "activations of all of them are there at once, and under ZeRO-3 their weights: the peak grows "
    "with it. Worth it where blocks are small and many."
)
_SAVE_OPS = (
    'Policy "selective": whose results are kept, so that they are not computed again. Sets: '
    '"matmuls" (every product and attention core), "attention" (scaled_dot_product_attention '
    'alone), "qkvo" (the products inside attention), "gate" (the first product of each MLP); '
    'joined by "+". More compute and share of the activations kept on a Llama of 7B: "attention" '
    '22% and 9%, "attention+qkvo" 12% and 27%, "attention+qkvo+gate" 6% and 38%, "matmuls" 0% and '
    '50%. Operators of torch: "aten.mm".'
)


class ActivationRuleConfig(Section):
    """One rule: a policy of their own for some blocks. The first that names a block decides."""

    match: Annotated[ModuleName, Expects("a pattern over block names, or indices", '"0-15"')] = (
        Field(
            description="Shell pattern (fnmatch) over the names of blocks, or their indices from "
            '0 in the order of the model: "3", "0-15".'
        )
    )
    policy: RulePolicyName = Field(
        description='As above, for these blocks; "none" leaves them alone.'
    )
    every_n: Annotated[int, _COUNT] = Field(default=2, ge=2, description=_EVERY_N)
    segment_size: Annotated[int, _COUNT] = Field(default=2, ge=2, description=_SEGMENT_SIZE)
    save_ops: _Ops = Field(default=("matmuls",), description=_SAVE_OPS)


class ActivationConfig(Keeping):
    """Activation checkpointing: keep little, compute the rest again in backward."""

    policy: PolicyName = Field(
        default="none",
        description='What is recomputed; gradients stay the same to the bit. "none": nothing. '
        '"block": every block keeps its input alone and runs a second time in backward: 26% more '
        'compute, 5% of the activations kept. "attention", "mlp": these parts of every block: 12% '
        'more compute each, 82% and 53% kept. "every_n": whole blocks, some of them. "segments": '
        'several blocks in one recompute, with a higher peak. "selective": blocks, but the results '
        "of chosen operators are kept: no more products and 50% kept by default. (A Llama of 7B, "
        '4,096 tokens: benchmarks/results/policies.txt.) "budget": the model is measured at its '
        "first batch, and of the plans that fit budget_gib the one that recomputes least is taken. "
        '"auto": the same, for 90% of budget_gib or of the memory that is free at the first batch. '
        "The default is "
        '"block" where the section activation_checkpointing stands, else "none".',
    )
    modules: Annotated[
        tuple[ModuleName, ...] | None,
        Field(min_length=1),
        BeforeValidator(list_as_tuple),
        Expects("a list of class names or patterns over module names", '["Block", "layers.*"]'),
    ] = Field(
        default=None,
        description="Which modules are blocks: class names, or shell patterns (fnmatch) over "
        "module names. Default: the layers that a Hugging Face model declares. Needed for plain "
        'modules. With policy "attention" or "mlp" and no rules it names the parts themselves; '
        "by default they are found inside the blocks by what they are called.",
    )
    every_n: Annotated[int, _COUNT] = Field(default=2, ge=2, description=_EVERY_N)
    segment_size: Annotated[int, _COUNT] = Field(default=2, ge=2, description=_SEGMENT_SIZE)
    save_ops: _Ops = Field(default=("matmuls",), description=_SAVE_OPS)
    rules: Annotated[
        tuple[ActivationRuleConfig, ...],
        BeforeValidator(list_as_tuple),
        Expects("a list of objects", '[{"match": "0-15", "policy": "selective"}]'),
    ] = Field(
        default=(),
        description="Other policies for some blocks. The first rule that names a block decides; "
        "blocks that none names follow the policy above.",
    )
    check_determinism: Annotated[
        bool | int,
        PlainValidator(_every),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "boolean"},
                    {"type": "integer", "minimum": 1},
                    {"type": "null"},
                ]
            }
        ),
        Expects("true, false, or a whole number, 1 or more", "true"),
    ] = Field(
        default=False,
        description="Compare the values that backward takes from a recompute with those of the "
        "forward, and stop with the name of the block that differs. Reads every saved tensor "
        "twice (above 64 KiB an eighth of it): 3% of a step at width 512, 0.5% at 2048 on one CPU "
        "core. A number n compares every n-th forward alone, for an n-th of the cost. Shapes and "
        "types are compared always.",
    )
    share_gather: Annotated[bool, SWITCH] = Field(
        default=True,
        description="Keep the weights that recompute gathered until the backward of the same "
        "block has used them: 2 gathers of each parameter a step instead of 3, one block's "
        "weights (one segment's) held a little longer. ZeRO stage 3 only.",
    )

    budget_gib: Annotated[
        float | None,
        Field(gt=0, allow_inf_nan=False),
        Expects("a number above 0", "6.0"),
    ] = Field(
        default=None,
        description='Policy "budget" and "auto": GiB (2^30 bytes) of each accelerator that may be '
        'used, for what budget_of says. "auto" takes the whole accelerator by default, and needs a '
        "number on the CPU accelerator.",
    )
    budget_of: Annotated[
        BudgetOf | None, Expects('"activations", "saved" or "accelerator"', '"activations"')
    ] = Field(
        default=None,
        description='What budget_gib is for. "activations": what autograd holds, at the worst '
        'moment of backward, with what a recompute makes again. "saved": what waits between '
        "forward and backward alone, as published tables count. "
        '"accelerator": activations, '
        "temporaries, and what ZeRO-3 keeps: weights, gradients, optimizer, buckets. Default: "
        '"activations" where budget_gib is given, else "accelerator".',
    )

    @property
    def planned(self) -> bool:
        """Whether a plan decides for every block."""
        return self.policy in PLANNED

    @property
    def budget_is_of(self) -> BudgetOf:
        """`budget_of` with its default."""
        return self.budget_of or ("accelerator" if self.budget_gib is None else "activations")

    @property
    def active(self) -> bool:
        """Whether anything is recomputed."""
        return self.policy != "none" or any(rule.policy != "none" for rule in self.rules)

    @property
    def check_every(self) -> int:
        """Forwards of a block from one comparison to the next; 0: none."""
        return int(self.check_determinism)

    def summary(self) -> str:
        """A few words on what is switched on."""
        known = policy_named(self.policy)
        details = {
            "budget": f" of {self.budget_gib} GiB for {self.budget_is_of}",
            "auto": f" within {self.budget_gib or 'all'} GiB for {self.budget_is_of}",
        }
        detail = known.words(_settings(self)) if known is not None else details[self.policy]
        where = f" of {', '.join(self.modules)}" if self.modules else ""
        words = f"checkpointing {self.policy}{detail}{where}"
        if self.rules:
            words += f", {len(self.rules)} rules"
        if self.check_every:
            words += ", determinism checked"
        words += self.keeping()
        return words + ("" if self.share_gather else ", gathers not shared")


def activation_policy(config: ActivationConfig) -> Policy:
    """What `CheckpointedBlocks` takes; of a plan all but its units, which come later."""
    return Policy(
        settings=PolicySettings("none") if config.planned else _settings(config),
        rules=tuple(Rule(rule.match, _settings(rule)) for rule in config.rules),
        modules=config.modules,
        check_determinism=config.check_every,
    )


def _settings(config: ActivationConfig | ActivationRuleConfig) -> PolicySettings:
    return PolicySettings(config.policy, config.every_n, config.segment_size, config.save_ops)
