"""Finds the blocks of a model: what every policy starts from.

Pure: looks at the module tree and changes nothing. Two kinds are known. Hugging Face models carry
a `gradient_checkpointing` flag on each layer and call `_gradient_checkpointing_func`; that hook is
used as it is. Any other module is found by class name or by a pattern over module names.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from ds_ckpt.errors import ConfigError, Problem, UnsupportedError

_PATH = "$.ds_ckpt.activation.modules"


@dataclass(frozen=True)
class Block:
    """One module that is recomputed as a whole. `kind` says how checkpointing reaches it."""

    name: str
    module: nn.Module
    kind: Literal["hf", "forward"]


def is_hf_layer(module: nn.Module) -> bool:
    """A repeated layer with Hugging Face's hook, not a model that merely carries the flag."""
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def _runs(module: nn.Module) -> bool:
    """Whether the module has a forward of its own; containers such as ModuleList have none."""
    return type(module).forward is not nn.Module.forward


def repeated_classes(model: nn.Module) -> list[str]:
    """Class names that look like blocks: several of them beside each other in one container."""
    counts: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            names = Counter(type(child).__name__ for child in module if any(child.children()))
            counts.update({name: n for name, n in names.items() if n > 1})
    return [name for name, _ in counts.most_common()]


def by_pattern(model: nn.Module, patterns: Sequence[str]) -> list[Block]:
    """The outermost modules that a pattern names; ConfigError for patterns that name nothing."""
    unused = set(patterns)
    found: list[Block] = []
    for name, module in model.named_modules():
        hits = {p for p in patterns if p == type(module).__name__ or fnmatch.fnmatchcase(name, p)}
        if not hits or not name or not _runs(module):
            continue
        unused -= hits
        if not any(name.startswith(b.name + ".") for b in found):  # a part of a found block
            found.append(Block(name, module, "hf" if is_hf_layer(module) else "forward"))
    if unused:
        classes = sorted({type(m).__name__ for m in model.modules()})
        likely = repeated_classes(model)
        raise ConfigError(
            [
                Problem(
                    where=_PATH,
                    found=f'"{pattern}"',
                    why="no module with a forward has this class name or matches this pattern "
                    "(of a list of blocks name the items: layers.*)",
                    remedy=(
                        f"repeated blocks of this model: {', '.join(likely)}"
                        if likely
                        else f"classes of this model: {', '.join(classes[:20])}"
                    ),
                )
                for pattern in sorted(unused)
            ]
        )
    return found


def _refuse_unsupported(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Some models of transformers have such layers and still say that they must not be used."""
    said = (getattr(m, "supports_gradient_checkpointing", None) for m in model.modules())
    if blocks and next((s for s in said if s is not None), True) is False:
        raise UnsupportedError(
            Problem(
                where=_PATH,
                found=f"null, for {type(model).__name__}",
                why="the model says supports_gradient_checkpointing = False",
                remedy='set "policy": "none", or name blocks that you know to be safe in "modules"',
            )
        )


def find_blocks(model: nn.Module, patterns: Sequence[str] | None) -> list[Block]:
    """The model's blocks, in the order of `named_modules`.

    Args:
        model: any module; Hugging Face models may be wrapped (PEFT).
        patterns: class names or fnmatch patterns over module names; None takes Hugging Face's own
            layers.

    Raises:
        ConfigError: a pattern matches nothing, or there is no pattern and nothing with Hugging
            Face's hook.
        UnsupportedError: the model says that it must not be checkpointed.
    """
    if patterns is not None:
        blocks = by_pattern(model, patterns)
    else:
        blocks = [Block(n, m, "hf") for n, m in model.named_modules() if is_hf_layer(m)]
        _refuse_unsupported(model, blocks)
    if not blocks:
        likely = repeated_classes(model)
        example = f'["{likely[0]}"]' if likely else '["MyBlock", "encoder.layers.*"]'
        raise ConfigError(
            Problem(
                where=_PATH,
                found="null",
                why=f"{type(model).__name__} has no layers with Hugging Face's checkpointing hook, "
                "so its blocks must be named",
                remedy=f'write "modules": {example} in "ds_ckpt": {{"activation": ...}}',
            )
        )
    return blocks
