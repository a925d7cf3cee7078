"""Batches without their memory: what a plan is made for, kept until it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ds_ckpt.planner.fake import may_be_known


@dataclass(frozen=True)
class Sample:
    """A batch without its memory: small integers as they are, everything else as shapes.

    Attributes:
        tokens: elements of the largest integer tensor, else of the largest tensor.
        work: of all tensors, elements times the longest dimension: attention grows so.
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
            if not isinstance(leaf, Tensor):
                return leaf
            if may_be_known(leaf):
                return leaf.detach()
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
        leaves, structure = tree_flatten((self.args, self.kwargs))
        return repr((structure, [_word(leaf) for leaf in leaves], self.autocast))

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Autocast as it was."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


def _word(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__


def size_of(args: Any, kwargs: Any) -> tuple[int, int]:
    """Tokens and work of a batch; see `Sample`."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    whole = [t for t in tensors if not t.is_floating_point() and t.dim()]
    named = [t for t in whole if t.dtype != torch.bool] or whole or tensors  # masks are no tokens
    tokens = max((t.numel() for t in named), default=0)
    return tokens, sum(t.numel() * max(t.shape, default=1) for t in tensors)


def not_smaller(samples: Sequence[Sample]) -> list[Sample]:
    """One of each shape, without those that another beats in tokens and in work."""
    different = list({s.shapes: s for s in samples}.values())
    return [
        s
        for i, s in enumerate(different)
        if not any(
            (o.tokens, o.work) != (s.tokens, s.work) and o.tokens >= s.tokens and o.work >= s.work
            for o in different[:i] + different[i + 1 :]
        )
    ]
