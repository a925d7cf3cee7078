"""A whole step of forward and backward without memory: what is alive at once, and where.

The fake copy runs with the real checkpointing on it, so recompute, early stop and kept operators
are those of training. Counted are storages that live: what autograd holds, gradients that flow,
temporaries, and the gradient of the weight that is being computed. Not counted: weights, whole sets
of weight gradients (each is dropped when it is there, as ZeRO reduces it away), what kernels use
inside, and fragmentation.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_ckpt.activation.blocks import Block
from ds_ckpt.activation.install import CheckpointedBlocks
from ds_ckpt.activation.policies import Unit
from ds_ckpt.planner.fake_run import fake_run, told_in_words
from ds_ckpt.planner.work import NO_WORK, flops_of
from ds_ckpt.telemetry.activations import HeldActivations


@dataclass(frozen=True)
class Simulated:
    """One step.

    Attributes:
        held_bytes: what autograd holds after the forward, as `HeldActivations` counts.
        forward_flops, flops: of products and attention cores: of the forward; of forward, recompute
            and backward together.
        peak_bytes: most bytes alive at once, beside weights and their gradients.
        peak_module: the module that ran then; in backward the one whose recompute ran last.
        peak_in_backward: whether it was in backward.
        operators: dispatched operators that do work: forward, and all together.
    """

    held_bytes: int
    forward_flops: int
    flops: int
    peak_bytes: int
    peak_module: str
    peak_in_backward: bool
    forward_operators: int
    operators: int


class _Alive(TorchDispatchMode):
    """Bytes of storages that operators made and that still live."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.bytes = self.peak = self.flops = self.operators = 0
        self.peak_module, self.peak_in_backward = "", False
        self.in_backward = False
        self.module = ""
        self._sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._known = {p.untyped_storage()._cdata for p in model.parameters()}
        for name, part in model.named_modules():
            if type(part).forward is not nn.Module.forward:
                part.forward = self._named(name, part.forward)

    def _named(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def named(*args: Any, **kwargs: Any) -> Any:
            before, self.module = self.module, name
            try:
                return forward(*args, **kwargs)
            finally:
                if not self.in_backward:
                    self.module = before

        return named

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in NO_WORK:
            return out
        self.flops += flops_of(func, args, kwargs or {}, out)
        new = False
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                new |= self._count(tensor)
        self.operators += new
        return out

    def _count(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known or storage in self._sizes:
            return False
        size = storage.nbytes()
        self._sizes[storage] = size
        weakref.finalize(storage, self._gone, size)
        self.bytes += size
        if self.bytes > self.peak:
            self.peak, self.peak_module = self.bytes, self.module
            self.peak_in_backward = self.in_backward
        return True

    def _gone(self, size: int) -> None:
        self.bytes -= size


def simulate(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    units: Sequence[Unit],
    *,
    device: torch.device | None = None,
) -> Simulated:
    """Forward and backward of a fake copy with `units` recomputed.

    Backward begins at the result's `loss`, else at every tensor of it that needs a gradient.

    Args:
        units: over the modules of `model`; an empty list recomputes nothing.

    Raises:
        UnsupportedError: see `survey`.
    """
    with fake_run(model, args, kwargs, device) as (twin, fake_args, fake_kwargs):
        parts = dict(twin.named_modules())
        alive = _Alive(twin)
        CheckpointedBlocks(
            twin,
            units=[
                Unit(
                    tuple(Block(b.name, parts[b.name], b.kind) for b in unit.blocks),
                    unit.save_ops,
                    unit.where,
                )
                for unit in units
            ],
        )
        for parameter in twin.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop)
        with told_in_words(), alive:
            with HeldActivations(twin) as held:
                result = twin(*fake_args, **fake_kwargs)
            forward_flops, forward_operators = alive.flops, alive.operators
            alive.in_backward = True
            _backward(result)
    return Simulated(
        held.bytes,
        forward_flops,
        alive.flops,
        alive.peak,
        alive.peak_module,
        alive.peak_in_backward,
        forward_operators,
        alive.operators,
    )


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _backward(result: Any) -> None:
    loss = getattr(result, "loss", None)
    leaves = [loss] if isinstance(loss, Tensor) else tree_leaves(result)
    roots = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    torch.autograd.backward(roots, [torch.empty_like(t) for t in roots])
