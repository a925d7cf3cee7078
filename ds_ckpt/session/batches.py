"""Batches without their memory: what a plan is made for, kept until it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class Sample:
    """A batch without its memory: small integers as they are, everything else as shapes.

    Attributes:
        tokens: elements of the largest integer tensor, else of the largest tensor.
        work: that times its longest dimension: attention grows so.
        autocast: device kind, whether it is on, and its type.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: int
    work: int
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Sample:
        tokens, work = size_of(args, kwargs)
        mode = FakeTensorMode()

        def light(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf.detach() if isinstance(leaf, Tensor) else leaf
            return mode.from_tensor(leaf.detach(), static_shapes=True).requires_grad_(
                leaf.requires_grad
            )

        autocast = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", device.type))
        )
        return cls(tree_map(light, args), tree_map(light, kwargs), tokens, work, autocast)

    @property
    def shapes(self) -> str:
        """What decides what is saved."""
        leaves = tree_leaves((self.args, self.kwargs))
        tensors = (t for t in leaves if isinstance(t, Tensor))
        return repr([(tuple(t.shape), t.dtype) for t in tensors]) + repr(self.autocast)

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Autocast as it was."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


def size_of(args: Any, kwargs: Any) -> tuple[int, int]:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    whole = [t for t in tensors if not t.is_floating_point() and t.dim()] or tensors
    largest = max(whole, key=lambda t: t.numel(), default=None)
    if largest is None:
        return 0, 0
    return largest.numel(), largest.numel() * max(largest.shape, default=1)
