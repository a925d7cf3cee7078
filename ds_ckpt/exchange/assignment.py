"""The compressor of each parameter and its bytes, before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ds_ckpt.compression.base import Compressor
from ds_ckpt.exchange.method_rules import Choose

NO_COMPRESSOR = "uncompressed"
BY_DEEPSPEED = "left to DeepSpeed, as another process group shards them,"


def describe(compressor: Compressor | None) -> str:
    """Return a compressor in words."""
    return NO_COMPRESSOR if compressor is None else compressor.describe()


@dataclass(frozen=True)
class AssignedTensor:
    """One parameter; `how` is its compressor in words, `dense_bytes` the gradient in its own type.

    `sent_bytes` is the whole gradient on the wire: payloads of all shards, or the factors.
    """

    name: str
    shape: tuple[int, ...]
    how: str
    dense_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class Assignment:
    """All trainable parameters, in the model's order."""

    tensors: tuple[AssignedTensor, ...]

    @classmethod
    def of(
        cls,
        choose: Choose,
        shapes: Iterable[tuple[str, torch.Size, int]],
        world: int,
        local: int = 1,
        by_deepspeed: Iterable[tuple[str, torch.Size, int]] = (),
    ) -> Assignment:
        """Assign compressors to parameters, given as (name, shape, bytes of an element).

        `world` counts the ranks that exchange (nodes, with two levels). `local` ranks of a node
        divide each gradient among them. DeepSpeed reduces those in `by_deepspeed`.
        """
        tensors = []
        for name, shape, itemsize in shapes:
            compressor, dense = choose(name, shape), shape.numel() * itemsize
            sent = dense if compressor is None else compressor.sent_bytes(shape, world, local)
            tensors.append(AssignedTensor(name, tuple(shape), describe(compressor), dense, sent))
        for name, shape, itemsize in by_deepspeed:
            dense = shape.numel() * itemsize
            tensors.append(AssignedTensor(name, tuple(shape), BY_DEEPSPEED, dense, dense))
        return cls(tuple(tensors))

    @property
    def dense_bytes(self) -> int:
        """Bytes of a dense exchange in the gradients' own types."""
        return sum(t.dense_bytes for t in self.tensors)

    @property
    def sent_bytes(self) -> int:
        """Bytes on the wire."""
        return sum(t.sent_bytes for t in self.tensors)

    @property
    def share(self) -> float:
        """Sent bytes as a share of dense bytes."""
        return self.sent_bytes / max(self.dense_bytes, 1)

    def residual_numels(self, *, defers: bool) -> list[int]:
        """Return the sizes of tensors with a residual; uncompressed ones have one if deferred."""
        without = {BY_DEEPSPEED} if defers else {BY_DEEPSPEED, NO_COMPRESSOR}
        return [math.prod(t.shape) for t in self.tensors if t.how not in without]

    def buffer_bytes(self, bucket: int, world: int, local: int, *, in_place: bool) -> int:
        """Return about the bytes that exchanging a bucket takes: packets both ways, sums in fp32.

        Arguments as for `of`; `bucket` counts entries. Gradients are added into the residuals
        (`in_place`) or into working tensors. With two levels the ranks of a node send each other
        uncompressed gradients. Each has `1 / local` of their sum.
        """
        numels = [math.prod(t.shape) for t in self.tensors]
        share = min(1.0, max(bucket, *numels, 0) / max(sum(numels), 1))
        inside = 2 * self.dense_bytes * (local - 1) / local
        working = 4 * sum(numels) / local * ((local > 1) + (not in_place))
        own = 8 * sum(numels) / (local * world)
        return int(share * (inside + 2 * self.sent_bytes / local + working + own))
