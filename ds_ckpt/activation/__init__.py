"""What activation checkpointing keeps and recomputes, and how it is put on a model."""

from ds_ckpt.activation.blocks import Block, find_blocks
from ds_ckpt.activation.recompute import CheckpointedBlocks

__all__ = ["Block", "CheckpointedBlocks", "find_blocks"]
