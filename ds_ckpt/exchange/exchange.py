"""ZeRO-3's reduction of a bucket by one all-to-all of packed shards, summed at the owner.

    for each tensor with a codec: pending = residual + gradient / (world * loss_scale)
    for each other process: pack what it owns, keep what was left out as residual
    one all-to-all
    own shard = sum over processes of what arrived; the own part never leaves and is exact

It stands in for DeepSpeed's `reduce_scatter_coalesced`: the mean over the group, this process's
chunk of each tensor, unpadded, still multiplied by the loss scale. A tensor without a codec
travels whole in its own dtype, divided by the world before the sum as DeepSpeed does.

A non-finite value cannot be left to the codec, which might drop it and hide the overflow. Its
process flags the bucket's packets instead; every receiver then answers NaN for its shards of the
bucket's compressed tensors, where DeepSpeed's own overflow check finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from ds_ckpt.compression.codec import Codec, Dense, aligned, section
from ds_ckpt.compression.feedback import Feedback, all_finite
from ds_ckpt.exchange.layout import HEADER_BYTES, PacketLayout, ShardLayout
from ds_ckpt.exchange.transport import Transport

Choose = Callable[[str, torch.Size], Codec | None]
"""The codec of a parameter by name and shape, the same on every process; None: travels whole."""

Order = Callable[[int, int, int, int, int], Iterable[tuple[int, int, Sequence[int]]]]
"""In which order the processes are added up, for tensors that travel whole.

(numel, itemsize, world, start, stop) -> pieces (start, stop, order) that cover [start, stop) of a
buffer of `numel` elements. The buffer is the one that DeepSpeed would reduce: for each owner, its
chunk of each tensor of the bucket, padded to `ceil(tensor's numel / world)`.
"""


def ascending(
    numel: int, itemsize: int, world: int, start: int, stop: int
) -> Iterable[tuple[int, int, Sequence[int]]]:
    """Processes by index everywhere."""
    return [(start, stop, range(world))]


class AllToAllExchange:
    """One process's end. All processes call `reduce` for the same buckets in the same order.

    Args:
        transport: carries the packets.
        choose: see `Choose`.
        feedback: residuals; the caller commits or rolls them back with the step. None: what a
            codec leaves out is lost.
        order: see `Order`.
        holds: gradients of some calls are held back by `hold` and go with the next `reduce`.
            Tensors without a codec then pass through the feedback too: it is where they are held.

    Attributes:
        nonfinite_buckets: buckets so far in which this process saw or was told of a non-finite
            value in a compressed tensor.
    """

    def __init__(
        self,
        transport: Transport,
        choose: Choose,
        feedback: Feedback | None = None,
        *,
        order: Order = ascending,
        holds: bool = False,
    ) -> None:
        self._transport = transport
        self._choose = choose
        self._feedback = feedback if feedback is not None else Feedback(enabled=False)
        self._order = order
        self._holds = holds
        assert not holds or self._feedback.enabled, "gradients are held in the residuals"
        self.nonfinite_buckets = 0

    def _codec(self, name: str, tensor: Tensor) -> Codec | None:
        codec = self._choose(name, tensor.shape)
        if codec is None and (self._holds or self._feedback.holds(name)):
            # what is owed to a tensor that travels whole goes with it
            return Dense(tensor.dtype)
        return codec

    @torch.no_grad()
    def hold(
        self, names: Sequence[str], tensors: list[Tensor], loss_scale: float = 1.0
    ) -> list[Tensor]:
        """Add a micro-step's gradients to what goes out later and send nothing.

        Arguments as for `reduce`.

        Returns:
            Zeros of the shape of what `reduce` returns.
        """
        world, me = self._transport.world, self._transport.dp_rank
        for name, tensor in zip(names, tensors, strict=True):
            self._feedback.accumulate(name, tensor.reshape(-1), world, loss_scale)
        return [t.new_zeros(ShardLayout(t.numel(), world).size(me)) for t in tensors]

    @torch.no_grad()
    def reduce(
        self, names: Sequence[str], tensors: list[Tensor], loss_scale: float = 1.0
    ) -> list[Tensor]:
        """The mean over the group of a bucket's gradients, this process's shards.

        Args:
            names: parameter names, in the order of `tensors`.
            tensors: this process's full gradients, contiguous, one device, any floating dtypes;
                multiplied by `loss_scale`. May be overwritten.
            loss_scale: the same on every process.

        Returns:
            Flat shards in the gradients' dtypes, still multiplied by `loss_scale`; empty where
            this process owns nothing. In a world of one, views of the gradients themselves.
        """
        flats = [t.reshape(-1) for t in tensors]
        codecs = [self._codec(n, t) for n, t in zip(names, tensors, strict=True)]
        if self._transport.world == 1:
            return [
                self._alone(name, flat, codec, loss_scale)
                for name, flat, codec in zip(names, flats, codecs, strict=True)
            ]
        if not flats:
            return []
        return _Bucket(self, names, flats, codecs, loss_scale).reduce()

    def _alone(self, name: str, flat: Tensor, codec: Codec | None, loss_scale: float) -> Tensor:
        """World of one: the gradient, and the residual that a larger world may have left."""
        if codec is None or not self._feedback.holds(name):
            return flat
        pending = self._feedback.accumulate(name, flat, 1, loss_scale)
        delivered = pending.mul(loss_scale).to(flat.dtype)
        pending.zero_()
        return delivered


class _Bucket:
    """One reduction under way: `pack`, the all-to-all, `unpack`."""

    def __init__(
        self,
        exchange: AllToAllExchange,
        names: Sequence[str],
        flats: list[Tensor],
        codecs: list[Codec | None],
        loss_scale: float,
    ) -> None:
        self.exchange = exchange
        self.names, self.flats, self.codecs = names, flats, codecs
        self.loss_scale = loss_scale
        self.world, self.me = exchange._transport.world, exchange._transport.dp_rank
        self.peers = [p for p in range(self.world) if p != self.me]
        self.shards = [ShardLayout(f.numel(), self.world) for f in flats]
        self.layout = PacketLayout.of(
            self.shards,
            [
                partial(_whole_bytes, f.dtype) if codec is None else codec.packed_bytes
                for f, codec in zip(flats, codecs, strict=True)
            ],
            dp_rank=self.me,
            world=self.world,
        )
        device = flats[0].device
        # Every byte is written: headers and compressed payloads by us, whole ones up to their
        # padding, which nobody reads.
        self.outgoing = torch.empty(sum(self.layout.send_bytes), dtype=torch.uint8, device=device)
        self.incoming = torch.empty(
            sum(self.layout.receive_bytes), dtype=torch.uint8, device=device
        )
        self.own: dict[int, Tensor] = {}
        """By tensor, this process's contribution to its own shard, in the dtype of the sum."""

    def reduce(self) -> list[Tensor]:
        flagged = self._pack()
        self.exchange._transport.all_to_all(
            self.incoming, self.outgoing, self.layout.receive_bytes, self.layout.send_bytes
        )
        flagged = self._any_flag() or flagged
        self.exchange.nonfinite_buckets += flagged
        return [self._sum(i, flagged) for i in range(len(self.flats))]

    def _pack(self) -> bool:
        """Fill the packets; True where an accumulated value is not finite."""
        finite = True
        for i, (flat, codec) in enumerate(zip(self.flats, self.codecs, strict=True)):
            if codec is None:
                self._pack_whole(i, flat)
            elif finite:
                finite = self._pack_compressed(i, flat, codec)
        for dest in self.peers:
            start = self.layout.outgoing(dest)
            self.outgoing[start : start + HEADER_BYTES].zero_()
            if not finite:
                self.outgoing[start] = 1
                for i, codec in enumerate(self.codecs):
                    if codec is not None:
                        self.outgoing[self.layout.sent(dest, i)].zero_()
        return not finite

    def _pack_whole(self, i: int, flat: Tensor) -> None:
        shard = self.shards[i]
        for dest in self.peers:
            payload = self.outgoing[self.layout.sent(dest, i)]
            # DeepSpeed's own pre-division, in the gradient's dtype, straight into the packet
            torch.div(
                flat[shard.shard(dest)],
                self.world,
                out=section(payload, 0, shard.size(dest), flat.dtype),
            )
        own = flat[shard.shard(self.me)].div(self.world)
        self.own[i] = own.to(_sum_dtype(flat.dtype))

    def _pack_compressed(self, i: int, flat: Tensor, codec: Codec) -> bool:
        shard = self.shards[i]
        pending = self.exchange._feedback.accumulate(
            self.names[i], flat, self.world, self.loss_scale
        )
        if not all_finite(pending):
            return False
        for dest in self.peers:
            codec.pack(pending[shard.shard(dest)], self.outgoing[self.layout.sent(dest, i)])
        mine = pending[shard.shard(self.me)]
        self.own[i] = mine.mul(self.loss_scale)
        mine.zero_()
        return True

    def _any_flag(self) -> bool:
        starts = [self.layout.incoming(p) for p in self.peers]
        return bool(self.incoming[starts].any())

    def _sum(self, i: int, flagged: bool) -> Tensor:
        flat, codec = self.flats[i], self.codecs[i]
        size = self.shards[i].size(self.me)
        if codec is None:
            return self._sum_whole(i, size, flat.dtype)
        if flagged:
            return torch.full((size,), torch.nan, dtype=flat.dtype, device=flat.device)
        total = torch.zeros_like(self.own[i])
        for process in range(self.world):
            if process == self.me:
                total.add_(self.own[i])
            else:
                payload = self.incoming[self.layout.received(process, i)]
                codec.unpack_add(payload, total, self.loss_scale)
        return total.to(flat.dtype)

    def _sum_whole(self, i: int, size: int, dtype: torch.dtype) -> Tensor:
        parts = [
            self.own[i]
            if process == self.me
            else section(self.incoming[self.layout.received(process, i)], 0, size, dtype)
            for process in range(self.world)
        ]
        total = torch.empty_like(self.own[i])
        chunks = [shard.chunk for shard in self.shards]
        at = self.me * sum(chunks) + sum(chunks[:i])
        pieces = self.exchange._order(
            self.world * sum(chunks), dtype.itemsize, self.world, at, at + size
        )
        for start, stop, order in pieces:
            piece = slice(start - at, stop - at)
            # Starting from the first part, not from 0: 0 + -0 would turn into +0.
            sum_ = total[piece].copy_(parts[order[0]][piece])
            for process in order[1:]:
                sum_.add_(parts[process][piece])
        return total.to(dtype)


def _whole_bytes(dtype: torch.dtype, numel: int) -> int:
    return aligned(numel * dtype.itemsize)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
