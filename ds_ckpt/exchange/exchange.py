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
process flags the bucket instead, in byte 0 of its packets' headers; every process then answers NaN
for its shards of the bucket's compressed tensors, where DeepSpeed's own overflow check finds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_ckpt.compression.base import Codec, Compressor, aligned, section
from ds_ckpt.compression.dense import Dense
from ds_ckpt.compression.error_feedback import Feedback, all_finite
from ds_ckpt.compression.powersgd import Factors, LowRank, factor_numels, matrix_shape
from ds_ckpt.exchange.hierarchy import InHostSum
from ds_ckpt.exchange.layout import LocalShard, Order, ShardLayout, ascending
from ds_ckpt.exchange.low_rank import LowRankPart, RowBlocks
from ds_ckpt.exchange.plan import words
from ds_ckpt.exchange.rules import Choose
from ds_ckpt.exchange.transport import Packets, Transport
from ds_ckpt.telemetry.timings import Errors, Timings


@dataclass
class Item:
    """One tensor of a bucket on its way.

    Attributes:
        local: this process's contribution, [layout.numel]: its gradient, or its host's sum.
        dtype: the gradient's, in which shards are answered and uncompressed tensors travel.
        rides: it goes uncompressed with the low-rank factors.
        pending: with a compressor, residual plus gradient; turns into what is left.
        energy: squared norm of what `pending` has for others, where errors are sampled.
        own: this process's contribution to its own shard, in the dtype of the sum.
        arriving: payloads by the process that sends them; empty where factors say all.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    local: Tensor
    layout: LocalShard
    compressor: Compressor | None
    rides: bool = False
    pending: Tensor | None = None
    energy: float | None = None
    own: Tensor = field(init=False)
    arriving: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def codec(self) -> Codec | None:
        return None if self.compressor is None else self.compressor.codec

    @property
    def low_rank(self) -> LowRank | None:
        return self.compressor if isinstance(self.compressor, LowRank) else None

    @property
    def packed(self) -> bool:
        """Whether the all-to-all has something of it."""
        return not self.rides and (self.compressor is None or self.codec is not None)

    def packed_bytes(self, owner: int) -> int:
        """Size of what the all-to-all takes for a process's shard."""
        numel, codec = self.layout.size(owner), self.codec
        if codec is None:
            return aligned(numel * self.dtype.itemsize)
        return codec.packed_bytes(numel)

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
        self._me = transport.dp_rank
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
        sizes = [layout.size(self._me) for layout in layouts]
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
            shards = self._exchange(items, loss_scale)
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
        if self._in_host is not None and flats:
            with self.timings.section("in_host"):
                flats = self._in_host.sum(flats, shards)
        return flats, [LocalShard(s, self._members) for s in shards]

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

    def _exchange(self, items: Sequence[Item], loss_scale: float) -> list[Tensor]:
        """One bucket, from residuals to sums."""
        section = self.timings.section
        low = None
        if any(item.low_rank is not None for item in items):
            low = LowRankPart(self.transport, self.factors, self.timings, items[0].local.device)
            _choose_riders(items)
        with section("residual"):
            finite = self._accumulate(items, loss_scale)
        if low is not None:
            with section("pack"):
                self._add_to_low_rank(low, items)
                finite = low.first(finite)
            if not finite:
                self.nonfinite_buckets += 1
                return [self._nan(item) for item in items]
        with section("pack"):
            packets = self._pack([item for item in items if item.packed], finite)
            self._store(items, finite)
        flagged = not finite
        if packets is not None:
            with section("wire"):
                packets.exchange()
                headers = [pieces[0] for pieces in packets.incoming.values()]
                flagged |= bool(headers and torch.cat(headers).any())
        with section("unpack"):
            if low is not None:
                flagged |= not low.second()
            self.nonfinite_buckets += flagged
            return self._sums(items, low, loss_scale, flagged=flagged)

    def _accumulate(self, items: Sequence[Item], loss_scale: float) -> bool:
        """Residual plus gradient, the own part set aside; False where a value is not finite."""
        finite = not self._held_nonfinite
        for item in items:
            if item.compressor is None:
                continue
            pending = self.feedback.accumulate(item.name, item.local, self.world, loss_scale)
            item.pending = pending
            finite = finite and all_finite(pending)
            mine = pending[item.layout.shard(self._me)]
            if self.errors.wanted:
                item.energy = _energy(pending) - _energy(mine)
            if item.rides:
                continue
            item.own = mine.mul(loss_scale)
            if item.low_rank is None:  # that needs whole rows
                mine.zero_()
        return finite

    def _add_to_low_rank(self, low: LowRankPart, items: Sequence[Item]) -> None:
        for item in items:
            if item.rides and item.pending is None:
                wide = item.local.to(torch.promote_types(item.dtype, torch.float32))
                low.add_rider(item.name, wide.div(self.world))
            elif item.pending is not None and item.rides:
                low.add_rider(item.name, item.pending)
            elif item.pending is not None and item.low_rank is not None:
                blocks = RowBlocks.of(item.layout, matrix_shape(item.shape)[1])
                low.add(item.name, item.pending, blocks, item.low_rank)

    def _pack(self, items: Sequence[Item], finite: bool) -> Packets | None:
        """Write the packets; what a codec leaves out stays in the pending tensor."""
        if not items:
            return None
        sizes = [[item.packed_bytes(p) for item in items] for p in range(self.transport.world)]
        packets = Packets(self.transport, sizes, items[0].local.device)
        for header, *_ in packets.outgoing.values():
            header.zero_()
            header[0] = not finite
        for place, item in enumerate(items, start=1):
            item.arriving = {p: pieces[place] for p, pieces in packets.incoming.items()}
            outgoing = {p: pieces[place] for p, pieces in packets.outgoing.items()}
            if item.pending is None:
                self._pack_uncompressed(item, outgoing)
                continue
            assert item.codec is not None
            for dest, payload in outgoing.items():
                if finite:
                    item.codec.pack(item.pending[item.layout.shard(dest)], payload)
                else:
                    payload.zero_()
        return packets

    def _pack_uncompressed(self, item: Item, outgoing: Mapping[int, Tensor]) -> None:
        divisor = 1 if item.divided_last else self.world
        for dest, payload in outgoing.items():
            part = item.local[item.layout.shard(dest)]
            out = section(payload, 0, part.numel(), item.dtype)
            if part.dtype == item.dtype:
                torch.div(part, divisor, out=out)  # straight into the packet
            else:
                out.copy_(part.div(divisor))
        own = item.local[item.layout.shard(self._me)].div(divisor)
        item.own = own.to(torch.promote_types(item.dtype, torch.float32))

    def _store(self, items: Sequence[Item], finite: bool) -> None:
        """What is left is the residual so far."""
        for item in items:
            if item.pending is None:
                continue
            if item.rides:
                item.pending.zero_()  # all of it has arrived, in fp32
            if item.energy is not None and finite:
                left = _energy(item.pending)
                self.errors.add(words(item.compressor), item.energy, left, item.name)
            self.feedback.store(item.name, item.pending)
            if item.rides or item.compressor == Dense(torch.float32):
                self.feedback.clear(item.name)

    def _sums(
        self, items: Sequence[Item], low: LowRankPart | None, loss_scale: float, *, flagged: bool
    ) -> list[Tensor]:
        """The means at this process's shards, times the loss scale, in the gradients' dtypes."""
        sums = []
        # the buffer that DeepSpeed would reduce has a chunk of each tensor for each owner
        entries, before = sum(item.layout.tensor.chunk for item in items), 0
        for item in items:
            at, before = self._me * entries + before, before + item.layout.tensor.chunk
            if flagged and item.compressor is not None:
                total = self._nan(item)
            elif item.rides:
                assert low is not None
                total = low.rider(item.name)[item.layout.shard(self._me)]
                if item.pending is not None:
                    total = total.mul(loss_scale)
            elif item.pending is None:
                total = self._sum_uncompressed(item, at, entries)
            else:
                total = torch.zeros_like(item.own)
                if low is not None and item.low_rank is not None:
                    total.add_(low.delivered(item.name), alpha=loss_scale)
                for process in range(self.transport.world):
                    if process == self._me:
                        total.add_(item.own)
                    elif item.codec is not None:
                        item.codec.unpack_add(item.arriving[process], total, loss_scale)
            sums.append(total.to(item.dtype))
        return sums

    def _sum_uncompressed(self, item: Item, at: int, entries: int) -> Tensor:
        """Added up in the exchange's order.

        Args:
            at: where the shard lies in the buffer that DeepSpeed would reduce.
            entries: of that buffer, for one owner.
        """
        world, size = self.transport.world, item.own.numel()
        parts = {p: section(piece, 0, size, item.dtype) for p, piece in item.arriving.items()}
        parts[self._me] = item.own
        result = torch.empty_like(item.own)
        pieces = self.order(world * entries, item.dtype.itemsize, world, at, at + size)
        for start, stop, order in pieces:
            piece = slice(start - at, stop - at)
            # Starting from the first part, not from 0: 0 + -0 would turn into +0.
            sum_ = result[piece].copy_(parts[order[0]][piece])
            for process in order[1:]:
                sum_.add_(parts[process][piece])
        return result.div_(self.world) if item.divided_last else result

    def _nan(self, item: Item) -> Tensor:
        return item.local.new_full((item.layout.size(self._me),), torch.nan, dtype=item.dtype)


def _choose_riders(items: Sequence[Item]) -> None:
    """Uncompressed tensors go with the factors: together no more than those, so that a bucket with
    a few norms and biases does not need an all-to-all."""
    riders, factor_numel = [], 0
    for item in items:
        if item.compressor is None or isinstance(item.compressor, Dense):
            riders.append(item)
        elif item.low_rank is None:
            return  # there is an all-to-all anyway
        else:
            factor_numel += sum(factor_numels(*matrix_shape(item.shape), item.low_rank.rank))
    if sum(item.local.numel() for item in riders) <= factor_numel:
        for item in riders:
            item.rides = True


def _energy(values: Tensor) -> float:
    return float(values.dot(values))
