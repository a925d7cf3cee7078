"""Activation checkpointing: policies, recomputation, offload and partition of inputs."""

from ds_ckpt.activation.blocks import Block as Block
from ds_ckpt.activation.blocks import find_blocks as find_blocks
from ds_ckpt.activation.install import CheckpointedBlocks as CheckpointedBlocks
from ds_ckpt.activation.policies import Policy as Policy
from ds_ckpt.activation.policies import RecomputePolicy as RecomputePolicy
from ds_ckpt.activation.policies import Rule as Rule
from ds_ckpt.activation.policies import Unit as Unit
from ds_ckpt.activation.policies import make_policy as make_policy
from ds_ckpt.activation.policies import make_units as make_units
from ds_ckpt.activation.policies import register_policy as register_policy
from ds_ckpt.deprecation import former_names

_FORMER = {
    "PolicySettings": (lambda policy="block", **own: make_policy(policy, **own), "make_policy"),
    "make_plan": (make_units, "make_units"),
}
__getattr__ = former_names(__name__, _FORMER)
