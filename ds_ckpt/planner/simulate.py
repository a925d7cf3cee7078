"""A whole step of forward and backward without memory: what is alive at once, and what is computed.

The fake copy runs with the real checkpointing on it, so recompute, early stop and kept operators
are those of training. Counted are storages that live: what autograd holds, gradients that flow,
temporaries, and the gradient of the weight that is being computed. Not counted: weights, whole sets
of weight gradients (each is dropped when it is there, as ZeRO reduces it away), what kernels use
inside, and fragmentation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_ckpt.activation.blocks import Block
from ds_ckpt.activation.install import CheckpointedBlocks
from ds_ckpt.activation.policies import Unit
from ds_ckpt.planner.costs import flops_of
from ds_ckpt.planner.fake import fake_run
from ds_ckpt.planner.survey import not_plannable
from ds_ckpt.telemetry.memory import MemoryTracker, Operator, tensors_in


@dataclass(frozen=True)
class SimulatedStep:
    """One step.

    Attributes:
        held_bytes: what autograd holds after the forward, as `SavedActivations` counts.
        forward_flops, flops: of products and attention cores: of the forward; of forward, recompute
            and backward together.
        peak_bytes: most bytes alive at once, beside weights and their gradients.
    """

    held_bytes: int
    forward_flops: int
    flops: int
    peak_bytes: int


def simulate(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    units: Sequence[Unit],
    *,
    device: torch.device | None = None,
) -> SimulatedStep:
    """Forward and backward of a fake copy with `units` recomputed.

    Backward begins at the result's `loss`, else at every tensor of it that needs a gradient.

    Args:
        units: over the modules of `model`; an empty list recomputes nothing.

    Raises:
        UnsupportedError: see `survey`.
    """
    flops = 0

    def ran(operator: Operator) -> None:
        nonlocal flops
        flops += flops_of(operator)

    with fake_run(model, args, kwargs, device) as (twin, fake_args, fake_kwargs):
        parts = dict(twin.named_modules())

        def on_twin(block: Block) -> Block:
            return Block(block.name, parts[block.name], block.kind)

        put = [replace(unit, blocks=tuple(map(on_twin, unit.blocks))) for unit in units]
        CheckpointedBlocks(twin, units=put)
        for parameter in twin.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop)
        tracker = MemoryTracker(twin, weights=list(twin.parameters()), operator=ran)
        with not_plannable(), tracker:
            with tracker.saved:
                result = twin(*fake_args, **fake_kwargs)
            forward_flops = flops
            loss = getattr(result, "loss", None)
            leaves = tensors_in(loss if isinstance(loss, Tensor) else result)
            roots = [t for t in leaves if t.requires_grad]
            torch.autograd.backward(roots, [torch.empty_like(t) for t in roots])
    return SimulatedStep(tracker.saved.bytes, forward_flops, flops, tracker.peak_bytes)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
