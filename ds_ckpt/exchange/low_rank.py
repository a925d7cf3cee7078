"""Low-rank part of a bucket: PowerSGD's factors, each summed by one collective.

With M_p the matrix of rank p, residual included, and hats for orthonormal columns (Vogels et al.
2019, arXiv 1905.13727):

    P = sum_p M_p Q^            Q^ from the step before
    Q_p = M_p^T P^              rounded as it will be sent; residual: M_p - P^ Q_p^T
    Q = sum_p Q_p               the next step starts from it
    the owner adds P^ (Q - Q_own)^T at its shard's entries, and its own M exactly

Each rank keeps what its own factor missed, so residuals and delivered gradients add up on every
rank. Its own shard has no residual, but stays in M. Without it the matrices of two ranks would have
different rows. The projection of each on the common P^ would miss most of it.

A rank with a non-finite value puts NaN into the first sum. Every rank finds it there, on the device
and without a wait. The rest of the exchange is computed and dropped.

ZeRO-3's shards are runs of the flattened tensor and start in the middle of rows. A factorization
needs rows, so each shard contributes the rows that it touches, with zeros at entries of others
(`RowBlocks`). Only the shard's own entries are delivered and kept.

Two or three ranks send each other their factors in bf16 and sum them in fp32 (`FactorSum`). Each
rank keeps its own rounding error as residual, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_ckpt.compression import powersgd
from ds_ckpt.compression.error_feedback import finite_flag
from ds_ckpt.compression.powersgd import Factors, LowRank
from ds_ckpt.exchange.layout import LocalShard
from ds_ckpt.exchange.transport import Transport
from ds_ckpt.telemetry.timings import Spans, timed


@dataclass(frozen=True)
class RowBlocks:
    """Rows of a [rows, columns] tensor that a rank's local shard touches, one block a member.

    Attributes:
        rows: rows of the matrix of all blocks; of the tensor, if the local shard is the whole.
        entries: by member, the entries of its shard in the flattened matrix.
        is_local: the local shard is the matrix: it has whole rows only.
    """

    layout: LocalShard
    columns: int
    rows: int
    entries: tuple[slice, ...]
    is_local: bool

    @classmethod
    def of(cls, layout: LocalShard, columns: int) -> RowBlocks:
        """Return the blocks of a local shard."""
        members = range(len(layout.members))
        shards = tuple(map(layout.shard, members))
        if layout.numel == layout.tensor.numel:
            return cls(layout, columns, layout.numel // columns, shards, is_local=True)
        entries, rows = [], 0
        for source in filter(lambda of: of.start < of.stop, map(layout.source, members)):
            first, last = source.start // columns, -(-source.stop // columns)
            shift = (rows - first) * columns
            entries.append(slice(source.start + shift, source.stop + shift))
            rows += last - first
        entries += [slice(0, 0)] * (len(members) - len(entries))  # the last ones may be empty
        is_local = rows * columns == layout.numel
        return cls(layout, columns, rows, shards if is_local else tuple(entries), is_local)

    def matrix(self, local: Tensor) -> Tensor:
        """Return fp32 [rows, columns], a view if the local shard is the matrix."""
        if self.is_local:
            return local.view(-1, self.columns)
        matrix = local.new_zeros(self.rows * self.columns)
        for member, entries in enumerate(self.entries):
            matrix[entries] = local[self.layout.shard(member)]
        return matrix.view(-1, self.columns)

    def write_back(self, matrix: Tensor, local: Tensor) -> None:
        """Copy the shards' entries of `matrix` to the local shard that it was made from."""
        if self.is_local:
            return
        flat = matrix.view(-1)
        for member, entries in enumerate(self.entries):
            local[self.layout.shard(member)] = flat[entries]


class FactorSum:
    """Sums of factors over one group of ranks; `finite` (bool []): those summed last are."""

    finite: Tensor

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._gathers = powersgd.gathers(transport.world)

    def rounded(self, factor: Tensor) -> Tensor:
        """Return the part of a factor that will arrive, in fp32; pass it to `sum` unchanged."""
        return factor.bfloat16().float() if self._gathers else factor

    def sum(self, factors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of factors, fp32 in the given shapes, as `rounded` left them."""
        mine = torch.cat([factor.reshape(-1) for factor in factors])
        sums = mine
        if self._gathers:
            sums = self._gathered(mine)
        elif self._transport.world > 1:
            self._transport.all_reduce(sums)
        self.finite = finite_flag([sums])
        pieces = sums.split([factor.numel() for factor in factors])
        return [piece.view(of.shape) for piece, of in zip(pieces, factors, strict=True)]

    def _gathered(self, mine: Tensor) -> Tensor:
        """Send the entries in bf16; return the sum in fp32."""
        packed = mine.bfloat16().view(torch.uint8)
        world, me, size = self._transport.world, self._transport.dp_rank, packed.numel()
        splits = [0 if process == me else size for process in range(world)]
        arrived = packed.new_empty((world - 1) * size)
        self._transport.all_to_all(arrived, packed.repeat(world - 1), splits, splits)
        # own entries at their rank's place, so that every rank adds in the same order
        contributions = list(arrived.view(torch.bfloat16).view(world - 1, -1).float().unbind())
        contributions.insert(me, mine)
        return torch.stack(contributions).sum(0)


@dataclass
class _Matrix:
    """One tensor in work: `p q^T` approximates the sum of its matrices.

    Attributes:
        local: tensor to be sent. Turns into the residual, own shard zero.
        given: orthonormal factor that all ranks have: first q, then p.
        mine, total: this rank's product with it, as it will arrive, and the sum over ranks.
    """

    blocks: RowBlocks
    local: Tensor
    matrix: Tensor
    given: Tensor
    mine: Tensor = field(init=False)
    total: Tensor = field(init=False)


class LowRankPart:
    """Low-rank tensors of one bucket.

    The calls, in order: `add` for each; `first`; `second`; `delivered` for each. After `first` the
    local shards hold the residuals, own shards at zero.
    """

    def __init__(
        self, transport: Transport, factors: Factors, spans: Spans | None, device: torch.device
    ) -> None:
        self._dp_rank = transport.dp_rank
        self._factor_sum = FactorSum(transport)
        self._factors = factors
        self._spans = spans
        self._device = device
        self._matrices: dict[str, _Matrix] = {}
        self._warm: list[_Matrix] = []
        """Matrices with a q from an earlier step, which is a sum and not orthonormal."""

    def add(self, name: str, local: Tensor, blocks: RowBlocks, settings: LowRank) -> None:
        """Add a tensor's local shard, fp32; it is changed in place."""
        rank = min(settings.rank, blocks.rows, blocks.columns)
        if rank == 0:  # nothing of this tensor lies in the local shard
            return
        q = self._factors.get(name)
        is_warm = q is not None and q.shape == (blocks.columns, rank)
        if q is None or not is_warm:
            q = powersgd.initial_factor(name, blocks.columns, rank, self._device)
        item = _Matrix(blocks, local, blocks.matrix(local), q.to(self._device))
        self._matrices[name] = item
        if is_warm:
            self._warm.append(item)

    def first(self, finite: Tensor) -> Tensor:
        """Sum P and compute Q; return whether all ranks' values are finite (bool [])."""
        items = list(self._matrices.values())
        _orthonormalize(self._warm)
        for item in items:
            item.mine = self._factor_sum.rounded(powersgd.project(item.matrix, item.given))
        flag = torch.zeros(1, dtype=torch.float32, device=self._device)
        flag.masked_fill_(~finite, torch.nan)
        with timed("wire", self._spans):
            _, *sums = self._factor_sum.sum([flag, *(item.mine for item in items)])
        finite = self._factor_sum.finite
        for item, total in zip(items, sums, strict=True):
            item.given = total
        _orthonormalize(items)
        for item in items:
            item.mine = self._factor_sum.rounded(powersgd.back_project(item.matrix, item.given))
            powersgd.subtract_product_(item.matrix, item.given, item.mine)
            item.blocks.write_back(item.matrix, item.local)
            item.local[item.blocks.layout.shard(self._dp_rank)].zero_()
        return finite

    def second(self, finite: Tensor) -> Tensor:
        """Sum Q and record it for the next step; return False if a sum here or before overflowed.

        The step's end commits the record or drops it.
        """
        items = list(self._matrices.values())
        if items:
            with timed("wire", self._spans):
                sums = self._factor_sum.sum([item.mine for item in items])
            finite = finite & self._factor_sum.finite
            for (name, item), total in zip(self._matrices.items(), sums, strict=True):
                item.total = total
                self._factors.put(name, total.clone())
        return finite

    def delivered(self, name: str) -> Tensor:
        """Return the sum of the other ranks' approximations at this rank's shard: fp32, flat."""
        item = self._matrices.get(name)
        if item is None:
            return torch.zeros(0, dtype=torch.float32, device=self._device)
        entries = item.blocks.entries[self._dp_rank]
        others = item.total - item.mine
        return powersgd.product_entries(
            item.given, others, entries.start, entries.stop, item.blocks.columns
        )


def _orthonormalize(items: Sequence[_Matrix]) -> None:
    units = powersgd.orthogonalize_all([item.given for item in items])
    for item, unit in zip(items, units, strict=True):
        item.given = unit
