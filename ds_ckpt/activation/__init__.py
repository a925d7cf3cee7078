"""Activation checkpointing: policies, recomputation, offload and partition of inputs."""

from __future__ import annotations

from ds_ckpt.activation.blocks import Block, find_blocks
from ds_ckpt.activation.install import CheckpointedBlocks
from ds_ckpt.activation.policies import (
    Policy,
    RecomputePolicy,
    Rule,
    Unit,
    make_plan,
    make_policy,
    register_policy,
)

__all__ = [
    "Block",
    "CheckpointedBlocks",
    "Policy",
    "RecomputePolicy",
    "Rule",
    "Unit",
    "find_blocks",
    "make_plan",
    "make_policy",
    "register_policy",
]
