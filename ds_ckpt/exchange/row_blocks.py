"""A column of shards as a matrix: the rows that it touches, with zeros where it owns nothing.

ZeRO-3's shards are runs of the flattened tensor and start in the middle of rows. A factorization
needs rows, so each shard brings the whole rows that it touches, entries of others as zeros. What
the product holds at those entries is never used: the shards' own entries are all that is delivered
and all that is left behind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_ckpt.exchange.layout import ColumnLayout


@dataclass(frozen=True)
class RowBlocks:
    """Rows of a [rows, columns] tensor that a column's shards touch, one block a member.

    Attributes:
        layout: the column.
        columns: length of a row.
        starts: first row of each member's block in the matrix of all blocks, and the end.
    """

    layout: ColumnLayout
    columns: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, layout: ColumnLayout, columns: int) -> RowBlocks:
        starts = [0]
        for member in range(len(layout.members)):
            source = layout.source(member)
            empty = source.start == source.stop
            first, last = source.start // columns, -(-source.stop // columns)
            starts.append(starts[-1] + (0 if empty else last - first))
        return cls(layout, columns, tuple(starts))

    @property
    def rows(self) -> int:
        return self.starts[-1]

    @property
    def complete(self) -> bool:
        """Whether the column is the whole tensor, which is then the matrix itself."""
        return self.layout.numel == self.layout.tensor.numel

    def entries(self, member: int) -> slice:
        """Where a member's shard lies in the flattened matrix."""
        if self.complete:
            return self.layout.shard(member)
        offset = self.layout.source(member).start % self.columns
        start = self.starts[member] * self.columns + offset
        return slice(start, start + self.layout.size(member))

    @property
    def matrix_rows(self) -> int:
        """Rows of the matrix: those of the tensor, or of all blocks."""
        return self.layout.tensor.numel // self.columns if self.complete else self.rows

    def matrix(self, column: Tensor) -> Tensor:
        """fp32 [matrix_rows, columns]: a view of the column where it is complete, else a copy."""
        if self.complete:
            return column.view(-1, self.columns)
        matrix = torch.zeros(self.rows * self.columns, device=column.device)
        for member in range(len(self.layout.members)):
            matrix[self.entries(member)] = column[self.layout.shard(member)]
        return matrix.view(-1, self.columns)

    def write_back(self, matrix: Tensor, column: Tensor) -> None:
        """Copy the shards' entries of `matrix` to the column that it was made from."""
        if self.complete:
            return
        flat = matrix.view(-1)
        for member in range(len(self.layout.members)):
            column[self.layout.shard(member)] = flat[self.entries(member)]
