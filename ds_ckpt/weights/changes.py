"""Encodings of one step's change of a weight shard, and the layout of replicas over nodes.

No DeepSpeed here: `ds_ckpt.zero3.weights_hook` reads and writes its shards. A codec updates the
owner's shards in place and returns bytes. Every replica decodes them into the same bits (law 2).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_ckpt.weights import lossless

CHUNK = 1 << 22
"""Elements of a shard that are encoded and sent together, or one parameter if it is larger."""


class Whole:
    """The new weights themselves. Payloads stay on the shard's device, and their size is known."""

    name = "uncompressed"
    is_fixed_size = True

    def encode(self, shards: list[Tensor], masters: list[Tensor]) -> Tensor:
        """Update the owner's flat shards to the rounded master weights; return uint8."""
        torch._foreach_copy_(shards, masters)
        return torch.cat(shards).view(torch.uint8)

    def decode_(self, held: Tensor, payload: Tensor) -> None:
        """Update a replica `held` in place to what the owner's shard became."""
        held.view(torch.uint8).copy_(payload)


class Lossless:
    """Changes of 16-bit weights in units of the last place, in Rice codes.

    On a device with kernels payloads stay there; else they are coded on the host. A payload begins
    with its length, int64, and may have room behind it.
    """

    name = "lossless"
    is_fixed_size = False

    def encode(self, shards: list[Tensor], masters: list[Tensor]) -> Tensor:
        """Encode the change, like `Whole.encode`."""
        before = torch.cat(shards)
        torch._foreach_copy_(shards, masters)
        return lossless.encode(before, torch.cat(shards))

    def decode_(self, held: Tensor, payload: Tensor) -> None:
        """Apply the change, like `Whole.decode_`."""
        lossless.decode_(held, payload)


ChangeCodec = Whole | Lossless


@dataclass(frozen=True)
class NodeLayout:
    """P = nodes x local ranks; the ranks of a node are consecutive, and `inside` is their group.

    Shard k has one replica on each node, at the local rank k // nodes. That rank's part of the
    node's copy contains the shard.
    """

    nodes: int
    local: int
    rank: int
    inside: Any

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.local

    @property
    def replicated(self) -> range:
        """Owners whose shards this rank replicates."""
        first = self.rank % self.local * self.nodes
        return range(first, first + self.nodes)

    def replicas(self, owner: int) -> list[int]:
        """Ranks that replicate the owner's shard: one on each node."""
        return [node * self.local + owner // self.nodes for node in range(self.nodes)]
