"""Where ZeRO-3's optimizer steps a sub-group: the lead of its first moment is taken there.

DeepSpeed steps one sub-group after the other, each as the one member of its parameter group, and
torch's AdamW, DeepSpeedCPUAdam and FusedAdam read the group's betas every time. Their bias
correction goes by powers of the betas and the count of steps: some tens of steps after the start it
is 1, whatever they are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ds_ckpt.patch import Patches


class Moments(Protocol):
    """What knows the lead."""

    def leading(
        self, optimizer: torch.optim.Optimizer, group: int, parameters: Iterable[torch.Tensor]
    ) -> AbstractContextManager[None]:
        """While inside, the optimizer steps these of a group, once, with the lead."""


def why_no_lead(optimizer: Any) -> str:
    """Why the first moments of what a ZeRO-3 optimizer wraps are left alone; empty: they need not
    be."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    steps, groups = optimizer.optimizer, optimizer.optimizer.param_groups
    if not isinstance(steps, torch.optim.Adam | DeepSpeedCPUAdam | FusedAdam):
        return f"{type(steps).__name__} is none of the Adams that are known"
    if any(group.get("maximize") for group in groups):
        return "the optimizer maximizes"
    decoupled = getattr(steps, "adam_w_mode", isinstance(steps, torch.optim.AdamW))
    if any(g["weight_decay"] and not g.get("decoupled_weight_decay", decoupled) for g in groups):
        return "its weight decay is in them, which AdamW's is not"
    return ""


def parameter_groups(optimizer: Any, names: dict[int, str]) -> dict[str, int]:
    """Number of the parameter group that steps each parameter, by name.

    Args:
        names: by `ds_id`.
    """
    return {
        names[parameter.ds_id]: optimizer.sub_group_to_group_id[sub_group]
        for sub_group, parameters in enumerate(optimizer.fp16_groups)
        for parameter in parameters
    }


def lead(optimizer: Any, moments: Moments, patches: Patches) -> None:
    """Have every sub-group step with the lead that `moments` knows; `patches` takes it back."""
    step = optimizer._optimizer_step

    @functools.wraps(step)
    def optimizer_step(sub_group_id: int) -> Any:
        on_host = not optimizer.offload_optimizer or (
            optimizer.subgroup_to_device[sub_group_id] == "cpu"
        )
        steps = optimizer.optimizer if on_host else optimizer.backup_optimizer
        group = optimizer.sub_group_to_group_id[sub_group_id]
        with moments.leading(steps, group, [optimizer.fp32_partitioned_groups_flat[sub_group_id]]):
            return step(sub_group_id)

    patches.set(optimizer, "_optimizer_step", optimizer_step)
