"""Momentum correction: AdamW steps by u = (1 - a) m + a g in place of its first moment m.

Error feedback delivers gradients late, as an exponential average. With the first moment behind it
the largest stable learning rate falls (Cohen et al., arXiv 2207.14484). A share a of the newest
gradient g removes most of the delay, without more bytes or memory. With a = 1 - b1 this is
Nesterov's form (Dozat, 2016).

DeepSpeed steps one sub-group after the other, each as the only member of its parameter group. Its
Adams read the group's betas every time. Their bias correction is off in the first steps.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_ckpt.patch import Patches
from ds_ckpt.zero3.parameters import names_by_id, trained


@contextmanager
def corrected(
    optimizer: Optimizer, group: int, parameters: Iterable[Tensor], correction: float
) -> Iterator[None]:
    """Have an optimizer of Adam's kind step by u where it would by m.

    With (1 - a) b1 in the place of b1 it computes u; then m is computed from u. `parameters` are
    those of param group `group` that it steps inside, once; `correction` is a, below 1.
    """
    holder = optimizer.param_groups[group]
    own = holder["betas"]
    if not correction:
        yield
        return
    holder["betas"] = ((1 - correction) * own[0], own[1])
    try:
        yield
    finally:
        holder["betas"] = own
    for parameter in parameters:
        if parameter.grad is not None:
            moment = optimizer.state[parameter]["exp_avg"]
            # (u - a g) / (1 - a), in one pass
            moment.lerp_(parameter.grad.to(moment.dtype), -correction / (1 - correction))


def why_not_corrected(optimizer: Any) -> str:
    """Return why a ZeRO-3 optimizer's first moments stay as they are; empty if they need not."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    steps, groups = optimizer.optimizer, optimizer.optimizer.param_groups
    if not isinstance(steps, torch.optim.Adam | DeepSpeedCPUAdam | FusedAdam):
        return f"{type(steps).__name__} is not a supported Adam"
    if any(group.get("maximize") for group in groups):
        return "the optimizer maximizes"
    decoupled = getattr(steps, "adam_w_mode", isinstance(steps, torch.optim.AdamW))
    if any(g["weight_decay"] and not g.get("decoupled_weight_decay", decoupled) for g in groups):
        return "its weight decay is part of them, unlike AdamW's"
    return ""


def parameter_groups(engine: Any) -> dict[str, int]:
    """Return by name the index of the parameter group that steps each parameter."""
    optimizer, names = engine.optimizer, names_by_id(trained(engine))
    index, groups = optimizer.sub_group_to_group_id, optimizer.fp16_groups
    return {names[p.ds_id]: index[i] for i, group in enumerate(groups) for p in group}


def correct_momentum(
    optimizer: Any, correction_of: Callable[[int], float], patches: Patches
) -> None:
    """Step every sub-group with its parameter group's correction until `patches` is undone."""
    step = optimizer._optimizer_step

    @functools.wraps(step)
    def optimizer_step(sub_group_id: int) -> Any:
        on_host = not optimizer.offload_optimizer or (
            optimizer.subgroup_to_device[sub_group_id] == "cpu"
        )
        steps = optimizer.optimizer if on_host else optimizer.backup_optimizer
        group = optimizer.sub_group_to_group_id[sub_group_id]
        parameters = [optimizer.fp32_partitioned_groups_flat[sub_group_id]]
        with corrected(steps, group, parameters, correction_of(group)):
            return step(sub_group_id)

    patches.set(optimizer, "_optimizer_step", optimizer_step)
