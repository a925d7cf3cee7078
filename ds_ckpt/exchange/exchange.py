"""ZeRO-3's reduction of a bucket by one all-to-all of packed shards, summed at the owner.

    for each tensor with a codec: pending = residual + gradient / (world * loss_scale)
    for each other process: pack what it owns, keep what was left out as residual
    one all-to-all
    own shard = sum over processes of what arrived; the own part never leaves and is exact

It stands in for DeepSpeed's `reduce_scatter_coalesced`: the mean over the group, this process's
chunk of each tensor, unpadded, still multiplied by the loss scale. A tensor without a treatment
travels whole in its own dtype; in fp32 it is divided by the world before the sum as DeepSpeed does,
16-bit types are summed and divided in fp32 and rounded once. Low-rank
tensors take all-reduces of their factors instead (`low_rank`). With two levels all of this happens
between hosts, to sums that each host has made before (`in_host`).

A non-finite value cannot be left to the codec, which might drop it and hide the overflow. Its
process flags the bucket instead; every process then answers NaN for its shards of the bucket's
compressed tensors, where DeepSpeed's own overflow check finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ds_ckpt.compression.codec import Dense
from ds_ckpt.compression.factors import Factors
from ds_ckpt.compression.feedback import Feedback, all_finite
from ds_ckpt.exchange.bucket import Bucket
from ds_ckpt.exchange.in_host import InHostSum
from ds_ckpt.exchange.item import Item, Tools
from ds_ckpt.exchange.layout import ColumnLayout, ShardLayout
from ds_ckpt.exchange.transport import Transport
from ds_ckpt.exchange.treatment import Choose, Treatment
from ds_ckpt.telemetry.timings import Errors, Timings

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
        transport: carries the packets; with two levels, between hosts.
        choose: see `Choose`.
        feedback: residuals; the caller commits or rolls them back with the step. None: what is
            left out is lost.
        factors: PowerSGD's, committed or rolled back likewise.
        order: see `Order`; not used with two levels.
        holds: gradients of some calls are held back by `hold` and go with the next `reduce`.
            Tensors without a treatment then pass through the feedback too: it is where they are
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
        self._choose = choose
        self._feedback = feedback if feedback is not None else Feedback(enabled=False)
        self._holds = holds
        self._in_host = in_host
        assert not holds or self._feedback.accumulates, "gradients are held in the residuals"
        self.nonfinite_buckets = 0
        self._held_nonfinite = False
        self.world = transport.world * (in_host.processes if in_host else 1)
        self._members = in_host.members if in_host else tuple(range(transport.world))
        self._place = transport.dp_rank
        self.timings = Timings()
        self.errors = Errors()
        self._tools = Tools(
            transport=transport,
            feedback=self._feedback,
            factors=factors if factors is not None else Factors(),
            order=order if in_host is None else ascending,
            timings=self.timings,
            errors=self.errors,
            world=self.world,
        )

    def _treatment(self, name: str, tensor: Tensor, whole: bool) -> Treatment:
        treatment = None if whole else self._choose(name, tensor.shape)
        if treatment is None and (self._holds or self._feedback.holds(name)):
            # What is owed to a tensor that travels whole goes with it, in fp32 so that nothing is
            # owed afterwards. Where gradients are held it passes here in every step, and a rounded
            # one is held like any other; but fp16 without the loss scale would lose small ones.
            exact = not self._holds or tensor.dtype == torch.float16
            return Dense(torch.float32 if exact else tensor.dtype)
        return treatment

    def step_ended(self) -> None:
        """Forget what was held back; the caller commits or rolls back."""
        self._held_nonfinite = False

    def _columns(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[ColumnLayout]]:
        """What this process brings to the exchange of each tensor."""
        flats = [t.reshape(-1) for t in tensors]
        shards = [ShardLayout(f.numel(), self.world) for f in flats]
        layouts = [ColumnLayout(s, self._members) for s in shards]
        if self._in_host is not None and flats:
            with self.timings.section("in_host"):
                flats = self._in_host.sum(flats, shards)
        return flats, layouts

    @torch.no_grad()
    def hold(
        self, names: Sequence[str], tensors: list[Tensor], loss_scale: float = 1.0
    ) -> list[Tensor]:
        """Add a micro-step's gradients to what goes out later; nothing leaves the host.

        A non-finite value in them is told to everybody with the step's every bucket. Arguments as
        for `reduce`.

        Returns:
            Zeros of the shape of what `reduce` returns.
        """
        columns, layouts = self._columns(tensors)
        with self.timings.section("residual"):
            for name, column in zip(names, columns, strict=True):
                pending = self._feedback.accumulate(name, column, self.world, loss_scale)
                # residuals that are rounded cannot hold an inf, and the parameter may be absent
                # from the micro-step that sends
                self._held_nonfinite |= not all_finite(pending)
                self._feedback.keep(name, pending)
        sizes = [layout.size(self._place) for layout in layouts]
        return [t.new_zeros(size) for t, size in zip(tensors, sizes, strict=True)]

    @torch.no_grad()
    def reduce(
        self,
        names: Sequence[str],
        tensors: list[Tensor],
        loss_scale: float = 1.0,
        *,
        whole: bool = False,
    ) -> list[Tensor]:
        """The mean over the group of a bucket's gradients, this process's shards.

        Args:
            names: parameter names, in the order of `tensors`.
            tensors: this process's full gradients, contiguous, one device, any floating dtypes;
                multiplied by `loss_scale`. May be overwritten.
            loss_scale: the same on every process.
            whole: send this bucket uncompressed, with what is owed to it; the same everywhere.

        Returns:
            Flat shards in the gradients' dtypes, still multiplied by `loss_scale`; empty where
            this process owns nothing. In a world of one, views of the gradients themselves.
        """
        treatments = [self._treatment(n, t, whole) for n, t in zip(names, tensors, strict=True)]
        if not tensors:
            return []
        if self.world == 1:
            self.nonfinite_buckets += self._held_nonfinite
            shards = [
                self._alone(name, tensor.reshape(-1), treatment, loss_scale)
                for name, tensor, treatment in zip(names, tensors, treatments, strict=True)
            ]
            self._forget_left(names)
            return shards
        columns, layouts = self._columns(tensors)
        items = [
            Item(name, tensor.shape, tensor.dtype, column, layout, treatment)
            for name, tensor, column, layout, treatment in zip(
                names, tensors, columns, layouts, treatments, strict=True
            )
        ]
        bucket = Bucket(self._tools, items, loss_scale, finite=not self._held_nonfinite)
        shards = bucket.reduce()
        self.nonfinite_buckets += bucket.flagged
        self._forget_left(names)
        return shards

    def _forget_left(self, names: Sequence[str]) -> None:
        """Without error feedback what has been sent is all that goes out of a step."""
        if not self._feedback.enabled:
            for name in names:
                self._feedback.settle(name)

    def _alone(self, name: str, flat: Tensor, treatment: Treatment, loss_scale: float) -> Tensor:
        """World of one: the gradient, and what is held or a larger world has left."""
        if treatment is not None and self._held_nonfinite:
            return torch.full_like(flat, torch.nan)
        if treatment is None or not self._feedback.holds(name):
            return flat
        pending = self._feedback.accumulate(name, flat, 1, loss_scale)
        delivered = pending.mul(loss_scale).to(flat.dtype)
        pending.zero_()
        self._feedback.keep(name, pending)
        return delivered
