"""ZeRO-3's reduction of a bucket by one all-to-all of packed shards, summed at the owner.

    1. add residual   pending = residual + gradient / (world * loss_scale)
    2. pack           for each other rank the shard that it owns; the rest is the new residual
    3. exchange       one all-to-all
    4. unpack         own shard += what arrived (the codec's `reduce_rows`); it is never sent
    5. commit         with the step (`engine.step`)

It replaces DeepSpeed's `reduce_scatter_coalesced`. It returns this rank's unpadded chunk of each
tensor's mean over the group, still multiplied by the loss scale. A tensor without a compressor is
sent in its own dtype. In fp32 it is divided by the world before the sum, like in DeepSpeed. So are
sums of a node, which might not fit into 16 bits. 16-bit types are summed and divided in fp32 and
rounded once. Low-rank tensors use all-reduces of their factors instead (`low_rank`). With two
levels all of this happens between nodes, to sums inside each node (`transport`).

A codec might drop a non-finite value and hide the overflow. So its rank flags the bucket in its
packets' headers. Every rank then returns NaN for its shards of the bucket's compressed tensors.
DeepSpeed's own overflow check finds it there. The flag stays a tensor on the device. The host reads
those of all buckets at once, when the step ends. A flagged bucket is exchanged to its end, with
meaningless values, and the step is rolled back.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from ds_ckpt.compression import wire
from ds_ckpt.compression.base import Codec, Compressor, on_host
from ds_ckpt.compression.dense import Dense
from ds_ckpt.compression.error_feedback import Feedback, all_finite, finite_flag
from ds_ckpt.compression.powersgd import Factors, LowRank, matrix_shape
from ds_ckpt.compression.wire import aligned, section
from ds_ckpt.exchange.assignment import describe
from ds_ckpt.exchange.layout import LocalShard, ShardLayout, local_shard
from ds_ckpt.exchange.low_rank import LowRankPart, RowBlocks
from ds_ckpt.exchange.method_rules import Choose
from ds_ckpt.exchange.metric import PreconditionerEstimate
from ds_ckpt.exchange.transport import InHostSum, NullTransport, Packets, Transport
from ds_ckpt.telemetry.timings import Errors, Spans, timed

_LONGEST_DOT = 1 << 30
Bucket = Sequence[tuple[str, torch.Size, torch.dtype]]
"""Name, shape and gradient dtype of the parameters of a bucket."""


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Disable autograd, and backward's autocast, whose rounding the residual would miss."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield


@dataclass
class Item:
    """One tensor of a bucket.

    Attributes:
        local: this rank's contribution, [layout.numel]: its gradient, or its node's sum.
        dtype: the gradient's, which returned shards and uncompressed tensors have.
        pending: with a compressor, residual plus gradient; turns into the new residual.
        energy: squared norm of `pending` at others' shards, if errors are sampled.
        own: this rank's contribution to its own shard, in the dtype of the sum.
        arriving: payloads of the other ranks, a row each; not with factors.
        weights: divisors of entries before they are packed; see `exchange.metric`.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    local: Tensor
    layout: LocalShard
    compressor: Compressor | None
    pending: Tensor | None = None
    energy: Tensor | None = None
    own: Tensor = field(init=False)
    arriving: Tensor = field(init=False)
    weights: Tensor | None = None

    @property
    def codec(self) -> Codec | None:
        """Its codec, if it has one."""
        return None if self.compressor is None else self.compressor.codec

    @property
    def packed_bytes(self) -> list[int]:
        """Payload bytes of each rank's shard."""
        return _packed_bytes(self.codec, self.dtype, self.layout)

    @property
    def is_divided_last(self) -> bool:
        """Return whether an uncompressed tensor is summed before it is divided."""
        return self.local.dtype == self.dtype and self.dtype.itemsize < 4


@lru_cache(maxsize=4096)
def _packed_bytes(codec: Codec | None, dtype: torch.dtype, layout: LocalShard) -> list[int]:
    """Compute once what each step needs again, in autograd's thread."""
    packed = {
        numel: codec.packed_bytes(numel) if codec else aligned(numel * dtype.itemsize)
        for numel in set(layout.sizes)
    }
    return [packed[numel] for numel in layout.sizes]


@dataclass(eq=False)
class AllToAllExchange:
    """One rank's end. All ranks call `average` for the same buckets in the same order.

    `transport` carries the packets, between nodes with two levels, and `in_host` is the lower
    level. `feedback` and `factors` (PowerSGD's) are committed or rolled back by the caller. With
    `accumulates`, gradients of some calls are kept by `accumulate` and sent with the next one.

    Attributes:
        spans: records of the exchange's sections; None: they are not timed.
        errors: what compression leaves out, while it is sampled.
    """

    transport: Transport
    choose: Choose
    feedback: Feedback = field(default_factory=lambda: Feedback(enabled=False))
    factors: Factors = field(default_factory=Factors)
    accumulates: bool = False
    in_host: InHostSum | None = None
    metric: PreconditionerEstimate | None = None

    def __post_init__(self) -> None:
        transport, in_host = self.transport, self.in_host
        kept = not self.accumulates or self.feedback.accumulates
        assert kept, "gradients are kept in the residuals"
        self._nonfinite_buckets = 0
        self._same_version: Tensor | None = None
        self._finite: list[Tensor] = []  # flags of buckets that the host has not read yet
        self._accumulated_finite: Tensor | None = None  # of all that this step has accumulated
        self.world = transport.world * (in_host.processes if in_host else 1)
        self._members = in_host.members if in_host else tuple(range(transport.world))
        self._me = transport.dp_rank
        self.spans: Spans | None = None
        self.errors = Errors()

    def reserve(
        self, shapes: Iterable[tuple[str, torch.Size]], device: torch.device, *others: Choose
    ) -> None:
        """Allocate residuals and compile kernels, also for `others`, compressors of other steps."""
        ways = (self.choose, *others) if self.world > 1 else ()
        sizes: dict[Codec, set[int]] = {}
        for name, shape in shapes:
            compressors = [c for choose in ways if (c := choose(name, shape)) is not None]
            if compressors or self.accumulates:
                layout = local_shard(ShardLayout(shape.numel(), self.world), self._members)
                self.feedback.reserve(name, layout.numel, device)
                for codec in filter(None, (c.codec for c in compressors)):
                    sizes.setdefault(codec, set()).update(layout.sizes)
        if not on_host(device):
            for codec, numels in sizes.items():
                for numel in numels:
                    _compile_kernels(codec, numel, device)

    def preallocate(
        self, bucket: Bucket, device: torch.device, *others: Choose, sends: bool
    ) -> None:
        """Exchange a bucket of zeros as steps will, also by `others`, and roll it back.

        NCCL allocates buffers for each peer with a group's first messages. Triton compiles a kernel
        at its first call. Both happen here, not in the first backward, after memory is planned.
        Collective if it `sends`.
        """
        names = [name for name, _, _ in bucket]
        first = self.accumulate if self.accumulates else self.average
        ways = [(first, self.choose), *((self.average, way) for way in (self.choose, *others))]
        transport, in_host = self.transport, self.in_host
        if not sends:
            self.transport = NullTransport(transport)
            self.in_host = in_host and InHostSum(NullTransport(in_host.transport), in_host.peers)
        try:
            for reduce, choose in ways:  # from the second on with a residual
                zeros = (torch.zeros(shape, dtype=dt, device=device) for _, shape, dt in bucket)
                reduce(names, list(zeros), choose=choose)
            nonfinite = self.nonfinite_buckets if sends else 0  # and versions of the wire format
            assert not nonfinite, "a bucket of zeros"
            self._finite, self._same_version = [], None
            self.feedback.rollback()
            self.factors.rollback()
            self.reset_step()
        finally:
            self.transport, self.in_host = transport, in_host

    def reset_step(self) -> None:
        """Forget the flag of accumulated gradients; the caller commits or rolls back the rest."""
        self._accumulated_finite = None

    @property
    def nonfinite_buckets(self) -> int:
        """Buckets so far with a non-finite value in a compressed tensor; waits for the device."""
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

    @_no_autocast()
    def accumulate(
        self,
        names: Sequence[str],
        tensors: list[Tensor],
        loss_scale: float = 1.0,
        *,
        choose: Choose | None = None,
    ) -> list[Tensor]:
        """Add a micro-step's gradients to the residuals, which a later call sends; return zeros.

        A non-finite value in them flags every bucket of the step. Arguments as for `average`.
        """
        items = self._items(names, tensors, self.choose if choose is None else choose)
        with timed("residual", self.spans):
            sums = []
            for item in items:
                if self.world > 1:
                    self._sample_metric(item, loss_scale)
                share = item.local, self.world, loss_scale
                sums.append(self.feedback.accumulate(item.name, *share))
            if sums:  # rounded residuals cannot hold an inf
                finite = finite_flag(sums)
                before = self._accumulated_finite
                self._accumulated_finite = finite if before is None else finite & before
            for item, pending in zip(items, sums, strict=True):
                self.feedback.store(item.name, pending)
        return [
            item.local.new_zeros(item.layout.sizes[self._me], dtype=item.dtype) for item in items
        ]

    @_no_autocast()
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
            Flat shards in the gradients' dtypes, still multiplied by `loss_scale`. In a world of
            one, views of the gradients themselves.
        """
        choose = self.choose if choose is None else choose
        if self.world == 1 and not any(map(self.feedback.has_residual, names)):
            return [tensor.reshape(-1) for tensor in tensors]
        shards = self._exchange(self._items(names, tensors, choose), loss_scale)
        if not self.feedback.enabled or self.world == 1:  # what was not sent is dropped
            for name in names:
                self.feedback.clear(name)
        return shards

    def _compressor(self, name: str, tensor: Tensor, choose: Choose) -> Compressor | None:
        compressor = choose(name, tensor.shape)
        if compressor is None and (self.accumulates or self.feedback.has_residual(name)):
            # An uncompressed tensor's residual is sent with it, in fp32 so that none is left. With
            # accumulation rounding stays as residual, but fp16 would lose small values.
            exact = not self.accumulates or tensor.dtype == torch.float16
            return Dense(torch.float32 if exact else tensor.dtype)
        return compressor

    def _items(self, names: Sequence[str], tensors: list[Tensor], choose: Choose) -> list[Item]:
        flats = [t.reshape(-1) for t in tensors]
        shards = [ShardLayout(f.numel(), self.world) for f in flats]
        if self.in_host is not None and flats:
            with timed("in_host", self.spans):
                flats = self.in_host.sum(flats, shards)
        layouts = [local_shard(s, self._members) for s in shards]
        return [
            Item(n, t.shape, t.dtype, local, layout, self._compressor(n, t, choose))
            for n, t, local, layout in zip(names, tensors, flats, layouts, strict=True)
        ]

    def _metric_for(self, item: Item) -> PreconditionerEstimate | None:
        uses_metric = item.codec is not None and item.codec.uses_preconditioner
        return self.metric if uses_metric else None

    def _sample_metric(self, item: Item, loss_scale: float) -> None:
        metric = self._metric_for(item)
        if metric is not None and metric.sampling:
            metric.add_gradient(item.name, item.shape, item.layout, item.local, loss_scale)

    def _exchange(self, items: Sequence[Item], loss_scale: float) -> list[Tensor]:
        if not items:
            return []
        others = [item for item in items if not isinstance(item.compressor, LowRank)]
        low: LowRankPart | None = None
        packets: Packets | None = None
        with timed("residual", self.spans):
            finite = self._accumulate(items, loss_scale)
        with timed("pack", self.spans):
            if len(others) < len(items):
                low = self._low_rank(items)
                finite = low.first(finite)
            if others:
                packets = self._pack(others, finite)
            self._store(items, finite)
        if packets is not None:
            with timed("wire", self.spans):
                packets.exchange()
                others_finite, self._same_version = wire.read_headers(packets.incoming[0])
                finite = finite & others_finite
        with timed("unpack", self.spans):
            if low is not None:
                finite = low.second(finite)
            self._finite.append(finite)
            return self._sums(items, low, loss_scale, finite)

    def _accumulate(self, items: Sequence[Item], loss_scale: float) -> Tensor:
        """Add gradients to residuals, and set the own part aside; return the flag (bool [])."""
        every, sound = [], True
        for item in items:
            if item.compressor is None:
                continue
            self._sample_metric(item, loss_scale)
            pending = self.feedback.accumulate(item.name, item.local, self.world, loss_scale)
            item.pending = pending
            if on_host(pending.device):
                sound = sound and all_finite(pending)  # while a cache has it
            else:
                every.append(pending)
            mine = pending[item.layout.shard(self._me)]
            if self.errors.sampling and not isinstance(item.compressor, Dense):
                item.energy = _energy(pending) - _energy(mine)
            item.own = mine.mul(loss_scale)
        finite = torch.full((), sound, dtype=torch.bool, device=items[0].local.device)
        if every:
            finite = finite_flag(every)
        for item in items:
            if item.pending is not None and item.codec is not None:
                item.pending[item.layout.shard(self._me)].zero_()  # factors need whole rows
        accumulated = self._accumulated_finite
        return finite if accumulated is None else finite & accumulated

    def _low_rank(self, items: Sequence[Item]) -> LowRankPart:
        low = LowRankPart(self.transport, self.factors, self.spans, items[0].local.device)
        for item in items:
            if isinstance(item.compressor, LowRank) and item.pending is not None:
                blocks = RowBlocks.of(item.layout, matrix_shape(item.shape)[1])
                low.add(item.name, item.pending, blocks, item.compressor)
        return low

    def _pack(self, items: Sequence[Item], finite: Tensor) -> Packets:
        """Write the packets; what a codec leaves out stays in the pending tensor."""
        sizes = zip(*(item.packed_bytes for item in items), strict=True)
        shards = zip(*(item.layout.sizes for item in items), strict=True)
        packets = Packets(self.transport, [*sizes], [*shards], items[0].local.device)
        for place, item in enumerate(items, start=1):
            item.arriving = packets.incoming[place]
            outgoing = [(dests, pieces[place]) for dests, pieces in packets.outgoing]
            if item.pending is None or item.codec is None:
                self._pack_uncompressed(item, outgoing)
                continue
            if (metric := self._metric_for(item)) is not None:
                device = item.pending.device
                item.weights = metric.weights(item.name, item.shape, item.layout, device)
            if item.weights is not None:
                item.pending.div_(item.weights)
            for dests, out in outgoing:
                item.codec.pack_rows(item.layout.rows(item.pending, dests), out)
        for _, (header, *_) in packets.outgoing:
            wire.write_header(header, finite)
        return packets

    def _pack_uncompressed(self, item: Item, outgoing: Sequence[tuple[range, Tensor]]) -> None:
        divisor = 1 if item.is_divided_last else self.world
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
            if item.weights is not None:
                item.pending.mul_(item.weights)
            if item.energy is not None:
                before = item.energy.masked_fill(~finite, 0.0)
                after = _energy(item.pending).masked_fill(~finite, 0.0)
                self.errors.add(describe(item.compressor), before, after)
            self.feedback.store(item.name, item.pending)
            if item.compressor == Dense(torch.float32):
                self.feedback.clear(item.name)

    def _sums(
        self, items: Sequence[Item], low: LowRankPart | None, loss_scale: float, finite: Tensor
    ) -> list[Tensor]:
        """Return this rank's shards of the mean, times the loss scale, in the gradients' dtypes."""
        start = torch.zeros((), dtype=torch.float32, device=finite.device)
        start.masked_fill_(~finite, torch.nan)
        sums: list[Tensor] = []
        for item in items:
            if item.pending is None:
                sums.append(self._sum_uncompressed(item).to(item.dtype))
                continue
            total = item.own
            if item.codec is None:
                assert low is not None
                total.add_(low.delivered(item.name), alpha=loss_scale)
            elif len(item.arriving):
                into = total if item.weights is None else torch.zeros_like(total)
                item.codec.reduce_rows(item.arriving, into, loss_scale)
                if item.weights is not None:
                    total.add_(into.mul_(item.weights[item.layout.shard(self._me)]))
            sums.append(total.add_(start).to(item.dtype))
        return sums

    def _sum_uncompressed(self, item: Item) -> Tensor:
        arrived = section(item.arriving, 0, item.own.numel(), item.dtype)
        total = arrived.sum(0, dtype=item.own.dtype).add_(item.own)
        return total.div_(self.world) if item.is_divided_last else total


def _compile_kernels(codec: Codec, numel: int, device: torch.device) -> None:
    """Pack and unpack zeros, at an address that is a multiple of 16 and at one that is not."""
    for start in (0, 1):
        values = torch.zeros(numel + 1, dtype=torch.float32, device=device)[start : start + numel]
        size = codec.packed_bytes(numel)
        payload = torch.empty(1, size, dtype=torch.uint8, device=device)
        codec.pack_rows(values.view(1, numel), payload)
        codec.unpack_add_rows(payload, values)


def _energy(values: Tensor) -> Tensor:
    """Return the squared norm in fp64, in pieces: CUDA's dot product counts in 32 bits."""
    return torch.stack([part.dot(part).double() for part in values.split(_LONGEST_DOT)]).sum()
