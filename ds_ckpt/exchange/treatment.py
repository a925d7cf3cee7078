"""How one tensor travels: whole, through a codec, or as low-rank factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ds_ckpt.compression import powersgd
from ds_ckpt.compression.codec import Codec, Cost
from ds_ckpt.exchange.factor_sum import sent_entry_bytes


@dataclass(frozen=True)
class LowRank:
    """PowerSGD: the tensor as a matrix, of which two factors travel.

    Attributes:
        rank: columns of each factor, lowered to the matrix's smaller side.
        alternate: only one factor travels a step, the two in turns (ACP-SGD): half the bytes and
            one collective less, for an approximation that follows the gradient more slowly.
        remainder: what the factors missed goes through this codec in the same step (hybrid). None:
            all of it stays as residual.
    """

    rank: int
    alternate: bool = False
    remainder: Codec | None = None

    def sent_bytes(self, rows: int, columns: int, world: int, local: int = 1) -> int:
        """What a host sends for a matrix, times (world - 1) / world, remainder included.

        Args:
            rows, columns: of the matrix.
            world: processes that exchange: hosts, with two levels.
            local: processes of a host that divide the rows among them, each with a right factor
                of its own.
        """
        left, right = powersgd.factor_numels(rows, columns, self.rank)
        factors = sent_entry_bytes(world) * (left + local * right)
        rest = 0 if self.remainder is None else self.remainder.packed_bytes(rows * columns)
        return (factors // 2 if self.alternate else factors) + rest

    def cost(self, rows: int, columns: int, world: int, local: int = 1) -> Cost:
        """Of a step with a matrix, all processes of a host together; arguments as before."""
        cost = powersgd.cost(rows, columns, self.rank, alternate=self.alternate)
        memory_bytes, operations = cost.memory_bytes, cost.operations
        if self.remainder is not None:
            rest = self.remainder.cost(rows * columns)
            memory_bytes += rest.memory_bytes
            operations += rest.operations
        return Cost(self.sent_bytes(rows, columns, world, local), memory_bytes, operations)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, not {self.rank}")


Treatment = Codec | LowRank | None
"""None: the tensor travels whole, in its own dtype."""

Choose = Callable[[str, torch.Size], Treatment]
"""The treatment of a parameter by name and shape, the same on every process."""
