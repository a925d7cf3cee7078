"""What activation checkpointing keeps and recomputes, and how it is put on a model."""

from ds_ckpt.activation.blocks import Block, find_blocks
from ds_ckpt.activation.plan import Unit, make_plan
from ds_ckpt.activation.policy import Policy, Rule, Treatment
from ds_ckpt.activation.recompute import CheckpointedBlocks

__all__ = [
    "Block",
    "CheckpointedBlocks",
    "Policy",
    "Rule",
    "Treatment",
    "Unit",
    "find_blocks",
    "make_plan",
]
