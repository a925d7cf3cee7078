"""ZeRO-3's reduction of a bucket by one all-to-all of packed shards, summed at the owner.

    1. add residual   pending = residual + gradient / (world * loss_scale)
    2. pack           for each other rank the shard that it owns; the rest is the new residual
    3. exchange       one all-to-all
    4. unpack         own shard = sum of what arrived; the own part is never sent, and is exact
    5. commit         with the step (`engine.step`)

It replaces DeepSpeed's `reduce_scatter_coalesced`: the mean over the group, this rank's chunk of
each tensor, unpadded, still multiplied by the loss scale. A tensor without a compressor is sent in
its own dtype. In fp32 it is divided by the world before the sum as DeepSpeed does, and so are sums
of a node, which might not fit into 16 bits. 16-bit types are summed and divided in fp32 and rounded
once. Low-rank tensors use all-reduces of their factors instead (`low_rank`). With two levels all of
this happens between nodes, to sums inside each node (`hierarchy`).

A codec might drop a non-finite value and hide the overflow. So its rank flags the bucket in its
packets' headers, and every rank returns NaN for its shards of the bucket's compressed tensors.
DeepSpeed's own overflow check finds it there. The flag stays a tensor on the device. The host reads
those of all buckets at once, when the step ends: a flagged bucket is exchanged to its end, with
meaningless values, and the step is rolled back.

The number of kernels does not grow with the number of ranks: shards of one size go through a codec
as the rows of one matrix (`Packets`). If a codec has kernels for all tensors of a bucket at once
(`compression.fused`), it does not grow with the number of tensors either.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ds_ckpt.compression import wire
from ds_ckpt.compression.base import Codec, Compressor, on_host
from ds_ckpt.compression.dense import Dense
from ds_ckpt.compression.error_feedback import Feedback, all_finite, finite_flag
from ds_ckpt.compression.fused import GRADIENTS, Kernels, ToAdd, ToPack
from ds_ckpt.compression.powersgd import Factors, LowRank, factor_numels, matrix_shape
from ds_ckpt.compression.wire import aligned, section
from ds_ckpt.exchange.assignment import describe
from ds_ckpt.exchange.hierarchy import InHostSum
from ds_ckpt.exchange.layout import LocalShard, ShardLayout, local_shard
from ds_ckpt.exchange.low_rank import LowRankPart, RowBlocks
from ds_ckpt.exchange.metric import PreconditionerEstimate
from ds_ckpt.exchange.rules import Choose
from ds_ckpt.exchange.transport import Packets, Transport
from ds_ckpt.telemetry.timings import Errors, Timings

_LONGEST_DOT = 1 << 30

P = ParamSpec("P")
R = TypeVar("R")


def _no_autocast(method: Callable[P, R]) -> Callable[P, R]:
    """Disable autograd, and backward's autocast, whose rounding the residual would miss."""

    @functools.wraps(method)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), torch._C._DisableAutocast():
            return method(*args, **kwargs)

    return plain


@dataclass
class Item:
    """One tensor of a bucket.

    Attributes:
        local: this rank's contribution, [layout.numel]: its gradient, or its node's sum.
        dtype: the gradient's, which returned shards and uncompressed tensors have.
        piggybacks: it is sent uncompressed with the low-rank factors.
        pending: with a compressor, residual plus gradient; turns into the new residual.
        energy: squared norm of `pending` at others' shards, if errors are sampled.
        own: this rank's contribution to its own shard, in the dtype of the sum.
        arriving: payloads of the other ranks, a row each; None with factors alone.
        kernels: what packs and unpacks it fused with the bucket's other tensors.
        deferred: its kernels make `pending` as they pack it, from `source` (None: zeros) and
            `local`.
        weights: divisors of entries before they are packed; see `exchange.metric`.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    local: Tensor
    layout: LocalShard
    compressor: Compressor | None
    piggybacks: bool = False
    pending: Tensor | None = None
    energy: Tensor | None = None
    own: Tensor = field(init=False)
    arriving: Tensor | None = None
    kernels: Kernels | None = None
    deferred: bool = False
    source: Tensor | None = None
    weights: Tensor | None = None

    @property
    def codec(self) -> Codec | None:
        """Its codec, if it has one."""
        return None if self.compressor is None else self.compressor.codec

    @property
    def in_steps(self) -> bool:
        """Return whether its codec uses the preconditioner metric."""
        return self.codec is not None and self.codec.uses_preconditioner

    @property
    def low_rank(self) -> LowRank | None:
        """Its compressor, if it is a low rank."""
        return self.compressor if isinstance(self.compressor, LowRank) else None

    @property
    def packed(self) -> bool:
        """Return whether it is in the all-to-all."""
        return not self.piggybacks and (self.compressor is None or self.codec is not None)

    @property
    def packed_bytes(self) -> list[int]:
        """Payload bytes of each rank's shard."""
        sizes, codec = self.layout.sizes, self.codec
        if codec is None:
            packed = {numel: aligned(numel * self.dtype.itemsize) for numel in set(sizes)}
        else:
            packed = {numel: codec.packed_bytes(numel) for numel in set(sizes)}
        return [packed[numel] for numel in sizes]

    @property
    def divided_last(self) -> bool:
        """Return whether an uncompressed tensor is summed before it is divided."""
        return self.local.dtype == self.dtype and self.dtype.itemsize < 4


class AllToAllExchange:
    """One rank's end. All ranks call `average` for the same buckets in the same order.

    Args:
        transport: carries the packets; with two levels, between nodes.
        choose: see `Choose`.
        feedback: residuals; the caller commits or rolls them back with the step. None: what is
            left out is lost.
        factors: PowerSGD's, committed or rolled back likewise.
        accumulates: gradients of some calls are kept by `accumulate` and sent with the next
            `average`. Tensors without a compressor are kept in the feedback too then.
        in_host: the lower level; None with one level.
        metric: for codecs that use it; None: they do without.

    Attributes:
        world: ranks that are averaged over.
        timings: seconds by section.
        errors: what compression leaves out, while it is sampled.
    """

    def __init__(
        self,
        transport: Transport,
        choose: Choose,
        feedback: Feedback | None = None,
        factors: Factors | None = None,
        *,
        accumulates: bool = False,
        in_host: InHostSum | None = None,
        metric: PreconditionerEstimate | None = None,
    ) -> None:
        self.transport = transport
        self.metric = metric
        self.feedback = feedback if feedback is not None else Feedback(enabled=False)
        self.factors = factors if factors is not None else Factors()
        self._choose = choose
        self._chosen: dict[int, tuple[Choose, dict[str, Compressor | None]]] = {}
        self._accumulates = accumulates
        self._in_host = in_host
        assert not accumulates or self.feedback.accumulates, "gradients are kept in the residuals"
        self._nonfinite_buckets = 0
        self._same_version: Tensor | None = None
        self._finite: list[Tensor] = []
        """Flags of buckets that the host has not read yet."""
        self._accumulated_finite: Tensor | None = None
        """Whether everything is finite that this step has accumulated."""
        self.world = transport.world * (in_host.processes if in_host else 1)
        self._members = in_host.members if in_host else tuple(range(transport.world))
        self._me = transport.dp_rank
        self.timings = Timings()
        self.errors = Errors()

    def reserve(
        self,
        shapes: Iterable[tuple[str, torch.Size]],
        device: torch.device,
        *others: Choose,
    ) -> None:
        """Allocate the residuals of the parameters that have one, by name and shape.

        Args:
            shapes: by name.
            device: of the gradients.
            others: compressors of other steps.
        """
        ways = (self._choose, *others) if self.world > 1 else ()
        for name, shape in shapes:
            chosen = [self._chosen_for(name, shape, choose) for choose in ways]
            compressors = [compressor for compressor in chosen if compressor is not None]
            for codec in (compressor.codec for compressor in compressors):
                if codec is not None:
                    codec.kernels(device)  # compiled now, not in the middle of an exchange
            if compressors or self._accumulates:
                layout = local_shard(ShardLayout(shape.numel(), self.world), self._members)
                self.feedback.reserve(name, layout.numel, device)

    def reset_step(self) -> None:
        """Forget the flag of accumulated gradients; the caller commits or rolls back the rest."""
        self._accumulated_finite = None

    @property
    def nonfinite_buckets(self) -> int:
        """Buckets so far with a non-finite value in a compressed tensor, on this rank or flagged.

        Waits for the device if there were buckets since the last call.
        """
        if self._finite:
            nonfinite = (~torch.stack(self._finite)).sum()
            if self._same_version is not None:
                nonfinite = nonfinite.masked_fill(~self._same_version, -1)
            self._finite, self._same_version = [], None
            found = int(nonfinite)
            if found < 0:
                raise RuntimeError(
                    f"another rank's packets are not of version {wire.VERSION} of the wire format: "
                    "install the same version of ds_ckpt on every node"
                )
            self._nonfinite_buckets += found
        return self._nonfinite_buckets

    @_no_autocast
    def accumulate(
        self,
        names: Sequence[str],
        tensors: list[Tensor],
        loss_scale: float = 1.0,
        *,
        choose: Choose | None = None,
    ) -> list[Tensor]:
        """Add a micro-step's gradients to the residuals, which a later call sends.

        A non-finite value in them flags every bucket of the step. Arguments as for `average`.

        Returns:
            Zeros of the shape of what `average` returns.
        """
        if tensors:
            self._time_on(tensors[0].device)
        items = self._items(names, tensors, self._choose if choose is None else choose)
        with self.timings.section("residual"):
            sums = []
            for item in items:
                if self.world > 1:
                    self._sample_metric(item, loss_scale)
                share = item.local, self.world, loss_scale
                sums.append(self.feedback.accumulate(item.name, *share))
            if sums:
                # residuals that are rounded cannot hold an inf, and the parameter may be absent
                # from the micro-step that sends
                finite = finite_flag(sums)
                before = self._accumulated_finite
                self._accumulated_finite = finite if before is None else finite & before
            for item, pending in zip(items, sums, strict=True):
                self.feedback.store(item.name, pending)
        sizes = [item.layout.size(self._me) for item in items]
        return [t.new_zeros(size) for t, size in zip(tensors, sizes, strict=True)]

    @_no_autocast
    def average(
        self,
        names: Sequence[str],
        tensors: list[Tensor],
        loss_scale: float = 1.0,
        *,
        choose: Choose | None = None,
    ) -> list[Tensor]:
        """Return the mean over the group of a bucket's gradients: this rank's shards.

        Args:
            names: parameter names, in the order of `tensors`.
            tensors: this rank's full gradients, contiguous, one device, any floating dtypes;
                multiplied by `loss_scale`. May be overwritten.
            loss_scale: the same on every rank.
            choose: compressors of this bucket, the same on every rank; None: the default.

        Returns:
            Flat shards in the gradients' dtypes, still multiplied by `loss_scale`; empty if this
            rank owns nothing. In a world of one, views of the gradients themselves.
        """
        choose = self._choose if choose is None else choose
        if not tensors:
            return []
        self._time_on(tensors[0].device)
        if self.world == 1:
            if self._accumulated_finite is not None:
                self._finite.append(self._accumulated_finite)
            shards = [
                self._single_rank(name, tensor, choose, loss_scale)
                for name, tensor in zip(names, tensors, strict=True)
            ]
        else:
            shards = self._exchange(self._items(names, tensors, choose), loss_scale)
        if not self.feedback.enabled:  # what was not sent is dropped
            for name in names:
                self.feedback.clear(name)
        return shards

    def _time_on(self, device: torch.device) -> None:
        if self.timings.module is None and not on_host(device):
            self.timings.module = torch.get_device_module(device)

    def _chosen_for(self, name: str, shape: torch.Size, choose: Choose) -> Compressor | None:
        """Return a parameter's compressor, which is chosen once, at attach."""
        _, known = self._chosen.setdefault(id(choose), (choose, {}))
        if name not in known:
            known[name] = choose(name, shape)
        return known[name]

    def _compressor(self, name: str, tensor: Tensor, choose: Choose) -> Compressor | None:
        compressor = self._chosen_for(name, tensor.shape, choose)
        if compressor is None and (self._accumulates or self.feedback.holds(name)):
            # An uncompressed tensor's residual is sent with it, in fp32 so that none is left. When
            # gradients accumulate this happens in every step, and rounding is kept as a residual;
            # but fp16 without the loss scale would lose small values.
            exact = not self._accumulates or tensor.dtype == torch.float16
            return Dense(torch.float32 if exact else tensor.dtype)
        return compressor

    def _items(self, names: Sequence[str], tensors: list[Tensor], choose: Choose) -> list[Item]:
        """Return a bucket's tensors with compressors, contributions and layouts."""
        flats = [t.reshape(-1) for t in tensors]
        shards = [ShardLayout(f.numel(), self.world) for f in flats]
        if self._in_host is not None and flats:
            with self.timings.section("in_host"):
                flats = self._in_host.sum(flats, shards)
        layouts = [local_shard(s, self._members) for s in shards]
        return [
            Item(n, t.shape, t.dtype, local, layout, self._compressor(n, t, choose))
            for n, t, local, layout in zip(names, tensors, flats, layouts, strict=True)
        ]

    def _sample_metric(self, item: Item, loss_scale: float) -> None:
        if item.in_steps and self.metric is not None and self.metric.sampling:
            self.metric.add_gradient(item.name, item.shape, item.layout, item.local, loss_scale)

    def _single_rank(self, name: str, tensor: Tensor, choose: Choose, loss_scale: float) -> Tensor:
        """Return the gradient and its residual, accumulated or left by a larger world."""
        flat = tensor.reshape(-1)
        if self._compressor(name, tensor, choose) is None:
            return flat
        if self.feedback.holds(name):
            pending = self.feedback.accumulate(name, flat, 1, loss_scale)
            flat = pending.mul(loss_scale).to(flat.dtype)
            pending.zero_()
            self.feedback.store(name, pending)
            self.feedback.clear(name)
        finite = self._accumulated_finite
        return flat if finite is None else _where(finite, flat)

    def _exchange(self, items: Sequence[Item], loss_scale: float) -> list[Tensor]:
        """Exchange one bucket, from residuals to sums."""
        section = self.timings.section
        low = None
        if any(item.low_rank is not None for item in items):
            low = LowRankPart(self.transport, self.factors, self.timings, items[0].local.device)
            _choose_piggybacks(items)
        with section("residual"):
            # factors need the sums, and carry the flag ahead of the packets
            finite = self._accumulate(items, loss_scale, defer=low is None)
        if low is not None:
            with section("pack"):
                self._add_to_low_rank(low, items)
                finite = low.first(finite)
        with section("pack"):
            packed = [item for item in items if item.packed]
            packets, finite = self._pack(packed, finite, loss_scale)
            self._store(items, finite)
        if packets is not None:
            with section("wire"):
                packets.exchange()
                others_finite, self._same_version = wire.read_headers(packets.incoming[0])
                finite = finite & others_finite
        with section("unpack"):
            if low is not None:
                finite = low.second(finite)
            self._finite.append(finite)
            return self._sums(items, low, loss_scale, finite)

    def _accumulate(self, items: Sequence[Item], loss_scale: float, *, defer: bool) -> Tensor:
        """Add gradients to residuals, and set the own part aside; return the flag (bool []).

        With `defer`, tensors whose kernels do this are left to them.
        """
        every, sound = [], True
        for item in items:
            if item.compressor is None:
                continue
            if item.codec is not None and not item.piggybacks:
                item.kernels = item.codec.kernels(item.local.device)
            self._sample_metric(item, loss_scale)
            readable = item.local.dtype in GRADIENTS
            if defer and readable and item.kernels is not None and not self.errors.sampling:
                item.deferred = True
                item.source, item.pending = self.feedback.begin(item.name, item.local)
                continue
            pending = self.feedback.accumulate(item.name, item.local, self.world, loss_scale)
            item.pending = pending
            if on_host(pending.device):
                sound = sound and all_finite(pending)  # while a cache has it
            else:
                every.append(pending)
            mine = pending[item.layout.shard(self._me)]
            if self.errors.sampling and not isinstance(item.compressor, Dense):
                item.energy = _energy(pending) - _energy(mine)
            if item.piggybacks:
                continue
            item.own = mine.mul(loss_scale)
        finite = torch.full((), sound, dtype=torch.bool, device=items[0].local.device)
        if every:
            finite = finite_flag(every)
        for item in items:
            if item.pending is None or item.deferred or item.piggybacks:
                continue
            if item.low_rank is None:
                item.pending[item.layout.shard(self._me)].zero_()  # factors need whole rows
        accumulated = self._accumulated_finite
        return finite if accumulated is None else finite & accumulated

    def _add_to_low_rank(self, low: LowRankPart, items: Sequence[Item]) -> None:
        for item in items:
            if item.piggybacks and item.pending is None:
                wide = item.local.to(torch.promote_types(item.dtype, torch.float32))
                low.add_rider(item.name, wide.div(self.world))
            elif item.pending is not None and item.piggybacks:
                low.add_rider(item.name, item.pending)
            elif item.pending is not None and item.low_rank is not None:
                blocks = RowBlocks.of(item.layout, matrix_shape(item.shape)[1])
                low.add(item.name, item.pending, blocks, item.low_rank)

    def _pack(
        self, items: Sequence[Item], finite: Tensor, loss_scale: float
    ) -> tuple[Packets | None, Tensor]:
        """Write the packets; what a codec leaves out stays in the pending tensor.

        Returns the packets and the flag, with what kernels have found.
        """
        if not items:
            return None, finite
        sizes = [*zip(*(item.packed_bytes for item in items), strict=True)]
        shards = [*zip(*(item.layout.sizes for item in items), strict=True)]
        packets = Packets(self.transport, sizes, shards, items[0].local.device)
        fused: defaultdict[Kernels, list[ToPack]] = defaultdict(list)
        by_codec: dict[int, tuple[Codec, list[tuple[Tensor, Tensor]]]] = {}
        for place, item in enumerate(items, start=1):
            item.arriving = packets.incoming[place]
            outgoing = [(dests, pieces[place]) for dests, pieces in packets.outgoing]
            if item.pending is None:
                self._pack_uncompressed(item, outgoing)
                continue
            if item.kernels is not None:
                fused[item.kernels] += self._to_pack(item, item.pending, outgoing)
                continue
            assert item.codec is not None
            if item.in_steps and self.metric is not None:
                device = item.pending.device
                item.weights = self.metric.weights(item.name, item.shape, item.layout, device)
            if item.weights is not None:
                item.pending.div_(item.weights)
            _, batch = by_codec.setdefault(id(item.codec), (item.codec, []))
            batch += [(item.layout.rows(item.pending, dests), out) for dests, out in outgoing]
        for kernels, to_pack in fused.items():
            finite = finite & kernels.pack(to_pack, self.world * loss_scale, loss_scale)
        for codec, batch in by_codec.values():
            codec.pack_all(batch)
        for item in items:
            if item.weights is not None and item.pending is not None:
                item.pending.mul_(item.weights)
        for _, (header, *_) in packets.outgoing:
            wire.write_header(header, finite)
        return packets, finite

    def _to_pack(
        self, item: Item, pending: Tensor, outgoing: Sequence[tuple[range, Tensor]]
    ) -> Iterator[ToPack]:
        """Yield the shards of a tensor, for kernels."""
        rows = item.layout.rows
        for dests, payloads in outgoing:
            values = rows(pending, dests)
            if not item.deferred:
                yield ToPack(values, source=values, payloads=payloads)
                continue
            source = None if item.source is None else rows(item.source, dests)
            yield ToPack(values, source, rows(item.local, dests), payloads)
        if item.deferred:
            mine = range(self._me, self._me + 1)
            source = None if item.source is None else rows(item.source, mine)
            item.own = pending.new_empty(item.layout.size(self._me))
            yield ToPack(rows(pending, mine), source, rows(item.local, mine), own=item.own)

    def _pack_uncompressed(self, item: Item, outgoing: Sequence[tuple[range, Tensor]]) -> None:
        divisor = 1 if item.divided_last else self.world
        for dests, payloads in outgoing:
            parts = item.layout.rows(item.local, dests)
            out = section(payloads, 0, parts.shape[1], item.dtype)
            if parts.dtype == item.dtype:
                torch.div(parts, divisor, out=out)  # straight into the packets
            else:
                out.copy_(parts.div(divisor))
        own = item.local[item.layout.shard(self._me)].div(divisor)
        item.own = own.to(torch.promote_types(item.dtype, torch.float32))

    def _store(self, items: Sequence[Item], finite: Tensor) -> None:
        """Make what is left the step's residual so far."""
        for item in items:
            if item.pending is None:
                continue
            if item.piggybacks:
                item.pending.zero_()  # all of it has arrived, in fp32
            if item.energy is not None:
                before = item.energy.masked_fill(~finite, 0.0)
                after = _energy(item.pending).masked_fill(~finite, 0.0)
                self.errors.add(describe(item.compressor), before, after)
            self.feedback.store(item.name, item.pending)
            if item.piggybacks or item.compressor == Dense(torch.float32):
                self.feedback.clear(item.name)

    def _sums(
        self, items: Sequence[Item], low: LowRankPart | None, loss_scale: float, finite: Tensor
    ) -> list[Tensor]:
        """Return this rank's shards of the mean, times the loss scale, in the gradients' dtypes."""
        sums = []
        # what is added to it is NaN where the bucket was flagged
        start = torch.zeros((), dtype=torch.float32, device=finite.device)
        start.masked_fill_(~finite, torch.nan)
        fused = self._sums_fused(items, low, loss_scale, start)
        for item in items:
            if item.piggybacks:
                assert low is not None
                total = low.rider(item.name)[item.layout.shard(self._me)]
                if item.pending is not None:
                    total = _where(finite, total.mul(loss_scale))
            elif item.pending is None:
                total = self._sum_uncompressed(item)
            else:
                total = fused[item.name]
            sums.append(total.to(item.dtype))
        return sums

    def _sums_fused(
        self, items: Sequence[Item], low: LowRankPart | None, loss_scale: float, start: Tensor
    ) -> dict[str, Tensor]:
        """Return the sums of compressed tensors, by name, in the gradients' dtypes.

        They start from `start` and are added in the order of ranks; by operators on an accelerator,
        the others' together, then the own.
        """
        batches: dict[Hashable, tuple[Kernels | Codec | None, list[Item]]] = {}
        for item in items:
            if item.pending is not None and not item.piggybacks:
                key = item.kernels or id(item.codec), item.dtype
                batches.setdefault(key, (item.kernels or item.codec, []))[1].append(item)
        sums: dict[str, Tensor] = {}
        for adder, batch in batches.values():
            sizes = [item.layout.size(self._me) for item in batch]
            total = start.repeat(sum(sizes))  # a copy, also of one entry
            shards, weighted = [], []
            for item, part in zip(batch, total.split(sizes), strict=True):
                if low is not None and item.low_rank is not None:
                    part.add_(low.delivered(item.name), alpha=loss_scale)
                if item.arriving is None:
                    part.add_(item.own)
                elif item.weights is None:
                    shards.append(ToAdd(item.arriving, part, item.own))
                else:
                    part.add_(item.own)
                    shards.append(ToAdd(item.arriving, torch.zeros_like(part)))
                    mine = item.weights[item.layout.shard(self._me)]
                    weighted.append((part, shards[-1].into, mine))
            if adder is not None and shards:
                own_last = isinstance(adder, Codec) and not on_host(total.device)
                before = self.transport.world - 1 if own_last else self._me
                adder.unpack_add_all(shards, loss_scale, before)
            for part, others, weights in weighted:
                part.add_(others.mul_(weights))
            names = [item.name for item in batch]
            sums |= dict(zip(names, total.to(batch[0].dtype).split(sizes), strict=True))
        return sums

    def _sum_uncompressed(self, item: Item) -> Tensor:
        assert item.arriving is not None
        arrived = section(item.arriving, 0, item.own.numel(), item.dtype)
        total = arrived.sum(0, dtype=item.own.dtype).add_(item.own)
        return total.div_(self.world) if item.divided_last else total


def _choose_piggybacks(items: Sequence[Item]) -> None:
    """Send small uncompressed tensors with the factors, which saves the bucket's all-to-all.

    Together they may be no larger than the factors.
    """
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
            item.piggybacks = True


def _where(finite: Tensor, values: Tensor) -> Tensor:
    """Return NaN in place of `values` if the bucket was flagged."""
    return values.masked_fill(~finite, torch.nan)


def _energy(values: Tensor) -> Tensor:
    """Return the squared norm in fp64, in pieces: CUDA's dot product counts in 32 bits."""
    return torch.stack([part.dot(part).double() for part in values.split(_LONGEST_DOT)]).sum()
