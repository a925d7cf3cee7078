"""The policies: what is recomputed, from a name in the configuration to units of a model's modules.

A policy is one `RecomputePolicy`, registered in one line; the configuration, the plan of a model,
the planner and `ds-ckpt profile` ask it for what they need. Pure: looks at modules and changes
nothing.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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

_SECTION = "$.ds_ckpt.activation"
PLANNED = ("budget", "auto")
"""Policies that are no functions of the model: a planner makes units for a budget."""


Groups = Sequence[Sequence[str]]
"""Modules of each recompute, by name."""


class PartNames(Protocol):
    """The parts of one block, by name."""

    @property
    def attention(self) -> Sequence[str]: ...
    @property
    def mlps(self) -> Groups: ...


@dataclass(frozen=True)
class PolicySettings:
    """A policy with its settings.

    Attributes:
        policy: its name; "none" leaves blocks alone.
        every_n: for "every_n": the first block and every n-th after it.
        segment_size: for "segments": blocks in one recompute.
        save_ops: for "selective": sets and operators whose results are kept.
    """

    policy: str = "block"
    every_n: int = 2
    segment_size: int = 2
    save_ops: tuple[str, ...] = ("matmuls",)


@dataclass(frozen=True)
class Rule:
    """Another policy for the blocks that `match` names: a pattern, "3", or "0-15"."""

    match: str
    settings: PolicySettings


@dataclass(frozen=True)
class Policy:
    """What is done with all blocks but those that a rule names; the first rule that does wins.

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
    """Modules of one recompute, in the order in which they run.

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
    """One policy: all that anybody asks of it.

    Attributes:
        name: in the configuration.
        units: its units of some blocks, in the model's order: `units(blocks, settings, where)`
            with the JSON path of the section. It raises ConfigError where the blocks have nothing
            for it.
        uses: keys of the section that it acts on: of `every_n`, `segment_size`, `save_ops`.
        words: its settings in a few words, behind its name.
        of_parts: `"modules"` without rules names the parts of blocks themselves.
        candidates: the ways in which the planner tries it on one block, as modules of each
            recompute and sets of operators that are kept: `candidates(block, parts)`.
        compared: settings with which `ds-ckpt profile` compares it.
    """

    name: str
    units: Callable[[Sequence[Block], PolicySettings, str], list[Unit]]
    uses: tuple[str, ...] = ()
    words: Callable[[PolicySettings], str] = lambda settings: ""
    of_parts: bool = False
    candidates: Callable[[str, PartNames], list[tuple[Groups, tuple[str, ...]]]] = (
        lambda block, parts: []
    )
    compared: tuple[Mapping[str, Any], ...] = ()


_POLICIES: dict[str, RecomputePolicy] = {}


def register_policy(policy: RecomputePolicy) -> RecomputePolicy:
    """Make a policy known by its name, from then on in configurations too.

    Raises ValueError: the name is taken.
    """
    if policy.name in _POLICIES or policy.name in PLANNED:
        raise ValueError(f'there is a policy "{policy.name}" already')
    _POLICIES[policy.name] = policy
    return policy


def policies() -> tuple[RecomputePolicy, ...]:
    """All that are registered, in order."""
    return tuple(_POLICIES.values())


def policy_named(name: str) -> RecomputePolicy | None:
    return _POLICIES.get(name)


def policy_names(*, planned: bool = True) -> tuple[str, ...]:
    """Names for a configuration; for one of its rules without those of the planner."""
    return (*_POLICIES, *PLANNED) if planned else tuple(_POLICIES)


def users_of(setting: str) -> tuple[str, ...]:
    """Names of the policies that act on a key of the section."""
    return tuple(policy.name for policy in policies() if setting in policy.uses)


# from a policy to units


def make_plan(model: nn.Module, policy: Policy) -> list[Unit]:
    """The units of a model.

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
            units += _of(settings).units(group, settings, where)
    order = {id(module): i for i, module in enumerate(model.modules())}
    return sorted(units, key=lambda unit: order[id(unit.blocks[0].module)])


def _of(settings: PolicySettings) -> RecomputePolicy:
    return _POLICIES[settings.policy]


def _by_rule(blocks: Sequence[Block], rules: Sequence[Rule]) -> list[list[Block]]:
    """Blocks by the index of the first rule that names them; those without a rule come last."""
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


def _attention(blocks: Sequence[Block], settings: PolicySettings, where: str) -> list[Unit]:
    chains = [[part] for b in blocks for part in attention_parts(b.name, b.module)]
    return _parts(blocks, settings, where, chains, "attention")


def _mlp(blocks: Sequence[Block], settings: PolicySettings, where: str) -> list[Unit]:
    chains = [chain for b in blocks for chain in mlp_parts(b.name, b.module)]
    return _parts(blocks, settings, where, chains, "an MLP")


def _parts(
    blocks: Sequence[Block],
    settings: PolicySettings,
    where: str,
    chains: Sequence[Sequence[tuple[str, nn.Module]]],
    what: str,
) -> list[Unit]:
    if not chains:
        block = blocks[0]
        children = ", ".join(f"{n} ({type(m).__name__})" for n, m in block.module.named_children())
        raise ConfigError(
            Problem(
                where=f"{where}.policy",
                found=f'"{settings.policy}"',
                why=f"no part of {type(block.module).__name__} is called like {what}; it has "
                f"{children or 'no parts'}",
                remedy=f'name the parts: "modules": ["{block.name}.<part>"], or use "block"',
            )
        )
    return [Unit(tuple(block_of(name, module) for name, module in chain)) for chain in chains]


def _segments(blocks: Sequence[Block], size: int) -> list[list[Block]]:
    """Neighbours in one container and of one class, at most `size` together."""
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
        uses=("every_n",),
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
        uses=("segment_size",),
        words=lambda settings: f" of {settings.segment_size}",
    )
)
register_policy(
    RecomputePolicy(
        "selective",
        lambda blocks, settings, where: [
            Unit((block,), settings.save_ops, f"{where}.save_ops") for block in blocks
        ],
        uses=("save_ops",),
        words=lambda settings: f" ({'+'.join(settings.save_ops)})",
        candidates=lambda block, parts: [
            ([[block]], tuple(words.split("+"))) for words in _SELECTIONS
        ],
        compared=({}, {"save_ops": "attention+qkvo"}),
    )
)
