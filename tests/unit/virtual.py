"""A data-parallel world inside the test's process: exchanges, residuals, and what they did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_ckpt.compression import Codec, Feedback
from ds_ckpt.exchange.exchange import AllToAllExchange, Order, ascending
from ds_ckpt.exchange.layout import ShardLayout
from ds_ckpt.exchange.virtual import VirtualWorld

Choose = Callable[[str, torch.Size], Codec | None]


@dataclass
class World:
    """`world` processes with an exchange and residuals each."""

    world: int
    choose: Choose
    error_feedback: bool = True
    order: Order = ascending
    holds: bool = False
    feedbacks: list[Feedback] = field(init=False)

    def __post_init__(self) -> None:
        self.virtual = VirtualWorld(self.world, timeout_s=20.0)
        self.feedbacks = [Feedback(enabled=self.error_feedback) for _ in range(self.world)]
        self.exchanges = [
            AllToAllExchange(t, self.choose, f, order=self.order, holds=self.holds)
            for t, f in zip(self.virtual.transports, self.feedbacks, strict=True)
        ]

    def reduce(
        self,
        names: Sequence[str],
        gradients: Sequence[Sequence[Tensor]],
        loss_scale: float = 1.0,
    ) -> list[list[Tensor]]:
        """`gradients[process][tensor]` -> shards `[process][tensor]`; inputs are not changed."""

        def work(p: int) -> list[Tensor]:
            return self.exchanges[p].reduce(names, [g.clone() for g in gradients[p]], loss_scale)

        return self.virtual.run(work)

    def hold(
        self,
        names: Sequence[str],
        gradients: Sequence[Sequence[Tensor]],
        loss_scale: float = 1.0,
    ) -> list[list[Tensor]]:
        """As `reduce`, for a micro-step whose exchange is put off."""
        return [
            exchange.hold(names, list(mine), loss_scale)
            for exchange, mine in zip(self.exchanges, gradients, strict=True)
        ]

    def commit(self) -> None:
        for feedback in self.feedbacks:
            feedback.commit()

    def rollback(self) -> None:
        for feedback in self.feedbacks:
            feedback.rollback()

    def residual_sum(self, name: str, numel: int) -> Tensor:
        """Committed residuals of `name`, summed over processes in float64."""
        total = torch.zeros(numel, dtype=torch.float64)
        for feedback in self.feedbacks:
            residual = feedback.state_dict().get(name)
            if residual is not None:
                total += residual.double()
        return total


def assemble(shards: Sequence[Sequence[Tensor]], tensor: int) -> Tensor:
    """The whole flat tensor from every process's shard of it."""
    return torch.cat([per_process[tensor] for per_process in shards])


def stock(gradients: Sequence[Sequence[Tensor]], order: Order = ascending) -> list[list[Tensor]]:
    """DeepSpeed's reduction, written as it does it: one padded buffer, divided, summed, cut.

    16-bit tensors are summed in fp32 and rounded once.
    """
    world = len(gradients)
    layouts = [ShardLayout(g.numel(), world) for g in gradients[0]]
    buffers = []
    for process in gradients:
        padded = []
        for owner in range(world):
            for tensor, layout in zip(process, layouts, strict=True):
                chunk = tensor.reshape(-1)[layout.shard(owner)]
                padded += [chunk, chunk.new_zeros(layout.chunk - chunk.numel())]
        buffers.append(torch.cat(padded).div(world))
    numel, dtype = buffers[0].numel(), buffers[0].dtype
    total = torch.empty(numel)
    for start, stop, processes in order(numel, dtype.itemsize, world, 0, numel):
        total[start:stop] = buffers[processes[0]][start:stop]
        for p in processes[1:]:
            total[start:stop] += buffers[p][start:stop]
    result: list[list[Tensor]] = [[] for _ in range(world)]
    start = 0
    for owner in range(world):
        for layout in layouts:
            result[owner].append(total[start : start + layout.size(owner)].to(dtype))
            start += layout.chunk
    return result
