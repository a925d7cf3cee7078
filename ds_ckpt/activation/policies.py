"""Policies: from a name in the configuration to the modules of each recomputation.

A policy is one class with its settings as fields, and `@register_policy`. The configuration and
`ds-ckpt profile` read the registry.
"""

import fnmatch
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, WithJsonSchema
from torch import nn

from ds_ckpt.activation.blocks import (
    Block,
    Part,
    attention_parts,
    by_pattern,
    find_blocks,
    mlp_parts,
)
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.fields import Expects, Name, Requires, Section, is_auto, list_as_tuple

_SECTION = "$.ds_ckpt.activation"
PLANNED = ("budget", "auto")
"""Policies whose units a planner chooses within a budget."""
BudgetOf = Literal["activations", "accelerator"]


@dataclass(frozen=True)
class Unit:
    """Modules of one recomputation; kept are the first one's input, and results of `save_ops`.

    A unit that `offloads` is one block, not recomputed, whose saved tensors go to host memory.
    """

    blocks: tuple[Block, ...]
    save_ops: tuple[str, ...] = ()
    where: str = f"{_SECTION}.save_ops"
    offloads: bool = False


class RecomputePolicy(Section):
    """A policy. Its fields are the keys of the section that belong to it.

    Attributes:
        name: name in the configuration.
        about: what it recomputes: one clause for the schema.
        of_parts: `"modules"` without rules names the parts of blocks themselves.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    of_parts: ClassVar[bool] = False

    def units(self, blocks: Sequence[Block], where: str) -> list[Unit]:
        """Return the units of some blocks, in the model's order.

        Raises:
            ConfigError: the blocks have no modules for the policy; `where` is the JSON path.
        """
        return []

    def describe(self) -> str:
        """Describe the settings in a few words, behind the policy's name."""
        return ""


POLICIES: dict[str, type[RecomputePolicy]] = {}
"""Registered policies by name, in order."""
_AnyPolicy = TypeVar("_AnyPolicy", bound=RecomputePolicy)


def register_policy(policy: type[_AnyPolicy]) -> type[_AnyPolicy]:
    """Register a policy under its name (a class decorator); ValueError if it cannot be."""
    if policy.name in POLICIES or policy.name in PLANNED:
        raise ValueError(f'there is a policy "{policy.name}" already')
    if not getattr(policy, "about", ""):
        raise ValueError(f'policy "{policy.name}" lacks about: one clause for the schema')
    POLICIES[policy.name] = policy
    return policy


def policy_names(*, planned: bool = True) -> tuple[str, ...]:
    """Return names for a configuration; for its rules without those of the planner."""
    return (*POLICIES, *PLANNED) if planned else tuple(POLICIES)


def setting_fields() -> dict[str, Any]:
    """Return type and `Field` of every policy's settings, for the models of the configuration."""
    fields: dict[str, Any] = {}
    for policy in POLICIES.values():
        for name, field_ in policy.model_fields.items():
            kind = field_.annotation
            for marker in (*field_.metadata, Requires("policy", (policy.name,))):
                kind = Annotated[kind, marker]  # type: ignore[assignment]
            fields[name] = kind, Field(default=field_.default, description=field_.description)
    return fields


# from a policy to units


def make_policy(name: str = "block", **values: Any) -> RecomputePolicy:
    """Return a registered policy with its settings; "none" leaves blocks alone."""
    return POLICIES[name](**values)


@dataclass(frozen=True)
class Rule:
    """Policy for the blocks that `match` names: a pattern, "3", or "0-15"."""

    match: str
    settings: RecomputePolicy


@dataclass(frozen=True)
class Policy:
    """Policy of all blocks, and of those that a rule names; the first such rule decides.

    `modules` are class names or patterns; None takes the layers that Hugging Face declares. Every
    `check_determinism`-th forward of a block is compared with its recomputation; 0: none.
    """

    settings: RecomputePolicy = field(default_factory=make_policy)
    rules: tuple[Rule, ...] = ()
    modules: tuple[str, ...] | None = None
    check_determinism: int = 0


def make_units(model: nn.Module, policy: Policy) -> list[Unit]:
    """Return the units of a model; ConfigError if a pattern, rule or policy finds nothing."""
    if policy.modules is not None and policy.settings.of_parts and not policy.rules:
        return [Unit((block,)) for block in by_pattern(model, policy.modules)]
    left = dict(enumerate(find_blocks(model, policy.modules)))
    described = f"the blocks are 0-{len(left) - 1}, {left[0].name} to {left[len(left) - 1].name}"
    units: list[Unit] = []
    problems = []
    for i, rule in enumerate(policy.rules):
        where = f"{_SECTION}.rules[{i}]"
        named = [n for n, block in left.items() if _matches(rule.match, n, block.name)]
        units += rule.settings.units([left.pop(n) for n in named], where)
        if not named:
            why = "no block that the earlier rules leave has this index or name"
            problems.append(Problem(f"{where}.match", f'"{rule.match}"', why, described))
    if problems:
        raise ConfigError(problems)
    units += policy.settings.units(list(left.values()), _SECTION)
    order = {module: i for i, module in enumerate(model.modules())}
    return sorted(units, key=lambda unit: order[unit.blocks[0].module])


def _matches(match: str, index: int, name: str) -> bool:
    numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", match)
    if numbers:
        first = int(numbers[1])
        return first <= index <= int(numbers[2] or first)
    return fnmatch.fnmatchcase(name, match)


# the policies themselves


@register_policy
class _None(RecomputePolicy):
    name = "none"
    about = "plain execution"


@register_policy
class _Block(RecomputePolicy):
    name = "block"
    about = "every block"

    def units(self, blocks: Sequence[Block], where: str) -> list[Unit]:
        return [Unit((block,)) for block in blocks]


@register_policy
class _Offload(RecomputePolicy):
    name = "offload"
    about = "nothing; saved tensors of blocks go to host memory and come back ahead of backward"

    def units(self, blocks: Sequence[Block], where: str) -> list[Unit]:
        return [Unit((block,), offloads=True) for block in blocks]


class _Parts(RecomputePolicy):
    of_parts = True

    def chains(self, block: Block) -> list[list[Part]]:
        raise NotImplementedError

    def units(self, blocks: Sequence[Block], where: str) -> list[Unit]:
        chains = [chain for block in blocks for chain in self.chains(block)]
        if blocks and not chains:
            name, module = blocks[0].name, blocks[0].module
            why = f"no part of {type(module).__name__} is called like an {self.name}"
            remedy = f'name the parts: "modules": ["{name}.<part>"], or use "block"'
            raise ConfigError(Problem(f"{where}.policy", f'"{self.name}"', why, remedy))
        return [Unit(tuple(Block(*part) for part in chain)) for chain in chains]


@register_policy
class _Attention(_Parts):
    name = "attention"
    about = "attention of every block"

    def chains(self, block: Block) -> list[list[Part]]:
        return [[part] for part in attention_parts(block.name, block.module)]


@register_policy
class _Mlp(_Parts):
    name = "mlp"
    about = "the MLP of every block"

    def chains(self, block: Block) -> list[list[Part]]:
        return mlp_parts(block.name, block.module)


@register_policy
class _EveryN(RecomputePolicy):
    name = "every_n"
    about = "some blocks"
    every_n: int = Field(
        default=2,
        ge=2,
        description='Policy "every_n": stride of recomputed blocks, starting at the first. 2 keeps '
        "half of the activations, 4 three quarters.",
    )

    def units(self, blocks: Sequence[Block], where: str) -> list[Unit]:
        return [Unit((block,)) for block in blocks[:: self.every_n]]

    def describe(self) -> str:
        return f" {self.every_n}"


@register_policy
class _Segments(RecomputePolicy):
    name = "segments"
    about = "several blocks in one recomputation"
    segment_size: Annotated[
        Annotated[int, Field(ge=2)] | Literal["sqrt"] | None,
        Expects('a whole number, 2 or more, or "sqrt"', "4"),
    ] = Field(
        default=None,
        description='Policy "segments": neighbouring blocks in one recomputation, by default 2; '
        '"sqrt" makes about as many segments as blocks in each. Only the first block\'s input '
        "is kept, but in backward all of their inner activations exist at once, and under ZeRO-3 "
        "all of their weights. Useful if blocks are small and many.",
    )
    segments: Annotated[
        int | None,
        Field(ge=1),
        Requires("segment_size", (None,), why="segment_size decides already"),
    ] = Field(
        default=None,
        description='Policy "segments": number of segments that each stack of neighbouring blocks '
        "is divided into, in place of segment_size. Sizes differ by one block at most.",
    )

    def units(self, blocks: Sequence[Block], where: str) -> list[Unit]:
        stacks: list[list[Block]] = []
        for block in blocks:  # neighbours in one container and of one class
            if stacks and _follows(stacks[-1][-1], block):
                stacks[-1].append(block)
            else:
                stacks.append([block])
        return [Unit(tuple(segment)) for stack in stacks for segment in self._divided(stack)]

    def _divided(self, stack: Sequence[Block]) -> list[Sequence[Block]]:
        count, total, size = self.segments, len(stack), self.segment_size or 2
        if size == "sqrt":
            count = round(math.sqrt(total))
        elif count is None:
            return [stack[i : i + size] for i in range(0, total, size)]
        count = min(count, total)
        return [stack[i * total // count : (i + 1) * total // count] for i in range(count)]

    def describe(self) -> str:
        if self.segments is not None:
            return f", {self.segments} of each stack"
        size = self.segment_size or 2
        return f" of {'about sqrt(n) blocks' if size == 'sqrt' else size}"


def _follows(before: Block, block: Block) -> bool:
    parent, _, index = block.name.rpartition(".")
    parent_before, _, index_before = before.name.rpartition(".")
    if parent != parent_before or type(before.module) is not type(block.module):
        return False
    numbers = index.isdecimal() and index_before.isdecimal()
    return numbers and int(index) == int(index_before) + 1


def _names(value: Any) -> Any:
    if is_auto(value):
        raise ValueError("expected names")
    return (value,) if isinstance(value, str) else list_as_tuple(value)


@register_policy
class _Selective(RecomputePolicy):
    name = "selective"
    about = "blocks, but results of chosen operators are kept"
    save_ops: Annotated[
        tuple[Name, ...],
        Field(min_length=1),
        BeforeValidator(_names),
        WithJsonSchema({"type": ["array", "string"], "items": {"type": "string"}, "minItems": 1}),
        Expects("sets and operators, in a list or joined by +", '"attention+qkvo"'),
    ] = Field(
        default=("matmuls",),
        description='Policy "selective": operators whose results are kept. Sets: "matmuls" (every '
        'matrix product and attention core), "attention" (scaled_dot_product_attention), "qkvo" '
        '(products inside attention), "gate" (first product of each MLP); joined by "+". '
        'Single operators of torch: "aten.mm".',
    )

    def units(self, blocks: Sequence[Block], where: str) -> list[Unit]:
        return [Unit((block,), self.save_ops, f"{where}.save_ops") for block in blocks]

    def describe(self) -> str:
        return f" ({'+'.join(self.save_ops)})"
