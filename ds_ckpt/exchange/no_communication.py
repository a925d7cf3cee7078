"""The no-communication bound: an exchange that sends nothing. No compression can gain more.

For measuring only. Every process trains its shards on its own gradients, as if all the others' were
the same; weights go on being gathered, so what a step takes then is what is left when the gradients
travel in no time and in no bytes. See `Session.measure_with`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ds_ckpt.exchange.layout import ShardLayout


class NoCommunication:
    """One process's end of it; a `ds_ckpt.zero3.gradient.BucketExchange`.

    Args:
        world: number of processes in the data-parallel group.
        dp_rank: this process's index in it.
    """

    def __init__(self, world: int, dp_rank: int) -> None:
        assert 0 <= dp_rank < world
        self._world = world
        self._dp_rank = dp_rank

    def inline(self, names: Sequence[str]) -> bool:
        """False: DeepSpeed's own reduction is never asked."""
        return False

    def reduce(
        self,
        names: Sequence[str],
        tensors: list[Tensor],
        *,
        loss_scale: float,
        deepspeed_reduce: Callable[[list[Tensor]], list[Tensor]],
    ) -> list[Tensor]:
        """This process's own gradients, flat views of its shards of `tensors`."""
        shards = [ShardLayout(t.numel(), self._world).shard(self._dp_rank) for t in tensors]
        return [t.reshape(-1)[shard] for t, shard in zip(tensors, shards, strict=True)]

    def step_ended(self, *, skipped: bool) -> None:
        """Nothing is kept from step to step."""
