"""The low-rank part of a bucket: PowerSGD's factors, each summed by one collective (`factor_sum`).

With M_p the matrix of process p, residual included, and hats for orthonormal columns (Vogels et
al. 2019, arXiv 1905.13727):

    P = sum_p M_p Q^            Q^ from the step before
    Q_p = M_p^T P^              rounded as it will travel; stays behind: M_p - P^ Q_p^T
    Q = sum_p Q_p               the next step starts from it
    the owner adds P^ (Q - Q_own)^T at its shard's entries, and its own M exactly

Each process keeps what its own factor missed, not what the mean missed, so that what is left and
what is delivered add up whatever the ranks; of its own shard nothing is left. The own shard stays
in M all the same: without it the matrices of two processes would have different rows, and the
projection of each on the common P^ would miss most of it (measured: an error of 24% where rank 2
suffices). With `alternate` a step sends P or Q alone.

A process with a non-finite value puts NaN into the first sum: everybody learns of it there and
stops, so nobody waits for a collective that does not come.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_ckpt.compression import powersgd
from ds_ckpt.compression.factors import Side
from ds_ckpt.compression.feedback import all_finite
from ds_ckpt.exchange.factor_sum import FactorSum
from ds_ckpt.exchange.item import Tools
from ds_ckpt.exchange.row_blocks import RowBlocks
from ds_ckpt.exchange.treatment import LowRank


@dataclass
class _Matrix:
    """One tensor under way: `a b^T` approximates it, `mine` is this process's own of the two."""

    name: str
    blocks: RowBlocks
    treatment: LowRank
    factor_sum: FactorSum
    own: slice
    """This process's shard in the column."""
    column: Tensor
    """What is to be sent. Turns into what is left, own shard zero."""
    matrix: Tensor
    given: Tensor
    """Orthonormal, known to all; the factor that travels last is this process's product with it."""
    side: Side
    """Which factor travels last."""
    mine: Tensor
    total: Tensor

    def project(self) -> Tensor:
        """This process's factor for `given`, as it will arrive."""
        rows = self.side == "left"
        out = self.given.new_empty(self.matrix.shape[0 if rows else 1], self.given.shape[1])
        (powersgd.project if rows else powersgd.back_project)(self.matrix, self.given, out)
        return self.factor_sum.rounded(out)

    def subtract(self) -> None:
        """Leave in the column what this process's factor misses."""
        left, right = self._factors(self.mine)
        powersgd.subtract_product_(self.matrix, left, right)
        self.blocks.write_back(self.matrix, self.column)
        self.column[self.own].zero_()

    def others(self, entries: slice) -> Tensor:
        """What the other processes sent for these entries of the matrix: fp32, flat."""
        left, right = self._factors(self.total - self.mine)
        return powersgd.product_entries(
            left, right, entries.start, entries.stop, self.blocks.columns
        )

    def _factors(self, travelled: Tensor) -> tuple[Tensor, Tensor]:
        return (travelled, self.given) if self.side == "left" else (self.given, travelled)


class LowRankPart:
    """Low-rank tensors of one bucket, and small tensors that ride along whole.

    The calls, in order: `add` and `add_whole` for each; `first`; `second`; `delivered` and `whole`
    for each. After `first` the columns hold what the factors missed, own shards at zero.

    Args:
        tools: of the exchange.
    """

    def __init__(self, tools: Tools, device: torch.device) -> None:
        self._dp_rank = tools.transport.dp_rank
        self._factor_sum = FactorSum(tools.transport)
        self._factors = tools.factors
        self._timings = tools.timings
        self._device = device
        self._matrices: dict[int, _Matrix] = {}
        self._whole: dict[int, Tensor] = {}
        self._first: list[Tensor] = []

    def add(self, i: int, name: str, column: Tensor, blocks: RowBlocks, treatment: LowRank) -> None:
        """Tensor `i`: its column, fp32; it is changed in place."""
        rank = min(treatment.rank, blocks.matrix_rows, blocks.columns)
        if rank == 0:  # nothing of this tensor lies in the column
            return
        side, given = self._given(name, blocks, rank, treatment.alternate)
        matrix = blocks.matrix(column)
        empty = given.new_empty(0)
        # with Q^ at hand P comes first; without alternation Q follows it
        sends: Side = "left" if side == "right" else "right"
        own = blocks.layout.shard(self._dp_rank)
        item = _Matrix(
            name,
            blocks,
            treatment,
            self._factor_sum,
            own,
            column,
            matrix,
            given,
            sends,
            empty,
            empty,
        )
        item.mine = item.project()
        if treatment.alternate:
            item.subtract()
        self._matrices[i] = item

    def add_whole(self, i: int, column: Tensor) -> None:
        """Tensor `i` as it is, already divided by the number of processes; summed in fp32."""
        self._whole[i] = column

    def _given(
        self, name: str, blocks: RowBlocks, rank: int, alternate: bool
    ) -> tuple[Side, Tensor]:
        """The factor to start from; drawn by name where no step has left one that fits."""
        known = self._factors.get(name)
        if known is not None:
            side, factor = known
            length = blocks.columns if side == "right" else blocks.matrix_rows
            if factor.shape == (length, rank) and (alternate or side == "right"):
                return side, powersgd.orthogonalize(factor.to(self._device))
        return "right", powersgd.initial_factor(name, blocks.columns, rank, self._device)

    def first(self, finite: bool) -> bool:
        """Sum the first factors; False where any process has a non-finite value.

        Args:
            finite: whether this process's values are; the same answer reaches everybody.
        """
        items = list(self._matrices.values())
        own = [item.mine for item in items]
        verdict = torch.zeros(1, device=self._device)
        if not finite:
            verdict.fill_(torch.nan)
        whole = [column.float() for column in self._whole.values()]
        with self._timings.section("wire"):
            verdict, *sums = self._factor_sum.sum([verdict, *own], whole)
        totals = sums[: len(items)]
        self._whole = dict(zip(self._whole, sums[len(items) :], strict=True))
        if not all(all_finite(t) for t in [verdict, *totals]):
            return False
        for item, total in zip(items, totals, strict=True):
            item.total = total
            if not item.treatment.alternate:
                item.given = powersgd.orthogonalize(total)
                item.side = "right"
                item.mine = item.project()
                item.subtract()
        return True

    def second(self) -> bool:
        """Sum the other factors of those that do not alternate, and remember what was sent.

        False where a sum overflowed; the factors of the last step then stay.
        """
        twice = [item for item in self._matrices.values() if not item.treatment.alternate]
        if twice:
            with self._timings.section("wire"):
                sums = self._factor_sum.sum([item.mine for item in twice])
            for item, total in zip(twice, sums, strict=True):
                item.total = total
            if not all(all_finite(item.total) for item in twice):
                return False
        for item in self._matrices.values():
            self._factors.put(item.name, item.side, item.total.clone())
        return True

    def delivered(self, i: int) -> Tensor:
        """fp32, flat: the other processes' approximations at this process's shard, summed."""
        item = self._matrices.get(i)
        if item is None:
            return torch.zeros(0, device=self._device)
        return item.others(item.blocks.entries(self._dp_rank))

    def whole(self, i: int) -> Tensor:
        """fp32 column: the sum of what `add_whole` was given everywhere."""
        return self._whole[i]
