"""One reduction under way: add to the residuals, pack, the collectives, unpack and sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ds_ckpt.compression import powersgd
from ds_ckpt.compression.codec import Codec, Dense
from ds_ckpt.compression.feedback import all_finite
from ds_ckpt.exchange import whole
from ds_ckpt.exchange.item import Item, Tools
from ds_ckpt.exchange.low_rank import LowRankPart
from ds_ckpt.exchange.packets import Packets
from ds_ckpt.exchange.plan import words
from ds_ckpt.exchange.row_blocks import RowBlocks
from ds_ckpt.exchange.treatment import LowRank, Treatment


class Bucket:
    """Call `reduce` once.

    Args:
        finite: False where this process has held a non-finite value back in an earlier micro-step.

    Attributes:
        flagged: whether any process had a non-finite value in a compressed tensor.
    """

    def __init__(
        self, tools: Tools, items: Sequence[Item], loss_scale: float, *, finite: bool = True
    ) -> None:
        self.flagged = False
        self._finite = finite
        self._tools = tools
        self._items = items
        self._loss_scale = loss_scale
        self._me = tools.transport.dp_rank
        self._device = items[0].column.device
        self._low: LowRankPart | None = None
        if any(isinstance(item.treatment, LowRank) for item in items):
            self._low = LowRankPart(tools, self._device)
        self._riding = self._which_ride()
        self._slots: dict[int, int] = {}
        sizes: list[Callable[[int], int]] = []
        for i, item in enumerate(items):
            codec = _codec(item.treatment)
            if i not in self._riding and (codec is not None or item.treatment is None):
                self._slots[i] = len(sizes)
                sizes.append(
                    codec.packed_bytes if codec else partial(whole.packed_bytes, item.dtype)
                )
        self._packets = Packets(
            tools.transport, [items[i].layout for i in self._slots], sizes, self._device
        )
        self._own: dict[int, Tensor] = {}
        """By tensor, this process's contribution to its own shard, in the dtype of the sum."""
        self._pending: dict[int, Tensor] = {}
        self._before: dict[int, float] = {}

    def _which_ride(self) -> set[int]:
        """Whole tensors that go with the factors: together no more than those, so that a bucket
        with a few norms and biases does not need an all-to-all."""
        if self._low is None:
            return set()
        small = {
            i
            for i, item in enumerate(self._items)
            if item.treatment is None or isinstance(item.treatment, Dense)
        }
        factors = 0
        for i, item in enumerate(self._items):
            if isinstance(item.treatment, LowRank):
                rows, columns = powersgd.matrix_shape(item.shape)
                factors += sum(powersgd.factor_numels(rows, columns, item.treatment.rank))
            elif i not in small:
                return set()  # there is an all-to-all anyway
        return small if sum(self._items[i].column.numel() for i in small) <= factors else set()

    def reduce(self) -> list[Tensor]:
        timings = self._tools.timings
        with timings.section("residual"):
            finite = self._accumulate()
        with timings.section("pack"):
            self._pack(finite)
        if self._low is not None:
            with timings.section("pack"):
                finite = self._low.first(finite)
            if not finite:
                self.flagged = True
                return [self._nan(i) for i in range(len(self._items))]
            for i in self._riding & self._pending.keys():
                self._pending[i].zero_()  # all of it has arrived, in fp32
            with timings.section("pack"):
                self._pack_remainders()
        with timings.section("pack"):
            if finite:
                self._sample()
            for i, pending in self._pending.items():
                item = self._items[i]
                self._tools.feedback.keep(item.name, pending)
                if i in self._riding or item.treatment == Dense(torch.float32):
                    self._tools.feedback.settle(item.name)
        if self._slots:
            with timings.section("wire"):
                self._packets.flag(not finite)
                self.flagged = self._packets.exchange() or not finite
        if self._low is not None:
            with timings.section("unpack"):
                self.flagged = not self._low.second() or self.flagged
        with timings.section("unpack"):
            return [self._sum(i) for i in range(len(self._items))]

    def _accumulate(self) -> bool:
        """Residual plus gradient, the own part set aside; False where a value is not finite."""
        finite = self._finite
        for i, item in enumerate(self._items):
            if item.treatment is None:
                continue
            pending = self._tools.feedback.accumulate(
                item.name, item.column, self._tools.world, self._loss_scale
            )
            self._pending[i] = pending
            finite = finite and all_finite(pending)
            mine = pending[item.layout.shard(self._me)]
            if self._tools.errors.wanted:
                self._before[i] = _energy(pending) - _energy(mine)
            if i in self._riding:
                continue
            self._own[i] = mine.mul(self._loss_scale)
            if not isinstance(item.treatment, LowRank):  # that needs whole rows
                mine.zero_()
        return finite

    def _pack(self, finite: bool) -> None:
        for i, item in enumerate(self._items):
            treatment = item.treatment
            if i in self._riding and i in self._pending:
                assert self._low is not None
                self._low.add_whole(i, self._pending[i])
            elif treatment is None:
                self._pack_whole(i, item)
            elif isinstance(treatment, LowRank):
                assert self._low is not None
                _, columns = powersgd.matrix_shape(item.shape)
                blocks = RowBlocks.of(item.layout, columns)
                self._low.add(i, item.name, self._pending[i], blocks, treatment)
            elif finite:
                self._pack_codec(i, item, treatment)
            else:
                for dest in self._packets.peers:
                    self._packets.outgoing(dest, self._slots[i]).zero_()

    def _pack_codec(self, i: int, item: Item, codec: Codec) -> None:
        pending, selecting = self._pending[i], partial(self._tools.timings.section, "select")
        for dest in self._packets.peers:
            payload = self._packets.outgoing(dest, self._slots[i])
            codec.pack(pending[item.layout.shard(dest)], payload, selecting)

    def _pack_remainders(self) -> None:
        for i, item in enumerate(self._items):
            if isinstance(item.treatment, LowRank) and item.treatment.remainder is not None:
                self._pack_codec(i, item, item.treatment.remainder)

    def _pack_whole(self, i: int, item: Item) -> None:
        if i in self._riding:
            assert self._low is not None
            wide = item.column.to(torch.promote_types(item.dtype, torch.float32))
            self._low.add_whole(i, wide.div(self._tools.world))
            return
        outgoing = {
            dest: self._packets.outgoing(dest, self._slots[i]) for dest in self._packets.peers
        }
        self._own[i] = whole.pack(item, self._tools.world, self._me, outgoing)

    def _sample(self) -> None:
        for i, before in self._before.items():
            treatment = self._items[i].treatment
            self._tools.errors.add(words(treatment), before, _energy(self._pending[i]))

    def _nan(self, i: int) -> Tensor:
        item = self._items[i]
        size = item.layout.size(self._me)
        return torch.full((size,), torch.nan, dtype=item.dtype, device=self._device)

    def _sum(self, i: int) -> Tensor:
        item = self._items[i]
        if self.flagged and item.treatment is not None:
            return self._nan(i)
        if i in self._riding:
            assert self._low is not None
            total = self._low.whole(i)[item.layout.shard(self._me)]
            return (total.mul(self._loss_scale) if i in self._pending else total).to(item.dtype)
        if item.treatment is None:
            return self._sum_whole(i, item)
        codec = _codec(item.treatment)
        total = torch.zeros_like(self._own[i])
        if isinstance(item.treatment, LowRank):
            assert self._low is not None
            total.add_(self._low.delivered(i), alpha=self._loss_scale)
        for process in range(self._tools.transport.world):
            if process == self._me:
                total.add_(self._own[i])
            elif codec is not None:
                payload = self._packets.incoming(process, self._slots[i])
                codec.unpack_add(payload, total, self._loss_scale)
        return total.to(item.dtype)

    def _sum_whole(self, i: int, item: Item) -> Tensor:
        payloads = {p: self._packets.incoming(p, self._slots[i]) for p in self._packets.peers}
        before = sum(other.layout.tensor.chunk for other in self._items[:i])
        chunks = sum(other.layout.tensor.chunk for other in self._items)
        return whole.total(self._tools, item, self._own[i], payloads, (before, chunks))


def _codec(treatment: Treatment) -> Codec | None:
    """What a tensor sends by all-to-all beside or instead of factors."""
    return treatment.remainder if isinstance(treatment, LowRank) else treatment


def _energy(values: Tensor) -> float:
    return float(values.dot(values))
