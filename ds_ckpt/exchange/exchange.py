"""ZeRO-3's reduction of a bucket by one all-to-all of packed shards, summed at the owner.

    for each compressed tensor: pending = residual + gradient / (world * loss_scale)
    for each other process: pack what it owns, keep what was left out as residual
    one all-to-all
    own shard = sum over processes of what arrived; the own part never leaves and is exact

It stands in for DeepSpeed's `reduce_scatter_coalesced`: the mean over the group, this process's
chunk of each tensor, unpadded, still multiplied by the loss scale. A tensor without a compressor
travels in its own dtype; in fp32 it is divided by the world before the sum as DeepSpeed does,
and so are sums of a host, which might not fit into 16 bits; 16-bit types are summed and divided in
fp32 and rounded once. Low-rank tensors take all-reduces of their factors instead (`low_rank`), and
an all-to-all of what these missed where they have a remainder. With two levels all of this happens
between hosts, to sums that each host has made before (`hierarchy`).

A non-finite value cannot be left to the codec, which might drop it and hide the overflow. Its
process flags the bucket instead; every process then answers NaN for its shards of the bucket's
compressed tensors, where DeepSpeed's own overflow check finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ds_ckpt.compression.base import Compressor, aligned, section
from ds_ckpt.compression.dense import Dense
from ds_ckpt.compression.error_feedback import Feedback, all_finite
from ds_ckpt.compression.powersgd import Factors, factor_numels, matrix_shape
from ds_ckpt.exchange.hierarchy import InHostSum
from ds_ckpt.exchange.layout import (
    HEADER_BYTES,
    LocalShard,
    Order,
    PacketLayout,
    ShardLayout,
    ascending,
)
from ds_ckpt.exchange.low_rank import LowRankPart, RowBlocks
from ds_ckpt.exchange.plan import words
from ds_ckpt.exchange.rules import Choose
from ds_ckpt.exchange.transport import Transport
from ds_ckpt.telemetry.timings import Errors, Timings


@dataclass(frozen=True)
class Item:
    """One tensor of a bucket.

    Attributes:
        local: this process's contribution, [layout.numel]: its gradient, or its host's sum.
        dtype: the gradient's, in which shards are answered and uncompressed tensors travel.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    local: Tensor
    layout: LocalShard
    compressor: Compressor | None

    def packed_bytes(self, numel: int) -> int:
        """Size of what the all-to-all takes for so many of its entries."""
        if self.compressor is None:
            return aligned(numel * self.dtype.itemsize)
        assert self.compressor.codec is not None
        return self.compressor.codec.packed_bytes(numel)

    @property
    def divided_last(self) -> bool:
        """Whether an uncompressed tensor is summed before it is divided."""
        return self.local.dtype == self.dtype and self.dtype.itemsize < 4


class AllToAllExchange:
    """One process's end. All processes call `average` for the same buckets in the same order.

    Args:
        transport: carries the packets; with two levels, between hosts.
        choose: see `Choose`.
        feedback: residuals; the caller commits or rolls them back with the step. None: what is
            left out is lost.
        factors: PowerSGD's, committed or rolled back likewise.
        order: see `Order`; not used with two levels.
        holds: gradients of some calls are held back by `hold` and go with the next `average`.
            Tensors without a compressor then pass through the feedback too: it is where they are
            held.
        in_host: the lower level; None: every process is on its own.

    Attributes:
        nonfinite_buckets: buckets so far in which this process saw or was told of a non-finite
            value in a compressed tensor.
        world: processes that are averaged over.
        timings: host seconds by section.
        errors: what compression leaves behind, while it is sampled.
    """

    def __init__(
        self,
        transport: Transport,
        choose: Choose,
        feedback: Feedback | None = None,
        factors: Factors | None = None,
        *,
        order: Order = ascending,
        holds: bool = False,
        in_host: InHostSum | None = None,
    ) -> None:
        self.transport = transport
        self.feedback = feedback if feedback is not None else Feedback(enabled=False)
        self.factors = factors if factors is not None else Factors()
        self.order = order if in_host is None else ascending
        self._choose = choose
        self._holds = holds
        self._in_host = in_host
        assert not holds or self.feedback.accumulates, "gradients are held in the residuals"
        self.nonfinite_buckets = 0
        self._held_nonfinite = False
        self.world = transport.world * (in_host.processes if in_host else 1)
        self._members = in_host.members if in_host else tuple(range(transport.world))
        self.timings = Timings()
        self.errors = Errors()

    def step_ended(self) -> None:
        """Forget what was held back; the caller commits or rolls back."""
        self._held_nonfinite = False

    @torch.no_grad()
    def hold(
        self, names: Sequence[str], tensors: list[Tensor], loss_scale: float = 1.0
    ) -> list[Tensor]:
        """Add a micro-step's gradients to what goes out later; nothing leaves the host.

        A non-finite value in them is told to everybody with the step's every bucket. Arguments as
        for `average`.

        Returns:
            Zeros of the shape of what `average` returns.
        """
        locals_, layouts = self._local_shards(tensors)
        with self.timings.section("residual"):
            for name, local in zip(names, locals_, strict=True):
                pending = self.feedback.accumulate(name, local, self.world, loss_scale)
                # residuals that are rounded cannot hold an inf, and the parameter may be absent
                # from the micro-step that sends
                self._held_nonfinite |= not all_finite(pending)
                self.feedback.store(name, pending)
        sizes = [layout.size(self.transport.dp_rank) for layout in layouts]
        return [t.new_zeros(size) for t, size in zip(tensors, sizes, strict=True)]

    @torch.no_grad()
    def average(
        self,
        names: Sequence[str],
        tensors: list[Tensor],
        loss_scale: float = 1.0,
        *,
        uncompressed: bool = False,
    ) -> list[Tensor]:
        """The mean over the group of a bucket's gradients, this process's shards.

        Args:
            names: parameter names, in the order of `tensors`.
            tensors: this process's full gradients, contiguous, one device, any floating dtypes;
                multiplied by `loss_scale`. May be overwritten.
            loss_scale: the same on every process.
            uncompressed: send this bucket so, with what is owed to it; the same everywhere.

        Returns:
            Flat shards in the gradients' dtypes, still multiplied by `loss_scale`; empty where
            this process owns nothing. In a world of one, views of the gradients themselves.
        """
        chosen = [self._compressor(n, t, uncompressed) for n, t in zip(names, tensors, strict=True)]
        if not tensors:
            return []
        if self.world == 1:
            self.nonfinite_buckets += self._held_nonfinite
            shards = [
                self._alone(name, tensor.reshape(-1), compressor, loss_scale)
                for name, tensor, compressor in zip(names, tensors, chosen, strict=True)
            ]
        else:
            locals_, layouts = self._local_shards(tensors)
            items = [
                Item(name, tensor.shape, tensor.dtype, local, layout, compressor)
                for name, tensor, local, layout, compressor in zip(
                    names, tensors, locals_, layouts, chosen, strict=True
                )
            ]
            bucket = _Bucket(self, items, loss_scale, finite=not self._held_nonfinite)
            shards = bucket.run()
            self.nonfinite_buckets += bucket.flagged
        if not self.feedback.enabled:  # what has been sent is then all that goes out of a step
            for name in names:
                self.feedback.clear(name)
        return shards

    def _compressor(self, name: str, tensor: Tensor, uncompressed: bool) -> Compressor | None:
        compressor = None if uncompressed else self._choose(name, tensor.shape)
        if compressor is None and (self._holds or self.feedback.holds(name)):
            # What is owed to an uncompressed tensor goes with it, in fp32 so that nothing is
            # owed afterwards. Where gradients are held it passes here in every step, and a rounded
            # one is held like any other; but fp16 without the loss scale would lose small ones.
            exact = not self._holds or tensor.dtype == torch.float16
            return Dense(torch.float32 if exact else tensor.dtype)
        return compressor

    def _local_shards(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[LocalShard]]:
        """What this process brings to the exchange of each tensor."""
        flats = [t.reshape(-1) for t in tensors]
        shards = [ShardLayout(f.numel(), self.world) for f in flats]
        layouts = [LocalShard(s, self._members) for s in shards]
        if self._in_host is not None and flats:
            with self.timings.section("in_host"):
                flats = self._in_host.sum(flats, shards)
        return flats, layouts

    def _alone(
        self, name: str, flat: Tensor, compressor: Compressor | None, loss_scale: float
    ) -> Tensor:
        """World of one: the gradient, and what is held or a larger world has left."""
        if compressor is not None and self._held_nonfinite:
            return torch.full_like(flat, torch.nan)
        if compressor is None or not self.feedback.holds(name):
            return flat
        pending = self.feedback.accumulate(name, flat, 1, loss_scale)
        delivered = pending.mul(loss_scale).to(flat.dtype)
        pending.zero_()
        self.feedback.store(name, pending)
        return delivered


class _Bucket:
    """One reduction under way; `run` it once.

    Args:
        finite: False where this process has held a non-finite value back in an earlier micro-step.

    Attributes:
        flagged: whether any process had a non-finite value in a compressed tensor.
    """

    def __init__(
        self, exchange: AllToAllExchange, items: Sequence[Item], loss_scale: float, *, finite: bool
    ) -> None:
        self.flagged = False
        self._exchange = exchange
        self._items = items
        self._loss_scale = loss_scale
        self._finite = finite
        self._me, self._processes = exchange.transport.dp_rank, exchange.transport.world
        self._device = items[0].local.device
        self._low: LowRankPart | None = None
        if any(item.compressor is not None and item.compressor.low_rank for item in items):
            self._low = LowRankPart(
                exchange.transport, exchange.factors, exchange.timings, self._device
            )
        self._riders = self._which_ride()
        sent = [
            i
            for i, item in enumerate(items)
            if i not in self._riders and (item.compressor is None or item.compressor.codec)
        ]
        self._packets = _Packets(exchange.transport, {i: items[i] for i in sent}, self._device)
        self._own: dict[int, Tensor] = {}
        """By tensor, this process's contribution to its own shard, in the dtype of the sum."""
        self._pending: dict[int, Tensor] = {}
        self._before: dict[int, float] = {}

    def _which_ride(self) -> set[int]:
        """Uncompressed tensors that go with the factors: together no more than those, so that a
        bucket with a few norms and biases does not need an all-to-all."""
        if self._low is None:
            return set()
        riders, rider_numel, factor_numel = set(), 0, 0
        for i, item in enumerate(self._items):
            compressor = item.compressor
            if compressor is None or isinstance(compressor, Dense):
                riders.add(i)
                rider_numel += item.local.numel()
            elif compressor.low_rank is None:
                return set()  # there is an all-to-all anyway
            else:
                rows, columns = matrix_shape(item.shape)
                factor_numel += sum(factor_numels(rows, columns, compressor.low_rank.rank))
        return riders if rider_numel <= factor_numel else set()

    def run(self) -> list[Tensor]:
        section = self._exchange.timings.section
        with section("residual"):
            finite = self._accumulate()
        if self._low is not None:
            with section("pack"):
                self._add_to_low_rank(self._low)
                finite = self._low.first(finite)
            if not finite:
                self.flagged = True
                return [self._nan(item) for item in self._items]
            for i in self._riders & self._pending.keys():
                self._pending[i].zero_()  # all of it has arrived, in fp32
        with section("pack"):
            self._pack(finite)
            self._store(finite)
        if self._packets.tensors:
            with section("wire"):
                self._packets.flag(not finite)
                self.flagged = self._packets.exchange() or not finite
        with section("unpack"):
            if self._low is not None:
                self.flagged = not self._low.second() or self.flagged
            return [self._sum(i, item) for i, item in enumerate(self._items)]

    def _accumulate(self) -> bool:
        """Residual plus gradient, the own part set aside; False where a value is not finite."""
        finite = self._finite
        for i, item in enumerate(self._items):
            if item.compressor is None:
                continue
            pending = self._exchange.feedback.accumulate(
                item.name, item.local, self._exchange.world, self._loss_scale
            )
            self._pending[i] = pending
            finite = finite and all_finite(pending)
            mine = pending[item.layout.shard(self._me)]
            if self._exchange.errors.wanted:
                self._before[i] = _energy(pending) - _energy(mine)
            if i in self._riders:
                continue
            self._own[i] = mine.mul(self._loss_scale)
            if item.compressor.low_rank is None:  # that needs whole rows
                mine.zero_()
        return finite

    def _add_to_low_rank(self, low: LowRankPart) -> None:
        for i, item in enumerate(self._items):
            if i in self._riders:
                if i in self._pending:
                    low.add_rider(i, self._pending[i])
                else:
                    wide = item.local.to(torch.promote_types(item.dtype, torch.float32))
                    low.add_rider(i, wide.div(self._exchange.world))
            elif item.compressor is not None and item.compressor.low_rank is not None:
                _, columns = matrix_shape(item.shape)
                blocks = RowBlocks.of(item.layout, columns)
                low.add(i, item.name, self._pending[i], blocks, item.compressor.low_rank)

    def _pack(self, finite: bool) -> None:
        """Write the payloads; what a codec leaves out stays in the pending tensor."""
        selecting = partial(self._exchange.timings.section, "select")
        for i, item in self._packets.tensors.items():
            outgoing = {dest: self._packets.outgoing(dest, i) for dest in self._packets.peers}
            if item.compressor is None:
                self._own[i] = self._pack_uncompressed(item, outgoing)
                continue
            codec = item.compressor.codec
            assert codec is not None
            for dest, payload in outgoing.items():
                if finite:
                    codec.pack(self._pending[i][item.layout.shard(dest)], payload, selecting)
                else:
                    payload.zero_()

    def _pack_uncompressed(self, item: Item, outgoing: dict[int, Tensor]) -> Tensor:
        """Write each destination's part; returns the own one, in the dtype of the sum."""
        divisor = 1 if item.divided_last else self._exchange.world
        for dest, payload in outgoing.items():
            part = item.local[item.layout.shard(dest)]
            out = section(payload, 0, item.layout.size(dest), item.dtype)
            if part.dtype == item.dtype:
                torch.div(part, divisor, out=out)  # straight into the packet
            else:
                out.copy_(part.div(divisor))
        own = item.local[item.layout.shard(self._me)].div(divisor)
        return own.to(torch.promote_types(item.dtype, torch.float32))

    def _store(self, finite: bool) -> None:
        """What is left is the residual so far."""
        if finite:
            for i, before in self._before.items():
                how = words(self._items[i].compressor)
                self._exchange.errors.add(how, before, _energy(self._pending[i]))
        for i, pending in self._pending.items():
            item = self._items[i]
            self._exchange.feedback.store(item.name, pending)
            if i in self._riders or item.compressor == Dense(torch.float32):
                self._exchange.feedback.clear(item.name)

    def _nan(self, item: Item) -> Tensor:
        size = item.layout.size(self._me)
        return torch.full((size,), torch.nan, dtype=item.dtype, device=self._device)

    def _sum(self, i: int, item: Item) -> Tensor:
        """The mean at this process's shard, times the loss scale, in the gradient's dtype."""
        if self.flagged and item.compressor is not None:
            return self._nan(item)
        if i in self._riders:
            assert self._low is not None
            total = self._low.rider(i)[item.layout.shard(self._me)]
            return (total.mul(self._loss_scale) if i in self._pending else total).to(item.dtype)
        if item.compressor is None:
            return self._sum_uncompressed(i, item)
        total = torch.zeros_like(self._own[i])
        if item.compressor.low_rank is not None:
            assert self._low is not None
            total.add_(self._low.delivered(i), alpha=self._loss_scale)
        codec = item.compressor.codec
        for process in range(self._processes):
            if process == self._me:
                total.add_(self._own[i])
            elif codec is not None:
                codec.unpack_add(self._packets.incoming(process, i), total, self._loss_scale)
        return total.to(item.dtype)

    def _sum_uncompressed(self, i: int, item: Item) -> Tensor:
        own, size = self._own[i], item.layout.size(self._me)
        parts = [
            own
            if process == self._me
            else section(self._packets.incoming(process, i), 0, size, item.dtype)
            for process in range(self._processes)
        ]
        result = torch.empty_like(own)
        # where the shard lies in the buffer that DeepSpeed would reduce
        entries = sum(other.layout.tensor.chunk for other in self._items)
        before = sum(other.layout.tensor.chunk for other in self._items[:i])
        at, numel = self._me * entries + before, self._processes * entries
        pieces = self._exchange.order(numel, item.dtype.itemsize, self._processes, at, at + size)
        for start, stop, order in pieces:
            piece = slice(start - at, stop - at)
            # Starting from the first part, not from 0: 0 + -0 would turn into +0.
            sum_ = result[piece].copy_(parts[order[0]][piece])
            for process in order[1:]:
                sum_.add_(parts[process][piece])
        if item.divided_last:
            result.div_(self._exchange.world)
        return result.to(item.dtype)


class _Packets:
    """Send and receive buffers of one bucket: payloads of its tensors in a packet for each owner.

    Args:
        tensors: those that have a payload, by their place in the bucket.
    """

    def __init__(
        self, transport: Transport, tensors: dict[int, Item], device: torch.device
    ) -> None:
        self.tensors = tensors
        self._transport = transport
        me, world = transport.dp_rank, transport.world
        self.peers = [p for p in range(world) if p != me]
        self._slots = {i: slot for slot, i in enumerate(tensors)}
        sizes: list[Callable[[int], int]] = [item.packed_bytes for item in tensors.values()]
        layouts = [item.layout for item in tensors.values()]
        layout = self._layout = PacketLayout.of(layouts, sizes, dp_rank=me, world=world)
        # Every byte is written: headers and compressed payloads by us, uncompressed ones up to
        # their padding, which nobody reads.
        self._outgoing = torch.empty(sum(layout.send_bytes), dtype=torch.uint8, device=device)
        self._incoming = torch.empty(sum(layout.receive_bytes), dtype=torch.uint8, device=device)

    def outgoing(self, dest: int, i: int) -> Tensor:
        """Where tensor `i`'s payload for `dest` is written."""
        return self._outgoing[self._layout.sent(dest, self._slots[i])]

    def incoming(self, source: int, i: int) -> Tensor:
        """Tensor `i`'s payload from `source`."""
        return self._incoming[self._layout.received(source, self._slots[i])]

    def flag(self, nonfinite: bool) -> None:
        """Write the headers."""
        for dest in self.peers:
            start = self._layout.outgoing(dest)
            self._outgoing[start : start + HEADER_BYTES].zero_()
            if nonfinite:
                self._outgoing[start] = 1

    def exchange(self) -> bool:
        """Send and receive; whether any packet that came was flagged."""
        layout = self._layout
        self._transport.all_to_all(
            self._incoming, self._outgoing, layout.receive_bytes, layout.send_bytes
        )
        starts = [layout.incoming(p) for p in self.peers]
        return bool(self._incoming[starts].any())


def _energy(values: Tensor) -> float:
    return float(values.dot(values))
