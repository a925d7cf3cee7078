"""What activation checkpointing keeps and recomputes, and how it is put on a model.

Names are loaded on first use: the configuration asks the registry of policies without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_ckpt.activation.blocks import Block, find_blocks
    from ds_ckpt.activation.install import CheckpointedBlocks
    from ds_ckpt.activation.policies import (
        Policy,
        PolicySettings,
        RecomputePolicy,
        Rule,
        Unit,
        make_plan,
        register_policy,
    )

_HOME = {"Block": "blocks", "find_blocks": "blocks", "CheckpointedBlocks": "install"}

__all__ = [
    "Block",
    "CheckpointedBlocks",
    "Policy",
    "PolicySettings",
    "RecomputePolicy",
    "Rule",
    "Unit",
    "find_blocks",
    "make_plan",
    "register_policy",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'policies')}"), name)
