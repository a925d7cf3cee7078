"""The low-rank part of a bucket: PowerSGD's factors, each summed by one collective.

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

A process with a non-finite value puts NaN into the first sum: everybody learns of it there, on the
device, and nobody stops: what it sends from there on means nothing, and nothing of it is kept.

ZeRO-3's shards are runs of the flattened tensor and start in the middle of rows. A factorization
needs rows, so each shard brings the whole rows that it touches, entries of others as zeros
(`RowBlocks`). What the product holds at those entries is never used: the shards' own entries are
all that is delivered and all that is left behind.

Among two or three processes factors travel in bf16, everybody's to everybody, and are added up in
fp32 there (`FactorSum`). Rounding before sending costs nothing in the end: each process knows what
it has rounded away and keeps it as residual. A sum that is rounded on its way, which would allow
bf16 in a ring, leaves errors that no process knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_ckpt.compression import powersgd
from ds_ckpt.compression.error_feedback import finite_flag
from ds_ckpt.compression.powersgd import Factors, LowRank, Side
from ds_ckpt.exchange.layout import LocalShard
from ds_ckpt.exchange.transport import Transport
from ds_ckpt.telemetry.timings import Timings


@dataclass(frozen=True)
class RowBlocks:
    """Rows of a [rows, columns] tensor that a process's local shard touches, one block a member.

    Attributes:
        layout: the local shard.
        columns: length of a row.
        starts: first row of each member's block in the matrix of all blocks, and the end.
    """

    layout: LocalShard
    columns: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, layout: LocalShard, columns: int) -> RowBlocks:
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
        """Whether the local shard is the whole tensor, which is then the matrix itself."""
        return self.layout.numel == self.layout.tensor.numel

    @property
    def is_local(self) -> bool:
        """Whether the local shard is the matrix: whole rows alone."""
        return self.complete or self.rows * self.columns == self.layout.numel

    def entries(self, member: int) -> slice:
        """Where a member's shard lies in the flattened matrix."""
        if self.is_local:
            return self.layout.shard(member)
        offset = self.layout.source(member).start % self.columns
        start = self.starts[member] * self.columns + offset
        return slice(start, start + self.layout.size(member))

    @property
    def matrix_rows(self) -> int:
        """Rows of the matrix: those of the tensor, or of all blocks."""
        return self.layout.tensor.numel // self.columns if self.complete else self.rows

    def matrix(self, local: Tensor) -> Tensor:
        """fp32 [matrix_rows, columns]: a view where the local shard is the matrix, else a copy."""
        if self.is_local:
            return local.view(-1, self.columns)
        matrix = local.new_zeros(self.rows * self.columns)
        for member in range(len(self.layout.members)):
            matrix[self.entries(member)] = local[self.layout.shard(member)]
        return matrix.view(-1, self.columns)

    def write_back(self, matrix: Tensor, local: Tensor) -> None:
        """Copy the shards' entries of `matrix` to the local shard that it was made from."""
        if self.is_local:
            return
        flat = matrix.view(-1)
        for member in range(len(self.layout.members)):
            local[self.layout.shard(member)] = flat[self.entries(member)]


class FactorSum:
    """What sums the factors of one group of processes.

    Attributes:
        finite: bool []: whether the factors are that were summed last.
    """

    finite: Tensor

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._gathers = powersgd.gathers(transport.world)

    def rounded(self, factor: Tensor) -> Tensor:
        """fp32: what of a factor will arrive. Add this to nothing but itself before `sum`."""
        return factor.bfloat16().float() if self._gathers else factor

    def sum(self, factors: Sequence[Tensor], exact: Sequence[Tensor] = ()) -> list[Tensor]:
        """Sums of both lists, one after the other, fp32 in the shapes given.

        Args:
            factors: fp32, as `rounded` left them; at least one.
            exact: fp32; summed in fp32.
        """
        parts, exact_numel = [*exact, *factors], sum(part.numel() for part in exact)
        if self._gathers:
            sums = self._gathered(parts, exact_numel)
        else:
            sums = torch.cat([part.reshape(-1) for part in parts])
            self._transport.all_reduce(sums)
        pieces = sums.split([part.numel() for part in parts])
        shaped = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
        self.finite = finite_flag([sums[exact_numel:]])
        return shaped[len(exact) :] + shaped[: len(exact)]

    def _gathered(self, parts: list[Tensor], exact: int) -> Tensor:
        """The first `exact` entries travel in fp32, the others in bf16."""
        mine = torch.cat([part.reshape(-1) for part in parts])
        packed = torch.cat(
            [mine[:exact].view(torch.uint8), mine[exact:].bfloat16().view(torch.uint8)]
        )
        world, me, size = self._transport.world, self._transport.dp_rank, packed.numel()
        splits = [0 if process == me else size for process in range(world)]
        arrived = packed.new_empty((world - 1) * size)
        self._transport.all_to_all(arrived, packed.repeat(world - 1), splits, splits)
        # Own entries in their turn, so that everybody adds in the same order.
        contributions = [_unpacked(piece, exact) for piece in arrived.split(size)]
        contributions.insert(me, mine)
        total = contributions[0]
        for contribution in contributions[1:]:
            total = total + contribution
        return total


def _unpacked(payload: Tensor, exact: int) -> Tensor:
    # a copy begins where any type may
    wide, narrow = payload.clone().split([4 * exact, payload.numel() - 4 * exact])
    return torch.cat([wide.view(torch.float32), narrow.view(torch.bfloat16).float()])


@dataclass
class _Matrix:
    """One tensor under way: `a b^T` approximates it, `mine` is this process's own of the two.

    Attributes:
        own: this process's part of the local shard.
        local: what is to be sent. Turns into what is left, own shard zero.
        given: orthonormal but before `first` has made it so, known to all; the factor that travels
            last is this process's product with it.
        side: which factor travels last.
    """

    blocks: RowBlocks
    settings: LowRank
    factor_sum: FactorSum
    own: slice
    local: Tensor
    matrix: Tensor
    given: Tensor
    side: Side
    mine: Tensor = field(init=False)
    total: Tensor = field(init=False)

    def project(self) -> None:
        """Make this process's factor for `given`, as it will arrive."""
        rows = self.side == "left"
        out = self.given.new_empty(self.matrix.shape[0 if rows else 1], self.given.shape[1])
        (powersgd.project if rows else powersgd.back_project)(self.matrix, self.given, out)
        self.mine = self.factor_sum.rounded(out)

    def subtract(self) -> None:
        """Leave in the local shard what this process's factor misses."""
        left, right = self._factors(self.mine)
        powersgd.subtract_product_(self.matrix, left, right)
        self.blocks.write_back(self.matrix, self.local)
        self.local[self.own].zero_()

    def others(self, entries: slice) -> Tensor:
        """What the other processes sent for these entries of the matrix: fp32, flat."""
        left, right = self._factors(self.total - self.mine)
        return powersgd.product_entries(
            left, right, entries.start, entries.stop, self.blocks.columns
        )

    def _factors(self, travelled: Tensor) -> tuple[Tensor, Tensor]:
        return (travelled, self.given) if self.side == "left" else (self.given, travelled)


def _make_orthonormal(items: Sequence[_Matrix]) -> None:
    units = powersgd.orthogonalize_all([item.given for item in items])
    for item, unit in zip(items, units, strict=True):
        item.given = unit


class LowRankPart:
    """Low-rank tensors of one bucket, and small tensors that ride along uncompressed.

    The calls, in order: `add` and `add_rider` for each; `first`; `second`; `delivered` and `rider`
    for each. After `first` the local shards hold what the factors missed, own shards at zero.

    Args:
        factors: what the last step sent.
        timings: of the exchange.
    """

    def __init__(
        self, transport: Transport, factors: Factors, timings: Timings, device: torch.device
    ) -> None:
        self._dp_rank = transport.dp_rank
        self._factor_sum = FactorSum(transport)
        self._factors = factors
        self._timings = timings
        self._device = device
        self._matrices: dict[str, _Matrix] = {}
        self._remembered: list[str] = []
        """Matrices whose `given` a step has left, as it was summed."""
        self._riders: dict[str, Tensor] = {}

    def add(self, name: str, local: Tensor, blocks: RowBlocks, settings: LowRank) -> None:
        """A tensor's local shard, fp32; it is changed in place."""
        rank = min(settings.rank, blocks.matrix_rows, blocks.columns)
        if rank == 0:  # nothing of this tensor lies in the local shard
            return
        side, given = self._given(name, blocks, rank, settings.alternate)
        # with Q^ at hand P comes first; without alternation Q follows it
        sends: Side = "left" if side == "right" else "right"
        own, matrix = blocks.layout.shard(self._dp_rank), blocks.matrix(local)
        self._matrices[name] = _Matrix(
            blocks, settings, self._factor_sum, own, local, matrix, given, sends
        )

    def add_rider(self, name: str, local: Tensor) -> None:
        """A tensor as it is, already divided by the number of processes; summed in fp32."""
        self._riders[name] = local

    def _given(
        self, name: str, blocks: RowBlocks, rank: int, alternate: bool
    ) -> tuple[Side, Tensor]:
        """The factor to start from; drawn by name where no step has left one that fits."""
        known = self._factors.get(name)
        if known is not None:
            side, factor = known
            length = blocks.columns if side == "right" else blocks.matrix_rows
            if factor.shape == (length, rank) and (alternate or side == "right"):
                self._remembered.append(name)
                return side, factor.to(self._device)
        return "right", powersgd.initial_factor(name, blocks.columns, rank, self._device)

    def first(self, finite: Tensor) -> Tensor:
        """Sum the first factors; False where any process has a non-finite value.

        Args:
            finite: whether this process's values are (bool []); the same answer reaches everybody.
        """
        items = list(self._matrices.values())
        _make_orthonormal([self._matrices[name] for name in self._remembered])
        for item in items:
            item.project()
            if item.settings.alternate:
                item.subtract()
        verdict = torch.zeros(1, dtype=torch.float32, device=self._device)
        verdict.masked_fill_(~finite, torch.nan)
        riders = [local.float() for local in self._riders.values()]
        with self._timings.section("wire"):
            sums = self._factor_sum.sum([verdict, *(item.mine for item in items)], riders)
        finite = self._factor_sum.finite
        totals, riders = sums[: 1 + len(items)], sums[1 + len(items) :]
        self._riders = dict(zip(self._riders, riders, strict=True))
        for item, total in zip(items, totals[1:], strict=True):
            item.total = total
        twice = [item for item in items if not item.settings.alternate]
        for item in twice:
            item.given = item.total
        _make_orthonormal(twice)
        for item in twice:
            item.side = "right"
            item.project()
            item.subtract()
        return finite

    def second(self, finite: Tensor) -> Tensor:
        """Sum the other factors of those that do not alternate, and remember what was sent, which
        the step's verdict keeps or forgets. False where a sum overflowed, or something before.
        """
        twice = [item for item in self._matrices.values() if not item.settings.alternate]
        if twice:
            with self._timings.section("wire"):
                sums = self._factor_sum.sum([item.mine for item in twice])
            finite = finite & self._factor_sum.finite
            for item, total in zip(twice, sums, strict=True):
                item.total = total
        for name, item in self._matrices.items():
            self._factors.put(name, item.side, item.total.clone())
        return finite

    def delivered(self, name: str) -> Tensor:
        """fp32, flat: the other processes' approximations at this process's shard, summed."""
        item = self._matrices.get(name)
        if item is None:
            return torch.zeros(0, dtype=torch.float32, device=self._device)
        return item.others(item.blocks.entries(self._dp_rank))

    def rider(self, name: str) -> Tensor:
        """fp32: the sum of what `add_rider` was given everywhere."""
        return self._riders[name]
