"""The one place where a checkpointed call keeps tensors until its recompute.

They are saved by an autograd node, so saved-tensor hooks that are active at that moment see them:
those of whoever measures (`telemetry.memory`) and of whoever moves them elsewhere (offload).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Save(torch.autograd.Function):
    """A node that holds tensors; its result is thrown away and no gradient ever comes."""

    @staticmethod
    def forward(anchor: Tensor, *tensors: Tensor) -> Tensor:
        return anchor.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("nothing is computed from what is kept")


class Kept:
    """Tensors kept for a recompute: their values as they are now, without their graphs.

    A tensor that is changed in place afterwards makes `get` raise torch's RuntimeError, unless a
    hook has made a copy of it.

    Args:
        tensors: what to keep. Each is saved detached, on the same storage.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._needs_gradient = [t.requires_grad for t in tensors]
        self._node: Any = None
        if tensors:
            anchor = torch.empty(0, requires_grad=True)
            with torch.enable_grad():
                self._node = _Save.apply(anchor, *(t.detach() for t in tensors)).grad_fn

    def get(self) -> list[Tensor]:
        """The tensors as leaves that ask for a gradient where the kept ones did."""
        if self._node is None:
            return []
        pairs = zip(self._node.saved_tensors, self._needs_gradient, strict=True)
        return [t.detach().requires_grad_(needs) for t, needs in pairs]
