"""Policies: from a name in the configuration to the modules of each recomputation.

A policy is one `RecomputePolicy` with its settings, registered in one line. The configuration, the
planner and `ds-ckpt profile` read the registry.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from pydantic import BeforeValidator, Field, WithJsonSchema
from torch import nn

from ds_ckpt.activation.blocks import (
    Block,
    attention_parts,
    block_of,
    by_pattern,
    find_blocks,
    mlp_parts,
)
from ds_ckpt.errors import ConfigError, Problem
from ds_ckpt.fields import Expects, Name, Requires, Section, is_auto, list_as_tuple

_SECTION = "$.ds_ckpt.activation"
PLANNED = ("budget", "auto")
"""Policies whose units a planner chooses within a budget."""
Groups = Sequence[Sequence[str]]
"""Names of the modules of each recomputation."""


class PartNames(Protocol):
    """The parts of one block, by name."""

    @property
    def attention(self) -> Sequence[str]:
        """Return the names of attention modules."""

    @property
    def mlps(self) -> Groups:
        """Return the modules of each MLP."""


@dataclass(frozen=True, init=False)
class PolicySettings:
    """A policy with its settings.

    Args:
        policy: name of the policy; "none" leaves blocks alone.
        values: settings that differ from their defaults.
    """

    policy: str
    values: Section

    def __init__(self, policy: str = "block", **values: Any) -> None:
        known = policy_named(policy)
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "values", (known.settings if known else Section)(**values))


@dataclass(frozen=True)
class Rule:
    """Policy for the blocks that `match` names: a pattern, "3", or "0-15"."""

    match: str
    settings: PolicySettings


@dataclass(frozen=True)
class Policy:
    """Policy of all blocks, and of those that a rule names; the first such rule decides.

    Attributes:
        modules: class names or patterns; None takes the layers that Hugging Face declares. They
            name the parts themselves for policies of parts (without rules), else the blocks.
        check_determinism: compare every n-th forward of a block with its recompute; 0 never.
    """

    settings: PolicySettings = field(default_factory=PolicySettings)
    rules: tuple[Rule, ...] = ()
    modules: tuple[str, ...] | None = None
    check_determinism: int = 0


@dataclass(frozen=True)
class Unit:
    """Modules of one recomputation, in the order in which they run.

    Attributes:
        blocks: one module, or neighbours whose inner inputs are not kept.
        save_ops: operator results that are kept; empty: none.
        where: JSON path of `save_ops`, for messages.
    """

    blocks: tuple[Block, ...]
    save_ops: tuple[str, ...] = ()
    where: str = f"{_SECTION}.save_ops"


# the registry


@dataclass(frozen=True)
class RecomputePolicy:
    """One policy.

    Attributes:
        name: name in the configuration.
        units: function that returns the units of some blocks, in the model's order, as
            `units(blocks, settings, where)` with the JSON path of the section. It raises
            ConfigError if the blocks have no modules for it.
        settings: keys of the section that belong to the policy, as a `Section`.
        words: its settings in a few words, behind its name.
        of_parts: `"modules"` without rules names the parts of blocks themselves.
        candidates: what the planner tries on one block, as modules of each recomputation and
            sets of operators that are kept: `candidates(block, parts)`.
        compared: settings with which `ds-ckpt profile` compares it.
    """

    name: str
    units: Callable[[Sequence[Block], Any, str], list[Unit]]
    settings: type[Section] = Section
    words: Callable[[Any], str] = lambda settings: ""
    of_parts: bool = False
    candidates: Callable[[str, PartNames], list[tuple[Groups, tuple[str, ...]]]] = (
        lambda block, parts: []
    )
    compared: tuple[Mapping[str, Any], ...] = ()


_POLICIES: dict[str, RecomputePolicy] = {}


def register_policy(policy: RecomputePolicy) -> RecomputePolicy:
    """Register a policy under its name.

    Raises:
        ValueError: the name is taken.
    """
    if policy.name in _POLICIES or policy.name in PLANNED:
        raise ValueError(f'there is a policy "{policy.name}" already')
    _POLICIES[policy.name] = policy
    return policy


def policies() -> tuple[RecomputePolicy, ...]:
    """Return all registered policies, in order."""
    return tuple(_POLICIES.values())


def policy_named(name: str) -> RecomputePolicy | None:
    """Return a registered policy."""
    return _POLICIES.get(name)


def policy_names(*, planned: bool = True) -> tuple[str, ...]:
    """Return names for a configuration; for its rules without those of the planner."""
    return (*_POLICIES, *PLANNED) if planned else tuple(_POLICIES)


def setting_fields() -> dict[str, Any]:
    """Return type and `Field` of every policy's settings, for the models of the configuration."""
    fields: dict[str, Any] = {}
    for policy in policies():
        for name, field_ in policy.settings.model_fields.items():
            users = tuple(p.name for p in policies() if name in p.settings.model_fields)
            kind = field_.annotation
            for marker in (*field_.metadata, Requires("policy", users)):
                kind = Annotated[kind, marker]  # type: ignore[assignment]
            about = Field(default=field_.default, description=field_.description)
            fields.setdefault(name, (kind, about))
    return fields


# from a policy to units


def make_plan(model: nn.Module, policy: Policy) -> list[Unit]:
    """Return the units of a model.

    Raises:
        ConfigError: nothing is found for a pattern, a rule or a policy.
        UnsupportedError: from `find_blocks`.
    """
    if policy.modules is not None and _of(policy.settings).of_parts and not policy.rules:
        return [Unit((block,)) for block in by_pattern(model, policy.modules)]
    blocks = find_blocks(model, policy.modules)
    groups = _by_rule(blocks, policy.rules)
    wanted = [(rule.settings, f"{_SECTION}.rules[{i}]") for i, rule in enumerate(policy.rules)]
    wanted.append((policy.settings, _SECTION))
    units: list[Unit] = []
    for group, (settings, where) in zip(groups, wanted, strict=True):
        if group:
            units += _of(settings).units(group, settings.values, where)
    order = {id(module): i for i, module in enumerate(model.modules())}
    return sorted(units, key=lambda unit: order[id(unit.blocks[0].module)])


def _of(settings: PolicySettings) -> RecomputePolicy:
    return _POLICIES[settings.policy]


def _by_rule(blocks: Sequence[Block], rules: Sequence[Rule]) -> list[list[Block]]:
    """Return blocks by the first rule that names them; those without a rule come last."""
    groups: list[list[Block]] = [[] for _ in range(len(rules) + 1)]
    hit = [False] * len(rules)
    for index, block in enumerate(blocks):
        matching = [i for i, rule in enumerate(rules) if _matches(rule.match, index, block.name)]
        for i in matching:
            hit[i] = True
        groups[matching[0] if matching else len(rules)].append(block)
    problems = []
    for i, rule in enumerate(rules):
        if not groups[i]:
            why = "no block has this index or name"
            if hit[i]:
                why = "every block that it names is taken by an earlier rule"
            problems.append(
                Problem(
                    where=f"{_SECTION}.rules[{i}].match",
                    found=f'"{rule.match}"',
                    why=why,
                    remedy=f"the blocks are 0-{len(blocks) - 1}, {blocks[0].name} to "
                    f"{blocks[-1].name}",
                )
            )
    if problems:
        raise ConfigError(problems)
    return groups


def _matches(match: str, index: int, name: str) -> bool:
    numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", match)
    if numbers:
        first = int(numbers[1])
        return first <= index <= int(numbers[2] or first)
    return fnmatch.fnmatchcase(name, match)


# the policies themselves


def _attention(blocks: Sequence[Block], settings: Section, where: str) -> list[Unit]:
    chains = [[part] for b in blocks for part in attention_parts(b.name, b.module)]
    return _parts("attention", blocks, where, chains)


def _mlp(blocks: Sequence[Block], settings: Section, where: str) -> list[Unit]:
    chains = [chain for b in blocks for chain in mlp_parts(b.name, b.module)]
    return _parts("mlp", blocks, where, chains)


def _parts(
    policy: str,
    blocks: Sequence[Block],
    where: str,
    chains: Sequence[Sequence[tuple[str, nn.Module]]],
) -> list[Unit]:
    if not chains:
        block = blocks[0]
        children = ", ".join(f"{n} ({type(m).__name__})" for n, m in block.module.named_children())
        raise ConfigError(
            Problem(
                where=f"{where}.policy",
                found=f'"{policy}"',
                why=f"no part of {type(block.module).__name__} is called like an {policy}; it has "
                f"{children or 'no parts'}",
                remedy=f'name the parts: "modules": ["{block.name}.<part>"], or use "block"',
            )
        )
    return [Unit(tuple(block_of(name, module) for name, module in chain)) for chain in chains]


class _EveryN(Section):
    every_n: Annotated[int, Expects("a whole number, 2 or more", "2")] = Field(
        default=2,
        ge=2,
        description='Policy "every_n": stride of recomputed blocks, starting at the first. 2 keeps '
        "half of the activations for 13% more compute, 4 keeps three quarters for 7% (a Llama of "
        "7B).",
    )


class _SegmentSize(Section):
    segment_size: Annotated[int, Expects("a whole number, 2 or more", "2")] = Field(
        default=2,
        ge=2,
        description='Policy "segments": neighbouring blocks in one recomputation. Only the '
        "first one's input is kept (2: half of the memory of block, 3% more compute), but in "
        "backward all of their inner activations exist at once, and under ZeRO-3 all of their "
        "weights. Useful if blocks are small and many.",
    )


def _names(value: Any) -> Any:
    if is_auto(value):
        raise ValueError("expected names")
    return (value,) if isinstance(value, str) else list_as_tuple(value)


class _SaveOps(Section):
    save_ops: Annotated[
        tuple[Name, ...],
        Field(min_length=1),
        BeforeValidator(_names),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                    {"type": "string", "minLength": 1},
                ]
            }
        ),
        Expects("sets and operators, in a list or joined by +", '"attention+qkvo"'),
    ] = Field(
        default=("matmuls",),
        description='Policy "selective": operators whose results are kept. Sets: "matmuls" (every '
        'matrix product and attention core), "attention" (scaled_dot_product_attention), "qkvo" '
        '(products inside attention), "gate" (first product of each MLP); joined by "+". Extra '
        'compute and share of activations kept on a Llama of 7B: "attention" 22% and 9%, '
        '"attention+qkvo" 12% and 27%, "attention+qkvo+gate" 6% and 38%, "matmuls" 0% and 50%. '
        'Single operators of torch: "aten.mm".',
    )


def _segments(blocks: Sequence[Block], size: int) -> list[list[Block]]:
    """Group neighbours in one container and of one class, at most `size` together."""
    segments: list[list[Block]] = []
    for block in blocks:
        before = segments[-1][-1] if segments else None
        joins = (
            before is not None
            and len(segments[-1]) < size
            and type(before.module) is type(block.module)
            and _follows(before.name, block.name)
        )
        if joins:
            segments[-1].append(block)
        else:
            segments.append([block])
    return segments


def _follows(before: str, name: str) -> bool:
    parent, _, index = name.rpartition(".")
    parent_before, _, index_before = before.rpartition(".")
    numbers = index.isdecimal() and index_before.isdecimal()
    return parent == parent_before and numbers and int(index) == int(index_before) + 1


_SELECTIONS = (
    "attention",
    "qkvo",
    "gate",
    "attention+qkvo",
    "attention+gate",
    "qkvo+gate",
    "attention+qkvo+gate",
    "matmuls",
)
register_policy(
    RecomputePolicy("none", lambda blocks, *_: [], candidates=lambda block, parts: [([], ())])
)
register_policy(
    RecomputePolicy(
        "block",
        lambda blocks, *_: [Unit((block,)) for block in blocks],
        candidates=lambda block, parts: [([[block]], ())],
        compared=({},),
    )
)
register_policy(
    RecomputePolicy(
        "attention",
        _attention,
        of_parts=True,
        candidates=lambda block, parts: (
            [([[name] for name in parts.attention], ())] if parts.attention else []
        ),
        compared=({},),
    )
)
register_policy(
    RecomputePolicy(
        "mlp",
        _mlp,
        of_parts=True,
        candidates=lambda block, parts: [(parts.mlps, ())] if parts.mlps else [],
        compared=({},),
    )
)
register_policy(
    RecomputePolicy(
        "every_n",
        lambda blocks, settings, _: [Unit((block,)) for block in blocks[:: settings.every_n]],
        settings=_EveryN,
        words=lambda settings: f" {settings.every_n}",
        compared=({"every_n": 2},),
    )
)
register_policy(
    RecomputePolicy(
        "segments",
        lambda blocks, settings, _: [
            Unit(tuple(segment)) for segment in _segments(blocks, settings.segment_size)
        ],
        settings=_SegmentSize,
        words=lambda settings: f" of {settings.segment_size}",
    )
)
register_policy(
    RecomputePolicy(
        "selective",
        lambda blocks, settings, where: [
            Unit((block,), settings.save_ops, f"{where}.save_ops") for block in blocks
        ],
        settings=_SaveOps,
        words=lambda settings: f" ({'+'.join(settings.save_ops)})",
        candidates=lambda block, parts: [
            ([[block]], tuple(words.split("+"))) for words in _SELECTIONS
        ],
        compared=({}, {"save_ops": "attention+qkvo"}),
    )
)
