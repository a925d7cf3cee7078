"""From a policy to units: which modules are computed again together, and what each keeps.

Pure: looks at the module tree and changes nothing.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ds_ckpt.activation.blocks import Block, by_pattern, find_blocks, is_hf_layer
from ds_ckpt.activation.parts import Part, attention_parts, mlp_parts
from ds_ckpt.activation.policy import Policy, Rule, Treatment
from ds_ckpt.errors import ConfigError, Problem

_SECTION = "$.ds_ckpt.activation"


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


def make_plan(model: nn.Module, policy: Policy) -> list[Unit]:
    """The units of a model.

    Raises:
        ConfigError: nothing is found for a pattern, a rule or a policy.
        UnsupportedError: from `find_blocks`.
    """
    kind = policy.treatment.kind
    if policy.modules is not None and kind in ("attention", "mlp") and not policy.rules:
        return [Unit((block,)) for block in by_pattern(model, policy.modules)]
    blocks = find_blocks(model, policy.modules)
    groups = _by_rule(blocks, policy.rules)
    units: list[Unit] = []
    for index, rule in enumerate(policy.rules):
        if groups[index]:
            units += _treated(groups[index], rule.treatment, f"{_SECTION}.rules[{index}]")
    units += _treated(groups[len(policy.rules)], policy.treatment, _SECTION)
    order = {id(module): i for i, module in enumerate(model.modules())}
    return sorted(units, key=lambda unit: order[id(unit.blocks[0].module)])


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


def _treated(blocks: Sequence[Block], treatment: Treatment, where: str) -> list[Unit]:
    kind = treatment.kind
    if kind == "none" or not blocks:
        return []
    if kind == "every_n":
        return [Unit((block,)) for block in blocks[:: treatment.every_n]]
    if kind == "segments":
        return [Unit(tuple(s)) for s in _segments(blocks, treatment.segment_size)]
    if kind == "selective":
        return [Unit((b,), treatment.save_ops, f"{where}.save_ops") for b in blocks]
    if kind in ("attention", "mlp"):
        return _parts(blocks, kind, where)
    return [Unit((block,)) for block in blocks]


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


def _parts(blocks: Sequence[Block], kind: str, where: str) -> list[Unit]:
    found: list[Unit] = []
    for block in blocks:
        chains: list[list[Part]]
        if kind == "attention":
            chains = [[part] for part in attention_parts(block.name, block.module)]
        else:
            chains = mlp_parts(block.name, block.module)
        found += [Unit(tuple(_block(n, m) for n, m in chain)) for chain in chains]
    if not found:
        block = blocks[0]
        children = ", ".join(f"{n} ({type(m).__name__})" for n, m in block.module.named_children())
        raise ConfigError(
            Problem(
                where=f"{where}.policy",
                found=f'"{kind}"',
                why=f"no part of {type(block.module).__name__} is called like "
                + ("attention" if kind == "attention" else "an MLP")
                + f"; it has {children or 'no parts'}",
                remedy=f'name the parts: "modules": ["{block.name}.<part>"], or use "block"',
            )
        )
    return found


def _block(name: str, module: nn.Module) -> Block:
    return Block(name, module, "hf" if is_hf_layer(module) else "forward")
